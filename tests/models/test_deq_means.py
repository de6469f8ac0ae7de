"""A DEQ that stops by means over iterates, and the look at its first solve."""

import pytest
import torch
from torch import Tensor, nn

from wellposed import DEQ, MeanRelative
from wellposed.errors import MapError
from wellposed.models import DenseCell


def test_means_far_from_the_last_iterate_are_not_taken_for_coupling() -> None:
    torch.manual_seed(0)
    model = DEQ(DenseCell(3, 20), solver="picard", stop=MeanRelative(0.2, window=12))
    u = 3 * torch.randn(6, 3)
    assert bool(model.equilibrium(u).converged.all())
    assert model._independence_checked


def test_coupling_is_still_found() -> None:
    class Coupled(nn.Module):
        def forward(self, x: Tensor, u: Tensor) -> Tensor:
            return 0.5 * torch.tanh(x - x.mean(0)) + u - 3 * u.mean(0)

    with pytest.raises(MapError, match="depend on its batch"):
        DEQ(Coupled(), solver="picard")(torch.rand(4, 5) + 1)
