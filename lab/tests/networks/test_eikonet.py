"""EikoNet: size, structure and the linear skip."""

import torch
import torch.nn.functional as F
from wellposed_lab.networks.mlp import EikoNet, parameter_count


def test_parameter_counts():
    assert parameter_count(EikoNet()) == 42500
    assert parameter_count(EikoNet(270)) == 50180
    assert parameter_count(EikoNet(skip=True)) == 42500 + 30 * 4


def test_it_is_six_layers_with_a_residual_block():
    model, u = EikoNet(), torch.randn(7, 30)
    a, b, c, d, e, f = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    x = F.elu(b(F.elu(a(u))))
    x = F.elu(x + d(F.elu(c(x))))
    assert torch.allclose(model(u), f(F.elu(e(x))))


def test_the_skip_is_linear_and_extrapolates():
    model = EikoNet(skip=True).double()
    plain = EikoNet().double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("skip")})
    u = torch.randn(7, 30, dtype=torch.float64)
    assert torch.allclose(model(u) - plain(u), u @ model.skip.weight.mT)
