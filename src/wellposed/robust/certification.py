"""Which samples provably keep their class, which an attack changes, and how wide the bounds of each method are.

`examine_radii` asks bounds and attacks about several radii. `branch_and_bound` decides what they leave open, and
`decide` whether a network has a property: that its outputs avoid sets which linear inequalities describe.
"""

import heapq
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import IllPosedError, InputError, MissingExtraError, WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust.attacks import Attack, pgd
from wellposed.robust.attacks.attack import margin
from wellposed.robust.bounds import METHODS, certified, output_bounds, outputs, same_outputs
from wellposed.robust.boxes import CenterSolve, solve_states, states_of_branch
from wellposed.robust.crown import Continuation, CrownPass, center_preactivations
from wellposed.robust.intervals import IntervalPropagation, branch_states
from wellposed.robust.linear_programs import (
    STEPS,
    LinearProgram,
    Maximum,
    Objectives,
    Regions,
    RelaxedSet,
    ReluConstraints,
    Start,
    continue_loops,
    continued_box,
    crown_intervals,
    in_float64,
    side_by_side,
    triangle_set,
)
from wellposed.robust.query import (
    BRANCH,
    Functionals,
    MethodError,
    Operators,
    Posed,
    Query,
    check_target,
    deadline,
    margins,
    output_size,
    to_form,
    well_posed,
)
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


def _agreed(proven: Tensor, attack: Attack, target: Tensor, where: str, branch: bool) -> Tensor:
    """Compares proofs with an attack; a lead as small as the rounding of the model only costs the proof.

    So does an attack that leads a model to other equilibria than those of the branch that was proven.
    """
    both = proven & attack.success & (not branch)
    rounding = ROUNDING * torch.finfo(attack.outputs.dtype).eps * attack.outputs.abs().amax(1)
    if bool((margin(attack.outputs, target) > rounding)[both].any()):
        raise UnsoundError(f"{where}: an attack changes a class that was proven; please report this")
    return proven & ~attack.success


Known = MutableMapping[str, Any]  # results of an earlier run, by radius, sample and method


@dataclass(frozen=True, eq=False)
class _Examiner:
    """Certifies and attacks samples; the arguments are those of `examine_radii`."""

    model: ImplicitForm | nn.Module
    proof: ImplicitForm  # what is bounded
    branch: bool  # whether proofs are about a branch
    method: str
    valid: tuple[float, float]
    budget: float | None
    steps: int
    complete: float | None
    known: Known

    def examine(
        self, u: Tensor, target: Tensor, asked: Tensor, epsilon: float, rows: list[int]
    ) -> tuple[Tensor, Attack]:
        """Returns which of the samples that are asked about keep their class, and the attack on all of them."""
        attack = pgd(self.model, u, target, epsilon, steps=self.steps, lower=self.valid[0], upper=self.valid[1])
        box = Box.around(u.reshape(len(u), *self.proof.input_shape), epsilon, *self.valid).to(self.proof.dtype)
        proven, some = asked.clone(), asked.nonzero()[:, 0]
        if len(some):
            keys = [f"{epsilon!r} {rows[index]} {self.method}" for index in some.tolist()]
            part = Box(box.lower[some], box.upper[some])
            proven[some] = self._bounded(part, target[some], ~attack.success[some], keys)
        proven = _agreed(proven, attack, target, f"{self.method} at {epsilon:g}", self.branch)
        if self.complete is None:
            return proven, attack
        unsure = (asked & ~proven & ~attack.success).nonzero()[:, 0].tolist()
        keys = [f"{epsilon!r} {row} complete" for row in rows]
        return self._decided(box, target, unsure, proven, attack, self.complete, keys)

    def _bounded(self, box: Box, target: Tensor, standing: Tensor, keys: list[str]) -> Tensor:  # (B,)
        """Bounds the samples of which nothing is known yet, and remembers the results."""
        asked = torch.tensor([index for index, key in enumerate(keys) if key not in self.known], dtype=torch.int64)
        if len(asked):
            proven = self._proven(Box(box.lower[asked], box.upper[asked]), target[asked], standing[asked])
            for index, held in zip(asked.tolist(), proven.tolist(), strict=True):
                self.known[keys[index]] = held
        return torch.tensor([bool(self.known[key]) for key in keys], device=target.device)

    def _proven(self, box: Box, target: Tensor, standing: Tensor) -> Tensor:  # (B,)
        if self.method != "best":
            return certified(self.proof, box, target, self.method, self.budget)
        try:
            proven = certified(self.proof, box, target, FIRST, self.budget)
        except (MethodError, IllPosedError):
            return certified(self.proof, box, target, self.method, self.budget)
        left = (standing & ~proven).nonzero()[:, 0]
        if len(left):
            part = Box(box.lower[left], box.upper[left])
            proven[left] = certified(self.proof, part, target[left], self.method, self.budget)
        return proven

    def _decided(
        self, box: Box, target: Tensor, unsure: list[int], proven: Tensor, attack: Attack, seconds: float,
        keys: list[str],
    ) -> tuple[Tensor, Attack]:  # fmt: skip
        """Asks branch and bound about what is open; its counter-examples join the attack if the model agrees."""
        inputs, outputs, success = attack.inputs.clone(), attack.outputs.clone(), attack.success.clone()
        for row in unsure:
            one = Box(box.lower[row : row + 1], box.upper[row : row + 1])
            facts = self.known.get(keys[row])
            if facts is None or (facts["status"] == "undecided" and facts["budget"] < seconds):
                (verdict,) = branch_and_bound(self.proof, one, target[row : row + 1], seconds)
                facts = self.known[keys[row]] = {**verdict.facts(), "budget": seconds}
            if facts["status"] == "proven":
                proven[row] = True
            elif facts["input"] is not None:
                point = torch.tensor(facts["input"], dtype=torch.float64).to(one.lower)
                point = point.clamp(one.lower[0], one.upper[0]).to(inputs).reshape(inputs[row : row + 1].shape)
                with torch.no_grad():
                    answer = self.model(point)
                if int(answer.argmax(1)) != int(target[row]):
                    inputs[row], outputs[row], success[row] = point[0], answer[0], True
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
        predicted: (B,), the class that the model gives to that input.
        branch: whether proofs are about the branch through the equilibrium at the center of a box, because a loop
            has no certificate.
    """

    radii: list[Radius]
    proven: Tensor
    broken: Tensor
    attacked: Tensor
    predicted: Tensor
    branch: bool = False


def examine_radii(
    model: ImplicitForm | nn.Module, form: ImplicitForm, u: Tensor, target: Tensor, epsilons: Sequence[float], *,
    method: str = "best", valid: tuple[float, float] = (0.0, 1.0), budget: float | None = None, steps: int = 40,
    complete: float | None = None, known: Known | None = None, tell: Callable[[int], None] = lambda count: None,
) -> Examination:  # fmt: skip
    """Certifies and attacks every sample at several radii, of which each box contains the ones before.

    A class that an attack changed is changed at all larger radii, and one that could not be proven is not asked
    about again. ``"best"`` is asked only where an attack left the class standing and ``"crown"`` left it open.

    Args:
        model, form: the classifier, and the same as a form. Proofs about a network are about the network itself,
            not about the form, whose weights conversion has rounded.
        epsilons, valid: the radii, in any order, and the range of the inputs.
        budget, steps: seconds for the bounds of `PART` samples, and steps of the attack.
        complete: seconds of `branch_and_bound` for every sample that bounds and attack leave open; None for none.
        known: what is known already of these samples, such as a `Journal`; every result is added to it.
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
    branch = not well_posed(proof)
    if complete is not None:
        ReluConstraints.of(proof, "branch_and_bound")  # says at once what cannot be split
    known = {} if known is None else known
    examiner = _Examiner(model, proof, branch, method, valid, budget, steps, complete, known)
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in u.split(PART)])
    standing, open_, inputs = (clean := predicted == target).clone(), clean.clone(), u.clone()
    if branch and isinstance(model, nn.Module):  # a proof about other equilibria than its own says nothing of it
        points = Box(*(u.reshape(len(u), *form.input_shape).to(proof.dtype),) * 2)
        open_ &= same_outputs(model, points, proof, states_of_branch(proof, points.center))
    proven_at, broken_at = (torch.full((len(u),), x, dtype=torch.float64) for x in (-1.0, torch.inf))
    radii = []
    for epsilon in sorted(set(epsilons)):
        alive = standing.nonzero()[:, 0]
        tell(len(u) - len(alive))
        for rows in alive.split(PART):
            proven, attack = examiner.examine(u[rows], target[rows], open_[rows], epsilon, rows.tolist())
            changed = attack.success
            broken = rows[changed]
            inputs[broken], predicted[broken] = attack.inputs[changed], attack.outputs.argmax(1)[changed]
            standing[broken], broken_at[broken] = False, epsilon
            open_[rows], proven_at[rows[proven]] = proven, epsilon
            tell(len(rows))
        radii.append(Radius(epsilon, clean, standing.clone(), open_.clone()))
    return Examination(radii, proven_at, broken_at, inputs, predicted, branch)


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


EPS = 2.0**-52
SOLVED = 1e-8  # relative to the outputs, by which a counter-example must lead
POLISHED = 4  # of the points that are tried at once
FAR = 3.0  # times wider than first order are intervals of a loop that count as not enclosed
ROOT_ROUNDS = 8  # of refinement by CROWN
ROUNDS = 200  # of refinement by triangle programs
WORK = 2**27  # products in a step of the primal-dual method, up to which all states are tightened
MORE_STEPS = 10  # of the primal-dual method for bounds that were asked for before
GOAL_STEPS = 240  # for the rows of a goal, and a quarter of that if they were asked for before
WORTH = 0.995  # of the widths at most that a round of refinement must leave for another one


@dataclass(frozen=True)
class Verdict:
    """What is known of one sample, or of one property.

    Args:
        status: "proven", "counter-example" or "undecided", when time was over.
        gap: an upper bound of the lead of any other class, negative where the class is proven, if only just;
            the lead reached by a counter-example. Of a property: of the smallest of the values that were to be
            negative.
        nodes: how many parts of the problem were bounded; none if the attack has succeeded.
        input: the counter-example; None if there is none.
        branch: whether that is about the branch through the equilibrium at the center of the box alone.
        splits: how many parts were split; none where bounds were enough.
    """

    status: Literal["proven", "counter-example", "undecided"]
    gap: float
    nodes: int
    input: Tensor | None = None
    branch: bool = False
    splits: int = 0

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers."""
        point = None if self.input is None else self.input.flatten().tolist()
        gap = self.gap if math.isfinite(self.gap) else None
        about = {"branch": BRANCH} if self.branch else {}
        return {"status": self.status, "gap": gap, "nodes": self.nodes, "input": point, **about}


@dataclass(frozen=True, eq=False)
class Forbidden:
    """Outputs that a network must not have for inputs of a box: ``rows y + offset >= 0`` in every row.

    Args:
        inputs: a box of one sample.
        rows: (k, q).
        offset: (k,).
    """

    inputs: Box
    rows: Tensor
    offset: Tensor


@torch.no_grad()
def branch_and_bound(
    model: ImplicitForm | nn.Module, inputs: Box, target: Tensor, budget: float = 60.0
) -> list[Verdict]:
    """Decides for every sample whether it keeps its class on its whole box, for ReLU networks and loops.

    What linear bounds leave open is bounded by triangle programs, under the condition that the class has changed:
    all pre-activations are enclosed again and again, until some interval is empty or the programs agree that the
    condition cannot be met. What is left is split: a state that may be on or off is taken to be on and then to be
    off, which makes it affine. Parts in which no state is left to split are linear programs, whose solutions are
    counter-examples or proofs, so that the answer is complete but for time and rounding. The part with the largest
    bound comes first.

    A loop that cannot be enclosed on the whole box is followed by continuation as far as the class is kept, which
    is enough: a class that changes somewhere has a first point at which two classes are equal.

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
    form, exact, _ = Posed.of(model, inputs)
    q = form.sizes[2]
    rows = margins(q, check_target(target, len(inputs), q), exact.center)
    verdicts = []
    for index in range(len(inputs)):
        one = Box(exact.box().lower[index : index + 1], exact.box().upper[index : index + 1])
        query = in_float64(Query(form, one, rows[index : index + 1], deadline(budget)))
        goals = [[row] for row in range(q) if row != int(target[index])]
        verdicts.append(_Search(query, goals, torch.zeros(q, dtype=torch.float64)).run())
    return verdicts


@torch.no_grad()
def decide(
    model: ImplicitForm | nn.Module, sets: Sequence[Forbidden], budget: float = 60.0, complete: bool = True
) -> Verdict:
    """Decides whether the outputs avoid all of some sets; a counter-example is an input that leads into one.

    Args:
        sets: those with the same box of inputs share what is known of the states.
        budget: seconds for all of them.
        complete: whether what bounds and attack leave open is split as by `branch_and_bound`, which asks for ReLU.

    Example:
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))  # y = max(u, 0)
        >>> box, row = Box(torch.tensor([[-1.0]]), torch.tensor([[2.0]])), torch.ones(1, 1)
        >>> [decide(form, [Forbidden(box, row, torch.tensor([-most]))]).status for most in (3.0, 1.0)]
        ['proven', 'counter-example']
    """
    end, verdicts = deadline(budget), []
    boxes: dict[int, list[Forbidden]] = {}
    for one in sets:
        boxes.setdefault(id(one.inputs), []).append(one)
    for together in boxes.values():
        form, exact, _ = Posed.of(model, together[0].inputs)
        rows, offset = (torch.cat([getattr(one, name) for one in together]) for name in ("rows", "offset"))
        if rows.shape[1:] != form.sizes[2:]:
            raise InputError(f"the property has {rows.shape[1]} outputs, the network {form.sizes[2]}")
        if not bool(rows.isfinite().all() and offset.isfinite().all()):
            raise InputError(f"inequalities need finite numbers; received rows {rows.tolist()}, {offset.tolist()}")
        query = in_float64(Query(form, exact, rows[None].to(exact.center), end))
        numbers = torch.arange(len(rows)).split([len(one.rows) for one in together])
        search = _Search(query, [part.tolist() for part in numbers], offset.double(), complete)
        verdicts.append(search.run())
        if verdicts[-1].status == "counter-example":
            return replace(verdicts[-1], nodes=sum(verdict.nodes for verdict in verdicts))
    gap = max((verdict.gap for verdict in verdicts), default=-math.inf)
    proven = all(verdict.status == "proven" for verdict in verdicts)
    branch = any(verdict.branch for verdict in verdicts)
    nodes = sum(verdict.nodes for verdict in verdicts)
    return Verdict("proven" if proven else "undecided", gap, nodes, branch=branch)


@dataclass(order=True)
class _Part:
    """A part of the problem: what the pre-activations may be there.

    Args:
        order: minus its bound, then its number.
        z: (n,), all pre-activations.
        scores: (n,), what splitting each state promises.
        memory: where the last bounds of z from above, of those from below and of the goal ended.
    """

    order: tuple[float, int]
    z: Interval = field(compare=False)
    scores: Tensor = field(compare=False)
    memory: Start = field(compare=False)

    @property
    def bound(self) -> float:
        """An upper bound of the least row of the goal."""
        return -self.order[0]


class _Search:
    """The parts of one sample's problem, the one with the largest bound first.

    A goal is some rows of the query's combination: is there an input at which all of them, with their offsets, are
    nonnegative? For a class every other class is a goal of one row. Equilibria of interest have these rows
    nonnegative, so whatever bounds a part may assume that: intervals of the pre-activations become narrower, until
    some are empty or the rows are negative all the same.
    """

    def __init__(self, query: Query, goals: list[list[int]], offset: Tensor, complete: bool = True) -> None:
        self.query, self.goals, self.offset, self.complete = query, goals, offset, complete
        self.nodes = self.splits = 0
        if complete:
            self.constraints = ReluConstraints.of(query.form, "branch_and_bound")
        self.relu = [phi.is_relu for phi in query.form.activations]
        if not well_posed(query.form):
            branch_states(query)  # says why if there is none
        self.branch = query.branches[0] if query.branches else None
        self.best, self.input = -math.inf, query.set.center
        self.number = count()

    @property
    def rows(self) -> Tensor:  # (R, q)
        """All rows."""
        assert self.query.combination is not None
        return self.query.combination[0]

    def run(self) -> Verdict:
        """Splits until nothing is left, a counter-example is found or the time is over."""
        if self.branch is not None and not bool(self.branch.proven.all()):
            return Verdict("undecided", math.inf, 0, branch=True)
        if not self.goals:  # there is one class alone
            return Verdict("proven", -math.inf, 0, branch=self.branch is not None)
        self._try(self._ascend() if self.branch is None else self._first_order())
        gaps = [-math.inf]
        if self.best < 0:
            root = crown_intervals(self.query, ROOT_ROUNDS)
            if self.complete:
                gaps += self._bound_goals(root)
            else:
                continue_loops(root)
                gaps += [self._crown(root, goal) for goal in self.goals]
        branch = self.branch is not None
        if self.best >= 0:
            return Verdict("counter-example", self.best, self.nodes, self.input, branch, self.splits)
        status: Literal["proven", "undecided"] = "proven" if max(gaps) < 0 else "undecided"
        return Verdict(status, max(gaps), self.nodes, branch=branch, splits=self.splits)

    def _crown(self, root: IntervalPropagation, goal: list[int]) -> float:
        """Bounds the least row of a goal without splitting anything."""
        self.nodes += 1
        sample = torch.zeros(len(goal), dtype=torch.int64)
        functionals = Functionals.of_outputs(root.operators, self.rows[goal], root.states, self.query.set, sample)
        upper, _ = CrownPass(root).upper(functionals)
        return float(_sum_up(upper, self.offset[goal]).min())

    def _bound_goals(self, root: IntervalPropagation) -> list[float]:
        """Bounds all goals, and splits those that are open one after the other."""
        objectives, offset = Objectives.of(self.query, root.states), self.offset
        size = objectives.constant.abs() + offset.abs()
        self.objectives = replace(
            objectives, constant=objectives.constant + offset, slack=objectives.slack + 2 * EPS * size
        )
        self.nodes += 1
        none, known = self.objectives.part([]), side_by_side(root.preactivations)
        kept, assumed = self._kept(root, known), none
        if kept is not None:
            z, assumed = kept, self.objectives.part([row for goal in self.goals for row in goal]).negated
        else:
            continue_loops(root)
            z = side_by_side(root.preactivations)
        z = self._narrowed(z, assumed)
        bounds = self._maximum(z, none, self.objectives)
        gaps = [float(bounds[goal].min()) for goal in self.goals]
        for k, goal in enumerate(self.goals):
            if 0 <= gaps[k] < math.inf and self.best < 0 and not self.query.late:
                gaps[k] = self._bound_goal(z, goal, gaps[k], assumed)
        if kept is not None and max(gaps) >= 0:  # beyond a change of class nothing is known but this
            bounds = self._maximum(known, none, self.objectives)
            gaps = [float(bounds[goal].min()) for goal in self.goals]
        return gaps

    def _maximum(self, z: Interval, conditions: Objectives, rows: Objectives, steps: int = STEPS) -> Tensor:
        regions = Regions(self.constraints, self._inputs, z, conditions)
        return regions.maximum(rows, torch.zeros(len(rows), dtype=torch.int64), steps).bound

    def _kept(self, root: IntervalPropagation, z: Interval) -> Interval | None:  # (1, n)
        """Encloses a loop as far as no goal is reached, where it could not be enclosed for all inputs.

        Let V be the inputs whose equilibrium lies in a closed box while all rows are nonpositive. If that puts the
        equilibrium in the interior of the box, and no row can then reach zero, V is open; it is closed and holds
        the center, so it holds all inputs, as in `Continuation`.
        """
        order, applies = root.operators.order, Continuation(CrownPass(root))
        if len(order.stages) > 1 or not order.loops or any(len(goal) > 1 for goal in self.goals):
            return None
        if applies.why_not(order.stages[0]):
            return None
        rows = self.objectives.part([row for goal in self.goals for row in goal])
        try:
            center = side_by_side(self.query.once("center_preactivations", center_preactivations))
            u = self.query.once("center", CenterSolve.of).u.double()
        except (IllPosedError, MethodError):
            return None
        point = Regions(self.constraints, Interval(u[0], u[0]), center, rows.part([]))
        if not bool((point.maximum(rows, torch.zeros(len(rows), dtype=torch.int64), 0).bound < 0).all()):
            return None
        box = continued_box(
            self.constraints, self._inputs, z.at(0), center.at(0),
            torch.ones_like(z.lower[0], dtype=torch.bool), self.query, rows.negated, FAR,
        )  # fmt: skip
        return None if box is None else Interval(box.lower[None], box.upper[None])

    @property
    def _inputs(self) -> Interval:
        return self.query.set.box().interval.at(0)

    def _chosen(self, regions: Regions, active: Tensor) -> tuple[Tensor, Tensor]:
        """Returns regions and units that are not affine there; if these are too many, those furthest from it."""
        region, unit = (regions.open & active[:, None]).nonzero(as_tuple=True)
        states = int(regions.open.any(0).sum())
        most = WORK // (2 * states * (states + len(self._inputs.lower)) + 1)
        if len(unit) > most:
            z = Interval(regions.z.lower[region, unit], regions.z.upper[region, unit])
            best = (-z.lower * z.upper / z.width).topk(most).indices.sort().values
            region, unit = region[best], unit[best]
        return region, unit

    def _narrowed(self, z: Interval, conditions: Objectives) -> Interval:
        """Tightens all pre-activations that are not affine, as long as that makes them much narrower."""
        active, memory = torch.ones(1, dtype=torch.bool), self._nothing(0, len(conditions))
        for round in range(ROUNDS):
            if self.query.late:
                break
            before = z
            z, memory = self._tighten(z, conditions, active, memory, MORE_STEPS if round else STEPS)
            if not float(z.width.sum()) < WORTH * float(before.width.sum()):
                break
        return z

    def _nothing(self, rows: int, conditions: int) -> Start:
        """Returns a memory, as of `_Part`, of bounds that were never asked for."""
        n, p = self.constraints.B.shape
        nothing = torch.full((1, 2 * n + rows, 1), math.nan, dtype=torch.float64)
        return (
            nothing.expand(-1, -1, n),
            nothing.expand(-1, -1, conditions),
            nothing.half().expand(-1, -1, 2 * n + p),
        )

    def _tighten(
        self, z: Interval, conditions: Objectives, active: Tensor, memory: Start, steps: int
    ) -> tuple[Interval, Start]:
        """Tightens the pre-activations of active regions."""
        regions = Regions(self.constraints, self._inputs, z, conditions)
        region, unit = self._chosen(regions, active)
        if not len(unit):
            return z, memory
        where = region.repeat(2), torch.cat([unit, z.lower.shape[1] + unit])
        lam, weights, point = memory
        found = regions.maximum(
            regions.units(region, unit), where[0], steps, (lam[where], weights[where], point[where])
        )
        upper, lower = found.bound.chunk(2)
        new = Interval(z.lower.index_put((region, unit), -lower), z.upper.index_put((region, unit), upper))
        return new.within(z), _kept_in(memory, where, found)

    def _bound_goal(self, z: Interval, goal: list[int], bound: float, assumed: Objectives) -> float:
        """Bounds the least row of a goal as far as there is time, or until it is known to be negative.

        Args:
            bound: what is known of it.
            assumed: rows that are nonnegative wherever that matters, those of all goals times -1, or none.
        """
        if not z.lower.numel():
            return self._leaf(z.at(0), goal)
        done, least = -math.inf, SOLVED * (1 + bound)
        rows = self.objectives.part(goal)
        rows = replace(rows, constant=rows.constant + least, slack=rows.slack + 2 * EPS * rows.constant.abs())
        own = [k for k, row in enumerate(row for one in self.goals for row in one) if row in goal]
        own = own if len(assumed) else []
        others = [k for k in range(len(assumed)) if k not in own]
        conditions = rows.beside(assumed.part(others)).beside(assumed.part(own))
        memory = self._nothing(len(rows), len(conditions))
        parts = self._examined(z, rows, conditions, len(others), [bound], memory)
        while parts and self.best < 0 and not self.query.late:
            part = heapq.heappop(parts)
            split = self._split(part)
            self.splits += split is not None
            if split is None:
                done = max(done, min(self._leaf(part.z, goal), part.bound))
                if done >= 0:
                    break
            else:
                lam, weights, point = (one.expand(2, -1, -1) for one in part.memory)
                both = [part.bound] * 2
                for child in self._examined(split, rows, conditions, len(others), both, (lam, weights, point)):
                    heapq.heappush(parts, child)
        return max([-least, done, *(part.bound for part in parts)])

    def _examined(
        self,
        z: Interval,
        goal: Objectives,
        conditions: Objectives,
        others: int,
        bounds: list[float],
        memory: Start,
    ) -> list[_Part]:
        """Tightens some parts together as far as is worth it; those that cannot reach the goal are left out.

        Args:
            z: (K, n).
            goal: rows that are nonnegative where the goal is reached.
            conditions: the goal, some other rows that are nonnegative then, and maybe those of the goal times -1,
                without which a bound of the goal tells how far it is from being reached.
            others: how many.
            bounds: known bounds of the parts.
            memory: (K, 2n + rows of the goal, ...), where to start from; see `_Part`.
        """
        self.nodes += len(bounds)
        least, n, count = torch.tensor(bounds, dtype=torch.float64), z.lower.shape[1], len(goal) + others
        scores, active = torch.zeros_like(z.lower), torch.ones(len(least), dtype=torch.bool)
        apart = conditions.part(list(range(count)))
        for _ in range(ROUNDS):
            fresh, before = bool(memory[0][0, -1, 0].isnan()), z
            z, memory = self._tighten(z, conditions, active, memory, STEPS if fresh else MORE_STEPS)
            own, each = torch.arange(len(least)).repeat_interleave(len(goal)), torch.arange(len(goal))
            where = own, 2 * n + each.repeat(len(least))
            regions = Regions(self.constraints, self._inputs, z, apart)
            lam, weights, point = (one[where] for one in memory)
            found = regions.maximum(
                goal.part(each.repeat(len(least))), own, GOAL_STEPS // (1 if fresh else 4),
                (lam, weights[:, :count], point),
            )  # fmt: skip
            memory = _kept_in(memory, where, found)
            least = torch.minimum(least, found.bound.view(len(least), -1).amin(1))
            scores = found.gaps.view(len(least), len(goal), -1).sum(1)
            alive = (least >= 0) & (z.lower <= z.upper).all(1)
            active = (z.width.sum(1) <= WORTH * before.width.sum(1))[alive]
            lam, weights, point = (one[alive] for one in memory)
            z, memory = z.at(alive), (lam, weights, point)
            least, scores = least[alive], scores[alive]
            if not bool(active.any()) or self.query.late:
                break
        if len(least):
            self._try(regions.inputs_at(found.point))
        return [
            _Part((-float(least[k]), next(self.number)), z.at(k), scores[k], (lam[k], weights[k], point[k]))
            for k in range(len(least))
        ]

    def _split(self, part: _Part) -> Interval | None:  # (2, n)
        """Splits the state whose relaxation raises the bound most; None if all are affine."""
        low, high = part.z
        area = -low.clamp(max=0) * high.clamp(min=0) / part.z.width.clamp(min=1e-300)
        area = torch.where(torch.from_numpy(self.constraints.relu), area, 0.0)
        if not bool((area > 0).any()):
            return None
        unit = int(torch.where(area > 0, part.scores + 1e-6 * area / area.sum(), -1.0).argmax())
        lower, upper = low.repeat(2, 1), high.repeat(2, 1)
        upper[0, unit], lower[1, unit] = 0.0, 0.0
        return Interval(lower, upper)

    def _leaf(self, joined: Interval, goal: list[int]) -> float:
        """Solves the linear program of a part in which no state is left to split.

        Several rows are added up with the weights at which their least is largest: if the sum is negative
        everywhere, so is the least.
        """
        ends = zip(*(end[None].split(self.query.form.partition, dim=1) for end in joined), strict=True)
        z = [Interval(*pair) for pair in ends]
        x = [Interval(*(end.clamp(min=0) for end in one)) if self.relu[k] else one for k, one in enumerate(z)]
        polyhedron = triangle_set(self.constraints, side_by_side(x).at(0), joined, self.query.set, 0)
        rows, offset = self.rows[goal], self.offset[goal]
        weights = self._least_rows(polyhedron, x, goal) if len(goal) > 1 else torch.ones(1, dtype=torch.float64)
        query = replace(self.query, combination=(weights @ rows)[None, None], cache={})
        objectives = Objectives.of(query, x)
        optimum = polyhedron.program.maximum(polyhedron.objective(*objectives.objective(0, 0)))
        if np.isfinite(optimum.value):
            self._try(torch.as_tensor(polyhedron.input(optimum.point))[None])
        size = (weights @ rows.abs()) @ output_size(Operators(query.form), x, query.set)[
            0
        ] + weights @ offset.abs()
        slack = float(objectives.slack[0]) + 8 * (len(goal) + 1) * EPS * float(size) * (len(goal) > 1)
        total = optimum.bound + float(objectives.constant[0]) + slack + float(weights @ offset)
        bound = math.nextafter(total, math.inf) / float(weights.sum())
        return bound if bound > -math.inf else math.inf  # overflow proves nothing

    def _least_rows(self, polyhedron: RelaxedSet, x: list[Interval], goal: list[int]) -> Tensor:
        """Returns weights of rows whose sum bounds the least of them; tries the input at which that is largest."""
        objectives, program = Objectives.of(self.query, x), polyhedron.program
        lines = np.stack([polyhedron.objective(*objectives.objective(0, row)) for row in goal])
        constants = (objectives.constant[goal] + self.offset[goal]).numpy()
        largest = np.maximum(np.abs(program.lower), np.abs(program.upper))
        count, tall = len(goal), len(program.matrix)
        reach = float((np.abs(lines) @ largest + np.abs(constants)).max()) + 1.0
        if not math.isfinite(reach):
            return torch.ones(count, dtype=torch.float64)
        matrix = np.zeros((tall + count, program.matrix.shape[1] + 1))  # the last variable is the least row
        matrix[:tall, :-1], matrix[tall:, :-1], matrix[tall:, -1] = program.matrix, lines, -1.0
        with_least = LinearProgram(
            matrix,
            np.concatenate([program.row_lower, -constants]),
            np.concatenate([program.row_upper, np.full(count, np.inf)]),
            np.append(program.lower, -reach),
            np.append(program.upper, reach),
        )
        optimum = with_least.maximum(np.append(np.zeros(matrix.shape[1] - 1), 1.0))
        if np.isfinite(optimum.value):
            self._try(torch.as_tensor(polyhedron.input(optimum.point))[None])
        weights = torch.as_tensor(np.abs(optimum.duals[tall:]))
        return weights if bool(weights.any()) else torch.ones(count, dtype=torch.float64)

    def _try(self, u: Tensor) -> None:
        """Keeps an input of the box that is worse than those before, once it was solved to the last digits."""
        box, form = self.query.set.box(), self.query.form
        u = u.clamp(box.lower, box.upper)
        first = self._least(self._outputs(self._states(u), u)).amax(1)
        u = u[first.nan_to_num(-math.inf).topk(min(POLISHED, len(u))).indices]
        x = self._states(u, polish=True)
        z = form.A.apply(x) + form.B.apply(u) + (0.0 if form.bias is None else form.bias)
        phis = zip(form.activations, z.split(form.partition, dim=1), strict=True)
        residual = _largest(x - torch.cat([phi.function(part) for phi, part in phis], dim=1))
        y = self._outputs(x, u)
        value = self._least(y).amax(1) - SOLVED * (1 + _largest(y) * _largest(self.rows).amax())
        value = torch.where(residual < 1e-4 * SOLVED * (1 + _largest(x)), value, -math.inf)
        if self.branch is not None:
            low, high = self.branch.preactivations
            value = torch.where(((z > low) & (z < high)).all(1), value, -math.inf)  # else another equilibrium
        worst = int(value.argmax())
        if float(value[worst]) > self.best:
            self.best, self.input = float(value[worst]), u[worst : worst + 1]

    def _states(self, u: Tensor, polish: bool = False) -> Tensor:
        if self.branch is None:
            return solve_states(self.query.form, u, polish)
        return states_of_branch(self.query.form, u, self.branch.states.expand(len(u), -1))

    def _outputs(self, x: Tensor, u: Tensor) -> Tensor:
        return outputs(self.query.form, x, u)

    def _least(self, y: Tensor) -> Tensor:  # (B, q) -> (B, goals)
        """Returns the least row of every goal."""
        values = y @ self.rows.mT + self.offset
        return torch.stack([values[:, goal].amin(1) for goal in self.goals], dim=1)

    def _first_order(self) -> Tensor:
        """Returns the corners of the box at which the rows are largest to first order, and the center."""
        box = self.query.set.box()
        y = self._outputs(self._states(center := box.center), center)
        step = (box.upper - box.lower).amax() * 1e-4 + 1e-12
        moved = center + step * torch.eye(center.shape[1], dtype=center.dtype)
        slope = (self._outputs(self._states(moved), moved) - y) @ self.rows.mT  # (p, R)
        return torch.cat([center, torch.where(slope.mT > 0, box.upper, box.lower)])

    @torch.enable_grad()
    def _ascend(self, steps: int = 10) -> Tensor:
        """Goes up the least row of every goal by sign gradients; returns the points on the way."""
        box, form = self.query.set.box(), self.query.form
        radius = (box.upper - box.lower) / 2
        u, points = box.center.expand(len(self.goals), -1), []
        for step in range(steps):
            u = u.detach().requires_grad_()
            x = form.equilibrium(u, on_failure="ignore").value
            assert isinstance(x, Tensor)
            y = self._outputs(x, u)
            (slope,) = torch.autograd.grad(self._least(y).diagonal().sum(), u)
            u = (u.detach() + radius * max(0.05, 1 - step / steps) * slope.sign()).clamp(box.lower, box.upper)
            points.append(u)
        return torch.cat(points).detach()


def _largest(values: Tensor) -> Tensor:  # (R, n) -> (R,)
    """Returns the largest absolute value of every row, zero where there are no columns."""
    return F.pad(values.abs(), (0, 1)).amax(1)


def _kept_in(memory: Start, where: tuple[Tensor, Tensor], found: Maximum) -> Start:
    """Puts where some bounds ended into a memory; conditions that they had not have no weight."""
    lam, weights, point = memory
    missing = weights.shape[2] - found.weights.shape[1]
    put = F.pad(found.weights, (0, missing))
    return (
        lam.index_put(where, found.multipliers),
        weights.index_put(where, put),
        point.index_put(where, found.point),
    )


def _sum_up(bound: Tensor, offset: Tensor) -> Tensor:
    """Adds, rounded up; an offset of zero changes nothing."""
    total = bound + offset
    return torch.where(offset == 0, total, torch.nextafter(total, torch.tensor(math.inf, dtype=total.dtype)))
