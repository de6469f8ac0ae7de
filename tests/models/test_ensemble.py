"""An Ensemble computes what its members compute alone."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from wellposed_lab.networks.mlp import MLP

from wellposed.equilibrium.stopping import Relative
from wellposed.errors import InputError
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel

TIGHT = Relative(rtol=1e-12)  # down to rounding: in float32 a looser rule may end a step sooner or later
KINDS = {
    "implicit": lambda: ImplicitModel(5, 2, 8, kappa=0.9, stop=TIGHT),
    "low rank": lambda: ImplicitModel(5, 2, 8, rank=3, bias=True, stop=TIGHT),
    "MLP": lambda: MLP([5, 7, 2]),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, u):
        return self.second(self.first(u))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_members_alone(kind, shared, dtype):
    ensemble = Ensemble.of(KINDS[kind], seeds=[3, 1, 4]).to(dtype)
    members = [ensemble.member(i) for i in range(3)]
    u = torch.randn(*([] if shared else [3]), 11, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    y = ensemble(u)
    y.square().mean((1, 2)).sum().backward()
    for i, member in enumerate(members):
        alone = member(u if shared else u[i])
        alone.square().mean().backward()
        assert torch.allclose(y[i], alone, rtol=0, atol=TOLERANCE[dtype])
        for name, parameter in member.named_parameters():
            stacked = ensemble.stacked.get_parameter(name)
            assert torch.allclose(stacked.grad[i], parameter.grad, rtol=0, atol=TOLERANCE[dtype]), name
        for name, buffer in member.named_buffers():
            assert torch.allclose(ensemble.stacked.get_buffer(name)[i].to(dtype), buffer.to(dtype)), name


def test_of_seeds_every_member_and_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    ensemble = Ensemble.of(lambda: nn.Linear(2, 2), seeds=(5, 6))
    assert torch.equal(torch.rand(1), expected)
    torch.manual_seed(6)
    assert torch.equal(nn.Linear(2, 2).weight, ensemble.member(1).weight)
    assert (len(ensemble), ensemble.seeds) == (2, (5, 6))


def test_members_are_copies():
    ensemble = Ensemble([nn.Linear(2, 2), nn.Linear(2, 2)])
    member = ensemble.member(-1)
    with torch.no_grad():
        member.weight.zero_()
    assert ensemble.stacked.weight[1].abs().min() > 0
    assert ensemble.member(0).weight.is_leaf
    assert ensemble.member(0).weight.requires_grad


def test_it_is_a_module_like_any_other():
    ensemble = Ensemble.of(KINDS["implicit"], seeds=range(2))
    u = torch.randn(4, 5)
    assert sorted(ensemble.state_dict()) == ["stacked.B", "stacked.C", "stacked.D", "stacked.state.raw"]
    assert all(len(parameter) == 2 for parameter in ensemble.parameters())
    other = Ensemble.of(KINDS["implicit"], seeds=range(5, 7))
    other.load_state_dict(ensemble.state_dict())
    for twin in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble)), other):
        assert torch.equal(twin(u), ensemble(u))
    assert ensemble.double()(u.double()).dtype == torch.float64
    assert ensemble.eval().stacked.training is False


def test_tied_parameters_stay_tied():
    ensemble = Ensemble([Tied(), Tied()])
    member = ensemble.member(1)
    assert ensemble.stacked.first.weight is ensemble.stacked.second.weight
    assert member.first.weight is member.second.weight
    u = torch.randn(4, 3)
    assert torch.allclose(ensemble(u)[1], member(u), atol=1e-6)


def test_dropout_differs_between_members():
    model = nn.Dropout(0.5)
    model.weight = nn.Parameter(torch.ones(1))
    y = Ensemble([model, model])(torch.ones(1, 64))
    assert not torch.equal(y[0], y[1])


def test_project_moves_every_member():
    ensemble = Ensemble.of(KINDS["implicit"], seeds=range(3))
    with torch.no_grad():
        ensemble.stacked.state.raw.mul_(50)
    matrices = [ensemble.member(i).A for i in range(3)]
    before = ensemble.stacked.state.raw.clone()
    assert ensemble.project_() is ensemble
    assert torch.equal(ensemble.stacked.state.raw, torch.stack(matrices))
    assert not torch.equal(ensemble.stacked.state.raw, before)


def test_project_needs_members_that_can():
    with pytest.raises(InputError, match="Linear has no project_"):
        Ensemble([nn.Linear(1, 1)]).project_()


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([], "at least one"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "'out_features': 2 and 3"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], "'bias .*none"),
        ([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], "'class'"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).double()], "torch.float64"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], "requires_grad"),
        ([ImplicitModel(2, 1, 3, kappa=0.5), ImplicitModel(2, 1, 3, kappa=0.6)], "kappa.*0.5 and 0.6"),
        ([ImplicitModel(2, 1, 3), ImplicitModel(2, 1, 3, max_steps=7)], "'max_steps': None and 7"),
        ([MLP([2, 1]), MLP([2, 1], activation="tanh")], "activation"),
    ],
)
def test_different_modules_are_refused(models, complaint):
    with pytest.raises(InputError, match=complaint):
        Ensemble(models)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda x: x + 1, lambda x: x + 2, False),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=0), True),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=1), False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        ([1, {"a": 2}], [1, {"a": 2}], True),
        ([1, {"a": 2}], [1, {"a": 3}], False),
    ],
)
def test_other_attributes_are_compared_by_content(first, second, same):
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    models[0].extra, models[1].extra = first, second
    if same:
        Ensemble(models)
        return
    with pytest.raises(InputError, match="'extra'"):
        Ensemble(models)


def test_the_same_lambda_from_a_factory_is_accepted():
    def factory():
        model = nn.Linear(1, 1)
        model.extra = lambda x: x + 1
        return model

    assert len(Ensemble([factory(), factory()])) == 2


def test_inputs_are_checked():
    ensemble = Ensemble([nn.Linear(3, 2) for _ in range(4)])
    with pytest.raises(InputError, match="shared=True"):
        ensemble(torch.zeros(5, 6, 3))
    with pytest.raises(InputError, match="each of 4 members"):
        ensemble(torch.zeros(5, 6, 3), shared=False)
    assert ensemble(torch.zeros(4, 6, 3), shared=True).shape == (4, 4, 6, 2)
    with pytest.raises(IndexError, match="member 4 of an Ensemble of 4"):
        ensemble.member(4)
    with pytest.raises(InputError, match="as many seeds"):
        Ensemble([nn.Linear(1, 1)], seeds=[1, 2])
