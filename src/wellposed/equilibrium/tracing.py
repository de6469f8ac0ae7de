"""Living with transforms: compiled graphs, vmap and jacrev."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def under_functorch() -> bool:
    """Tells whether a function is being transformed by vmap, grad, jacrev or their kin."""
    return torch._C._functorch.maybe_current_level() is not None


_UNSEEN: contextvars.ContextVar[bool] = contextvars.ContextVar("wellposed_unseen", default=False)


@contextlib.contextmanager
def values_unseen() -> Iterator[None]:
    """Has solvers look at no value in the block, as the capture of a CUDA graph needs."""
    token = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(token)


def under_transform() -> bool:
    """Tells whether values cannot be looked at: inside vmap, jacrev, export or a captured program."""
    return under_functorch() or torch.compiler.is_compiling() or _UNSEEN.get()


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of compiled graphs; elsewhere it costs nothing, unlike the plain decorator.

    The decorator is applied at the call, since it imports the whole compiler.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
