"""A network built from a function, and its comparison with its form."""

import torch
from torch import nn

from wellposed.convert import to_implicit


class Using(nn.Module):
    """A network that calls its modules by a function."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def equal_form(network, u, expected=None, tolerance=1e-10):
    """Converts a network and checks that its (first) output is that of the form."""
    network = network.to(u.dtype).eval()
    form = to_implicit(network, tuple(u.shape[1:]))
    with torch.no_grad():
        y = network(u) if expected is None else expected(u)
    y = y[0] if isinstance(y, tuple) else y
    torch.testing.assert_close(form(u), y.reshape(len(u), -1), rtol=0, atol=tolerance)
    return form
