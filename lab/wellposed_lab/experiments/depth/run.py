"""Runs that train an implicit model and ask what its number of steps depends on.

Without a bias and with a positively homogeneous phi the whole iteration from ``x = 0`` scales with its input,
``x_t(cu) = c x_t(u)`` for c > 0, and so does its residual. Near the equilibrium that residual falls like
``rho^t``, rho the spectral radius of ``phi'(z) A``. An absolute tolerance is then met after

    t(c) = t(1) + log(c) / log(1 / rho)

steps, whatever the model has learnt, and a relative one after as many steps at every scale. `sample_steps` and
`local_rates` measure steps and rho, `slope` and `predicted_slope` compare them across scales; `DepthRun` trains
the model and records both.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from wellposed.equilibrium.solvers import Picard
from wellposed.equilibrium.stopping import Absolute, Relative, Stopping
from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel
from wellposed.training import History
from wellposed_lab.engine.statistics import rank_correlation
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.engine.training import ObservedRun
from wellposed_lab.tasks.task import Pair

ABSOLUTE = Absolute(3e-6)  # that of 001
RELATIVE = Relative(rtol=1e-6)
EXACT = Relative(rtol=1e-13)
LIMIT = 20_000


def with_rule(model: ImplicitModel, stop: Stopping) -> ImplicitModel:
    """Returns the model with shared weights, solved by Picard iteration until a stopping rule is met."""
    other = copy.copy(model)
    other.solver, other.stop, other.max_steps, other.on_failure = Picard(), stop, LIMIT, "ignore"
    return other


@torch.no_grad()
def sample_steps(model: ImplicitModel, u: Tensor, stop: Stopping) -> Tensor:  # (B, p) -> (B,)
    """Counts the steps of every sample.

    Example:
        >>> model = ImplicitModel.from_matrices(*(0.5 * torch.eye(1, dtype=torch.float64) for _ in range(3)))
        >>> u = torch.ones(1, 1, dtype=torch.float64)
        >>> [int(sample_steps(model, scale * u, ABSOLUTE)) for scale in (1.0, 2.0**10)]
        [19, 29]
    """
    return with_rule(model, stop).equilibrium(u.to(model.B.dtype)).steps.double()


@torch.no_grad()
def local_rates(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, p) -> (B,)
    """Computes the spectral radius of ``phi'(z) A`` at every sample's equilibrium, the rate of its iteration."""
    return torch.linalg.eigvals(_slopes(model, u).unsqueeze(-1) * model.A).abs().amax(-1)


@torch.no_grad()
def active_states(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, p) -> (B,)
    """Counts the states with a non-zero slope."""
    return (_slopes(model, u) != 0).sum(-1).double()


def _slopes(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, n)
    if not model.activation.is_relu:
        raise InputError(f"slopes are known here for 'relu'; received a model with {model.activation.name!r}")
    x = with_rule(model, EXACT).equilibrium(u.to(model.B.dtype)).value
    return (torch.as_tensor(x) > 0).to(model.B.dtype)


def scaled_steps(model: ImplicitModel, u: Tensor, stop: Stopping, scales: Sequence[float]) -> list[float]:
    """Returns the mean steps of the same samples at several scales."""
    return [float(sample_steps(model, scale * u, stop).mean()) for scale in scales]


def slope(scales: Sequence[float], steps: Sequence[float]) -> float:
    """Fits ``steps = a + b log(scale)`` by least squares and returns b.

    Example:
        >>> round(slope([1.0, math.e, math.e**2], [10.0, 13.0, 16.0]), 9)
        3.0
    """
    x, y = torch.tensor(scales, dtype=torch.float64).log(), torch.tensor(steps, dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def predicted_slope(rates: Tensor) -> float:
    """Returns the mean of ``1 / log(1 / rho)`` over the samples; one that converges in finite steps counts 0.

    Example:
        >>> round(predicted_slope(torch.tensor([0.5, 0.0])) * math.log(2), 9)
        0.5
    """
    return float(torch.where(rates > 0, -1 / rates.double().log(), 0.0).mean())


@torch.no_grad()
def homogeneity_error(model: ImplicitModel, u: Tensor, scales: Sequence[float]) -> float:
    """Returns the largest deviation of ``f(cu)`` from ``c f(u)``, relative to the largest output."""
    exact = with_rule(model, EXACT)
    u = u.to(model.B.dtype)
    y = exact(u)
    return max(float((exact(scale * u) / scale - y).abs().max() / y.abs().max()) for scale in scales)


def by_decile(values: Tensor, order: Tensor) -> list[float]:
    """Returns the means of `values` in ten groups of equal size, the samples sorted by `order`."""
    return [float(group.mean()) for group in values[order.argsort()].tensor_split(10)]


SCALES = tuple(10.0**power for power in range(-3, 6))
SAMPLES = 500  # of the validation set, where single samples are measured


@dataclass(frozen=True, kw_only=True)
class DepthRun(ObservedRun):
    """Trains an implicit model in float32 and counts its steps in float64, with plain iteration.

    In float32 the rounding of large states is above the papers' absolute tolerance, which is then met by chance or
    never; the share of samples that never meet it is `not_converged_float32`. Every model is measured with both
    rules, whichever it was trained with: `steps_absolute` and `steps_relative` at the points of the task, and
    `scaled_absolute` and `scaled_relative` for the same samples at several scales.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # steps are counted there

    @property
    def batch_seeds(self) -> bool:
        return False  # single models use the compiled kernels, which are faster than an ensemble

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        if not isinstance(model, ImplicitModel) or history is None:
            raise InputError(f"the depth of implicit models is measured; received {type(model).__name__}")
        values = self._lost(model, seed) if self.fold is None else []
        model.double().max_steps = LIMIT  # the limit of the training would hide how many steps are needed
        result = super().measure(model, pair, seed, history, member)
        if self.fold is None:
            values += self._under_shift(model, seed)
            if not any(value.metric == "steps" and value.at is None for value in result.values):
                with torch.no_grad():
                    steps = model.equilibrium(pair[1][0].double()).steps
                values.append(Value("steps", float(steps.double().mean())))
            u, y = (part[:SAMPLES].double() for part in pair[1])
            values += _under_scale(model, u) + _of_samples(model, u, y, self.task.loss)
            values += _of_epochs(result)
        return dataclasses.replace(result, values=(*result.values, *values))

    def _lost(self, model: ImplicitModel, seed: int) -> list[Value]:
        """Measures in float32 how many samples the absolute rule never accepts."""
        values, strict = [], with_rule(model, ABSOLUTE)
        for at in self.task.points:
            if at is not None:
                solution = strict.equilibrium(self.task.test(seed, at)[0][:SAMPLES])
                values.append(Value("not_converged_float32", 1 - float(solution.converged.double().mean()), at))
        return values

    def _under_shift(self, model: ImplicitModel, seed: int) -> list[Value]:
        values = []
        for at in self.task.points:
            u = self.task.test(seed, at)[0]
            for name, rule in (("steps_absolute", ABSOLUTE), ("steps_relative", RELATIVE)):
                values.append(Value(name, float(sample_steps(model, u, rule).mean()), at))
        return values


def _under_scale(model: ImplicitModel, u: Tensor) -> list[Value]:
    """Compares the same samples at several scales: steps, their growth, and the outputs."""
    absolute, relative = (scaled_steps(model, u, rule, SCALES) for rule in (ABSOLUTE, RELATIVE))
    curves = [Value("scaled_absolute", steps, at) for at, steps in zip(SCALES, absolute, strict=True)]
    curves += [Value("scaled_relative", steps, at) for at, steps in zip(SCALES, relative, strict=True)]
    above = SCALES.index(1.0)
    return [
        *curves,
        Value("steps_slope", slope(SCALES[above:], absolute[above:])),
        Value("predicted_slope", predicted_slope(local_rates(model, u))),
        Value("relative_spread", max(relative[above:]) / min(relative[above:]) - 1),
        Value("homogeneity_error", homogeneity_error(model, u, SCALES)),
    ]


def _of_samples(
    model: ImplicitModel, u: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> list[Value]:
    """Measures how samples of the training distribution differ in their steps, and what that correlates with."""
    steps, rates, active = sample_steps(model, u, RELATIVE), local_rates(model, u), active_states(model, u)
    with torch.no_grad():
        prediction = model(u)
    errors = torch.stack([loss(p[None], t[None]) for p, t in zip(prediction, y, strict=True)])
    quantiles = torch.tensor([0.05, 0.95], dtype=torch.float64)
    values = [
        Value("steps_by_rate", mean, float(decile)) for decile, mean in enumerate(by_decile(steps, rates), 1)
    ]
    for name, column in (("steps", steps), ("rate", rates), ("active", active)):
        low, high = column.quantile(quantiles).tolist()
        values += [Value(f"{name}_low", low), Value(f"{name}_high", high)]
    for name, column in (("rate", rates), ("active", active), ("error", errors)):
        values.append(Value(f"{name}_correlation", rank_correlation(steps.tolist(), column.tolist())))
    return [value for value in values if not math.isnan(value.value)]


def _of_epochs(result: Result) -> list[Value]:
    """Reads the ends of the training curves, and how many epochs had a sample without an equilibrium."""
    steps, failed = (_known(result.series.get(name, ())) for name in ("steps", "failed_share"))
    if not steps:
        return []
    return [
        Value("steps", steps[0], "first-epoch"),
        Value("steps", steps[-1], "last-epoch"),
        Value("epochs_not_converged", sum(share > 0 for share in failed) / len(failed)),
    ]


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
