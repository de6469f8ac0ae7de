"""What code must know under transforms: compiled graphs, vmap, jacrev, forward mode."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from wellposed.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def under_functorch() -> bool:
    """Tells whether a function is being transformed by vmap, grad, jacrev or their kin."""
    return torch._C._functorch.maybe_current_level() is not None


def under_forward_mode() -> bool:
    """Tells whether numbers may be dual: within torch.autograd.forward_ad.dual_level, torch.func.jvp or jacfwd."""
    return forward_ad._current_level >= 0


def no_tangents() -> contextlib.AbstractContextManager[None]:
    """Computes without derivatives in forward mode, as `torch.no_grad` without those in reverse mode."""
    return forward_ad._set_fwd_grad_enabled(False)


def forward_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the ``jvp`` of an autograd function from a rule that takes the saved tensors and the tangents.

    Torch calls it with forward mode off, which would silently make the derivative of a tangent zero, as in jacfwd
    of jacfwd.
    """

    @functools.wraps(rule)
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [forward_ad.unpack_dual(tensor).primal for tensor in ctx.saved_tensors]
            return rule(ctx, saved, *tangents)

    return jvp


_NO_HOST_READS: contextvars.ContextVar[bool] = contextvars.ContextVar("wellposed_no_host_reads", default=False)


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Keeps solvers from reading values on the host in the block, as the capture of a CUDA graph needs."""
    token = _NO_HOST_READS.set(True)
    try:
        yield
    finally:
        _NO_HOST_READS.reset(token)


def under_transform() -> bool:
    """Tells whether values cannot be read on the host: inside vmap, jacrev, export or a captured program."""
    return torch.compiler.is_compiling() or under_functorch() or _NO_HOST_READS.get()


def check_traceable(model: str, fixed_steps: bool) -> None:
    """Raises if torch.export or torch.jit.trace would record a program that does not do what the model does.

    Args:
        model: its name in the message.
        fixed_steps: whether its number of steps is known (`Steps`), so that torch.export can record it.
    """
    exported = torch.compiler.is_exporting() and not fixed_steps
    if exported or torch.jit.is_tracing():  # type: ignore[attr-defined]
        tracer = "torch.export" if exported else "torch.jit.trace"
        raise InputError(
            f"{tracer} cannot record {model}, whose number of steps depends on values; give it "
            "wellposed.models.fixed_steps(model, steps), or write a file with wellposed.export_onnx"
        )


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of compiled graphs, like `torch.compiler.disable`, but costs nothing elsewhere.

    That decorator imports the whole compiler, so it is applied only at a call from compiled code.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
