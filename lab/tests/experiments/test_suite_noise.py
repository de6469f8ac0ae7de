"""The suites on noise: their runs, what they train and what they follow."""

import math

import pytest
import torch
from torch import Tensor
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.run import Context, grouped
from wellposed_lab.experiments.noise.models import WIDTHS, Equilibrium, Pair, sensitivities
from wellposed_lab.experiments.noise.solvers import ClassicalAnderson, SolverTraceRun, mean_root
from wellposed_lab.networks.twins import FeedForward

from wellposed.equilibrium import Steps, fixed_point
from wellposed.models.noise import Noise, NoiseDraws, NoisyMap


def test_anderson_solves_a_linear_equation_in_as_many_steps_as_it_has_states() -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    A, b = 3 * A / torch.linalg.matrix_norm(A, 2), torch.randn(3, 4, generator=generator, dtype=torch.float64)
    solver, start = ClassicalAnderson(6, 0.0), torch.zeros_like(b)
    found = fixed_point(lambda x: x @ A.mT + b, start, solver=solver, stop=Steps(6), on_failure="ignore")
    torch.testing.assert_close(found.value, torch.linalg.solve(torch.eye(4).double() - A, b.mT).mT)


def test_root_of_the_mean_map() -> None:
    noise = Noise(state=0.0, generator=torch.Generator().manual_seed(0))
    f = NoisyMap(lambda z, x: 0.5 * z + x, NoiseDraws(noise, 50))
    root = mean_root(f, torch.ones(50, 20), 50)
    assert float((root - 2).abs().mean()) < 0.1


def test_averaging_comes_closer_and_stops_earlier() -> None:
    def measured(solver: str, rule: str) -> dict[str, float]:
        run = SolverTraceRun(suite="noise-solvers", seed=1, scale="tiny", solver=solver, rule=rule, points=(20.0,))
        return {value.metric: value.value for value in run.measured(20.0)}

    plain, stochastic = measured("unrolling", "none"), measured("stochastic-unrolling", "none")
    assert stochastic["residual"] < plain["residual"] / 2 and stochastic["error"] < plain["error"] / 2
    assert measured("unrolling", "mean-relative")["steps"] < measured("unrolling", "relative")["steps"]


@pytest.mark.parametrize("name", ["noise-mnist", "noise-solvers", "noise-cifar"])
def test_tiny_runs_measure_what_the_rows_ask_for(name: str) -> None:
    runs = get_suite(name).runs("tiny", 1)
    assert len({run.labels for run in runs}) == len(runs)
    for group in grouped(runs):
        for result in group.runs[0].execute(group.runs, Context()):
            assert result.values and all(math.isfinite(value.value) for value in result.values)


def test_runs_of_one_ensemble_are_one_group() -> None:
    paper, default = (grouped(get_suite("noise-mnist").runs(scale)) for scale in ("paper", "default"))
    sizes = sorted(
        ((group.runs[0].batch_size, group.runs[0].pair.kind, len(group.runs)) for group in paper), key=str
    )
    whole = [size for size in sizes if size[2] > 21]  # three seeds: 21 models, others of equal size, controls
    assert whole == [(128, "deq", 93), (128, "ffw", 135), (16, "deq", 84), (16, "ffw", 126)]
    assert all(len({run.pair.width for run in group.runs}) == 1 for group in default)


def test_default_plan_has_the_models_of_the_figures() -> None:
    models = {run.labels[1] for run in get_suite("noise-mnist").runs("default", 1)}
    assert {"deq-467-noise-0db", "ffw-13-noise-0db", "deq-223-noise-10db", "deq-386-jacobian", "ffw-9-jacobian",
            "ffw-13-inject-wide", "ffw-13-xavier-mean-10", "deq-291", "deq-427", "ffw-11"} <= models  # fmt: skip


@pytest.mark.parametrize("layers", [1, 13])
def test_pairs_have_as_many_weights_in_the_cell(layers: int) -> None:
    deq, ffw = (Pair(kind, layers).build(64, 10, 0) for kind in ("deq", "ffw"))
    assert isinstance(deq, Equilibrium) and isinstance(ffw, FeedForward)
    cell, hidden = (sum(p.numel() for p in part.parameters()) for part in (deq.deq.cell.layers, ffw.layers))
    assert cell == pytest.approx(hidden, rel=0.02)
    assert deq.deq.cell.state_features == WIDTHS[layers]


def test_sensitivity_of_a_network_is_the_derivative_of_its_last_state() -> None:
    model = Pair("ffw", 3, inject=True).build(8, 4, 0)
    assert isinstance(model, FeedForward)
    u = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    xi = torch.randn(1, 128, generator=torch.Generator().manual_seed(7))

    def last(noise: Tensor) -> Tensor:
        x = z = model.encode(u)
        for layer in model.layers:
            z = layer.activation(layer.signal(z, x) + 0.1 * noise)
        return z[0]

    J = torch.autograd.functional.jacobian(last, xi)[:, 0]
    found, radius = sensitivities(model, u, seed=7)
    assert found == pytest.approx(float(J.norm(dim=0).mean()) / 0.1, rel=1e-4)
    assert 0 < radius < 1
