"""Runs that train an implicit model and ask what its number of steps depends on."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.experiments.depth_measures import (
    ABSOLUTE,
    LIMIT,
    RELATIVE,
    active_states,
    by_decile,
    homogeneity_error,
    local_rates,
    predicted_slope,
    rank_correlation,
    sample_steps,
    scaled_steps,
    slope,
    with_rule,
)
from wellposed.experiments.observed_run import ObservedRun
from wellposed.experiments.record import Result, Value
from wellposed.models.implicit import ImplicitModel
from wellposed.tasks.task import Pair
from wellposed.training import History

SCALES = tuple(10.0**power for power in range(-3, 6))
SAMPLES = 500  # of the validation set, for what looks at single samples


@dataclass(frozen=True, kw_only=True)
class DepthRun(ObservedRun):
    """Trains an implicit model in float32 and counts its steps in float64, with plain iteration.

    In float32 the rounding of large states is above the papers' absolute tolerance, which is then met by luck or
    never; the share of samples that never meet it is `not_converged_float32`. Every model is measured with both
    rules, whichever it was trained with: `steps_absolute` and `steps_relative` at the points of the task, and
    `scaled_absolute` and `scaled_relative` for the same samples at several scales.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # steps are counted there

    @property
    def together(self) -> bool:
        return False  # one model after the other takes the compiled kernels, which are faster than a stack

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        if not isinstance(model, ImplicitModel) or history is None:
            raise InputError(f"the depth of implicit models is measured; received {type(model).__name__}")
        values = self._lost(model, seed) if self.fold is None else []
        model.double().max_steps = LIMIT  # the limit of the training would hide how many steps are needed
        result = super().measure(model, pair, seed, history, member)
        if self.fold is None:
            inside = pair[1][0].double()
            values += self._under_shift(model, seed)
            values += _inside(model, inside, known=any(_is_steps(value) for value in result.values))
            values += _under_scale(model, inside[:SAMPLES]) + _of_samples(model, *_first(pair[1]), self.task.loss)
            values += _of_epochs(result)
        return dataclasses.replace(result, values=(*result.values, *values))

    def _lost(self, model: ImplicitModel, seed: int) -> list[Value]:
        """Measures in float32 how many samples the absolute rule never accepts."""
        values, strict = [], with_rule(model, ABSOLUTE)
        for at in self.task.points:
            if at is not None:
                found = strict.equilibrium(self.task.test(seed, at)[0][:SAMPLES])
                values.append(Value("not_converged_float32", 1 - float(found.converged.double().mean()), at))
        return values

    def _under_shift(self, model: ImplicitModel, seed: int) -> list[Value]:
        values = []
        for at in self.task.points:
            u = self.task.test(seed, at)[0]
            for name, rule in (("steps_absolute", ABSOLUTE), ("steps_relative", RELATIVE)):
                values.append(Value(name, float(sample_steps(model, u, rule).mean()), at))
        return values


def _is_steps(value: Value) -> bool:
    return value.metric == "steps" and value.at is None


def _first(pair: Pair) -> Pair:
    return pair[0][:SAMPLES].double(), pair[1][:SAMPLES].double()


def _inside(model: ImplicitModel, u: Tensor, known: bool) -> list[Value]:
    """Counts the steps of the model's own rule in distribution, unless the task has tested them."""
    if known:
        return []
    with torch.no_grad():
        return [Value("steps", float(model.equilibrium(u).steps.double().mean()))]


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
    """Says how samples of the training distribution differ in their steps, and with what that goes."""
    steps, rates, active = sample_steps(model, u, RELATIVE), local_rates(model, u), active_states(model, u)
    with torch.no_grad():
        prediction = model(u)
    errors = torch.stack([loss(p[None], t[None]) for p, t in zip(prediction, y, strict=True)])
    quantiles = torch.tensor([0.05, 0.95], dtype=torch.float64)
    values = [Value("steps_by_rate", mean, float(part)) for part, mean in enumerate(by_decile(steps, rates), 1)]
    for name, column in (("steps", steps), ("rate", rates), ("active", active)):
        low, high = column.quantile(quantiles).tolist()
        values += [Value(f"{name}_low", low), Value(f"{name}_high", high)]
    for name, column in (("rate", rates), ("active", active), ("error", errors)):
        values.append(Value(f"{name}_correlation", rank_correlation(steps, column)))
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
