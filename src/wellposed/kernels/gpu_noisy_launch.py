"""Launches the kernel for models under noise."""

import functools
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.loop import PERIOD
from wellposed.kernels.gpu import interpreted, unheard
from wellposed.kernels.gpu_calls import call
from wellposed.kernels.gpu_noisy import solve_noisy
from wellposed.kernels.recipe import AVERAGED

BLOCK = 16  # rows of a program; more have no room in the registers


@functools.lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Puts numbers on a device, where arguments of a launch would be float32."""
    return torch.tensor(values, dtype=dtype, device=device)


def launch_noisy(A: Tensor, v: Tensor, x0: Tensor, recipe: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches a solve and waits for nothing.

    Args:
        A: ``(n, n)``, in any strides.
        v, x0: ``(B, n)``.
        recipe: a `NoisyRecipe`.

    Returns:
        the states, statuses, steps, and residuals ``(max_steps, B)``.
    """
    (batch, n), plain, noise = v.shape, recipe.plain, recipe.noise
    width, slots = max(16, 1 << (n - 1).bit_length()), plain.limit if plain.rule == AVERAGED else 0
    blocks = -(-batch // BLOCK)
    v, x0, value = v.contiguous(), x0.contiguous(), torch.empty_like(v)
    status, steps = v.new_empty(batch, dtype=torch.int8), v.new_empty(batch, dtype=torch.int64)
    points = v.new_empty(slots * blocks * BLOCK * width + (plain.max_steps // PERIOD + 1) * batch)
    residuals = v.new_empty(plain.max_steps, batch)
    if batch == 0:
        return value, status, steps, residuals
    sizes = _numbers((noise.state, noise.signal, recipe.rate, recipe.decay), v.dtype, v.device)
    tensors = A, v, x0, sizes, value, status, steps, points, residuals
    eps = torch.finfo(v.dtype).eps
    numbers = batch, n, *A.stride(), plain.atol, plain.rtol, eps, plain.limit, plain.max_steps, noise.seed
    damped, split = recipe.rate != 1 or recipe.decay != 0, v.dtype == torch.float32
    constants = {
        "KIND": plain.kind, "SLOPE": plain.slope, "RULE": plain.rule, "STATED": noise.state >= 0,
        "SIGNALLED": noise.signal >= 0, "ADDITIVE": noise.additive, "HELD": noise.held, "DAMPED": damped,
        "WIDTH": width, "BLOCK": BLOCK, "SPLIT": split, "FUSED": not interpreted(),
    }  # fmt: skip
    kind = *constants.values(), n, A.stride(), v.dtype, noise.seed >> 31 == 0
    options = {"num_warps": 4 if n <= 64 else 8, "num_stages": 1}
    call(solve_noisy, blocks, kind, tensors, numbers, constants, options, unheard(v.device))
    return value, status, steps, residuals
