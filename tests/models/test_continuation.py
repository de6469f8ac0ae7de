import pytest
import torch
from torch import nn

from wellposed import ImplicitModel
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import ImplicitForm, Zero


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


NETWORKS = {
    "relu": lambda: network(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)),
    "no bias": lambda: network(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)),
    "tanh": lambda: network(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
    "gelu": lambda: network(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)),
    "mixed": lambda: network(nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_goes_on_training_as_a_model(name):
    source, u = NETWORKS[name](), torch.randn(7, 3, dtype=torch.float64)
    model = to_implicit(source, (3,)).to_model()
    torch.testing.assert_close(model(u), source(u), rtol=1e-9, atol=1e-9)
    assert model.certificate().condition == "inf" and model.certificate().holds
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    before = model(u).square().mean()
    for _ in range(5):
        optimiser.zero_grad()
        model(u).square().mean().backward()
        optimiser.step()
    assert model(u).square().mean() < before and model.certificate().holds
    feedback = model.A.detach().tril().abs().max()
    assert feedback > 0


def test_large_weights_are_rescaled_and_small_ones_left_alone():
    A = torch.tensor([[0.0, 8.0], [0.0, 0.0]])
    form = ImplicitForm(A, torch.eye(2), torch.ones(1, 2))
    assert float(form.to_model().A.detach().abs().sum(1).max()) < 0.95
    assert float(form.to_model(kappa=0.3).A.detach().abs().sum(1).max()) < 0.3
    assert torch.equal(form.to_model(feedback=False).A, A)
    small = ImplicitForm(A / 16, torch.eye(2), torch.ones(1, 2))
    assert torch.equal(small.to_model().A, A / 16)


def test_a_model_comes_back_as_it_was():
    model = ImplicitModel(3, 2, 5, bias=True)
    assert torch.equal(model.form().to_model().A, model.A)
    loop = ImplicitForm(torch.tensor([[0.97]]), torch.ones(1, 1), torch.ones(1, 1))
    assert float(ImplicitModel.from_form(loop).A.detach()) == pytest.approx(0.97)


def test_what_cannot_become_a_model():
    wide = Zero((10**6, 10**6))
    with pytest.raises(InputError, match="GiB"):
        ImplicitForm(wide, Zero((10**6, 2)), Zero((1, 10**6))).to_model()
    with pytest.raises(InputError, match="no states"):
        to_implicit(nn.Linear(3, 2), (3,)).to_model()
    with pytest.raises(IllPosedError):
        ImplicitForm(torch.tensor([[1.5]]), torch.ones(1, 1), torch.ones(1, 1)).to_model()
