"""Points of sets against every kind of bound: one trial is one model, one kind of set and a thousand points.

Outputs are solved in extended precision (`extended`), where that is possible to about 1e-18, and in float64 to
1e-10 of their size otherwise; that and nothing else is the slack of a comparison.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.campaigns.extended import WIDE, Array, Exact, known, solve
from tests.robust.robust_cases import F64, MODELS, climb, exact, model_of, tried
from wellposed.errors import IllPosedError, MissingExtraError
from wellposed.forms import ImplicitForm
from wellposed.robust import (
    METHODS,
    Ball,
    Bounds,
    Box,
    MethodError,
    Separable,
    SparseBox,
    Uncertainty,
    certified,
    crown,
    intervals,
    lipschitz,
    margin_bounds,
    output_bounds,
    sensitivity,
    separable_bound,
    state_bounds,
    worst_case_loss,
)
from wellposed.robust.bounds import enclosures

BATCH, DRAWN, DIRECTIONS = 4, 384, 64
SOLVED = 1e-10  # relative error of outputs that were solved in float64
CUTS = ((300, 60), (300, 60), (4, 3), (1, 1), (1, 0))  # sweeps of intervals and steps of multipliers
REFUSED = (MethodError, IllPosedError, MissingExtraError)
Change = Callable[[Bounds], Bounds]


@dataclass
class Tally:
    """What was compared: cases by kind of bound and by what else, violations, and how near points came."""

    kinds: Counter = field(default_factory=Counter)
    points: Counter = field(default_factory=Counter)
    models: Counter = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    reached: dict[str, float] = field(default_factory=dict)

    def compare(
        self, kind: str, value: Array, lower: Array | None, upper: Array, slack: Array, about: Any
    ) -> None:
        """Counts a comparison of points with bounds, (N, k) each, and keeps a note of what lies outside."""
        outside = ~(value <= upper + slack)
        if lower is not None:
            outside |= ~(value >= lower - slack)
        self.kinds[kind] += len(value)
        if outside.any():
            worst = value - upper if lower is None else np.maximum(value - upper, lower - value)
            note = {"kind": kind, "points": int(outside.any(-1).sum()), "by": float(worst.max())}
            self.wrong.append({**note, "slack": float(np.max(slack)), **about})
        if lower is not None and len(value):
            width = np.maximum(upper - lower, 1e-300)
            self.reached[kind] = max(self.reached.get(kind, 0.0), float((2 * (value - lower) / width - 1).max()))

    def merge(self, other: "Tally") -> None:
        """Adds what another one counted."""
        for name in ("kinds", "points", "models"):
            getattr(self, name).update(getattr(other, name))
        self.wrong += other.wrong
        for kind, share in other.reached.items():
            self.reached[kind] = max(self.reached.get(kind, 0.0), share)


def same(bounds: Bounds) -> Bounds:
    """Leaves bounds as they are."""
    return bounds


def shrunk(bounds: Bounds, share: float = 1e-3) -> Bounds:
    """Makes bounds narrower than they are by a share of their width: unsound where they are tight."""
    inward = share / 2 * bounds.width
    return Bounds(bounds.lower + inward, bounds.upper - inward, bounds.method, bounds.slack)


def unrounded(bounds: Bounds) -> Bounds:
    """Takes back what was added for rounding."""
    return Bounds(bounds.lower + bounds.slack, bounds.upper - bounds.slack, bounds.method, bounds.slack)


class Trial:
    """One model, one kind of set, many points; what to do with the bounds before they are compared is `change`."""

    def __init__(self, seed: int, number: int, dtype: torch.dtype, drawn: int, change: Change, tiny: bool) -> None:
        self.number, self.drawn, self.change, self.tally = number, drawn, change, Tally()
        self.name = list(MODELS)[number % len(MODELS)]
        self.form = model_of(self.name, number // len(MODELS) % 3).to(dtype)
        torch.manual_seed(1_000_003 * seed + number)
        self.u = torch.rand(BATCH, self.form.sizes[1], dtype=dtype)
        self.eps = 10.0 ** -float(3 * torch.rand(()))
        if tiny:  # where rounding is all there is to a bound
            self.eps = float(torch.tensor([0.0, 1e-15, 1e-12, 1e-8, 1e-6])[number % 5])
        self.kind = 0 if tiny else number // len(MODELS) % 3
        self.set = self._around(self.u)
        self.about = {"model": self.name, "trial": number, "dtype": str(dtype)[6:], "eps": self.eps,
                      "set": type(self.set).__name__}  # fmt: skip
        self._draw(tiny)

    def _around(self, u: Tensor) -> Uncertainty:
        if self.kind == 0:
            return Box.around(u, self.eps)
        return SparseBox(u, self.eps, 2, 0.0, 1.0) if self.kind == 1 else Ball(u, self.eps)

    def _draw(self, tiny: bool) -> None:
        """Draws and attacks; points that rounding put outside the set are dropped."""
        if tiny:
            points = {"tiny sets": self.set.sample(self.drawn)}
        else:
            points = tried(self.form, self.set, self.u, self.eps, self.number, self.drawn)
            ways = torch.randn(DIRECTIONS * BATCH, self.form.sizes[2], dtype=self.form.dtype)
            further = climb(self.form, self._around(self.u.repeat(DIRECTIONS, 1)), ways)
            points["gradients"] = torch.cat([points["gradients"], further.view(DIRECTIONS, BATCH, -1)])
        inner, sample = [], []
        for source, part in points.items():
            inside = members(self.set, part)
            inner.append(part[inside])
            sample.append(torch.arange(BATCH).expand(len(part), -1)[inside])
            self.tally.points[source] += int(inside.sum())
        self.points, self.sample = torch.cat(inner).detach(), torch.cat(sample)
        self.answer = _answers(self.form, self.points)
        self.tally.models[f"{self.name}, {self.about['dtype']}"] += len(self.points)

    def bounded(self, kind: str, bounds: Bounds, value: Array, slack: Array) -> None:
        """Compares values of points, (N, k), with the bounds of their samples."""
        changed = self.change(bounds)
        lower, upper = (_wide(end)[self.sample] for end in (changed.lower, changed.upper))
        self.tally.compare(kind, value, lower, upper, slack, self.about)

    def outputs(self) -> None:
        """Every method for outputs, one of them for states and one for margins."""
        cut, (x, y, x_slack, y_slack) = CUTS[self.number % len(CUTS)], self.answer
        turn = list(METHODS)[self.number % len(METHODS)]
        target = self.form(self.u).argmax(1)
        own = np.take_along_axis(y, target.numpy()[self.sample][:, None], 1)
        with mock.patch.object(intervals, "MAX_SWEEPS", cut[0]), mock.patch.object(crown, "MAX_STEPS", cut[1]):
            for method in METHODS:
                if bounds := _asked(output_bounds, self.form, self.set, method):
                    self.bounded(f"outputs, {method}", bounds, y, y_slack)
            if bounds := _asked(state_bounds, self.form, self.set, turn):
                self.bounded(f"states, {turn}", bounds, x, x_slack)
            if bounds := _asked(margin_bounds, self.form, self.set, target, turn):
                self.bounded(f"margins, {turn}", bounds, y - own, 2 * y_slack.max(1, keepdims=True))
                self._classes(target, turn, y - own)

    def _classes(self, target: Tensor, method: str, margins: Array) -> None:
        """Samples that are certified keep their class, and no loss is above the worst case."""
        none = np.zeros(1)
        sure = certified(self.form, self.set, target, method)[self.sample].numpy()
        others = margins.copy()
        np.put_along_axis(others, target.numpy()[self.sample][:, None], -1.0, 1)
        self.tally.compare("certified classes", others[sure], None, none, none, self.about)
        loss = np.log(np.exp(margins).sum(1, keepdims=True))
        most = _wide(worst_case_loss(self.form, self.set, target, method=method))[self.sample][:, None]
        self.tally.compare("worst-case loss", loss, None, most, 1e-17 * (1 + np.abs(loss)), self.about)

    def gains(self) -> None:
        """Sensitivities and Lipschitz constants, between the points and the first point of their sample."""
        try:
            S = _wide(sensitivity(self.form))
        except REFUSED:
            return
        first = [int((self.sample == k).nonzero()[0]) for k in range(BATCH)]
        other = torch.tensor(first)[self.sample].numpy()
        u, y, slack = _wide(self.points), self.answer.y, 2 * self.answer.y_slack.max()
        du, dy = np.abs(u - u[other]), np.abs(y - y[other])
        self.tally.compare("sensitivity", dy, None, du @ S.T, slack, self.about)
        for norm, order in (("1", 1), ("2", 2), ("inf", np.inf)):
            most = lipschitz(self.form, norm) * np.linalg.norm(du.astype(float), order, axis=1)
            size = np.linalg.norm(dy.astype(float), order, axis=1)
            rounding = slack + 1e-14 * size
            self.tally.compare(f"Lipschitz constant, norm {norm}", size, None, most, rounding, self.about)

    def solves(self) -> None:
        """The error bound of solves that were cut short."""
        steps = (1, 3, 10, 40, 2000)[self.number % 5]
        solution = self.form.equilibrium(self.points, max_steps=steps, on_failure="ignore")
        if solution.error_bound is None:
            return
        error = np.abs(_wide(solution.value) - self.answer.x).max(1)
        slack = self.answer.x_slack.max(1)
        self.tally.compare("error bound of a solve", error, None, _wide(solution.error_bound), slack, self.about)

    def separable(self) -> None:
        """Sums of squares, and of concave functions, of the states."""
        x, n = self.answer.x, self.form.sizes[0]
        functions = {"convex": (torch.square, np.square), "concave": (lambda t: -(t - 0.3).square(), None)}
        for curvature, (function, mirror) in functions.items():
            value = (mirror(x) if mirror else -((x - WIDE(0.3)) ** 2)).sum(1)
            slack = 4 * self.answer.x_slack.max(1) * (1 + np.abs(x).sum(1)) + 1e-15 * n * (1 + np.abs(value))
            most = _asked(separable_bound, self.form, self.set, Separable(function, curvature), rounds=3)
            if most is not None:
                upper = _wide(most)[self.sample]
                self.tally.compare(f"separable function, {curvature}", value, None, upper, slack, self.about)

    def boxes(self) -> None:
        """Boxes of states and outputs as a certificate claims them."""
        if not isinstance(self.set, Box) or not (claims := _asked(enclosures, self.form, self.set)):
            return
        ends = {name: _wide(torch.stack([claim.tensors[name] for claim in claims])) for name in claims[0].tensors}
        for name, value, slack in (
            ("x", self.answer.x, self.answer.x_slack),
            ("y", self.answer.y, self.answer.y_slack),
        ):
            lower, upper = (ends[f"{name}{end}"][self.sample] for end in (0, 1))
            self.tally.compare(f"claimed enclosures of {name}", value, lower, upper, slack, self.about)

    def run(self) -> Tally:
        """Compares everything."""
        for part in (self.outputs, self.gains, self.solves, self.boxes):
            part()
        if self.number % 3 == 0:
            self.separable()
        return self.tally


def trial(
    seed: int, number: int, dtype: torch.dtype, drawn: int = DRAWN, change: Change = same, tiny: bool | None = None
) -> Tally:
    """Runs one trial; every sixth one is about rounding alone."""
    with torch.random.fork_rng():
        return Trial(seed, number, dtype, drawn, change, number % 6 == 5 if tiny is None else tiny).run()


def members(inputs: Uncertainty, points: Tensor) -> Tensor:  # (N, B, p) -> (N, B)
    """Tells which points belong to their set, exactly."""
    if isinstance(inputs, Ball):
        distance = ((_wide(points) - _wide(inputs.center)) ** 2).sum(-1)
        return torch.from_numpy(distance <= _wide(inputs.radius) ** 2)
    box = inputs.box()
    inside = ((points >= box.lower) & (points <= box.upper)).all(-1)
    return inside & ((points != inputs.center).sum(-1) <= inputs.k) if isinstance(inputs, SparseBox) else inside


def _answers(form: ImplicitForm, points: Tensor) -> Exact:
    start, y = exact(form, points)
    assert isinstance(start, Tensor)
    if known(form):
        return solve(form, points, start)
    wide, x = form.to(F64), start
    drive = wide.B.apply(points.to(F64)) + (0.0 if wide.bias is None else wide.bias)
    for _ in range(300):
        pieces = (wide.A.apply(x) + drive).split(wide.partition, dim=1)
        x = torch.cat([phi.function(z) for phi, z in zip(wide.activations, pieces, strict=True)], dim=1)
    y = wide.C.apply(x) + wide.D.apply(points.to(F64)) + (0.0 if wide.output_bias is None else wide.output_bias)
    slacks = (np.full((len(x), 1), SOLVED * (1 + float(part.abs().max()))) for part in (x, y))
    return Exact(_wide(x), _wide(y), *slacks)


def _asked(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Asks for a bound; None where there is none for this form or set."""
    try:
        return function(*arguments, **options)
    except REFUSED:
        return None


def _wide(tensor: Any) -> Array:
    return tensor.detach().double().numpy().astype(WIDE)
