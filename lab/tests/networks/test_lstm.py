"""The LSTM: torch's own layer is the oracle, the normalisations take away what they say."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.recurrent import LSTM

from wellposed.errors import InputError, UnknownNameError


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_of_torch_with_a_readout(bias):
    model = LSTM(3, 6, 2, output="sequence", bias=bias)
    twin = nn.LSTM(3, 6, bias=bias, batch_first=True)
    twin.load_state_dict({f"{name}_l0": value for name, value in model.cell.state_dict().items()})
    u = torch.randn(7, 5, 3)
    assert torch.allclose(model(u), model.readout(twin(u)[0]), atol=1e-6)
    assert model(u).shape == (7, 5, 2)


@pytest.mark.parametrize(
    ("sizes", "count"), [((1, 100, 10), 42210), ((1, 19, 10), 1872), ((1, 20, 1), 1861), ((1, 38, 1), 6271)]
)
def test_parameter_counts(sizes, count):
    assert parameter_count(LSTM(*sizes)) == count


def test_outputs():
    u = torch.randn(7, 5)
    last, sequence = LSTM(1, 4, 1), LSTM(1, 4, 1, output="sequence")
    sequence.load_state_dict(last.state_dict())
    assert last(u).shape == (7, 1)
    assert sequence(u).shape == (7, 5)
    assert sequence(u[..., None]).shape == (7, 5, 1)
    assert torch.equal(sequence(u)[:, -1:], last(u))
    with pytest.raises(InputError, match="must be \\(B, T, 1\\) or \\(B, T\\)"):
        last(torch.randn(7, 5, 2))
    with pytest.raises(UnknownNameError, match="did you mean 'last'"):
        LSTM(1, 4, 1, output="lasst")


def test_subtracting_the_first_element_makes_it_equivariant_to_translations():
    u = torch.randn(7, 10, dtype=torch.float64)
    plain = LSTM(1, 6, 1, output="sequence").double()
    model = LSTM(1, 6, 1, output="sequence", normalise="first").double()
    model.load_state_dict(plain.state_dict())
    assert torch.allclose(model(u + 100), model(u) + 100)
    assert not torch.allclose(plain(u + 100), plain(u) + 100)
    first = u[:, :1]
    assert torch.allclose(model(u), plain(u - first) + first)


def test_dividing_by_the_maximum_makes_logits_invariant_to_scale():
    u = torch.randn(7, 10, dtype=torch.float64)
    model = LSTM(1, 6, 10, normalise="max", restore=False).double()
    plain = LSTM(1, 6, 10).double()
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(model(1e4 * u), model(u))
    assert torch.allclose(model(u), plain(u / u.abs().amax(1, keepdim=True)))
    assert not torch.allclose(plain(1e4 * u), plain(u))


def test_a_restored_scale_makes_it_homogeneous():
    u = torch.randn(7, 10, dtype=torch.float64)
    model = LSTM(1, 6, 1, normalise="max").double()
    assert torch.allclose(model(50 * u), 50 * model(u))
    assert model(torch.zeros_like(u)).isfinite().all()


def test_first_without_restoring_is_invariant():
    u = torch.randn(7, 10, 3, dtype=torch.float64)
    model = LSTM(3, 6, 2, normalise="first", restore=False).double()
    assert torch.allclose(model(u + 100), model(u))
    with pytest.raises(InputError, match="restore=False"):
        LSTM(3, 6, 2, normalise="first")
    with pytest.raises(UnknownNameError, match="did you mean 'first'"):
        LSTM(1, 6, 1, normalise="frist")


@pytest.mark.parametrize("bias", [True, False])
def test_its_steps_under_vmap_are_those_of_the_kernel(bias):
    model = LSTM(1, 6, 2, bias=bias).double()
    u = torch.randn(7, 10, dtype=torch.float64)
    state = {name: torch.stack([value, 2 * value]) for name, value in model.named_parameters()}
    both = vmap(lambda state: functional_call(model, state, (u,)))(state)
    assert torch.allclose(both[0], model(u))
    doubled = functional_call(model, {name: value[1] for name, value in state.items()}, (u,))
    assert torch.allclose(both[1], doubled)
    assert not torch.allclose(both[0], both[1])
