"""ImplicitModel: ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as a module."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.conditions.certificate import AffineBound, Certificate, LowRankBound
from wellposed.conditions.conditions import Condition, Triangular, certify, get_condition
from wellposed.equilibrium.affine import AffineMap, AffineProblem, Bound, SplittingMap, affine_equilibrium
from wellposed.equilibrium.fixed_point import make_method, require_finite
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.method import Loop, Method, Once, OnFailure, active_logs
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Newton, Picard, Solver
from wellposed.equilibrium.stopping import ErrorBound, Settled, Stopping
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import InputError
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.plain import Dense, LowRank
from wellposed.kernels.compiled_op import describe
from wellposed.kernels.compiled_op import equilibrium as equilibrium_operator
from wellposed.kernels.engine import check_executor, choose_loop, solve_adjoint
from wellposed.kernels.handover import adjoint_patience
from wellposed.kernels.layer import Plan, make_plan, run_device_layer, run_layer, run_sparse_layer
from wellposed.kernels.sparse import NOTHING, Cache, sparse_parts
from wellposed.kernels.spec import tensor_problem
from wellposed.models.checks import check_matrices, choose_condition
from wellposed.models.matrix import StateMatrix, System

DIRECT = 20  # states up to which a slow backward system is factorised,
COMPILED_EASY = 64  # after so many steps of a kernel


class ImplicitModel(nn.Module):
    """Predicts ``y = Cx + Du`` where ``x`` is the equilibrium of ``x = phi(Ax + Bu + b)`` (001 eq. 1).

    A is a differentiable function of a free parameter that makes the equilibrium exist and be unique for
    every input, so any optimiser can train the model; `A` is always the matrix that is evaluated.

    Args:
        in_features, out_features, state_features: p, q and n.
        activation: phi, by name or as a registered `Activation`.
        kappa: the cap on A; times the Lipschitz constant of phi it must be below one. None only with
            ``triangular=True`` (no cap).
        condition: how A is kept well-posed: ``"inf"`` (row sums at most kappa), ``"weighted"`` (the same in
            a learned scale), ``"mu"``, ``"spectral"``, ``"monotone"``, ``"block"``.
        rank: A = L R' with this rank, never formed.
        feedthrough: whether there is a D.
        bias: whether there is a b.
        triangular: A strictly upper triangular, that is, no feedback.
        solver, stop, max_steps, gradient, on_failure: as in `fixed_point`.
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
        activation: str | Activation = "relu",
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
        sizes = {"in_features": in_features, "out_features": out_features, "state_features": state_features}
        for name, size in sizes.items():
            if type(size) is not int or not 1 <= size < 2**31:
                raise InputError(f"{name} must be a positive integer; received {size!r}")
        check_executor(executor)
        self.in_features, self.out_features, self.state_features = in_features, out_features, state_features
        self.activation = get_activation(activation)
        self.solver, self.stop, self.max_steps = solver, stop, max_steps
        self.gradient = GRADIENTS.get(Implicit() if gradient is None else gradient)
        self.on_failure, self.executor = on_failure, executor
        rule = choose_condition(condition, kappa, triangular)
        self.state = StateMatrix(state_features, self.activation, rule, kappa, rank)
        self.method()
        self.plan_cache, self.sparse_cache = Cache(), Cache()
        self.B = nn.Parameter(torch.randn(state_features, in_features) / math.sqrt(in_features))
        self.C = nn.Parameter(torch.randn(out_features, state_features) / math.sqrt(state_features))
        self.D = nn.Parameter(torch.zeros(out_features, in_features)) if feedthrough else None
        self.bias = nn.Parameter(torch.zeros(state_features)) if bias else None

    @property
    def A(self) -> Tensor:  # (n, n)
        """The matrix that is evaluated; forms L R' for a low-rank model."""
        return self.state.dense()

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
        flat = u.reshape(-1, self.in_features)
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        text = _describe(self) if compiling else None
        plan = None if under_transform() else self._fast_plan(u)
        if plan is not None:
            others, sparse = (self.B, self.C, self.D, self.bias), sparse_parts(self, u)
            if u.is_cuda:
                y = run_device_layer(plan, flat, self.state, *others)
            elif sparse is NOTHING:
                y = run_layer(plan, flat, self.state.factors()[0], *others)
            else:
                y = run_sparse_layer(plan, flat, sparse, self.state.dense, others)
            return y if u.dim() == 2 else y.reshape(*u.shape[:-1], self.out_features)
        x = self._solve(flat, None, trace=False)[0] if text is None else self._operator(flat, text)
        y = F.linear(x, self.C) if self.D is None else F.linear(x, self.C) + F.linear(flat, self.D)
        return y if u.dim() == 2 else y.reshape(*u.shape[:-1], self.out_features)

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
        value, status, steps, residuals, method = self._solve(u, x0, trace=True)
        final, inputs = value.detach(), u.detach()
        bound = lambda: self._bound()(final, self._context(inputs))  # noqa: E731
        return Solution(value, status, steps, residuals, bound, method.adjoint)

    def method(self, place: str = "", once: Once | None = None) -> Method:
        """Returns how the model solves; `place` and `once` are for solves in a sequence."""
        solver, stop = self.solver, self.stop
        if solver is None and stop is None and self.max_steps is None and self.state.nilpotent:
            # A small residual would prove little: without a cap, later states may amplify it at will.
            solver, stop = Picard(), Settled(self.state_features)
        method = make_method(solver, stop, self.max_steps, self.on_failure)
        return method if once is None else replace(method, place=place, once=once)

    def _solve(
        self, u: Tensor, x0: Tensor | None, *, trace: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Method]:
        if u.is_cuda:
            require_finite("u", u)
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(self.B.dtype)
            v = F.linear(u, self.B, self.bias)
            method, A = self.method(), sparse_parts(self, u).A
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
        bound, context = None, v.detach()
        if system.scale is not None:
            v = v * system.scale
        start = torch.zeros_like(v) if x0 is None else x0.to(v)
        if isinstance(method.stop, ErrorBound):
            bound, context = self._bound(), self._context(u.detach())
        if isinstance(self.gradient, Implicit) and self.activation.componentwise:
            if method.loop is iterate:
                method = replace(method, loop=self._loop(trace))
            problem = self._problem(system, method, self.gradient, bound, trace)
            return affine_equilibrium(problem, v, start, context, *system.factors)
        return self._solve_generally(system, method, v, start, bound, context)

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
        return make_plan(problem, self.state.raw)

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
            v = F.linear(u.to(self.B.dtype), self.B, self.bias)
            states: Tensor = equilibrium_operator(v, torch.zeros_like(v), self.state.dense(), description)[0]
            return states

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
        if not isinstance(u, Tensor) or u.dim() == 0 or u.shape[-1] != self.in_features:
            received = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
            raise InputError(f"u must have the width {self.in_features} (in_features); received {received}")
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

    def form(self) -> ImplicitForm:
        """Returns the matrices as a form that evaluates itself."""
        factors = tuple(factor.detach() for factor in self.state.factors())
        A = Dense(factors[0]) if len(factors) == 1 else LowRank(*factors)
        D, bias = (None if value is None else value.detach() for value in (self.D, self.bias))
        return ImplicitForm(A, self.B.detach(), self.C.detach(), D, bias, self.activation)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"state_features={self.state_features}, activation={self.activation.name}, "
            f"condition={self.condition.name}, kappa={self.kappa}"
        )


@torch.compiler.assume_constant_result
def _describe(model: ImplicitModel) -> str | None:
    """Writes down how a model solves, for a graph that is being compiled."""
    return model.description()
