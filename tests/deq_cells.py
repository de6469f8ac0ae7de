"""Small cells for tests of equilibrium modules."""

import torch
from torch import nn


class Cell(nn.Module):
    """tanh(Wx + Vu + b), optionally with a layer applied to the state first."""

    def __init__(self, layer=None, width=4, inputs=3, scale=0.5):
        super().__init__()
        self.state, self.input = nn.Linear(width, width, bias=False), nn.Linear(inputs, width)
        self.layer = nn.Identity() if layer is None else layer
        with torch.no_grad():
            self.state.weight.mul_(scale / torch.linalg.matrix_norm(self.state.weight, 2))

    def forward(self, x, u):
        return torch.tanh(self.state(self.layer(x)) + self.input(u))


class Pair(nn.Module):
    """A state of two parts and shapes, and an input of two parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.4))

    def state_shape(self, u):
        return (2, 3), ()

    def forward(self, x, u):
        (a, b), (v, w) = x, u
        return torch.tanh(self.weight * a + v), self.weight * torch.sin(b) + w + a.mean((1, 2))
