"""Noise in models: its strength, its place, its draws."""

import math

import pytest
import torch
from torch import Tensor, nn

from wellposed import DEQ, ImplicitModel, MeanRelative, MultiscaleDEQ, Picard, Relative, Steps
from wellposed.equilibrium import RobbinsMonro, Status
from wellposed.errors import InputError
from wellposed.models import DenseCell, PlainConvCell, RecallCell
from wellposed.models.noise import Disturbance, Noise, signal_points
from wellposed.models.noisy import Noisy

MANY = 4000


def _ratio(noise: Noise, x: Tensor) -> float:
    """Returns the measured ratio of powers in decibels."""
    added = Disturbance(noise, x.shape[0]).state(x) - x
    return 10 * math.log10(float(x.square().sum() / added.square().sum()))


@pytest.mark.parametrize("decibels", [-10.0, 0.0, 20.0])
@pytest.mark.parametrize("shape", [(50,), (3, 5, 5)])
def test_ratio_is_one_of_powers(decibels: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MANY, *shape, generator=generator)
    assert _ratio(Noise(state=decibels, generator=generator), x) == pytest.approx(decibels, abs=0.1)
    printed = Noise(state=decibels, literal=True, generator=generator)
    assert _ratio(printed, x) == pytest.approx(decibels - 10 * math.log10(math.prod(shape)), abs=0.1)


def test_every_sample_has_its_own_strength_and_additive_noise_ignores_it() -> None:
    sizes = torch.tensor([0.0, 1.0, 100.0])[:, None]
    x = sizes * torch.ones(3, 20_000)
    generator = torch.Generator().manual_seed(1)
    added = Disturbance(Noise(state=20.0, generator=generator), 3).state(x) - x
    torch.testing.assert_close(added.std(1), torch.tensor([0.0, 0.1, 10.0]), rtol=0.05, atol=0)
    added = Disturbance(Noise(state=20.0, kind="additive", generator=generator), 3).state(x) - x
    torch.testing.assert_close(added.std(1), torch.full((3,), 0.1), rtol=0.05, atol=0)


def test_draws_are_anew_or_held_and_reproducible() -> None:
    x = torch.ones(4, 6)

    def twice(redraw: bool) -> list[Tensor]:
        disturbance = Disturbance(Noise(state=0, redraw=redraw, generator=torch.Generator().manual_seed(2)), 4)
        draws = []
        for _ in range(2):
            disturbance.begin()
            draws.append(disturbance.state(x))
        return draws

    assert torch.equal(*twice(redraw=False)) and not torch.equal(*twice(redraw=True))
    assert torch.equal(twice(redraw=True)[1], twice(redraw=True)[1])


def test_two_places_of_one_step_do_not_share_a_held_draw() -> None:
    disturbance = Disturbance(Noise(signal=0, redraw=False), 4)
    x = torch.ones(4, 6)
    disturbance.begin()
    assert not torch.equal(disturbance.signal(x), disturbance.signal(x))


def test_a_sample_keeps_its_draws_when_others_leave() -> None:
    x, rows = torch.ones(5, 3), torch.tensor([1, 4])
    draws = []
    for part, chosen in ((x, None), (x[rows], rows)):
        disturbance = Disturbance(Noise(state=0, generator=torch.Generator().manual_seed(3)), 5)
        disturbance.begin(chosen)
        draws.append(disturbance.state(part))
    assert torch.equal(draws[0][rows], draws[1])


CELLS = {
    "dense": (lambda: DenseCell(3, 8), (3,)),
    "convolution": (lambda: PlainConvCell(2, 4), (2, 9)),
    "recall": (lambda: RecallCell(2, 4, dims=2), (2, 5, 5)),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("place", ["signal", "state", "input"])
def test_noise_reaches_every_place_of_a_cell_and_infinite_ratios_are_silent(name: str, place: str) -> None:
    torch.manual_seed(0)
    make, shape = CELLS[name]
    deq = DEQ(make(), solver=Picard(), stop=Steps(6))
    u = torch.randn(4, *shape)
    quiet = deq(u)
    deq.noise = Noise(**{place: math.inf})
    assert torch.equal(deq(u), quiet)
    deq.noise = Noise(**{place: 10.0})
    assert not torch.allclose(deq(u), quiet, atol=1e-4)
    deq.noise = None
    assert torch.equal(deq(u), quiet)


def test_one_step_of_a_dense_cell_is_the_formula() -> None:
    torch.manual_seed(0)
    cell = DenseCell(3, 500)
    noise = Noise(signal=0.0, generator=torch.Generator().manual_seed(4))
    found = DEQ(cell, solver=Picard(), stop=Steps(1), noise=noise)(u := torch.randn(200, 3))
    signal = cell.layers[0](torch.zeros(200, 500)) + cell.inject(u)
    draw = torch.randn(200, 500, generator=torch.Generator().manual_seed(4))
    deviation = signal.norm(dim=1, keepdim=True) / math.sqrt(500)
    torch.testing.assert_close(found, torch.tanh(signal + deviation * draw))


def test_mean_relative_stops_where_relative_cannot() -> None:
    torch.manual_seed(0)
    cell, u = DenseCell(3, 100), torch.randn(16, 3)
    options = {"solver": Picard(), "max_steps": 60, "on_failure": "ignore"}
    noise = Noise(state=20.0, generator=torch.Generator().manual_seed(0))
    mean = DEQ(cell, stop=MeanRelative(0.02, 10), noise=noise, **options).equilibrium(u)
    assert bool(mean.converged.all())
    plain = DEQ(cell, stop=Relative(0.02, norm="2"), noise=noise, **options).equilibrium(u)
    assert bool((plain.status == Status.MAX_STEPS).all())
    exact = DEQ(cell).equilibrium(u).value
    assert float((mean.value - exact).norm() / exact.norm()) < 0.05


def test_gradients_pass_through_a_noisy_solve() -> None:
    torch.manual_seed(0)
    deq = DEQ(DenseCell(3, 20), solver=RobbinsMonro(), stop=MeanRelative(0.05, 8), noise=Noise(20.0), max_steps=80)
    u = torch.randn(8, 3, requires_grad=True)
    deq(u).square().sum().backward()
    assert u.grad is not None and bool(u.grad.isfinite().all()) and float(u.grad.norm()) > 0


def test_noisy_implicit_model_averages_to_the_quiet_one() -> None:
    torch.manual_seed(0)
    model = ImplicitModel(3, 2, 12, stop=MeanRelative(0.01, 40), solver="picard", max_steps=400).double()
    u = torch.randn(20, 3, dtype=torch.float64)
    noisy = Noisy(model, Noise(signal=30.0, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        found, quiet = noisy.equilibrium(u), model.equilibrium(u)
    assert bool(found.converged.all()) and not torch.equal(found.value, quiet.value)
    assert float((found.value - quiet.value).norm() / quiet.value.norm()) < 0.05
    torch.testing.assert_close(Noisy(model, Noise())(u), model(u))


def test_feed_forward_networks_are_disturbed_between_layers() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 2))
    u = torch.randn(6, 3)
    draws = torch.Generator().manual_seed(5)
    noisy = Noisy(network, Noise(state=10.0, generator=torch.Generator().manual_seed(5)))(u)
    z = network[1](network[0](u))
    z = z + z.norm(dim=1, keepdim=True) / math.sqrt(50 * 10) * torch.randn(6, 50, generator=draws)
    torch.testing.assert_close(noisy, network[4](network[3](network[2](z))))
    assert not network[1]._forward_hooks and not network[1]._forward_pre_hooks


def test_a_model_with_a_deq_inside_lends_its_noise_and_takes_it_back() -> None:
    torch.manual_seed(0)
    model = MultiscaleDEQ(1, 3, channels=(4, 4), head_channels=(4, 4), final_channels=8, groups=2,
                          solver="picard", stop=Steps(4)).eval()  # fmt: skip
    u = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert not torch.allclose(Noisy(model, Noise(signal=0.0))(u), model(u))
    assert model.deq.noise is None and len(signal_points(model.deq.cell)) >= 2


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="decibels"):
        Noise(signal=math.nan)
    with pytest.raises(InputError, match="kind"):
        Noise(kind="pink")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="literal"):
        Noise(kind="additive", literal=True)
    with pytest.raises(InputError, match="nonlinearities"):
        Noisy(nn.Linear(2, 2), Noise(signal=0.0))(torch.ones(1, 2))
    with pytest.raises(InputError, match="plain steps"):
        Noisy(ImplicitModel(2, 1, 3, condition="monotone"), Noise(signal=0.0))(torch.ones(1, 2))
    with pytest.raises(InputError, match="ImplicitModel"):
        Noisy(nn.Tanh(), Noise(signal=0.0)).equilibrium(torch.ones(1, 2))
