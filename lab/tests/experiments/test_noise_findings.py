"""What is made of records of models under noise: differences, sentences, pictures; and the data of noise-cifar."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from wellposed_lab.cache import CACHE
from wellposed_lab.engine.derived import with_derived
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.engine.thresholds import check
from wellposed_lab.experiments.noise.cifar import CifarNoiseRun, disturbed, photographs, prepare, shrunk
from wellposed_lab.experiments.noise.findings import (
    _bound,
    _ranks,
    crossover,
    draw_depths,
    draw_sensitivity,
    noise_findings,
)
from wellposed_lab.networks.twins import ConvNet
from wellposed_lab.report.figures import curves

from wellposed.data.images import Images
from wellposed.models import MultiscaleDEQ, Noise

SPRITES = Path(os.environ.get("WELLPOSED_DATA", "/nowhere")) / "cifar10"

THRESHOLDS = get_suite("noise-mnist").thresholds


def record(
    model: str, noisy: float, clean: float = 0.95, sensitivity: float | None = None, seed: int = 0
) -> Record:
    values = [Value("accuracy", clean), Value("accuracy", noisy, 0.0)]
    values += [] if sensitivity is None else [Value("sensitivity", sensitivity)]
    config = {"images": 12_000, "epochs": 5, "batch_size": 100}
    series = {"eigenvalues": [0.5, 0.3, 0.2]} if sensitivity is not None else {}
    return Record(f"{model}-{seed}", "noise-mnist", "default", "mnist", model, None, seed, "ours", "run", config,
                  tuple(values), series, {}, {}, "2026", 1.0)  # fmt: skip


def records() -> list[Record]:
    rows = [("deq-128", 0.80, 1.5), ("ffw-1", 0.93, 1.0), ("deq-467", 0.90, 0.5), ("ffw-13", 0.40, 1.0)]
    found = [record(model, noisy, 0.95, s, seed) for model, noisy, s in rows for seed in range(3)]
    return [
        *found,
        *(record("ffw-13-xavier", 0.65, seed=seed) for seed in range(3)),
        *(record("deq-128-noise-0db", 0.93, seed=seed) for seed in range(3)),
        record("deq-223", 0.7, clean=0.5),
    ]


def test_differences_pair_models_of_one_seed() -> None:
    found = {(r.model, r.seed): r for r in with_derived(records())}
    assert found["deq-128", 1].value("accuracy_gain", 0.0) == pytest.approx(-0.13)
    assert found["deq-467", 2].value("accuracy_gain", 0.0) == pytest.approx(0.5)
    assert found["deq-467", 2].value("xavier_gain", 0.0) == pytest.approx(0.25)
    assert found["deq-467", 0].value("sensitivity_ratio") == pytest.approx(0.5)
    assert found["deq-128-noise-0db", 0].value("training_gain", 0.0) == pytest.approx(0.13)
    assert found["ffw-1", 0].value("accuracy_gain", 0.0) is None
    assert found["deq-223", 0].value("accuracy_gain", 0.0) is None


def test_differences_beside_the_network_with_the_input_in_every_layer() -> None:
    ours, *_ = with_derived([record("deq-467", 0.9, 0.97, 0.5), record("ffw-13-inject", 0.8, 0.95, 2.0)])
    assert ours.value("inject_accuracy_gain", 0.0) == pytest.approx(0.1)
    assert ours.value("inject_sensitivity_ratio") == pytest.approx(0.25)
    assert ours.value("inject_twin_accuracy") == 0.95 and ours.value("accuracy_gain", 0.0) is None


def test_differences_pair_models_of_one_batch_size() -> None:
    published = [
        dataclasses.replace(one, config={**one.config, "batch_size": 16})
        for one in (record("deq-128", 0.9), record("ffw-1", 0.5))
    ]
    small, _, large, _ = with_derived([*published, record("deq-128", 0.8), record("ffw-1", 0.7)])
    assert small.value("accuracy_gain", 0.0) == pytest.approx(0.4)
    assert large.value("accuracy_gain", 0.0) == pytest.approx(0.1)


def test_thresholds_see_differences() -> None:
    checks = {one.threshold.measure: one.state for one in check(THRESHOLDS, with_derived(records()))}
    states = {(m.metric, m.model): state for m, state in checks.items()}
    assert states["accuracy_gain", "deq-128"] == "met" and states["xavier_gain", "deq-467"] == "met"
    assert states["sensitivity_ratio", "deq-467"] == "met"
    assert states["accuracy_gain", "deq-288"] == "not run"
    worse = [record("deq-467", 0.7), record("ffw-13-xavier", 0.65)]
    judged = {one.threshold.measure.metric: one.state for one in check(THRESHOLDS, with_derived(worse))}
    assert judged["xavier_gain"] == "not met"


def test_sentences_name_the_crossover_and_the_untrained() -> None:
    text = " ".join(noise_findings(records()))
    assert "1 -13.0, 13 +50.0; the lead changes hands between 1 and 13 layers" in text
    assert "deq-223 50.0 %" in text and "12000 images 5 times in batches of 100" in text
    assert "1 1.50, 13 0.50" in text
    assert crossover({1: -1.0, 3: -2.0}) == "the FFW leads at every depth"


def test_sentences_and_figures_keep_to_the_batch_size_of_most_models() -> None:
    long = [
        dataclasses.replace(one, id=f"{one.id}-long", started="2027", config=one.config | {"batch_size": 16})
        for one in (record("ffw-1", 0.5, seed=seed) for seed in range(3))
    ]
    assert noise_findings([*records(), *long]) == noise_findings(records())
    figure = get_suite("noise-mnist").figures[0]
    assert curves(figure, [*records(), *long]) == curves(figure, records())


def test_penalised_models_are_compared_with_networks_as_they_are() -> None:
    assert "Jacobian penalty" not in " ".join(noise_findings(records()))
    penalised = [record("deq-128-jacobian", 0.90), record("deq-467-jacobian", 0.92)]
    text = " ".join(noise_findings([*records(), *penalised]))
    assert "1 -3.0, 13 +52.0; the lead changes hands between 1 and 13 layers" in text


def test_readouts_at_means_are_compared() -> None:
    mean = Value("averaged_accuracy", 0.97, 0.0)
    wide = dataclasses.replace(record("deq-467", 0.9), values=(Value("accuracy", 0.9, 0.0), mean))
    text = " ".join(noise_findings([wide, record("ffw-13", 0.4)]))
    assert "mean of its last ten iterates, the lead of the DEQ at 0 dB in points, by layers: 13 +57.0" in text


def test_pictures_are_drawn_where_there_is_something_to_draw() -> None:
    pytest.importorskip("matplotlib")
    for draw in (draw_depths, draw_sensitivity):
        assert draw([]) is None
        picture = draw(records())
        assert picture is not None and picture.startswith(b"\x89PNG")


def test_noise_is_in_the_cells_alone() -> None:
    torch.manual_seed(0)
    u = torch.randn(3, 1, 8, 8)
    networks = [ConvNet(1, 4, channels=8, cells=2, final_channels=16).eval()]
    multiscale = MultiscaleDEQ(1, 4, channels=(8, 8), head_channels=(8, 8), final_channels=16, groups=2)
    multiscale.deq.on_failure = "ignore"
    for model in (*networks, multiscale.eval()):
        with torch.no_grad():
            quiet, noisy = (disturbed(model, u, Noise(signal=at)) for at in (None, 0.0))
            torch.testing.assert_close(quiet, model(u))
            assert not torch.allclose(quiet, noisy, atol=1e-3)
    seen: list[torch.Tensor] = []
    networks[0].readout[1].register_forward_pre_hook(lambda _, u: seen.append(u[0]))
    networks[0].projection[1].register_forward_pre_hook(lambda _, u: seen.append(u[0]))
    with torch.no_grad():
        for layer in networks[0].layers:  # without cells all noise must be gone
            layer.forward = lambda z, x: z
        disturbed(networks[0], u, Noise(signal=0.0))
        disturbed(networks[0], u, Noise(signal=0.0))
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def test_pretraining_takes_few_steps() -> None:
    run = CifarNoiseRun(suite="noise-cifar", seed=0, scale="tiny", data="digits", model="mdeq", depth=2, narrow=8)
    model = run.build(Images(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([0]), ("a", "b"), "mine"))
    assert isinstance(model, MultiscaleDEQ)
    counts = []
    for shallow in (True, False):
        prepare(model, shallow)
        counts.append(int(model.equilibrium(torch.randn(2, 1, 8, 8)).steps.max()))
    assert counts[0] == 6 and counts[1] > 6


def test_sentences_say_how_many_images_were_seen() -> None:
    config = {"side": 32, "epochs": 12, "batch_size": 256}
    facts = {"images": 9_000, "tested": 1_000}
    known = Record("a", "noise-cifar", "paper", "cifar10", "mdeq-4", None, 0, "ours", "run", config,
                   (Value("accuracy", 0.7), Value("accuracy", 0.6, 10.0)), {}, facts, {}, "2026", 1.0)  # fmt: skip
    text = " ".join(get_suite("noise-cifar").findings([known]))
    assert "9000 images of 32 x 32 pixels, 12 epochs in batches of 256, and tested on 1000 images held out" in text
    assert "held out, one seed;" in text and "mdeq-4: without noise 70.0 %, at 10 dB 60.0 %" in text
    both = get_suite("noise-cifar").findings([known, dataclasses.replace(known, scale="default", id="b")])
    assert len(both) == 4 and both[:2] == both[2:]
    rival = dataclasses.replace(known, model="ffw-conv-4", id="c", values=(Value("accuracy", 0.5, 10.0),))
    pairs = [dataclasses.replace(r, scale=scale) for r in (known, rival) for scale in ("default", "paper")]
    last = get_suite("noise-cifar").findings(pairs)[-1]
    assert "+10.0 at scale default and +10.0 at scale paper" in last


def test_images_are_averaged() -> None:
    pixels = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4)
    images = Images(pixels, torch.tensor([0]), ("a",), "mine")
    assert shrunk(images, 2).pixels[0, 0].tolist() == [[2, 4], [10, 12]]  # halves to even
    assert shrunk(images, 4) is images


@pytest.mark.skipif(not (SPRITES / "train_03.webp").exists(), reason="needs CIFAR-10 as sprites")
def test_some_sprites_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "cifar10").mkdir()
    for name in ("labels.npz", "train_01.webp", "train_03.webp", "train_42.webp"):
        (tmp_path / "cifar10" / name).symlink_to(SPRITES / name)
    CACHE.clear()
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path))
    part, held = photographs("fit"), photographs("holdout")
    CACHE.clear()
    labels = torch.from_numpy(np.load(SPRITES / "labels.npz")["train"]).long()
    assert torch.equal(part.labels, torch.cat([labels[1000:2000], labels[3000:4000]]))
    assert torch.equal(held.labels, labels[42_000:43_000]) and held.pixels.shape == (1000, 3, 32, 32)
    assert part.source == "cifar10 fit: 2 of 40 sprites"


def test_radii_order_the_models_that_learnt():
    def record(model, seed, radius, noisy, clean=0.97):
        values = {"jacobian_radius": radius, "weight_radius": -radius, "sensitivity": 1.0}
        known = [Value(name, value) for name, value in values.items()]
        return Record(
            id=f"{model}-{seed}",
            suite="noise-mnist",
            scale="paper",
            task="mnist",
            model=model,
            size=None,
            seed=seed,
            role="ours",
            kind="run",
            config={},
            series={},
            facts={},
            environment={},
            started="",
            seconds=1.0,
            values=(*known, Value("accuracy", clean), Value("accuracy", noisy, 0.0)),
        )

    learnt = [record("deq-128", seed, float(seed), seed / 10) for seed in range(7)]
    (sentence,) = _ranks([*learnt, record("deq-128", 9, 99.0, 0.0, clean=0.2)])
    assert "Over the 7 recorded DEQs" in sentence
    assert "+1.00 with the jacobian radius, -1.00 with the weight radius" in sentence
    (bound,) = _bound([record("deq-128", seed, 0.4 - seed, 0.9) for seed in range(3)])
    assert "-0.4 to 1.6 in 3 DEQs: at the solution it is finite in 2 of them" in bound and "3 of 3" in bound
