"""Models to attack whose weak points are known."""

import torch
from torch import nn

from wellposed import ImplicitModel
from wellposed.data import load_images
from wellposed.forms import ImplicitForm
from wellposed.training import fit

F64 = torch.float64


def linear(p=6, q=2):
    """A linear model ``y = Wu + c`` as a module, with its matrix."""
    model = nn.Linear(p, q).double()
    return model, model.weight.detach(), model.bias.detach()


def worst_margin(W, c, u, target, epsilon):
    """The largest lead of another class on the box cut to [0, 1], in closed form."""
    low, high = (u - epsilon).clamp(min=0), (u + epsilon).clamp(max=1)
    rows = W[None] - W[target][:, None]  # (B, q, p)
    lead = rows.clamp(min=0) @ high[:, :, None] + rows.clamp(max=0) @ low[:, :, None]
    lead = lead[:, :, 0] + c[None] - c[target][:, None]
    return lead.scatter(1, target[:, None], -torch.inf).amax(1)


def one_weak_entry(weak=2, p=5):
    """Class 0 wins while ``u_weak`` is above a half; the other entries hardly count."""
    B = 0.01 * torch.ones(2, p, dtype=F64)
    B[0, weak], B[1, weak] = 3.0, 0.0
    bias = torch.tensor([0.0, 1.5], dtype=F64)
    return ImplicitForm(torch.zeros(2, 2, dtype=F64), B, torch.eye(2, dtype=F64), bias=bias)


def digits(split, count):
    """Digits, flat, in [0, 1]."""
    images = load_images("digits", split).subset(count)
    return images.flat(), images.labels


def trained(kind="implicit", epochs=6, loss=nn.functional.cross_entropy, make=None):
    """A small model of the digits; `make` builds the loss from the model."""
    torch.manual_seed(0)
    if kind == "implicit":
        model: nn.Module = ImplicitModel(64, 10, 24, kappa=0.7)
    else:
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    u, y = digits("train", 600)
    fit(model, (u, y), loss if make is None else make(model), epochs=epochs, batch_size=100, progress=False)
    return model
