"""Row solvers and whole fits on a CUDA device; run with -m gpu."""

import pytest
import torch
from row_cases import KINDS, case
from torch import Tensor, nn

from wellposed.convex import (
    Automatic,
    Design,
    Projected,
    RowFit,
    RowProblem,
    Schur,
    capped_norm,
    fit_states,
    objective,
    record_states,
    row_problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DEVICE = "cuda"


def twin(kind: str, seed: int, kappa: float, capped: int = 12, **options: float) -> tuple[RowProblem, RowProblem]:
    """The same problem here and there."""
    data = case(kind, seed)
    problems = []
    for place in ("cpu", DEVICE):
        M, z = data.M.to(place), data.z.to(place)
        support = None if data.support is None else data.support.to(place)
        problems.append(row_problem(Design.of(M), z, kappa=kappa, capped=capped, support=support, **options))
    return problems[0], problems[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kappa", [0.1, 0.7, 100.0])
def test_projected_gradient_agrees_with_the_cpu(kind, kappa):
    here, there = twin(kind, 0, kappa)
    found, exact = Projected(tol=1e-8).solve(there), Automatic().solve(here)
    assert found.weights.device.type == DEVICE and found.gap.device.type == DEVICE
    assert found.relative_gap.max() <= 1e-7
    assert (capped_norm(there, found.weights) <= kappa + 1e-12).all()
    ours, best = objective(here, found.weights.cpu()), objective(here, exact.weights)
    assert (ours <= best + found.gap.cpu() + exact.gap + 1e-8 * here.scale + 1e-12).all()


@pytest.mark.parametrize("options", [{"capped": 8}, {"capped": 8, "lasso": 0.5}, {"ridge": 0.3, "lasso": 0.5}])
@pytest.mark.parametrize("kind", ["plain", "duplicates", "masked"])
def test_automatic_takes_problems_on_the_device(kind, options):
    here, there = twin(kind, 1, 0.5, **options)
    found, exact = Automatic().solve(there), Automatic().solve(here)
    assert found.weights.device.type == DEVICE and found.relative_gap.max() <= 1e-6
    difference = objective(here, found.weights.cpu()) - objective(here, exact.weights)
    assert (difference.abs() <= 1e-6 * here.scale + 1e-12).all()


def test_schur_refines_on_the_device():
    _, there = twin("plain", 2, 0.5, capped=8)
    found = Schur(Projected(tol=1e-12), tol=1e-9).solve(there)
    assert found.relative_gap.max() <= 1e-9 and found.weights.device.type == DEVICE


def recorded() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
    network, u = nn.Sequential(*layers), torch.randn(2000, 20)
    return network, u, network(u).argmax(1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"support": "full"},
        {"bound": "row", "support": "hollow"},
        {"target_sparsity": 0.8},
        {"objective": "lasso", "strength": 0.02},
        {"objective": "lasso", "target_sparsity": 0.6},
        {"objective": "group", "strength": 0.05},
        {"objective": "ridge", "strength": 0.01},
        {"solver": "homotopy"},
        {"rescale": "undo"},
    ],
    ids=str,
)
def test_a_fit_on_the_device_equals_that_on_the_cpu(options):
    network, u, labels = recorded()
    states = record_states(network, u.split(500))
    (here, one), (there, two) = (
        fit_states(states, kappa=0.9, targets=labels, device=place, **options) for place in ("cpu", DEVICE)
    )
    assert there.B.device.type == "cpu"  # the model is returned where the states are
    assert two.certificate.holds and two.norm.device.type == "cpu"
    assert float(two.relative_gap.max()) <= 1e-6 and abs(one.sparsity - two.sparsity) <= 0.02
    assert two.after == pytest.approx(one.after, abs=0.02)
    with torch.no_grad():
        apart = float((there(u) - here(u)).norm() / here(u).norm())
    assert apart <= (2e-2 if "target_sparsity" in options else 2e-3)


def test_states_of_a_network_on_the_device():
    network, u, _ = recorded()
    on_cpu = record_states(network, u.split(500))
    on_gpu = record_states(network.to(DEVICE), [piece.to(DEVICE) for piece in u.split(500)])
    torch.testing.assert_close(on_gpu.X.cpu(), on_cpu.X, rtol=1e-4, atol=1e-4)
    for options in ({}, {"refit_output": False}, {"support": "network"}, {"device": DEVICE}):
        model, report = fit_states(on_gpu, kappa=0.9, **options)
        torch.testing.assert_close(model(u), network.cpu()(u), rtol=1e-2, atol=1e-2)
        assert report.certificate.holds
        network.to(DEVICE)


def test_many_rows_at_once():
    """Four thousand rows of a thousand columns, more than are worth a path each."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    X = torch.randn(3000, 1000, generator=generator, device=DEVICE).relu()
    Z = X @ torch.randn(1000, 4000, generator=generator, device=DEVICE) / 1000**0.5
    found = RowFit(kappa=0.9, bound="row", chunk=4096, solver=Projected(tol=1e-6)).solve(X, X[:, :0], Z)
    assert found.weights.device.type == DEVICE and found.relative_gap.max() <= 1e-6
    assert (found.weights.abs().sum(1) <= 0.9 + 1e-12).all()
