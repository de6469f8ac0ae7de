"""The suites on algorithms and regression under noise: their models, runs, sentences and pictures."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wellposed_lab.config import Training
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.experiments.algorithms.models import Design, Equilibrium, Growth, Layers, with_fixed_steps
from wellposed_lab.experiments.algorithms.picture import draw_answers, drawn_maze
from wellposed_lab.experiments.algorithms.run import AlgorithmRun, StackedConvolution, predict
from wellposed_lab.experiments.algorithms.tasks import PrefixSums
from wellposed_lab.experiments.noise.regression import draw_errors, errors_by_noise, with_last_errors

from wellposed.equilibrium import Steps
from wellposed.errors import InputError
from wellposed.models import Noise, PlainConvCell, RecallCell

SUITES = ("prefix-sums", "mazes", "matrix-addition", "noise-regression")
PREFIX = Design("deq", "plain", 1, 6, 1, Growth(1.3, 8), trained=20)
SHARP = 6.0


def parity_net() -> Equilibrium:
    """A cell of which the equilibrium is known: two channels tell whether p + b is above 1 and above -1.

    With p the parity to the left and b the bit, both of them -1 or 1, the parity here is ``z2 - z1 - 1``; left of
    the string the state is padded with zeros, which are the parity -1.
    """
    model = PREFIX.build(0)
    assert isinstance(model, Equilibrium) and isinstance(model.deq.cell, PlainConvCell)
    cell = model.deq.cell
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        cell.state.weight[:2, 1, 0], cell.state.weight[:2, 0, 0] = SHARP, -SHARP
        cell.input.weight[:2, 0, 1] = SHARP
        assert cell.state.bias is not None
        cell.state.bias[:2] = torch.tensor([-2 * SHARP, 0.0])
        model.readout.weight[0, :2, 0] = torch.tensor([-1.0, 1.0])
        model.readout.bias -= 1  # type: ignore[operator]
    return model.eval()


def prefix_run(**changes: Any) -> AlgorithmRun:
    settings: dict[str, Any] = {
        "task": PrefixSums(length=16, samples=32, test_samples=20, points=(16, 64)),
        "training": Training(epochs=1, batch_size=16, schedule=None),
        "probed": (16, 64),
        **changes,
    }
    return AlgorithmRun(suite="prefix-sums", seed=0, scale="tiny", design=PREFIX, **settings)


def test_a_known_equilibrium_is_measured_as_it_is() -> None:
    found = {(value.metric, value.at): value.value for value in prefix_run()._measured(parity_net())}
    assert found["accuracy", 16] == found["accuracy", 64] == found["solved", 64] == found["settled", 64] == 1
    assert found["fixed_accuracy", 16] == 1 and found["fixed_accuracy", 64] < 0.9
    assert 50 < found["steps", 64] < 70  # the longest way a bit has to go, and a few to come to rest
    assert found["independent", 16] == found["independent", 64] == 1 and found["alignment", 64] > 0.999
    assert found["noisy_accuracy", 20.0] > 0.99 and 0.4 < found["noisy_accuracy", 0.0] < 0.8


def test_steps_grow_in_tests_and_are_fixed_on_demand() -> None:
    model, u = parity_net(), PrefixSums(test_samples=3).test(0, 128)[0]
    assert int(model.equilibrium(u).steps.max()) > 60
    assert int(with_fixed_steps(model).equilibrium(u).steps.max()) == 20
    model.noise = Noise(state=40.0)
    assert model.equilibrium(u).steps.tolist() == [21] * 3  # under noise all of them, and the last evaluation


def test_a_model_is_its_cell_repeated() -> None:
    u = PrefixSums(test_samples=4).test(0, 16)[0]
    model, net = PREFIX.build(1).eval(), Design("recurrent", "plain", 1, 6, 1, Growth(0.0, 5), 3).build(1)
    assert isinstance(model, Equilibrium) and isinstance(net, Layers)

    def conv(layer: nn.Module, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (1, 1)).unfold(2, 3, 1)  # (B, C, L, 3)
        bias = 0 if layer.bias is None else layer.bias[:, None]
        return torch.einsum("bclk,dck->bdl", padded, layer.weight) + bias  # type: ignore[arg-type,operator]

    cell, z = model.deq.cell, torch.zeros(4, 6, 16)
    for _ in range(100):
        z = torch.tanh(conv(cell.state, z) + conv(cell.input, u))
    torch.testing.assert_close(model(u), conv_readout(model.readout, z), rtol=0, atol=2e-3)
    (inner,) = net.cells
    for training, count in ((True, 3), (False, 5)):
        z = conv(inner.input, u)
        for _ in range(count):
            z = torch.tanh(conv(inner.state, z))
        torch.testing.assert_close(net.train(training)(u), conv_readout(net.readout, z))


def conv_readout(layer: nn.Module, z: Tensor) -> Tensor:
    assert isinstance(layer, nn.Conv1d) and layer.bias is not None
    return torch.einsum("bcl,dc->bdl", z, layer.weight[..., 0]) + layer.bias[:, None]


def test_feed_forward_networks_and_where_noise_reaches_them() -> None:
    u = torch.randn(5, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    one = Design("ffw", "recall", 3, 4, 1, Growth(0.0, 9), 9).build(0)
    assert isinstance(one, Layers)
    (block,) = one.cells
    assert isinstance(block, RecallCell)
    start = block.recall(u)
    torch.testing.assert_close(one(u), one.readout(block.step(start, torch.zeros_like(start))))
    deep = Design("ffw", "recall", 3, 4, 1, Growth(0.0, 9), 9, layers=3).build(0)
    z = torch.zeros_like(start)
    for cell in deep.cells:  # type: ignore[union-attr]
        z = cell(z, u)
    torch.testing.assert_close(deep(u), deep.readout(z))
    for model in (one, deep):
        model.noise = Noise(state=0.0, generator=torch.Generator().manual_seed(1))
        assert not torch.allclose(model(u), model(u))
    with pytest.raises(InputError, match="several layers"):
        Design("deq", "plain", 1, 6, 1, Growth(1.0, 0), 4, layers=2)


def test_truncated_training_differentiates_a_few_steps_from_various_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Design("deq", "recall", 3, 4, 1, Growth(1.0, 5), trained=6, truncated=2).build(0)
    assert isinstance(model, Equilibrium)
    starts: list[Tensor] = []
    counts, taken = set(), model.taken

    def record(u: Tensor, x: Tensor, steps: int) -> Tensor:
        starts.append(x)
        counts.add(steps)
        return taken(u, x, steps)

    monkeypatch.setattr(model, "taken", record)
    u = torch.ones(2, 3, 5, 5)
    with torch.random.fork_rng(()):
        torch.manual_seed(0)
        for _ in range(20):
            model(u).sum().backward()
    assert [float(x.abs().sum()) > 0 for x in starts] == [False, True] * 10
    assert counts <= set(range(1, 7)) and len(counts) > 3
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("form", ["plain", "recall", "dense"])
@pytest.mark.parametrize("truncated", [None, 3])
@pytest.mark.parametrize("decibels", [None, 3.0])
def test_training_takes_the_steps_of_the_library(form: Any, truncated: int | None, decibels: float | None) -> None:
    design = Design("deq", form, 2, 4, 1, Growth(0.0, 9), trained=4, truncated=truncated)
    model, found = design.build(0).train(), []
    assert isinstance(model, Equilibrium)
    u = torch.randn({"plain": (3, 2, 5), "recall": (3, 2, 5, 5), "dense": (3, 2)}[form])
    start = torch.randn_like(model.deq.start(u))  # type: ignore[arg-type]
    model.deq.max_steps, model.deq.stop = 4, Steps(4)
    for solve in (lambda: model.taken(u, start, 4), lambda: model.deq(u, start)):
        model.zero_grad()
        model.noise = None if decibels is None else Noise(state=decibels, generator=torch.Generator())
        x = solve()
        x.square().sum().backward()
        found.append([x.detach(), *(p.grad for p in model.deq.parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("name", SUITES)
def test_tiny_runs_and_default_plans_measure_what_the_rows_ask_for(name: str) -> None:
    runs, suite = get_suite(name).runs("tiny", 1), get_suite(name)
    assert len({run.labels for run in runs}) == len(runs)
    metrics = set()
    for run in runs:
        (result,) = run.execute([run], Context())
        assert result.values and all(math.isfinite(value.value) for value in result.values)
        metrics |= {value.metric for value in result.values}
    planned = suite.runs("default", 1)
    wanted = [m for claim in load_claims() if claim.suite == name for m in claim.rule.measures]
    wanted += [m for threshold in suite.thresholds for m in threshold.measures]
    assert wanted and {m.metric for m in wanted} | {figure.metric for figure in suite.figures} <= metrics
    assert {(m.task, m.model) for m in wanted} <= {run.labels[:2] for run in planned}


def test_training_learns_and_is_determined_by_the_seed() -> None:
    task = PrefixSums(length=4, samples=256, test_samples=64, points=(4,))
    run = prefix_run(
        task=task, training=Training(epochs=6, batch_size=32, learning_rate=2e-2, clip=1.0), probed=()
    )
    (first,), (again,) = (run.execute([run], Context()) for _ in range(2))
    assert first == again
    losses = first.series["train_loss"]
    assert losses[-1] < losses[0] - 0.02
    noisy = prefix_run(task=task, training=run.training, noise=0.0, probed=())
    values = {value.metric for value in noisy.execute([noisy], Context())[0].values}
    assert noisy.labels[1] == "deq-noise-0db" and "noisy_accuracy" not in values and "steps" not in values


def test_networks_side_by_side_learn_as_each_would_alone() -> None:
    training = Training(epochs=2, batch_size=16, learning_rate=1e-2, schedule=None)
    run = prefix_run(
        task=PrefixSums(length=6, samples=32, test_samples=4, points=(6,)), training=training, probed=()
    )
    pair = [run, run.with_seed(1)]
    assert run.batch_seeds and len(run.execute(pair, Context())) == 2
    both, losses = run._trained(pair, Context())
    (alone,), own = run._trained([run], Context())
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(both[0].state_dict()[name], weight, rtol=1e-3, atol=1e-5)
        assert weight.numel() == 1 or not torch.allclose(both[1].state_dict()[name], weight, atol=1e-3)
    assert losses != own and 0.5 < losses[0] < 0.9
    with pytest.raises(InputError, match="keep the length"):
        StackedConvolution([nn.Conv1d(2, 2, 3)])


def test_predictions_come_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, u = parity_net(), PrefixSums(test_samples=7).test(0, 16)[0]
    whole = predict(model, u)
    monkeypatch.setattr("wellposed_lab.experiments.algorithms.run.PART", 32)
    assert torch.equal(predict(model, u), whole)


def record(suite: str, model: str, values: Sequence[Value], facts: dict[str, Any] | None = None) -> Record:
    task = "bump-regression" if suite == "noise-regression" else suite
    return Record("0", suite, "default", task, model, None, 0, "ours", "run", {}, tuple(values), {}, facts or {},
                  {}, "2026-01-01", 1.0)  # fmt: skip


def test_sentences_about_records() -> None:
    assert all(get_suite(name).findings([]) == [] for name in SUITES)
    values = [Value(metric, 0.5, at) for metric in ("accuracy", "solved", "fixed_accuracy") for at in (32, 512)]
    values += [Value("steps", 99.0, at) for at in (32, 512)]
    values += [Value("alignment", 0.25, 512), Value("independent", 0.75, 512)]
    told = " ".join(get_suite("prefix-sums").findings([record("prefix-sums", "deq", values)]))
    assert "0 of 1 equilibrium nets" in told and "99 and 99 steps" in told and "75 % at 512 (cosine 0.25" in told
    sound = record("prefix-sums", "deq", [Value("accuracy", 1.0, 512), Value("independent", 1.0, 512)])
    told = " ".join(get_suite("prefix-sums").findings([sound, record("prefix-sums", "deq", values)]))
    assert (
        "1 of 2 equilibrium nets" in told and "100 % have an equilibrium" in told and "75 % in the others" in told
    )
    small = record("mazes", "deq", [])
    small.config.update(design={"channels": 16}, task={"pixels": 1})
    assert "16 channels" in get_suite("mazes").findings([small])[-1]
    pairs = {"deq-128-relu": 1.0, "ffw-1-relu": 0.5, "ffw-1-xavier-relu": 2.0}
    told = " ".join(get_suite("noise-regression").findings(
        [record("noise-regression", model, [Value("test_mse", error, 0.0)]) for model, error in pairs.items()]
    ))  # fmt: skip
    bad = record("noise-regression", "deq-128-relu", [Value("test_mse", 0.5)])
    assert "1 of 1 DEQs did not learn" in get_suite("noise-regression").findings([bad])[-1]
    rested = [dataclasses.replace(record("noise-regression", model, [Value("steps", steps)]), scale="paper")
              for model, steps in (("deq-128-relu", 60), ("deq-128-relu-jacobian", 12))]  # fmt: skip
    at_rest = get_suite("noise-regression").findings(rested)[-1]
    assert "0 of 1 without the Jacobian penalty and 1 of 1 with" in at_rest
    assert "1 layer 1.000, 0.500 and 2.000" in told and "0 of 1" in told and "1 of 1" in told


def test_a_network_has_one_read_out() -> None:
    records = [record("noise-regression", model, [Value("test_mse", 0.5, 0.0)]) for model in ("ffw-1", "deq-128")]
    assert [one.value("last_mse", 0.0) for one in with_last_errors(records)] == [0.5, None]


def test_pictures_of_errors() -> None:
    pytest.importorskip("matplotlib")
    assert draw_errors([]) is None
    values = [
        Value("test_mse", 0.5, 0.0),
        Value("test_mse", 0.25, 20.0),
        Value("test_mse", 0.1),
        Value("steps", 9, 0.0),
    ]
    records = [record("noise-regression", model, values) for model in ("deq-223-relu", "ffw-3-relu")]
    assert errors_by_noise(records) == {0.0: 0.5, 20.0: 0.25}
    drawn = draw_errors(records)
    assert drawn is not None and drawn[:4] == b"\x89PNG"


def test_pictures_of_mazes() -> None:
    u, path = torch.zeros(3, 8, 8), torch.zeros(8, 8)
    u[1, 3:5, 1:3] = u[0, 3:5, 5:7] = 1.0
    u[:, 3:5, 3:5] = 1.0
    path[3:5, 1:7] = 1.0
    assert drawn_maze(u, path, path - 0.5, pixels=2) == ["000", "526", "000"]
    assert drawn_maze(u, path, -path, pixels=2) == ["000", "536", "000"]
    assert draw_answers([record("mazes", "deq", [])]) is None
    kept = {"mazes": {"9": ["000", "526", "000"]}}
    pytest.importorskip("matplotlib")
    drawn = draw_answers([record("mazes", "deq", [], kept)])
    assert drawn is not None and drawn[:4] == b"\x89PNG"


def test_the_carry_run_tells_every_bit_and_both_ends():
    (run,) = [one for one in get_suite("prefix-sums").plan("tiny") if one.labels[0] == "prefix-sums-carry"]
    (result,) = run.execute([run], Context())
    values = {(value.metric, value.at): value.value for value in result.values}
    bits = [values["bit_accuracy", float(bit)] for bit in range(1, 9)]
    assert values["early_accuracy", 10.0] == bits[0] and values["late_accuracy", 10.0] == bits[-1]
    assert {at for metric, at in values if metric == "early_accuracy"} == {None, 20.0, 10.0, 0.0}
