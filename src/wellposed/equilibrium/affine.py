"""Equilibria of ``x = phi(Ax + v)`` with closed-form derivatives of any order.

A is given by its factors: ``(A,)`` dense or ``(L, R)`` for ``A = L R'``, which is never formed. Leading dimensions
are an ensemble: one matrix per model, ``A (M, n, n)`` with ``v (M, B, n)``. `SplittingMap` is operator splitting
for monotone systems, where plain iteration contracts too slowly to be of use; `AffineMap` and `TransposedMap` are
the plain maps of the forward and the backward pass. An `AffineSpec` says how both are solved, an `Engine` solves
them, of which `Reference` is the plain loop, and `affine_equilibrium` is the differentiable solution.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.gradients import Gradient, Implicit, row_scale
from wellposed.equilibrium.linear import solve_rows
from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.maps import Map, max_norm
from wellposed.equilibrium.method import Solve, SolveOptions
from wellposed.equilibrium.solution import Status, failed
from wellposed.equilibrium.solvers import Newton
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
    steps_per_check = 16
    may_decay = False
    min_size_to_gather = 1 << 14

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
    """Differentiates ``A x`` along changes of the factors of A; None stands for zero."""
    if len(factors) == 1:
        return torch.zeros_like(x) if changes[0] is None else x @ changes[0].mT
    (left, right), (dleft, dright) = factors, changes
    change = torch.zeros_like(x) if dleft is None else (x @ right) @ dleft.mT
    return change if dright is None else change + (x @ dright) @ left.mT


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
    contracts: bool = True
    steps_per_check = 16
    may_decay = False
    min_size_to_gather = 1 << 14

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
    contracts: bool = True
    steps_per_check = 16
    may_decay = False
    min_size_to_gather = 1 << 14

    def _linear(self, y: Tensor) -> Tensor:
        lead, (rows, n) = self.factors[0].shape[:-2], self.slope.shape
        image = product(self.factors, y.view(*lead, rows // math.prod(lead), n))
        return self.slope * image.view(y.shape)

    def __call__(self, x: Tensor) -> Tensor:
        image = self._linear(x) + self.offset
        return image if self.damping == 1 else torch.lerp(x, image, self.damping)

    def rows(self, keep: Tensor) -> "TransposedMap | None":
        if self.factors[0].dim() != 2:
            return None
        return replace(self, slope=self.slope[keep], offset=self.offset[keep])

    def jvp(self, x: Tensor, tangent: Tensor) -> Tensor:
        return torch.lerp(tangent, self._linear(tangent), self.damping)


DIRECT = 20  # states up to which a slow backward system is factorised,
EASY = 16  # after so many steps of the plain loop


@dataclass(frozen=True, eq=False)
class AffineSpec:
    """How ``x = phi(Ax + v)`` is solved, forward and backward.

    The one description that models write and that engines, autograd nodes and operators of torch read. It holds no
    tensors, so a model reuses it from call to call, and engines cache in it what they prepare.

    Attributes:
        activation: phi.
        forward: options of the solve.
        gradient: how it is differentiated.
        damping: of the map.
        splitting: step of the operator splitting that solves a monotone system; None for a plain map.
        automatic: whether the solver is ours to choose, so that slow samples may go to Newton's method.
        executor: the engine that was asked for, or ``"auto"``.
        bound: bounds errors, where the stopping rule needs that.
        points: whether accepted points are returned in place of their images, as `AffineSolve` asks for.
        checked: whether kernels evaluate some times more, and return an image of an accepted point only where
            residuals have not grown, else the point: for maps of which nobody knows whether they contract.
        prepared: a cache for engines.
    """

    activation: Activation
    forward: SolveOptions
    gradient: Gradient = field(default_factory=Implicit)
    damping: float = 1.0
    splitting: float | None = None
    automatic: bool = False
    executor: str = "auto"
    bound: Bound | None = None
    points: bool = False
    checked: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def backward(self) -> SolveOptions:
        """The options of the backward solve."""
        rule = self.gradient if isinstance(self.gradient, Implicit) else Implicit()
        options = rule.adjoint_options(self.forward)
        if self.splitting is not None and rule.solver is None:
            return replace(options, solver=Newton())
        return options

    def map(self, factors: Factors, v: Tensor, context: Tensor | None) -> Map:
        """Returns the map to iterate; the state of a splitting is phi of its fixed point."""
        if self.splitting is None:
            return AffineMap(factors, v, self.activation, self.damping, self.bound, context, not self.points)
        return SplittingMap.of(factors[0], v, self.activation, self.splitting, self.bound, context)

    @cached_property
    def of_points(self) -> "AffineSpec":
        """The same, with accepted points as results."""
        return replace(self, points=True, prepared={})

    @property
    def direct(self) -> int:
        """States up to which a slow backward system is factorised; 0 where a solver was asked for."""
        if not isinstance(self.gradient, Implicit) or self.gradient.solver is not None:
            return 0
        return DIRECT if self.splitting is None else Newton().dense


class Engine(Protocol):
    """Solves affine equations; `wellposed.kernels.engine` has them all."""

    name: str

    def why_not(self, spec: AffineSpec, factors: Factors) -> str:
        """Says why this engine cannot solve an equation with matrices like these; nothing if it can."""

    def solve(
        self, spec: AffineSpec, factors: Factors, v: Tensor, x0: Tensor | None = None, *,
        context: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves ``x = phi(Ax + v)`` on rows ``(B, n)``, from zero if `x0` is None.

        Args:
            context: what `spec.bound` needs, row by row.
            trace: whether residuals are wanted; else they are computed when asked for.
        """

    def adjoint(
        self, spec: AffineSpec, factors: Factors, g: Tensor, *, slope: Tensor | None = None,
        z: Tensor | None = None, start: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves ``y = d (My + g)`` with M from its factors, on rows of g scaled to one.

        Args:
            slope: d, or
            z: where ``d = phi'(z)``.
            start: where to begin; zero if None.
        """


class Reference:
    """The plain loop of torch: any equation, on any device, in any dtype."""

    name = "reference"

    def why_not(self, spec: AffineSpec, factors: Factors) -> str:
        """Returns nothing: it can do everything."""
        return ""

    def solve(
        self, spec: AffineSpec, factors: Factors, v: Tensor, x0: Tensor | None = None, *,
        context: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Iterates on rows ``(M B, n)``; with an ensemble, `v` is ``(M, B, n)``."""
        options, x0 = spec.forward, torch.zeros_like(v).flatten(0, -2) if x0 is None else x0
        f = spec.map(factors, v, context)
        iterates = iterate(f, x0, options.solver, options.stop, options.max_steps, masked=under_transform())
        if spec.splitting is None:
            return iterates
        return replace(iterates, value=spec.activation.function(iterates.value))

    def adjoint(
        self, spec: AffineSpec, factors: Factors, g: Tensor, *, slope: Tensor | None = None,
        z: Tensor | None = None, start: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Iterates; small systems that need many steps are factorised."""
        if slope is None:
            assert z is not None
            slope = spec.activation.slope_at(z)
        options, scale = spec.backward, row_scale(g)
        f = TransposedMap(factors, slope, slope * g / scale, spec.damping, not spec.points)
        y0 = torch.zeros_like(g) if start is None else start / scale
        small = g.shape[1] <= spec.direct and factors[0].dim() == 2 and len(factors) == 1
        limit = min(EASY, options.max_steps) if small else options.max_steps
        iterates = iterate(f, y0, options.solver, options.stop, limit)
        iterates = _factorise(f, iterates) if small else iterates
        return replace(iterates, value=iterates.value * scale)


def _factorise(f: TransposedMap, iterates: Iterates) -> Iterates:
    """Solves ``(I - d M) y = d g`` for the samples that are not finished."""
    unfinished = failed(iterates.status)
    if not bool(unfinished.any()):
        return iterates
    slope, offset = f.slope[unfinished], f.offset[unfinished]
    identity = torch.eye(slope.shape[1], dtype=slope.dtype, device=slope.device)
    y = solve_rows(identity - slope[:, :, None] * f.factors[0], offset)
    value = iterates.value.masked_scatter(unfinished[:, None], y)
    residual = max_norm(f(value) - value)
    status = torch.where(residual.isfinite(), Status.CONVERGED, Status.NONFINITE).to(torch.int8)
    status = torch.where(unfinished, status, iterates.status)
    trace = iterates.residuals.scatter(1, (iterates.steps - 1)[:, None], residual[:, None])
    return Iterates(value, status, iterates.steps, lambda: trace)


REFERENCE = Reference()


@dataclass(frozen=True)
class AffineSolve:
    """One solve of an affine equation: its spec, its engine, and where its outcome is reported."""

    spec: AffineSpec
    engine: Engine
    solve: Solve
    trace: bool = True  # whether residuals are wanted

    def forward(self, factors: Factors, v: Tensor, x0: Tensor, context: Tensor | None) -> Iterates:
        """Solves the forward equation, and logs and reports that where values can be read."""
        spec = self.spec if self.solve.hooks is None else self.spec.of_points
        iterates = self.engine.solve(spec, factors, v, x0, context=context, trace=self.trace)
        if spec.points and spec.splitting is None and spec.forward.stop.stateless:
            iterates = _with_images(iterates, spec.map(factors, v, context))
        if not under_transform():
            self.solve.note(iterates)
        return iterates

    def adjoint(
        self, factors: Factors, g: Tensor, slope: Tensor | None = None, z: Tensor | None = None
    ) -> Iterates:
        """Solves ``y = d (My + g)`` on rows of g, where d is `slope` or ``phi'(z)``; logs and reports that."""
        spec = self.spec if self.solve.hooks is None else self.spec.of_points
        engine = self.engine if factors[0].dim() == 2 and not under_transform() else REFERENCE
        start = self.solve.adjoint_start(g)
        iterates = engine.adjoint(spec, factors, g, slope=slope, z=z, start=start, trace=self.trace)
        if spec.points and spec.backward.stop.stateless:
            if slope is None:
                assert z is not None
                slope = spec.activation.slope_at(z)
            iterates = _with_images(iterates, TransposedMap(factors, slope, slope * g, spec.damping))
        self.solve.note_adjoint(iterates, spec.backward)
        return iterates


def _with_images(iterates: Iterates, f: Map) -> Iterates:
    """Replaces accepted points by their images, which are nearer to the equilibrium, and keeps the points."""
    points, accepted = iterates.value, (iterates.status == Status.CONVERGED)[:, None]
    return replace(iterates, value=torch.where(accepted, f(points), points), points=points)


@outside_compile
def affine_equilibrium(run: AffineSolve, v: Tensor, x0: Tensor, context: Tensor, *factors: Tensor) -> Any:
    """Solves ``x = phi(Ax + v)`` and returns the state, statuses, steps and residuals.

    The state is differentiable any number of times.

    Args:
        run: how to solve it.
        v: ``(B, n)``, or ``(M, B, n)`` for an ensemble.
        x0: start, in the shape of `v`.
        context: what `spec.bound` needs, row by row; anything in the shape of `v` without a bound.
        factors: of A.
    """
    if torch.is_grad_enabled() or under_transform() or under_forward_mode():
        return _Equilibrium.apply(run, v, x0, context, *factors)
    return _Equilibrium.forward(run, v, x0, context, *factors)


class _Equilibrium(torch.autograd.Function):
    """``x = phi(Ax + v)``; with d = phi'(Ax + v) the backward pass is ``y = d (A' y + g)``.

    In forward mode the tangent is the solution of ``t = d (A t + dA x + dv)``.
    """

    @staticmethod
    def forward(run: AffineSolve, v: Tensor, x0: Tensor, context: Tensor, *factors: Tensor) -> Any:
        lead, n, spec = v.shape[:-1], v.shape[-1], run.spec
        context_or_none = None if spec.bound is None else context
        iterates = run.forward(factors, v, x0.reshape(-1, n), context_or_none)
        residuals = iterates.residuals if run.trace else x0.new_zeros(iterates.status.shape[0], 0)
        residuals = residuals.reshape(*lead, residuals.shape[1])
        status, steps = iterates.status.reshape(lead), iterates.steps.reshape(lead)
        return iterates.value.reshape(*lead, n), status, steps, residuals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        run, v, _, _, *factors = inputs
        value, *reports = output
        ctx.run = run
        ctx.mark_non_differentiable(*reports)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value, v, *factors)
        ctx.save_for_forward(value, v, *factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        x, v, *factors = ctx.saved_tensors
        if torch.is_grad_enabled() or under_transform():
            y = differentiable_adjoint(ctx.run, x, v, gradients[0], tuple(factors))
        else:
            y = fast_adjoint(ctx.run, x, v, gradients[0], tuple(factors))
        return None, y, None, None, *pullback(tuple(factors), y, x)

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Any:
        x, v, *factors = saved
        _, dv, _, _, *changes = tangents
        forcing = pushforward(tuple(factors), tuple(changes), x)
        forcing = forcing if dv is None else forcing + dv
        slope = ctx.run.spec.activation.slope_at(v + product(tuple(factors), x))
        run = replace(ctx.run, solve=replace(ctx.run.solve, hooks=None))  # not the equation of the backward pass
        return _Transposed.apply(run, slope, forcing, *factors), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, run: AffineSolve, *tensors: Tensor) -> Any:
        return _vmapped(_Equilibrium, info.batch_size, in_dims[1:], run, tensors, vectors=3)


def differentiable_adjoint(run: AffineSolve, x: Tensor, v: Tensor, g: Tensor, factors: Factors) -> Tensor:
    """Solves ``y = d (A' y + g)`` with ``d = phi'(Ax + v)`` so that y can be differentiated."""
    slope = run.spec.activation.slope_at(v + product(factors, x))
    y: Tensor = _Transposed.apply(run, slope, g, *transposed(factors))
    return y


def fast_adjoint(run: AffineSolve, x: Tensor, v: Tensor, g: Tensor, factors: Factors) -> Tensor:
    """Solves the same equation as quickly as the engine can."""
    n = v.shape[-1]
    flat, z = g.reshape(-1, n), (v + product(factors, x)).reshape(-1, n)
    return run.adjoint(transposed(factors), flat, z=z).value.reshape(v.shape)


class _Transposed(torch.autograd.Function):
    """``y = d (M y + g)``; its own backward pass has the same form with M'."""

    @staticmethod
    def forward(run: AffineSolve, slope: Tensor, gradient: Tensor, *factors: Tensor) -> Tensor:
        n = slope.shape[-1]
        return run.adjoint(factors, gradient.reshape(-1, n), slope.reshape(-1, n)).value.reshape(slope.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        run, slope, gradient, *factors = inputs
        ctx.run = run
        ctx.save_for_backward(output, slope, gradient, *factors)
        ctx.save_for_forward(output, slope, gradient, *factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, slope, g, *factors = ctx.saved_tensors
        factors, (h,) = tuple(factors), gradients
        w = _Transposed.apply(ctx.run, slope, h, *transposed(factors))
        slope_gradient = (h + product(transposed(factors), w)) * (product(factors, y) + g)
        return None, slope_gradient, w, *pullback(factors, w, y)

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Any:
        """Solves ``t = d (M t + dM y + dg) + dd (M y + g)``, whose last term is split off."""
        y, slope, g, *factors = saved
        _, dslope, dg, *changes = tangents
        forcing = pushforward(tuple(factors), tuple(changes), y)
        forcing = forcing if dg is None else forcing + dg
        term = torch.zeros_like(y) if dslope is None else dslope * (product(tuple(factors), y) + g)
        forcing = forcing + product(tuple(factors), term)
        return _Transposed.apply(ctx.run, slope, forcing, *factors) + term

    @staticmethod
    def vmap(info: Any, in_dims: tuple, run: AffineSolve, *tensors: Tensor) -> Any:
        return _vmapped(_Transposed, info.batch_size, in_dims[1:], run, tensors, vectors=2)


# Function.apply looks the signature up at every call, which costs as much as several steps.
for _forward in (_Equilibrium.forward, _Transposed.forward):
    setattr(_forward, "__signature__", inspect.signature(_forward))  # noqa: B010


def _vmapped(function: Any, size: int, in_dims: tuple, run: AffineSolve, tensors: tuple, vectors: int) -> Any:
    """Runs a function under vmap: samples that share A join the batch, others form an ensemble.

    The first `vectors` tensors are ``(B, n)`` or ``(M, B, n)``, the others the factors of A.
    """
    lead = tensors[vectors].dim() - 2 - (in_dims[vectors] is not None)
    ensemble = any(d is not None for d in in_dims[vectors:])
    target = 0 if ensemble else lead
    lifted = [
        t if d is None and k >= vectors and not ensemble else _move_or_expand(t, d, target, size)
        for k, (t, d) in enumerate(zip(tensors, in_dims, strict=True))
    ]
    folds = lead == 1 if ensemble else True
    if folds:
        lifted = [t.flatten(target, target + 1) if ensemble or k < vectors else t for k, t in enumerate(lifted)]
    outputs = function.apply(run, *lifted)
    single = isinstance(outputs, Tensor)
    unfolded = [o.unflatten(target, (size, -1)) if folds else o for o in ((outputs,) if single else outputs)]
    return (unfolded[0], target) if single else (tuple(unfolded), (target,) * len(unfolded))


def _move_or_expand(tensor: Tensor, dim: int | None, target: int, size: int) -> Tensor:
    """Moves the vmapped dimension to `target`, or makes one there."""
    if dim is not None:
        return tensor.movedim(dim, target)
    return tensor.unsqueeze(target).expand(*tensor.shape[:target], size, *tensor.shape[target:])
