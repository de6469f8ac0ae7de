"""How an equilibrium is differentiated."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward

from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.maps import Map, max_norm
from wellposed.equilibrium.method import Solve, SolveOptions
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.equilibrium.tracing import no_tangents, under_forward_mode, under_functorch
from wellposed.errors import InputError, SecondDerivativeError
from wellposed.registry import Registry


class Gradient(abc.ABC):
    """Solves a problem so that the value can be differentiated."""

    @abc.abstractmethod
    def solve(self, f: Map, x0: Tensor, solve: Solve) -> tuple[Tensor, Iterates]:
        """Returns the value, connected to what `f` depends on, and the iterates of the solve."""


@dataclass(frozen=True)
class Implicit(Gradient):
    """Differentiates by the implicit function theorem: ``dx*/dw = (I - J)^-1 df/dw``.

    The backward pass solves ``w = J' w + g`` with `J` the Jacobian of f at the equilibrium
    (001 section 1.2), normalised so that tolerances mean the same as in the forward pass. Memory does
    not depend on the number of steps. In forward mode it solves ``t = J t + df`` for the tangent t. Under vmap and
    torch.func a general map is differentiated as by `Unrolled`.

    Args:
        solver, stop, max_steps: for the backward solve; None means those of the forward solve.
    """

    solver: Solver | None = None
    stop: Stopping | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise InputError(f"max_steps must be at least 1, or None as in the solve; received {self.max_steps}")

    def adjoint_options(self, options: SolveOptions) -> SolveOptions:
        """Returns the options of the backward solve."""
        solver, stop = self.solver or options.solver, self.stop or options.stop.adjoint()
        return SolveOptions(solver, stop, self.max_steps or options.max_steps, options.on_failure)

    def solve(self, f: Map, x0: Tensor, solve: Solve) -> tuple[Tensor, Iterates]:
        if under_functorch():
            return Unrolled().solve(f, x0, solve)
        with torch.no_grad(), no_tangents():
            iterates = solve.forward(f, x0)
        value, fx, attached = iterates.value, None, None
        if torch.is_grad_enabled() and not under_forward_mode():
            attached = f.attach(value, solve, self.adjoint_options(solve.options))
        if attached is not None:
            return attached, iterates
        if torch.is_grad_enabled():
            x = value.detach().requires_grad_()
            with no_tangents():
                fx = f(x)
                if _has_other_leaves(fx, x):
                    value = _Attach.apply(fx, value, x, solve, self.adjoint_options(solve.options), f)
                else:
                    fx = None
        if under_forward_mode():
            value = _with_tangent(value, f, iterates.value, solve, self.adjoint_options(solve.options), fx)
        return value, iterates


def _with_tangent(
    value: Tensor, f: Map, x: Tensor, solve: Solve, options: SolveOptions, fx: Tensor | None
) -> Tensor:
    """Gives the equilibrium `value`, at `x`, its tangent: the solution of ``t = J t + df``.

    Args:
        fx: ``f(x)`` where it has derivatives in reverse mode, which the tangent lacks.
    """

    def pushforward(tangent: Tensor) -> Tensor:  # J t + df, as f computes with dual numbers
        image = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent
        return torch.zeros_like(x) if image is None else image

    with torch.no_grad():
        offset = pushforward(torch.zeros_like(x))
        if not bool(offset.any()):
            return value
        solve = replace(solve, hooks=None)  # another equation than that of the backward pass
        tangent = solve_transposed(lambda t: pushforward(t) - offset, offset, solve, options, f.eps(x), (f, x))
    return forward_ad.make_dual(value, tangent if fx is None else FirstOnly.apply(tangent, fx))


def _has_other_leaves(fx: Tensor, x: Tensor) -> bool:
    """Tells whether `fx` depends on anything differentiable besides `x`."""
    nodes, seen = [fx.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is not None and variable is not x:
            return True
        nodes += [parent for parent, _ in node.next_functions]
    return False


class _Attach(torch.autograd.Function):
    """Returns the equilibrium, with the gradient of the implicit function theorem."""

    @staticmethod
    def forward(
        ctx: Any, fx: Tensor, value: Tensor, x: Tensor, solve: Solve, options: SolveOptions, f: Map
    ) -> Tensor:
        ctx.solved = fx, x, solve, options, f
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        fx, x, solve, options, f = ctx.solved
        needed = torch.is_grad_enabled()
        (gradient,) = gradients
        with torch.no_grad():
            w = solve_transposed(vector_jacobian(fx, x), gradient, solve, options, f.eps(x), (f, x))
        return (FirstOnly.apply(w, fx) if needed else w), None, None, None, None, None


def vector_jacobian(fx: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns ``w -> J' w`` for the graph that leads from `x` to `fx`."""

    def product(w: Tensor) -> Tensor:
        # What torch.autograd.grad does, without its checks, which take half of the time where a map is cheap.
        (result,) = _engine_run_backward((fx,), (w,), True, False, (x,), True, accumulate_grad=False)
        return torch.zeros_like(x) if result is None else result

    return product


class LinearMap(Map):
    """The map ``w -> M w + g`` for a linear ``w -> M w``; M is the derivative of a map at a point, the origin."""

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        offset: Tensor,
        eps: float,
        origin: tuple[Map, Tensor] | None = None,
    ) -> None:
        self.product, self.offset, self._eps, self.origin = product, offset, eps, origin

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) + self.offset

    def eps(self, x: Tensor) -> float:
        return self._eps

    def jvp(self, x: Tensor, tangent: Tensor) -> Tensor:
        return self.product(tangent)


def row_scale(gradient: Tensor) -> Tensor:  # (B, 1)
    """Returns the largest entry of every row, one for rows of zeros."""
    scale = max_norm(gradient)
    return torch.where(scale > 0, scale, 1)[:, None]


def solve_transposed(
    product: Callable[[Tensor], Tensor],
    gradient: Tensor,
    solve: Solve,
    options: SolveOptions,
    eps: float,
    origin: tuple[Map, Tensor] | None = None,
) -> Tensor:
    """Solves ``w = J' w + g`` given ``w -> J' w`` with its rounding unit, on gradients scaled to one."""
    scale = row_scale(gradient)
    f = LinearMap(product, gradient / scale, eps, origin)
    return solve.backward(f, torch.zeros_like(gradient), options).value * scale


class FirstOnly(torch.autograd.Function):
    """Passes a first derivative on and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, fx: Tensor) -> Tensor:
        return w.clone()  # fx is an input so that a second derivative passes through here

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        raise SecondDerivativeError(
            "gradient=Implicit() on a general map gives first derivatives only; use gradient=Unrolled() or "
            "Phantom(), or an ImplicitModel, whose equilibrium can be differentiated any number of times"
        )


@dataclass(frozen=True)
class Phantom(Gradient):
    """Differentiates a few damped steps from the equilibrium (Geng et al. 2021; one step is JFB).

    The gradient is biased; the value moves by those steps, that is, by less than the tolerance.
    """

    steps: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.damping <= 1:
            raise InputError(
                f"at least one step and damping in (0, 1] are needed; received {self.steps} and {self.damping}"
            )

    def solve(self, f: Map, x0: Tensor, solve: Solve) -> tuple[Tensor, Iterates]:
        with torch.no_grad(), no_tangents():
            iterates = solve.forward(f, x0)
        x = iterates.value
        if torch.is_grad_enabled() or under_forward_mode():
            for _ in range(self.steps):
                x = f(x) if self.damping == 1 else torch.lerp(x, f(x), self.damping)
        return x, iterates


@dataclass(frozen=True)
class Polished(Gradient):
    """Takes damped steps ``x <- (1 - d) x + d f(x)`` from the solver's answer, with and without gradients.

    By default the solver's answer is treated as a constant and the gradient is that of the steps alone: the
    construction of 004 for training with attacks and for attacks (appendix C, eq. 55, with 9 steps of damping
    0.5). Unlike `Phantom` the value is the same with and without gradients, however early the solver gave up. The
    gradient is blind to what the solver does with the input, so a model that withstands attacks along it may
    still fall to those through `Implicit` or `Unrolled`.

    Args:
        steps, damping: K and lambda in 004.
        solved: how the solver's answer is differentiated; None for not at all.

    Example:
        >>> from wellposed.equilibrium.fixed_point import fixed_point
        >>> u = torch.ones(1, 1, requires_grad=True)
        >>> slopes = []
        >>> for rule in (Polished(1, 1.0), Polished(1, 1.0, Implicit())):
        ...     solution = fixed_point(lambda x, u: x / 2 + u, torch.zeros(1, 1), u, gradient=rule)
        ...     slopes += [round(torch.autograd.grad(solution.value.sum(), u)[0].item(), 3)]
        >>> slopes  # that of the equilibrium 2 u is 2
        [1.0, 2.0]
    """

    steps: int = 9
    damping: float = 0.5
    solved: Gradient | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.damping <= 1:
            raise InputError(
                f"at least one step and damping in (0, 1] are needed; received {self.steps} and {self.damping}"
            )

    def solve(self, f: Map, x0: Tensor, solve: Solve) -> tuple[Tensor, Iterates]:
        if self.solved is not None:
            x, iterates = self.solved.solve(f, x0, solve)
        else:
            with torch.no_grad(), no_tangents():
                iterates = solve.forward(f, x0)
            x = iterates.value
        for _ in range(self.steps):
            x = torch.lerp(x, f(x), self.damping)
        return x, iterates


@dataclass(frozen=True)
class Unrolled(Gradient):
    """Differentiates through every step of the solver and one more; memory grows with the number of steps.

    The extra step matters where a solve ends at once, as when it starts at the equilibrium, and makes Newton's
    gradient exact.
    """

    def solve(self, f: Map, x0: Tensor, solve: Solve) -> tuple[Tensor, Iterates]:
        iterates = solve.forward(f, x0)
        if not torch.is_grad_enabled() and not under_forward_mode():
            return iterates.value, iterates
        x = iterates.value
        extra, _ = solve.options.solver.step(f, x, f(x), solve.options.solver.init(x))
        finite = (iterates.status != Status.NONFINITE)[:, None]
        with torch.no_grad(), no_tangents():
            correction = x - extra
        return torch.where(finite, extra + correction, x), iterates


GRADIENTS: Registry[Gradient] = Registry(
    "gradient", Gradient, {"implicit": Implicit, "phantom": Phantom, "unrolled": Unrolled}
)
