"""The equilibria of many dense cells at once, under noise or not, and their exact gradient (004 eqs. 1, 54, 57).

Tensors have a leading member dimension, ``(M, B, n)``, and every sample of every member stops by itself. Steps
and rules are those of `Picard` with `Relative` and `MeanRelative`. What makes a batched solve of its own worth
while is that the mean of the last signals is the signal of the mean, which spares the averaged rule its products,
and that nothing depends on values where a GPU is to replay it: `solve_at_once` is two kernels a step there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wellposed_lab.experiments.noise.models import LOOSE, STEPS, TIGHT, WINDOW

FLOOR = 1e-3  # of the absolute tolerance, as a share of the relative one, as in `Relative`
RUN_OFF = 50.0  # growth of an adjoint that has no meaning any more


@dataclass(frozen=True)
class Found:
    """What a solve came to: the iterate at which it stopped, and the mean over its window."""

    value: Tensor  # (M, B, n)
    steps: Tensor  # (M, B)
    mean: Tensor  # (M, B, n)


Draw = Callable[[Tensor], Tensor]  # from the samples that are done (M, B) to noise (M, B, n)


def _tracked(candidate: Tensor, ok: Tensor, value: Tensor, done: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
    """Follows the candidate of every sample until it is accepted."""
    value = torch.where(done[..., None], value, candidate)
    return value, done | ok, steps + ~done


def _norm(x: Tensor) -> Tensor:  # (..., n) -> (...)
    return torch.linalg.vector_norm(x, dim=-1)


def _plain_step(z: Tensor, fz: Tensor, value: Tensor, done: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
    ok = _norm(fz - z) <= (TIGHT * _norm(fz)).clamp_min(FLOOR * TIGHT)
    return _tracked(z, ok, value, done, steps)


def _tanh_step(s: Tensor, z: Tensor, value: Tensor, done: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
    """Takes a step without noise and judges the state before it."""
    fz = torch.tanh(s)
    return fz, *_plain_step(z, fz, value, done, steps)


def disturbed_tanh(s: Tensor, noise: Tensor | None, amplitude: Tensor) -> Tensor:
    """Applies tanh to a signal under noise that grows with it."""
    return torch.tanh(s if noise is None else torch.addcmul(s, noise, amplitude * _norm(s)[..., None]))


def _judge_mean(
    means: tuple[Tensor, ...], new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], found: Tensor,
    value: Tensor, done: Tensor, steps: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Moves the means of states and signals over the window by one step, and judges and follows the mean state."""
    mean, signal = (m.add(n - o, alpha=1 / WINDOW) for m, n, o in zip(means, new, old, strict=True))
    f_mean = torch.tanh(signal)
    ok = _norm(f_mean - mean) <= LOOSE * _norm(f_mean)
    return mean, signal, torch.where(done[..., None], found, mean), *_tracked(new[0], ok, value, done, steps)


def _adjoint_step(
    product: Tensor, w: Tensor, g: Tensor, slope: Tensor, growth: Tensor | None, direction: Tensor | None,
    value: Tensor, done: Tensor, steps: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Takes a step of the adjoint, judges the cotangent before it, and takes the new one to the signal."""
    fw = product + g
    v = _backward_signal(fw, slope, growth, direction).to(dtype)
    return v, fw, *_plain_step(w, fw, value, done, steps)


def _backward_signal(w: Tensor, slope: Tensor, growth: Tensor | None, direction: Tensor | None) -> Tensor:
    """Takes a cotangent from the state to the signal, whose size is also that of the noise."""
    v = slope * w
    return v if growth is None or direction is None else v + direction * (growth * w).sum(-1, keepdim=True)


@lru_cache(maxsize=16)
def compiled(function: Callable[..., Any], static: bool) -> Callable[..., Any]:
    """Has a step of a fixed program fused, where it would otherwise be twenty small kernels."""
    return torch.compile(function, dynamic=False) if static else function


def _begin(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns value, done and steps of a solve that begins."""
    done = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    return torch.zeros_like(x), done, torch.zeros(done.shape, dtype=torch.int32, device=x.device)


@torch.no_grad()
def solve_plain(W: Tensor, x: Tensor) -> Found:
    """Solves ``z = tanh(W z + x)`` until the relative residual is below 1e-3 (004 Table 1, without noise).

    Args:
        W: ``(M, n, n)``.
        x: what input and bias add, ``(M, B, n)``.
    """
    z, W = torch.zeros_like(x), W.mT
    value, done, steps = _begin(x)
    for _ in range(STEPS):
        z, value, done, steps = _tanh_step(torch.baddbmm(x, z, W), z, value, done, steps)
        if bool(done.all()):
            break
    return Found(value, steps, value)


@torch.no_grad()
def solve_averaged(W: Tensor, x: Tensor, amplitude: Tensor, draw: Draw | None) -> Found:
    """Solves the same under signal noise until the mean of the last iterates is at rest to 0.05.

    Args:
        W, x: as in `solve_plain`.
        amplitude: of the noise for a signal of norm one, ``(M, 1, 1)`` or ``(M, 1, n)``.
        draw: makes the noise of a step; None for none.
    """
    z, W = torch.zeros_like(x), W.mT
    value, done, steps = _begin(x)
    found = value
    past: list[tuple[Tensor, Tensor]] = []
    for index in range(STEPS):
        s = torch.baddbmm(x, z, W)
        past = [*past[-WINDOW:], (z, s)]
        if index + 1 < WINDOW:
            steps += 1
        else:
            if index + 1 == WINDOW:  # the means over a full window, and one more step to be moved by nothing
                means = tuple(torch.stack(part).mean(0) for part in zip(*past, strict=True))
                past = [past[-1], *past]
            judged = _judge_mean(means, past[-1], past[-WINDOW - 1], found, value, done, steps)
            means, (found, value, done, steps) = judged[:2], judged[2:]
            if bool(done.all()):
                break
        z = disturbed_tanh(s, None if draw is None else draw(done), amplitude)
    return Found(value, steps, found)


@torch.no_grad()
def solve_at_once(W: Tensor, x: Tensor, amplitude: Tensor, noise: Tensor) -> Found:
    """Solves as `solve_plain` where the amplitude is zero and as `solve_averaged` elsewhere, all in one program.

    It takes all 60 steps, two kernels each, and never looks at values, for CUDA graphs. What streaming W costs is
    most of it, so on a GPU products are taken of halves: float16 has as many bits as TF32.

    Args:
        W, x, amplitude: as in `solve_averaged`.
        noise: draws for every step, ``(60, M, B, n)``.
    """
    step, noisy = compiled(_either_step, True), (amplitude > 0).any(-1, keepdim=True)
    W, (value, done, steps) = _halved(W).mT, _begin(x)
    past: list[tuple[Tensor, Tensor]] = []
    z, mean, signal, found, *before = (torch.zeros_like(x) for _ in range(6))  # not one: aliases are compiled anew
    rounded = torch.zeros_like(x, dtype=W.dtype)
    for index in range(STEPS):
        product = _product(rounded, W)
        old = past[index - WINDOW] if index >= WINDOW else before
        past.append((z, product))
        z, rounded, mean, signal, found, value, done, steps = step(
            product, x, z, *old, mean, signal, noise[index], amplitude, noisy, index + 1 >= WINDOW, found, value,
            done, steps, W.dtype,
        )  # fmt: skip
    return Found(value, steps, found)


def _either_step(
    product: Tensor, x: Tensor, z: Tensor, old: Tensor, old_product: Tensor, mean: Tensor, signal: Tensor,
    noise: Tensor, amplitude: Tensor, noisy: Tensor, full: bool, found: Tensor, value: Tensor, done: Tensor,
    steps: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Takes a step and judges the state before it, or the mean over its window if the window is full.

    The next state is returned as it is and as a product takes it.
    """
    s = product + x
    mean, signal = mean + (z - old) / WINDOW, signal + (product - old_product) / WINDOW
    fz = disturbed_tanh(s, noise, amplitude)
    ok = _norm(fz - z) <= (TIGHT * _norm(fz)).clamp_min(FLOOR * TIGHT)
    f_mean = torch.tanh(signal + x)
    at_rest = _norm(f_mean - mean) <= LOOSE * _norm(f_mean) if full else torch.zeros_like(ok)
    found = torch.where(done[..., None], found, torch.where(noisy, mean, z))
    state = fz, fz.to(dtype), mean, signal, found
    return *state, *_tracked(z, torch.where(noisy[..., 0], at_rest, ok), value, done, steps)


def _halved(W: Tensor) -> Tensor:
    """Rounds weights to float16 on a GPU."""
    return W.half() if W.is_cuda else W


def _product(z: Tensor, W: Tensor) -> Tensor:  # (M, B, n), (M, n, n) -> (M, B, n)
    """Multiplies in float32 what may be halves."""
    return torch.bmm(z, W, out_dtype=torch.float32) if W.dtype == torch.float16 else z @ W


def unrolled(W: Tensor, x: Tensor, static: bool = False) -> tuple[Tensor, Tensor]:
    """Solves as `solve_plain` does and differentiates through all steps, as `Unrolled` does; returns steps too.

    Args:
        W, x: as in `solve_plain`.
        static: whether all steps are taken by a compiled program that never looks at values, for CUDA graphs.
    """
    value, steps = _Unrolled.apply(W, x, static)
    extra = torch.tanh(torch.baddbmm(x, value, W.mT))
    return extra + (value - extra).detach(), steps


class _Unrolled(torch.autograd.Function):
    """The iterate at which a solve stops; the products of its gradient with W are one product for all steps."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, x: Tensor, static: bool) -> tuple[Tensor, Tensor]:
        step, z, past = compiled(_tanh_step, static), torch.zeros_like(x), []
        value, done, steps = _begin(x)
        for _ in range(STEPS):
            past.append(z)
            z, value, done, steps = step(torch.baddbmm(x, z, W.mT), z, value, done, steps)
            if not static and bool(done.all()):
                break
        ctx.static = static
        ctx.save_for_backward(W, torch.stack(past), steps)
        ctx.mark_non_differentiable(steps)
        return value, steps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        W, past, steps = ctx.saved_tensors  # past: (K, M, B, n)
        back, g = compiled(_unrolled_back, ctx.static), gradients[0]
        ends = steps[None] - 1 == torch.arange(len(past), device=steps.device)[:, None, None]
        carried, signals = torch.zeros_like(g), []
        for z, last in zip(past[1:].flip(0), ends[1:].flip(0), strict=True):
            signals.append(back(carried, g, z, last))
            carried = signals[-1] @ W
        if not signals:
            return torch.zeros_like(W), torch.zeros_like(g), None
        h = torch.stack(signals).flip(0)  # (K - 1, M, B, n)
        rows = [part.transpose(0, 1).flatten(1, 2) for part in (h, past[:-1])]  # (M, (K - 1) B, n)
        return rows[0].mT @ rows[1], h.sum(0), None


def _unrolled_back(carried: Tensor, g: Tensor, z: Tensor, last: Tensor) -> Tensor:
    """Takes a cotangent from a state to the signal before it; g enters at the step that was the last."""
    return (carried + torch.where(last[..., None], g, 0.0)) * (1 - z.square())


def attach(
    W: Tensor, x: Tensor, found: Found, amplitude: Tensor, noise: Tensor | None, static: bool = False
) -> Tensor:
    """Gives a solution the derivative of the implicit function theorem.

    The solution is that of the mean map ``z = E[tanh(s + a |s| xi)]``, ``s = W z + x`` (004 eq. 6). With y the
    mean over some draws of xi and g what comes back, ``w = J' w + g`` is solved to 1e-3 and handed on to s. J is
    the Jacobian of y at the mean iterate and includes that the noise grows with the signal; of a single draw it
    would be no contraction at 0 dB.

    Args:
        W, x, amplitude: as in `solve_averaged`.
        static: as in `unrolled`.
        found: the solution; what is returned has the value of its iterate.
        noise: draws, ``(K, M, B, n)``, each of which is used with its mirror image; None for none.
    """
    s = torch.baddbmm(x, found.mean, W.mT)
    jacobian: tuple[Tensor | None, ...] = (1 - torch.tanh(s.detach()).square(), None, None)
    if noise is not None:
        jacobian = compiled(_mean_jacobian, static)(s.detach(), noise, amplitude)
    attached: Tensor = _Attach.apply(s, found.value, (W.detach(), *jacobian, static))
    return attached


def _mean_jacobian(s: Tensor, noise: Tensor, amplitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of the Jacobian ``diag(slope) + growth direction'`` of the mean map by its signal."""
    size = _norm(s)[..., None]
    slope, growth = torch.zeros_like(s), torch.zeros_like(s)
    for xi in noise:
        moved = amplitude * size * xi
        up, down = (1 - torch.tanh(s + sign * moved).square() for sign in (1, -1))
        slope, growth = slope + up + down, growth + (up - down) * xi
    share, direction = 2 * len(noise), amplitude * s / size.clamp_min(torch.finfo(s.dtype).tiny)
    return slope / share, growth / share, direction


class _Attach(torch.autograd.Function):
    """Has the value of the solution and hands the solution of the adjoint equation on to the signal."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, value: Tensor, pieces: tuple[Any, ...]) -> Tensor:
        ctx.pieces = pieces
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        W, slope, growth, direction, static = ctx.pieces
        w = solve_adjoint(gradients[0], W, slope, growth, direction, static)
        return compiled(_backward_signal, static)(w, slope, growth, direction), None, None


@torch.no_grad()
def solve_adjoint(
    g: Tensor, W: Tensor, slope: Tensor, growth: Tensor | None, direction: Tensor | None, static: bool = False
) -> Tensor:
    """Solves ``w = W' (diag(slope) + direction growth') w + g`` to 1e-3, on gradients scaled to one."""
    scale = g.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    g = g / scale
    step = compiled(_adjoint_step, static)
    W, (value, done, steps) = _halved(W) if static else W, _begin(g)
    w, v = torch.zeros_like(g), torch.zeros_like(g, dtype=W.dtype)
    for _ in range(STEPS):
        v, w, value, done, steps = step(
            _product(v, W), w, g, slope, growth, direction, value, done, steps, W.dtype
        )
        if not static and bool(done.all()):
            break
    settled = _norm(value) <= RUN_OFF * _norm(g)  # not if NaN: no contraction there, one step's derivative must do
    return torch.where(settled[..., None], value, g) * scale
