"""Certified accuracy of classifiers with loops: monotone equilibrium networks (monDEQ), and others beside them.

`Mondeq` is the network of Winston and Kolter (2020), dense or convolutional. `LoopRun` trains one classifier and
measures what bounds by norms, boxes of continuation, optimised slopes and branch and bound prove, and what an
attack leaves, on the same images.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import IllPosedError, MissingExtraError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, MethodError, certified
from wellposed.robust.attacks import pgd
from wellposed.robust.certification import branch_and_bound
from wellposed.training import Checkpoint, fit
from wellposed_lab.config import Scale, Schedule
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.networks.trained import images, train_or_load
from wellposed_lab.report.findings import median_of

Kind = Literal["mondeq", "monotone", "spectral", "inf"]
MARGIN = 20.0  # of monotonicity, as the published networks have it
FEW = 100  # states that a processor bounds as fast as a device
STRIDE = 3  # of the convolution that reads the image


class Mondeq(nn.Module):
    """A monotone equilibrium network: ``x = relu(Wx + Uu + b)``, ``W = (1 - m) I - P'P + S - S'``, classes Cx + c.

    The projection has the same equilibria for ``I - (I - W) / m`` with ``U / m`` and ``b / m``, whose symmetric
    part is not positive: that is the form that is solved and certified.

    Args:
        shape: of an image.
        states: of a dense network; 0 for a convolutional one.
        channels: of a convolutional one, whose state is a third as wide as the image.
        margin: m.
    """

    def __init__(self, shape: tuple[int, int, int], states: int, channels: int, margin: float = MARGIN) -> None:
        super().__init__()
        self.shape, self.margin, self.dense = shape, margin, states > 0
        depth, height, width = shape
        self.state = (states,) if states else (channels, (height - 3) // STRIDE + 1, (width - 3) // STRIDE + 1)
        n, p = torch.Size(self.state).numel(), torch.Size(shape).numel()
        size = (n, n) if states else (channels, channels, 3, 3)
        scale = (n if states else 9 * channels) ** -0.5
        self.P, self.S = (nn.Parameter(scale * torch.randn(size)) for _ in range(2))
        self.U = nn.Linear(p, n) if states else nn.Conv2d(depth, channels, 3, STRIDE)
        self.C = nn.Linear(n, 10)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns A (n, n), B (n, p) and b (n,)."""
        P: Tensor = self.P
        S: Tensor = self.S
        U, bias = self.U.weight, self.U.bias
        assert bias is not None
        if not self.dense:
            n = torch.Size(self.state).numel()
            units = torch.eye(n, device=U.device, dtype=U.dtype).view(n, *self.state)
            P, S = (F.conv2d(units, kernel, padding=1).flatten(1).mT for kernel in (P, S))
            p = torch.Size(self.shape).numel()
            pixels = torch.eye(p, device=U.device, dtype=U.dtype).view(p, *self.shape)
            U = F.conv2d(pixels, U, stride=STRIDE).flatten(1).mT
            bias = bias.repeat_interleave(n // len(bias))
        return (S - S.mT - P.mT @ P) / self.margin, U / self.margin, bias / self.margin

    def form(self) -> ImplicitForm:
        """Returns the classifier as a form."""
        A, B, b = self.matrices()
        return ImplicitForm(A, B, self.C.weight, None, b, output_bias=self.C.bias)

    def forward(self, u: Tensor) -> Tensor:  # (B, *shape) -> (B, 10)
        """Solves by operator splitting, and differentiates at the equilibrium."""
        A, B, b = self.matrices()
        v = u.flatten(1) @ B.mT + b
        x = split(A.detach(), v.detach(), torch.relu)
        z = x @ A.mT + v
        if z.requires_grad:
            on = (z.detach() > 0).to(z.dtype)
            z.register_hook(lambda slope: split(A.detach().mT, slope, lambda w: on * w))
        return self.C(z.relu())


def split(A: Tensor, v: Tensor, project: Callable[[Tensor], Tensor], steps: int = 300) -> Tensor:
    """Solves ``x = project(Ax + v)`` by the splitting of Peaceman and Rachford, for A with a margin of 1.

    Args:
        A: (n, n).
        v: (B, n).
        project: on a convex cone: ReLU, or some of the coordinates.
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    solved = torch.linalg.inv(2 * eye - A).mT
    x = w = torch.zeros_like(v)
    for step in range(steps):
        reflected = 2 * x - w
        w = 2 * (reflected + v) @ solved - reflected
        x, before = project(w), x
        if step % 10 == 9 and float((x - before).abs().max()) < 1e-6 * (1e-6 + float(x.abs().max())):
            break
    return x


@dataclass(frozen=True)
class Loops:
    """A classifier by kind and size.

    Args:
        kind: "mondeq", or the condition of an `ImplicitModel` with kappa 0.9.
        states: 0 for a convolutional monDEQ.
        channels: of a convolutional one.

    Example:
        >>> Loops("mondeq", 87).name, Loops("mondeq", channels=8).name
        ('mondeq-87', 'mondeq-conv')
    """

    kind: Kind
    states: int = 0
    channels: int = 0

    @property
    def name(self) -> str:
        """As the report names it."""
        return f"{self.kind}-{self.states or 'conv'}"

    def build(self, shape: tuple[int, int, int], seed: int) -> nn.Module:
        """Builds it with random weights."""
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            if self.kind == "mondeq":
                return Mondeq(shape, self.states, self.channels)
            p = torch.Size(shape).numel()
            return ImplicitModel(p, 10, self.states, condition=self.kind, kappa=0.9, bias=True, feedthrough=False,
                                 on_failure="ignore")  # fmt: skip


METHODS = {"norms": Crown(continuation=False), "continuation": Crown()}
SLOPES = Crown(rounds=8, slope_steps=20)
STEPWISE = (*METHODS, "slopes", "complete")  # what is proven, one after the other


@dataclass(frozen=True, kw_only=True)
class LoopRun(Run):
    """Trains one classifier, attacks and certifies the first images of the test set.

    ``accuracy`` is on these images. At every radius ``attacked_accuracy`` is what PGD leaves, ``certified_norms``
    what CROWN proves from norms, and ``certified_continuation`` counts also what it proves of the rest with boxes
    of continuation. What both and the attack leave open is asked again with slopes optimised, and the rest by
    branch and bound: ``certified_slopes`` and ``certified_complete`` count all that is proven by then.
    ``seconds_...`` are per image that was asked about, ``certified_excess`` is the share that is both proven and
    changed.

    Args:
        data: name of the images.
        network: what is trained.
        schedule: of the training.
        radius: of certified training (`BoundedLoopRun`); 0 for plain training.
        share: of the bound in the loss, of earlier records.
        points: radii of the test.
        samples: test images.
        slopes: whether slopes are optimised, which takes long for many states.
        seconds: of branch and bound for an image; 0 for none.
        part: images that are bounded at once.
    """

    data: str
    network: Loops
    schedule: Schedule
    radius: float = 0.0
    share: float = 0.5
    points: tuple[float, ...] = (0.01, 0.02, 0.05)
    samples: int = 200
    slopes: bool = True
    seconds: float = 1.0
    part: int = 50
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = ("role", "part")

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.data, self.network.name + ("-certified" if self.radius else ""), None

    @property
    def small(self) -> bool:
        """Whether steps of the training are small, so that on a device they would wait for launches."""
        return self.network.states > 0

    def device_for(self, wanted: str) -> str:
        """Returns the processor for few states, which it bounds as fast."""
        few = self.small and self.network.states <= FEW
        return "cpu" if few else super().device_for(wanted)

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured(context) for run in runs]

    def build(self, shape: tuple[int, int, int]) -> Any:
        """Builds the network with random weights."""
        return self.network.build(shape, self.seed)

    def train(self, model: Any, checkpoint: Checkpoint | None) -> None:
        """Trains by Adam, with cosine decay."""
        seen = images(self.data, "train")
        seen = seen.subset(self.schedule.images, self.seed) if self.schedule.images < len(seen) else seen
        fit(model, (seen.flat(), seen.labels), F.cross_entropy, epochs=self.schedule.epochs,
            batch_size=self.schedule.batch_size, seed=self.seed, schedule="cosine", checkpoint=checkpoint,
            optimizer=lambda parameters: torch.optim.Adam(parameters, self.schedule.learning_rate),
            device=next(model.parameters()).device, progress=False)  # fmt: skip

    def trained(self, context: Context) -> Any:
        """Builds and trains the network; at the scale paper its weights are cached on disk."""
        depth, height, width = images(self.data, "test").pixels.shape[1:]
        model = self.build((depth, height, width)).to("cpu" if self.small else context.device)
        weights = replace(self, suite="", role="ours", points=(), samples=0, slopes=False, seconds=0.0, part=0)
        train = partial(self.train, model, context.checkpoint([self]))
        if self.scale == "paper":
            train_or_load(f"{self.data}-{self.labels[1]}", weights, model, train)
        else:
            train()
        return model.eval()

    def facts(self, model: Any, form: ImplicitForm) -> dict[str, str]:
        """Returns what the record says of the trained network."""
        return {"certificate": str(form.certificate())}

    def measured(self, context: Context) -> Result:
        """Trains and returns all numbers."""
        device, start = context.device, time.monotonic()
        model = self.trained(context).double().to(device)
        trained = time.monotonic() - start
        with torch.no_grad():
            form = model.form()
        test = images(self.data, "test")
        u, target = test.flat().double()[: self.samples].to(device), test.labels[: self.samples].to(device)
        with torch.no_grad():
            clean = model(u).argmax(1) == target
        values = [Value("accuracy", _share(clean)), Value("training_seconds", trained)]
        for epsilon in self.points:
            attack = pgd(model, u, target, epsilon, steps=40)
            left = clean & ~attack.success
            values += [Value("attacked_accuracy", _share(left), epsilon)]
            values += self._at(form, u, target, left, epsilon)
        return Result(tuple(values), facts=self.facts(model, form))

    def _at(self, form: ImplicitForm, u: Tensor, target: Tensor, left: Tensor, epsilon: float) -> list[Value]:
        values: list[Value] = []
        box, proven = Box.around(u, epsilon), torch.zeros_like(left)
        asked = torch.ones_like(left)
        for name, method in (*METHODS.items(), *([("slopes", SLOPES)] if self.slopes else [])):
            rows, start = (asked & ~proven).nonzero()[:, 0], time.monotonic()
            if len(rows):
                proven[rows] = self._certified(form, Box(box.lower[rows], box.upper[rows]), target[rows], method)
            spent = (time.monotonic() - start) / max(1, len(rows))
            values += [
                Value(f"certified_{name}", _share(proven), epsilon), Value(f"seconds_{name}", spent, epsilon)
            ]  # fmt: skip
            asked = left if name == "continuation" else asked
        if self.seconds:
            values += self._complete(form, box, target, left, proven, epsilon)
        return [*values, Value("certified_excess", _share(proven & ~left), epsilon)]

    def _parts(self, *values: Tensor) -> list[tuple[Tensor, ...]]:
        return list(zip(*(value.split(self.part) for value in values), strict=True))

    def _certified(self, form: ImplicitForm, box: Box, target: Tensor, method: Crown) -> Tensor:
        """Certifies all images, some at a time; none where the method does not apply."""
        try:
            return torch.cat([
                certified(form, Box(lower, upper), classes, method)
                for lower, upper, classes in self._parts(box.lower, box.upper, target)
            ])  # fmt: skip
        except (IllPosedError, MethodError):
            return torch.zeros(len(target), dtype=torch.bool, device=target.device)

    def _complete(
        self, form: ImplicitForm, box: Box, target: Tensor, left: Tensor, proven: Tensor, epsilon: float
    ) -> list[Value]:
        """Asks branch and bound about what is open; `left` and `proven` learn its verdicts."""
        form, start = form.to("cpu"), time.monotonic()
        open_ = (left & ~proven).nonzero()[:, 0].tolist()
        for row in open_:
            one = Box(*(end[row : row + 1].cpu() for end in (box.lower, box.upper)))
            try:
                (verdict,) = branch_and_bound(form, one, target[row : row + 1].cpu(), self.seconds)
            except MissingExtraError:  # without the solver of linear programs the image stays open
                continue
            proven[row] = verdict.status == "proven"
            left[row] = verdict.status != "counter-example"
        spent = (time.monotonic() - start) / max(1, len(open_))
        return [
            Value("certified_complete", _share(proven), epsilon),
            Value("attacked_complete", _share(left), epsilon),
            Value("seconds_complete", spent, epsilon),
        ]


def _share(marks: Tensor) -> float:
    return float(marks.double().mean())


CONDITIONS: tuple[Kind, ...] = ("monotone", "spectral", "inf")
MNIST = tuple(Loops("mondeq", states) for states in (40, 87, 100, 200))
TABLE = tuple(Loops(kind, states) for kind in CONDITIONS for states in (40, 87, 200))
CONV = Loops("mondeq", channels=8)
POINTS = {"mnist": (0.01, 0.02, 0.05), "cifar10": (2 / 255,), "digits": (0.02,)}


def plan(scale: Scale) -> list[LoopRun]:
    """Returns monDEQs of the published sizes, and loops under the conditions of the library."""
    data, networks, samples = "mnist", [*MNIST, CONV, *TABLE], 200
    schedules = {"mondeq": Schedule(60_000, 3, 128, 1e-2)}, Schedule(20_000, 4, 128, 1e-3)
    if scale == "tiny":
        data, samples = "digits", 8
        networks = [Loops("mondeq", 6), Loops("mondeq", channels=2), Loops("monotone", 6), Loops("inf", 6)]
        schedules = {}, Schedule(1_200, 4, 64, 3e-2)
    elif scale == "default":
        samples = 10
        networks = [Loops("mondeq", 40), Loops("mondeq", channels=2), *TABLE[::3]]
        schedules = {"mondeq": Schedule(6_000, 3, 128, 1e-2)}, Schedule(6_000, 3, 128, 3e-3)
    pairs = [(data, network) for network in networks]
    pairs += [("cifar10", network) for network in (MNIST[-1], CONV) if scale == "paper"]
    return [
        LoopRun(suite="mondeq", seed=0, scale=scale, role=_role(network), data=data, network=network,
                schedule=schedules[0].get(network.kind, schedules[1]), points=POINTS[data], samples=samples,
                slopes=network.states > 0,
                seconds=0.0 if not network.states else 0.5 if network.states <= FEW else 2.0)
        for data, network in pairs
    ]  # fmt: skip


def _role(network: Loops) -> Role:
    return "ours" if network.kind == "mondeq" else "control"


def findings(records: Sequence[Record]) -> list[str]:
    """Says what each method proves of each network."""
    sentences = [
        "Published: CRAFT (Mueller, Fischer, Staab and Vechev, PLDI 2023) reports 25 points more certified "
        "accuracy than the semidefinite programs of Chen, Lasserre, Magron and Pauwels (NeurIPS 2021) at a "
        "hundredth of their time, for monDEQs of 87 states; the sizes and the margin of 20 are theirs, the "
        "weights are not.",
        "Networks are trained without attacks or bounds. All numbers of a network are of the same images, the "
        "runs with most of them.",
    ]
    most: dict[tuple[str, str], int] = {}
    for record in records:
        key = record.task, record.model
        most[key] = max(most.get(key, 0), record.config["samples"])
    records = [record for record in records if record.config["samples"] == most[record.task, record.model]]
    for data, radii in POINTS.items():
        names = list(dict.fromkeys(record.model for record in records if record.task == data))
        for name in names:
            clean = median_of(records, data, name, "accuracy")
            told = [_told(records, data, name, at) for at in radii]
            if clean is not None and any(told):
                sentences.append(f"{name} on {data}: {100 * clean:.1f} % clean; {'; '.join(filter(None, told))}.")
    return sentences


def _told(records: Sequence[Record], data: str, name: str, at: float) -> str:
    left = median_of(records, data, name, "attacked_accuracy", at)
    if left is None:
        return ""
    shares = [
        (method, median_of(records, data, name, f"certified_{method}", at)) for method in (*METHODS, "complete")
    ]
    proven = ", ".join(f"{method} {100 * share:.1f} %" for method, share in shares if share is not None)
    return f"at {at:.3g} PGD leaves {100 * left:.1f} %, proven are {proven}"


def _thresholds() -> tuple[Threshold, ...]:
    limits = []
    for data, networks in (("mnist", (*MNIST, CONV, *TABLE)), ("cifar10", (MNIST[-1], CONV))):
        for network in networks:
            for at in POINTS[data]:
                claim = (
                    f"No image that is proven for {network.name} on {data} at {at:.3g} is changed by an attack."
                )
                limits.append(
                    Threshold(claim, Measure("certified_excess", network.name, data, at), "at most", 0.0)
                )
    for network in TABLE:
        for at in (0.01, 0.02):
            one, other = (Measure(metric, network.name, "mnist", at)
                          for metric in ("certified_slopes", "attacked_accuracy"))  # fmt: skip
            claim = f"Of what PGD leaves of {network.name} at {at:g} at least 95 % is proven."
            limits.append(Threshold(claim, one, "at least", 0.95, rival=other))
    return tuple(limits)


def figure(title: str, metric: str, quantity: str = "share of images") -> Figure:
    return Figure(title, ("mnist", "cifar10", "digits"), metric, "epsilon", log="", quantity=quantity)


SUITE = Suite(
    name="mondeq",
    title="Proofs for monotone equilibrium networks",
    claim="Boxes that are guessed and then proven by continuation certify loops of which norms prove almost "
    "nothing.",
    papers=(),
    plan=plan,
    seeds={"tiny": 1, "default": 1, "paper": 1},
    figures=(
        figure("Certified accuracy by norms", "certified_norms"),
        figure("Certified accuracy by continuation", "certified_continuation"),
        figure("Certified accuracy with slopes optimised", "certified_slopes"),
        figure("Certified accuracy by branch and bound", "certified_complete"),
        figure("Attacked accuracy", "attacked_accuracy"),
        figure("Time of continuation", "seconds_continuation", "seconds an image"),
    ),
    findings=findings,
    thresholds=_thresholds(),
    differs="All images are seen three times by monDEQs, published are more epochs; by others 20,000 four times.",
)
