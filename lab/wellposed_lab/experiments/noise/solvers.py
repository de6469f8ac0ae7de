"""Solvers and stopping rules on a random map with noise (004 appendix B, Figures 4 and 5).

`ClassicalAnderson` is Anderson acceleration as the literature on equilibrium models has it, for comparisons.
`SolverTraceRun` follows solvers on the random map (Figure 4). `StopRun` counts how many steps two stopping rules
take in a trained classifier under noise (Figure 5).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from wellposed.equilibrium import MeanRelative, Relative, RobbinsMonro, Steps, Stopping, fixed_point, watch
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.solvers import Solver, SolverState, least_squares
from wellposed.models import Noise, Noisy
from wellposed.models.noise import NoiseDraws, NoisyMap
from wellposed_lab.config import Scale, Schedule, identity
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Plateau, Threshold
from wellposed_lab.experiments.noise.ensemble import Member, make_stack
from wellposed_lab.experiments.noise.models import WINDOW, Equilibrium, Pair
from wellposed_lab.experiments.noise.run import pair_of
from wellposed_lab.experiments.noise.training import train
from wellposed_lab.report.findings import median_of


@dataclass(frozen=True)
class ClassicalAnderson(Solver):
    """Goes at every step to the combination of the latest images whose residuals cancel (Anderson 1965).

    Without the plain steps and the judgement of `wellposed.Anderson`, which takes a jump back whose residual has
    not fallen; where residuals are noise, that is nearly every jump.

    Args:
        memory: images that are combined.
        ridge: regularisation, relative to the trace of the normal equations.
    """

    memory: int = 5
    ridge: float = 1e-4

    def init(self, x: Tensor) -> SolverState:
        none = x.new_zeros(x.shape[0], 0, x.shape[1])
        return none, none

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        points, images = (
            torch.cat([kept, new[:, None]], dim=1)[:, -self.memory :]
            for kept, new in zip(state, (x, fx), strict=True)
        )
        if points.shape[1] == 1:
            return fx, (points, images)
        residuals = images - points  # (B, m, n)
        gamma = least_squares(residuals.diff(dim=1)[:, None], residuals[:, None, -1], self.ridge)
        return fx - (images.diff(dim=1) * gamma[:, :, None]).sum(1), (points, images)


SOLVERS: dict[str, Solver | str] = {
    "unrolling": "picard",
    "stochastic-unrolling": RobbinsMonro(0.2),
    "anderson": ClassicalAnderson(),
    "anderson-guarded": "anderson",
    "broyden": "broyden",
}


@dataclass(frozen=True, kw_only=True)
class SolverTraceRun(Run):
    """Solves ``z = tanh(W z + x)`` with noise in the state, W uniform in +-1/sqrt(d) (004 appendix B).

    At every strength of noise, ``residual`` is the relative residual of the map without noise at what the solver
    returns after all steps (for stochastic unrolling, at the mean of the window), ``error`` its distance from
    the root of the mean map. With a stopping rule, ``steps`` and ``fired`` tell when it accepts, and the others
    are called ``residual_at_stop`` and ``error_at_stop``.

    Args:
        solver: by its name in 004.
        rule: "none", "relative" or "mean-relative".
        tolerance, window: of the rule.
        size, batch: of the problem.
        steps: the most that are taken.
        points: decibels.
    """

    solver: str
    rule: str = "none"
    tolerance: float = 0.05
    window: int = 10
    size: int = 100
    batch: int = 64
    steps: int = 60
    points: tuple[float, ...] = (20.0, 0.0)

    @property
    def labels(self) -> tuple[str, str, str | None]:
        ending = "" if self.rule == "none" else f"-{self.rule}"
        loose = "" if self.tolerance == 0.05 else f"-{self.tolerance:g}"
        return "random-tanh", f"{self.solver}{ending}{loose}", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [Result(tuple(value for at in run.points for value in run.measured(at))) for run in runs]

    def measured(self, decibels: float) -> list[Value]:
        """Returns the numbers of one strength of noise."""
        W, x = self._problem()

        def clean(z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ W.mT + x)

        noise = Noise(state=decibels, generator=torch.Generator().manual_seed(self.seed))
        disturbance = NoiseDraws(noise, self.batch)
        noisy = NoisyMap(clean, disturbance)
        found = fixed_point(noisy, torch.zeros_like(x), x, torch.arange(self.batch), solver=SOLVERS[self.solver],
                            stop=self._stop(), max_steps=self.steps, on_failure="ignore")  # fmt: skip
        z = found.value
        assert isinstance(z, Tensor)
        residual, error = relative(clean(z, x), z), relative(mean_root(noisy, x, self.batch), z)
        if self.rule == "none":
            return [Value("residual", residual, decibels), Value("error", error, decibels)]
        fired, steps = (float(part.double().mean()) for part in (found.converged, found.steps))
        named = {"steps": steps, "fired": fired, "residual_at_stop": residual, "error_at_stop": error}
        return [Value(name, value, decibels) for name, value in named.items()]

    def _problem(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        W = (2 * torch.rand(self.size, self.size, generator=generator) - 1) / math.sqrt(self.size)
        return W, torch.randn(self.batch, self.size, generator=generator)

    def _stop(self) -> Stopping:
        if self.rule == "relative":
            return Relative(self.tolerance, norm="2")
        if self.rule == "mean-relative":
            return MeanRelative(self.tolerance, self.window)
        return MeanRelative(0.0, self.window) if self.solver == "stochastic-unrolling" else Steps(self.steps)


@torch.no_grad()
def mean_root(noisy: NoisyMap, x: Tensor, batch: int, steps: int = 1500, kept: int = 1000) -> Tensor:
    """Returns the root of the mean of a noisy map: the mean over the last of many steps that shrink."""
    rows, z, total = torch.arange(batch), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        fz = noisy(z, x, rows)
        assert isinstance(fz, Tensor)
        z = torch.lerp(z, fz, 0.5 / (1 + step) ** 0.6)
        if step >= steps - kept:
            total += z
    return total / kept


def relative(a: Tensor, b: Tensor) -> float:
    """Returns the mean over samples of ``|a - b| / |a|``.

    Example:
        >>> relative(torch.ones(2, 4), torch.zeros(2, 4))
        1.0
    """
    return float((torch.linalg.vector_norm(a - b, dim=1) / torch.linalg.vector_norm(a, dim=1)).mean())


@dataclass(frozen=True, kw_only=True)
class StopRun(Run):
    """Trains a DEQ of width 128 without noise and solves for test images under noise until a rule stops.

    At every strength of noise, ``steps`` is their mean number, ``fired`` the share of images on which the rule
    stopped at all, and ``accuracy`` what its answers are worth.

    Args:
        data: name of the images.
        rule: "relative" or "mean-relative", at the tolerance.
        images, epochs, batch_size: of the training.
        points: decibels.
        samples: test images.
    """

    data: str
    rule: str
    tolerance: float = 0.01
    images: int = 12_000
    epochs: int = 5
    batch_size: int = 100
    points: tuple[float, ...] = (40.0, 30.0, 20.0, 10.0, 0.0)
    samples: int = 1_000

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.data, f"deq-128-{self.rule}", None

    @property
    def batch_seeds(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs that look at the same trained model."""
        return identity((self.suite, self.scale, self.seed, self.data, self.images, self.epochs, self.batch_size))

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        u, labels = pair_of(self.data, "train")
        stack = make_stack([Member(Pair("deq", 1), None, self.seed)], u.shape[1], int(labels.max()) + 1, "cpu")
        train(stack, u, labels, Schedule(self.images, self.epochs, self.batch_size, 1e-3))
        model = stack.member(0)
        assert isinstance(model, Equilibrium)
        return [Result(tuple(value for at in run.points for value in run.measured(model, at))) for run in runs]

    @torch.no_grad()
    def measured(self, model: Equilibrium, decibels: float) -> list[Value]:
        """Returns the numbers of one strength of noise."""
        relative = Relative(self.tolerance, norm="2")
        model.deq.stop = relative if self.rule == "relative" else MeanRelative(self.tolerance, WINDOW)
        noise = Noise(signal=decibels, generator=torch.Generator().manual_seed(self.seed))
        u, labels = (part[: self.samples] for part in pair_of(self.data, "test"))
        with watch() as log:
            right = (Noisy(model, noise)(u).argmax(1) == labels).double().mean()
        numbers = {"steps": log.mean_steps, "fired": 1 - log.failed_share, "accuracy": float(right)}
        return [Value(name, value, decibels) for name, value in numbers.items()]


TASK = "random-tanh"
POINTS = (30.0, 20.0, 10.0, 0.0)  # signal-to-noise ratios in decibels
RULES = ("relative", "mean-relative")


def plan(scale: Scale) -> list[Run]:
    """Returns every solver alone and with both rules, unrolling at a tighter tolerance, and a trained model."""

    def run(solver: str, rule: str = "none", tolerance: float = 0.05) -> SolverTraceRun:
        small = {"size": 20, "batch": 8, "steps": 30, "points": (20.0,)} if scale == "tiny" else {"points": POINTS}
        role: Role = "ours" if "mean" in rule or solver == "stochastic-unrolling" else "baseline"
        return SolverTraceRun(suite="noise-solvers", seed=0, scale=scale, role=role, solver=solver, rule=rule,
                              tolerance=tolerance, **small)  # fmt: skip

    alone = [run(solver) for solver in SOLVERS]
    ruled = [run(solver, rule) for solver in SOLVERS for rule in RULES]
    return [*alone, *ruled, *(run("unrolling", rule, 0.01) for rule in RULES), *_trained(scale)]


def _trained(scale: Scale) -> list[StopRun]:
    """Returns both rules in a classifier, on MNIST; tiny runs are on digits."""
    settings: dict[str, object] = {"data": "mnist"}
    if scale == "tiny":
        settings = {"data": "digits", "images": 200, "epochs": 1, "samples": 50, "points": (10.0,)}
    roles: tuple[Role, ...] = ("baseline", "ours")
    return [
        StopRun(suite="noise-solvers", seed=0, scale=scale, role=role, rule=rule, **settings)  # type: ignore[arg-type]
        for role, rule in zip(roles, RULES, strict=True)
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says where the averaged rule saves steps and where it costs some."""
    sentences = [
        "Residuals are those of the map without noise, after 60 steps; that of stochastic unrolling is at the "
        "mean of its last ten iterates, the others at the last one. A solve that never stops counts as 60 steps.",
    ]
    for at in POINTS:
        told = []
        for solver in SOLVERS:
            plain, mean = (median_of(records, TASK, f"{solver}-{rule}", "steps", at) for rule in RULES)
            if plain is not None and mean is not None:
                told.append(f"{solver} {plain:.1f} and {mean:.1f}")
        if told:
            sentences.append(
                f"Steps until the relative and the averaged rule stop at 0.05, {at:g} dB: {', '.join(told)}."
            )
    for at in StopRun.points:
        found = [median_of(records, "mnist", f"deq-128-{rule}", "steps", at) for rule in RULES]
        if None not in found:
            sentences.append(
                f"In a DEQ trained on MNIST, at {at:g} dB and a tolerance of 0.01, the relative rule takes "
                f"{found[0]:.1f} steps and the averaged one {found[1]:.1f}; 60 is never."
            )
    tight = [median_of(records, TASK, f"unrolling-{rule}-0.01", "fired", 20.0) for rule in RULES]
    if None not in tight:
        sentences.append(
            f"At a tolerance of 0.01 and 20 dB the relative rule stops {100 * (tight[0] or 0):.0f} % of the "
            f"samples, the averaged one {100 * (tight[1] or 0):.0f} %."
        )
    return sentences


SUITE = Suite(
    name="noise-solvers",
    title="Solving under noise",
    claim="Under noise a mean over iterates is closer to the solution than an iterate, and stopping by it saves "
    "steps.",
    papers=("004 section 3.2", "004 appendix B", "004 Figures 4 and 5"),
    plan=plan,
    seeds={"tiny": 1, "default": 5, "paper": 5},
    figures=(
        Figure("Residual after 60 steps", (TASK,), "residual", "signal-to-noise ratio in decibels",
               paper="004 Figure 4", log="y", quantity="relative residual without noise"),
        Figure("Steps until a rule stops", (TASK, "mnist"), "steps", "signal-to-noise ratio in decibels",
               paper="004 Figures 4 and 5", log=""),
    ),
    findings=findings,
    thresholds=(
        Threshold("At 20 dB the averaged rule stops plain unrolling after at most 14 steps.",
                  Measure("steps", "unrolling-mean-relative", TASK, 20), "at most", 14.0),
        Threshold("At 20 dB the relative rule takes plain unrolling at least 15 steps.",
                  Measure("steps", "unrolling-relative", TASK, 20), "at least", 15.0),
    ),
    plateaus=(Plateau("neither rule fires", "steps", "at least", 60),),
    differs="The rules are compared on networks that saw 12,000 images 5 times, published are 60,000 and 30.",
)  # fmt: skip
