"""The transformers of the papers: sizes, causality, and what a width of one does."""

import pytest
import torch
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.transformers import (
    ArgmaxTransformer,
    ArrayEncoder,
    ArrayTransformer,
    SequenceEncoder,
    shifted_argmax,
)

from wellposed.errors import InputError, UnknownNameError


def test_parameter_counts():
    assert parameter_count(ArrayEncoder(10)) == 43498
    assert parameter_count(ArrayEncoder(50, 1)) == 217349
    assert parameter_count(SequenceEncoder(50, 1, width=1)) == 6208
    assert parameter_count(SequenceEncoder(10, 1, width=10, heads=10, head="step")) == 43529
    assert parameter_count(ArgmaxTransformer(10)) == 1920


def test_a_width_of_one_ignores_the_input():
    u = torch.randn(7, 50)
    blind = SequenceEncoder(50, 1, width=1).eval()
    assert torch.equal(blind(u), blind(100 * u + 3))
    seeing = SequenceEncoder(50, 1, width=10, heads=10, feedforward=50).eval()
    assert (seeing(u) - seeing(100 * u + 3)).abs().max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_encoder_does_not_look_ahead(causal):
    model = SequenceEncoder(10, 1, heads=2, head="step", output="sequence", causal=causal).eval()
    u = torch.randn(7, 10)
    changed = u.clone()
    changed[:, 6:] += 1
    difference = (model(u) - model(changed)).abs()
    assert (difference[:, :6].max() == 0).item() is causal
    assert difference[:, 6:].min() > 0


@pytest.mark.parametrize("position", [True, False])
def test_only_positions_tell_the_order(position):
    model = SequenceEncoder(10, 2, heads=2, head="step", output="sequence", position=position).eval()
    u = torch.randn(7, 10)
    order = torch.randperm(10)
    assert torch.allclose(model(u[:, order]), model(u)[:, order], atol=1e-5) is not position


def test_heads_and_outputs():
    u = torch.randn(7, 10)
    assert SequenceEncoder(10, 3, feedforward=8)(u).shape == (7, 3)
    assert SequenceEncoder(10, 3, feedforward=8, head="step")(u[:, :4]).shape == (7, 3)
    assert SequenceEncoder(10, 1, feedforward=8, head="step", output="sequence")(u).shape == (7, 10)
    assert SequenceEncoder(10, 3, in_features=2, feedforward=8)(torch.randn(7, 10, 2)).shape == (7, 3)
    with pytest.raises(InputError, match="reads 10 steps at once; received 4"):
        SequenceEncoder(10, 3, feedforward=8)(u[:, :4])
    with pytest.raises(UnknownNameError, match="did you mean 'flatten'"):
        SequenceEncoder(10, 3, head="flaten")


@pytest.mark.parametrize("make", [lambda: ArrayEncoder(10, 4), lambda: ArrayTransformer(10, 4)])
def test_an_array_is_one_token_so_samples_do_not_meet(make):
    model, u = make().eval(), torch.randn(7, 10)
    assert model(u).shape == (7, 4)
    assert torch.allclose(model(u)[2:3], model(u[2:3]), atol=1e-6)
    assert (model(u)[0] - model(u)[1]).abs().max() > 1e-3


def test_shifted_labels():
    u = torch.tensor([[0.2, 0.1, 0.9, 0.3, 1.0]])
    labels = shifted_argmax(u)
    assert labels[0, 0].sum() == 0
    assert labels[0, 1:].argmax(-1).tolist() == [0, 0, 2, 2]
    assert torch.equal(labels[0, 1:].sum(-1), torch.ones(4))


@pytest.mark.parametrize("masked", [True, False])
def test_a_masked_decoder_does_not_look_ahead(masked):
    model = ArgmaxTransformer(10, masked=masked, output="sequence").eval()
    u, target = torch.rand(7, 10), torch.rand(7, 10, 10)
    later, labels = u.clone(), target.clone()
    later[:, 6:] += 1
    labels[:, 6:] += 1
    for changed in (model(later, target), model(u, labels)):
        difference = (model(u, target) - changed).abs().amax((0, 2))
        assert (difference[:6].max() == 0).item() is masked
        assert difference[6:].min() > 0


def test_the_target_is_the_shifted_labels_unless_given():
    model, u = ArgmaxTransformer(10).eval(), torch.rand(7, 10)
    assert torch.equal(model(u), model(u, shifted_argmax(u)))
    assert (model(u) - model(u, torch.zeros(7, 10, 10))).abs().max() > 1e-4
    with pytest.raises(InputError, match="must have 10 steps; received 9"):
        model(u[:, 1:])


def test_without_positions_the_steps_of_the_source_are_a_set():
    model = ArgmaxTransformer(10, masked=False, position=False).eval()
    u, target = torch.rand(7, 10), torch.rand(7, 10, 10)
    shuffled = u[:, torch.randperm(10)]
    assert torch.allclose(model(shuffled, target), model(u, target), atol=1e-5)
    placed = ArgmaxTransformer(10, masked=False).eval()
    assert not torch.allclose(placed(shuffled, target), placed(u, target), atol=1e-5)
