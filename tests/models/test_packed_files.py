"""Sparse models in small files: what is packed, what a reader refuses, and what the checker reads."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import wellposed as wp
from wellposed.checker import RefusedError, check
from wellposed.checker.check import opened
from wellposed.cli.stored import as_stored
from wellposed.errors import FileFormatError
from wellposed.forms.operators.block import Block
from wellposed.models.io.files import pack_tensors, unpack_tensors

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def sparse_model(states=60):
    torch.manual_seed(0)
    A = 0.2 * torch.randn(states, states) * (torch.rand(states, states) < 0.05)
    return wp.ImplicitModel.from_matrices(A, torch.eye(states)[:, :20].contiguous(), torch.ones(3, states))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_tensors_come_back_bit_for_bit(kind):
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(kind)
    values[torch.rand(50, 40, generator=torch.Generator().manual_seed(2)) < 0.9] = 0
    ends = torch.tensor([2**63 - 1, -(2**63), 0, 5, -7], dtype=torch.int64)
    given = {"w": values.mT, "index": torch.arange(4000) * 3, "ends": ends.repeat(200), "small": torch.zeros(3)}
    stored, table = pack_tensors(given)
    assert table.keys() == {"w", "index", "ends"}
    assert sum(value.nbytes for value in stored.values()) < 0.4 * sum(value.nbytes for value in given.values())
    found = unpack_tensors(stored, table)
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in given.items()
    )


def test_numbers_without_zeros_stay_as_they_are(tmp_path):
    model = wp.ImplicitModel(30, 10, 40)
    wp.save(model, tmp_path / "m.safetensors")
    stored = load_file(tmp_path / "m.safetensors")
    assert torch.equal(stored["state.raw"], model.state.raw)


def test_a_sparse_model_is_small_as_a_file_and_as_a_folder_and_stays_certified(tmp_path):
    model, path = sparse_model(), tmp_path / "m.safetensors"
    wp.save(model, path, certificate=True)
    wp.models.save_pretrained(model, tmp_path / "folder", certificate=True)
    dense = sum(value.nbytes for value in model.state_dict().values())
    u = torch.randn(4, 20)
    for place, folder in ((path, False), (tmp_path / "folder" / "model.safetensors", True)):
        assert place.stat().st_size < 0.3 * dense
        loaded = wp.models.from_pretrained(place.parent) if folder else wp.load(place)
        assert torch.equal(loaded(u), model(u))
        assert check(place.parent if folder else place)[0].claim == "well-posed"
        assert as_stored(place, folder=folder).stated == "bit for bit"
    file, (part,) = opened(path)
    A = part.matrices["A"]()
    assert file.packed and [[float(entry * A.unit) for entry in row] for row in A.rows] == model.A.tolist()


def rewritten(path, change):
    """Writes a packed file once more, after a change of its tensors and its table, and without a checksum."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors, table = load_file(path), json.loads(metadata["packed"])
    change(tensors, table)
    body = {"format": metadata["format"], "config": metadata["config"], "packed": json.dumps(table)}
    save_file(tensors, path, metadata=body)


def bomb(tensors, table):
    table["state.raw"]["shape"] = [60, 10**8]
    tensors["state.raw"] = packed_bytes(zlib.compress(bytes(10**6)))


def packed_bytes(data):
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def truncated(tensors, table):
    tensors["state.raw"] = tensors["state.raw"][:-5].clone()


def continued(tensors, table):
    tensors["state.raw"] = torch.cat([tensors["state.raw"], torch.zeros(3, dtype=torch.uint8)])


def longer(tensors, table):
    tensors["state.raw"] = packed_bytes(zlib.compress(bytes(60 * 60 * 4 + 1)))


CHANGES = {
    "bomb": bomb, "truncated": truncated, "continued": continued, "longer": longer,
    "another shape": lambda tensors, table: table["state.raw"].update(shape=[61, 60]),
    "a negative size": lambda tensors, table: table["state.raw"].update(shape=[-60, -60]),
    "another type": lambda tensors, table: table["state.raw"].update(dtype="F64"),
    "no type": lambda tensors, table: table["state.raw"].update(dtype="U8"),
    "more said": lambda tensors, table: table["state.raw"].update(order=[1, 0]),
    "a name that is not there": lambda tensors, table: table.update(X={"dtype": "F32", "shape": [1]}),
    "a tensor that is not packed": lambda tensors, table: tensors.update(B=torch.eye(60)[:, :20].contiguous()),
    "nothing": lambda tensors, table: table.clear(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_library_and_checker_refuse_a_damaged_packing(change, tmp_path):
    path = tmp_path / "m.safetensors"
    wp.save(sparse_model(), path)
    rewritten(path, CHANGES[change])
    with pytest.raises(FileFormatError):
        wp.load(path)
    with pytest.raises(RefusedError):
        opened(path)[1][0].matrices["A"]()


def test_a_sparse_matrix_in_a_loop_is_formed_by_the_checker(tmp_path):
    model, path = sparse_model(), tmp_path / "f.safetensors"
    form = wp.ImplicitForm(model.A.detach().to_sparse(), model.B.detach(), model.C.detach().to_sparse())
    wp.save(form, path, certificate=True)
    assert check(path)[0].stated.startswith("inf") or check(path)[0].stated.startswith("weighted")
    assert as_stored(path, folder=False).stated == "a form"
    assert isinstance(wp.load(path), wp.ImplicitForm) and not isinstance(wp.load(path).A, Block)


def test_a_sparse_matrix_whose_entries_come_twice_is_refused(tmp_path):
    index, values = torch.tensor([[0, 0], [1, 1]]), torch.tensor([0.25, 0.5])
    form = wp.ImplicitForm(torch.eye(2).mul(0.5).to_sparse(), torch.eye(2), torch.ones(1, 2))
    path = tmp_path / "f.safetensors"
    wp.save(form, path)
    tensors = load_file(path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    metadata.pop("sha256")
    save_file({**tensors, "A.matrix.indices": index, "A.matrix.values": values}, path, metadata=metadata)
    with pytest.raises(RefusedError, match="given twice"):
        opened(path)[1][0].matrices["A"]()
