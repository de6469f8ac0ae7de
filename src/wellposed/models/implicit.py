"""ImplicitModel: ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as a module."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import get_activation
from wellposed.conditions.certificate import Certificate
from wellposed.conditions.conditions import (
    Condition,
    IterationSystem,
    StateBound,
    StateMatrix,
    certify,
    check_matrices,
    choose_condition,
)
from wellposed.equilibrium import (
    GRADIENTS,
    ErrorBound,
    Gradient,
    Implicit,
    Picard,
    Solution,
    Solver,
    Steps,
    Stopping,
)
from wellposed.equilibrium.affine import (
    AffineSolve,
    AffineSpec,
    affine_equilibrium,
)
from wellposed.equilibrium.method import (
    NotFiniteError,
    OnFailure,
    Solve,
    SolveHooks,
    SolveOptions,
    WeightCheck,
    active_logs,
    make_options,
    no_equilibrium,
    require_finite,
)
from wellposed.equilibrium.stopping import Settled, bound_error
from wellposed.equilibrium.tracing import check_traceable, under_forward_mode, under_transform
from wellposed.errors import InputError, not_a_tensor, positive_integer
from wellposed.forms import Dense, ImplicitForm, LowRank, Zero, absorb_output_bias, cap_rows
from wellposed.kernels.compiled_op import check_outputs, equilibrium_op, write_spec
from wellposed.kernels.engine import NUMBA, Compiled, check_executor, choose, compiled_engine, explain
from wellposed.kernels.layer import run_layer
from wellposed.kernels.sparse import (
    LEAST,
    NOTHING,
    Cache,
    SparseModel,
    SparseRows,
    describe,
    faster,
    sparse_matrices,
)

MAX_STEPS = 1000  # of solves that are sure to converge
LARGEST = 2 << 30  # bytes of a dense A


class _Layer(NamedTuple):
    """How the outputs are computed as one node of the graph."""

    spec: AffineSpec
    engine: Compiled | None  # has a kernel for the equation of A itself; None if there is none
    radius: float | None  # of the l1 ball on which the engine projects the rows of the free parameter


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
        condition: what makes A well-posed: ``"inf"`` (row sums at most kappa), ``"weighted"`` (the same in
            a learned scale), ``"mu"``, ``"spectral"``, ``"monotone"``, ``"block"``.
        rank: A = L R' with this rank, never formed.
        feedthrough: whether there is a D.
        bias: whether there is a b.
        triangular: A strictly upper triangular, that is, no feedback.
        solver, stop, max_steps, gradient, on_failure: as in `fixed_point`, but with 1000 steps by default.
            `Relative` bounds the relative error: the cap says how much larger than residuals errors may be.
        executor: ``"auto"``, ``"numba"`` or ``"triton"`` (compiled kernels or an error) or ``"reference"``, which
            forces the plain loop; `explain` says what ``"auto"`` does.

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
        self.hooks: Callable[[], SolveHooks] | None = None  # makes those of every solve
        self._specs, self._sparse, self.weight_check = Cache(), Cache(), WeightCheck()
        self.B = nn.Parameter(torch.randn(state_features, in_features) / math.sqrt(in_features))
        self.C = nn.Parameter(torch.randn(out_features, state_features) / math.sqrt(state_features))
        self.D = nn.Parameter(torch.zeros(out_features, in_features)) if feedthrough else None
        self.bias = nn.Parameter(torch.zeros(state_features)) if bias else None
        self.options()  # checks them

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
        """The condition that makes A well-posed."""
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
        B = _parameter(self, "B")
        self._check_tensor(u, B.dtype)
        rows = u if u.dim() == 2 else u.reshape(-1, self.in_features)
        y = self._fused_outputs(rows, B) if self._runs_plainly(u, B) else None
        if y is None:
            self._check_values(u)
            if self.weight_check.failed(self.state_weights(), self.on_failure):
                if self.hooks is not None:
                    self.hooks()  # the model was called, though nothing is solved
                return no_equilibrium(u.new_empty(*u.shape[:-1], self.out_features), self.state_weights())
            y = self._outputs(rows)
        return y if u.dim() == 2 else y.reshape(*u.shape[:-1], self.out_features)

    def _runs_plainly(self, u: Tensor, B: Tensor) -> bool:
        """Returns whether a solve is not observed, transformed or cast, so that it may be part of a kernel."""
        if under_transform() or under_forward_mode() or self.hooks is not None or active_logs():
            return False
        device = u.device
        return u.dtype == B.dtype and device == B.device and not torch.is_autocast_enabled(device.type)

    def _layer(self) -> _Layer:
        """Returns how the outputs are computed as one node of the graph, which is looked up once."""
        spec, dtype = self._prepared()
        layer: _Layer | None = spec.prepared.get("layer")
        if layer is None:
            state = self.state
            whole = not state.shifted and hasattr(state, "raw")
            engine = compiled_engine(spec, (self._like(),)) if whole else None
            projects = engine is not None and dtype == self.B.dtype and dtype in engine.projects
            layer = _Layer(spec, engine, state.row_radius if projects else None)
            if not NUMBA.is_compiling:
                spec.prepared["layer"] = layer
        return layer

    def _fused_outputs(self, u: Tensor, B: Tensor) -> Tensor | None:  # (B, p) -> (B, q)
        """Computes the outputs by kernels that project the rows of A and check values; None if they cannot."""
        spec, engine, radius = self._layer()
        if engine is None or radius is None or not (engine is NUMBA or u.is_cuda):
            return None
        large = self.state_features >= LEAST and not self._needs_gradient(u)
        if large and self._sparse_matrices(u) is not NOTHING:
            return None
        try:
            raw = _parameter(self._modules["state"], "raw")
            C, D, bias = _parameter(self, "C"), _parameter(self, "D"), _parameter(self, "bias")
            return run_layer(engine, spec, radius, u, raw, B, C, D, bias)
        except NotFiniteError:
            return None

    def _outputs(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs for values that have been checked."""
        engine = self._layer().engine if self._runs_plainly(u, self.B) else None
        if engine is not None:
            return self._outputs_of_A(engine, u)
        text = _spec_text(self) if torch.compiler.is_compiling() and not torch.compiler.is_exporting() else None
        x = self._solve(u, None, trace=False)[0] if text is None else self._solve_in_graph(u, text)
        y = F.linear(x, self.C) if self.D is None else F.linear(x, self.C) + F.linear(u, self.D)
        return check_outputs(y, x, self.on_failure)

    def _outputs_of_A(self, engine: Compiled, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs as one node of the graph from A, in the dtype of solves, or from sparse rows."""
        (spec, dtype), own = self._prepared(), self.B.dtype
        if dtype != own:
            D, bias = (None if matrix is None else matrix.to(dtype) for matrix in (self.D, self.bias))
            A, B, C = (matrix.to(dtype) for matrix in (self.state.dense(), self.B, self.C))
            return run_layer(engine, spec, None, u.to(dtype), A, B, C, D, bias).to(own)
        sparse = self._sparse_matrices(u)
        matrices = self.state.dense() if sparse.A is None else sparse.A, self.B, self.C, self.D
        chosen = [matrix if rows is None else rows for rows, matrix in zip(sparse, matrices, strict=True)]
        return run_layer(engine, spec, None, u, *chosen, self.bias)  # type: ignore[call-arg, arg-type]

    def equilibrium(self, u: Tensor, x0: Tensor | None = None) -> Solution:  # (B, p), (B, n)
        """Computes the states and, per sample, how they were reached."""
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
        value, status, steps, residuals, run = self._solve(u, x0, trace=True)
        final, inputs = value.detach(), u.detach()
        bound = lambda: self._bound()(final, self._context(inputs))  # noqa: E731
        return Solution(value, status, steps, lambda: residuals, bound, run.adjoint)

    def options(self) -> SolveOptions:
        """Returns how the model solves."""
        return self._options()[0]

    def _options(self) -> tuple[SolveOptions, torch.dtype]:
        """Returns how the model solves, and in which dtype."""
        solver, stop = self.solver, self.stop
        if solver is None and stop is None and self.max_steps is None and self.state.nilpotent:
            # A small residual would prove little: without a cap, later states may amplify it at will.
            solver, stop = Picard(), Settled(self.state_features)
        steps = MAX_STEPS if self.max_steps is None else self.max_steps
        options = make_options(solver, stop, steps, self.on_failure)
        stop, dtype = bound_error(options.stop, self.gain, self.B.dtype)
        return replace(options, stop=stop), dtype

    def spec(self) -> AffineSpec:
        """Returns how the model solves ``x = phi(Ax + v)``, forward and backward."""
        return self._prepared()[0]

    def spec_of(self, system: IterationSystem, bound: StateBound | None = None) -> AffineSpec:
        """Returns the same for what A stands for, with an error bound."""
        if bound is None and system.splitting is None and system.damping == 1:
            return self.spec()
        return replace(self.spec(), damping=system.damping, splitting=system.splitting, bound=bound, prepared={})

    def _prepared(self) -> tuple[AffineSpec, torch.dtype]:
        """Returns the spec and the dtype of solves, made anew when options have changed."""
        state: Any = self._modules["state"]
        like, cache = _parameter(self, "B"), self._specs
        options = self.solver, self.stop, self.max_steps, self.gradient, self.on_failure, self.executor
        key = (*options, self.activation, state, state.condition, state.kappa, like.dtype, like.device)
        entry = cache.entry
        if entry is None or entry[0] != key:
            solving, dtype = self._options()
            automatic, executor = self.solver is None, self.executor
            spec = AffineSpec(self.activation, solving, self.gradient, automatic=automatic, executor=executor)
            entry = cache.entry = key, (spec, dtype)
        prepared: tuple[AffineSpec, torch.dtype] = entry[1]
        return prepared

    def _like(self) -> Tensor:
        """Returns an uninitialised A."""
        return self.B.new_empty(self.state_features, self.state_features, dtype=self.compute_dtype)

    @property
    def gain(self) -> float:
        """How much larger than residuals errors may be: ``1 / (1 - gamma kappa)``, one without a cap."""
        rule, kappa = self.condition, self.kappa
        if kappa is None or rule.name == "triangular":
            return 1.0
        return 1 / (1 - kappa * self.activation.lipschitz(rule.norm_name(self.activation)))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of solves: float64 for a float32 model whose gain amplifies float32's rounding too much."""
        return self._prepared()[1]

    def explain(self, u: Tensor) -> str:
        """Says which engine computes ``model(u)``, and why those before it do not, one line each.

        Args:
            u: inputs, of which only shape, dtype, device and whether they require gradients count. The answer is
                for now: under ``torch.no_grad()`` sparse products may be taken that have no derivatives.

        Example:
            >>> ImplicitModel(3, 2, 8, executor="reference").explain(torch.zeros(5, 3))
            'reference: executor="reference" was asked for'
        """
        with torch.no_grad():
            system = self.state.system()
        spec = self.spec_of(system)
        dtype, batch = self.compute_dtype, u.shape[:-1].numel()
        more = ""
        if dtype != self.B.dtype:
            more = f"kappa={self.kappa:g} may amplify the rounding of float32 {self.gain:.0f} times"
        elif self._may_be_sparse():
            needs, automatic = self._needs_gradient(u), self.solver is None
            sparse = self._known_sparse()
            more = describe(sparse, self.state.dense(), batch, differentiated=needs, automatic=automatic)
        return explain(spec, tuple(factor.to(dtype) for factor in system.factors), batch, more)

    def _solve(self, u: Tensor, x0: Tensor | None, *, trace: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Solve]:
        if u.is_cuda:
            require_finite("u", u)
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(self.B.dtype)
            v, sparse = self._injection(u), None
            if v.dtype == self.B.dtype:
                sparse = self._sparse_matrices(u).A
            hooks = None if self.hooks is None else self.hooks()
            run = Solve(self.spec().forward, hooks=None if x0 is not None or under_transform() else hooks)
            return (*self.solve(self.state.system(), run, v, u, x0, trace=trace, sparse=sparse), run)

    def solve(
        self, system: IterationSystem, run: Solve, v: Tensor, u: Tensor, x0: Tensor | None = None, *,
        trace: bool = True, sparse: SparseRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Solves ``x = phi(Ax + v)`` for a prepared system, which many solves may share.

        Args:
            system: from `state.system()`.
            run: the options, and where the outcome is reported.
            v: ``Bu + b``, ``(B, n)``.
            u: read only where the stopping rule is an error bound.
            x0: start, zeros if None.
            trace: whether residuals are wanted.
            sparse: A as sparse rows, where these are faster.

        Returns:
            the states, statuses, steps and residuals.
        """
        dtype, wide = self.B.dtype, self.compute_dtype
        v, factors = v.to(wide), tuple(factor.to(wide) for factor in system.factors)
        context, bound = v.detach(), None
        if system.scale is not None:
            v = v * system.scale
        start = torch.zeros_like(v)
        x0 = run.hooks.start(start.to(dtype)) if run.hooks is not None else x0
        start = start if x0 is None else x0.to(v).where((v != 0).any(-1, keepdim=True), 0)
        if isinstance(run.options.stop, ErrorBound):
            bound, context = self._bound(), self._context(u.detach())
        spec = self.spec_of(system, bound)
        engine = choose(spec, factors)
        engine = replace(NUMBA, sparse=sparse) if sparse is not None and engine is NUMBA else engine
        if isinstance(self.gradient, Implicit) and self.activation.componentwise:
            result = affine_equilibrium(AffineSolve(spec, engine, run, trace), v, start, context, *factors)
            value, status, steps, residuals = result
        else:
            value, iterates = self.gradient.solve(spec.map(factors, v, context), start, run)
            value = value if spec.splitting is None else self.activation.function(value)
            status, steps, residuals = iterates.status, iterates.steps, iterates.residuals
        return value.to(dtype), status, steps, residuals.to(dtype)

    def spec_text(self) -> str | None:
        """Describes how the model solves as text, for operators of torch; None without a kernel."""
        spec = self.spec()
        if self.state.shifted or not hasattr(self.state, "raw") or self.executor == "reference":
            return None
        return None if NUMBA.no_kernel(spec, (self._like(),)) else write_spec(spec)

    def _solve_in_graph(self, u: Tensor, text: str) -> Tensor:
        """Computes the states by one operator, which a compiled graph takes in as it is."""
        with torch.autocast(u.device.type, enabled=False):
            v = self._injection(u)
            states: Tensor = equilibrium_op(v, torch.zeros_like(v), self.state.dense().to(v), text)[0]
            return states.to(self.B.dtype)

    def _injection(self, u: Tensor) -> Tensor:  # (B, n)
        """Returns ``Bu + b`` in the dtype of solves."""
        dtype = self.compute_dtype
        return F.linear(u.to(dtype), self.B.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _may_be_sparse(self) -> bool:
        """Returns whether sparse products may be taken at all: numba has a kernel, and A can be read."""
        if self.state_features < LEAST or under_transform() or self._layer().engine is not NUMBA:
            return False
        # Changes to tensors made in inference mode are not counted.
        return not any(tensor is not None and tensor.is_inference() for tensor in self._tensors())

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.state.raw, self.state.log_weights, self.B, self.C, self.D, self.bias

    def _needs_gradient(self, u: Tensor) -> bool:
        tensors = (u, *self._tensors())
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def _known_sparse(self) -> SparseModel:
        settings, matrices = (self.condition, self.kappa, self.activation), (self.B, self.C, self.D)
        return sparse_matrices(self._sparse, self._tensors(), settings, lambda: (self.state.dense(), *matrices))

    def _sparse_matrices(self, u: Tensor) -> SparseModel:
        """Returns the matrices whose sparse products are faster for a batch, none where derivatives are needed."""
        if not self._may_be_sparse() or self._needs_gradient(u):
            return NOTHING
        return faster(self._known_sparse(), u.shape[:-1].numel())

    def _bound(self) -> StateBound:
        return self.state.bound(self.state_features + self.in_features + 2)

    def _context(self, u: Tensor) -> Tensor:  # (B, 2 n)
        """Returns v and what its rounding scales with."""
        with torch.no_grad():
            size = None if self.bias is None else self.bias.abs()
            return torch.cat([F.linear(u, self.B, self.bias), F.linear(u.abs(), self.B.abs(), size)], dim=1)

    def _check(self, u: Tensor) -> None:
        self._check_tensor(u, self.B.dtype)
        self._check_values(u)

    def _check_tensor(self, u: Tensor, dtype: torch.dtype) -> None:
        check_traceable("an ImplicitModel", isinstance(self.stop, Steps))
        if not isinstance(u, Tensor):
            raise not_a_tensor("u", u)
        if u.dim() == 0 or u.shape[-1] != self.in_features:
            raise InputError(f"u must have the width {self.in_features} (in_features); received {tuple(u.shape)}")
        if u.is_complex() or (u.dtype != dtype and not torch.is_autocast_enabled(u.device.type)):
            raise InputError(
                f"u is {u.dtype} and the model {dtype}; convert one of them: u.to(...) or model.to(...)"
            )

    def _check_values(self, u: Tensor) -> None:
        # On a GPU reading a value synchronises with the device; there a failed solve blames its inputs.
        if not u.is_cuda:
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
        first one that holds is used; without `kappa` the cap is 0.95 or, if larger, what A needs.

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
        proof = certify(A, activation, wanted)
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
        model.state = StateMatrix.of(A, activation, proof, kappa)
        with torch.no_grad():
            for name, value in (("B", B), ("C", C), ("D", D), ("bias", bias)):
                if value is not None:
                    getattr(model, name).copy_(value)
        return model

    @classmethod
    def from_form(
        cls, form: ImplicitForm, *, feedback: bool = True, kappa: float | None = None, **options: Any
    ) -> "ImplicitModel":
        """Builds a model that computes what a form computes, with all entries of A free to train.

        A network without loops is rescaled first so that ``|A|_inf`` stays below the cap and its outputs stay the
        same (003, section 2.5); training may then add feedback. An output bias becomes a state of constant value.

        Args:
            form: up to some twenty thousand states, since A is formed.
            feedback: False keeps a strictly triangular A triangular, without a cap.
            kappa: the cap on A; by default 0.95 over the Lipschitz constant of phi or, if larger, what A needs.
            options: keywords of `ImplicitModel`.

        Example:
            >>> A = torch.tensor([[0.0, 8.0], [0.0, 0.0]])
            >>> model = ImplicitModel.from_form(ImplicitForm(A, torch.eye(2), torch.ones(1, 2)))
            >>> model.A.detach()
            tensor([[0.0000, 0.5000],
                    [0.0000, 0.0000]])
        """
        n = form.sizes[0]
        if (size := n * n * form.A.dtype.itemsize) > LARGEST:
            raise InputError(
                f"a model holds A in full: {n} states make {size / 2**30:.1f} GiB, more than "
                f"{LARGEST >> 30}; convert a smaller network, or train the network and convert it afterwards"
            )
        if n == 0:
            raise InputError("the form has no states: a linear map needs no equilibrium; train a torch.nn.Linear")
        if not feedback:
            options["triangular"] = True
        elif not form.order.loops or form.certificate().condition == "triangular":
            form = cap_rows(form, kappa)
        form = absorb_output_bias(form)
        A, B, C = (block.to_dense() for block in (form.A, form.B, form.C))
        D = None if isinstance(form.D, Zero) else form.D.to_dense()
        if kappa is not None:
            options["kappa"] = kappa
        return cls.from_matrices(A, B, C, D, bias=form.bias, activation=form.activation, **options)

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


def _parameter(module: Any, name: str) -> Any:
    """Returns an attribute, most often a parameter, for which nn.Module would search as long as a step takes."""
    value = module._parameters.get(name)
    return getattr(module, name) if value is None else value


def _spec_text(model: ImplicitModel) -> str | None:
    """Describes how a model solves as text, for a graph that is being compiled."""
    return model.spec_text()


# What torch.compiler.assume_constant_result does, which imports the whole compiler to do so.
setattr(_spec_text, "_dynamo_marked_constant", True)  # noqa: B010
