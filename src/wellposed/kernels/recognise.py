"""Recognises ``x -> phi(Ax + v)`` in a function of the user, so that kernels solve its equation.

The function is run once, at x = 0, while torch reports its operations. Products of x with matrices add up to A,
and the argument of the activation at zero is v. After an operation on x that is not in the tables below the
function counts as not recognised. What torch does not report (scripted code, custom derivatives, threads) cannot
do harm: at its solution every equation is compared with the function itself. Derivatives are compared in the first
two solves of a function that are differentiated, then ever more rarely.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.affine import AffineSpec
from wellposed.equilibrium.gradients import FirstOnly, Implicit, LinearMap, row_scale
from wellposed.equilibrium.loop import RUN_OFF, Iterates, iterate
from wellposed.equilibrium.maps import FunctionMap, Map, max_norm
from wellposed.equilibrium.method import NotFiniteError, Solve, SolveOptions
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Step, Stopping
from wellposed.kernels.cpu.engine import saved_matrices
from wellposed.kernels.engine import NUMBA

PRODUCTS = ("matmul", "mm", "__matmul__")
SUMS = {"add": 1, "__add__": 1, "__radd__": 1, "sub": -1, "__sub__": -1, "__rsub__": -1}  # sign of the second
SCALINGS = ("mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "neg", "__neg__")
ACTIVATIONS = ("relu", "tanh", "sigmoid")  # with kernels, as torch and the catalogue call them
QUESTIONS = ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")  # which no value answers
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")


class NotAffineError(Exception):
    """A function does something else with x, or has no kernel; the message says what.

    Args:
        passing: whether its kernels are only being compiled.
    """

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(eq=False)
class AffineEquation:
    """The equation ``x = phi(Ax + v)`` of a function f, which is not kept: it keeps the equation.

    Attributes:
        graph: v and A as f has computed them, with what they depend on; A and v are without.
        lipschitz: bounds the Lipschitz constant of f, by ``|A|_inf``.
        compares: whether its derivative at the solution is compared with that of f.
        saved: what the backward pass of a small equation needs, once it is solved from zero.
    """

    graph: tuple[Tensor, Tensor]
    A: Tensor  # (n, n)
    v: Tensor  # (B, n)
    activation: Activation
    lipschitz: float
    compares: bool = False
    saved: Tensor | None = None

    def __str__(self) -> str:
        return f"x = {self.activation.name}(Ax + v) by {NUMBA.name}"

    def solve(self, f: FunctionMap, x0: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates | None:
        """Solves the forward equation; None where the plain loop might judge otherwise.

        Raises:
            NotAffineError: f is something else.
        """
        spec = self._spec(solver, stop, max_steps)
        start = x0.clone() if bool(x0.any()) else None  # a copy, since residuals are computed when asked for
        iterates = self._solve_small(spec) if start is None else None
        if iterates is None:
            iterates = NUMBA.solve(spec, (self.A,), self.v, start)
        x = iterates.value
        self._compare(f, x, stop, lambda: self.activation.function(self._argument(x)))
        if self.compares:
            self._compare_derivatives(f, x)
        if start is None and self.lipschitz < 0.999:  # |f(0)| / (1 + L) <= |x| <= |f(0)| / (1 - L)
            return iterates
        first = max_norm(self.activation.function(self.v) if start is None else f(x0) - x0)
        return None if _unusual(iterates, max_norm(x0) + first, first, stop) else iterates

    def adjoint(
        self, f: LinearMap, x: Tensor, start: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> Iterates | None:
        """Solves ``w = A' d w + g`` by ``y = d (A'y + g)``, of which ``w = A'y + g``; as `solve`.

        That w is a step further than y, so where steps are counted the plain loop takes them.
        """
        if not stop.certifies:
            return None
        spec, z, g = self._spec(solver, stop, max_steps), self._argument(x), f.offset
        begin = self.activation.slope_at(z) * start if bool(start.any()) else None
        iterates = NUMBA.adjoint(spec, (self.A.mT,), g, z=z, start=begin)
        w = torch.addmm(g, iterates.value, self.A)
        self._compare(f, w, stop, lambda: torch.addmm(g, self.activation.slope_at(z) * w, self.A))
        iterates, first = replace(iterates, value=w), max_norm(g if begin is None else f(start) - start)
        return None if _unusual(iterates, max_norm(start) + first, first, stop) else iterates

    def _solve_small(self, spec: AffineSpec) -> Iterates | None:
        """Solves from zero in one call; None if the equation is not small, or not finite."""
        if not NUMBA.fuses((self.v, self.A, None, self.A)):
            return None
        with contextlib.suppress(NotFiniteError):
            iterates, self.saved = NUMBA.solve_small(spec, self.A, self.v)
            return iterates
        return None

    def attach(self, x: Tensor, solve: Solve, options: SolveOptions) -> Tensor | None:
        """Returns the solution with its gradient; None if that of f itself has to be taken.

        That is so where the equation is not small, is solved from elsewhere than zero or has hooks.
        """
        if self.saved is None or solve.hooks is not None:
            return None
        v, A = self.graph
        if not (v.requires_grad or A.requires_grad):
            return x
        spec = self._spec(options.solver, options.stop, options.max_steps)
        if NUMBA.no_kernel(spec, (self.A,)):
            return None
        n, L = x.shape[1], self.lipschitz
        # In the 1-norm A'd contracts by L, so that |g| / (1 + nL) <= |w| <= n |g| / (1 - L) in the largest entry.
        usual = 1 + n * L < 1e3 and n < RUN_OFF * (1 - L)
        value: Tensor = _EquationGradient.apply(v, A, x, self.saved, spec, solve, options, usual)
        return value

    def _spec(self, solver: Solver, stop: Stopping, max_steps: int) -> AffineSpec:
        return _spec(self.activation, solver, stop, max_steps, self.lipschitz >= 1)

    def _argument(self, x: Tensor) -> Tensor:
        return torch.addmm(self.v, x, self.A.mT)

    @staticmethod
    def _compare(f: Map, x: Tensor, stop: Stopping, image: Callable[[], Tensor]) -> None:
        """Raises unless f itself meets the stopping rule at x, or f(x) is the image of x up to rounding."""
        fx = f(x)
        if stop.stateless and bool(stop.check(Step(x, fx, f, max_norm(fx - x), 0), ())[0].all()):
            return
        other = image()
        near = max_norm(fx - other) <= 4 * f.rounding(x, fx)
        finite = fx.isfinite().all(1) | other.isfinite().all(1)
        if bool((finite & ~near).any()):
            raise NotAffineError("elsewhere it has other values or derivatives than this form")

    def _compare_derivatives(self, f: FunctionMap, x: Tensor) -> None:
        """Raises unless ``J'w`` is ``A'dw`` up to rounding, for a w that avoids corners of phi."""
        z, eps = self._argument(x), f.eps(x)
        near = z.abs() <= 64 * eps * (max_norm(z) + max_norm(x))[:, None]
        w = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype).expand_as(x).masked_fill(near, 0)
        mine = (self.activation.slope_at(z) * w) @ self.A
        # Hooks of the caller, such as those of checkpointing, are not to see this graph.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            point = x.detach().clone().requires_grad_()
            (other,) = torch.autograd.grad(f(point), point, w, allow_unused=True)
        other = torch.zeros_like(x) if other is None else other
        size = 1.5 * float(self.A.abs().sum(0).amax()) if x.shape[1] else 0.0
        finite = mine.isfinite() & other.isfinite()
        if bool((finite & ((mine - other).abs() > 16 * x.shape[1] ** 0.5 * eps * (1 + size))).any()):
            raise NotAffineError("its derivative is another than that of this form")


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _EquationGradient(torch.autograd.Function):
    """Returns the solution, with the gradients by v and A of the implicit function theorem."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, A: Tensor, x: Tensor, saved: Tensor, spec: AffineSpec, solve: Solve,
        options: SolveOptions, usual: bool,
    ) -> Tensor:  # fmt: skip
        ctx.solved = saved, spec, solve, options, usual
        ctx.graph = v, A  # `saved` holds what these had computed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (saved, spec, solve, options, usual), (g,), needed = ctx.solved, gradients, torch.is_grad_enabled()
        with torch.no_grad():
            *results, worst, make = NUMBA.adjoint_small(spec, saved, g, ctx.needs_input_grad[1])
            iterates: Any = _Deferred(worst, make)
            if not usual:
                first = (max_norm(g) > 0).to(g.dtype)
                if _unusual(iterates, first, first, options.stop):
                    *results, iterates = _adjoint_by_loop(saved, spec.activation, g, options)
        solve.note_adjoint(iterates, options)
        if needed:
            pairs = zip(results, ctx.graph, strict=True)
            results = [None if one is None else FirstOnly.apply(one, like) for one, like in pairs]
        return *results, None, None, None, None, None, None


class _Deferred:
    """Stands for iterates of which seldom more than the largest status is asked for."""

    def __init__(self, worst: int, make: Callable[[], Iterates]) -> None:
        self.worst, self.made = worst, functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by those who copy, before there is anything
            raise AttributeError(name)
        return getattr(self.made(), name)


def _adjoint_by_loop(
    saved: Tensor, activation: Activation, g: Tensor, options: SolveOptions
) -> tuple[Tensor, Tensor, Iterates]:
    """Computes what `Numba.adjoint_small` does, by the plain loop."""
    x, v, A = saved_matrices(saved, *g.shape)
    scale, slope = row_scale(g), activation.slope_at(torch.addmm(v, x, A.mT))
    f = LinearMap(lambda w: (slope * w) @ A, g / scale, torch.finfo(g.dtype).eps)
    iterates = iterate(f, torch.zeros_like(g), options.solver, options.stop, options.max_steps)
    y = slope * iterates.value * scale
    return y, y.mT @ x, iterates


def _unusual(iterates: Iterates, scale: Tensor, first: Tensor, stop: Stopping) -> bool:
    """Tells whether a state has grown or decayed so much that the plain loop reads its residual differently."""
    size = max_norm(iterates.value)
    return stop.certifies and bool(((size > RUN_OFF * scale) | (size < 1e-3 * first)).any())


@functools.lru_cache(maxsize=64)
def _spec(activation: Activation, solver: Solver, stop: Stopping, max_steps: int, checked: bool) -> AffineSpec:
    """Describes the solves of an equation: the backward one, too, takes the steps that it is asked for."""
    options = SolveOptions(solver, stop, max_steps)
    return AffineSpec(activation, options, Implicit(solver, stop, max_steps), checked=checked)


def affine_equation(f: FunctionMap, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> AffineEquation:
    """Returns the equation of a function of the user.

    Raises:
        NotAffineError: it has another form, or there is no kernel for it.
    """
    if not f.plain:
        raise NotAffineError("states are not rows of one tensor")
    before = torch.get_rng_state()
    try:
        with torch.set_grad_enabled(f.differentiated), _Operations(torch.zeros_like(x)) as operations:
            result = f.function(operations.state, *f.inputs)
    except Exception as error:  # the loop meets it where it matters
        raise NotAffineError(f"it raises {type(error).__name__} at x = 0") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise NotAffineError("it draws random numbers")
    A, v, activation = operations.equation(result)
    graph = v, A
    A, v = A.detach().clone(), v.detach()  # parameters may change before residuals are asked for
    spec = _spec(activation, solver, stop, max_steps, True)
    if reason := NUMBA.why_not(spec, (A,)):
        raise NotAffineError(reason, passing=not NUMBA.no_kernel(spec, (A,)))
    return AffineEquation(graph, A, v, activation, activation.lipschitz() * float(A.abs().sum(1).amax()))


class _Operations(TorchFunctionMode):
    """Follows the operations on a state: which results are ``Ax + v``, and which are phi of one.

    Args:
        state: zeros, from which the function computes.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state, self.reason = state, ""  # why the function is not of this form
        self.differentiated = torch.is_grad_enabled()
        # By the id of a result; the results are kept, so that no id is used twice.
        self.sums: dict[int, tuple[Tensor, Tensor | None]] = {id(state): (state, None)}  # with A; None: identity
        self.images: dict[int, tuple[Tensor, tuple[Tensor, Tensor, Activation]]] = {}

    def equation(self, result: Any) -> tuple[Tensor, Tensor, Activation]:
        """Returns A, v and phi of what the function has returned."""
        if self.reason:
            raise NotAffineError(self.reason)
        if id(result) in self.images:
            A, v, activation = self.images[id(result)][1]
        elif id(result) in self.sums:
            A, v, activation = self._matrix(result), result, get_activation("identity")
        else:
            raise NotAffineError("its result does not depend on x")
        alike = all(type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided for value in (A, v))
        fits = A.shape == 2 * v.shape[1:] and A.dtype == v.dtype == self.state.dtype and v.device == A.device
        if not alike or not fits or v.shape != self.state.shape:
            raise NotAffineError("A or v is not a plain tensor of the shape, dtype and device of x")
        return A, v, activation

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, getattr(function, "__name__", "")
        result = function(*args, **options)
        if options.get("generator") is not None:
            self.reason = "it draws random numbers"
        if self.reason or not any(self._depends(value) for value in (*args, *options.values())):
            return result
        owner = getattr(function, "__self__", None)
        if name in QUESTIONS or (name == "__get__" and getattr(owner, "__name__", "") in PROPERTIES):
            return result
        try:
            if torch.is_grad_enabled() != self.differentiated:
                raise NotAffineError("a part of it is not differentiated")
            matrix = self._after(name, args, options)
            if isinstance(matrix, Activation):
                self.images[id(result)] = result, (self._matrix(args[0]), args[0], matrix)
            else:
                self.sums[id(result)] = result, matrix
        except NotAffineError as error:  # the function goes on: it may have begun something
            self.reason = str(error)
        return result

    def _depends(self, value: Any) -> bool:
        if isinstance(value, tuple | list):
            return any(self._depends(entry) for entry in value)
        return id(value) in self.sums or id(value) in self.images

    def _matrix(self, value: Any) -> Tensor:
        """Returns A of an argument ``Ax + v``."""
        if id(value) not in self.sums:
            raise NotAffineError("it goes on after an activation")
        matrix = self.sums[id(value)][1]
        return torch.eye(self.state.shape[1]).to(self.state) if matrix is None else matrix

    def _after(self, name: str, args: Any, options: dict[str, Any]) -> Tensor | Activation:
        """Returns A of a result, or the activation that it is an image of."""
        if name in ACTIVATIONS and all(value is False for value in (*args[1:], *options.values())):  # inplace
            return get_activation(name)
        if options or not args:
            raise NotAffineError(f"{name} is given {', '.join(options)}")
        first, second = args[0], args[1] if len(args) > 1 else None
        if name == "linear":
            return self._product(first, second, lambda W: W, *args[2:])
        if name in PRODUCTS:
            return self._product(first, second, lambda M: M.mT)
        if name == "addmm" and len(args) == 3:
            return self._product(second, args[2], lambda M: M.mT, first)
        if name in SUMS and len(args) == 2:
            return self._sum(first, second, SUMS[name], reverse=name == "__rsub__")
        if name in SCALINGS and not self._depends(second):
            return self._scaled(name, first, second)
        raise NotAffineError(f"{name} of x is not followed")

    def _product(self, x: Any, matrix: Any, turned: Callable[[Tensor], Tensor], *added: Any) -> Tensor:
        if x is not self.state or self._depends(matrix) or self._depends(added) or matrix.dim() != 2:
            raise NotAffineError("a product of something else than x and a matrix")
        return turned(matrix)

    def _sum(self, first: Any, second: Any, sign: int, *, reverse: bool) -> Tensor:
        first, second = (second, first) if reverse else (first, second)
        if self._depends(first) and self._depends(second):
            return torch.add(self._matrix(first), self._matrix(second), alpha=sign)
        return self._matrix(first) if self._depends(first) else sign * self._matrix(second)

    def _scaled(self, name: str, first: Any, second: Any) -> Tensor:
        if "neg" in name:
            return -self._matrix(first)
        if not isinstance(second, int | float):
            raise NotAffineError("x is scaled by a tensor")
        return self._matrix(first) / second if "div" in name else self._matrix(first) * second
