import pytest
import torch
from torch import nn
from wellposed_lab.networks.resnet import ResNet

from wellposed import ImplicitModel, feedback, series, to_implicit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NETWORKS = {
    "residual": (lambda: ResNet(), (3, 32, 32)),
    "pooled": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()), (1, 8, 8)),
    "recurrent": (lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True), (5, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (6, 8)),
    "implicit": (lambda: nn.Sequential(nn.Linear(3, 4), ImplicitModel(4, 5, 6), nn.ReLU()), (3,)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_forms_live_where_the_network_lives(name):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    network = build().double().eval().cuda()
    form, u = to_implicit(network, shape), torch.randn(4, *shape, dtype=torch.float64, device="cuda")
    y = network(u)
    expected = (y[0] if isinstance(y, tuple) else y).flatten(1)
    assert form.device.type == "cuda"
    torch.testing.assert_close(form(u), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(form.to("cpu")(u.cpu()), expected.cpu(), rtol=1e-8, atol=1e-8)


def test_composition_and_rescaling_on_the_device():
    torch.manual_seed(0)
    f = to_implicit(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).cuda(), (3,))
    u = torch.randn(5, 3, device="cuda")
    chain = series(f, f)
    torch.testing.assert_close(chain(u), f(f(u)), rtol=1e-4, atol=1e-5)
    small = chain.rescale(0.5)
    assert torch.equal(small(u), chain(u)) and float(small.A.abs().row_sums().max()) < 0.5
    quiet = to_implicit(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).cuda(), (3,))
    quiet = quiet.replaced(C=quiet.C.scaled(0.05))
    loop = feedback(quiet)
    y = loop(u)
    torch.testing.assert_close(y, quiet(u + y), rtol=1e-4, atol=1e-4)
    assert loop.certificate().holds
