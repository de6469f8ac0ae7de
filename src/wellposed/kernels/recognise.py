"""Recognises ``x -> phi(Ax + v)`` in a function of the user, so that kernels solve its equation.

The function is run once, on zeros that stand for x, while torch reports its operations. Those on x are followed,
not computed: products with matrices add up to A, and what is added to them adds up to v. After an operation on x
that is not in the tables below the function counts as not recognised. What torch does not report (scripted code,
custom derivatives, threads) cannot do harm: at its solution every equation is compared with the function itself.
Derivatives are compared in the first two solves of a function that are differentiated, then ever more rarely.
"""

import contextlib
import functools
import math
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
TRANSPOSES = ("mT", "T", "t")
QUESTIONS = ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")  # which no value answers
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda")


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
        graph: v and A as f has computed them, with what they depend on.
        lipschitz: bounds the Lipschitz constant of f, by ``|A|_inf``.
        compares: whether its derivative at the solution is compared with that of f.
        saved: what the backward pass of a small equation needs, once it is solved from zero.
        terms: copies of v and A of any other.
    """

    graph: tuple[Tensor, Tensor]  # (B, n) and (n, n)
    activation: Activation
    lipschitz: float
    compares: bool = False
    saved: Tensor | None = None
    terms: tuple[Tensor, Tensor] | None = None

    def __str__(self) -> str:
        return f"x = {self.activation.name}(Ax + v) by {NUMBA.name}"

    def solve(self, f: FunctionMap, x0: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates | None:
        """Solves the forward equation; None where the plain loop might judge otherwise.

        Raises:
            NotAffineError: f is something else.
        """
        if not math.isfinite(self.lipschitz):  # times zero it is NaN, which v does not show
            return None
        spec = _spec(self.activation, solver, stop, max_steps, self.lipschitz >= 1)
        v, A = (term.detach() for term in self.graph)
        start = x0.clone() if NUMBA.norm(x0) != 0 else None  # a copy, since residuals are computed when asked for
        iterates = self._solve_small(spec, v, A) if start is None else None
        if iterates is None:
            v, A = self._own
            iterates = NUMBA.solve(spec, (A,), v, start)
        x = iterates.value
        self._compare(f, x, spec, lambda: self.activation.function(self._argument(x)))
        if self.compares:
            self._compare_derivatives(f, x)
        if start is None and self.lipschitz < 0.999:  # |f(0)| / (1 + L) <= |x| <= |f(0)| / (1 - L)
            return iterates
        first = max_norm(self.activation.function(v) if start is None else f(x0) - x0)
        return None if _unusual(iterates, max_norm(x0) + first, first, stop) else iterates

    def adjoint(
        self, f: LinearMap, x: Tensor, start: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> Iterates | None:
        """Solves ``w = A' d w + g`` by ``y = d (A'y + g)``, of which ``w = A'y + g``; as `solve`.

        That w is a step further than y, so where steps are counted the plain loop takes them.
        """
        if not stop.certifies:
            return None
        spec = _spec(self.activation, solver, stop, max_steps)
        z, g, A = self._argument(x), f.offset, self._own[1]
        begin = self.activation.slope_at(z) * start if bool(start.any()) else None
        iterates = NUMBA.adjoint(spec, (A.mT,), g, z=z, start=begin)
        w = torch.addmm(g, iterates.value, A)
        self._compare(f, w, spec, lambda: torch.addmm(g, self.activation.slope_at(z) * w, A))
        iterates, first = replace(iterates, value=w), max_norm(g if begin is None else f(start) - start)
        return None if _unusual(iterates, max_norm(start) + first, first, stop) else iterates

    def _solve_small(self, spec: AffineSpec, v: Tensor, A: Tensor) -> Iterates | None:
        """Solves from zero in one call; None if the equation is not small, or not finite."""
        if not NUMBA.fuses((v, A, None, A)):
            return None
        with contextlib.suppress(NotFiniteError):
            iterates, self.saved = NUMBA.solve_small(spec, A, v)
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
        spec = _spec(self.activation, options.solver, options.stop, options.max_steps)
        if NUMBA.no_kernel(spec, (A,)):
            return None
        n, L = x.shape[1], self.lipschitz
        # In the 1-norm A'd contracts by L, so that |g| / (1 + nL) <= |w| <= n |g| / (1 - L) in the largest entry.
        usual = 1 + n * L < 1e3 and n < RUN_OFF * (1 - L)
        value: Tensor = _EquationGradient.apply(v, A, x, self.saved, spec, solve, options, usual)
        return value

    @property
    def _own(self) -> tuple[Tensor, Tensor]:
        """The v and A that are solved with, whatever becomes of the weights."""
        if self.saved is not None:
            return saved_matrices(self.saved, *self.graph[0].shape)[1:]
        if self.terms is None:
            v, A = self.graph
            self.terms = v.detach().clone(), A.detach().clone()
        return self.terms

    def _argument(self, x: Tensor) -> Tensor:
        v, A = self._own
        return torch.addmm(v, x, A.mT)

    @staticmethod
    def _compare(f: Map, x: Tensor, spec: AffineSpec, image: Callable[[], Tensor]) -> None:
        """Raises unless f itself meets the stopping rule at x, or f(x) is the image of x up to rounding."""
        fx, stop = f(x), spec.forward.stop
        if NUMBA.accepts(spec, x, fx):
            return
        if stop.stateless and bool(stop.check(Step(x, fx, f, max_norm(fx - x), 0), ())[0].all()):
            return
        other = image()
        near = max_norm(fx - other) <= 4 * f.rounding(x, fx)
        finite = fx.isfinite().all(1) | other.isfinite().all(1)
        if bool((finite & ~near).any()):
            raise NotAffineError("elsewhere it has other values or derivatives than this form")

    def _compare_derivatives(self, f: FunctionMap, x: Tensor) -> None:
        """Raises unless ``J'w`` is ``A'dw`` up to rounding, for a w that avoids corners of phi."""
        z, eps, A = self._argument(x), f.eps(x), self._own[1]
        near = z.abs() <= 64 * eps * (max_norm(z) + max_norm(x))[:, None]
        w = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype).expand_as(x).masked_fill(near, 0)
        mine = (self.activation.slope_at(z) * w) @ A
        # Hooks of the caller, such as those of checkpointing, are not to see this graph.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            point = x.detach().clone().requires_grad_()
            (other,) = torch.autograd.grad(f(point), point, w, allow_unused=True)
        other = torch.zeros_like(x) if other is None else other
        size = 1.5 * float(A.abs().sum(0).amax()) if x.shape[1] else 0.0
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
def _spec(
    activation: Activation, solver: Solver, stop: Stopping, max_steps: int, checked: bool = True
) -> AffineSpec:
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
    spec = _spec(activation, solver, stop, max_steps)
    if reason := NUMBA.why_not(spec, (A,)):
        raise NotAffineError(reason, passing=not NUMBA.no_kernel(spec, (A,)))
    return AffineEquation((v, A), activation, activation.lipschitz() * NUMBA.norm(A))


class _Operations(TorchFunctionMode):
    """Follows the operations on a state: which results are ``Ax + v``, and which are phi of one.

    Results are stand-ins of the right shape and dtype. They are kept, so that no id is used twice.

    Args:
        state: zeros, from which the function computes.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state, self.reason = state, ""  # why the function is not of this form
        self.differentiated = torch.is_grad_enabled()
        # By the id of a stand-in: with A (None: identity) and v (None: zero).
        self.sums: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {id(state): (state, None, None)}
        self.images: dict[int, tuple[Tensor, Tensor, Activation]] = {}  # with their argument
        self.transposed: dict[int, tuple[Tensor, Tensor]] = {}  # matrices, with what they are the transpose of

    def equation(self, result: Any) -> tuple[Tensor, Tensor, Activation]:
        """Returns A, v and phi of what the function has returned."""
        if self.reason:
            raise NotAffineError(self.reason)
        activation = get_activation("identity")
        if id(result) in self.images:
            _, result, activation = self.images[id(result)]
        elif id(result) not in self.sums:
            raise NotAffineError("its result does not depend on x")
        A, v = self._matrix(result), self._offset(result)
        plain = Tensor, nn.Parameter
        alike = all(type(one) in plain and one.layout == torch.strided for one in (A, v, self.state))
        fits = A.shape == 2 * v.shape[1:] and A.dtype == v.dtype == self.state.dtype and v.device == A.device
        if not alike or not fits or v.shape != self.state.shape:
            raise NotAffineError("A or v is not a plain tensor of the shape, dtype and device of x")
        return A, v, activation

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, getattr(function, "__name__", "")
        if options.get("generator") is not None:
            self.reason = "it draws random numbers"
        owner = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        if self.reason or not any(map(self._depends, (*args, *options.values()))):
            result = function(*args, **options)
            if (name in TRANSPOSES or owner in TRANSPOSES) and torch.is_grad_enabled() == self.differentiated:
                self.transposed[id(result)] = result, args[0]
            return result
        if name in QUESTIONS or owner in PROPERTIES:
            return function(*args, **options)
        try:
            if torch.is_grad_enabled() != self.differentiated or torch.is_autocast_enabled("cpu"):
                raise NotAffineError("a part of it is not differentiated, or computes with other numbers")
            return self._after(function, name, args, options)
        except NotAffineError as error:  # the function goes on: it may have begun something
            self.reason = str(error)
        return function(*args, **options)

    def _depends(self, value: Any) -> bool:
        if isinstance(value, tuple | list):
            return any(map(self._depends, value))
        return id(value) in self.sums or id(value) in self.images

    def _matrix(self, value: Any) -> Tensor:
        """Returns A of an argument ``Ax + v``."""
        if id(value) not in self.sums:
            raise NotAffineError("it goes on after an activation")
        matrix = self.sums[id(value)][1]
        return torch.eye(self.state.shape[1]).to(self.state) if matrix is None else matrix

    def _offset(self, value: Any) -> Any:
        """Returns v of an argument ``Ax + v``, and what does not depend on x as it is."""
        known = self.sums.get(id(value))
        return value if known is None or known[2] is None else known[2]

    def _transpose(self, matrix: Any) -> Any:
        known = self.transposed.get(id(matrix))
        return matrix.mT if known is None else known[1]

    def _after(self, function: Any, name: str, args: Any, options: dict[str, Any]) -> Tensor:
        """Returns the stand-in of a result."""
        if name in ACTIVATIONS and all(value is False for value in (*args[1:], *options.values())):  # inplace
            self._matrix(args[0])  # which raises where there is none
            image = torch.zeros_like(args[0])
            self.images[id(image)] = image, args[0], get_activation(name)
            return image
        if options or not args:
            raise NotAffineError(f"{name} is given {', '.join(options)}")
        first, second = args[0], args[1] if len(args) > 1 else None
        if name == "linear":
            return self._product(first, second, lambda W: W, *args[2:])
        if name in PRODUCTS:
            return self._product(first, second, self._transpose)
        if name == "addmm" and len(args) == 3:
            return self._product(second, args[2], self._transpose, first)
        if name in SUMS and len(args) == 2:
            return self._sum(function, first, second, SUMS[name], reverse=name == "__rsub__")
        if name in SCALINGS and not self._depends(second):
            result = function(*map(self._offset, args))
            return self._follow(result, self._scaled(name, first, second), result)
        raise NotAffineError(f"{name} of x is not followed")

    def _follow(self, result: Tensor, matrix: Tensor, offset: Tensor | None) -> Tensor:
        self.sums[id(result)] = result, matrix, offset
        return result

    def _product(self, x: Any, matrix: Any, turned: Callable[[Tensor], Tensor], added: Any = None) -> Tensor:
        if x is not self.state or self._depends(matrix) or self._depends(added) or matrix.dim() != 2:
            raise NotAffineError("a product of something else than x and a matrix")
        A = turned(matrix)
        if A.shape[1] != x.shape[1] or any(term is not None and term.dtype != x.dtype for term in (A, added)):
            raise NotAffineError("a matrix or a bias has not the shape or dtype of x")
        result = x.new_zeros(x.shape[0], A.shape[0])
        return self._follow(result, A, added if added is None else added.expand(result.shape))

    def _sum(self, function: Any, first: Any, second: Any, sign: int, *, reverse: bool) -> Tensor:
        x, y = (second, first) if reverse else (first, second)
        if self._depends(x) and self._depends(y):
            matrix = torch.add(self._matrix(x), self._matrix(y), alpha=sign)
        else:
            matrix = self._matrix(x) if self._depends(x) else sign * self._matrix(y)
        for zero, other in ((x, y), (y, x)) if sign > 0 else ((y, x),):
            begins = id(zero) in self.sums and self.sums[id(zero)][2] is None
            if begins and isinstance(other, Tensor) and (other.shape, other.dtype) == (zero.shape, zero.dtype):
                return self._follow(torch.zeros_like(zero), matrix, self._offset(other))
        result = function(self._offset(first), self._offset(second))
        return self._follow(result, matrix, result)

    def _scaled(self, name: str, first: Any, second: Any) -> Tensor:
        if "neg" in name:
            return -self._matrix(first)
        if not isinstance(second, int | float):
            raise NotAffineError("x is scaled by a tensor")
        return self._matrix(first) / second if "div" in name else self._matrix(first) * second
