"""The ReLU RNN: torch's own layer is the oracle; bias-free it is homogeneous."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from wellposed_lab.networks.recurrent import ReLURNN


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_of_torch_with_a_readout(bias):
    model = ReLURNN(3, 6, 2, output="sequence", bias=bias)
    twin = nn.RNN(3, 6, bias=bias, batch_first=True, nonlinearity="relu")
    twin.load_state_dict({f"{name}_l0": value for name, value in model.cell.state_dict().items()})
    u = torch.randn(7, 5, 3)
    assert torch.allclose(model(u), model.readout(twin(u)[0]), atol=1e-6)
    assert model(u).shape == (7, 5, 2)


@pytest.mark.parametrize("bias", [True, False])
def test_homogeneous_without_bias_only(bias):
    model = ReLURNN(1, 6, 2, bias=bias).double()
    u = torch.randn(7, 10, dtype=torch.float64)
    assert torch.allclose(model(1e5 * u), 1e5 * model(u), rtol=1e-9, atol=0) is not bias
    assert model(u).abs().max() > 0


@pytest.mark.parametrize("bias", [True, False])
def test_its_steps_under_vmap_are_those_of_the_kernel(bias):
    model = ReLURNN(1, 6, 2, bias=bias).double()
    u = torch.randn(7, 10, dtype=torch.float64)
    state = {name: torch.stack([value, -value]) for name, value in model.named_parameters()}
    both = vmap(lambda state: functional_call(model, state, (u,)))(state)
    assert torch.allclose(both[0], model(u))
    assert not torch.allclose(both[0], both[1])
