"""A regression under noise: equilibrium and feed-forward models on a bump (004 section D.1, Figures 7-9).

`draw_errors` draws errors under noise from records, a panel for every pair of networks. `BumpRegression` is the
task, a bump on a line; `RegressionRun` fits it with one half of a pair of 004 and tests it under signal noise.
"""

import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from wellposed.errors import InputError, MissingExtraError, require
from wellposed.training.checkpoint import Checkpoint
from wellposed_lab.config import Scale, Schedule, Training, identity
from wellposed_lab.engine.experiment import Figure, Picture, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Floor
from wellposed_lab.experiments.noise.ensemble import Draws, Member, Noises, Stack, make_stack
from wellposed_lab.experiments.noise.models import STEPS, WIDTHS, Pair
from wellposed_lab.experiments.noise.training import Order, chosen, train
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.report.figures import PALETTE, best_scale
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.task import Pair as Samples
from wellposed_lab.tasks.task import Point, Task

PROJECTIONS = ("identity", "silu", "relu")
LOOKS = {
    "DEQ": (PALETTE[0], "-"),
    "FFW": (PALETTE[1], "-"),
    "FFW, Xavier's start": (PALETTE[1], ":"),
    "DEQ with Jacobian penalty": (PALETTE[0], ":"),
    "FFW, input in every layer": (PALETTE[1], "--"),
}


def draw_errors(records: Sequence[Record]) -> bytes | None:
    """Draws the median error over the noise, a row a depth and a column an input activation, as PNG.

    None where there is nothing to draw or matplotlib is not installed.
    """
    scale = best_scale([record for record in records if record.role != "control"])
    usable = [record for record in records if record.scale == scale and record.error is None]
    known = {record.model for record in usable}
    depths = [n for n, width in WIDTHS.items() if any(f"deq-{width}-{name}" in known for name in PROJECTIONS)]
    try:
        canvas = require("matplotlib.figure", extra="plots")
    except MissingExtraError:
        return None
    if not depths:
        return None
    page = canvas.Figure(figsize=(8.6, 2.1 * len(depths) + 0.5), layout="constrained")
    axes = page.subplots(len(depths), len(PROJECTIONS), sharex=True, sharey=True, squeeze=False)
    for line, layers in zip(axes, depths, strict=True):
        for place, projection in zip(line, PROJECTIONS, strict=True):
            _panel(place, usable, layers, projection)
        line[0].set_ylabel("mean squared error", fontsize=8.5)
    for place in axes[-1]:
        place.set_xlabel("signal-to-noise ratio in decibels", fontsize=8.5)
    lines = {line.get_label(): line for place in axes.flat for line in place.get_lines()}
    page.legend(lines.values(), lines, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panel(place: Any, records: Sequence[Record], layers: int, projection: str) -> None:
    deq, ffw = f"deq-{WIDTHS[layers]}-{projection}", f"ffw-{layers}"
    models = (deq, *(f"{ffw}{kind}-{projection}" for kind in ("", "-xavier")), f"{deq}-jacobian",
              f"{ffw}-inject-{projection}")  # fmt: skip
    for model, (name, (colour, dash)) in zip(models, LOOKS.items(), strict=True):
        places = errors_by_noise([record for record in records if record.model == model])
        if places:
            place.plot(
                list(places), list(places.values()), dash, color=colour, marker="o", markersize=3, label=name
            )
    place.set_yscale("log")
    place.set_title(f"{projection} input, {layers} layer{'s' if layers > 1 else ''}", fontsize=9, loc="left")
    place.tick_params(which="both", labelsize=8)
    place.grid(True, color="#e3e6ea", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)


def errors_by_noise(records: Sequence[Record]) -> dict[float, float]:
    """Returns the median error over the seeds at every strength of noise, the strongest first.

    Example:
        >>> errors_by_noise([])
        {}
    """
    found: dict[float, list[float]] = {}
    for record in records:
        for value in record.values:
            if value.metric == "test_mse" and isinstance(value.at, int | float):
                found.setdefault(float(value.at), []).append(value.value)
    return {at: statistics.median(found[at]) for at in sorted(found)}


@dataclass(frozen=True)
class BumpRegression(Task):
    """Learns ``y = 2 (exp(-u^2 / (2 width^2)) - 1/2)`` from points u that are uniform in [-1, 1].

    Args:
        samples, test_samples: how many; 004 has 10,000.
        width: of the bump.
        points: the only test is on the same line.

    Example:
        >>> BumpRegression().target(torch.tensor([0.0, 0.25])).tolist()
        [1.0, 0.2130613...]
    """

    samples: int = 10_000
    test_samples: int = 1_000
    width: float = 0.25
    points: tuple[Point, ...] = (None,)
    name: ClassVar[str] = "bump-regression"

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise InputError(f"the width of a bump is positive; received {self.width}")

    def target(self, u: Tensor) -> Tensor:
        """Computes the function itself."""
        return 2 * (torch.exp(-u.square() / (2 * self.width**2)) - 0.5)

    def train(self, seed: int) -> Samples:
        return self._draw(self.samples, self.generator(seed, "train"))

    def validation(self, seed: int) -> Samples:
        return self._draw(self.test_samples, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Samples:
        if at is not None:
            raise InputError(f"task {self.name!r} has one test distribution; received the point {at!r}")
        return self._draw(self.test_samples, self.generator(seed, "test"))

    def _draw(self, samples: int, generator: torch.Generator) -> Samples:
        u = 2 * torch.rand(samples, 1, generator=generator) - 1
        return u, self.target(u)


@dataclass(frozen=True, kw_only=True)
class RegressionRun(Run):
    """Fits a function without noise and measures its error under signal noise.

    ``test_mse`` without a point is without noise, at a point it is under noise of so many decibels; ``steps`` are
    those of the averaged stopping rule. A DEQ is read out at the mean of its last ten iterates, in ``last_mse`` at
    the last of them. A DEQ is differentiated through all steps of its solves: here they often
    end at the 60 steps that 004 allows, and an implicit gradient at such a point leads astray. Runs of one kind
    are one ensemble.

    Args:
        task: the function and its samples.
        pair: the model; its name here ends with the activation of the input projection.
        training: epochs, batch size and so on.
        points: decibels of the noise in the test.
    """

    task: BumpRegression
    pair: Pair
    training: Training
    points: tuple[float, ...] = (20.0, 10.0, 5.0, 0.0)
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        penalised = "-jacobian" if self.penalty else ""
        return self.task.name, f"{self.pair.name}-{self.pair.projection}{penalised}", None

    @property
    def penalty(self) -> float:
        """The weight of the Jacobian penalty."""
        return 0.0

    @property
    def member(self) -> Member:
        """The model in its ensemble."""
        return Member(self.pair, None, self.seed, self.penalty)

    @property
    def batch_seeds(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs of one ensemble, as in `NoiseRun`."""
        one_width = self.pair.kind == "ffw" or self.scale != "paper"
        shape = (self.pair.kind, self.pair.width if one_width else 0)
        return identity((self.suite, self.scale, self.task, shape, self.training, self.points, self.penalty))

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        members = [run.member for run in runs]
        stack = make_stack(members, 1, 1, context.device)
        stack.unrolled = True  # a solve that is cut off has no implicit gradient, and 60 steps are few
        losses = self._trained(stack, context, context.checkpoint(runs))
        return [run._result(stack, losses, context.device) for run in runs]

    def _trained(self, stack: Stack, context: Context, file: Checkpoint | None = None) -> Tensor:
        """Trains all members, each on the samples of its seed; returns their mean losses, ``(epochs, M)``."""
        count, seeds = self.task.samples, sorted({member.seed for member in stack.members})
        u, y = (torch.cat(parts) for parts in zip(*(self.task.train(seed) for seed in seeds), strict=True))
        orders = {seed: Order(seed, count, count) for seed in seeds}
        for place, order in enumerate(orders.values()):
            order.rows = torch.arange(place * count, (place + 1) * count)
        settings = self.training
        schedule = Schedule(count, settings.epochs, settings.batch_size, settings.learning_rate)
        tell = print if context.progress else lambda text: None
        own = [orders[member.seed] for member in stack.members]
        u, y = u.to(context.device), y.to(context.device)
        return train(stack, u, y, schedule, tell, loss=_squared_errors, own=own, exact=True, file=file)

    def _result(self, stack: Stack, losses: Tensor, device: str) -> Result:
        place = stack.members.index(self.member)
        alone, values = chosen(stack, [place]), [Value("parameters", float(parameter_count(stack.member(place))))]
        for at in (None, *self.points):
            values += self._tested(alone, at, device)
        series = {"train_loss": [float(f"{loss:.5g}") for loss in losses[:, place].tolist()]}
        return Result(tuple(values), series, {"ensemble": len(stack.members)})

    @torch.no_grad()
    def _tested(self, alone: Stack, at: float | None, device: str) -> list[Value]:
        u, y = (part.to(device) for part in self.task.test(self.seed, None))
        found = alone(u, Noises([at], Draws(alone.members, u.device, alone.size)))
        if found.steps is None:
            return [Value("test_mse", float(_squared_errors(found.logits, y)), at)]
        read = {"test_mse": found.averaged, "last_mse": found.logits}
        errors = [Value(name, float(_squared_errors(outputs, y)), at) for name, outputs in read.items()]
        return [*errors, Value("steps", float(found.steps.double().mean()), at)]


@dataclass(frozen=True, kw_only=True)
class PenalisedRegressionRun(RegressionRun):
    """The same with the Jacobian penalty of 004 Table 1, ``|J|_F^2 / n`` at the equilibrium.

    Args:
        jacobian: its weight.
    """

    jacobian: float = 1.0

    @property
    def penalty(self) -> float:
        return self.jacobian


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:  # (M, B, 1) each -> (M,)
    return (outputs - targets).square().mean((1, 2))


TASK = "bump-regression"
LAYERS = {"tiny": (1,), "default": (1, 3, 11), "paper": (1, 3, 5, 7, 9, 11)}
POINTS = (20.0, 10.0, 5.0, 0.0)  # signal-to-noise ratios in decibels
UNTRAINED = 0.1  # mean squared error; the variance of the function is about 0.5


def plan(scale: Scale) -> list[RegressionRun]:
    """Returns every pair with every input activation, and the feed-forward networks with Xavier's start too.

    At the scale paper there are also DEQs with the Jacobian penalty of 004 Table 1 and networks with the input in
    every layer, as in eq. 57.
    """

    def run(role: Role, pair: Pair, kind: type[RegressionRun] = RegressionRun) -> RegressionRun:
        task = {
            "tiny": BumpRegression(samples=200, test_samples=50),
            "default": BumpRegression(samples=4_000),
            "paper": BumpRegression(),
        }[scale]
        points = (0.0,) if scale == "tiny" else POINTS
        return kind(suite="noise-regression", seed=0, scale=scale, role=role, task=task, pair=pair,
                    training=_training(scale, pair), points=points)  # fmt: skip

    runs = []
    for projection in PROJECTIONS:
        for layers in LAYERS[scale]:
            runs += [
                run("ours", Pair("deq", layers, projection=projection)),
                run("baseline", Pair("ffw", layers, projection=projection)),
                run("control", Pair("ffw", layers, xavier=True, projection=projection)),
            ]
            if scale == "paper":
                runs += [
                    run("ours", Pair("deq", layers, projection=projection), PenalisedRegressionRun),
                    run("control", Pair("ffw", layers, inject=True, projection=projection)),
                ]
    return runs


def _training(scale: Scale, pair: Pair) -> Training:
    """Returns 30 epochs for a DEQ and 64 for an FFW with batches of 16 (004 Tables 1 and 2), or less of it."""
    deq, ffw = {"tiny": (1, 1), "default": (1, 2), "paper": (30, 64)}[scale]
    return Training(epochs=deq if pair.kind == "deq" else ffw, batch_size=16, learning_rate=1e-3, schedule=None)


def with_last_errors(records: Iterable[Record]) -> list[Record]:
    """Adds ``last_mse`` to the records of networks, which have one read-out.

    Example:
        >>> with_last_errors([])
        []
    """
    added = []
    for record in records:
        own = [value for value in record.values if value.metric == "test_mse"] * record.model.startswith("ffw")
        added.append(replace(record, values=(*record.values, *(replace(one, metric="last_mse") for one in own))))
    return added


def findings(records: Sequence[Record]) -> list[str]:
    """Says how much the order of the two depends on where the weights of the feed-forward network start."""

    def mse(model: str, at: float | None = 0.0) -> float | None:
        return median_of(records, TASK, model, "test_mse", at)

    sentences = []
    wins = {"": [0, 0], "-xavier": [0, 0]}
    for projection in PROJECTIONS:
        told = []
        for layers, width in WIDTHS.items():
            deq = mse(f"deq-{width}-{projection}")
            rivals = {start: mse(f"ffw-{layers}{start}-{projection}") for start in wins}
            for start, rival in rivals.items():
                if deq is not None and rival is not None:
                    wins[start][0] += deq < rival
                    wins[start][1] += 1
            if deq is not None and None not in rivals.values():
                count = f"{layers} layer" + ("s" if layers > 1 else "")
                told.append(f"{count} {deq:.3f}, {rivals['']:.3f} and {rivals['-xavier']:.3f}")
        if told:
            sentences.append(
                f"With {projection} input the mean squared error at 0 dB of the DEQ, the FFW with torch's and "
                f"with Xavier's start: {'; '.join(told)}."
            )
    (usual, of), (xavier, of_xavier) = wins[""], wins["-xavier"]
    if of:
        sentences.append(
            f"At 0 dB the DEQ has the lower median error in {usual} of {of} comparisons with torch's start of the "
            f"FFW and in {xavier} of {of_xavier} with Xavier's"
            + (", so part of the advantage is where the FFW starts." if xavier * of > usual * of_xavier else ".")
        )
    return sentences + _untrained(records) + _at_rest(records)


def _untrained(records: Sequence[Record]) -> list[str]:
    """Says how many equilibrium models failed to learn the function at all."""
    clean = [record.value("test_mse") for record in records if record.model.startswith("deq") and not record.error]
    known = [value for value in clean if value is not None]
    bad = sum(not value <= UNTRAINED for value in known)
    return (
        [f"{bad} of {len(known)} DEQs did not learn: their error without noise is above {UNTRAINED}."]
        if bad
        else []
    )


def _at_rest(records: Sequence[Record]) -> list[str]:
    """Says how many equilibrium models have an equilibrium at all, with the Jacobian penalty and without."""
    told = []
    for penalised in (False, True):
        models = [r for r in records if r.scale == "paper" and r.model.startswith("deq") and not r.error]
        steps = [r.value("steps") for r in models if r.model.endswith("-jacobian") == penalised]
        known = [count for count in steps if count is not None]
        if known:
            rest = sum(count < STEPS for count in known)
            told.append(f"{rest} of {len(known)} {'with' if penalised else 'without'} the Jacobian penalty")
    if not told:
        return []
    return [f"Of the DEQs trained for 30 epochs these come to rest within {STEPS} steps: {' and '.join(told)}."]


SUITE = Suite(
    name="noise-regression",
    title="Noise in a regression",
    claim="In a regression under noise an equilibrium model has a lower error than a feed-forward network with as "
    "many weights, even a shallow one.",
    papers=("004 section D.1", "004 Figures 7-9"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Steps of the averaged rule", (TASK,), "steps", "signal-to-noise ratio in decibels", log=""),
    ),
    pictures=(
        Picture("Pairs under noise", draw_errors, "Medians over the seeds; the cell of the DEQ has as many "
                "weights as all layers of the FFW.", paper="004 Figures 7-9"),
    ),
    findings=findings,
    derived=with_last_errors,
    floors=(
        Floor("test_mse", "at most", 0.44),  # the mean of the bump has 0.494, or 0.441 in a small test
        Floor("steps", "at most", STEPS - 1),  # an equilibrium that is not reached without noise is none
    ),
    differs="Nothing but what 004 leaves open; DEQs are trained without the Jacobian penalty of 004 Table 1 too, "
    "of which none of 45 comes to rest within the 60 steps after 30 epochs.",
)  # fmt: skip
