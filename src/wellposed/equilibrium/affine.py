"""Equilibria of ``x = phi(Ax + v)`` with closed-form derivatives of any order.

A is given by its factors: ``(A,)`` dense or ``(L, R)`` for ``A = L R'``, which is never formed. Leading dimensions
are an ensemble: one matrix per model, ``A (M, n, n)`` with ``v (M, B, n)``. `SplittingMap` is operator splitting
for monotone systems, where plain iteration contracts too slowly to be of use; `AffineMap` and `TransposedMap` are
the plain maps of the forward and the backward pass. An `AffineProblem` says how both are solved, and
`affine_equilibrium` solves them.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.gradients import row_scale
from wellposed.equilibrium.linear import solve_rows
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.maps import Map, max_norm
from wellposed.equilibrium.method import Method
from wellposed.equilibrium.solution import Status, failed
from wellposed.equilibrium.tracing import forward_rule, outside_compile, under_forward_mode, under_transform


@dataclass(frozen=True)
class SplittingMap(Map):
    """The Peaceman-Rachford map of ``x = P(Ax + v)`` for a projection P on an interval.

    With ``V = ((1 + a) I - a A)^-1`` iterates ``z <- z + 2 (V (2x - z + a v) - x)``, ``x = P(z)``
    (Winston and Kolter 2020, section 3.2). Its fixed points give the equilibria ``x = P(z)``, and it
    contracts for every ``a > 0`` if the symmetric part of A is below the identity.
    """

    resolvent: Tensor  # V, (n, n) or (M, n, n)
    offset: Tensor  # a v, (B, n) or (M, B, n)
    activation: Activation
    bound: Callable[[Tensor, Tensor], Tensor] | None = None
    context: Tensor | None = None
    block = 16
    fades = False
    bulk = 1 << 14

    @classmethod
    def of(
        cls,
        A: Tensor,
        v: Tensor,
        activation: Activation,
        step: float,
        bound: Callable[[Tensor, Tensor], Tensor] | None = None,
        context: Tensor | None = None,
    ) -> "SplittingMap":
        """Builds the map for a step a; see `AffineMap` for bound and context."""
        identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        wide = torch.promote_types(A.dtype, torch.float32)  # no half precision has an inverse
        resolvent = torch.linalg.inv(((1 + step) * identity - step * A).to(wide)).to(A.dtype)
        return cls(resolvent, step * v, activation, bound, context)

    def __call__(self, x: Tensor) -> Tensor:
        z, state = x.view(self.offset.shape), self.activation.function(x).view(self.offset.shape)
        image = (2 * state - z + self.offset) @ self.resolvent.mT
        return torch.add(z, image - state, alpha=2).view(x.shape)

    def rows(self, keep: Tensor) -> "SplittingMap | None":
        if self.offset.dim() != 2:
            return None
        context = None if self.context is None else self.context[keep]
        return replace(self, offset=self.offset[keep], context=context)

    def error_bound(self, x: Tensor, fx: Tensor) -> Tensor | None:
        if self.bound is None or self.context is None:
            return None
        return self.bound(self.activation.function(x), self.context)


Factors = tuple[Tensor, ...]


def product(factors: Factors, x: Tensor) -> Tensor:
    """Multiplies every row of `x` by A."""
    if len(factors) == 1:
        return x @ factors[0].mT
    left, right = factors
    return (x @ right) @ left.mT


def transposed(factors: Factors) -> Factors:
    """Returns the factors of A'."""
    return (factors[0].mT,) if len(factors) == 1 else (factors[1], factors[0])


def pullback(factors: Factors, y: Tensor, x: Tensor) -> Factors:
    """Differentiates ``sum(y * A x)`` by the factors of A."""
    if len(factors) == 1:
        return (y.mT @ x,)
    left, right = factors
    return y.mT @ (x @ right), x.mT @ (y @ left)


def pushforward(factors: Factors, changes: tuple[Tensor | None, ...], x: Tensor) -> Tensor:
    """Differentiates ``A x`` along changes of the factors of A, of which None is none."""
    if len(factors) == 1:
        return torch.zeros_like(x) if changes[0] is None else x @ changes[0].mT
    (left, right), (dleft, dright) = factors, changes
    found = torch.zeros_like(x) if dleft is None else (x @ right) @ dleft.mT
    return found if dright is None else found + (x @ dright) @ left.mT


Bound = Callable[[Tensor, Tensor], Tensor]  # (x, context) -> (B,), see AffineMap.context


@dataclass(frozen=True)
class AffineMap(Map):
    """The map ``x -> (1 - damping) x + damping phi(Ax + v)`` on ``(M B, n)`` rows."""

    factors: Factors
    v: Tensor  # (B, n) or (M, B, n)
    activation: Activation
    damping: float = 1.0
    bound: Bound | None = None
    context: Tensor | None = None  # (B, 2 n): v and |B||u| + |b| of the certified system, for the bound
    block = 16
    fades = False
    bulk = 1 << 14

    def _preactivation(self, x: Tensor) -> Tensor:
        if self.v.dim() == 2 and len(self.factors) == 1:
            return torch.addmm(self.v, x, self.factors[0].mT)
        return (self.v + product(self.factors, x.view(self.v.shape))).view(x.shape)

    def __call__(self, x: Tensor) -> Tensor:
        image = self.activation.function(self._preactivation(x))
        return image if self.damping == 1 else torch.lerp(x, image, self.damping)

    def rows(self, keep: Tensor) -> "AffineMap | None":
        if self.v.dim() != 2:
            return None
        context = None if self.context is None else self.context[keep]
        return replace(self, v=self.v[keep], context=context)

    def jvp(self, x: Tensor, tangent: Tensor) -> Tensor:
        slope = self.activation.slope_at(self._preactivation(x))
        image = slope * product(self.factors, tangent.view(self.v.shape)).view(x.shape)
        return torch.lerp(tangent, image, self.damping)

    def error_bound(self, x: Tensor, fx: Tensor) -> Tensor | None:
        return None if self.bound is None or self.context is None else self.bound(x, self.context)


@dataclass(frozen=True)
class TransposedMap(Map):
    """The map ``y -> d (A' y + g)`` of the backward pass."""

    factors: Factors  # of A'
    slope: Tensor
    offset: Tensor  # d g
    damping: float
    block = 16
    fades = False
    bulk = 1 << 14

    def _linear(self, y: Tensor) -> Tensor:
        return self.slope * product(self.factors, y.view(self._shape)).view(y.shape)

    @property
    def _shape(self) -> torch.Size:
        lead = self.factors[0].shape[:-2]
        return torch.Size((*lead, self.slope.shape[0] // math.prod(lead), self.slope.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        image = self._linear(x) + self.offset
        return image if self.damping == 1 else torch.lerp(x, image, self.damping)

    def rows(self, keep: Tensor) -> "TransposedMap | None":
        if self.factors[0].dim() != 2:
            return None
        return replace(self, slope=self.slope[keep], offset=self.offset[keep])

    def jvp(self, x: Tensor, tangent: Tensor) -> Tensor:
        return torch.lerp(tangent, self._linear(tangent), self.damping)


@dataclass(frozen=True)
class AffineProblem:
    """How ``x = phi(Ax + v)`` is solved, forward and backward."""

    activation: Activation
    forward: Method
    backward: Method
    damping: float = 1.0
    direct: int = 0  # states up to which a slow backward system is factorised
    bound: Bound | None = None
    splitting: float | None = None  # step of the operator splitting that solves a monotone system
    trace: bool = True  # whether residuals are wanted
    easy: int = 16  # steps after which factorising a small system is cheaper than iterating on
    shortcut: "Shortcut | None" = None  # to the backward solution
    patience: int = 0  # steps after which the shortcut factorises what is not finished; 0: never

    def solve(self, v: Tensor, x0: Tensor, context: Tensor, factors: Factors) -> Iterates:
        """Solves the forward equation on flat rows."""
        known = None if self.bound is None else context
        if self.splitting is None:
            f = AffineMap(factors, v, self.activation, self.damping, self.bound, known)
            return self.forward.solve(f, x0)
        split = SplittingMap.of(factors[0], v, self.activation, self.splitting, self.bound, known)
        found = self.forward.solve(split, x0)
        return replace(found, value=self.activation.function(found.value))


Shortcut = Callable[[AffineProblem, Tensor, Tensor, Tensor, Factors], Tensor | None]


@outside_compile
def affine_equilibrium(problem: AffineProblem, v: Tensor, x0: Tensor, context: Tensor, *factors: Tensor) -> Any:
    """Solves ``x = phi(Ax + v)`` and returns the state, statuses, steps and residuals.

    Args:
        problem: how to solve it.
        v: ``(B, n)``, or ``(M, B, n)`` for an ensemble.
        x0: start, in the shape of `v`.
        context: what `problem.bound` needs, row by row; anything in the shape of `v` without a bound.
        factors: of A.
    """
    if under_transform() or under_forward_mode():
        return _Equilibrium.apply(problem, v, x0, context, *factors)
    if torch.is_grad_enabled():
        return _EagerEquilibrium.apply(problem, v, x0, context, *factors)
    return _Equilibrium.forward(problem, v, x0, context, *factors)


class _Equilibrium(torch.autograd.Function):
    """``x = phi(Ax + v)``; with d = phi'(Ax + v) the backward pass is ``y = d (A' y + g)``.

    In forward mode the tangent is the solution of ``t = d (A t + dA x + dv)``.
    """

    @staticmethod
    def forward(problem: AffineProblem, v: Tensor, x0: Tensor, context: Tensor, *factors: Tensor) -> Any:
        lead, n = v.shape[:-1], v.shape[-1]
        found = problem.solve(v, x0.reshape(-1, n), context, factors)
        residuals = found.residuals if problem.trace else x0.new_zeros(found.status.shape[0], 0)
        residuals = residuals.reshape(*lead, residuals.shape[1])
        return found.value.reshape(*lead, n), found.status.reshape(lead), found.steps.reshape(lead), residuals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        problem, v, _, _, *factors = inputs
        value, *reports = output
        ctx.problem = problem
        ctx.mark_non_differentiable(*reports)
        ctx.save_for_backward(value, v, *factors)
        ctx.save_for_forward(value, v, *factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, v, *factors = ctx.saved_tensors
        y = differentiable_adjoint(ctx.problem, x, v, gradients[0], tuple(factors))
        return None, y, None, None, *pullback(tuple(factors), y, x)

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Any:
        x, v, *factors = saved
        _, moved, _, _, *changes = tangents
        driven = pushforward(tuple(factors), tuple(changes), x)
        driven = driven if moved is None else driven + moved
        slope = ctx.problem.activation.slope_at(v + product(tuple(factors), x))
        return _Transposed.apply(ctx.problem, slope, driven, *factors), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, problem: AffineProblem, *tensors: Tensor) -> Any:
        return _vmapped(_Equilibrium, info.batch_size, in_dims[1:], problem, tensors, vectors=3)


class _EagerEquilibrium(torch.autograd.Function):
    """The same without functorch, whose preparations cost as much as a small solve."""

    @staticmethod
    def forward(ctx: Any, problem: AffineProblem, v: Tensor, x0: Tensor, context: Tensor, *factors: Tensor) -> Any:
        output = _Equilibrium.forward(problem, v, x0, context, *factors)
        _Equilibrium.setup_context(ctx, (problem, v, x0, context, *factors), output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() or under_transform():
            return _Equilibrium.backward(ctx, *gradients)
        x, v, *factors = ctx.saved_tensors
        y = eager_adjoint(ctx.problem, x, v, gradients[0], tuple(factors))
        return None, y, None, None, *pullback(tuple(factors), y, x)


def differentiable_adjoint(problem: AffineProblem, x: Tensor, v: Tensor, g: Tensor, factors: Factors) -> Tensor:
    """Solves ``y = d (A' y + g)`` with ``d = phi'(Ax + v)`` so that y can be differentiated."""
    slope = problem.activation.slope_at(v + product(factors, x))
    y: Tensor = _Transposed.apply(problem, slope, g, *transposed(factors))
    return y


def eager_adjoint(problem: AffineProblem, x: Tensor, v: Tensor, g: Tensor, factors: Factors) -> Tensor:
    """Solves the same equation as quickly as possible."""
    y = None if problem.shortcut is None else problem.shortcut(problem, x, v, g, factors)
    if y is not None:
        return y
    slope = problem.activation.slope_at(v + product(factors, x))
    return _Transposed.forward(problem, slope, g, *transposed(factors))


class _Transposed(torch.autograd.Function):
    """``y = d (M y + g)``; its own backward pass has the same form with M'."""

    @staticmethod
    def forward(problem: AffineProblem, slope: Tensor, gradient: Tensor, *factors: Tensor) -> Tensor:
        n = slope.shape[-1]
        flat, g = slope.reshape(-1, n), gradient.reshape(-1, n)
        scale = row_scale(g)
        f = TransposedMap(factors, flat, flat * g / scale, problem.damping)
        method = problem.backward
        small = n <= problem.direct and factors[0].dim() == 2 and len(factors) == 1
        found = _finish_directly(f, method, problem.easy) if small else method.run(f, torch.zeros_like(flat))
        method.note_adjoint(found)
        return (found.value * scale).reshape(slope.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        problem, slope, gradient, *factors = inputs
        ctx.problem = problem
        ctx.save_for_backward(output, slope, gradient, *factors)
        ctx.save_for_forward(output, slope, gradient, *factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, slope, g, *factors = ctx.saved_tensors
        factors, (h,) = tuple(factors), gradients
        w = _Transposed.apply(ctx.problem, slope, h, *transposed(factors))
        slope_gradient = (h + product(transposed(factors), w)) * (product(factors, y) + g)
        return None, slope_gradient, w, *pullback(factors, w, y)

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Any:
        """Solves ``t = d (M t + dM y + dg) + dd (M y + g)``, whose last part is split off."""
        y, slope, g, *factors = saved
        _, bent, moved, *changes = tangents
        driven = pushforward(tuple(factors), tuple(changes), y)
        driven = driven if moved is None else driven + moved
        part = torch.zeros_like(y) if bent is None else bent * (product(tuple(factors), y) + g)
        driven = driven + product(tuple(factors), part)
        return _Transposed.apply(ctx.problem, slope, driven, *factors) + part

    @staticmethod
    def vmap(info: Any, in_dims: tuple, problem: AffineProblem, *tensors: Tensor) -> Any:
        return _vmapped(_Transposed, info.batch_size, in_dims[1:], problem, tensors, vectors=2)


# Function.apply looks the signature up at every call, which costs as much as several steps.
for _forward in (_Equilibrium.forward, _Transposed.forward):
    setattr(_forward, "__signature__", inspect.signature(_forward))  # noqa: B010


def _finish_directly(f: TransposedMap, method: Method, easy: int) -> Iterates:
    """Iterates a few steps and factorises ``I - d M`` for the samples that need more."""
    found = replace(method, max_steps=min(easy, method.max_steps)).run(f, torch.zeros_like(f.slope))
    rest = failed(found.status)
    if not bool(rest.any()):
        return found
    slope, offset = f.slope[rest], f.offset[rest]
    identity = torch.eye(slope.shape[1], dtype=slope.dtype, device=slope.device)
    y = solve_rows(identity - slope[:, :, None] * f.factors[0], offset)
    value = found.value.masked_scatter(rest[:, None], y)
    residual = max_norm(f(value) - value)
    status = torch.where(residual.isfinite(), Status.CONVERGED, Status.NONFINITE).to(torch.int8)
    status = torch.where(rest, status, found.status)
    trace = found.residuals.scatter(1, (found.steps - 1)[:, None], residual[:, None])
    return Iterates(value, status, found.steps, lambda: trace)


def _vmapped(
    function: Any, size: int, in_dims: tuple, problem: AffineProblem, tensors: tuple, vectors: int
) -> Any:
    """Runs a function under vmap: samples that share A join the batch, others form an ensemble.

    The first `vectors` tensors are ``(B, n)`` or ``(M, B, n)``, the others the factors of A.
    """
    lead = tensors[vectors].dim() - 2 - (in_dims[vectors] is not None)
    ensemble = any(d is not None for d in in_dims[vectors:])
    place = 0 if ensemble else lead
    lifted = [
        t if d is None and k >= vectors and not ensemble else _at(t, d, place, size)
        for k, (t, d) in enumerate(zip(tensors, in_dims, strict=True))
    ]
    folds = lead == 1 if ensemble else True
    if folds:
        lifted = [t.flatten(place, place + 1) if ensemble or k < vectors else t for k, t in enumerate(lifted)]
    outputs = function.apply(problem, *lifted)
    single = isinstance(outputs, Tensor)
    unfolded = [o.unflatten(place, (size, -1)) if folds else o for o in ((outputs,) if single else outputs)]
    return (unfolded[0], place) if single else (tuple(unfolded), (place,) * len(unfolded))


def _at(tensor: Tensor, dim: int | None, place: int, size: int) -> Tensor:
    """Moves the vmapped dimension to `place`, or makes one there."""
    if dim is not None:
        return tensor.movedim(dim, place)
    return tensor.unsqueeze(place).expand(*tensor.shape[:place], size, *tensor.shape[place:])
