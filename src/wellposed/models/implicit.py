"""ImplicitModel: ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as a module.

`StateMatrix` is A: free parameters and the map that keeps it well-posed. `choose_condition` and `check_matrices`
check the options and matrices of an `ImplicitModel`. `continued` turns a form into a model that goes on training.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.activations.blockwise import piecewise
from wellposed.conditions.certificate import AffineBound, Certificate, LowRankBound, low_rank_certificate
from wellposed.conditions.conditions import Condition, Triangular, certify, get_condition
from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineMap, AffineProblem, Bound, Factors, SplittingMap, affine_equilibrium
from wellposed.equilibrium.fixed_point import make_method, require_finite
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.method import (
    Loop,
    Method,
    OnFailure,
    WarnOnce,
    WeightCheck,
    active_logs,
    checked_under_functorch,
    no_equilibrium,
    report_outputs,
)
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Newton, Picard, Solver
from wellposed.equilibrium.stopping import STOPPINGS, ErrorBound, Relative, Settled, Steps, Stopping, bound_error
from wellposed.equilibrium.tracing import refuse_programs, under_forward_mode, under_functorch, under_transform
from wellposed.errors import IllPosedError, InputError, not_a_tensor, positive_integer
from wellposed.forms import ImplicitForm, Zero
from wellposed.forms.form import MODEL_BUILDERS
from wellposed.forms.operators.plain import Dense, LowRank
from wellposed.kernels.compiled_op import checked_outputs, describe
from wellposed.kernels.compiled_op import equilibrium as equilibrium_operator
from wellposed.kernels.engine import check_executor, choose_loop, solve_adjoint
from wellposed.kernels.handover import adjoint_patience
from wellposed.kernels.layer import (
    Plan,
    Source,
    make_plan,
    run_device_layer,
    run_layer,
    run_sparse_layer,
    source_of,
)
from wellposed.kernels.sparse import NOTHING, Cache, sparse_parts
from wellposed.kernels.spec import tensor_problem


@dataclass(frozen=True)
class System:
    """Factors of the matrix to iterate with, and how."""

    factors: Factors
    scale: Tensor | None = None  # of v = Bu + b
    damping: float = 1.0
    splitting: float | None = None


class StateMatrix(nn.Module):
    """Turns free parameters into a well-posed A: `raw`, or `left` and `right` for ``A = L R'``."""

    def __init__(
        self, size: int, activation: Activation, condition: Condition, kappa: float | None, rank: int | None
    ) -> None:
        super().__init__()
        self.activation, self.condition, self.kappa = activation, condition, kappa
        if not isinstance(condition, Triangular):
            condition.check_kappa(kappa, activation)
        elif kappa is not None and not kappa > 0:
            raise InputError(f"kappa must be positive, or None for no cap; received {kappa}")
        self.log_weights = nn.Parameter(torch.zeros(size)) if condition.name == "weighted" else None
        if rank is None:
            self.raw = nn.Parameter(torch.randn(size, size) / size)
            return
        if condition.name != "inf":
            raise InputError(f"rank goes with condition 'inf' only; received {condition.name!r}")
        if not 1 <= rank <= size:
            raise InputError(f"rank must lie between 1 and state_features={size}; received {rank}")
        self.left = nn.Parameter(torch.randn(size, rank) / rank)
        self.right = nn.Parameter(torch.randn(size, rank) / size)

    @classmethod
    def of(
        cls, A: Tensor, activation: Activation, condition: Condition, found: Certificate, kappa: float | None
    ) -> "StateMatrix":
        """Wraps a certified matrix without changing it."""
        condition = _fitting(condition, A)
        gamma = activation.lipschitz(condition.norm_name(activation))
        needed = found.value / gamma * (1 + A.shape[0] * torch.finfo(A.dtype).eps)
        cap = kappa
        if kappa is None and not isinstance(condition, Triangular):
            cap = max(0.95 / gamma, needed)
        matrix = cls(A.shape[0], activation, condition, cap, None).to(A)
        with torch.no_grad():
            matrix.raw.copy_(A)
            if matrix.log_weights is not None and found.weights is not None:
                matrix.log_weights.copy_(found.weights.log())
            if not torch.equal(matrix.dense(), A):
                raise IllPosedError(
                    f"A needs kappa of at least {needed:.6g} under condition {condition.name!r}; received {cap}"
                )
        return matrix

    def factors(self) -> Factors:
        """Returns ``(A,)`` or ``(L, R)`` with ``A = L R'``; |L R'|_inf <= |L|_inf |R'|_inf <= kappa."""
        if not (dtype := getattr(self, "raw" if hasattr(self, "raw") else "left").dtype).is_floating_point:
            raise InputError(f"the conditions are about real matrices; received {dtype}: use float32 or float64")
        if hasattr(self, "raw"):
            return (self.condition.parametrise(self.raw, self.kappa, self.activation, self.log_weights),)
        cap = self.condition.check_kappa(self.kappa, self.activation)
        return project_rows(self.left, cap), project_rows(self.right.mT, 1.0).mT

    def dense(self) -> Tensor:  # (n, n)
        """Returns A itself."""
        factors = self.factors()
        return factors[0] if len(factors) == 1 else factors[0] @ factors[1].mT

    def system(self) -> System:
        """Returns what to iterate: A itself, or an equivalent system on which the iteration converges."""
        factors = self.factors()
        if self.condition.name in ("mu", "monotone") and under_transform():
            raise InputError(
                f"condition {self.condition.name!r} chooses its iteration by the values of A, which vmap (and so "
                "an Ensemble) hides; use 'inf', 'weighted' or 'spectral' there"
            )
        if self.condition.name == "monotone":
            return System(factors, splitting=_splitting(factors[0].detach()))
        if self.condition.name == "mu" or (isinstance(self.condition, Triangular) and self.condition.diagonal):
            found = self.condition.equivalent(factors[0], self.activation)
            return System((found.A,), found.scale, found.damping)
        return System(factors)

    @property
    def nilpotent(self) -> bool:
        """Whether A is strictly triangular, so that there is no feedback."""
        return isinstance(self.condition, Triangular) and not self.condition.diagonal

    def certificate(self) -> Certificate:
        """Checks the matrix that is evaluated."""
        factors = self.factors()
        if len(factors) == 2:
            left, right = factors
            return low_rank_certificate(left.detach(), right.detach(), self.activation)
        return self.condition.certify(factors[0].detach(), self.activation)

    def bound(self, terms: int) -> AffineBound | LowRankBound:
        """Returns the error bound of a computed state."""
        with torch.no_grad():
            factors, certificate = self.factors(), self.certificate()
        if len(factors) == 2:
            return LowRankBound(certificate, factors[0], factors[1], self.activation, terms)
        return AffineBound(certificate, factors[0], self.activation, terms)

    @torch.no_grad()
    def project_(self) -> None:
        """Moves the free parameters to the values they stand for."""
        if hasattr(self, "raw"):
            self.raw.copy_(self.dense())
            return
        left, right = self.factors()
        self.left.copy_(left)
        self.right.copy_(right)


def _splitting(A: Tensor) -> float:
    """Returns the step 2 / |I - A|_2; NaN where A is not finite, which the solve then reports of every sample."""
    gap = (torch.eye(len(A), dtype=A.dtype, device=A.device) - A).to(torch.promote_types(A.dtype, torch.float32))
    return 2 / float(torch.linalg.matrix_norm(gap, 2)) if bool(gap.isfinite().all()) else math.nan


def _fitting(condition: Condition, A: Tensor) -> Condition:
    """Returns the variant of a condition whose parametrisation leaves A as it is."""
    if not isinstance(condition, Triangular):
        return condition
    return Triangular(lower=bool(A.triu(1).eq(0).all() and A.tril(-1).any()), diagonal=bool(A.diagonal().any()))


def choose_condition(condition: str | Condition, kappa: float | None, triangular: bool) -> Condition:
    """Returns the condition behind the options of a model; raises where they contradict each other."""
    rule = get_condition(condition)
    if kappa is not None and not isinstance(kappa, SupportsFloat):
        raise InputError(f"kappa must be a number; received {kappa!r}")
    if triangular:
        if rule.name not in ("inf", "triangular"):
            raise InputError(
                f"triangular=True caps rows of A and cannot be combined with condition={rule.name!r}; drop one"
            )
        return Triangular()
    if kappa is None:
        raise InputError("kappa=None (no cap on A) is possible only with triangular=True; give kappa below one")
    return rule


def check_matrices(A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None) -> None:
    """Raises unless matrices fit together, share a dtype and are finite."""
    if A.dim() != 2 or B.dim() != 2 or C.dim() != 2 or A.shape[0] != A.shape[1]:
        raise InputError(
            f"A is (n, n), B (n, p) and C (q, n); received {tuple(A.shape)}, {tuple(B.shape)}, {tuple(C.shape)}"
        )
    n, p, q = A.shape[0], B.shape[1], C.shape[0]
    expected = {"B": (B, (n, p)), "C": (C, (q, n)), "D": (D, (q, p)), "bias": (bias, (n,))}
    for name, (value, shape) in expected.items():
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise InputError(f"{name} must have the shape {shape} to fit A; received {tuple(value.shape)}")
        if value.dtype != A.dtype:
            raise InputError(f"all matrices share one dtype; A is {A.dtype} and {name} {value.dtype}")
        require_finite(name, value)


DIRECT = 20  # states up to which a slow backward system is factorised,
COMPILED_EASY = 64  # after so many steps of a kernel
MAX_STEPS = 1000  # of solves that are sure to converge


class ImplicitModel(nn.Module):
    """Predicts ``y = Cx + Du`` where ``x`` is the equilibrium of ``x = phi(Ax + Bu + b)`` (001 eq. 1).

    A is a differentiable function of a free parameter that makes the equilibrium exist and be unique for
    every input, so any optimiser can train the model; `A` is always the matrix that is evaluated.

    Args:
        in_features, out_features, state_features: p, q and n.
        activation: phi, by name, as a layer or a function of torch (``nn.ReLU()``, ``torch.relu``), or as an
            `Activation`.
        kappa: the cap on A; times the Lipschitz constant of phi it must be below one. None only with
            ``triangular=True`` (no cap).
        condition: how A is kept well-posed: ``"inf"`` (row sums at most kappa), ``"weighted"`` (the same in
            a learned scale), ``"mu"``, ``"spectral"``, ``"monotone"``, ``"block"``.
        rank: A = L R' with this rank, never formed.
        feedthrough: whether there is a D.
        bias: whether there is a b.
        triangular: A strictly upper triangular, that is, no feedback.
        solver, stop, max_steps, gradient, on_failure: as in `fixed_point`, but for 1000 steps unless told.
            `Relative` bounds the relative error: the cap tells how much larger than residuals errors may be.
        executor: ``"auto"``, ``"numba"`` or ``"triton"`` (compiled kernels or an error) or ``"reference"``, which
            forces the plain loop; `wellposed.kernels.explain` tells what ``"auto"`` does.

    Example:
        >>> model = ImplicitModel(3, 2, 8)
        >>> model(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        state_features: int,
        *,
        activation: Any = "relu",
        kappa: float | None = 0.95,
        condition: str | Condition = "inf",
        rank: int | None = None,
        feedthrough: bool = True,
        bias: bool = False,
        triangular: bool = False,
        solver: Solver | str | None = None,
        stop: Stopping | str | None = None,
        max_steps: int | None = None,
        gradient: Gradient | str | None = None,
        on_failure: OnFailure = "warn",
        executor: Literal["auto", "numba", "triton", "reference"] = "auto",
    ) -> None:
        super().__init__()
        in_features = positive_integer("in_features", in_features)
        out_features = positive_integer("out_features", out_features)
        state_features = positive_integer("state_features", state_features)
        check_executor(executor)
        self.in_features, self.out_features, self.state_features = in_features, out_features, state_features
        self.activation = get_activation(activation)
        self.solver, self.stop, self.max_steps = solver, stop, max_steps
        self.gradient = GRADIENTS.get(Implicit() if gradient is None else gradient)
        self.on_failure, self.executor = on_failure, executor
        rule = choose_condition(condition, kappa, triangular)
        self.state = StateMatrix(state_features, self.activation, rule, kappa, rank)
        self.plan_cache, self.sparse_cache, self.weight_check = Cache(), Cache(), WeightCheck()
        self.B = nn.Parameter(torch.randn(state_features, in_features) / math.sqrt(in_features))
        self.C = nn.Parameter(torch.randn(out_features, state_features) / math.sqrt(state_features))
        self.D = nn.Parameter(torch.zeros(out_features, in_features)) if feedthrough else None
        self.bias = nn.Parameter(torch.zeros(state_features)) if bias else None
        self.method()  # checks the options of solves

    @property
    def A(self) -> Tensor:  # (n, n)
        """The matrix that is evaluated; forms L R' for a low-rank model."""
        return self.state.dense()

    def state_weights(self) -> list[tuple[str, Tensor]]:
        """Returns the parameters on which the states depend, by name."""
        named = [(f"state.{name}", value) for name, value in self.state._parameters.items()]
        named += [("B", self.B), ("bias", self.bias)]
        return [(name, value) for name, value in named if value is not None]

    @property
    def kappa(self) -> float | None:
        """The cap on A."""
        return self.state.kappa

    @property
    def condition(self) -> Condition:
        """How A is kept well-posed."""
        return self.state.condition

    def certificate(self) -> Certificate:
        """Proves that every input has exactly one equilibrium, from the matrix that is evaluated."""
        return self.state.certificate()

    @torch.no_grad()
    def project_(self) -> "ImplicitModel":
        """Replaces the free parameter by the A it stands for, e.g. after an optimiser step."""
        self.state.project_()
        return self

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        self._check(u)
        if self.weight_check.failed(self.state_weights(), self.on_failure):
            return no_equilibrium(u.new_empty(*u.shape[:-1], self.out_features), self.state_weights())
        flat = u.reshape(-1, self.in_features)
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        text = _describe(self) if compiling else None
        plan = None if under_transform() or under_forward_mode() else self._fast_plan(u)
        if plan is not None:
            y = self._fast_outputs(plan, flat)
            return y if u.dim() == 2 else y.reshape(*u.shape[:-1], self.out_features)
        x = self._solve(flat, None, trace=False)[0] if text is None else self._operator(flat, text)
        y = F.linear(x, self.C) if self.D is None else F.linear(x, self.C) + F.linear(flat, self.D)
        if compiling and not u.is_cuda and self.on_failure != "ignore":
            y = checked_outputs(y, x.detach(), self.on_failure)
        elif under_functorch() and not u.is_cuda and self.on_failure != "ignore":
            y = checked_under_functorch(y, x, self.on_failure)
        elif not under_transform():
            report_outputs(y.detach(), x, self.on_failure)
        return y if u.dim() == 2 else y.reshape(*u.shape[:-1], self.out_features)

    def _fast_outputs(self, plan: Plan, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs as one node of the graph."""
        dtype = plan.dtype
        wide = dtype != self.B.dtype
        B, C = self.B.to(dtype), self.C.to(dtype)
        D, bias = (None if part is None else part.to(dtype) for part in (self.D, self.bias))
        if u.is_cuda:
            source = Source(self.state.dense().to(dtype), None) if wide else source_of(self.state)
            return run_device_layer(plan, u.to(dtype), source, B, C, D, bias).to(self.B.dtype)
        sparse = NOTHING if wide else sparse_parts(self, u)
        if sparse is NOTHING:
            A = self.state.factors()[0].to(dtype)
            return run_layer(plan, u.to(dtype), A, B, C, D, bias).to(self.B.dtype)
        return run_sparse_layer(plan, u, sparse, self.state.dense, (B, C, D, bias))

    def equilibrium(self, u: Tensor, x0: Tensor | None = None) -> Solution:  # (B, p), (B, n)
        """Computes the states and tells, per sample, how they were reached."""
        self._check(u)
        if u.dim() != 2:
            raise InputError(f"u must have the shape (batch, {self.in_features}); received {tuple(u.shape)}")
        shape = (u.shape[0], self.state_features)
        if x0 is not None and x0.shape != shape:
            raise InputError(f"x0 must have the shape {shape}; received {tuple(x0.shape)}")
        if x0 is not None:
            require_finite("x0", x0)
        if self.weight_check.failed(self.state_weights(), self.on_failure):
            return Solution.none(no_equilibrium(u.new_empty(shape), self.state_weights()))
        value, status, steps, residuals, method = self._solve(u, x0, trace=True)
        final, inputs = value.detach(), u.detach()
        bound = lambda: self._bound()(final, self._context(inputs))  # noqa: E731
        return Solution(value, status, steps, residuals, bound, method.adjoint)

    def method(self, place: str = "", once: WarnOnce | None = None) -> Method:
        """Returns how the model solves; `place` and `once` are for solves in a sequence."""
        solver, stop = self.solver, self.stop
        if solver is None and stop is None and self.max_steps is None and self.state.nilpotent:
            # A small residual would prove little: without a cap, later states may amplify it at will.
            solver, stop = Picard(), Settled(self.state_features)
        method = make_method(
            solver, stop, MAX_STEPS if self.max_steps is None else self.max_steps, self.on_failure
        )
        method = replace(method, stop=bound_error(method.stop, self.gain, self.B.dtype)[0])
        return method if once is None else replace(method, place=place, once=once)

    @property
    def gain(self) -> float:
        """How much larger than residuals errors may be: ``1 / (1 - gamma kappa)``, one without a cap."""
        rule, kappa = self.condition, self.kappa
        if kappa is None or isinstance(rule, Triangular):
            return 1.0
        return 1 / (1 - kappa * self.activation.lipschitz(rule.norm_name(self.activation)))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of solves: float64 for a float32 model whose gain makes too much of float32's rounding."""
        stop = STOPPINGS.get(Relative() if self.stop is None else self.stop)
        return bound_error(stop, self.gain, self.B.dtype)[1]

    def _solve(
        self, u: Tensor, x0: Tensor | None, *, trace: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Method]:
        if u.is_cuda:
            require_finite("u", u)
        with torch.autocast(u.device.type, enabled=False):
            u, dtype = u.to(self.B.dtype), self.compute_dtype
            v = F.linear(u.to(dtype), self.B.to(dtype), None if self.bias is None else self.bias.to(dtype))
            method, A = self.method(), sparse_parts(self, u).A if dtype == self.B.dtype else None
            if A is not None:
                loop = choose_loop(self.executor, trace=trace, automatic=self.solver is None, sparse=A)
                method = replace(method, loop=loop)
            return (*self.solve(self.state.system(), method, v, u, x0, trace=trace), method)

    def solve(
        self, system: System, method: Method, v: Tensor, u: Tensor, x0: Tensor | None = None, *, trace: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solves ``x = phi(Ax + v)`` for a system that was prepared before, perhaps for many solves.

        Args:
            system, method: from `state.system()` and the options.
            v: ``Bu + b``, ``(B, n)``.
            u: looked at only where the stopping rule is an error bound.
            x0: start, zeros if None.
            trace: whether residuals are wanted.

        Returns:
            the states, statuses, steps and residuals.
        """
        dtype, wide = self.B.dtype, self.compute_dtype
        bound, v, factors = None, v.to(wide), tuple(factor.to(wide) for factor in system.factors)
        system, context = replace(system, factors=factors), v.detach()
        if system.scale is not None:
            v = v * system.scale
        start = torch.zeros_like(v) if x0 is None else x0.to(v).where((v != 0).any(-1, keepdim=True), 0)
        if isinstance(method.stop, ErrorBound):
            bound, context = self._bound(), self._context(u.detach())
        if isinstance(self.gradient, Implicit) and self.activation.componentwise:
            if method.loop is iterate:
                method = replace(method, loop=self._loop(trace))
            problem = self._problem(system, method, self.gradient, bound, trace)
            found = affine_equilibrium(problem, v, start, context, *system.factors)
        else:
            found = self._solve_generally(system, method, v, start, bound, context)
        value, status, steps, residuals = found
        return value.to(dtype), status, steps, residuals.to(dtype)

    def _problem(
        self, system: System, method: Method, gradient: Implicit, bound: Bound | None, trace: bool
    ) -> AffineProblem:
        backward = gradient.adjoint_method(method)
        direct = DIRECT if gradient.solver is None else 0
        if system.splitting is not None and gradient.solver is None:
            backward, direct = replace(backward, solver=Newton()), Newton().dense
        if gradient.solver is not None:
            backward = replace(backward, loop=choose_loop(self.executor, trace=trace))
        compiled = method.loop is not iterate
        easy, shortcut = (COMPILED_EASY, solve_adjoint) if compiled else (AffineProblem.easy, None)
        patience = 0
        if compiled and direct:
            small = COMPILED_EASY if self.state_features <= direct else 0
            patience = adjoint_patience(self.state_features, backward, small, automatic=self.solver is None)
        parts = system.damping, direct, bound, system.splitting, trace, easy, shortcut, patience
        return AffineProblem(self.activation, method, backward, *parts)

    def _fast_plan(self, u: Tensor) -> Plan | None:
        """Returns how the whole model is one node of the graph; None if it is several."""
        state, dtype, device = self.state, self.B.dtype, u.device.type
        if active_logs() or u.dtype != dtype or u.device != self.B.device or torch.is_autocast_enabled(device):
            return None
        options = self.solver, self.stop, self.max_steps, self.gradient, self.on_failure, self.executor
        key = (*options, self.activation, state.condition, state.kappa, dtype, device)
        plan: Plan | None = self.plan_cache.get((), key, self._make_plan)
        return plan

    def _make_plan(self) -> Plan | None:
        rule = self.condition
        shifted = rule.name in ("mu", "monotone") or (isinstance(rule, Triangular) and rule.diagonal)
        if shifted or not hasattr(self.state, "raw") or not isinstance(self.gradient, Implicit):
            return None
        if self.executor == "reference" or not self.activation.componentwise:
            return None
        method = replace(self.method(), loop=self._loop(False))
        problem = self._problem(System(()), method, self.gradient, None, False)
        return make_plan(problem, torch.empty_like(self.state.raw, dtype=self.compute_dtype))

    def _loop(self, trace: bool) -> Loop:
        return choose_loop(self.executor, trace=trace, automatic=self.solver is None)

    def description(self) -> str | None:
        """Returns how the model solves, for the operator ``wellposed::equilibrium``; None without a kernel."""
        with torch.no_grad():
            system = self.state.system()
        if not isinstance(self.gradient, Implicit) or system.scale is not None or len(system.factors) != 1:
            return None
        if self.executor == "reference" or tensor_problem(self.B):
            return None
        method = replace(self.method(), loop=self._loop(False))
        return describe(self._problem(system, method, self.gradient, None, False), self.executor)

    def _operator(self, u: Tensor, description: str) -> Tensor:
        """Computes the states by one operator, which a compiled graph takes in as it is."""
        with torch.autocast(u.device.type, enabled=False):
            dtype = self.compute_dtype
            v = F.linear(u.to(dtype), self.B.to(dtype), None if self.bias is None else self.bias.to(dtype))
            A = self.state.dense().to(dtype)
            states: Tensor = equilibrium_operator(v, torch.zeros_like(v), A, description)[0]
            return states.to(self.B.dtype)

    def _solve_generally(
        self, system: System, method: Method, v: Tensor, start: Tensor, bound: Bound | None, context: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solves with a gradient that has no closed form here."""
        if self.executor in ("numba", "triton"):
            raise InputError(
                f'executor="{self.executor}" needs gradient=Implicit() and a componentwise activation; received '
                f'{type(self.gradient).__name__} and {self.activation.name}; use executor="auto"'
            )
        f: Map
        if system.splitting is None:
            f = AffineMap(system.factors, v, self.activation, system.damping, bound, context)
        else:
            f = SplittingMap.of(system.factors[0], v, self.activation, system.splitting, bound, context)
        value, found = self.gradient.solve(f, start, method)
        if system.splitting is not None:
            value = self.activation.function(value)
        return value, found.status, found.steps, found.residuals

    def _bound(self) -> AffineBound | LowRankBound:
        return self.state.bound(self.state_features + self.in_features + 2)

    def _context(self, u: Tensor) -> Tensor:  # (B, 2 n)
        """Returns v and what its rounding scales with."""
        with torch.no_grad():
            size = None if self.bias is None else self.bias.abs()
            return torch.cat([F.linear(u, self.B, self.bias), F.linear(u.abs(), self.B.abs(), size)], dim=1)

    def _check(self, u: Tensor) -> None:
        refuse_programs("an ImplicitModel", isinstance(self.stop, Steps))
        if not isinstance(u, Tensor):
            raise not_a_tensor("u", u)
        if u.dim() == 0 or u.shape[-1] != self.in_features:
            raise InputError(f"u must have the width {self.in_features} (in_features); received {tuple(u.shape)}")
        if u.is_complex() or (u.dtype != self.B.dtype and not torch.is_autocast_enabled(u.device.type)):
            raise InputError(
                f"u is {u.dtype} and the model {self.B.dtype}; convert one of them: u.to(...) or model.to(...)"
            )
        # On a GPU a look at values is a wait: there a solve that fails blames its inputs.
        if not under_transform() and not u.is_cuda and not math.isfinite(u.detach().sum()):
            require_finite("u", u)

    @classmethod
    def from_matrices(
        cls,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        **options: Any,
    ) -> "ImplicitModel":
        """Builds a model that evaluates exactly these matrices.

        Never changes A: raises `IllPosedError` if no condition proves it well-posed. Without `condition` the
        first one that holds is kept; without `kappa` the cap is 0.95 or, if larger, what A needs.

        Args:
            A, B, C, D: ``(n, n)``, ``(n, p)``, ``(q, n)`` and ``(q, p)``.
            bias: ``(n,)``.
            options: keywords of the constructor, except those that the matrices decide.

        Example:
            >>> model = ImplicitModel.from_matrices(0.5 * torch.eye(2), torch.ones(2, 1), torch.ones(1, 2))
            >>> model(torch.ones(1, 1)).detach()
            tensor([[4.]])
        """
        check_matrices(A, B, C, D, bias)
        if options.get("rank") is not None:
            raise InputError("from_matrices keeps A as it is, in full; leave rank out")
        activation = get_activation(options.pop("activation", "relu"))
        triangular = options.pop("triangular", False)
        wanted = "triangular" if triangular else options.pop("condition", None)
        found = certify(A, activation, wanted)
        kappa = options.pop("kappa", None)
        model = cls(
            B.shape[1],
            C.shape[0],
            A.shape[0],
            activation=activation,
            kappa=0.95 / max(1.0, activation.constants.get("inf", 1.0)),  # of a matrix that is replaced below
            feedthrough=D is not None,
            bias=bias is not None,
            **options,
        )
        model = model.to(A)
        model.state = StateMatrix.of(A, activation, get_condition(found.condition), found, kappa)
        with torch.no_grad():
            for name, value in (("B", B), ("C", C), ("D", D), ("bias", bias)):
                if value is not None:
                    getattr(model, name).copy_(value)
        return model

    def form(self, *, detach: bool = True) -> ImplicitForm:
        """Returns the matrices as a form that evaluates itself, with gradients of the parameters if asked for."""
        given: tuple[Any, ...] = (*self.state.factors(), self.B, self.C, self.D, self.bias)
        *factors, B, C, D, bias = (v.detach() if detach and v is not None else v for v in given)
        A = Dense(factors[0]) if len(factors) == 1 else LowRank(*factors)
        return ImplicitForm(A, B, C, D, bias, self.activation)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"state_features={self.state_features}, activation={self.activation.name}, "
            f"condition={self.condition.name}, kappa={self.kappa}"
        )


def _describe(model: ImplicitModel) -> str | None:
    """Writes down how a model solves, for a graph that is being compiled."""
    return model.description()


# What torch.compiler.assume_constant_result does, which imports the whole compiler to do so.
setattr(_describe, "_dynamo_marked_constant", True)  # noqa: B010


LARGEST = 2 << 30  # bytes of a dense A


def continued(
    form: ImplicitForm, *, feedback: bool = True, kappa: float | None = None, **options: Any
) -> ImplicitModel:
    """Builds a model that computes what a form computes, with all entries of A free to train.

    A network without loops is rescaled first so that ``|A|_inf`` stays below the cap and its outputs stay the
    same (003, section 2.5); training may then add feedback. An output bias becomes one state of constant value.

    Args:
        form: up to some twenty thousand states, since A is formed.
        feedback: False keeps a strictly triangular A triangular, without a cap.
        kappa: the cap on A; by default 0.95 over the Lipschitz constant of phi or, if larger, what A needs.
        options: keywords of `ImplicitModel`.

    Example:
        >>> A = torch.tensor([[0.0, 8.0], [0.0, 0.0]])
        >>> model = continued(ImplicitForm(A, torch.eye(2), torch.ones(1, 2)))
        >>> model.A.detach()
        tensor([[0.0000, 0.5000],
                [0.0000, 0.0000]])
    """
    n = form.sizes[0]
    if n * n * form.A.dtype.itemsize > LARGEST:
        raise InputError(
            f"a model holds A in full: {n} states make {n * n * form.A.dtype.itemsize / 2**30:.1f} GiB, more than "
            f"{LARGEST >> 30}; convert a smaller network, or train the network and convert it afterwards"
        )
    if n == 0:
        raise InputError("the form has no states: a linear map needs no equilibrium; train a torch.nn.Linear")
    if not feedback:
        options["triangular"] = True
    elif not form.order.loops or form.certificate().condition == "triangular":
        form = _capped(form, kappa)
    A, B, C = (block.to_dense() for block in (form.A, form.B, form.C))
    bias, activation = form.bias, form.activation
    if form.output_bias is not None and bool(form.output_bias.any()):
        A, B, C, bias, activation = _with_constant(form, A, B, C)
    D = None if isinstance(form.D, Zero) else form.D.to_dense()
    if kappa is not None:
        options["kappa"] = kappa
    return ImplicitModel.from_matrices(A, B, C, D, bias=bias, activation=activation, **options)


def _capped(form: ImplicitForm, kappa: float | None) -> ImplicitForm:
    """Rescales where the rows of A are above the cap."""
    steepest = form.activation.lipschitz()
    if math.isinf(steepest):
        raise InputError(
            f"{form.activation.name} has no Lipschitz constant, so no cap on A keeps a model well-posed; the form "
            "itself can be evaluated and saved"
        )
    cap = 0.95 / max(1.0, steepest) if kappa is None else kappa
    return form if float(form.A.abs().row_sums().max()) < cap else form.rescale(cap)


def _with_constant(
    form: ImplicitForm, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Activation]:
    """Adds a state whose value is a constant, which C multiplies by the output bias."""
    n = len(A)
    phi, value = form.activation, torch.ones(1, dtype=A.dtype, device=A.device)
    single = phi.componentwise and len(set(form.activations)) == 1
    if single and float(phi(value)) != 0:
        value = phi(value)
    else:
        phi = piecewise((*form.activations, get_activation("identity")), (*form.partition, 1))
    bias = A.new_zeros(n) if form.bias is None else form.bias
    assert form.output_bias is not None
    return (
        torch.nn.functional.pad(A, (0, 1, 0, 1)),
        torch.nn.functional.pad(B, (0, 0, 0, 1)),
        torch.cat([C, (form.output_bias / value)[:, None]], dim=1),
        torch.cat([bias, torch.ones(1, dtype=A.dtype, device=A.device)]),
        phi,
    )


MODEL_BUILDERS.append(continued)
