"""Curves over seeds, the look of models, and the files that are drawn."""

import math
import re
import sys
from dataclasses import replace

import pytest
from PIL import Image
from wellposed_lab.engine.experiment import Figure
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.report.drawing import figure_html
from wellposed_lab.report.figures import Curve, curves, draw, far_below, figure_scale, is_line, styles

from wellposed.errors import InputError, MissingExtraError

SHIFT = Figure("Error under shift", ("identity", "addition"), "test_mse", "k", paper="001 Figure 3")
TRAINING = Figure("Training error", ("identity",), "train_loss", "epoch", over="epoch", log="y")
SINGLE = Figure("Error", ("identity",), "test_mse", "x")


def record(model="implicit", seed=0, values=((1.0, 1.0), (10.0, 2.0)), *, losses=(4.0, 2.0, 1.0), **fields):
    known = {
        "suite": "identity",
        "scale": "default",
        "task": "identity",
        "size": None,
        "role": "ours" if model == "implicit" else "baseline",
        "kind": "run",
        "config": {"seed": seed},
        "values": tuple(Value("test_mse", value, at) for at, value in values),
        "series": {"train_loss": list(losses)},
        "facts": {},
        "environment": {},
        "started": "2026-01-01",
        "seconds": 1.0,
        **fields,
    }
    return Record(id=f"{model}{seed}", model=model, seed=seed, **known)


def seeds(*columns, model="implicit", **fields):
    return [record(model, seed, column, **fields) for seed, column in enumerate(columns)]


RECORDS = [
    *seeds(((1.0, 1.0), (10.0, 5.0)), ((1.0, 3.0), (10.0, 6.0)), ((1.0, 2.0), (10.0, 70.0))),
    *seeds(((10.0, 9.0), (1.0, 8.0)), model="mlp", size="001"),
    *seeds(((1.0, 1e-9), (10.0, 1e-8)), model="linear", role="control"),
    *seeds(((1.0, 4.0), (10.0, 4.0)), task="addition"),
]


def test_curves_are_medians_from_lowest_to_highest():
    found = curves(SHIFT, RECORDS)
    assert list(found) == ["identity", "addition"]
    assert [curve.name for curve in found["identity"]] == ["implicit", "mlp (001)", "linear"]
    ours, mlp, _ = found["identity"]
    assert (ours.x, ours.middle, ours.low, ours.high) == ((1.0, 10.0), (2.0, 6.0), (1.0, 5.0), (3.0, 70.0))
    assert ours.seeds == 3 and mlp.x == (1.0, 10.0) and mlp.middle == (8.0, 9.0)


def test_training_curves_run_over_epochs_of_unequal_length():
    found = curves(TRAINING, [record(losses=(4.0, 2.0)), record(seed=1, losses=(6.0, 4.0, 3.0))])["identity"][0]
    assert found.x == (1.0, 2.0, 3.0) and found.middle == (5.0, 3.0, 3.0) and found.low == (4.0, 2.0, 3.0)


def test_failures_searches_and_smaller_scales_are_left_out():
    odd = [
        record(seed=7, values=((1.0, 100.0),), error="NonFiniteLossError: bad"),
        record(seed=8, values=((1.0, 100.0),), kind="search"),
        *(record(seed=seed, values=((1.0, 100.0),), scale="tiny") for seed in range(9)),
    ]
    assert curves(SHIFT, [*odd, *RECORDS]) == curves(SHIFT, RECORDS)
    assert curves(SHIFT, odd[2:])["identity"][0].middle == (100.0,)


def test_a_figure_shows_the_scale_of_the_comparison_and_says_which():
    large = [record(model, values=((1.0, 40.0),), scale="paper") for model in ("implicit", "mlp")]
    several = [*RECORDS, *large, record("mlp", values=((1.0, 4.0),), task="addition")]
    for tasks, scale in ((("identity",), "paper"), (("addition",), "default")):  # a control's absence is no reason
        figure = replace(SHIFT, tasks=tasks)
        assert figure_scale(figure, several) == scale
        assert f"Runs at scale {scale}." in str(figure_html(figure, several, "f"))
    assert curves(replace(SHIFT, tasks=("identity",)), several)["identity"][0].middle == (40.0,)
    few = str(figure_html(replace(SHIFT, tasks=("identity",)), [*RECORDS, large[0]], "f"))
    assert "Runs at scale default, which has most models; claims are judged at scale paper" in few
    assert "Runs at scale" not in str(figure_html(SHIFT, RECORDS, "f"))


def test_long_names_of_axes_are_broken_into_lines():
    drawn = str(figure_html(replace(SHIFT, axis="word " * 12), RECORDS, "f"))
    assert "word\\u003cbr>word" in drawn


def test_of_several_settings_one_is_drawn():
    other = [record(seed=s, values=((1.0, 50.0),), config={"seed": s, "rate": 2}) for s in range(2)]
    found = curves(SHIFT, [*other, *RECORDS])["identity"][0]
    assert found.seeds == 3 and 50.0 not in found.high


def test_not_a_number_and_places_without_a_logarithm():
    found = curves(SHIFT, seeds(((1.0, math.nan), (0.0, 7.0)), ((1.0, 3.0),)))["identity"][0]
    assert found.x == (1.0,) and found.middle == (3.0,)
    assert math.isnan(curves(SHIFT, seeds(((1.0, math.nan),)))["identity"][0].middle[0])
    linear = replace(SHIFT, log="y")
    assert curves(linear, seeds(((0.0, 7.0),)))["identity"][0].x == (0.0,)


def test_points_without_numbers_make_dots():
    single = curves(SINGLE, seeds(((None, 2.0),), ((None, 4.0),)))
    assert single["identity"][0].x == ("identity",) and single["identity"][0].middle == (3.0,)
    assert not is_line(single) and is_line(curves(SHIFT, RECORDS))
    named = curves(SINGLE, seeds((("b", 2.0), ("a", 1.0))))
    assert named["identity"][0].x == ("a", "b")


def test_every_model_looks_different_and_roles_can_be_told_apart():
    many = [
        record(f"{role}-{index}", role=role)
        for role, count in (("control", 12), ("ours", 2), ("baseline", 18))
        for index in range(count)
    ]
    found = styles(many)
    assert len({(style.colour, style.dash, style.width) for style in found.values()}) == len(many)
    assert {found[f"ours-{k}"].colour for k in range(2)} == {0}
    assert all(style.colour for name, style in found.items() if not name.startswith("ours"))
    widths = {
        role: {s.width for n, s in found.items() if n.startswith(role)} for role in ("ours", "baseline", "control")
    }
    assert min(widths["ours"]) > max(widths["baseline"]) > max(widths["control"])


def test_a_figure_may_be_of_some_models_only():
    drawn = curves(replace(SINGLE, models=("b",)), [record("a"), record("b")])
    assert [curve.name for found in drawn.values() for curve in found] == ["b"]


def test_many_models_of_ours_have_colours_of_their_own():
    counts = (("ours", 7), ("baseline", 6), ("control", 6))
    found = styles(record(f"{role}-{index}", role=role) for role, count in counts for index in range(count))
    looks = {(style.colour, style.dash) for style in found.values()}
    assert len(looks) == 19 and found["ours-0"].colour == 0
    assert {style.dash for name, style in found.items() if name.startswith("ours")} == {"solid"}


def test_exact_controls_are_far_below_and_nobody_else():
    def curve(name, role, *values):
        return Curve(name, None, role, (1.0, 2.0), values, values, values, 1)

    ours, exact = curve("implicit", "ours", 1.0, 100.0), curve("linear", "control", 1e-9, 1e-2)
    assert far_below([ours, exact]) == ["linear"]
    assert far_below([ours, curve("nac", "control", 1e-9, 1.0)]) == []
    assert far_below([ours, curve("mlp", "baseline", 1e-9, 1e-9)]) == []
    assert far_below([exact]) == []


def test_files_are_drawn_at_six_inches(tmp_path):
    for figure, name in ((SHIFT, "shift.png"), (TRAINING, "training.png"), (SHIFT, "shift.pdf")):
        draw(figure, RECORDS, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    width, height = Image.open(tmp_path / "shift.png").size
    assert width == 1200 and 500 < height < 1000
    colours = Image.open(tmp_path / "shift.png").convert("RGB").getcolors(1 << 20)
    assert {(31, 95, 208), (194, 65, 12)} <= {colour for _, colour in colours}


def texts(figure, records, path):
    draw(figure, records, path)
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_drawings_name_what_they_show(tmp_path):
    found = texts(SHIFT, RECORDS, tmp_path / "shift.svg")
    assert {"implicit", "mlp (001)", "identity", "addition", "test mse", "k"} <= set(found)
    assert "Error under shift (as 001 Figure 3)" in found and "far below: linear" in found
    assert "median of 1 to 3 seeds; bands: lowest to highest" in found
    assert "linear" not in found


def test_dots_are_ranked(tmp_path):
    records = [
        record("b", values=((None, 2.0),)),
        record("a", values=((None, 9.0),)),
        record(values=((None, 1.0),)),
    ]
    found = texts(SINGLE, records, tmp_path / "dots.svg")
    assert [name for name in found if name in ("a", "b", "implicit")] == ["a", "b", "implicit"]


def test_three_panels_have_their_legend_in_the_fourth_place(tmp_path):
    figure = replace(SHIFT, tasks=("identity", "addition", "subtraction"))
    found = texts(figure, [*RECORDS, record(task="subtraction")], tmp_path / "three.svg")
    assert {"identity", "addition", "subtraction", "implicit"} <= set(found)


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(InputError, match="no record has 'test_mse' on identity, addition"):
        draw(SHIFT, [], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"wellposed\[plots\]"):
        draw(SHIFT, RECORDS, tmp_path / "none.png")


def test_the_legend_of_one_panel_stands_below_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda self, *args, **options: asked.append(options))
    draw(replace(SHIFT, tasks=("identity",)), RECORDS, tmp_path / "figure.png")
    assert [options["loc"] for options in asked] == ["outside lower center"]


def test_settings_elsewhere_on_the_axis_are_drawn_together():
    short, long = (seeds(((at, 1.0),), ((at, 2.0),), config={"length": at}) for at in (10.0, 200.0))
    (curve,) = curves(replace(SHIFT, tasks=("identity",)), [*short, *long])["identity"]
    assert curve.x == (10.0, 200.0) and curve.middle == (1.5, 1.5)
