"""Noise in models: its strength, its place, its draws."""

import math

import pytest
import torch
from torch import Tensor, nn

from wellposed import DEQ, ImplicitModel, MeanRelative, MultiscaleDEQ, Picard, Relative, Steps
from wellposed.equilibrium import RobbinsMonro, Status
from wellposed.errors import InputError, UnknownNameError
from wellposed.models import DenseCell, PlainConvCell, RecallCell
from wellposed.models.noise import SIGNAL, STATE, Noise, NoiseDraws, draw_seed, nonlinearities, normals
from wellposed.models.noisy import Noisy

MANY = 4000


def _ratio(noise: Noise, x: Tensor) -> float:
    """Returns the measured ratio of powers in decibels."""
    added = NoiseDraws(noise, x.shape[0]).state(x) - x
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
    added = NoiseDraws(Noise(state=20.0, generator=generator), 3).state(x) - x
    torch.testing.assert_close(added.std(1), torch.tensor([0.0, 0.1, 10.0]), rtol=0.05, atol=0)
    added = NoiseDraws(Noise(state=20.0, kind="additive", generator=generator), 3).state(x) - x
    torch.testing.assert_close(added.std(1), torch.full((3,), 0.1), rtol=0.05, atol=0)


def test_draws_are_anew_or_held_and_reproducible() -> None:
    x = torch.ones(4, 6)

    def twice(redraw: bool) -> list[Tensor]:
        disturbance = NoiseDraws(Noise(state=0, redraw=redraw, generator=torch.Generator().manual_seed(2)), 4)
        draws = []
        for _ in range(2):
            disturbance.begin()
            draws.append(disturbance.state(x))
        return draws

    assert torch.equal(*twice(redraw=False)) and not torch.equal(*twice(redraw=True))
    assert torch.equal(twice(redraw=True)[1], twice(redraw=True)[1])


def test_two_places_of_one_step_do_not_share_a_held_draw() -> None:
    disturbance = NoiseDraws(Noise(signal=0, redraw=False), 4)
    x = torch.ones(4, 6)
    disturbance.begin()
    assert not torch.equal(disturbance.signal(x), disturbance.signal(x))


def test_a_sample_keeps_its_draws_when_others_leave() -> None:
    x, rows = torch.ones(5, 3), torch.tensor([1, 4])
    draws = []
    for part, chosen in ((x, None), (x[rows], rows)):
        disturbance = NoiseDraws(Noise(state=0, generator=torch.Generator().manual_seed(3)), 5)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_an_implicit_model_have_the_counted_draws(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ImplicitModel(3, 2, 12, activation="tanh", solver="picard", stop=Steps(5)).to(dtype)
    u, n = torch.randn(7, 3, dtype=dtype), 12
    with torch.no_grad():
        noise = Noise(signal=10.0, state=20.0, generator=torch.Generator().manual_seed(1))
        found = Noisy(model, noise).equilibrium(u).value
        seed, samples = draw_seed(torch.Generator().manual_seed(1)), torch.arange(7)
        x, v = torch.zeros(7, n, dtype=dtype), nn.functional.linear(u, model.B, model.bias)
        for step in range(5):
            first, second = (normals(seed, samples, step, site, n, dtype) for site in (STATE, SIGNAL))
            x = x + x.norm(dim=1, keepdim=True) / math.sqrt(n * 100) * first
            z = x @ model.A.mT + v
            x = torch.tanh(z + z.norm(dim=1, keepdim=True) / math.sqrt(n * 10) * second)
    torch.testing.assert_close(found, x)


def test_counted_draws_depend_on_the_seed_and_not_on_companions() -> None:
    torch.manual_seed(0)
    model = ImplicitModel(3, 2, 12, solver="picard", stop=MeanRelative(0.1, 6), max_steps=60,
                          on_failure="ignore").double()  # fmt: skip
    u = torch.randn(40, 3, dtype=torch.float64)

    def answers(u: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        given = u.clone().requires_grad_()
        noise = Noise(signal=10.0, generator=torch.Generator().manual_seed(seed))
        x = Noisy(model, noise).equilibrium(given).value
        return x, torch.autograd.grad(x.sum(), given)[0]

    for whole, part, other in zip(answers(u, 3), answers(u[:2], 3), answers(u, 4), strict=True):
        torch.testing.assert_close(part, whole[:2])
        assert not torch.allclose(other, whole, atol=1e-3)
    noisy = Noisy(model, Noise(signal=10.0, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(noisy(u), noisy(u))  # every solve draws a seed


@pytest.mark.parametrize("noise", [{"signal": 10.0}, {"state": 5.0}, {"signal": 15.0, "kind": "additive"}])
def test_counted_and_torch_draws_agree_in_distribution(noise: dict) -> None:
    """Compares final states and numbers of steps of 4000 samples of one input; all seeds are fixed."""
    torch.manual_seed(2)
    model = ImplicitModel(3, 2, 12, solver="picard", stop=MeanRelative(0.1, 6), max_steps=60,
                          on_failure="ignore").double()  # fmt: skip
    u = torch.ones(MANY, 3, dtype=torch.float64)
    columns = []
    for seed, counter in enumerate((True, False)):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            found = Noisy(model, Noise(**noise, generator=generator, counter=counter)).equilibrium(u)
        columns.append(torch.cat([found.value, found.steps[:, None].double()], dim=1))
    distances = [_distance(*pair) for pair in zip(columns[0].T, columns[1].T, strict=True)]
    assert max(distances) < 1.95 * (2 / MANY) ** 0.5  # a level of 0.001 each


def _distance(a: Tensor, b: Tensor) -> float:
    """Returns the distance of Kolmogorov and Smirnov between two samples."""
    grid = torch.cat([a, b]).sort().values
    ranks = [torch.searchsorted(part.sort().values, grid, right=True) / len(part) for part in (a, b)]
    return float((ranks[0] - ranks[1]).abs().max())


def test_noise_has_no_kernel_and_says_so() -> None:
    u, noise = torch.zeros(5, 3), Noise(signal=0.0)
    text = "reference: ImplicitModel under noise has no kernel"
    assert Noisy(ImplicitModel(3, 2, 8), noise).explain(u) == text
    asked = Noisy(ImplicitModel(3, 2, 8, executor="reference"), noise)
    assert asked.explain(u) == 'reference: executor="reference" was asked for'
    silent = Noisy(ImplicitModel(3, 2, 8), Noise())
    assert silent.explain(u) == silent.model.explain(u)
    pytest.importorskip("numba")
    with pytest.raises(InputError, match="noise has no kernel"):
        Noisy(ImplicitModel(3, 2, 8, executor="numba"), noise)(u)


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
    assert model.deq.noise is None and len(nonlinearities(model.deq.cell)) >= 2


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="decibels"):
        Noise(signal=math.nan)
    with pytest.raises(UnknownNameError, match="did you mean 'additive'"):
        Noise(kind="additve")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="literal"):
        Noise(kind="additive", literal=True)
    with pytest.raises(InputError, match="nonlinearities"):
        Noisy(nn.Linear(2, 2), Noise(signal=0.0))(torch.ones(1, 2))
    with pytest.raises(InputError, match="plain steps"):
        Noisy(ImplicitModel(2, 1, 3, condition="monotone"), Noise(signal=0.0))(torch.ones(1, 2))
    with pytest.raises(InputError, match="ImplicitModel"):
        Noisy(nn.Tanh(), Noise(signal=0.0)).equilibrium(torch.ones(1, 2))
