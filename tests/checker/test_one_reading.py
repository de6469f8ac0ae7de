"""A file that checker and library could read differently is refused by both, and never reported as proven."""

import hashlib
import json
import math
import os
import struct

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forged_files import (
    block,
    cell_config,
    certify_anew,
    change_claims,
    dense,
    form_header,
    read_parts,
    rewritten,
    write_claims,
    write_form,
    write_model,
    write_tensors,
    zero,
)

import wellposed as wp
from wellposed.checker import RefusedError, check
from wellposed.cli import cli, stored
from wellposed.errors import FileFormatError, WellposedError
from wellposed.models.io import storage

WELL_POSED = {"kind": "well-posed", "condition": "inf", "value": 0.95}
ONE = np.ones((1, 1))


def row(*values):
    return np.array(values, dtype=np.float64)


def refused_by_both(path, error=FileFormatError):
    """Asserts that neither the checker, nor the library, nor the command takes a file."""
    with pytest.raises(RefusedError):
        check(path)
    with pytest.raises(error):
        wp.models.from_pretrained(path) if path.is_dir() else wp.load(path)
    done = CliRunner().invoke(cli, ["verify", str(path)])
    assert done.exit_code == 1 and "is not proven" in done.output, done.output


def small_form(path, header=None, **changes):
    """Writes the form ``x = relu(x / 2 + u)``, ``y = x`` with its certificate."""
    header = form_header(dense("A"), 1, 1, **changes) if header is None else header
    write_form(path, header, A=ONE / 2, B=ONE, C=ONE)
    write_claims(path, [WELL_POSED])
    return path


def small_model(path, config=None, metadata=None, **tensors):
    body = {"format": "wellposed-1", "config": json.dumps(cell_config() if config is None else config)}
    tensors = {"state.raw": ONE / 2, "B": ONE, "C": ONE, **tensors}
    write_tensors(path, {name: value for name, value in tensors.items() if value is not None}, metadata or body)
    write_claims(path, [WELL_POSED])
    return path


def test_the_files_that_are_changed_below_are_accepted(tmp_path):
    for path in (small_form(tmp_path / "form.safetensors"), small_model(tmp_path / "model.safetensors")):
        assert check(path) and wp.load(path)
        assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0


@pytest.mark.parametrize("order", [None, [0, 1], [1], [1, 1], "10", [True, False], {}, [1, 0, 2]], ids=str)
def test_an_order_of_dimensions_is_another_order_or_not_given(order, tmp_path):
    """Transposed by one of the two only, A would send u_2 to the output or not: y <= 1 or y <= 1.9."""
    path = tmp_path / "m.safetensors"
    A, B, C = np.array([[0, 0.9], [0, 0]]), np.eye(2), np.array([[1.0, 0.0]])
    write_form(path, form_header(dense("A", order=order), 1, 2), A=A, B=B, C=C)
    box = {"kind": "enclosure", "inputs": ["u0", "u1"], "states": ["x0", "x1"], "outputs": ["y0", "y1"]}
    ends = {"u0": row(0, 0), "u1": row(1, 1), "x0": row(0, 0), "x1": row(1, 1.95), "y0": row(0), "y1": row(1)}
    write_claims(path, [WELL_POSED, box], ends)
    refused_by_both(path)


def test_a_transposed_matrix_is_read_alike(tmp_path):
    path = tmp_path / "m.safetensors"
    A, B, C = np.array([[0.1, 0.9], [0, 0]]), np.eye(2), np.array([[1.0, 0.0]])
    write_form(path, form_header(dense("A", order=[1, 0]), 1, 2), A=A, B=B, C=C)
    write_claims(path, [{"kind": "well-posed", "condition": "triangular", "value": 0.1}])
    assert wp.load(path).A.to_dense().tolist() == A.T.tolist()
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0


def folder_of_a_form(folder, metadata, activation="relu", strength=0.5):
    header = form_header(dense("A"), 1, 1, activation=activation)
    folder.mkdir()
    weights = write_tensors(folder / "model.safetensors", {"A": strength * ONE, "B": ONE, "C": ONE}, metadata)
    config = {"library_name": "wellposed", "architectures": ["ImplicitForm"]}
    text = json.dumps({**config, "format": "wellposed-form-1", "form": header})
    (folder / "config.json").write_text(text)
    write_claims(weights, [WELL_POSED], config_sha256=hashlib.sha256(text.encode()).hexdigest())
    return folder


def test_a_folder_is_described_by_its_configuration_alone(tmp_path):
    """The tensors call themselves a sigmoid of slope 1/4, which proves 3.9; the configuration says relu."""
    path = folder_of_a_form(tmp_path / "plain", {"format": "pt"})
    assert check(path) == check(path / "model.safetensors")
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0
    steep = form_header(dense("A"), 1, 1, activation="sigmoid")
    inner = {"format": "wellposed-form-1", "form": json.dumps(steep)}
    path = folder_of_a_form(tmp_path / "forged", inner, strength=3.9)
    write_claims(path / "model.safetensors", [WELL_POSED | {"value": 0.98}])
    refused_by_both(path)
    refused_by_both(folder_of_a_form(tmp_path / "twice", {"format": "pt", "form": inner["form"]}))
    same = form_header(dense("A"), 1, 1)
    refused_by_both(folder_of_a_form(tmp_path / "same", {"format": "wellposed-form-1", "form": json.dumps(same)}))


def changed_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    weights = folder / "model.safetensors"
    change_claims(
        weights.with_suffix(".cert"),
        lambda said: said.update(config_sha256=hashlib.sha256(text.encode()).hexdigest()),
    )
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(more=1),
        lambda config: config.update(config={}),
        lambda config: config.update(library_name=None),
        lambda config: config.update(architectures=["ImplicitModel"]),
        lambda config: config.update(format=None),
        lambda config: config["form"].update(bias={}),
        lambda config: config["form"].pop("labels"),
    ],
)
def test_configurations_with_more_or_less_than_belongs_there(change, tmp_path):
    refused_by_both(changed_config(folder_of_a_form(tmp_path / "folder", {"format": "pt"}), change))


@pytest.mark.parametrize(
    "name", ["max_pool(2)", "max_pool(3, 0.001)", "max_pool(3.0)", "max_pool(0)", "group_sort(2)", "softmax(2)"]
)
def test_blocks_of_an_activation_make_up_the_states(name, tmp_path):
    """With no whole block there is no inequality to check, and A = 50 would be proven."""
    path = tmp_path / "m.safetensors"
    tensors = {"A": np.full((3, 3), 50.0), "B": np.ones((3, 1)), "C": np.ones((1, 3))}
    block_claim = {"kind": "well-posed", "condition": "block", "value": 0.5, "norm": "inf", "weights": "w"}
    for weights in (np.zeros(0), np.ones(1)):
        write_form(path, form_header(dense("A"), 1, 1, activation=name), **tensors)
        write_claims(path, [block_claim], {"w": weights})
        refused_by_both(path)
        write_model(path, tensors["A"], name, B=tensors["B"], C=tensors["C"])
        write_claims(path, [block_claim], {"w": weights})
        refused_by_both(path, WellposedError)


def test_a_constant_of_its_own_is_no_parameter_of_pooling(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {"A": np.full((2, 2), 50.0), "B": np.ones((2, 1)), "C": np.ones((1, 2))}
    write_form(path, form_header(dense("A"), 1, 1, activation="max_pool(2, 0.001)"), **tensors)
    write_claims(
        path,
        [{"kind": "well-posed", "condition": "block", "value": 0.5, "norm": "inf", "weights": "w"}],
        {"w": np.ones(1)},
    )
    refused_by_both(path)


@pytest.mark.parametrize("name", [
    "leaky_relu('0.5')", "leaky_relu(1_0e-1)", "leaky_relu(0.5,)", "leaky_relu(0.5) ", "leaky_relu(0.5))", "relu(",
    "relu()", "tanh(3)", "relu ", "leaky_relu(3", "leaky_relu(0.55", "leaky_relu(1)", "sin()",
    "hardtanh(2.0, -2.0)", "hardtanh(-1e999, 1e999)", "elu(-1.0)", "softplus(0.0)", "softshrink(-1.0)",
    "rescaled('relu', 2.0)",
    "rescaled('tanh', 0.0)", "rescaled('tanh', 2)", "max_pool(True)", "", None, 1, ["relu"], ["relu", "relu"],
    {"parts": ["relu"], "sizes": [0]}, {"parts": [], "sizes": []}, {"parts": ["relu"], "sizes": [1], "more": 1},
])  # fmt: skip
def test_an_activation_is_written_in_one_way(name, tmp_path):
    refused_by_both(small_form(tmp_path / "f.safetensors", activation=name), WellposedError)
    refused_by_both(small_model(tmp_path / "m.safetensors", cell_config(activation=name)), WellposedError)


def test_one_activation_of_many_blocks_is_refused(tmp_path):
    """Softmax acts on all states at once, so that blocks without loops among them have one."""
    path = tmp_path / "m.safetensors"
    tensors = {"a": -50 * ONE, "B": np.eye(2), "C": np.array([[1.0, 0.0]])}
    A = block([1, 1], {(1, 0): dense("a")})
    acyclic = [{"kind": "well-posed", "condition": "acyclic", "value": 0.0}]
    write_form(path, form_header(A, 1, 2, activation="softmax"), **tensors)
    write_claims(path, acyclic)
    with pytest.raises(RefusedError, match="does not know the condition"):
        check(path)
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 1
    form = wp.load(path)  # two equilibria at least, which is why it must not be proven
    u = torch.tensor([[0.0, 25.0]], dtype=torch.float64)
    ends = []
    for start in (0.0, 1.0):
        x = torch.tensor([[start, 1 - start]], dtype=torch.float64)
        for _ in range(200):
            x = torch.softmax(x @ form.A.to_dense().mT + u, -1)
        ends.append(float(x[0, 0]))
    assert abs(ends[0] - ends[1]) > 0.9
    write_form(path, form_header(A, 1, 2, activation="relu"), **tensors)
    write_claims(path, acyclic)
    refused_by_both(path)
    write_form(path, form_header(A, 1, 2, activation=["softmax", "softmax"]), **tensors)
    write_claims(path, acyclic)
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0


def test_a_model_has_numbers_of_one_type(tmp_path):
    """Read in the type of the first tensor, 1.0005 becomes 1.000977, above the claimed end."""
    wide, half = np.array([[1.0005]]), np.ones((1, 1), np.float16)
    box = {"kind": "enclosure", "inputs": ["u0", "u1"], "states": ["x0", "x1"], "outputs": ["y0", "y1"]}
    ends = {"u0": row(0), "u1": row(1), "x0": row(0), "x1": row(1), "y0": row(0), "y1": row(1.0005)}
    path = small_model(tmp_path / "m.safetensors", **{"state.raw": 0 * ONE}, B=half, C=wide)
    write_claims(path, [WELL_POSED, box], ends)
    refused_by_both(path)
    header = form_header(dense("A"), 1, 1)
    write_form(tmp_path / "f.safetensors", header, A=0 * ONE, B=half, C=wide)
    write_claims(tmp_path / "f.safetensors", [WELL_POSED, box], ends)
    refused_by_both(tmp_path / "f.safetensors")
    parts = {(0, 0): dense("a"), (1, 1): dense("b")}
    header = form_header(block([1, 1], parts), 1, 1, activation=["relu", "relu"])
    tensors = {"a": 0 * half, "b": 0 * ONE, "B": np.ones((2, 1)), "C": np.ones((1, 2))}
    write_form(tmp_path / "f.safetensors", header, **tensors)
    write_claims(tmp_path / "f.safetensors", [WELL_POSED])
    refused_by_both(tmp_path / "f.safetensors")
    refused_by_both(small_model(tmp_path / "m.safetensors", B=np.ones((1, 1), np.int64)))


CONFIGURATIONS = {
    "no cells": {"kind": "ImplicitRNN", "input_size": 1, "hidden_size": 1, "out_features": None,
                 "batch_first": True, "num_layers": 1, "bidirectional": False, "dropout": 0.0, "warm_start": True,
                 "readout_bias": False, "cells": []},
    "nothing but no cells": {"kind": "ImplicitRNN", "cells": []},
    "a kind that is not written": cell_config(kind="ImplicitModel"),
    "a kind that is null": cell_config(kind=None),
    "more": cell_config(more=None),
    "less": {name: value for name, value in cell_config().items() if name != "bias"},
    **{f"{name} null": cell_config(**{name: None})
       for name in ("in_features", "state_features", "activation", "condition", "feedthrough", "bias")},
    "a flag as a number": cell_config(bias=0),
    "a size as a flag": cell_config(in_features=True),
    "a size as a fraction": cell_config(state_features=1.0),
    "no states": cell_config(state_features=0),
    "a triangle of another condition": cell_config(triangle=[False, False]),
    "a condition without its triangle": cell_config(condition="triangular"),
    "a rank without factors": cell_config(rank=1),
    "a rank of zero": cell_config(rank=0),
    "a bias that is not there": cell_config(bias=True),
    "weights that are not there": cell_config(condition="weighted"),
    "other inputs": cell_config(in_features=2),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_that_say_something_else(name, tmp_path):
    path = small_model(tmp_path / "m.safetensors", CONFIGURATIONS[name])
    refused_by_both(path)
    write_claims(path, [])
    refused_by_both(path)


def test_factors_beside_a_matrix_are_refused(tmp_path):
    """The library would multiply the factors, whose product is 25, and the checker look at the matrix."""
    factors = {"state.left": 5 * ONE, "state.right": 5 * ONE}
    refused_by_both(small_model(tmp_path / "m.safetensors", cell_config(rank=1), **factors))
    refused_by_both(small_model(tmp_path / "m.safetensors", **factors))
    refused_by_both(small_model(tmp_path / "m.safetensors", more=ONE))
    refused_by_both(small_model(tmp_path / "m.safetensors", bias=np.zeros(1)))


FORMS = {
    "a negative block": (block([1], {(-1, -1): dense("A")}), {}),
    "a block outside": (block([1], {(0, 1): dense("A")}), {}),
    "a block without states": (block([1, 0], {(0, 0): dense("A")}), {"activation": ["relu", "relu"]}),
    "no blocks": (block([], {}), {}),
    "a block of another size": (block([1], {(0, 0): zero(2, 1)}), {}),
    "a block of no size": (block([1], {(0, 0): zero(0, 1)}), {}),
    "a block twice": ({**block([1], {}), "parts": {"dict": [[{"tuple": [0, 0]}, dense("A")]] * 2}}, {}),
    "a block null": (block([1], {(0, 0): None}), {}),
    "more of an operator": ({**dense("A"), "scale": 2}, {}),
    "less of an operator": ({"operator": "Zero", "size": {"tuple": [1, 1]}}, {}),
    "a null matrix": (None, {}),
    "a null tensor": (dense(None), {}),
    "more of a tensor": (dense("A", transposed=True), {}),
    "another place": ({**zero(1, 1), "place": "cuda"}, {}),
    "a list for a tuple": ({**zero(1, 1), "size": [1, 1]}, {}),
    "a tensor that is not read": (zero(1, 1), {}),
    "a dtype that is not that of the numbers": (dense("A"), {"dtype": "float32"}),
    "a null dtype": (dense("A"), {"dtype": None}),
    "more of a form": (dense("A"), {"scale": 2}),
    "null inputs": (dense("A"), {"input_shape": None}),
    "other inputs": (dense("A"), {"input_shape": [2]}),
    "null labels": (dense("A"), {"labels": None}),
    "labels of other blocks": (dense("A"), {"labels": ["a", "b"]}),
    "a label that is no text": (dense("A"), {"labels": [1]}),
    "a list of one activation": (dense("A"), {"activation": ["relu"]}),
    "a bias of another shape": (dense("A"), {"bias": {"tensor": "A"}}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_say_something_else(name, tmp_path):
    A, changes = FORMS[name]
    path = small_form(tmp_path / "m.safetensors", form_header(A, 1, 1, **changes))
    refused_by_both(path)
    write_claims(path, [{"kind": "well-posed", "condition": "acyclic", "value": 0.0}])
    refused_by_both(path)


def test_empty_tensors_are_no_blocks(tmp_path):
    path = tmp_path / "m.safetensors"
    header = form_header(block([1], {(0, 0): dense("A")}), 1, 1)
    for A in (np.zeros((0, 1)), np.zeros((1, 0)), np.zeros((0, 0))):
        write_form(path, header, A=A, B=ONE, C=ONE)
        write_claims(path, [WELL_POSED])
        refused_by_both(path)


def patched(path, old, new):
    """Replaces a text in the header, and says the new length and digest."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length]
    assert old in text
    text = text.replace(old, new, 1)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    certify_anew(path)
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"\"kappa\": 0.95", rb"\"kappa\": NaN"),
        (rb"\"kappa\": 0.95", rb"\"kappa\": -Infinity"),
        (rb"\"kappa\": 0.95", rb"\"kappa\": 1e999"),
        (rb"\"bias\": false", rb"\"bias\": true, \"bias\": false"),
        (rb"\"relu\"", rb"\"relu\", \"activation\": \"relu\""),
        (rb"\"relu\"", rb"\"\\ud800\""),
        (b'"format": "wellposed-1"', b'"format": "wellposed-1", "format": "wellposed-1"'),
        (b'"format": "wellposed-1"', b'"format": "wellposed-1", "more": ""'),
        (b'"format": "wellposed-1"', b'"format": "wellposed-1", "more": null'),
        (b'"dtype": "F64"', b'"dtype": "F64", "dtype": "F64"'),
        (b'"dtype": "F64"', b'"dtype": "F64", "more": 1'),
    ],
)
def test_headers_that_say_something_twice_or_no_number(old, new, tmp_path):
    refused_by_both(patched(small_model(tmp_path / "m.safetensors"), old, new))


def raw_header(path, change, tail=b""):
    """Rewrites the header of a model of one state as text, with its certificate."""
    small_model(path)
    header, data = read_parts(path)
    text = change(json.dumps(header)).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + tail)
    certify_anew(path)
    return path


def offsets(name, begin, end):
    def change(text):
        header = json.loads(text)
        header[name]["data_offsets"] = [begin, end]
        return json.dumps(header)

    return change


def shaped(name, shape):
    def change(text):
        header = json.loads(text)
        header[name]["shape"] = shape
        return json.dumps(header)

    return change


HEADERS = {  # of the tensors state.raw, B and C, eight bytes each
    "two in one place": offsets("B", 0, 8),
    "one upon the other": offsets("B", 4, 12),
    "a gap": offsets("C", 24, 32),
    "backwards": offsets("C", 24, 16),
    "below zero": offsets("state.raw", -8, 0),
    "beyond the end": offsets("C", 16, 10**30),
    "three ends": lambda text: text.replace("[16, 24]", "[16, 20, 24]"),
    "ends as floats": lambda text: text.replace("[16, 24]", "[16.0, 24.0]"),
    "ends as texts": lambda text: text.replace("[16, 24]", '["16", "24"]'),
    "a huge shape": shaped("B", [10**30, 1]),
    "a shape that overflows to one": shaped("B", [2**32, 2**32, 1]),
    "a shape as flags": shaped("B", [True, True]),
    "a shape as floats": shaped("B", [1.0, 1.0]),
    "a shape below zero": shaped("B", [-1, -1]),
    "a vector": shaped("B", [1]),
    "digits without end": lambda text: text.replace("[16, 24]", f"[16, {'9' * 5000}]"),
    "another type": lambda text: text.replace('"F64"', '"F4"', 1),
    "a type of two numbers": lambda text: text.replace('"F64"', '"C64"', 1),
    "a type in small letters": lambda text: text.replace('"F64"', '"f64"', 1),
    "a name again, spelled otherwise": lambda text: (
        text[:-1] + f', "\\u0042": {json.dumps(json.loads(text)["B"])}}}'
    ),
    "metadata again": lambda text: text[:-1] + ', "__metadata__": {}}',
    "metadata in other letters": lambda text: text.replace("__metadata__", "__Metadata__"),
    "a name with an accent": lambda text: text.replace('"B"', '"B\u0301"'),
    "a wide letter": lambda text: text.replace('"B"', '"\uff22"'),
    "two tables": lambda text: text + "{}",
    "a comment": lambda text: text + "// more",
    "zeros behind": lambda text: text + "\0\0\0",
    "a comma too many": lambda text: text[:-1] + ",}",
    "half a letter": lambda text: text.replace('"B"', '"\ud800"'),
    "a list": lambda text: f"[{text}]",
    "deep": lambda text: text[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_with_other_tricks(name, tmp_path):
    refused_by_both(raw_header(tmp_path / "m.safetensors", HEADERS[name]))


def test_what_stands_behind_the_tensors_is_refused(tmp_path):
    for tail in (b"\0", b" " * 8, b"more"):
        refused_by_both(raw_header(tmp_path / "m.safetensors", str, tail))


def test_padded_headers_are_read_alike(tmp_path):
    path = raw_header(tmp_path / "m.safetensors", lambda text: text + " " * 37)
    assert check(path) and wp.load(path).A.item() == 0.5


CONFIGS = {
    "a key twice": lambda text: text.replace('"labels": []', '"labels": [], "labels": []'),
    "a key twice, spelled otherwise": lambda text: text.replace(
        '"labels": []', '"labels": [], "label\\u0073": []'
    ),
    "NaN": lambda text: text.replace('"labels": []', '"labels": NaN'),
    "infinity": lambda text: text.replace('"labels": []', '"labels": [1e999]'),
    "a form in the form": lambda text: text[:-1] + ', "config": {}}',
    "a mark in front": lambda text: "\ufeff" + text,
    "nothing": lambda text: "",
    "null": lambda text: "null",
    "deep": lambda text: text.replace('"labels": []', '"labels": ' + "[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_with_other_tricks(name, tmp_path):
    folder = folder_of_a_form(tmp_path / "folder", {"format": "pt"})
    text = CONFIGS[name]((folder / "config.json").read_text()).encode()
    (folder / "config.json").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    change_claims(folder / "model.cert", lambda said: said.update(config_sha256=digest))
    refused_by_both(folder)


def test_a_certificate_is_of_its_own_model_and_configuration(tmp_path):
    one, other = (folder_of_a_form(tmp_path / name, {"format": "pt"}) for name in "ab")
    header = form_header(dense("A"), 1, 1, activation="tanh")
    config = json.loads((other / "config.json").read_text()) | {"form": header}
    (other / "config.json").write_text(json.dumps(config))  # the same tensors, and another phi
    with pytest.raises(RefusedError, match=r"another config\.json"):
        check(other)
    (one / "config.json").unlink()
    (one / "config.json").symlink_to(other / "config.json")
    with pytest.raises(RefusedError, match=r"another config\.json"):
        check(one)
    (tmp_path / "c").mkdir()
    weaker = small_model(tmp_path / "c" / "m.safetensors")
    stronger = small_model(tmp_path / "c" / "n.safetensors", **{"state.raw": 3 * ONE})
    with pytest.raises(RefusedError, match="another model"):
        check(stronger, weaker.with_suffix(".cert"))


def test_links_and_pipes_for_files(tmp_path):
    path = small_model(tmp_path / "m.safetensors")
    (tmp_path / "n.safetensors").symlink_to(path)
    (tmp_path / "n.cert").symlink_to(path.with_suffix(".cert"))
    assert check(tmp_path / "n.safetensors") and wp.load(tmp_path / "n.safetensors")
    path.with_suffix(".cert").unlink()
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink("/dev/zero", place)):
        make(path.with_suffix(".cert"))
        with pytest.raises(RefusedError, match="no ordinary file"):
            check(path)
        place = path.with_suffix(".cert")
        place.rmdir() if place.is_dir() else place.unlink()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RefusedError, match="no ordinary file"):
        check(path)
    with pytest.raises(FileNotFoundError):
        wp.load(path)


SAID = {
    "claims twice": lambda text: text.replace('"claims"', '"claims": [], "claims"'),
    "the digest twice": lambda text: text.replace('"sha256"', '"sha256": "", "sha256"'),
    "a value that is none": lambda text: text.replace("0.95", "NaN"),
    "a value below all others": lambda text: text.replace("0.95", "-Infinity"),
    "a huge value": lambda text: text.replace("0.95", "-1" + "0" * 400),
    "a value as text": lambda text: text.replace("0.95", '"0.95"'),
    "no claims": lambda text: text.replace('"claims"', '"Claims"'),
    "a claim in a list": lambda text: text.replace('"claims": [', '"claims": [[').replace("}]", "}]]"),
    "a condition in capitals": lambda text: text.replace('"inf"', '"INF"'),
    "a condition that is a list": lambda text: text.replace('"inf"', '["inf"]'),
    "of another part": lambda text: text.replace(
        '"kind": "well-posed"', '"kind": "well-posed", "about": "cells.0"'
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_certificates_with_other_tricks(name, tmp_path):
    path = small_model(tmp_path / "m.safetensors")
    header, data = read_parts(path.with_suffix(".cert"))
    metadata = header["__metadata__"]
    metadata["certificate"] = SAID[name](metadata["certificate"])
    rewritten(path.with_suffix(".cert"), header, data)
    with pytest.raises(RefusedError):
        check(path)


def test_metadata_are_a_table(tmp_path):
    path = folder_of_a_form(tmp_path / "folder", {"format": "pt"})
    header, data = read_parts(path / "model.safetensors")
    for metadata in (None, [], {"format": None}):
        rewritten(path / "model.safetensors", header | {"__metadata__": metadata}, data)
        certify_anew(path / "model.safetensors")
        refused_by_both(path)


def test_headers_are_utf_8(tmp_path):
    path = small_model(tmp_path / "m.safetensors")
    header, data = read_parts(path)
    for coding in ("utf-16", "utf-32", "utf-8-sig"):
        text = json.dumps(header).encode(coding)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        certify_anew(path)
        refused_by_both(path)


def test_a_certificate_of_a_file_names_no_configuration(tmp_path):
    path = small_model(tmp_path / "m.safetensors")
    write_claims(path, [WELL_POSED], config_sha256="0" * 64)
    with pytest.raises(RefusedError, match=r"another config\.json"):
        check(path)


def gap_files(path, *, target, gap, samples=1, weight=5.0, rows=(0,)):
    """Writes the claim that the row of B, 5, is the best one for that target."""
    write_form(path, form_header(dense("A"), 1, 1), A=0 * ONE, B=weight * ONE, C=ONE)
    group = {"rows": [*rows], "states": [], "inputs": [0], "kappa": 1.0, "support": "all", "capped": 0}
    group |= {"design": "d", "targets": "t", "dual": "n", "ridge": "r", "gaps": "g"}
    count = len(rows)
    tensors = {"d": np.ones((samples, 1)), "t": np.full((count, samples), target), "r": row(1.0)}
    tensors |= {"n": np.zeros((count, samples)), "g": np.full(count, gap)}
    write_claims(path, [WELL_POSED, {"kind": "row-gaps", "largest": 1e-12, "groups": [group]}], tensors)
    return path


def test_a_gap_of_a_zero_target_is_none(tmp_path):
    """A row of zeros meets a target of zeros, so that any other gap is infinitely large beside |z|^2 / 2 = 0."""
    path = tmp_path / "m.safetensors"
    for gap in (1e6, 25.0, 1e-300):
        with pytest.raises(RefusedError, match="the gap of row 0"):
            check(gap_files(path, target=0.0, gap=gap))
    assert check(gap_files(path, target=0.0, gap=0.0, weight=0.0))
    with pytest.raises(RefusedError, match="the gap of row 0"):
        check(gap_files(path, target=0.0, gap=0.0))
    with pytest.raises(RefusedError, match="the gap of row 0"):
        check(gap_files(path, target=5e-324, gap=1.0, weight=0.0))


def test_gaps_are_about_rows_and_samples(tmp_path):
    path = tmp_path / "m.safetensors"
    for options in ({"samples": 0}, {"rows": ()}, {"rows": (0, 0)}):
        with pytest.raises(RefusedError, match=r"no samples|makes no sense|twice"):
            check(gap_files(path, target=0.0, gap=0.0, weight=0.0, **options))


def test_an_enclosure_has_entries(tmp_path):
    path = small_form(tmp_path / "m.safetensors")
    box = {"kind": "enclosure", "inputs": ["e", "e"], "states": ["e", "e"], "outputs": ["e", "e"]}
    write_claims(path, [WELL_POSED, box], {"e": np.zeros(0)})
    with pytest.raises(RefusedError, match="no entries"):
        check(path)


def test_claims_say_nothing_else(tmp_path):
    path = small_form(tmp_path / "m.safetensors")
    write_claims(path, [WELL_POSED | {"unless": "it rains"}])
    with pytest.raises(RefusedError, match="means nothing"):
        check(path)


def test_a_form_that_the_library_does_not_read_is_not_reported_as_proven(tmp_path):
    path = small_form(tmp_path / "m.safetensors")
    header, data = read_parts(path)
    header["__metadata__"]["sha256"] = "0" * 64  # the seal of the library, of which the checker knows nothing
    rewritten(path, header, data)
    certify_anew(path)
    assert check(path)
    done = CliRunner().invoke(cli, ["verify", str(path)])
    assert done.exit_code == 1 and "checksum" in done.output


MODELS = {
    "model": lambda: wp.ImplicitModel(3, 2, 6, bias=True),
    "low rank": lambda: wp.ImplicitModel(3, 2, 6, rank=2),
    "recurrent": lambda: wp.ImplicitRNN(3, 4, 5, out_features=2, num_layers=2, batch_first=True),
    "form": lambda: wp.ImplicitModel(3, 2, 6, bias=True).form(),
    "form of low rank": lambda: wp.ImplicitModel(3, 2, 6, rank=2).form(),
    "half": lambda: wp.ImplicitModel(3, 2, 6).half(),
    "blocks": lambda: wp.series(
        wp.ImplicitModel(3, 4, 6).form(), wp.ImplicitModel(4, 2, 5, activation="tanh").form()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_the_library_reads_is_compared_whole(name, tmp_path, monkeypatch):
    """Whichever tensor the library would read differently, the command notices it."""
    torch.manual_seed(0)
    path = tmp_path / "m.safetensors"
    wp.save(MODELS[name](), path, certificate=True)
    done = CliRunner().invoke(cli, ["verify", str(path)])
    assert done.exit_code == 0, done.output
    genuine = storage.read_tensors
    names = sorted(key for key in read_parts(path)[0] if key != "__metadata__")
    header, data = read_parts(path)
    header["__metadata__"].pop("sha256")  # the seal, which would tell
    rewritten(path, header, data)
    for changed in (one for one in names if not one.startswith("readout")):  # which comes after the equations

        def altered(place, changed=changed):
            tensors, metadata = genuine(place)
            tensors[changed] = tensors[changed] + 2**-7
            return tensors, metadata

        monkeypatch.setattr(storage, "read_tensors", altered)
        with pytest.raises(RefusedError, match=r"the library|another A"):
            stored.as_stored(path, folder=False)


def test_numbers_of_json_are_finite():
    assert math.isinf(json.loads("1e999")), "which is why parse_constant is not enough"
