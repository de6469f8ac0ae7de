"""Runs that follow solvers on a random map with noise (004 appendix B, Figure 4)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from wellposed.equilibrium import MeanRelative, Relative, RobbinsMonro, Steps, Stopping, fixed_point
from wellposed.equilibrium.solver import Solver
from wellposed.experiments.classical_anderson import ClassicalAnderson
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.models.noise import Disturbance, Noise, NoisyMap

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

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [Result(tuple(value for at in run.points for value in run.measured(at))) for run in runs]

    def measured(self, decibels: float) -> list[Value]:
        """Returns the numbers of one strength of noise."""
        W, x = self._problem()

        def clean(z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ W.mT + x)

        noise = Noise(state=decibels, generator=torch.Generator().manual_seed(self.seed))
        disturbance = Disturbance(noise, self.batch)
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
