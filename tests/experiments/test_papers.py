"""The published numbers: complete, unique, well-formed, and under names that are explained."""

import math
import re
from collections import Counter
from itertools import pairwise

import pytest
from torch import nn

from wellposed.baselines import PUBLISHED
from wellposed.errors import InputError
from wellposed.experiments.papers import ROWS, SUITES, Row
from wellposed.experiments.papers.names import METRICS, MODELS, TASKS
from wellposed.experiments.papers.p001 import SHAPES
from wellposed.experiments.papers.row import PAPERS, Sheet, share
from wellposed.experiments.rules import AtLeast, AtMost, Beats, Measure, NotATarget, Number, is_sentence

MEASURE = Measure("test_mse", "implicit", "identity", at=30)
RIVAL = Measure("test_mse", "mlp", "identity", at=30)
MEASURES = [(row, measure) for row in ROWS for measure in row.rule.measures]


def find(paper, place, *words):
    found = [r for r in ROWS if (r.paper, r.place) == (paper, place) and all(w in r.claim for w in words)]
    assert len(found) == 1, [row.claim for row in found]
    return found[0]


def test_every_paper_and_every_suite_has_rows():
    assert {row.paper for row in ROWS} == set(PAPERS)
    assert {row.suite for row in ROWS} == set(SUITES)
    assert min(Counter(row.paper for row in ROWS).values()) > 50
    assert len(ROWS) > 600


def test_every_paper_covers_its_subjects():
    mathematics = {"identity", "arithmetic", "rolling-average", "rolling-argmax", "spiky", "depth", "parameters"}
    extrapolation = {*mathematics, "activations", "volatility", "earthquake", "feedback"}
    elimination = {"earthquake", "sparsify-fashion", "eliminate-fashion", "eliminate-earthquake"}
    robustness = {"sparsify-cifar", "sparsify-newsgroups", "bounds", "attack-mnist", "attack-cifar"}
    noise = {"noise-solvers", "noise-mnist", "noise-cifar", "noise-regression", "adversarial"}
    subjects = {
        "000": {*mathematics, "activations"},
        "001": extrapolation,
        "002": {*mathematics, "activations", *elimination},
        "003": {*extrapolation, *robustness, "sparsify-fashion"},
        "004": {*noise, "prefix-sums", "mazes", "matrix-addition", "parameters"},
    }
    assert {paper: {row.suite for row in ROWS if row.paper == paper} for paper in PAPERS} == subjects


def test_rows_are_unique():
    repeated = [key for key, n in Counter((row.paper, row.place, row.claim) for row in ROWS).items() if n > 1]
    assert not repeated


def test_texts_are_plain_sentences():
    for row in ROWS:
        assert is_sentence(row.claim), row.claim
        assert not re.search(r"[_{}]|  ", row.claim + row.note), row
        assert row.note == row.note.strip()
        if isinstance(row.rule, NotATarget):
            assert is_sentence(row.rule.reason) and not row.note, row
            assert row.rule.reason.count(". ") == 0, row.rule.reason


def test_values_are_finite_and_shares_are_fractions():
    shares = {"accuracy", "accuracy_drop", "sparsity", "success_rate", "sufficient_data"}
    for row in ROWS:
        assert row.value is None or math.isfinite(row.value)
        if isinstance(row.rule, Number | AtMost | AtLeast) and row.rule.measure.metric in shares:
            assert 0 < row.value < 1, row


def test_names_are_explained_and_explained_names_are_used():
    assert {measure.metric for _, measure in MEASURES} == set(METRICS)
    assert {measure.task for _, measure in MEASURES} == set(TASKS)
    assert {measure.model for row, measure in MEASURES if row.paper != "004"} == set(MODELS)


def test_comparators_exist_under_the_same_names_and_sizes():
    suites = {"identity", "arithmetic", "rolling-average", "rolling-argmax", "spiky", "volatility", "earthquake"}
    ours = re.compile("implicit.*|copy-last-label|data")
    for row, measure in MEASURES:
        if row.suite in {*suites, "parameters"} and row.paper != "004" and not ours.fullmatch(measure.model):
            # Stand-ins and other splits have the same networks.
            task = row.suite if row.suite in ("volatility", "earthquake") else measure.task
            sizes = [key[2] for key in PUBLISHED if key[:2] == (task, measure.model)]
            assert measure.size in sizes or (sizes and measure.size is None), measure


def test_printed_counts_agree_with_the_comparators():
    pairs = [
        (row.value, PUBLISHED[key].parameters)
        for row, measure in MEASURES
        if row.suite == "parameters" and (key := (measure.task, measure.model, measure.size)) in PUBLISHED
    ]
    printed = [pair for pair in pairs if pair[1] is not None]
    assert len(printed) > 15
    assert all(value == theirs for value, theirs in printed), printed


def test_one_number_has_one_direction():
    directions = {}
    for row in ROWS:
        if isinstance(row.rule, Number):
            directions.setdefault(row.rule.measure.metric, set()).add(row.rule.better)
    assert all(len(found) == 1 for metric, found in directions.items() if metric != "accuracy"), directions
    assert directions["accuracy"] == {"higher", None}  # None: repeating a label is right 90 % of the time
    assert directions["test_mse"] == {"lower"} and directions["parameters"] == {None}


def test_the_same_number_is_not_published_with_two_values_by_one_place():
    seen = {}
    for row in ROWS:
        if isinstance(row.rule, Number):
            assert seen.setdefault((row.paper, row.place, row.rule.measure), row.value) == row.value, row


@pytest.mark.parametrize(
    ("paper", "place", "words", "value"),
    [
        ("000", "Table 1", ("training MSE of the softplus",), 1.57e-2),
        ("000", "Table 2", ("best MLP", "subtraction"), 1.87e4),
        ("001", "Table 1", ("LSTM", "test MAPE"), 5.46),
        ("001", "Table 2", ("without feedback", "rolling argmax"), 0.918),
        ("002", "Table 1", ("depth-wise",), 217349),
        ("002", "section 4.3", ("loss of the implicit model",), 1.98e-3),
        ("003", "Table 3.1", ("sparsity at kappa = 0.5", "20NewsGroup"), 0.907),
        ("003", "Table 3.2", ("accuracy of MLA", "20NewsGroup"), 0.903),
        ("003", "Table 3.3", ("part of the data", "0.99", "CIFAR"), 7.5),
        ("003", "Table 4.1", ("gradient", " 1 %", "CIFAR-10"), 0.0666),
        ("003", "Table 5.2", ("implicit model's", "addition", "test MSE on"), 16.07),
        ("004", "section 4.1", ("9 layers",), 386),
    ],
)
def test_cells_are_read_from_the_right_column(paper, place, words, value):
    assert find(paper, place, *words).value == value


def test_tables_are_complete():
    values = Counter((row.paper, row.place) for row in ROWS if row.value is not None)
    cells = {"Table 1": 12, "Table 2": 6}
    assert {place: values["000", place] for place in cells} == cells
    cells = {"Table 1": 16, "Table 2": 8}
    assert {place: values["001", place] for place in cells} == cells
    cells = {"Table 3.1": 26, "Table 3.2": 18, "Table 3.3": 12, "Table 4.1": 20, "Table 5.2": 6, "Table 5.3": 16}
    assert {place: values["003", place] for place in cells} == cells
    assert values["002", "Table 2"] == 12 and values["002", "Table 3"] == 6


@pytest.mark.parametrize(("task", "model", "shape", "parameters"), SHAPES)
def test_counts_belong_to_the_printed_shapes(task, model, shape, parameters):
    modules = []
    if model in ("mlp", "lstm"):
        widths = [int(width) for width in shape.split()[0].split("-")]
        if model == "lstm":
            modules.append(nn.LSTM(widths[0], widths[1]))
            widths = widths[1:]
        modules += [nn.Linear(*pair) for pair in pairwise(widths)]
        matrices = 0
    else:
        n, p, q = (int(re.search(rf"{letter}=(\d+)", shape).group(1)) for letter in "npq")
        matrices = (n + q) * (n + p)
        modules += [nn.Linear(int(a), int(b)) for a, b in re.findall(r"(\d+)-to-(\d+)", shape)]
    assert matrices + sum(weight.numel() for module in modules for weight in module.parameters()) == parameters


def test_number_compares_by_relative_tolerance_and_direction():
    lower, count = Number(MEASURE, "lower", 0.1), Number(MEASURE, tolerance=0.0)
    outcomes = [lower.outcome(2.0, ours) for ours in (1.81, 2.19, 1.79, 2.21)]
    assert outcomes == ["reproduced", "reproduced", "better", "worse"]
    assert Number(MEASURE, "higher").outcome(2.0, 3.0) == "better"
    assert Number(MEASURE, "higher").outcome(2.0, 1.0) == "worse"
    assert [count.outcome(196, ours) for ours in (196, 195, 197)] == ["reproduced", "worse", "worse"]
    assert lower.outcome(2.0, math.nan) == "worse"


def test_beats_needs_the_factor_in_its_direction():
    lower, higher = Beats(MEASURE, RIVAL, "lower", 3.0), Beats(MEASURE, RIVAL, "higher", 1.05)
    assert lower.holds(1.0, 3.1) and not lower.holds(1.0, 2.9) and not lower.holds(1.0, 3.0)
    assert higher.holds(0.96, 0.91) and not higher.holds(0.95, 0.91)
    assert lower.holds(1.0, math.inf) and not lower.holds(math.nan, 1.0) and not lower.holds(1.0, math.nan)


def test_limits_include_their_end():
    assert AtMost(MEASURE, 5.0).holds(5.0) and not AtMost(MEASURE, 5.0).holds(5.1)
    assert AtLeast(MEASURE, 5.0).holds(5.0) and not AtLeast(MEASURE, 5.0).holds(4.9)
    assert not AtMost(MEASURE, 5.0).holds(math.nan)


def test_rules_say_what_they_need():
    assert Number(MEASURE).measures == (MEASURE,)
    assert AtMost(MEASURE, 1).measures == AtLeast(MEASURE, 1).measures == (MEASURE,)
    assert Beats(MEASURE, RIVAL, "lower").measures == (MEASURE, RIVAL)
    assert NotATarget("The data are not available.").measures == ()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Measure("Test MSE", "implicit", "identity"),
        lambda: Measure("test_mse", "", "identity"),
        lambda: Measure("test_mse", "implicit", "identity", size="004"),
        lambda: Measure("test_mse", "implicit", "identity", at=math.nan),
        lambda: Measure("test_mse", "implicit", "identity", at=""),
        lambda: Number(MEASURE, "smaller"),
        lambda: Number(MEASURE, tolerance=-0.1),
        lambda: Beats(MEASURE, RIVAL, None),
        lambda: Beats(MEASURE, RIVAL, "lower", 0.0),
        lambda: Beats(MEASURE, RIVAL, "lower", math.inf),
        lambda: Beats(MEASURE, MEASURE, "lower"),
        lambda: Beats(MEASURE, Measure("accuracy", "mlp", "identity"), "lower"),
        lambda: AtMost(MEASURE, math.nan),
        lambda: AtLeast(MEASURE, True),
        lambda: NotATarget("implausible"),
        lambda: Row("005", "Table 1", "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: Row("000", "Table 1", "A claim is made.", 1, "identities", Number(MEASURE)),
        lambda: Row("000", "", "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: Row("000", "Table 1", "no sentence", 1, "identity", Number(MEASURE)),
        lambda: Row("000", "Table 1", "A claim is made.", None, "identity", Number(MEASURE)),
        lambda: Row("000", "Table 1", "A claim is made.", math.inf, "identity", Number(MEASURE)),
        lambda: Row("000", "Table 1", "A claim is made.", 4, "identity", AtMost(MEASURE, 5)),
        lambda: Row("000", "Table 1", "A claim is made.", 1, "identity", Number(MEASURE), note="why"),
    ],
)
def test_malformed_data_are_refused(build):
    with pytest.raises(InputError, match="received"):
        build()


def test_a_named_rival_stands_in_the_same_place():
    row = Sheet("001", "identity").order("Figure 3", "One beats the other.", MEASURE, "mlp", "lower", 2.0, 2)
    assert row == Row(
        "001", "Figure 3", "One beats the other.", 2, "identity", Beats(MEASURE, RIVAL, "lower", 2.0)
    )


def test_share_rounds_away_the_binary_noise():
    assert share(1.01) == 0.0101 and share(0.1) == 0.001
