"""Living with transforms: compiled graphs, vmap and jacrev."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def under_functorch() -> bool:
    """Tells whether a function is being transformed by vmap, grad, jacrev or their kin."""
    return torch._C._functorch.maybe_current_level() is not None


def under_transform() -> bool:
    """Tells whether values cannot be looked at: inside vmap, jacrev or export."""
    return under_functorch() or torch.compiler.is_compiling()


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of compiled graphs; elsewhere it costs nothing, unlike the plain decorator."""
    apart = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return apart(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call
