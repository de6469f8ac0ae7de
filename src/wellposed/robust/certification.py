"""Which samples provably keep their class, which an attack changes, and how wide the bounds of each method are.

`examine_radii` asks bounds and attacks about several radii. `branch_and_bound` decides what they leave open.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.errors import IllPosedError, InputError, MissingExtraError, WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust.attacks import Attack, pgd
from wellposed.robust.attacks.attack import margin
from wellposed.robust.bounds import METHODS, certified, output_bounds
from wellposed.robust.boxes import solve_states
from wellposed.robust.crown import CrownPass, bounded_units
from wellposed.robust.intervals import IntervalPropagation
from wellposed.robust.linear_programs import (
    Objectives,
    ReluConstraints,
    in_float64,
    of_sample,
    side_by_side,
    tightest_intervals,
    triangle_set,
)
from wellposed.robust.query import Functionals, MethodError, Posed, Query, check_target, margins, to_form
from wellposed.robust.sets import Box, Interval

FIRST = "crown"  # decides most samples in little time; "best" goes on with those it leaves open
ROUNDING = 1e3  # units by which the outputs of a model may be off
PART = 50  # samples that are bounded at once
WIDTHS = ("norm", "box", "interval", "l2", "crown", "optimised", "lp", "triangle")


class UnsoundError(WellposedError):
    """An attack succeeded within a set on which the class was proven."""


@dataclass(frozen=True)
class Radius:
    """What is known at one radius, per sample.

    Args:
        epsilon: the radius.
        clean, attacked, certified: (B,), whether a sample has its class, keeps it under attack, provably keeps it.
        widths: mean width of the outputs' bounds, by method.
        reasons: why a method is missing.
    """

    epsilon: float
    clean: Tensor
    attacked: Tensor
    certified: Tensor
    widths: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """Returns the share of samples of which one of the three holds."""
        holds: Tensor = getattr(self, name)
        return float(holds.double().mean())

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers."""
        shares = {f"{name}_accuracy": self.share(name) for name in ("clean", "certified", "attacked")}
        return {"epsilon": self.epsilon, **shares, "widths": self.widths, "not_applicable": self.reasons}


def _agreed(proven: Tensor, attack: Attack, target: Tensor, where: str) -> Tensor:
    """Compares proofs with an attack; a lead as small as the rounding of the model only costs the proof."""
    both = proven & attack.success
    rounding = ROUNDING * torch.finfo(attack.outputs.dtype).eps * attack.outputs.abs().amax(1)
    if bool((margin(attack.outputs, target) > rounding)[both].any()):
        raise UnsoundError(f"{where}: an attack changes a class that was proven; please report this")
    return proven & ~attack.success


def _proven(
    form: ImplicitForm, box: Box, target: Tensor, standing: Tensor, method: str, budget: float | None
) -> Tensor:  # (B,)
    if method != "best":
        return certified(form, box, target, method, budget)
    try:
        proven = certified(form, box, target, FIRST, budget)
    except (MethodError, IllPosedError):
        return certified(form, box, target, method, budget)
    left = (standing & ~proven).nonzero()[:, 0]
    if len(left):
        proven[left] = certified(form, Box(box.lower[left], box.upper[left]), target[left], method, budget)
    return proven


def _decided(
    model: ImplicitForm | nn.Module, proof: ImplicitForm, box: Box, target: Tensor, unsure: Tensor, proven: Tensor,
    attack: Attack, seconds: float,
) -> tuple[Tensor, Attack]:  # fmt: skip
    """Asks branch and bound about what is left open; its counter-examples join the attack if the model agrees."""
    inputs, outputs, success = attack.inputs.clone(), attack.outputs.clone(), attack.success.clone()
    verdicts = branch_and_bound(proof, Box(box.lower[unsure], box.upper[unsure]), target[unsure], seconds)
    for row, verdict in zip(unsure.tolist(), verdicts, strict=True):
        if verdict.status == "proven":
            proven[row] = True
        elif verdict.input is not None:
            point = verdict.input.clamp(box.lower[row], box.upper[row]).to(inputs)
            point = point.reshape(inputs[row : row + 1].shape)
            with torch.no_grad():
                said = model(point)
            if int(said.argmax(1)) != int(target[row]):
                inputs[row], outputs[row], success[row] = point[0], said[0], True
    return proven, replace(attack, inputs=inputs, outputs=outputs, success=success)


@dataclass(frozen=True, eq=False)
class Examination:
    """What is known at several radii, and what became of every sample.

    Args:
        radii: the smallest first.
        proven: (B,), the largest of the radii at which a sample provably keeps its class; -1 where there is none.
        broken: (B,), the smallest at which the attack changed its class; infinite where it did not, or where the
            class was wrong before.
        attacked: the input that did it; the clean one elsewhere.
        said: (B,), the class that the model gives to that input.
    """

    radii: list[Radius]
    proven: Tensor
    broken: Tensor
    attacked: Tensor
    said: Tensor


def examine_radii(
    model: ImplicitForm | nn.Module,
    form: ImplicitForm,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilons: Sequence[float],
    *,
    method: str = "best",
    valid: tuple[float, float] = (0.0, 1.0),
    budget: float | None = None,
    steps: int = 40,
    complete: float | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> Examination:
    """Certifies and attacks every sample at several radii, of which each box contains the ones before.

    A class that an attack changed is changed at all larger radii, and one that could not be proven is not asked
    about again. ``"best"`` is asked only where an attack left the class standing and ``"crown"`` left it open.

    Args:
        model, form: the classifier, and the same as a form. Proofs about a network are about the network itself,
            not about the form, whose weights conversion has rounded.
        epsilons, valid: the radii, in any order, and the range of the inputs.
        budget, steps: seconds for the bounds of `PART` samples, and steps of the attack.
        complete: seconds of `branch_and_bound` for every sample that bounds and attack leave open; None for none.
        tell: is told how many samples are done, once for every radius.

    Raises:
        UnsoundError: a bound and the attack contradict each other, which must not happen.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> u, target = torch.tensor([[0.9, 0.1], [0.6, 0.5], [0.1, 0.9]]), torch.tensor([0, 0, 0])
        >>> examination = examine_radii(form, form, u, target, [0.02, 0.1])
        >>> examination.proven.tolist(), [one.share("attacked") for one in examination.radii]
        ([0.1, 0.02, -1.0], [0.666..., 0.333...])
    """
    network = isinstance(model, nn.Module) and not isinstance(model, ImplicitModel)
    proof = to_form(model, form.input_shape) if network else form
    if complete is not None:
        ReluConstraints.of(proof, "branch_and_bound")  # says at once what cannot be split
    with torch.no_grad():
        said = torch.cat([model(part).argmax(1) for part in u.split(PART)])
    standing, open_, inputs = (clean := said == target).clone(), clean.clone(), u.clone()
    proven_at, broken_at = (torch.full((len(u),), x, dtype=torch.float64) for x in (-1.0, torch.inf))
    radii = []
    for epsilon in sorted(set(epsilons)):
        alive = standing.nonzero()[:, 0]
        tell(len(u) - len(alive))
        for rows in alive.split(PART):
            attack = pgd(model, u[rows], target[rows], epsilon, steps=steps, lower=valid[0], upper=valid[1])
            box = Box.around(u[rows].reshape(len(rows), *form.input_shape), epsilon, *valid).to(proof.dtype)
            proven, asked = open_[rows], open_[rows].nonzero()[:, 0]
            if len(asked):
                some, left = Box(box.lower[asked], box.upper[asked]), ~attack.success[asked]
                proven[asked] = _proven(proof, some, target[rows[asked]], left, method, budget)
            proven = _agreed(proven, attack, target[rows], f"{method} at {epsilon:g}")
            unsure = (open_[rows] & ~proven & ~attack.success).nonzero()[:, 0]
            if complete is not None and len(unsure):
                proven, attack = _decided(model, proof, box, target[rows], unsure, proven, attack, complete)
            fallen = rows[attack.success]
            inputs[fallen], said[fallen] = attack.inputs[attack.success], attack.outputs.argmax(1)[attack.success]
            standing[fallen], broken_at[fallen] = False, epsilon
            open_[rows], proven_at[rows[proven]] = proven, epsilon
            tell(len(rows))
        radii.append(Radius(epsilon, clean, standing.clone(), open_.clone()))
    return Examination(radii, proven_at, broken_at, inputs, said)


@torch.no_grad()
def output_widths(
    model: ImplicitForm | nn.Module, u: Tensor, epsilon: float, *,
    methods: Sequence[str] = WIDTHS, valid: tuple[float, float] = (0.0, 1.0), budget: float | None = None,
) -> tuple[dict[str, float], dict[str, str]]:  # fmt: skip
    """Measures the mean width of the outputs' bounds by method; a method that does not apply says why.

    Example:
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        >>> widths, reasons = output_widths(form, torch.full((1, 1), 0.5), 0.1, methods=("box", "interval"))
        >>> round(widths["box"], 3), reasons
        (0.2, {})
    """
    proof = to_form(model, tuple(u.shape[1:]))
    box = Box.around(u.reshape(len(u), *proof.input_shape), epsilon, *valid).to(proof.dtype)
    widths, reasons = {}, {}
    for method in methods:
        try:
            widths[method] = float(output_bounds(proof, box, METHODS[method], budget).width.mean())
        except (MethodError, IllPosedError, MissingExtraError) as error:
            reasons[method] = str(error).splitlines()[0]
    return widths, reasons


TOGETHER = 16  # nodes that are split at once
SOLVED = 1e-8  # relative to the outputs, by which a counter-example must lead
ROOT_ROUNDS = 6  # of refinement before anything is split


@dataclass(frozen=True)
class Verdict:
    """What is known of one sample.

    Args:
        status: "proven", "counter-example" or "undecided", when time was over.
        gap: an upper bound of the lead of any other class, negative where the class is proven; the lead reached
            by a counter-example.
        nodes: how many parts of the problem were bounded.
        input: the counter-example; None if there is none.
    """

    status: Literal["proven", "counter-example", "undecided"]
    gap: float
    nodes: int
    input: Tensor | None = None


@torch.no_grad()
def branch_and_bound(
    model: ImplicitForm | nn.Module, inputs: Box, target: Tensor, budget: float = 60.0
) -> list[Verdict]:
    """Decides for every sample whether it keeps its class on its whole box, for ReLU networks and loops.

    What linear bounds leave open is split: a state that may be on or off is taken to be on and then to be off,
    which makes it affine. A part is done when its bound is negative or its intervals are empty. Parts in which no
    state is left to split are linear programs, whose solutions are counter-examples or proofs, so that the answer
    is complete but for time and rounding. The part with the largest bound comes first.

    Args:
        target: (B,), the classes.
        budget: seconds for every sample.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> box = Box.around(torch.tensor([[0.9, 0.1], [0.6, 0.5]]), 0.1)
        >>> [verdict.status for verdict in branch_and_bound(form, box, torch.tensor([0, 0]))]
        ['proven', 'counter-example']
    """
    if not isinstance(inputs, Box):
        raise InputError(f"branch and bound splits boxes; received a {type(inputs).__name__}")
    if not budget > 0:
        raise InputError(f"the time budget is a positive number of seconds; received {budget}")
    form, exact, _ = Posed.of(model, inputs)
    rows = margins(form.sizes[2], check_target(target, len(inputs), form.sizes[2]), exact.center)
    verdicts = []
    for index in range(len(inputs)):
        one = Box(exact.box().lower[index : index + 1], exact.box().upper[index : index + 1])
        query = in_float64(Query(form, one, rows[index : index + 1], monotonic() + budget))
        verdicts.append(_Search(query, int(target[index])).run())
    return verdicts


Node = tuple[float, int, list[Interval]]  # minus the bound, a number, and the pre-activations of all blocks


class _Search:
    """The parts of one sample's problem, the one with the largest bound first."""

    def __init__(self, query: Query, target: int) -> None:
        self.query, self.target, self.nodes = query, target, 0
        self.constraints = ReluConstraints.of(query.form, "branch_and_bound")
        self.relu = [phi.is_relu for phi in query.form.activations]
        self.best, self.input = -math.inf, query.set.center
        self.number = count()

    def run(self) -> Verdict:
        """Splits until nothing is left, a counter-example is found or the time is over."""
        self._try(self._ascend())
        root = tightest_intervals(self.query, ROOT_ROUNDS)
        assert self.query.combination is not None
        gaps = [-math.inf]
        for row in range(self.query.combination.shape[1]):
            if row != self.target and self.best < 0:
                gaps.append(self._class(root, row))
        if self.best >= 0:
            return Verdict("counter-example", self.best, self.nodes, self.input)
        return Verdict("proven" if max(gaps) < 0 else "undecided", max(gaps), self.nodes)

    def _class(self, root: IntervalPropagation, row: int) -> float:
        """Bounds the lead of one class as far as there is time, or until it is known to be negative."""
        start = [root.z(k) for k in range(len(root.activations))]
        done = -math.inf
        parts: list[Node] = []
        self._add(parts, row, root, start)
        while parts and -parts[0][0] >= 0 and self.best < 0 and not self.query.late:
            some = [heapq.heappop(parts) for _ in range(min(TOGETHER, len(parts)))]
            open_ = [node for node in some if -node[0] >= 0]
            done = max([done, *(-node[0] for node in some if -node[0] < 0)])
            children = []
            for bound, _, z in open_:
                split = self._split(z, row)
                if split is None:
                    done = max(done, min(self._leaf(z, row), -bound))
                else:
                    children += split
            if children:
                joined = [
                    Interval(*(torch.cat([child[k][end] for child in children]) for end in (0, 1)))
                    for k in range(len(start))
                ]
                self._add(parts, row, root, joined)
        return max([done, *(-node[0] for node in parts)])

    def _add(self, parts: list[Node], row: int, root: IntervalPropagation, z: list[Interval]) -> None:
        """Bounds some parts at once; those whose intervals are empty are left out."""
        number = len(z[0].lower)
        self.nodes += number
        enclosure = self._repeated(root, number)
        backward, empty = CrownPass(enclosure), torch.zeros(number, dtype=torch.bool)
        enclosure.assume(dict(enumerate(z)))
        for k in range(len(z)):
            lines = backward.lines[k]
            assert lines is not None
            known = enclosure.z(k)
            found = bounded_units(backward, k, lines.unstable(known), known).within(known)
            empty = empty | (found.lower > found.upper).any(1)
            enclosure.assume({k: found.where(~empty[:, None], known)})
        combination = self.query.combination
        assert combination is not None
        rows = combination[:, row].expand(number, -1)
        functionals = Functionals.of_outputs(
            enclosure.operators, rows, enclosure.states, enclosure.query.set, enclosure.query.sample
        )
        upper, _ = backward.upper(functionals)
        for part in (~empty).nonzero()[:, 0].tolist():
            own = [Interval(*(end[part : part + 1] for end in enclosure.z(k))) for k in range(len(z))]
            heapq.heappush(parts, (-float(upper[part]), next(self.number), own))

    def _repeated(self, root: IntervalPropagation, number: int) -> IntervalPropagation:
        """Copies what is known at the root for several parts."""
        lower, upper = (end.expand(number, -1) for end in (self.query.set.box().lower, self.query.set.box().upper))
        combination = lower.new_zeros(number, 1, self.query.form.sizes[2])
        query = Query(self.query.form, Box(lower, upper), combination, self.query.deadline)
        states = [Interval(*(end.expand(number, -1) for end in x)) for x in root.states]
        enclosure = IntervalPropagation(query, lambda _: states)
        for k, x in enumerate(states):
            z = Interval(*(end.expand(number, -1) for end in root.z(k)))
            enclosure.replace(k, z, x, root.size(k).expand(number, -1))
        return enclosure

    def _split(self, z: list[Interval], row: int) -> list[list[Interval]] | None:
        """Splits the state that moves the bound most, by the area between its lines; None if all are affine."""
        scores = []
        for k, (one, weight) in enumerate(zip(z, self._weights(row), strict=True)):
            low, high = one.lower[0].clamp(max=0), one.upper[0].clamp(min=0)
            area = torch.where((low < 0) & (high > 0), -low * high / (high - low), 0.0)
            scores.append((weight + 1e-6) * area if self.relu[k] else torch.zeros_like(area))
        whole = torch.cat(scores)
        if not bool((whole > 0).any()):
            return None
        best = int(whole.argmax())
        k, unit = next((k, best - start) for k, start in self._starts() if best - start < z[k].lower.shape[1])
        off, on = z[k].upper.clone(), z[k].lower.clone()
        off[0, unit], on[0, unit] = 0.0, 0.0
        return [
            [Interval(one.lower, off) if j == k else one for j, one in enumerate(z)],
            [Interval(on, one.upper) if j == k else one for j, one in enumerate(z)],
        ]

    def _starts(self) -> list[tuple[int, int]]:
        ends = np.cumsum((0, *self.query.form.partition))
        return [(k, int(start)) for k, start in enumerate(ends[:-1])]

    def _weights(self, row: int) -> list[Tensor]:
        """Returns how much the lead changes with every state, to first order at the center."""

        def made(_: Query) -> list[Tensor]:
            form = self.query.form
            x = form.equilibrium(self.query.set.center, on_failure="ignore").value
            assert isinstance(x, Tensor) and self.query.combination is not None
            slope = torch.tensor(self.constraints.relu) & ~(x[0] > 0)
            A, C = form.A.to_dense(), form.C.to_dense()
            system = torch.eye(len(A), dtype=A.dtype) - torch.where(slope, 0.0, 1.0)[:, None] * A
            nu = torch.linalg.solve_ex(system.mT, self.query.combination[0, row] @ C)[0]
            return list(nu.nan_to_num().abs().split(form.partition))

        return self.query.once(f"weights of class {row}", made)

    def _leaf(self, z: list[Interval], row: int) -> float:
        """Solves the linear program of a part in which no state is left to split."""
        x = [Interval(*(end.clamp(min=0) for end in one)) if self.relu[k] else one for k, one in enumerate(z)]
        wide, joined = side_by_side(x), side_by_side(z)
        polyhedron = triangle_set(self.constraints, of_sample(wide, 0), of_sample(joined, 0), self.query.set, 0)
        objectives = Objectives.of(self.query, x)
        states, inputs = objectives.objective(0, row)
        optimum = polyhedron.program.maximum(polyhedron.objective(states, inputs))
        if np.isfinite(optimum.value):
            self._try(torch.as_tensor(polyhedron.input(optimum.point))[None])
        return optimum.bound + float(objectives.constant[row]) + float(objectives.slack[row])

    def _try(self, u: Tensor) -> None:
        """Keeps an input of the box that was solved and is worse than those before, by more than rounding."""
        box, form = self.query.set.box(), self.query.form
        u = u.clamp(box.lower, box.upper)
        x = solve_states(form, u)
        z = form.A.apply(x) + form.B.apply(u) + (0.0 if form.bias is None else form.bias)
        phis = zip(form.activations, z.split(form.partition, dim=1), strict=True)
        residual = (x - torch.cat([phi.function(part) for phi, part in phis], dim=1)).abs().amax(1)
        y = form.C.apply(x) + form.D.apply(u) + (0.0 if form.output_bias is None else form.output_bias)
        lead = y.clone()
        lead[:, self.target] = -math.inf
        value = lead.amax(1) - y[:, self.target] - SOLVED * (1 + y.abs().amax(1))
        value = torch.where(residual < 1e-4 * SOLVED * (1 + x.abs().amax(1)), value, -math.inf)
        worst = int(value.argmax())
        if float(value[worst]) > self.best:
            self.best, self.input = float(value[worst]), u[worst : worst + 1]

    @torch.enable_grad()
    def _ascend(self, steps: int = 20) -> Tensor:
        """Goes up the lead of every other class by sign gradients; returns the points on the way."""
        box, form = self.query.set.box(), self.query.form
        q, radius = form.sizes[2], (box.upper - box.lower) / 2
        u, points = box.center.expand(q, -1), []
        for step in range(steps):
            u = u.detach().requires_grad_()
            x = form.equilibrium(u, on_failure="ignore").value
            assert isinstance(x, Tensor)
            y = form.C.apply(x) + form.D.apply(u)
            (slope,) = torch.autograd.grad((y.diagonal() - y[:, self.target]).sum(), u)
            u = (u.detach() + radius * max(0.05, 1 - step / steps) * slope.sign()).clamp(box.lower, box.upper)
            points.append(u)
        return torch.cat(points).detach()
