"""Forms in files: every kind of operator, bit by bit; damage and strangers."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import wellposed
from wellposed import ImplicitForm, ImplicitModel
from wellposed.activations import Activation, register_activation
from wellposed.activations.catalogue import ACTIVATIONS
from wellposed.errors import FileFormatError, InputError, UnknownNameError
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    LowRank,
    Operator,
    Product,
    Repeated,
    Selection,
    Sparse,
    Sum,
    Zero,
)
from wellposed.forms.operators.base import tensors
from wellposed.models.io import storage

F64 = torch.float64


def draw(*shape):
    return torch.randn(*shape, dtype=F64)


OPERATORS = {
    "Dense": lambda: Dense(draw(4, 3)),
    "LowRank": lambda: LowRank(draw(4, 2), draw(3, 2)),
    "Zero": lambda: Zero((4, 3), F64),
    "Identity": lambda: Identity(4, F64),
    "Diagonal": lambda: Diagonal(draw(4)),
    "Sparse": lambda: Sparse(draw(6, 5).relu().to_sparse()),
    "Selection": lambda: Selection(torch.tensor([2, -1, 0, 0]), 3, F64),
    "Accumulation": lambda: Selection(torch.tensor([2, -1, 0, 0]), 3, F64).T,
    "Convolution": lambda: Convolution(draw(4, 1, 3, 2), (2, 5, 6), (2, 1), (1, 0), (1, 2), groups=2).T,
    "Repeated": lambda: Repeated(Dense(draw(2, 3)), 3),
    "Product": lambda: Product((Dense(draw(2, 4)), Sparse(draw(4, 3).to_sparse()))),
    "Sum": lambda: Sum((Dense(draw(4, 4)), Identity(4, F64))),
    "Block": lambda: Block((4, 2), (3, 2), {(0, 1): Dense(draw(4, 2)), (1, 0): LowRank(draw(2, 1), draw(3, 1))}),
}


def around(operator):
    """A form in which the operator is D."""
    q, p = operator.shape
    return ImplicitForm(Zero((1, 1), F64), Zero((1, p), F64), Zero((q, 1), F64), operator)


def again(form, tmp_path):
    wellposed.save(form, tmp_path / "form.safetensors")
    return wellposed.load(tmp_path / "form.safetensors")


def bits(value):
    return value.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_come_back_bit_by_bit(kind, tmp_path):
    operator = OPERATORS[kind]()
    found = again(around(operator), tmp_path).D
    assert type(found) is type(operator) and type(found).__name__ == kind
    assert (found.shape, found.dtype) == (operator.shape, operator.dtype)
    for ours, theirs in zip(tensors(operator), tensors(found), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    x = draw(3, operator.shape[1])
    assert torch.equal(found @ x, operator @ x)


def test_no_kind_is_forgotten():
    known = [k for k in Operator.__subclasses__() if k.__module__.startswith("wellposed.")]
    assert {kind.__name__ for kind in known} == set(OPERATORS)


def layered_form():
    sizes = (2, 6, 8)
    A = Block(sizes, sizes, {(0, 1): Dense(draw(2, 6)), (1, 2): Sparse(draw(6, 8).relu().to_sparse())})
    B = Block(sizes, (12,), {(2, 0): Convolution(draw(2, 3, 1), (3, 4), (1,), (0,), (1,))})
    C = Block((5,), sizes, {(0, 0): Dense(draw(5, 2))})
    phi = ["rescaled('tanh', 3.0)", "max_pool(2)", "leaky_relu(0.25)"]
    labels = ["third", "second", "first"]
    return ImplicitForm(A, B, C, draw(5, 12), draw(16), phi, (3, 4), output_bias=draw(5), labels=labels)


def test_everything_else_comes_back(tmp_path):
    form = layered_form()
    found = again(form, tmp_path)
    assert isinstance(found, ImplicitForm) and found.labels == form.labels and found.dtype == F64
    assert (found.input_shape, found.partition) == (form.input_shape, form.partition)
    assert [phi.name for phi in found.activations] == [phi.name for phi in form.activations]
    assert torch.equal(found.bias, form.bias) and torch.equal(found.output_bias, form.output_bias)
    u = draw(7, 3, 4)
    assert torch.equal(found(u), form(u))


def test_one_map_on_all_blocks_stays_one(tmp_path):
    A = Block((2, 2), (2, 2), {(0, 1): Dense(draw(2, 2))})
    form = ImplicitForm(A, draw(4, 3), draw(1, 4), activation="softmax")
    found = again(form, tmp_path)
    assert found.partition == (4,) and found.activation.name == "softmax"
    assert found.output_bias is None and found.bias is None and isinstance(found.D, Zero)


def test_shared_tensors_are_stored_once(tmp_path):
    weight = draw(50, 50)
    sizes = (50, 50, 50)
    A = Block(sizes, sizes, {(0, 1): Dense(weight), (1, 2): Dense(weight.mT)})
    found = again(ImplicitForm(A, draw(150, 1), draw(1, 150)), tmp_path)
    with safe_open(tmp_path / "form.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == 2500 + 300  # noqa: SIM118
    first, second = found.A.parts[0, 1].matrix, found.A.parts[1, 2].matrix
    assert first.data_ptr() == second.data_ptr() and torch.equal(second, weight.mT)


def test_overlapping_pieces_of_one_tensor(tmp_path):
    memory = draw(30)
    A = Block((4, 4), (4, 4), {(0, 0): Diagonal(memory[:4]), (0, 1): Diagonal(memory[2:6])})
    found = again(ImplicitForm(A, memory[:8].view(8, 1), memory.view(30, 1)[:8].mT, bias=memory[1:9]), tmp_path)
    assert torch.equal(found.A.parts[0, 1].values, memory[2:6]) and torch.equal(found.bias, memory[1:9])
    assert torch.equal(found.C.matrix[0], memory[:8])


def test_memory_order_is_kept(tmp_path):
    weight = draw(4, 2, 3, 5).contiguous(memory_format=torch.channels_last)
    found = again(around(Convolution(weight, (2, 6, 7), (1, 1), (1, 1), (1, 1))), tmp_path).D.weight
    assert torch.equal(found, weight) and found.stride() == weight.stride()


def test_expanded_and_strided_tensors(tmp_path):
    wide = draw(1, 3).expand(4, 3)
    sliced = draw(8, 6)[::2, ::2]
    found = again(ImplicitForm(torch.zeros(4, 4, dtype=F64), wide, sliced.mT), tmp_path)
    assert torch.equal(found.B.matrix, wide) and torch.equal(found.C.matrix, sliced.mT)


def test_strange_numbers_keep_their_bits(tmp_path):
    strange = torch.tensor([math.nan, math.inf, -0.0, 5e-324], dtype=F64)
    found = again(around(Diagonal(strange)), tmp_path)
    assert torch.equal(bits(found.D.values), bits(strange))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_kept(dtype, tmp_path):
    assert again(layered_form().to(dtype), tmp_path).dtype == dtype


def test_gradients_are_left_behind(tmp_path):
    weight = torch.nn.Parameter(draw(3, 3))
    assert not again(around(Dense(weight)), tmp_path).D.matrix.requires_grad


def test_models_are_still_models(tmp_path):
    model = ImplicitModel(3, 2, 4)
    assert isinstance(again(model, tmp_path), ImplicitModel)
    form = again(model.form(), tmp_path)
    assert isinstance(form, ImplicitForm) and torch.equal(form.A.matrix, model.A)


def test_an_unregistered_activation_is_refused(tmp_path):
    form = ImplicitForm(
        torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), activation=Activation("odd", torch.sin)
    )
    with pytest.raises(InputError, match="'odd' is not registered"):
        wellposed.save(form, tmp_path / "form.safetensors")
    impostor = Activation("tanh", lambda z: z / (1 + z.abs()))
    with pytest.raises(InputError, match="not the registered activation"):
        wellposed.save(form.replaced(activation=impostor), tmp_path / "form.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_activation_must_be_registered_where_it_is_loaded(tmp_path):
    own = register_activation(Activation("third", lambda z: z / 3, (1 / 3, 1 / 3)))
    form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), activation=own)
    assert again(form, tmp_path).activation is own
    del ACTIVATIONS.factories["third"]
    with pytest.raises(UnknownNameError, match="third"):
        wellposed.load(tmp_path / "form.safetensors")


def test_an_operator_of_ones_own_is_refused(tmp_path):
    class Odd(Dense):
        pass

    with pytest.raises(InputError, match="D: Odd is not one of the library's operators"):
        wellposed.save(around(Odd(draw(2, 2))), tmp_path / "form.safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    form = layered_form()
    again(form, tmp_path)
    before = (tmp_path / "form.safetensors").read_bytes()

    def fail(place, tensors, metadata):
        place.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(storage, "write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        wellposed.save(form.rescale(0.5), tmp_path / "form.safetensors")
    assert (tmp_path / "form.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def damaged(tmp_path, change):
    """Writes a form whose header or tensors were changed."""
    again(layered_form(), tmp_path)
    with safe_open(tmp_path / "form.safetensors", framework="pt") as file:
        metadata = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["form"])
    change(header, found)
    metadata["form"] = json.dumps(header)
    save_file(found, tmp_path / "damaged.safetensors", metadata=metadata)
    return tmp_path / "damaged.safetensors"


DAMAGE = {
    "no matrix": lambda header, found: header.pop("A"),
    "no tensor": lambda header, found: found.pop("bias"),
    "wrong shape": lambda header, found: found.update(bias=torch.zeros(3, dtype=F64)),
    "unknown operator": lambda header, found: header["A"].update(operator="Tensor"),
    "foreign code": lambda header, found: header["A"].update(operator="os.system"),
    "unknown field": lambda header, found: header["A"].update(colour=1),
    "wrong block": lambda header, found: header["A"]["parts"]["dict"][0].__setitem__(0, {"tuple": [7, 0]}),
    "another type": lambda header, found: header.update(dtype="float32"),
    "no meaning": lambda header, found: header["D"].update(matrix={"pickle": "gASV"}),
    "too few labels": lambda header, found: header["labels"].pop(),
    "not a tree": lambda header, found: header.update(A=[1, 2]),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_reported(change, tmp_path):
    with pytest.raises(FileFormatError, match=r"damaged\.safetensors"):
        wellposed.load(damaged(tmp_path, change))


def test_strangers_and_torn_files(tmp_path):
    again(layered_form(), tmp_path)
    whole = (tmp_path / "form.safetensors").read_bytes()
    for name, content in {"torn": whole[:-9], "short": whole[:40], "empty": b"", "text": b"hello, world"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match="not a safetensors file or is damaged"):
            wellposed.load(tmp_path / name)
    save_file({"A": torch.zeros(2)}, tmp_path / "stranger", metadata={"format": "pt"})
    with pytest.raises(FileFormatError, match="not written by wellposed"):
        wellposed.load(tmp_path / "stranger")
    with pytest.raises(FileNotFoundError):
        wellposed.load(tmp_path / "nowhere")
