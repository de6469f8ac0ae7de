import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellposed.activations import Activation, get_activation, rescaled
from wellposed.activations.blockwise import piecewise
from wellposed.errors import InputError

COMPONENTWISE = ["relu", "tanh", "leaky_relu(0.2)", "sigmoid", "hardtanh(-2.0, 0.5)", "softplus(2.0)", "identity"]
BLOCKWISE = ["max_pool(2)", "group_sort(2)", "softmax(2)", "softmax", "multiply(1.0, 2.0)", "normalise(2, 0.1)"]


def points(size, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(5, size, generator=generator, dtype=torch.float64)


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(COMPONENTWISE + BLOCKWISE), st.integers(1, 2)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1000),
)
def test_every_piece_gets_its_own_map(parts, seed):
    activations = [get_activation(name) for name, _ in parts]
    sizes = [2 * half for _, half in parts]
    phi, z = piecewise(activations, sizes), points(sum(sizes), seed)
    expected, start = [], 0
    for activation, size in zip(activations, sizes, strict=True):
        expected.append(activation(z[:, start : start + size]))
        start += size
    torch.testing.assert_close(
        phi(z), torch.cat(expected, 1), rtol=1e-14, atol=1e-15
    )  # vector units round otherwise
    image = phi(points(sum(sizes), seed, 30.0))
    assert phi.image[0] <= image.min() and image.max() <= phi.image[1]
    if phi.componentwise:
        assert torch.allclose(phi.slope_at(z), slopes(phi, z), atol=1e-12)
    else:
        with pytest.raises(InputError, match="Jacobian"):
            phi.slope_at(z)


def slopes(phi, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(phi(z).sum(), z)[0]


@pytest.mark.parametrize(
    ("names", "block"),
    [
        (["relu", "tanh"], None),
        (["relu", "relu"], None),
        (["relu", "max_pool(2)"], 0),
        (["max_pool(2)", "max_pool(2)"], 2),
        (["softmax", "softmax"], 0),
        (["softmax(2)", "tanh"], 0),
    ],
)
def test_declares_what_is_true_of_the_whole(names, block):
    sizes = [2, 4]
    phi = piecewise([get_activation(name) for name in names], sizes)
    assert phi.block == block
    assert set(phi.constants) == {"1", "2", "inf"}
    for seed in range(40):
        jacobian = torch.func.jacrev(phi.function)(points(6, seed, 10.0 ** (seed % 3 - 1))[0])
        for norm, constant in phi.constants.items():
            assert torch.linalg.matrix_norm(jacobian, float(norm)) <= constant * (1 + 1e-12)


def test_takes_the_worst_of_each_constant():
    parts = [get_activation("selu"), get_activation("sigmoid"), get_activation("leaky_relu(-0.5)")]
    phi = piecewise(parts, [1, 1, 1])
    assert phi.slope == (-0.5, parts[0].slope[1])
    assert phi.constants == {norm: parts[0].slope[1] for norm in ("1", "2", "inf")}
    assert phi.rounding == max(part.rounding for part in parts)
    assert phi.image == (parts[0].image[0], math.inf) and not phi.homogeneous and not phi.projection
    assert piecewise([get_activation("sigmoid"), get_activation("tanh")], [1, 1]).image == (-1.0, 1.0)
    both = piecewise([get_activation("relu"), get_activation("identity")], [1, 1])
    assert both.homogeneous and both.projection


def test_maps_without_a_common_norm_have_no_constant():
    first = Activation("first", torch.relu, block=1, constants={"2": 1.0})
    second = Activation("second", torch.relu, block=2, constants={"inf": 1.0})
    assert piecewise([first, second], [1, 2]).lipschitz() == math.inf


def test_names_tell_the_pieces():
    relu, tanh = get_activation("relu"), get_activation("tanh")
    assert piecewise([relu, relu, tanh, relu], [1, 2, 3, 4]).name == "relu[3] tanh[3] relu[4]"
    many = piecewise([relu, tanh] * 4, [1] * 8).name
    assert many == "relu[1] tanh[1] relu[1] ... 5 more"
    assert piecewise([relu], [3]) is relu and piecewise([relu, relu], [3, 1]) is relu
    scaled = piecewise([rescaled("tanh", 2), tanh], [1, 1])
    assert scaled(torch.tensor([8.0, 8.0])).tolist() == pytest.approx([4 * math.tanh(2), math.tanh(8)])
