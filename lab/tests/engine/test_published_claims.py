"""The published claims: complete, each once, well-formed, under explained names; and how files are refused."""

import math
import re
import tomllib
from collections import Counter
from itertools import pairwise

import pytest
from torch import nn
from wellposed_lab.engine import claims
from wellposed_lab.engine.claims import (
    PAPERS,
    AtLeast,
    AtMost,
    Beats,
    Measure,
    NotATarget,
    Number,
    PublishedClaim,
    claim_files,
    is_sentence,
    load_claims,
    read_claims,
    require_known_suites,
)
from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.networks.published import PUBLISHED

from wellposed.errors import InputError

CLAIMS = load_claims()
MEASURES = [(claim, measure) for claim in CLAIMS for measure in claim.rule.measures]
PLACES = [(paper, place, claim) for claim in CLAIMS for paper, place in claim.where]
MEASURE = Measure("test_mse", "implicit", "identity", at=30)
WHERE = (("000", "Table 1"),)


def find(paper, place, *words):
    found = [claim for *at, claim in PLACES if at == [paper, place] and all(word in claim.says for word in words)]
    assert len(found) == 1, [claim.says for claim in found]
    return found[0]


def test_every_paper_has_claims_and_every_claim_a_suite():
    require_known_suites(CLAIMS, all_suites())
    assert set(all_suites()) - {claim.suite for claim in CLAIMS} == {
        "beyond",
        "certified-loops",
        "certified-training",
        "mondeq",
        "sparsify-digits",
    }
    counts = Counter(paper for claim in CLAIMS for paper in claim.papers)
    assert set(counts) == set(PAPERS) and min(counts.values()) > 50
    assert len(CLAIMS) > 480 and len(PLACES) > 700


def test_the_claims_of_a_suite_are_in_one_file():
    files = Counter(suite for path in claim_files() for suite in {claim.suite for claim in read_claims(path)})
    assert set(files.values()) == {1}


def test_every_paper_covers_its_subjects():
    mathematics = {"identity", "arithmetic", "rolling-average", "rolling-argmax", "spiky", "depth", "parameters"}
    extrapolation = {*mathematics, "activations", "volatility", "earthquake", "feedback", "sequence-length"}
    elimination = {"earthquake", "sparsify-fashion", "eliminate-fashion", "eliminate-earthquake"}
    robustness = {
        "bisection-rates",
        "sparsify-cifar",
        "sparsify-newsgroups",
        "bounds",
        "attack-mnist",
        "attack-cifar",
    }
    noise = {"noise-solvers", "noise-mnist", "noise-cifar", "noise-regression", "adversarial"}
    subjects = {
        "000": {*mathematics, "activations"},
        "001": extrapolation,
        "002": {*mathematics, "activations", *elimination},
        "003": {*extrapolation, *robustness, "sparsify-fashion"},
        "004": {*noise, "prefix-sums", "mazes", "matrix-addition", "parameters"},
    }
    assert {paper: {claim.suite for claim in CLAIMS if paper in claim.papers} for paper in PAPERS} == subjects


def test_no_place_says_the_same_twice():
    repeated = [key for key, n in Counter((*at, claim.says) for *at, claim in PLACES).items() if n > 1]
    assert not repeated


def test_places_of_a_claim_are_in_order_of_the_papers():
    assert all(list(claim.papers) == sorted(claim.papers) for claim in CLAIMS)
    shared = find("002", "section 3.2", "below 5")
    assert shared.papers == ("000", "001", "002", "003") and shared.where[0] == ("000", "section 4")
    assert shared.sections("002") == ("section 3.2",)


def test_texts_are_plain_sentences():
    for claim in CLAIMS:
        assert is_sentence(claim.says), claim.says
        assert not re.search(r"[_{}]|  ", claim.says + claim.note), claim
        assert claim.note == claim.note.strip()
        if isinstance(claim.rule, NotATarget):
            assert is_sentence(claim.rule.reason) and not claim.note, claim
            assert claim.rule.reason.count(". ") == 0, claim.rule.reason


def test_values_are_finite_and_shares_are_fractions():
    shares = {"accuracy", "accuracy_drop", "sparsity", "success_rate", "sufficient_data"}
    for claim in CLAIMS:
        assert claim.value is None or math.isfinite(claim.value)
        if isinstance(claim.rule, Number | AtMost | AtLeast) and claim.rule.measure.metric in shares:
            assert 0 < claim.value < 1, claim


@pytest.mark.parametrize("path", claim_files(), ids=lambda path: path.parent.name)
def test_explained_names_are_used(path):
    """That used names of metrics and tasks are explained is asked by the reader."""
    content = tomllib.loads(path.read_text())
    rules = [rule for claim in read_claims(path) for rule in (claim.rule, *(other for _, other in claim.readings))]
    measures = [measure for rule in rules for measure in rule.measures]
    for table, used in (("metrics", "metric"), ("models", "model"), ("tasks", "task")):
        assert content.get(table, {}).keys() <= {getattr(measure, used) for measure in measures}, table


def test_a_name_means_the_same_in_every_file():
    meanings = {}
    for path in claim_files():
        for table, names in tomllib.loads(path.read_text()).items():
            if table != "claim":
                for name, text in names.items():
                    assert meanings.setdefault((table, name), text) == text


def test_comparators_exist_under_the_same_names_and_sizes():
    suites = {"identity", "arithmetic", "rolling-average", "rolling-argmax", "spiky", "volatility", "earthquake"}
    ours = re.compile("implicit.*|copy-last-label|data")
    for claim, measure in MEASURES:
        if (
            claim.suite in {*suites, "parameters"}
            and "004" not in claim.papers
            and not ours.fullmatch(measure.model)
        ):
            # Stand-ins and other splits have the same networks.
            task = claim.suite if claim.suite in ("volatility", "earthquake", "spiky") else measure.task
            sizes = [key[2] for key in PUBLISHED if key[:2] == (task, measure.model)]
            assert measure.size in sizes or (sizes and measure.size is None), measure


def test_printed_counts_agree_with_the_comparators():
    pairs = [
        (claim.value, PUBLISHED[key].parameters)
        for claim, measure in MEASURES
        if claim.suite == "parameters" and (key := (measure.task, measure.model, measure.size)) in PUBLISHED
    ]
    printed = [pair for pair in pairs if pair[1] is not None]
    assert len(printed) > 15
    assert all(value == theirs for value, theirs in printed), printed


def test_one_number_has_one_direction():
    directions = {}
    for claim in CLAIMS:
        if isinstance(claim.rule, Number):
            directions.setdefault(claim.rule.measure.metric, set()).add(claim.rule.better)
    assert all(len(found) == 1 for metric, found in directions.items() if metric != "accuracy"), directions
    assert directions["accuracy"] == {"higher", None}  # None: repeating a label is right 90 % of the time
    assert directions["test_mse"] == {"lower"} and directions["parameters"] == {None}


def test_the_same_number_is_not_published_with_two_values_by_one_place():
    seen = {}
    for paper, place, claim in PLACES:
        if isinstance(claim.rule, Number):
            assert seen.setdefault((paper, place, claim.rule.measure), claim.value) == claim.value, claim


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
    values = Counter((paper, place) for paper, place, claim in PLACES if claim.value is not None)
    cells = {"Table 1": 12, "Table 2": 6}
    assert {place: values["000", place] for place in cells} == cells
    cells = {"Table 1": 16, "Table 2": 8}
    assert {place: values["001", place] for place in cells} == cells
    cells = {"Table 3.1": 26, "Table 3.2": 18, "Table 3.3": 12, "Table 4.1": 20, "Table 5.2": 6, "Table 5.3": 16}
    assert {place: values["003", place] for place in cells} == cells
    assert values["002", "Table 2"] == 12 and values["002", "Table 3"] == 6


SHAPED = [claim for *at, claim in PLACES if at == ["001", "Table 4"] and "has the shape" in claim.says]


@pytest.mark.parametrize("claim", SHAPED, ids=lambda claim: claim.says)
def test_counts_belong_to_the_printed_shapes(claim):
    shape, model = claim.says.partition("the shape ")[2], claim.rule.measure.model
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
    assert matrices + sum(weight.numel() for module in modules for weight in module.parameters()) == claim.value


def test_there_are_printed_shapes():
    assert len(SHAPED) == 15


@pytest.mark.parametrize(
    "build",
    [
        lambda: PublishedClaim((), "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: PublishedClaim(WHERE * 2, "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: PublishedClaim((("005", "Table 1"),), "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: PublishedClaim((("000", ""),), "A claim is made.", 1, "identity", Number(MEASURE)),
        lambda: PublishedClaim(WHERE, "A claim is made.", 1, "", Number(MEASURE)),
        lambda: PublishedClaim(WHERE, "no sentence", 1, "identity", Number(MEASURE)),
        lambda: PublishedClaim(WHERE, "A claim is made.", None, "identity", Number(MEASURE)),
        lambda: PublishedClaim(WHERE, "A claim is made.", math.inf, "identity", Number(MEASURE)),
        lambda: PublishedClaim(WHERE, "A claim is made.", 4, "identity", AtMost(MEASURE, 5)),
        lambda: PublishedClaim(WHERE, "A claim is made.", 1, "identity", Number(MEASURE), note="why"),
    ],
)
def test_malformed_claims_are_refused(build):
    with pytest.raises(InputError, match="received"):
        build()


def test_a_claim_of_no_suite_is_refused():
    claim = PublishedClaim(WHERE, "A claim is made.", 1, "identities", Number(MEASURE))
    with pytest.raises(InputError, match=r"'A claim is made.' .* unknown suite 'identities'.* mean 'identity'"):
        require_known_suites([claim], all_suites())


FILE = """
[metrics]
test_mse = "mean squared error on the test set"
[tasks]
identity = "the identity"
[[claim]]
where = ["000 Table 1", "002 section 4.2, footnote"]
says = "A claim is made."
value = 2
suite = "identity"
rule = "at most"
measure = { metric = "test_mse", model = "implicit", task = "identity", at = 30 }
[[claim]]
where = ["001 Figure 3"]
says = "One beats the other."
suite = "identity"
rule = "beats"
measure = { metric = "test_mse", model = "implicit", task = "identity", at = 30 }
rival = "mlp"
better = "lower"
factor = 2.0
note = "It is a note."
"""


def written(folder, text):
    path = folder / "mathematics.toml"
    path.write_text(text)
    return path


def test_files_are_read(tmp_path):
    limit, order = read_claims(written(tmp_path, FILE))
    where = (("000", "Table 1"), ("002", "section 4.2, footnote"))
    assert limit == PublishedClaim(where, "A claim is made.", 2, "identity", AtMost(MEASURE, 2))
    rule = Beats(MEASURE, Measure("test_mse", "mlp", "identity", at=30), "lower", 2.0)
    note = "It is a note."
    assert order == PublishedClaim(
        (("001", "Figure 3"),), "One beats the other.", None, "identity", rule, "", note
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[metrics]", "[metrics", "mathematics.toml must be a TOML file"),
        ("[metrics]", "[metric]", "mathematics.toml: unknown key 'metric'.* mean 'metrics'"),
        ('"mean squared error on the test set"', "3", r"\[metrics\] must say of every name"),
        ("[[claim]]", "[[claims]]", "unknown key 'claims'; .* mean 'claim'"),
        (
            "test_mse =",
            "test_mape =",
            r"claim 1 \('A claim is made.'\): \[metrics\] must say what 'test_mse' means",
        ),
        ("identity =", "addition =", r"claim 1 .*\[tasks\] must say what 'identity' means; received addition"),
        ('["001 Figure 3"]', '"001 Figure 3"', r"claim 2 \('One beats the other.'\): where must be a list"),
        ('["001 Figure 3"]', '["001"]', "at which place of paper 001 the claim stands; received ''"),
        ('["001 Figure 3"]', '["Figure 3"]', "paper must be one of 000, .*; received 'Figure'"),
        ('says = "A claim is made."', "", "claim 1 .*says must be given; received where, value"),
        ("value = 2", 'value = "2"', "value must be a number; received '2'"),
        ("value = 2", "value = true", "value must be a number; received True"),
        ("value = 2", "value = nan", "limit must be a finite number; received nan"),
        ("value = 2", "", "value must be given"),
        ('rule = "at most"', 'rule = "below"', "rule must be one of 'number', .*; received 'below'"),
        ('rule = "at most"', "rule = []", r"rule must be one of 'number', .*; received \[\]"),
        ('rival = "mlp"', "rival = 3", "rival must be a table such as .*; received 3"),
        ('rival = "mlp"', "", "rival must be given"),
        ("factor =", "tolerance =", "unknown key 'tolerance'"),
        ("better =", "beter =", "unknown key 'beter'; .* mean 'better'"),
        ('"lower"', '"smaller"', "better must be .*; received 'smaller'"),
        ("at = 30", "att = 30", "unknown key 'att'; .* mean 'at'"),
        ('"It is a note."', "3", "note must be a text; received 3"),
    ],
)
def test_wrong_files_are_refused_with_file_and_entry(tmp_path, old, new, message):
    assert old in FILE
    with pytest.raises(InputError, match=message) as caught:
        read_claims(written(tmp_path, FILE.replace(old, new)))
    text = str(caught.value)
    assert f"{tmp_path.name}/mathematics.toml" in text and ("received" in text or "valid" in text)


def test_a_claim_with_two_entries_is_refused(tmp_path, monkeypatch):
    entry = FILE[FILE.rindex("[[claim]]") :].replace("001 Figure 3", "003 Figure 1")
    monkeypatch.setattr(claims, "claim_files", lambda: [written(tmp_path, FILE + entry)])
    with pytest.raises(InputError, match=r"two for 'One beats the other.', at \(\('001', .*'003', .*: join them"):
        load_claims.__wrapped__()
