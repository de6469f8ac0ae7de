"""The suites of robustness at tiny scale: all runs finish, names fit the claims, bounds and attacks agree."""

import base64
import dataclasses
from io import BytesIO

import pytest
import torch
from PIL import Image
from wellposed_lab.cache import CACHE
from wellposed_lab.config import Schedule
from wellposed_lab.engine.claims import NotATarget, load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Store, Value
from wellposed_lab.experiments.attack.plan import PRINTED
from wellposed_lab.experiments.attack.run import AttackRun, surrogate, white_attack
from wellposed_lab.experiments.robust.bounds import random_loops, reached
from wellposed_lab.experiments.robust.certified_loops import LoopTrainer, Recipe
from wellposed_lab.experiments.robust.certified_training import CertifiedRun
from wellposed_lab.experiments.robust.mondeq import STEPWISE, Loops
from wellposed_lab.networks.trained import Dense, ImageNetwork, ResidualNetwork
from wellposed_lab.report import write_report

from wellposed.data import MissingDataError, load_images
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, certified, lipschitz
from wellposed.robust.attacks import fgsm
from wellposed.training import Checkpoint


def carried_out(name, folder):
    state = run_suite(get_suite(name), Order(name, "tiny"), folder)
    assert state.failed == 0 and state.finished == state.planned > 10
    return {(record.task, record.model): record for record in Store(folder).records()}


@pytest.fixture(scope="module")
def bounds(tmp_path_factory):
    return carried_out("bounds", tmp_path_factory.mktemp("bounds"))


def test_bounds_hold_what_was_reached_and_keep_their_order(bounds):
    for task in ("state-bounds", "loop-bounds", "trained-loop-bounds"):
        found = {
            metric: {
                model: record.value(metric, 0.01) for (place, model), record in bounds.items() if place == task
            }
            for metric in ("width", "output_width")
        }
        for widths in found.values():
            inner = widths.pop("reached")
            assert all(width is None or width >= inner > 0 for width in widths.values())
            assert widths["triangle"] <= widths["crown"] * (1 + 1e-9) <= widths["crown-one-pass"] * (1 + 1e-9)
            assert widths["lp"] <= widths["box"] * (1 + 1e-9)
        assert found["width"]["interval"] <= found["width"]["box"] * (1 + 1e-9)
    assert "|A|_inf < 1" in bounds["state-bounds", "norm"].facts["not applicable"]
    assert bounds["loop-bounds", "norm"].value("width") > 0
    record = bounds["state-bounds", "box"]
    assert record.value("width") == record.value("width", 0.01)


def test_what_is_reached_on_a_linear_model_is_exact():
    C = torch.tensor([[1.0, -2.0], [0.5, 0.25]], dtype=torch.float64)
    form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), C.float()).to(torch.float64)
    box = Box(torch.full((3, 2), 0.2, dtype=torch.float64), torch.full((3, 2), 0.5, dtype=torch.float64))
    found = reached(form, box, 0)
    assert torch.allclose(found["output_width"], (0.3 * C.abs().sum(1)).expand(3, -1))
    assert torch.allclose(found["width"], torch.full((3, 2), 0.3, dtype=torch.float64))


def test_random_loops_have_the_norm_that_was_asked_for():
    form = random_loops(9, 4, 0.7, 3)
    assert torch.allclose(form.A.to_dense().abs().sum(1), torch.full((9,), 0.7, dtype=torch.float64))


def test_certified_training_at_tiny_scale(tmp_path):
    records = carried_out("certified-training", tmp_path)
    assert {model for task, model in records if task == "digits-loops"} == {
        "plain", "norm-penalty", "sensitivity-penalty", "certified-interval", "certified-crown", "adversarial",
    }  # fmt: skip
    assert ("digits-layers", "norm-penalty") not in records
    for record in records.values():
        proven, left = (record.value(f"{kind}_accuracy", 0.05) for kind in ("certified", "attacked"))
        assert 0 <= proven <= left <= record.value("accuracy") <= 1 and record.value("certified_excess", 0.05) == 0
    told = " ".join(get_suite("certified-training").findings(list(records.values())))
    assert "certified-crown" in told and "% clean" in told


def certified_run(recipe, **options):
    return CertifiedRun(suite="certified-training", seed=0, scale="tiny", loops=False, recipe=recipe, hidden=(16,),
                        epochs=6, points=(0.1,), samples=60, **options)  # fmt: skip


def test_recipes_do_what_they_say():
    plain = certified_run("plain").trained()
    penalised = certified_run("sensitivity-penalty", penalty=0.05).trained()
    assert lipschitz(penalised, "inf", (64,)) < 0.7 * lipschitz(plain, "inf", (64,))
    values = {recipe: certified_run(recipe)._alone().values for recipe in ("plain", "certified-interval")}
    proven = {recipe: _of(found, "certified_accuracy") for recipe, found in values.items()}
    assert proven["certified-interval"] > proven["plain"]
    loops = dataclasses.replace(certified_run("plain"), loops=True, states=8, epochs=1)
    assert isinstance(loops.trained(), ImplicitModel) and loops.labels[0] == "digits-loops"


def test_the_linear_program_joins_the_attack():
    run = certified_run("plain", programs=5)
    model = run.trained()
    u, target = (part[:8] for part in Dense("digits").pair("test"))
    alone = dataclasses.replace(run, programs=0)._attacked(model, u, target, 0.1)
    joined = run._attacked(model, u, target, 0.1)
    assert bool((joined.success | ~alone.success).all()) and "triangle" in joined.name


def test_proofs_for_loops_at_tiny_scale(tmp_path):
    for name, planned in (("mondeq", 4), ("certified-loops", 4)):
        folder = tmp_path / name
        state = run_suite(get_suite(name), Order(name, "tiny"), folder)
        assert state.failed == 0 and state.finished == state.planned == planned
        records = list(Store(folder).records())
        for record in records:
            (at,) = {value.at for value in record.values if value.at is not None}
            proven, left = record.value("certified_continuation", at), record.value("attacked_accuracy", at)
            assert 0 <= record.value("certified_norms", at) <= proven <= left <= record.value("accuracy") <= 1
            assert record.value("certified_excess", at) == 0
            steps = [record.value(f"certified_{method}", at) for method in STEPWISE]
            known = [share for share in steps if share is not None]
            assert known == sorted(known)
        told = " ".join(get_suite(name).findings(records))
        assert "% clean" in told


PAIR = Recipe(0.05), Recipe(0.05, lines=1.0)  # by intervals and by lines


def loop_trainer(kind="monotone", recipes=PAIR, sweeps=60):
    model = Loops(kind, 12).build((1, 8, 8), 0)
    with torch.no_grad():
        model.bias.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1))
    return LoopTrainer(model, recipes, sweeps)


@torch.no_grad()
def test_what_training_bounds_holds_what_is_reached():
    trainer, generator = loop_trainer(), torch.Generator().manual_seed(0)
    u, target = torch.rand(5, 64, generator=generator), torch.tensor([0, 1, 2, 3, 4])
    lower, upper = (u - 0.05).clamp(min=0).expand(2, 5, 64), (u + 0.05).clamp(max=1).expand(2, 5, 64)
    clean, (intervals, lines) = trainer.margins(u, lower, upper, target, torch.tensor([0.0, 1.0]), 60)
    y = trainer.outputs(u.expand(2, 5, 64))
    torch.testing.assert_close(clean, y - y.gather(2, target.expand(2, 5)[..., None]))
    corners = torch.rand(400, 64, generator=generator).round()
    reached = [trainer.outputs(lower + corner * (upper - lower))[0] for corner in corners]
    most = torch.stack([y - y.gather(1, target[:, None]) for y in reached]).amax(0)
    assert bool((most <= lines + 1e-5).all()) and bool((most <= intervals + 1e-5).all())
    assert float((lines - most).mean()) < 0.5 * float((intervals - most).mean())


def test_training_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    given, schedule = load_images("digits", "fit"), Schedule(0, 4, 64, 1e-2)
    u, target = given.flat()[:256], given.labels[:256]
    whole, stopped, resumed = (loop_trainer(sweeps=2) for _ in range(3))
    whole.train(u, target, schedule)
    monkeypatch.setattr("wellposed_lab.experiments.robust.certified_loops.SAVE", 0.0)
    saves, save = [], Checkpoint.save

    def interrupted(file, state):
        save(file, state)
        saves.append(state["epoch"])
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.train(u, target, schedule, Checkpoint(tmp_path / "run"))
    resumed.train(u, target, schedule, Checkpoint(tmp_path / "run"))
    assert saves == [1, 2, 3, 4]
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(whole.weights[1], stopped.weights[1])


@pytest.mark.parametrize("kind", ["inf", "monotone"])
def test_bounds_train_loops_under_their_own_condition(kind):
    recipes = Recipe(0.05, share=0.0), Recipe(0.05, lines=1.0), Recipe(0.05, lines=1.0, shrink=0.5)
    trainer = loop_trainer(kind, recipes, sweeps=6)
    seen, held = load_images("digits", "fit"), load_images("digits", "holdout")
    trainer.train(seen.flat(), seen.labels, Schedule(0, 8, 128, 2e-2))
    clean, certified_share = trainer.judged(held.flat(), held.labels, 0.05)
    assert float(clean.min()) > 0.85 and bool((certified_share[1:] > certified_share[0] + 0.1).all())
    trainer.member(1)
    model = trainer.model.double()
    assert str(model.form(detach=True).certificate()).count("holds") == 1
    proven = certified(model.form(detach=True), Box.around(held.flat().double(), 0.05), held.labels, Crown())
    assert float(proven.double().mean()) >= float(certified_share[1]) - 0.01


@pytest.mark.parametrize("network", [Loops("mondeq", 5), Loops("mondeq", channels=2)])
def test_monotone_networks_are_solved_and_differentiated(network):
    model = network.build((1, 8, 8), 0).double()
    u = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(u), model.form()(u.flatten(1)), rtol=1e-6, atol=1e-7)
    assert model.form().certificate().holds
    model(u).square().sum().backward()
    entry = (0, 1) if network.states else (0, 1, 2, 0)
    with torch.no_grad():
        sums = []
        for move in (1e-6, -2e-6, 1e-6):
            model.S[entry] += move
            sums.append(model(u).square().sum())
    assert float(model.S.grad[entry]) == pytest.approx(float(sums[0] - sums[1]) / 2e-6, rel=1e-3)


def _of(values, metric):
    return next(value.value for value in values if value.metric == metric)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    return carried_out("attack-mnist", tmp_path_factory.mktemp("attacks"))


def test_attacks_at_tiny_scale(attacked):
    clean = attacked["digits", "dense"]
    assert clean.value("row_correlation") > 0.7 and clean.value("accuracy") > 0.7
    sums = [clean.value("class_sensitivity", str(digit)) for digit in range(10)]
    assert clean.value("class_spread") == pytest.approx(max(sums) / min(sums))
    assert all(-1 <= clean.value(f"class_{kind}_correlation") <= 1 for kind in ("noise", "error"))
    assert (clean.value("sensitivity_outputs"), clean.value("sensitivity_inputs")) == (10, 64)
    for (task, model), record in attacked.items():
        check_attack(task, model, record)
    assert attacked["digits-radius", "pgd"].value("success_rate", 0.3) > 0.5
    told = " ".join(get_suite("attack-mnist").findings(list(attacked.values())))
    assert "not said" in told


def check_attack(task, model, record):
    if model == "dense":
        return
    (at,) = {value.at for value in record.values}
    assert 0 <= record.value("lost_accuracy", at) <= record.value("success_rate", at) <= 1
    free = task.endswith(("radius", "speckle")) or model == "salt-and-pepper"
    assert 0 < record.value("changed_pixels", at) <= (64 if free else round(64 * at))


@pytest.fixture(scope="module")
def convolved(tmp_path_factory):
    return carried_out("attack-cifar", tmp_path_factory.mktemp("convolved"))


def test_attacks_on_a_residual_network_at_tiny_scale(convolved):
    for task in ("digits", "digits-holdout"):
        clean = convolved[task, "dense"]
        assert clean.value("accuracy") > 0.7 and clean.value("sensitivity_inputs") == 64
        assert (task, "gradient-attack") in convolved and (f"{task}-radius", "pgd") in convolved
    for (task, model), record in convolved.items():
        check_attack(task, model, record)
    auto, pgd = (convolved["digits-radius", name].value("success_rate", 0.3) for name in ("autoattack", "pgd"))
    assert auto >= pgd - 1 / 8 and auto > 0.5
    told = " ".join(get_suite("attack-cifar").findings(list(convolved.values())))
    assert "out of reach" in told and "190 thousand states" in told


def test_records_carry_pictures_of_attacked_images(convolved, tmp_path):
    kept = convolved["digits-radius", "pgd"].facts["gallery"]
    assert kept["at"] == 0.3 and 0.29 < kept["scale"] <= 0.3 + 1e-6 and 1 <= len(kept["samples"]) <= 8
    first = kept["samples"][0]
    assert first["before"] == first["target"] != first["after"]
    with Image.open(BytesIO(base64.b64decode(first["clean"]))) as picture:
        assert picture.size == (8, 8) and picture.mode == "L"
    page = write_report(convolved.values(), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "All pixels, by projected gradients" in page and f"base64,{first['attacked']}" in page
    assert page.count("<img") == 3 * sum(len(r.facts["gallery"]["samples"]) for r in shown(convolved))


def shown(records):
    suite = get_suite("attack-cifar")
    places = [(task, gallery.model) for gallery in suite.galleries for task in gallery.tasks]
    return [records[place] for place in places if place in records and "gallery" in records[place].facts]


def test_one_network_serves_all_seeds_and_images_are_drawn():
    victim = ResidualNetwork()
    assert victim.own(5) == 0 and ResidualNetwork("digits", 8, 1).own(5) == 5
    digits = ResidualNetwork("digits", depth=8, epochs=1)
    u, target = digits.sample("test", 10, seed=3)
    again, other = digits.sample("test", 10, seed=3)[0], digits.sample("test", 10, seed=4)[0]
    assert u.shape == (10, 1, 8, 8) and torch.equal(u, again) and not torch.equal(u, other)
    assert len(digits.sample("test", 10_000, 0)[1]) == 355 and target.dtype == torch.int64


def test_a_surrogate_learns_answers_on_the_other_split(monkeypatch):
    victim = ResidualNetwork("digits", depth=8, epochs=6)
    asked = []
    own = ImageNetwork.images
    monkeypatch.setattr(ImageNetwork, "images", lambda self, split: asked.append(split) or own(self, split))
    copy = surrogate(victim, 0, "test", 150, 30)
    assert "holdout" in asked
    u, _ = victim.sample("test", 200, 0)
    with torch.no_grad():
        agree = (copy(u).argmax(1) == victim.trained(0)(u).argmax(1)).double().mean()
    assert float(agree) > 0.6


def test_white_pixels_are_the_highest_ranking():
    dense = Dense("digits", hidden=(16,), epochs=15)
    network, (u, target) = dense.trained(0), (part[:30] for part in dense.pair("test"))
    S = torch.rand(10, 64, generator=torch.Generator().manual_seed(2))
    moving = u.clone().requires_grad_()
    outputs = network(moving)
    others = outputs.masked_fill(torch.nn.functional.one_hot(target, 10).bool(), -torch.inf).amax(1)
    (slope,) = torch.autograd.grad((others - outputs[torch.arange(30), target]).sum(), moving)
    for ranking, scores in (("sensitivity", S[target]), ("gradient", slope.abs())):
        found, wanted = white_attack(network, u, target, 6, ranking, S, 0), u.clone()
        wanted.scatter_(1, scores.topk(6).indices, 1.0)
        moved = (found.inputs != u).any(1)
        assert torch.equal(found.inputs[moved], wanted[moved]) and int(moved.sum()) > 10
    chance = white_attack(network, u, target, 6, "random", S, 0)
    assert int((chance.inputs != u).sum(1).max()) <= 6


def test_controls_say_which_values_are_nearest_to_the_table(attacked):
    model = attacked["digits", "pgd"]
    printed = {at / 100: (share / 100, slope / 100) for at, share, _, slope, _ in PRINTED}
    records = []
    for kind, off in (("attack", 0.2), ("signed", 0.1), ("white", 0.01)):
        for column, name in ((0, "sensitivity"), (1, "gradient"), (0, "random")):
            values = tuple(Value("success_rate", line[column] + off, at) for at, line in printed.items())
            records.append(dataclasses.replace(model, task="mnist", model=f"{name}-{kind}", values=values))
    told = " ".join(get_suite("attack-mnist").findings(records))
    assert "random values 20, values along the gradient's sign 10, white pixels 1." in told
    assert "With white pixels, the nearest" in told and "72 % at 10 % and 91 % at 30 % of the pixels" in told
    assert "the nearest" not in " ".join(get_suite("attack-mnist").findings(records[:5]))


def test_success_counts_images_that_were_right():
    dense = Dense("digits", hidden=(16,), epochs=15)
    run = AttackRun(suite="attack-mnist", seed=0, scale="tiny", victim=dense, axis="radius", attack="fgsm",
                    points=(0.1,), samples=150)  # fmt: skip
    network, (u, target) = dense.trained(0), dense.sample("test", 150, 0)
    right = network(u).argmax(1) == target
    found = fgsm(network, u, target, 0.1)
    rate = float((found.success & right).sum() / right.sum())
    assert _of(run.measured().values, "success_rate") == pytest.approx(rate) and not bool(right.all())


@pytest.mark.parametrize("name", ["bounds", "attack-mnist", "attack-cifar"])
def test_every_claim_can_be_judged(name):
    """Each number that a claim of the suite asks for is measured by one of its runs at default scale."""
    points = {}
    for run in get_suite(name).plan("default"):
        points.setdefault(run.labels[:2], set()).update({*run.points, None})
    claims = [one for one in load_claims() if one.suite == name and not isinstance(one.rule, NotATarget)]
    assert len(claims) >= 2
    for measure in (measure for claim in claims for measure in claim.rule.measures):
        assert measure.at in points[measure.task, measure.model], measure


@pytest.mark.parametrize("name", ["bounds", "attack-mnist", "attack-cifar", "certified-training"])
def test_every_threshold_is_measured(name):
    suite = get_suite(name)
    labels = {run.labels[:2] for run in suite.plan("default")}
    assert suite.thresholds
    for threshold in suite.thresholds:
        for measure in threshold.measures:
            assert (measure.task, measure.model) in labels, measure


def test_missing_images_are_said_so(monkeypatch):
    def missing(name, split):
        raise MissingDataError(f"{name} is not here")

    CACHE.clear()
    monkeypatch.setattr("wellposed_lab.networks.trained.load_images", missing)
    run = get_suite("attack-cifar").plan("default")[0]
    with pytest.raises(MissingDataError, match="cifar10 is not here"):
        run.execute([run], None)
