"""Bounds of states and outputs by every method, on layers and on loops (003 Figure 4.3).

`BoundsRun` bounds states and outputs by one method, or measures how far they are known to move (`reached`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, MethodError, output_bounds, state_bounds
from wellposed_lab.cache import cached
from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.networks.trained import Dense
from wellposed_lab.report.findings import median_of

Kind = Literal["layers", "loops", "trained-loops"]
TASKS: dict[Kind, str] = {"layers": "state-bounds", "loops": "loop-bounds", "trained-loops": "trained-loop-bounds"}
REACHED = "reached"  # an inner bound, by sampling and by gradients
METHODS: dict[str, str | Crown] = {"crown-one-pass": Crown(rounds=0)}  # beside those of the library


@dataclass(frozen=True, kw_only=True)
class BoundsRun(Run):
    """Measures the mean width of the bounds of all states (``width``) and outputs (``output_width``).

    Args:
        network: "layers" is an MLP trained on digits, "loops" a random model with a full matrix A, "trained-loops"
            an implicit model trained on digits.
        method: of the library, "crown-one-pass", or "reached": the largest minus the smallest value found.
        points: radii of the boxes around test images, cut to [0, 1]; the first has no place on the axis too.
        samples: how many images.
        states: of models with loops.
        kappa: the norm of the random A.
        epochs: of training.
    """

    network: Kind
    method: str
    points: tuple[float, ...] = (0.01, 0.002, 0.05)
    samples: int = 4
    states: int = 100
    kappa: float = 0.9
    epochs: int = 40

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return TASKS[self.network], self.method, None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run._alone() for run in runs]

    def _alone(self) -> Result:
        form, u = self.problem()
        values, facts = [], {}
        for index, epsilon in enumerate(self.points):
            try:
                found = self._widths(form, Box.around(u, epsilon))
            except (MethodError, IllPosedError) as error:
                facts["not applicable"] = str(error)
                continue
            places = (None, epsilon) if index == 0 else (epsilon,)
            values += [Value(name, width, at) for name, width in found.items() for at in places]
        return Result(tuple(values), facts=facts)

    def _widths(self, form: ImplicitForm, box: Box) -> dict[str, float]:
        if self.method == REACHED:
            return {name: float(width.mean()) for name, width in reached(form, box, self.seed).items()}
        method = METHODS.get(self.method, self.method)
        with torch.no_grad():
            states, outputs = (bound(form, box, method).width for bound in (state_bounds, output_bounds))
        return {"width": float(states.mean()), "output_width": float(outputs.mean())}

    def problem(self) -> tuple[ImplicitForm, Tensor]:
        """Returns the form in float64, and the clean inputs."""
        dense = Dense("digits", epochs=self.epochs)
        u = dense.pair("test")[0][: self.samples].double()
        if self.network == "layers":
            return to_implicit(dense.trained(self.seed), (u.shape[1],)).to(torch.float64), u
        if self.network == "loops":
            return random_loops(self.states, u.shape[1], self.kappa, self.seed), u
        return trained_loops(dense, self.states, self.kappa, self.seed), u


@cached
def trained_loops(dense: Dense, n: int, kappa: float, seed: int) -> ImplicitForm:
    """Trains an implicit model on the images of a network; it is shared by all methods."""
    p, q = dense.shape[0], dense.shape[-1]
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        model = ImplicitModel(p, q, n, kappa=kappa)
    dense.train(model, seed, dense.epochs)
    with torch.no_grad():
        return model.form().to(torch.float64)


def random_loops(n: int, p: int, kappa: float, seed: int) -> ImplicitForm:
    """Builds a random model with loops, every row of A with ``|a|_1 = kappa``.

    Example:
        >>> random_loops(5, 3, 0.9, 0)
        ImplicitForm(5 states, 3 inputs, 10 outputs, relu)
    """
    generator = torch.Generator().manual_seed(seed)
    A, B, C = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, n), (n, p), (10, n)))
    bias = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return ImplicitForm(kappa * A / A.abs().sum(1, keepdim=True), B / p**0.5, C / n**0.5, bias=bias)


def reached(form: ImplicitForm, box: Box, seed: int, draws: int = 200, steps: int = 20) -> dict[str, Tensor]:
    """Returns how far states (B, n) and outputs (B, q) are known to move, an inner bound of every width.

    Of random points, of corners, and of points found by gradients for every output, largest minus smallest.
    """
    points = torch.cat([box.sample(draws, torch.Generator().manual_seed(seed)), _climbed(form, box, steps)])
    u = points.flatten(0, 1)
    with torch.no_grad():
        x, y = form.equilibrium(u).value, form(u)
    if not isinstance(x, Tensor):
        raise InputError("a form with one state tensor is expected")
    found = {"width": x, "output_width": y}
    tables = {name: value.view(*points.shape[:2], -1) for name, value in found.items()}
    return {name: table.amax(0) - table.amin(0) for name, table in tables.items()}


def _climbed(form: ImplicitForm, box: Box, steps: int) -> Tensor:  # (2 q, B, p)
    """Raises and lowers every output by projected sign gradients, all at once."""
    q = form.sizes[2]
    direction = torch.cat([torch.eye(q, dtype=box.dtype), -torch.eye(q, dtype=box.dtype)])  # (2 q, q)
    u, radius = box.center.expand(2 * q, -1, -1).clone(), (box.upper - box.lower) / 2
    for step in range(steps):
        moving = u.detach().requires_grad_()
        y = form(moving.flatten(0, 1)).view(2 * q, -1, q)
        (slope,) = torch.autograd.grad((y * direction[:, None]).sum(), moving)
        u = (u + radius * (1 - step / (2 * steps)) * slope.sign()).clamp(box.lower, box.upper)
    return u


COMPARED: tuple[tuple[Role, str], ...] = (
    ("ours", "crown"),
    ("ours", "optimised"),
    ("ours", "triangle"),
    ("baseline", "box"),
    ("baseline", "lp"),
    ("baseline", "interval"),
    ("baseline", "norm"),
    ("baseline", "l2"),
    ("control", "crown-one-pass"),
    ("control", REACHED),
)
NAMES = tuple(TASKS.values())
AT = 0.01  # the radius at which methods are compared


def plan(scale: Scale) -> list[BoundsRun]:
    """Returns every method on every model."""
    tiny = scale == "tiny"
    return [
        BoundsRun(
            suite="bounds",
            seed=0,
            scale=scale,
            role=role,
            network=network,
            method=method,
            points=(0.01,) if tiny else (0.01, 0.002, 0.05),
            samples=1 if tiny else 16 if scale == "paper" else 4,
            states=20 if tiny else 200 if scale == "paper" else 60,
            epochs=5 if tiny else 40,
        )
        for network in TASKS
        for role, method in COMPARED
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the methods compare."""
    sentences = [
        "On layers interval propagation cannot be wider than the implicit box, whatever the weights: it adds the "
        "same |W| r in every layer and clips at zero afterwards. The figure of 003 shows the reverse.",
        "reached is no bound but what random points, corners and gradients found: no bound may be narrower.",
    ]
    for task in NAMES:
        for metric, what in (("width", "states"), ("output_width", "outputs")):
            found = [(name, median_of(records, task, name, metric, AT)) for _, name in COMPARED]
            known = sorted((value, name) for name, value in found if value is not None)
            if known:
                told = ", ".join(f"{name} {value:.3g}" for value, name in known)
                sentences.append(
                    f"Mean width of the {what} on {task} at epsilon {AT:g} (median over seeds): {told}."
                )
    return sentences


def _over(name: str, rival: str, task: str, metric: str = "width") -> tuple[Measure, Measure]:
    return Measure(metric, name, task, AT), Measure(metric, rival, task, AT)


def _thresholds() -> tuple[Threshold, ...]:
    found = []
    for task in NAMES:
        for metric, what in (("width", "states"), ("output_width", "outputs")):
            for method in ("triangle", "crown"):
                one, other = _over(REACHED, method, task, metric)
                claim = f"On {task} nothing that was found leaves what {method} proves of the {what}."
                found.append(Threshold(claim, one, "at most", 1.0, rival=other))
        one, other = _over("crown", "interval", task)
        found.append(
            Threshold(f"On {task} CROWN is no wider than intervals.", one, "at most", 1.0 + 1e-9, rival=other)
        )
    one, other = _over("interval", "box", "state-bounds")
    found.append(
        Threshold("On layers intervals are no wider than the box.", one, "at most", 1.0 + 1e-9, rival=other)
    )
    for task in NAMES[1:]:
        one, other = _over("crown", "triangle", task, "output_width")
        claim = f"On {task} refined CROWN is within 1 % of the triangle LP."
        found.append(Threshold(claim, one, "at most", 1.01, rival=other))
    return tuple(found)


SUITE = Suite(
    name="bounds",
    title="Bounds on states and outputs",
    claim="Bounds from the implicit form enclose all states that a box of inputs can lead to; the linear program "
    "is tighter than the box.",
    papers=("003 Figure 4.3", "003 section 4.3"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure(
            "Width of the states' bounds", NAMES, "width", "epsilon", paper="003 Figure 4.3", quantity="mean width"
        ),
        Figure("Width of the outputs' bounds", NAMES, "output_width", "epsilon", quantity="mean width"),
    ),
    findings=findings,
    thresholds=_thresholds(),
    differs="The network of 003 Figure 4.3 is not described; these are ours.",
)
