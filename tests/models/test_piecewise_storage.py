"""Saving models whose activation differs from block to block."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from wellposed import ImplicitModel, load, save
from wellposed.activations import Activation, get_activation
from wellposed.activations.blockwise import piecewise
from wellposed.convex import fit_states, record_states
from wellposed.errors import FileFormatError, InputError

WIDE = torch.float64


def built(*activations: Activation, sizes=(3, 2, 1)) -> ImplicitModel:
    A = torch.full((6, 6), 0.1, dtype=WIDE)
    B, C = torch.randn(6, 2, dtype=WIDE), torch.randn(1, 6, dtype=WIDE)
    return ImplicitModel.from_matrices(A, B, C, activation=piecewise(activations, sizes), kappa=0.8)


def parts(*names: str) -> list[Activation]:
    return [get_activation(name) for name in names]


@pytest.mark.parametrize(
    "names",
    [("rescaled('tanh', -4.0)", "tanh", "identity"), ("gelu", "leaky_relu(0.25)", "rescaled('gelu', 2.5)")],
)
def test_parts_come_back_with_units_and_certificate(names, tmp_path):
    model, u = built(*parts(*names)), torch.randn(5, 2, dtype=WIDE)
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert torch.equal(again(u), model(u)) and again.activation.name == model.activation.name
    assert again.activation.image == model.activation.image and again.activation.slope == model.activation.slope
    assert again.certificate().holds and again.certificate() == model.certificate()
    again(u).sum().backward()


@pytest.mark.parametrize("layer", [nn.Tanh, nn.Sigmoid])
def test_fitted_models_in_units_of_their_own(layer, tmp_path):
    network = nn.Sequential(nn.Linear(3, 6), layer(), nn.Linear(6, 5), layer(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        network[2].weight *= 40
    u = torch.randn(60, 3, dtype=WIDE)
    model, _ = fit_states(record_states(network, [u]), kappa=0.5)
    assert "rescaled" in model.activation.name
    save(model, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path / "model.safetensors")(u), model(u))


def test_an_unregistered_part_is_named(tmp_path):
    mine = Activation("mine", lambda z: z.clamp(-2, 2), (0.0, 1.0))
    with pytest.raises(InputError, match="'mine' is not registered"):
        save(built(*parts("relu", "tanh"), mine), tmp_path / "model.safetensors")


@pytest.mark.parametrize("change", [{"sizes": [3, 2, 2]}, {"parts": ["relu", "tanh"]}, {"sizes": None}])
def test_parts_that_do_not_fit_are_reported(change, tmp_path):
    place = tmp_path / "model.safetensors"
    save(built(*parts("relu", "tanh", "identity")), place)
    with safe_open(place, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    config["activation"] |= change
    save_file(tensors, place, metadata={"format": "wellposed-1", "config": json.dumps(config)})
    with pytest.raises(FileFormatError, match=r"do not make up|does not fit"):
        load(place)
