"""The table of comparators: every one runs on its task, and its size is the published one or explained."""

import pytest
import torch
from wellposed_lab.networks.published import PUBLISHED, build, parameter_table

from wellposed.errors import UnknownNameError

SHAPES = {
    "identity": ((10,), (10,)),
    "addition": ((50,), (1,)),
    "subtraction": ((50,), (1,)),
    "rolling-average": ((10,), (10,)),
    "rolling-argmax": ((10,), (10,)),
    "spiky": ((10,), (1,)),
    "volatility": ((60,), (1,)),
    "earthquake": ((30,), (4,)),
    "cifar10": ((3, 32, 32), (10,)),
}
COUNTS = {  # as printed: 000 section 3, 002 Table 1, 001 Table 4
    ("identity", "mlp"): 220,
    ("identity", "transformer-encoder-single-head"): 43498,
    ("addition", "mlp"): 1497,
    ("addition", "nalu"): 1530,
    ("addition", "transformer-encoder-sequential"): 6208,
    ("addition", "transformer-encoder-depthwise"): 217349,
    ("rolling-average", "lstm"): 42210,
    ("rolling-average", "transformer-encoder"): 42210,
    ("rolling-argmax", "lstm"): 1872,
    ("rolling-argmax", "transformer-decoder-masked"): 1920,
    ("rolling-argmax", "transformer-decoder-unmasked"): 1920,
    ("spiky", "lstm"): 1861,
    ("spiky", "transformer-spiky"): 43529,
    ("earthquake", "eikonet"): 42500,
}
DIFFERENT = {  # what no network of the printed shape has
    ("addition", "mlp", "002"): 631,
    ("subtraction", "mlp", "002"): 631,
    ("rolling-average", "transformer-encoder", "000"): 43498,
    ("rolling-average", "transformer-encoder", "002"): 43498,
}
ROWS = {(row.task, row.model, row.size): row for row in parameter_table()}


@pytest.mark.parametrize("key", PUBLISHED, ids="/".join)
def test_it_runs_on_its_task(key):
    inputs, outputs = SHAPES[key[0]]
    model = build(*key)
    y = model(torch.randn(3, *inputs))
    assert y.shape == (3, *outputs)
    assert y.isfinite().all()
    y.sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(("task", "model"), COUNTS, ids="/".join)
def test_published_counts_are_those_of_the_paper(task, model):
    assert PUBLISHED[task, model, "002"].parameters == COUNTS[task, model]


def test_counts_match_or_say_why_not():
    assert {key: row.ours for key, row in ROWS.items() if row.matches is False} == DIFFERENT
    assert all(ROWS[key].note for key in DIFFERENT)
    assert sum(row.matches is True for row in ROWS.values()) == 24


def test_sizes_of_the_later_paper():
    counts = {(row.task, row.model): row.ours for row in ROWS.values() if row.size == "001"}
    assert counts["identity", "mlp"] == 9 * 11 + 9 * 10 + 10 * 10
    assert counts["rolling-average", "lstm"] == 4 * (18 + 18 * 18 + 36) + 19
    assert counts["rolling-argmax", "lstm"] == 4 * (21 + 21 * 21 + 42) + 220
    assert counts["volatility", "mlp"] == 61 * 50 + 51 * 27 + 28 * 27 + 28 * 27 + 28 * 10 + 11
    assert counts["earthquake", "eikonet"] == 42500


@pytest.mark.parametrize(
    ("task", "control", "model", "sizes"),
    [
        ("rolling-average", "rnn-relu", "lstm", ("000", "001", "002")),
        ("rolling-argmax", "rnn-relu", "lstm", ("000", "001", "002")),
        ("spiky", "rnn-relu", "lstm", ("000", "001", "002")),
        ("volatility", "rnn-relu", "lstm", ("001",)),
        ("volatility", "transformer-encoder", "transformer-volatility", ("001",)),
    ],
)
def test_controls_have_about_the_size_of_what_they_control(task, control, model, sizes):
    for size in sizes:
        assert 0.97 < ROWS[task, control, size].ours / ROWS[task, model, size].ours < 1.03


def test_the_blind_transformers_are_named():
    """Those whose output does not change with the input say so, and no other network is like that."""
    for key, entry in PUBLISHED.items():
        model, inputs = entry.make().eval(), SHAPES[key[0]][0]
        if key[1].startswith("linear"):
            continue  # zero before it is fitted
        u = torch.rand(2, *inputs)
        blind = torch.equal(model(u), model(3 * u + torch.rand(2, *inputs)))
        assert blind is ("does not depend on its input" in entry.note), key


def test_every_call_builds_a_network_of_its_own():
    first, second = build("addition", "mlp"), build("addition", "mlp")
    assert first is not second
    assert not torch.equal(first.layers[0].weight, second.layers[0].weight)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("adition", "mlp"), "unknown task 'adition'.*did you mean 'addition'"),
        (("addition", "nallu"), "unknown model of the task 'addition' 'nallu'.*did you mean 'nalu'"),
        (("earthquake", "eikonet", "000"), "unknown size of 'eikonet' on 'earthquake' '000'; valid: 001, 002"),
    ],
)
def test_unknown_names(arguments, complaint):
    with pytest.raises(UnknownNameError, match=complaint):
        build(*arguments)
