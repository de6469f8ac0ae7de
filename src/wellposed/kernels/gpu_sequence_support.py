"""What the Triton loops over time can do, and a sentence about everything that they cannot; A in one launch."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import require
from wellposed.kernels.gpu import interpreted
from wellposed.kernels.recipe import SLOPED, kind_of
from wellposed.kernels.support import device_problem

LARGEST = 128  # states and hidden states of a block that stays on the chip


def wanted(executor: str, like: Tensor) -> bool:
    """Tells whether an executor computes tensors like this one by Triton, if it can."""
    return executor == "triton" or (executor == "auto" and like.is_cuda)


def sequence_device_problem(f: AffineMap, hidden: int) -> str:
    """Says why sequences of a map have no kernel in Triton; nothing if they have one."""
    A = f.factors[0]
    if under_transform():
        return "values cannot be looked at under vmap, torch.func and torch.compile"
    if f.damping != 1:
        return "damped maps have no kernel"
    if len(f.factors) != 1:
        return "low-rank matrices have no kernel"
    kind = kind_of(f.activation)
    if kind is None:
        return f"activation {f.activation.name} has no kernel"
    if kind[0] == SLOPED and kind[1] < 0:
        return "leaky_relu with a negative slope has no kernel on the GPU"
    if A.dtype != torch.float32:
        return f"{str(A.dtype).removeprefix('torch.')} has no kernel on the GPU"
    return size_problem(A.shape[0], hidden) or place_problem(A.device)


def size_problem(states: int, hidden: int) -> str:
    """Says why sequences are too wide for a kernel; nothing if they are not.

    Example:
        >>> size_problem(300, 4)
        'more than 128 states or hidden states have no kernel on the GPU; received 300 and 4'
    """
    if max(states, hidden) <= LARGEST:
        return ""
    return f"more than {LARGEST} states or hidden states have no kernel on the GPU; received {states} and {hidden}"


def place_problem(device: torch.device) -> str:
    """Says why no kernel can run on a device; nothing if one can."""
    if device.type == "cuda":
        return device_problem(device)
    return "" if interpreted() else f"device {device.type} has no kernel of triton"


@functools.cache
def _projection() -> ModuleType:
    return require("wellposed.kernels.gpu_projection")


def projected(W: Tensor, radius: float) -> Tensor:
    """Does what `project_rows` does, in one launch."""
    found: Tensor = _Projected.apply(W, radius)
    return found


class _Projected(torch.autograd.Function):
    """The projection of rows on the l1 ball."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, radius: float) -> Tensor:
        A, levels = _projection().project(W, radius)
        ctx.save_for_backward(W, levels)
        ctx.radius = radius
        return A

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        W, levels = ctx.saved_tensors
        if torch.is_grad_enabled():
            A = project_rows(W, ctx.radius)
            return torch.autograd.grad(A, W, gradients[0], create_graph=True)[0], None
        return _projection().project_backward(W, levels, gradients[0]), None
