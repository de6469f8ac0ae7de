"""How far states, outputs and margins can move: one entry point for all methods.

A method takes a `Query` and returns `Bounds`; a further one is a line in `METHODS`. `best_bounds` is the method
"best": what several methods prove, intersected, within a time budget. `worst_case_loss` bounds the largest loss on
a set of inputs, and `certified` tells which samples provably keep their class (003, section 4.3). `enclosures`,
`continuations` and `branches` write bounds and verdicts as claims of a certificate, with what the checker needs.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.conditions.branches import BranchEquation
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import convert_outward, plain_convolutions, upward
from wellposed.errors import IllPosedError, InputError, MissingExtraError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.models.io.certificates import Claim
from wellposed.registry import Registry
from wellposed.robust.boxes import box_bounds, l2_bounds, norm_bounds, solve_states, states_of_branch
from wellposed.robust.crown import MAX_STEPS, TOLERANCE, Crown, Multipliers, lines_of
from wellposed.robust.intervals import interval_bounds, starting_states
from wellposed.robust.linear_programs import Relaxation
from wellposed.robust.query import (
    Bounds,
    Branches,
    MethodError,
    Posed,
    Query,
    as_form,
    check_target,
    deadline,
    margins,
    well_posed,
)
from wellposed.robust.sets import Box, Interval, Uncertainty

ORDER = ("interval", "l2", "crown", "optimised", "triangle")  # cheapest first; those that are registered are tried


def best_bounds(query: Query, methods: Registry[Callable[[Query], Bounds]]) -> Bounds:
    """Intersects the bounds of all methods that apply, as long as there is time; their names are joined by +.

    The cheapest method always runs to its end, and the others stop tightening when the time is over. Where a loop
    has no certificate, they bound a branch of its equilibria, or none applies.
    """
    if not well_posed(query.form):
        starting_states(query)  # of a branch, or says why there is none
    best: Bounds | None = None
    reasons = []
    for name in ORDER:
        if name not in methods or (best is not None and query.late):
            continue
        try:
            bounds = methods[name](query).stated()
        except (InputError, IllPosedError, MissingExtraError) as error:
            reasons.append(f"{name}: {error}")
            continue
        best = bounds if best is None else best.within(bounds)
    if best is None:
        raise IllPosedError("no method bounds this form:\n" + "\n".join(reasons))
    return best.named(f"best ({best.method})")


Method = Callable[[Query], Bounds]

_PROVEN: dict[str, Method] = {
    "norm": norm_bounds,
    "box": box_bounds,
    "interval": interval_bounds,
    "l2": l2_bounds,
    "crown": Crown(),
    "optimised": Crown(slope_steps=20),
    "lp": Relaxation("lp"),
    "triangle": Relaxation("triangle"),
}
METHODS: Registry[Method] = Registry.of("method", Callable, _PROVEN)
METHODS.register("best", lambda: partial(best_bounds, methods=METHODS))


def state_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds every state of the equilibrium, (B, n), over a set of inputs.

    Args:
        model: a form, an `ImplicitModel`, or a network, which is converted without rounding its weights; its
            states are those of `to_implicit`.
        inputs: one set for every sample.
        method: ``"norm"``, ``"box"``, ``"interval"``, ``"l2"``, ``"crown"``, ``"optimised"``
            (crown with slopes optimised), ``"lp"`` (as printed in 003), ``"triangle"``, ``"best"``,
            or an object such as `Crown`.
        budget: seconds after which bounds are returned as tight as they are by then.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> state_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), "box").upper.round(decimals=3)
        tensor([[4.]])
    """
    form, exact, states = Posed.of(model, inputs)
    bounds = _answer(method, Query(form, exact, None, deadline(budget)), inputs, model)
    if states is None:
        return bounds
    lower, upper, slack = (part[:, states] for part in (bounds.lower, bounds.upper, bounds.slack))
    return replace(bounds, lower=lower, upper=upper, slack=slack)


def output_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds every output, (B, q); arguments as in `state_bounds`.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.ones(1, 2))
        >>> bounds = output_bounds(form, Box(-torch.ones(1, 2), torch.ones(1, 2)))
        >>> bounds.upper.round(decimals=3), bounds.method
        (tensor([[2.]]), 'crown')
    """
    form, exact, _ = Posed.of(model, inputs)
    unit = torch.eye(form.sizes[2], dtype=form.dtype, device=form.device)
    query = Query(form, exact, unit.expand(len(inputs), -1, -1), deadline(budget))
    return _answer(method, query, inputs, model)


def margin_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds ``y_i - y_target`` for every output i, (B, q); arguments as in `state_bounds`.

    Bounded as one functional ``(C_i - C_target) x``, which is tighter than the difference of two bounds. A sample
    keeps its class on the whole set if all other upper bounds are negative.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> margin_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([0])).upper.round()
        tensor([[ 0., -2.]])
    """
    form, exact, _ = Posed.of(model, inputs)
    q = form.sizes[2]
    rows = margins(q, check_target(target, len(inputs), q), exact.center)
    return _answer(method, Query(form, exact, rows, deadline(budget)), inputs, model)


def _answer(method: str | Method, query: Query, inputs: Uncertainty, model: ImplicitForm | nn.Module) -> Bounds:
    prove, dtype = METHODS.get(method), inputs.dtype
    if not math.prod(query.shape):
        none = query.set.center.new_zeros(query.shape, dtype=dtype)
        return Bounds(none, none, method if isinstance(method, str) else type(method).__name__, none)
    with plain_convolutions(query.set.center):
        bounds = prove(query).stated()
    if query.form.dtype != dtype:
        (lower, below), (upper, above) = convert_outward(bounds.lower, dtype), convert_outward(bounds.upper, dtype)
        bounds = Bounds(lower - below, upper + above, bounds.method, bounds.slack.to(dtype)).stated()
    if not query.branches:
        return bounds
    branch = query.branches[0]
    if isinstance(model, nn.Module) and not isinstance(model, ImplicitModel):
        apart = ~same_outputs(model, inputs, query.form, branch.states)
        branch = branch.without(apart, "the network itself finds another equilibrium at the center")
    return bounds.of_branch(branch)


AGREEMENT = 1e-2  # relative to the outputs, within which a network that solves its loops itself has the same ones


@torch.no_grad()
def same_outputs(model: nn.Module, inputs: Uncertainty, form: ImplicitForm, x: Tensor) -> Tensor:  # (B,)
    """Tells for which samples a network computes the outputs of given states at the center of the set."""
    u = inputs.center
    kinds = [part.dtype for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
    own = model(u.reshape(len(u), *inputs.sample_shape).to((*kinds, u.dtype)[0]))
    own = (own[0] if isinstance(own, tuple | list) else own).flatten(1)
    y = outputs(form, x.to(form.dtype), u.to(form.dtype))
    return ((own - y).abs() <= AGREEMENT * (1e-3 + y.abs().amax(1, keepdim=True))).all(1)


def outputs(form: ImplicitForm, x: Tensor, u: Tensor) -> Tensor:  # (B, n), (B, p) -> (B, q)
    """Returns ``y = Cx + Du + c`` for given states.

    Example:
        >>> outputs(ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)), *torch.ones(2, 1, 1))
        tensor([[1.]])
    """
    y = form.C.apply(x) + form.D.apply(u)
    return y if form.output_bias is None else y + form.output_bias


LOSSES = ("cross_entropy", "cross_entropy_box", "squared_error")


def worst_case_loss(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,
    loss: str = "cross_entropy",
    method: str | Method = "crown",
    budget: float | None = None,
) -> Tensor:  # (B,)
    """Bounds the loss of every sample from above, over its whole set. Differentiable where the method is.

    Args:
        target: classes (B,); for ``"squared_error"`` values (B, q).
        loss: ``"cross_entropy"`` bounds the margins ``y_i - y_target``; ``"cross_entropy_box"`` is the exact
            maximum over the box of the outputs, and ``"squared_error"`` that of ``|y - target|_2^2``.
        method, budget: as in `output_bounds`.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> worst_case_loss(form, around, torch.zeros(1, 1), "squared_error").round(decimals=3)
        tensor([4.])
    """
    if loss == "cross_entropy":
        return margin_loss(margin_bounds(model, inputs, target, method, budget).upper, target)
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    bounds = output_bounds(model, inputs, method, budget)
    if loss == "squared_error":
        return squared_error(bounds, target)
    check_target(target, *bounds.upper.shape)
    return margin_loss(bounds.upper - bounds.lower.gather(1, target[:, None]), target)


def squared_error(bounds: Bounds, target: Tensor) -> Tensor:  # (B,)
    """Returns the largest ``|y - target|_2^2`` of all y within bounds, attained at a corner.

    Example:
        >>> bounds = Bounds(torch.tensor([[-1.0]]), torch.tensor([[3.0]]), "box", torch.zeros(1, 1))
        >>> squared_error(bounds, torch.tensor([[0.0]]))
        tensor([9.0000])
    """
    if tuple(target.shape) != tuple(bounds.upper.shape) or not target.is_floating_point():
        raise InputError(
            f"squared_error takes targets of the outputs' shape {tuple(bounds.upper.shape)}; received "
            f"{target.dtype} {tuple(target.shape)}"
        )
    farthest = torch.maximum((bounds.upper - target).abs(), (bounds.lower - target).abs())
    return _raised(farthest.square().sum(1), bounds.upper.shape[1])


def margin_loss(margins: Tensor, target: Tensor) -> Tensor:  # (B, q), (B,) -> (B,)
    """Returns ``log(1 + sum_{i != y} exp(margin_i))``, the cross-entropy of the largest margins.

    Example:
        >>> margin_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).round(decimals=3)
        tensor([0.6930])
    """
    return _raised(torch.logsumexp(margins.scatter(1, target[:, None], 0.0), dim=1), margins.shape[1])


def certified(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> Tensor:  # (B,)
    """Tells which samples provably have the class `target` on their whole set.

    Bounds that are not finite prove no class, nor do any bounds one that the model does not give at the center.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> certified(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([0]))
        tensor([True])
    """
    with torch.no_grad():
        form, exact, _ = Posed.of(model, inputs)
        rows = margins(form.sizes[2], check_target(target, len(inputs), form.sizes[2]), exact.center)
        bounds = _answer(method, Query(form, exact, rows, deadline(budget)), exact, model)
        given = _given(form, exact, target, bounds.branch)
    negative = (bounds.upper < 0) & bounds.upper.isfinite() & bounds.lower.isfinite()
    return negative.scatter(1, target[:, None], True).all(1) & given


def _given(form: ImplicitForm, inputs: Uncertainty, target: Tensor, branch: Branches | None) -> Tensor:  # (B,)
    """Tells for which samples the model itself gives the class at the center of the set."""
    if not len(inputs):
        return torch.zeros_like(target, dtype=torch.bool)
    finite = inputs.center.isfinite().all(1)
    u = torch.where(finite[:, None], inputs.center, 0.0)
    y = outputs(form, solve_states(form, u) if branch is None else branch.states.to(u), u)
    return finite & y.isfinite().all(1) & (y.argmax(1) == target)


def certified_accuracy(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> float:
    """Returns the share of samples that `certified` proves.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> certified_accuracy(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([1]))
        0.0
    """
    if not len(inputs):
        raise InputError("a share of no samples is no number; give at least one")
    return float(certified(model, inputs, target, method, budget).double().mean())


def _raised(value: Tensor, terms: int) -> Tensor:
    """Pays for the rounding of a loss; a loss near zero may be off by a multiple of eps."""
    eps = torch.finfo(value.dtype).eps
    return value + 2 * (terms + 8) * eps * (1 + value.detach().abs())


ROOM = 1e-9  # of the size of the states, by which boxes are larger than they need be


def enclosures(model: ImplicitForm | nn.Module, inputs: Box) -> list[Claim]:
    """Claims, for the inputs of every box, boxes that hold the states and the outputs.

    A box X with phi(AX + BU + b) within X holds a solution for every u in U (Brouwer), and so the only one; the
    checker needs nothing else. X is the interval bound, larger by a little in the direction of weights v with
    ``gamma |A| v < v``, which the map makes smaller again.

    Args:
        model: an `ImplicitModel` or a form of matrices, with increasing activations.
        inputs: one box a sample; the claims refer to these numbers, in float64.

    Raises:
        IllPosedError: |A| has no such weights, as where strong negative feedback is proven by "mu".

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> (claim,) = enclosures(ImplicitModel(2, 1, 3).double(), Box.around(torch.zeros(1, 2).double(), 0.1))
        >>> claim.kind, sorted(claim.tensors)
        ('enclosure', ['u0', 'u1', 'x0', 'x1', 'y0', 'y1'])
    """
    with torch.no_grad():
        form, box = as_form(model, inputs).to(torch.float64), inputs.to(torch.float64)
        A, C, D = (part.to_dense() for part in (form.A, form.C, form.D))
        states = state_bounds(form, box, "interval")
        if not bool(states.width.isfinite().all()):
            raise IllPosedError("the bounds of the states overflow, so no box holds them; scale the inputs")
        size = torch.maximum(states.lower.abs(), states.upper.abs())
        size = size.amax(1, keepdim=True) if form.sizes[0] else size
        room = ROOM * (1 + size) * _weights(form, A)
        lower, upper = states.lower - room, states.upper + room
        low, high = _reach(C, lower, upper), _reach(D, box.lower, box.upper)
        shift = 0.0 if form.output_bias is None else form.output_bias
        spare = ROOM * (1 + low[2] + high[2])
        y0, y1 = low[0] + high[0] + shift - spare, low[1] + high[1] + shift + spare
    names = ("u0", "u1", "x0", "x1", "y0", "y1")
    ends = box.lower, box.upper, lower, upper, y0, y1
    facts = {"inputs": ["u0", "u1"], "states": ["x0", "x1"], "outputs": ["y0", "y1"]}
    rows = ({name: part[k] for name, part in zip(names, ends, strict=True)} for k in range(len(box)))
    return [Claim("enclosure", facts, tensors) for tensors in rows]


GROWTH, ROUNDS = 0.05, 20  # of boxes that do not hold their image, and how often they may grow


@torch.no_grad()
def continuations(model: ImplicitForm | nn.Module, inputs: Box, target: Tensor | None = None) -> list[Claim]:
    """Claims, for the inputs of every box, that they keep their class, or a box that holds the outputs.

    The proof is that of `Continuation`, by a box of pre-activations that lines and multipliers map into its own
    interior, with numbers that the checker needs and does not trust. It holds whatever certificate of
    well-posedness the model has.

    Args:
        model: an `ImplicitModel` or a form of matrices; activations are piecewise linear, tanh or sigmoid.
        inputs: one box a sample; the claims refer to these numbers, in float64.
        target: (B,), the classes; None claims boxes of outputs.

    Raises:
        IllPosedError: a sample is not proven; the message says which and why.

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> model = ImplicitModel(2, 1, 3).double()
        >>> (claim,) = continuations(model, Box.around(torch.zeros(1, 2).double(), 0.1))
        >>> claim.kind, claim.tensors["multipliers"].shape
        ('continuation', torch.Size([8, 3]))
    """
    return _claims(model, inputs, target, solve_states, _Lines.continuation)


@torch.no_grad()
def branches(model: ImplicitForm | nn.Module, inputs: Box, target: Tensor | None = None) -> list[Claim]:
    """Claims the same as `continuations` of the branch through the equilibrium at the center of every box.

    The model need not be well-posed: the proof is that every input of a box has exactly one equilibrium near that
    one, because no slopes of phi there make I - AD singular. Of other equilibria it says nothing. The equilibrium
    at the center is the one that is found from zero.

    Args:
        model, inputs, target: as in `continuations`.

    Raises:
        IllPosedError: a sample is not proven; the message says which and why.

    Example:
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> form = ImplicitForm(3 * one, one, one, bias=one[0] / 2, activation="tanh")  # with three equilibria
        >>> (claim,) = branches(form, Box.around(0 * one, 0.1, None, None))
        >>> claim.kind, bool(0.99 < claim.tensors["y0"] < claim.tensors["y1"] < 1.0)
        ('branch', True)
    """
    return _claims(model, inputs, target, states_of_branch, _Lines.branch)


def _claims(
    model: ImplicitForm | nn.Module, inputs: Box, target: Tensor | None,
    solve: Callable[[ImplicitForm, Tensor], Tensor], prove: "Callable[[_Lines, Tensor], Claim]",
) -> list[Claim]:  # fmt: skip
    form, box = as_form(model, inputs).to(torch.float64), inputs.to(torch.float64)
    if target is not None:
        check_target(target, len(box), form.sizes[2])
    x = solve(form, box.center)
    claims = []
    for k in range(len(box)):
        one = Box(box.lower[k : k + 1], box.upper[k : k + 1])
        try:
            claims.append(prove(_Lines(form, one, None if target is None else int(target[k])), x[k]))
        except IllPosedError as error:
            raise IllPosedError(f"sample {k}: {error}") from error
    return claims


class _Lines:
    """The numbers of a proof about one sample, found in floating point; the checker proves them."""

    def __init__(self, form: ImplicitForm, box: Box, target: int | None) -> None:
        self.form, self.box, self.target = form, box, target
        self.A, self.B, self.C, self.D = (part.to_dense() for part in (form.A, form.B, form.C, form.D))
        self.b, self.c = (
            self.A.new_zeros(size) if given is None else given
            for given, size in ((form.bias, form.sizes[0]), (form.output_bias, form.sizes[2]))
        )
        self.pieces = []
        for phi, size in zip(form.activations, form.partition, strict=True):
            lines = lines_of(phi)
            if lines is None:
                raise MethodError(f"continuation needs lines above and below phi; {phi.name!r} has none")
            self.pieces.append((lines, size))

    def each(self, function: Callable[[Any, Any], Tensor], *tensors: Tensor) -> Tensor:
        """Applies a function of an activation's lines, block by block."""
        parts = zip(*(tensor.split(self.form.partition, dim=-1) for tensor in tensors), strict=True)
        return torch.cat(
            [function(lines, part) for (lines, _), part in zip(self.pieces, parts, strict=True)], dim=-1
        )

    def _asked(self) -> list[Tensor]:
        """Returns the coefficients of states and inputs, and constants, of outputs up and down, or of margins."""
        if self.target is None:
            return [torch.cat([part, -part]) for part in (self.C, self.D, self.c)]
        return [part - part[self.target] for part in (self.C, self.D, self.c)]

    def branch(self, x: Tensor) -> Claim:
        """Encloses the branch through an equilibrium by Krawczyk's test, and makes it larger by a little."""
        v, half = self.box.center[0] @ self.B.mT + self.b, (self.box.upper - self.box.lower)[0] / 2
        none, kinds = torch.zeros_like(v), tuple(zip(self.form.activations, self.form.partition, strict=True))
        equation = BranchEquation(self.A, torch.zeros_like(self.A), kinds)
        box = equation.prove(x @ self.A.mT + v, v, none, [(self.B, half)])
        if box.why_not:
            raise IllPosedError(box.why_not)
        center, radius, eye = box.center, box.radius, torch.eye(len(v), dtype=v.dtype)
        residual = center - equation.function(center) @ self.A.mT - v
        for _ in range(ROUNDS):
            middle, spread = equation.slopes(center, radius)
            Y = torch.linalg.inv_ex(eye - self.A * middle)[0].float().double()
            change = (eye - Y @ (eye - self.A * middle)).abs() + (Y @ self.A).abs() * (spread + ROOM)
            moved = (Y @ residual).abs() + (Y @ self.B).abs() @ half
            image = moved + change @ radius + ROOM * 1e-3 * (1 + center.abs())
            if bool((image < radius).all()):
                z = Interval((center - radius)[None], (center + radius)[None])
                return self._stated("branch", center, radius, Y, *self._bounds(z, *self._asked()), {})
            ahead = torch.linalg.solve_ex(eye - change, image - change @ radius)[0]
            larger = ahead if bool((ahead >= image).all()) else image
            radius = torch.maximum(radius, (1 + GROWTH) * larger)
        raise IllPosedError(
            "no box around the equilibrium at the center is proven to hold the branch; use a smaller set"
        )

    def continuation(self, x: Tensor) -> Claim:
        """Grows a box from the center until it holds its own image."""
        states, inputs, constant = (  # z, -z, and outputs or margins
            torch.cat([own, -own, out]) for own, out in zip((self.A, self.B, self.b), self._asked(), strict=True)
        )
        n, center = len(self.A), x @ self.A.mT + self.box.center[0] @ self.B.mT + self.b
        z = Interval(center[None], center[None])
        for _ in range(ROUNDS):
            slopes, nu, bound = self._bounds(z, states, inputs, constant)
            lower, upper = -bound[None, n : 2 * n], bound[None, :n]
            spare = ROOM * (1 + upper.abs().maximum(lower.abs()))
            if bool(((lower - spare > z.lower) & (upper + spare < z.upper)).all()):
                Y, radius = self._inverse(center)
                more = {"z0": z.lower[0], "z1": z.upper[0]}
                return self._stated("continuation", center, radius, Y, slopes, nu, bound[2 * n :], more)
            room = GROWTH * (upper - lower) + 4 * spare
            z = Interval(torch.minimum(z.lower, lower - room), torch.maximum(z.upper, upper + room))
            if not bool((z.lower.isfinite() & z.upper.isfinite()).all()):
                break
        raise IllPosedError(
            "no box of pre-activations was found that lines map into its interior; use a smaller set"
        )

    def _bounds(
        self, z: Interval, states: Tensor, inputs: Tensor, constant: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Bounds ``states' x + inputs' u + constant`` for pre-activations in a box, row by row."""
        both = self.each(lambda lines, part: torch.cat(lines.slopes(Interval(*part))[:2]), *z)
        lower, upper = both.float().double()  # shorter numbers are checked faster
        rows = lower.expand(len(states), -1), upper.expand(len(states), -1)
        sample = torch.zeros(len(states), dtype=torch.int64)
        solved = Multipliers({0: states}, {0: rows}, {}).eliminated(self.A, sample, MAX_STEPS, TOLERANCE)
        nu = solved[0].float().double()
        lam = torch.where(nu > 0, upper, lower) * nu
        wide = Interval(*(end.expand_as(nu) for end in z))
        gaps = self.each(lambda lines, part: lines.intercept(*part[:2], Interval(*part[2:])), nu, lam, *wide)
        x = Interval(*(self.each(lambda lines, part: lines.phi.function(part[0]), end) for end in z))
        value = gaps.sum(1) + lam @ self.b + constant + x.largest(states + lam @ self.A - nu)
        return (lower, upper), nu, value + self.box.interval.largest(inputs + lam @ self.B)

    def _stated(
        self, kind: str, center: Tensor, radius: Tensor, Y: Tensor, slopes: tuple[Tensor, Tensor], nu: Tensor,
        bound: Tensor, more: dict[str, Tensor],
    ) -> Claim:  # fmt: skip
        q, facts = len(self.C), dict[str, Any]({"preactivations": ["z0", "z1"]} if more else {})
        tensors = {"u0": self.box.lower[0], "u1": self.box.upper[0], **more}
        if self.target is None:
            spare = ROOM * (1 + bound.abs())
            tensors |= {"y0": -(bound[q:] + spare[q:]), "y1": bound[:q] + spare[:q]}
            facts["outputs"] = ["y0", "y1"]
        else:
            others = torch.arange(q) != self.target
            if not bool((bound[others] < -ROOM).all()):
                worst = int(torch.where(others, bound, -math.inf).argmax())
                raise IllPosedError(f"output {worst} may exceed that of class {self.target} by {bound[worst]:.3g}")
            facts["target"] = self.target
        tensors |= {"s0": slopes[0], "s1": slopes[1], "multipliers": nu, "center": center, "radius": radius}
        facts |= {"inputs": ["u0", "u1"], "slopes": ["s0", "s1"]}
        facts |= {name: name for name in ("multipliers", "center", "radius", "inverse")}
        return Claim(kind, facts, tensors | {"inverse": Y})

    def _inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a rounded inverse of I - A phi'(z) and radii that Krawczyk's test accepts with it."""
        eye = torch.eye(len(z), dtype=z.dtype)
        slope, phi = self.each(
            lambda lines, part: torch.cat([lines.phi.slope_at(*part), lines.phi.function(*part)]), z[None]
        )
        Y = torch.linalg.inv_ex(eye - self.A * slope)[0].float().double()
        size = 1 + z.abs().amax()
        radius = size * 1e-9
        near = torch.stack([z - radius, z + radius])
        change = self.each(lambda lines, part: lines.phi.slope_at(*part).diff(dim=0).abs(), near)[0]
        P = (Y @ self.A).abs()
        weights, value = perron_weights((eye - Y @ (eye - self.A * slope)).abs() + P * (change + 1e-6) + 1e-12)
        if not value < 1:
            raise IllPosedError(
                "the equilibrium at the center is not proven: a state lies on a kink of its activation"
            )
        residual = z - phi @ self.A.mT - self.box.center[0] @ self.B.mT - self.b
        moved = (Y @ residual).abs() + 1e-11 * size * (1 + P.sum(1))
        return Y, weights * (2 * (moved / weights).amax() / (1 - value))


def _weights(form: ImplicitForm, A: Tensor) -> Tensor:  # (n,)
    constants = torch.tensor([phi.lipschitz() for phi in form.activations], dtype=torch.float64)
    gamma = constants.repeat_interleave(torch.tensor(list(form.partition)))
    weights, value = perron_weights(upward(A.abs() * gamma[:, None], 1))
    if not value < 1:
        raise IllPosedError("no box of states is known to map into itself: |A| has no weights v with |A| v < v")
    return weights


def _reach(matrix: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the range of ``matrix x`` over a box, and the size of its terms."""
    center, radius = (lower + upper) / 2, (upper - lower) / 2
    middle, spread = center @ matrix.mT, radius @ matrix.abs().mT
    return middle - spread, middle + spread, (center.abs() + radius) @ matrix.abs().mT
