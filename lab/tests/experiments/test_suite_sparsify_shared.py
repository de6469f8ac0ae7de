"""The suites of shared rows at tiny scale, the network that they fit, and what they say of missing data."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store
from wellposed_lab.experiments.sparsify.measures import frontier
from wellposed_lab.experiments.sparsify.rows import own_units, prune_shared
from wellposed_lab.experiments.sparsify.texts import Newsgroups, topic_texts
from wellposed_lab.networks.batch_norm import fold_batch_norm, inner, layer_names, layer_units, raw_sizes
from wellposed_lab.networks.resnet import Normalised, ResNet
from wellposed_lab.networks.trained import FoldedResNet

from wellposed.convert import to_implicit
from wellposed.convex import shared_layers
from wellposed.convex.shared import row_weights
from wellposed.data import MissingDataError
from wellposed.errors import InputError, UnknownNameError

QUICK = Newsgroups("topics", words=200, length=24, width=16, depth=1, epochs=30)


def lively(network):
    """Gives batch normalisation statistics and slopes that are not those of the start."""
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            for values in (part.weight, part.bias, part.running_mean, part.running_var):
                values.data.add_(torch.rand_like(values))
    return network.eval()


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_folded_network_equals_the_residual_one(shortcut):
    torch.manual_seed(0)
    network = lively(ResNet(8, shortcut=shortcut)).double()
    u, kept = torch.rand(3, 3, 8, 8, dtype=torch.float64), copy.deepcopy(network.state_dict())
    outer = nn.Sequential(nn.Identity(), nn.Sequential(network))
    with torch.no_grad():
        assert torch.allclose(fold_batch_norm(network)(u), network(u), rtol=1e-9)
        assert torch.allclose(fold_batch_norm(outer)(u), network(u), rtol=1e-9)
    assert all(torch.equal(kept[name], value) for name, value in network.state_dict().items())
    assert layer_names(fold_batch_norm(outer))[0] == "1.0.layers.0"
    with pytest.raises(InputError, match="holds no ResNet"):
        fold_batch_norm(nn.Linear(1, 1))
    with pytest.raises(InputError, match="fold_batch_norm"):
        inner(network)


def test_units_make_the_unrolled_matrix_contract():
    torch.manual_seed(0)
    network = fold_batch_norm(lively(ResNet(8)))
    part, kappa = inner(network)[1], 0.9
    units = layer_units(network, kappa)
    assert len(units) == 7 and units["layers.0"].states == (False,) and len(units["layers.2"].shifts) == 2
    form = to_implicit(network, (3, 4, 4))
    assert form.A.shape[0] == 3 * 16 * 16 + 2 * 4 * 32 + 2 * 64
    factors = torch.cat(
        [torch.full((size,), 2.0**e) for size, e in zip(form.partition[::-1], part.exponents(kappa), strict=True)]
    )
    A = form.A.to_dense().double() * factors.flip(0)[:, None] / factors.flip(0)
    assert float(A.abs().sum(1).max()) < kappa


def test_magnitude_pruning_counts_what_is_not_zero():
    torch.manual_seed(0)
    network = fold_batch_norm(ResNet(8))
    names = layer_names(network)
    own = sum(int((row_weights(layer) != 0).sum()) for layer in shared_layers(network).values()) - 640
    for layerwise in (False, True):
        pruned, sparsity = prune_shared(network, names, 0.75, layerwise=layerwise)
        known = shared_layers(pruned)
        left = sum(int((row_weights(known[name]) != 0).sum()) for name in names)
        assert sparsity == pytest.approx(1 - left / own) == pytest.approx(0.75, abs=1e-3)
    smallest = min(float(w[w != 0].abs().min()) for w in (row_weights(known[name]) for name in names))
    assert smallest > 0


def test_magnitude_pruning_compares_the_weights_that_were_trained():
    """Pruning the residual network itself and folding it then gives the same."""
    torch.manual_seed(0)
    network = lively(ResNet(8))
    names, sizes = layer_names(fold_batch_norm(network)), raw_sizes(network)
    pruned, _ = prune_shared(fold_batch_norm(network), names, 0.5, sizes=sizes)
    filters = [part.weight for part in network.modules() if isinstance(part, nn.Conv2d)]
    shortcuts = 16 + 16 + 32
    count = round(0.5 * (sum(weight.numel() for weight in filters) + shortcuts)) - shortcuts
    level = torch.cat([weight.abs().flatten() for weight in filters]).topk(count).values[-1]
    with torch.no_grad():
        for weight in filters:
            weight.mul_(weight.abs() >= level)
        u = torch.rand(2, 3, 8, 8)
        assert torch.allclose(pruned(u), network(u), atol=1e-4)


def test_units_of_own_rows_just_fit():
    network = QUICK.trained(0)
    units = own_units(network, QUICK.layers(network), 0.99)
    known = shared_layers(network)
    norms = [float(row_weights(known[name]).abs().sum(1).max()) * 2.0 ** u.shifts[0] for name, u in units.items()]
    assert all(0.99 / 2 < norm < 0.99 for norm in norms)


@pytest.mark.parametrize("model", ["state-driven-tuned", "magnitude-tuned"])
def test_training_afterwards_keeps_the_zeros(model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Newsgroups, "scores", lambda self, network, seed: seen.append(network) or {"accuracy": 0.5}
    )
    result = frontier(QUICK, 0, model, (0.8,), 64, 5, (0.8,))
    reached = next(value.value for value in result.values if value.metric == "sparsity")
    network = seen[0] if seen[0] is not QUICK.trained(0) else seen[-1]
    known, own = shared_layers(network), shared_layers(QUICK.trained(0))
    names = QUICK.layers(network)
    left = sum(int((row_weights(known[name]) != 0).sum()) for name in names)
    total = sum(row_weights(own[name]).numel() for name in names)
    assert 1 - left / total == pytest.approx(reached) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("name", "task"), [("sparsify-cifar", "digits"), ("sparsify-newsgroups", "topics")])
def test_suite_runs_at_tiny_scale(name, task, tmp_path):
    progress = run_suite(get_suite(name), Order(name, "tiny"), tmp_path)
    assert progress.failed == 0 and progress.finished == progress.planned > 6
    records = list(Store(tmp_path).records())
    assert all(record.task.startswith(task) for record in records)
    values = [value for record in records for value in record.values]
    assert all(0 <= value.value <= 1 for value in values if value.metric in ("accuracy", "sparsity"))
    fitted = next(r for r in records if r.model == "state-driven" and r.task.endswith("-sparsity"))
    assert fitted.value("largest_gap", 0.9) < 1e-9
    if name == "sparsify-cifar":
        assert fitted.facts["fits"]["0.9"]["certified"] and fitted.value("largest_norm", 0.9) <= 0.99
        assert fitted.value("form_difference", 0.9) < 1e-4


@pytest.mark.parametrize("name", ["sparsify-cifar", "sparsify-newsgroups"])
def test_every_claim_and_threshold_can_be_judged(name):
    """Each number that a claim asks for is measured by one of the runs, on CIFAR-100 at scale paper."""
    suite = get_suite(name)
    later = [run for run in suite.plan("paper") if run.labels[0].startswith("cifar100")]
    points = {run.labels[:2]: {*run.points, None} for run in (*suite.plan("default"), *later)}
    claims = [measure for claim in load_claims() if claim.suite == name for measure in claim.rule.measures]
    asked = [measure for threshold in suite.thresholds for measure in threshold.measures]
    assert len(claims) >= 6 and len(asked) >= 3
    for measure in [*claims, *asked]:
        key = (measure.task, measure.model)
        assert key in points or measure.model == "data", measure
        assert measure.at in points[key], measure


def test_missing_weights_are_said_so(tmp_path, monkeypatch):
    subject = replace(QUICK, network="distilbert")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"lacks model.safetensors and vocab.txt; train"):
        subject.trained(0)
    monkeypatch.delenv("WELLPOSED_DATA")
    with pytest.raises(MissingDataError, match="WELLPOSED_DATA"):
        subject.training()
    assert any(run.network.network == "distilbert" for run in get_suite("sparsify-newsgroups").plan("paper"))


def test_missing_images_are_said_so(monkeypatch):
    def missing(name, split):
        raise MissingDataError(f"{name} is not here")

    monkeypatch.setattr("wellposed_lab.networks.trained.load_images", missing)
    with pytest.raises(MissingDataError, match="cifar10 is not here"):
        FoldedResNet("cifar10", held_out=7).tests()


def test_what_is_printed_of_cifar_100_can_be_run(monkeypatch, tmp_path):
    """The plan has every run that the claims ask for, and a run says that the data are missing."""
    labels = {run.labels[:2] for run in get_suite("sparsify-cifar").plan("paper")}
    claims = [claim for claim in load_claims() if claim.suite == "sparsify-cifar" and "CIFAR-100" in claim.says]
    asked = {(measure.task, measure.model) for claim in claims for measure in claim.rule.measures}
    assert len(asked) == 7 and asked <= labels
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path))
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("WELLPOSED_OFFLINE", "1")
    with pytest.raises(MissingDataError, match="cifar100"):
        FoldedResNet("cifar100").make(0)
    monkeypatch.setattr("wellposed_lab.networks.trained.load_images", lambda name, split: None)
    trained = Normalised(ResNet(20, classes=100))
    monkeypatch.setattr("wellposed_lab.networks.trained.train_resnet", lambda *_, **__: trained)
    network = FoldedResNet("cifar100").make(0)
    u = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(network(u), trained.eval()(u), rtol=1e-4, atol=1e-4)
    assert len(list(tmp_path.rglob("cifar100-*.safetensors"))) == 1


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="cifar10"):
        FoldedResNet("cifar")
    with pytest.raises(UnknownNameError, match="topics"):
        Newsgroups("reuters")
    with pytest.raises(UnknownNameError, match="magnitude"):
        frontier(QUICK, 0, "random", (0.5,), 10, 0, (0.5,))


def test_generated_texts_are_the_same_every_time():
    one, other = topic_texts("train"), topic_texts("train")
    assert one.texts == other.texts and torch.equal(one.labels, other.labels)
    assert not {*one.texts} & {*topic_texts("test").texts}


def _record(task, model, metric="accuracy", **values):
    entries = tuple({"metric": metric, "value": value, "at": float(at[1:]) / 100} for at, value in values.items())
    return Record.from_json(
        {
            "id": f"{task}{model}{metric}", "suite": "sparsify-cifar", "scale": "default", "task": task,
            "model": model, "size": None, "seed": 0, "role": "ours", "kind": "run", "config": {"samples": 256},
            "values": entries, "series": {}, "facts": {}, "environment": {}, "started": "", "seconds": 1.0,
        }
    )  # fmt: skip


def test_controls_say_what_is_lost_and_who_leads():
    records = [
        _record("cifar10-sparsity", "state-driven", a50=0.9, a80=0.85),
        _record("cifar10-sparsity", "magnitude", a50=0.91, a80=0.35),
        _record("cifar10", "state-driven-row", a99=0.8),
    ]
    text = " ".join(get_suite("sparsify-cifar").findings(records))
    assert "-1.0 points at 50 %, +50.0 points at 80 %" in text and "patches of 256 images" in text
    assert "69 %" in text and "CIFAR-100" in text


def test_training_afterwards_has_a_control():
    """The network itself, with all its weights, is trained by as many steps."""
    result = frontier(QUICK, 0, "dense-tuned", (0.9,), 10, 3, (0.9,))
    found = {value.metric: value.value for value in result.values}
    assert found["sparsity"] == 0.0 and found["accuracy"] > 0.5
    records = [
        _record("newsgroups-sparsity", "dense", a90=0.68),
        _record("newsgroups-sparsity", "dense-tuned", a90=0.7),
    ]
    text = " ".join(get_suite("sparsify-newsgroups").findings(records))
    assert "goes from 68.0 % to 70.0 %" in text
