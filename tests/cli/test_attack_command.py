"""`wellposed attack`: every attack, what it prints, draws and keeps, mistakes, Ctrl-C."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from tests.cli.test_certify_command import WRONG, folder, given, invoke, mistakes, network  # noqa: F401
from wellposed import cli
from wellposed.cli.attack import ATTACKS
from wellposed.robust.attacks import jsma, noise_attack, pgd, ranked_attack
from wellposed.robust.draw import gallery

NOISES = ("noise", "speckle")
SOURCE = ("--model", "certify_networks:network", "--data", "data.npz")


def basic(*more, epsilon=0.1):
    return invoke(*SOURCE, "--epsilon", epsilon, *more, command="attack")


@pytest.mark.parametrize("kind", sorted({*ATTACKS} - {"autoattack"}))
def test_every_attack_stays_in_its_set(folder, kind):  # noqa: F811
    more = ("--surrogate", "certify_networks:network") if kind == "transfer" else ()
    result = basic(
        "--attack", kind, "--json", "--quiet", "--save", "found.pt", "--samples", 30, *more, epsilon=0.2
    )
    assert result.exit_code == 0, result.output
    facts, found = json.loads(result.stdout), torch.load("found.pt", weights_only=True)
    whole, classes = given()
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:30]
    u = whole[rows]
    assert torch.equal(found["y"], classes[rows]) and found["u"].min() >= 0 and found["u"].max() <= 1
    own = float((network()(found["u"]).argmax(1) == found["y"]).double().mean())
    assert facts["attacked_accuracy"] == pytest.approx(own) and own <= facts["clean_accuracy"]
    largest = float((found["u"] - u).abs().max())
    assert facts["largest_change"] == pytest.approx(largest) and largest <= (1 if kind in NOISES else 0.2 + 1e-6)


def test_autoattack(folder):  # noqa: F811
    result = basic("--attack", "autoattack", "--json", "--quiet", "--samples", 4)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["attack"].startswith("autoattack") and any("too few" in note for note in facts["notes"])
    refused = basic("--attack", "autoattack", "--range", -1, 1)
    assert refused.exit_code == 2 and "[0, 1]" in refused.stderr


def test_options_reach_the_attack(folder):  # noqa: F811
    model, (u, y) = network(), given()
    many = json.loads(basic("--steps", 3, "--json", "--quiet").stdout)
    wanted = pgd(model, u, y, 0.1, steps=3)
    assert many["attacked_accuracy"] == pytest.approx(wanted.accuracy)
    assert many["queries"] == pytest.approx(float(wanted.queries.double().mean()))
    few = json.loads(basic("--attack", "jsma", "--count", 0.34, "--json", "--quiet", epsilon=1).stdout)
    assert few["attacked_accuracy"] == pytest.approx(jsma(model, u, y, 2).accuracy) and few["changed_inputs"] <= 2
    for kind in ("sensitivity", "gradient", "random"):
        ranked = basic("--attack", kind, "--count", 0.5, "--seed", 4, "--json", "--quiet", epsilon=1)
        wanted = ranked_attack(model, u, y, 1.0, 3, ranking=kind, seed=4)
        assert json.loads(ranked.stdout)["attacked_accuracy"] == pytest.approx(wanted.accuracy)


def test_transfer_attacks_the_surrogate_and_asks_the_model(folder):  # noqa: F811
    model, (u, y) = network(), given()
    copy = __import__("certify_networks").pixels
    found = basic(
        "--attack", "transfer", "--surrogate", "certify_networks:pixels", "--steps", 5, "--json", "--quiet"
    )
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    points = pgd(copy, u, y, 0.1, steps=5).inputs
    right = (model(points).argmax(1) == y) & (model(u).argmax(1) == y)
    assert facts["attacked_accuracy"] == pytest.approx(float(right.double().mean()))
    assert facts["attack"] == "transfer of pgd" and facts["queries"] == 2
    assert "--surrogate certify_networks:pixels" in (folder / "attack.html").read_text()


def test_a_surrogate_of_another_shape_and_precision(folder):  # noqa: F811
    u, y = given()
    np.savez("images.npz", u=u.view(-1, 1, 2, 3).double().numpy(), y=y.numpy())
    model = ("--model", "certify_networks:pixels", "--data", "images.npz", "--epsilon", 0.1)
    other = ("--attack", "transfer", "--surrogate", "certify_networks:network")
    found = invoke(*model, *other, "--json", "--quiet", command="attack")
    assert found.exit_code == 0, found.output


def test_speckle_is_the_library_s(folder):  # noqa: F811
    model, (u, y) = network(), given()
    found = basic("--attack", "speckle", "--seed", 3, "--json", "--quiet", epsilon=2)
    wanted = noise_attack(model, u, y, "speckle", 2.0, seed=3)
    assert (
        json.loads(found.stdout)["attacked_accuracy"] == pytest.approx(wanted.accuracy) and wanted.accuracy < 0.9
    )


def test_the_table_and_the_page(folder):  # noqa: F811
    result = basic("--out", "page.html")
    assert result.exit_code == 0, result.output
    assert "90.0 %" in result.stdout and "pgd" in result.stdout and "page.html" in result.stderr
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "Where to go next" in page
    assert "<script" not in page and "://" not in page and "--attack pgd --epsilon 0.1" in page


def test_a_picture_alone(folder):  # noqa: F811
    assert basic("--out", "page.png").exit_code == 0
    assert (folder / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("options", "complaint"), [*WRONG[:7], *WRONG[8:18],
    (["--attack", "pdg"], "'pdg' is not one of"),
    (["--attack", "noise", "--count", "0.5"], "any number"),
    (["--attack", "noise", "--epsilon", "2"], "[0, 1]"),
    (["--attack", "transfer"], "transfer needs the model to attack"),
    (["--surrogate", "certify_networks:network"], "it is for transfer, not for pgd"),
    (["--attack", "transfer", "--surrogate", "gone.safetensors"], "there is no file"),
    (["--attack", "transfer", "--surrogate", "gone.safetensors"], "--surrogate"),
    (["--attack", "transfer", "--surrogate", "certify_networks:one"], "one output a class"),
    (["--attack", "transfer", "--surrogate", "certify_networks:two"], "2 classes and the model 3"),
    (["--attack", "transfer", "--surrogate", "certify_networks:network", "--count", "0.5"], "any number"),
    (["--attack", "speckle", "--epsilon", "inf"], "finite"),
    (["--count", "0"], "0"),
    (["--count", "nan"], "nan"),
    (["--epsilon", "-1"], "not negative"),
    (["--attack", "lp", "--model", "certify_networks:softplus"], "ReLU"),
    (["--out", "page.txt"], "must end with .html or .png")])  # fmt: skip
def test_mistakes_end_with_one_message(folder, options, complaint):  # noqa: F811
    mistakes()
    result = basic(*options)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split()) and "Traceback" not in result.output
    assert not (folder / "attack.html").exists()


def test_ctrl_c(folder, monkeypatch, capsys):  # noqa: F811
    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setitem(ATTACKS, "pgd", interrupted)
    monkeypatch.setattr(sys, "argv", ["wellposed", "attack", *SOURCE, "--epsilon", "0.1"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130 and capsys.readouterr().err.strip().endswith("interrupted")


def test_counts_leave_out_what_was_wrong_before(folder):  # noqa: F811
    model, (u, y) = network(), given()
    facts = json.loads(basic("--json", "--quiet").stdout)
    right = model(u).argmax(1) == y
    assert facts["right_before"] == int(right.sum()) == 54 and facts["clean_accuracy"] == 0.9
    assert facts["changed"] == 54 - round(60 * facts["attacked_accuracy"])


def test_the_page_shows_changed_samples_first(tmp_path):
    out = tmp_path / "attack.html"
    arguments = ("--model", "reference:digits", "--data", "digits", "--epsilon", 0.1, "--samples", 100)
    result = invoke(*arguments, "--steps", 5, "--json", "--out", out, command="attack")
    facts, page = json.loads(result.stdout), out.read_text()
    assert 0 < facts["changed"] < facts["right_before"] < 100
    assert f"changes {facts['changed']} of these" in page and "Wrong before, and not shown" in page
    words = re.findall(r'class="(wrong|good)"', page)
    assert words == sorted(words, reverse=True) and set(words) == {"wrong", "good"}


def test_the_gallery_shows_changed_samples_first(folder):  # noqa: F811
    model, (u, y) = network(), given()
    found = pgd(model, u, y, 0.3)
    drawn = gallery(model, u, found, y, count=4, classes=("a", "b", "c"))
    before, after = (["abc"[k] for k in outputs.argmax(1)] for outputs in (model(u), found.outputs))
    changed = [k for k in range(60) if found.success[k] and k >= 6][:4]
    assert len(changed) == 4
    titles = [axes.get_title() for axes in drawn.axes]
    assert titles == [*(before[k] for k in changed), *(after[k] for k in changed), *[""] * 4]
