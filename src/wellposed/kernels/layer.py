"""A whole model ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as one node of the graph.

What torch does around a solve (a node for every product, a report for every solve) costs more than it takes to
solve a hundred samples of twenty states. Here the forward and the backward pass are one function each, for every
engine. Everything but first derivatives takes the general path, through `affine_equilibrium`.

On a device the forward pass is five launches, the backward pass about eight, whatever the number of steps; the
row-wise projection of A is part of the node.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineSolve, AffineSpec, affine_equilibrium
from wellposed.equilibrium.method import Solve
from wellposed.kernels.cpu.engine import Matrix, Numba, multiply_sparse
from wellposed.kernels.gpu.engine import Triton
from wellposed.kernels.sparse import SparseRows

Optional = Tensor | None


def run_layer(
    engine: Triton | Numba, spec: AffineSpec, radius: float | None, u: Tensor, W: Matrix, B: Matrix, C: Matrix,
    D: Matrix | None, bias: Optional,
) -> Tensor:  # fmt: skip
    """Computes the outputs ``(B, q)`` of a model.

    Args:
        engine: that has a kernel for the equation.
        spec: how it is solved.
        radius: of the l1 ball on which the rows of W are projected; None where W is A.
        u: inputs ``(B, p)``.
        W, B, C, D: matrices; where nothing is differentiated, an engine may take sparse ones.
        bias: ``(n,)``.
    """
    if torch.is_grad_enabled():
        output: Tensor = _Layer.apply((engine, spec, radius), u, W, B, C, D, bias)
        return output
    return _forward(engine, spec, radius, (u, W, B, C, D, bias), saves=False)[0]


def _forward(
    engine: Triton | Numba, spec: AffineSpec, radius: float | None, tensors: Sequence[Any], *, saves: bool
) -> tuple[Tensor, ...]:
    """Returns outputs and what the backward pass needs: one buffer, or the states and what the engine saved."""
    if isinstance(engine, Numba) and radius is not None and engine.fuses(tensors):
        return engine.forward_layer(spec, radius, tensors)
    u, W, B, C, D, bias = tensors
    with engine.threads(_work(u, B, C)):
        solve = engine.begin(spec, radius, W, _product(u, B, bias), saves=saves)
        x = solve.value
        y = _product(x, C, None)
        if D is not None:
            y = y + _product(u, D, None) if isinstance(D, SparseRows) else torch.addmm(y, u, D.t())
    solve.check(u, y)
    return y, x, *solve.saved


def _work(u: Tensor, B: Matrix, C: Matrix) -> int:
    """Counts the multiplications of a step and of the products around the solve."""
    states, inputs = B.shape
    return u.shape[0] * (states + inputs) * (states + C.shape[0])


def _product(u: Tensor, W: Matrix, bias: Optional) -> Tensor:
    return multiply_sparse(u, W, bias) if isinstance(W, SparseRows) else F.linear(u, W, bias)


class _Layer(torch.autograd.Function):
    """The outputs of a model; with slopes d the backward pass is ``y = d (A'y + C'g)`` between two products."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, AffineSpec, float | None], *tensors: Any) -> Tensor:
        y, *saved = _forward(*how, tensors, saves=True)
        ctx.how = how
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,), needs = gradients, ctx.needs_input_grad[1:]
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        (engine, spec, radius), stored = ctx.how, ctx.saved_tensors
        tensors, saved = stored[:6], stored[6:]
        if torch.is_grad_enabled():
            return None, *_differentiable(engine, spec, radius, tensors, g, needs)
        if len(saved) == 1:
            return None, *engine.backward_layer(spec, radius, tensors, saved[0], g, needs)
        with engine.threads(_work(tensors[0], *tensors[2:4])):
            return None, *_backward(engine, spec, radius, tensors, saved, g, needs)


def _backward(
    engine: Any, spec: AffineSpec, radius: float | None, tensors: Any, saved: Any, g: Tensor, needs: Sequence[bool]
) -> list[Optional]:
    """Returns the gradients by u, W, B, C, D and the bias, as far as they are needed."""
    (u, W, B, C, D, _), (x, *own) = tensors, saved  # what the engine itself has saved
    du, dW, dB, dC, dD, db = needs
    mm, gT = torch.mm, g.t()  # `@` has overhead as long as a launch
    solve = engine.begin_adjoint(spec, own, x, mm(g, C)) if du or dW or dB or db else None
    by_C, by_D = mm(gT, x) if dC else None, mm(gT, u) if dD else None
    if solve is None:
        return [None, None, None, by_C, by_D, None]
    y = solve.value
    yT = y.t()
    by_W, by_B, by_bias = mm(yT, x) if dW else None, mm(yT, u) if dB else None, y.sum(0) if db else None
    if by_W is not None and radius is not None:
        by_W = engine.project_rows_backward(W, own[1], by_W)
    by_u = None if not du else mm(y, B) if D is None else torch.addmm(mm(g, D), y, B)
    solve.check()
    return [by_u, by_W, by_B, by_C, by_D, by_bias]


def _differentiable(
    engine: Any, spec: AffineSpec, radius: float | None, tensors: Any, g: Tensor, needs: Sequence[bool]
) -> list[Optional]:
    """Computes gradients that can be differentiated, by solving once more."""
    u, W, B, C, D, bias = tensors
    v, A = F.linear(u, B, bias), W if radius is None else project_rows(W, radius)
    run = AffineSolve(spec, engine, Solve(spec.forward), trace=False)
    x = affine_equilibrium(run, v, torch.zeros_like(v), v.detach(), A)[0]
    y = F.linear(x, C) if D is None else F.linear(x, C) + F.linear(u, D)
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    gradients = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(gradients) if need else None for need in needs]
