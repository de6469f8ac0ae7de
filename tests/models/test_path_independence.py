import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wellposed import ImplicitModel, Picard, Relative, Steps
from wellposed.errors import InputError
from wellposed.models.cells import DenseCell
from wellposed.models.deq import DEQ
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.norms import VariationalDropout
from wellposed.models.path_independence import path_independence


class Scalar(nn.Module):
    """x = tanh(slope x + u): two stable points for slope > 1 and small u, one for large u."""

    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x, u):
        return torch.tanh(self.slope * x + u)


class Rotation(nn.Module):
    """Turns the plane: from anywhere but zero, plain steps never settle."""

    def forward(self, x, u):
        return torch.stack([-x[:, 1], x[:, 0]], 1) + 0 * u


class Pair(nn.Module):
    def forward(self, x, u):
        return 0.5 * x[1] + u[0], torch.tanh(0.5 * x[0] + u[1])


def generator():
    return torch.Generator().manual_seed(0)


def test_contraction_is_independent():
    model = ImplicitModel(3, 2, 20, kappa=0.95).double()
    found = path_independence(model, torch.randn(10, 3).double(), generator=generator())
    assert found.independent.all() and found.converged.all() and found.starts == 6
    assert found.distance.max() < 1e-6 and found.alignment.min() > 1 - 1e-8


def test_two_stable_points_are_detected_sample_by_sample():
    u = torch.tensor([[0.0], [0.1], [-0.1], [5.0], [-5.0]]).double()
    found = path_independence(DEQ(Scalar(3.0), solver="picard"), u, starts=8, generator=generator())
    assert found.converged.all()
    assert found.independent.tolist() == [False, False, False, True, True]
    assert (found.distance[:3] > 0.9).all() and (found.distance[3:] < 1e-3).all()
    assert (found.alignment[1:3] == -1).all()  # points of opposite sign
    assert found.alignment[0] == 0  # from zero, zero is reached, which is unstable
    assert (found.alignment[3:] == 1).all()


def test_one_stable_point_is_not_blamed():
    u = torch.linspace(-2, 2, 9).double()[:, None]
    for dtype in (torch.float32, torch.float64):
        found = path_independence(DEQ(Scalar(0.9), solver="picard", max_steps=500), u.to(dtype), starts=8)
        assert found.independent.all() and found.distance.max() < 1e-3  # also where the point is zero


def test_random_starts_alone_detect_a_single_sample():
    found = path_independence(
        DEQ(Scalar(3.0), solver="picard"), torch.zeros(1, 1), starts=8, generator=generator()
    )
    assert found.starts == 9 and not found.independent.any()


def test_start_at_another_samples_equilibrium():
    u = torch.tensor([[0.3], [-5.0]]).double()  # the first has a positive point from zero, and a negative one
    tiny = path_independence(DEQ(Scalar(3.0), solver="picard"), u, starts=1, scale=1e-6, generator=generator())
    assert tiny.independent.tolist() == [False, True]
    assert path_independence(DEQ(Scalar(3.0), solver="picard"), u[:1], starts=1, scale=1e-6).independent.all()


def test_starts_have_the_size_of_the_equilibrium():
    inner, starts = DEQ(DenseCell(3, 400, projection="identity")), []

    def equilibrium(u, x0=None):
        starts.append(x0)
        return inner.equilibrium(u, x0)

    u = torch.randn(2, 3)
    path_independence(SimpleNamespace(equilibrium=equilibrium), u, starts=1, scale=3.0)
    reference = inner(u)
    size = reference.square().mean(1).sqrt()
    assert starts[0] is None and torch.equal(starts[2], reference.roll(1, 0))
    torch.testing.assert_close(starts[1].std(1), 3 * size, rtol=0.15, atol=0)


def test_failure_is_data():
    model = DEQ(Rotation(), solver=Picard(), max_steps=30, on_failure="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = path_independence(model, torch.zeros(3, 2), generator=generator())
    assert not found.converged.any() and not found.independent.any()
    assert model.on_failure == "raise"
    assert "3 without an equilibrium from some start" in str(found)


def test_counted_steps_are_no_equilibrium():
    found = path_independence(DEQ(DenseCell(3, 4), stop=Steps(30)), torch.randn(2, 3))
    assert found.distance.max() < 1e-3 and not found.converged.any() and not found.independent.any()


def test_tolerance_follows_the_residuals_or_the_caller():
    cell = Scalar(0.98)  # near u = 0 a residual of 1e-2 leaves points far apart
    u = torch.full((1, 1), 1e-2).double()
    loose = DEQ(cell, solver="picard", stop=Relative(3e-3), max_steps=1000)
    found = path_independence(loose, u, starts=8, generator=generator())
    assert 1e-3 < found.distance < 0.1 and found.independent.all()
    assert not path_independence(loose, u, starts=8, tolerance=1e-3, generator=generator()).independent.any()
    strict = DEQ(cell, solver="picard", stop=Relative(1e-10), max_steps=5000)
    assert path_independence(strict, u, starts=8, tolerance=1e-6).independent.all()


def test_states_in_parts():
    u = torch.randn(4, 3), torch.randn(4, 3)
    found = path_independence(DEQ(Pair()), u)
    assert found.independent.all() and found.distance.shape == (4,)


def test_multiscale_model():
    options = {"channels": (8, 8), "head_channels": (8, 8), "final_channels": 4, "groups": 2}
    model = MultiscaleDEQ(1, 3, stop=Relative(1e-6), max_steps=200, solver="anderson", **options)
    assert path_independence(model, torch.rand(3, 1, 8, 8), starts=2).independent.all()


def test_modes_are_given_back():
    cell = nn.Sequential()
    cell.drop, cell.rest = VariationalDropout(0.5), nn.Identity().eval()
    cell.forward = lambda x, u: cell.drop(0.5 * x + u)
    model = DEQ(cell)
    assert path_independence(model, torch.randn(4, 30)).independent.all()  # no mask is drawn
    assert model.training and cell.drop.training and not cell.rest.training


def test_same_generator_same_answer():
    model, u = DEQ(Scalar(3.0), solver="picard"), 0.1 * torch.randn(20, 1)
    one, two = (path_independence(model, u, starts=1, generator=generator()) for _ in range(2))
    assert torch.equal(one.distance, two.distance)


def test_any_object_with_an_equilibrium_will_do():
    inner = DEQ(Scalar(0.5))
    found = path_independence(SimpleNamespace(equilibrium=inner.equilibrium), torch.randn(2, 1))
    assert found.independent.all()


def test_zero_everywhere_is_aligned():
    class Half(nn.Module):
        def forward(self, x, u):
            return x * 0

    found = path_independence(DEQ(Half()), torch.zeros(2, 3))
    assert found.independent.all() and found.alignment.eq(1).all() and found.distance.eq(0).all()


def test_text():
    found = path_independence(
        DEQ(Scalar(3.0), solver="picard"), torch.tensor([[0.1], [5.0]]), generator=generator()
    )
    assert str(found).startswith("1 of 2 samples are path independent: over 6 starts, relative distance 2.0e+00")
    assert str(path_independence(DEQ(Scalar(0.5)), torch.zeros(0, 1))) == "empty batch"


@pytest.mark.parametrize("options", [{"starts": 0}, {"scale": 0.0}])
def test_misuse_is_named(options):
    with pytest.raises(InputError, match="at least one start and a positive scale"):
        path_independence(DEQ(Scalar(0.5)), torch.zeros(2, 1), **options)
