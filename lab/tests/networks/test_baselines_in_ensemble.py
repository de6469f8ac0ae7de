"""Baselines as members of an Ensemble: values and gradients are those of each alone."""

import functools

import pytest
import torch
from wellposed_lab.networks.mlp import MLP, MLP_ACTIVATIONS, EikoNet
from wellposed_lab.networks.nalu import INALU, NAC, NALU
from wellposed_lab.networks.recurrent import LSTM, ReLURNN
from wellposed_lab.networks.resnet import ResNet
from wellposed_lab.networks.simple import LinearRegression
from wellposed_lab.networks.transformers import ArgmaxTransformer, ArrayEncoder, ArrayTransformer, SequenceEncoder
from wellposed_lab.networks.twins import ConvNet, FeedForward

from wellposed.errors import InputError
from wellposed.models import Ensemble

KINDS = {
    **{f"MLP {name}": functools.partial(MLP, [5, 7, 2], name) for name in MLP_ACTIVATIONS},
    "MLP skip": lambda: MLP([5, 7, 2], skip=True),
    "linear": lambda: LinearRegression(5, 2),
    "NAC": lambda: NAC([5, 3, 2]),
    "NALU": lambda: NALU([5, 3, 2]),
    "iNALU": lambda: INALU([5, 3, 2]),
    "LSTM": lambda: LSTM(1, 4, 2, normalise="max"),
    "RNN": lambda: ReLURNN(1, 4, 2),
    "sequence encoder": lambda: SequenceEncoder(5, 2, width=4, heads=2, feedforward=8, causal=True, dropout=0.0),
    "array encoder": lambda: ArrayEncoder(5, 2, feedforward=8, dropout=0.0),
    "array transformer": lambda: ArrayTransformer(5, 2, dropout=0.0),
    "argmax transformer": lambda: ArgmaxTransformer(5, heads=1, dropout=0.0),
    "EikoNet": lambda: EikoNet(5, 2, narrow=4, wide=6, skip=True),
    "feed-forward": lambda: FeedForward(5, 2, width=4, depth=3, inject=True),
    "tied feed-forward": lambda: FeedForward(5, 2, width=4, depth=3, tied=True),
}


def compare(ensemble, u, **keywords):
    y = ensemble(u, **keywords)
    y.square().sum().backward()
    for index in range(len(ensemble)):
        member = ensemble.member(index)
        alone = member(u)
        alone.square().sum().backward()
        assert torch.allclose(y[index], alone, rtol=1e-9, atol=1e-9)
        for name, parameter in member.named_parameters():
            stacked = ensemble.stacked.get_parameter(name).grad[index]
            assert torch.allclose(stacked, parameter.grad, rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_members_alone(kind):
    ensemble = Ensemble.of(KINDS[kind], seeds=[3, 1]).double()
    compare(ensemble, torch.rand(7, 5, dtype=torch.float64) + 0.5)


def test_residual_networks_join_too():
    ensemble = Ensemble.of(lambda: ResNet(8, 3, in_channels=1), seeds=[3, 1]).double().eval()
    compare(ensemble, torch.randn(2, 1, 8, 8, dtype=torch.float64), shared=True)


def test_weight_normalised_filters_do_not_join():
    u = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    plain = functools.partial(ConvNet, 1, channels=4, final_channels=6, weight_norm=False)
    compare(Ensemble.of(plain, seeds=[3, 1]).double().eval(), u, shared=True)
    with pytest.raises(InputError, match="of an Ensemble differ in"):
        Ensemble.of(lambda: ConvNet(1, channels=4), seeds=[3, 1])


def test_dropout_differs_between_members():
    model = SequenceEncoder(5, 2, width=4, heads=2, feedforward=8)
    y = Ensemble([model, model])(torch.randn(7, 5))
    assert not torch.allclose(y[0], y[1])
