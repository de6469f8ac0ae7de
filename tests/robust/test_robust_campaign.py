"""Many random cases: sampled, extreme and attacking points against every bound of every kind of model."""

from collections import Counter
from functools import lru_cache, partial

import pytest
import torch
from robust_cases import F64, FORMS, climb, cnn, exact, looped, mlp, triangular
from torch import nn

from wellposed.convert import to_implicit
from wellposed.convex import fit_states, record_states
from wellposed.errors import IllPosedError
from wellposed.models import ImplicitModel
from wellposed.robust import METHODS, Ball, Box, MethodError, SparseBox, crown, enclosure, output_bounds
from wellposed.robust.attacks import autoattack, pgd

CASES = 100_000
CUTS = ((300, 60), (300, 60), (4, 3), (1, 1), (1, 0))  # sweeps of intervals and steps of multipliers
SOLVED = 1e-10  # relative error of the outputs that are compared


def trained(seed, network):
    """Trains a network on classes that a few inputs decide."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(128, 4, generator=generator, dtype=F64)
    target = (3 * u[:, 0] * (0.5 + u[:, 1])).long().clamp(max=2)
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(u), target).backward()
        optimiser.step()
    return network.eval().requires_grad_(False), u


def trained_loop(seed, activation="relu"):
    torch.manual_seed(seed)
    model = ImplicitModel(4, 3, 9, bias=True, activation=activation).double()
    return trained(seed, model)[0].form()


def trained_layers(seed):
    torch.manual_seed(seed)
    return to_implicit(trained(seed, mlp((4, 10, 8, 3)))[0], (4,))


def sparsified(seed, **options):
    """A model with few weights that was fitted to the states of a trained network."""
    torch.manual_seed(seed)
    network, u = trained(seed, mlp((4, 10, 8, 3)))
    model, report = fit_states(record_states(network, u.split(64)), **options)
    assert float((model.form().A.to_dense() == 0).double().mean()) > 0.4, report
    return model.form().to(F64)


def converted(seed, pool):
    torch.manual_seed(seed)
    return to_implicit(cnn(pool), (1, 6, 6))


MODELS = {
    **{f"random: {name}": (lambda seed, make=make: make()) for name, make in FORMS.items()},
    "random: wide loop": lambda seed: looped(40, kappa=0.99),
    "random: deep": lambda seed: triangular(sizes=(4, 9, 9, 9, 9, 3)),
    "trained: loop": trained_loop,
    "trained: tanh loop": partial(trained_loop, activation="tanh"),
    "trained: layers": trained_layers,
    "converted: pooling": partial(converted, pool=True),
    "converted: averaging": partial(converted, pool=False),
    "sparsified: few weights": partial(sparsified, kappa=0.95, target_sparsity=0.7),
    "sparsified: every state": partial(sparsified, kappa=0.9, support="full", objective="lasso", strength=0.05),
}


@lru_cache(maxsize=64)
def model_of(name, seed):
    torch.manual_seed(seed)
    return MODELS[name](seed)


def tried(form, inputs, u, eps, number):
    """Points of a set with where they come from: drawn, extreme, and found by attacks on the class."""
    drawn = inputs.sample(32)
    rows = torch.eye(form.sizes[2], dtype=form.dtype)
    climbed = torch.stack([climb(form, inputs, sign * row) for row in rows[:2] for sign in (1, -1)])
    target = form(u).argmax(1)
    options = {"norm": "2"} if isinstance(inputs, Ball) else {}
    options |= {"count": inputs.k} if isinstance(inputs, SparseBox) else {}
    found = pgd(form, u, target, eps, steps=10, restarts=1, seed=number, **options).inputs
    points = {"vertices": drawn[::2], "drawn": drawn[1::2], "gradients": climbed, "pgd": found[None]}
    if isinstance(inputs, Box):
        little = {"attacks": ("apgd-ce", "square"), "steps": 6, "square_queries": 10}
        points["autoattack"] = autoattack(form, u, target, eps, seed=number, **little).inputs[None]
    return {kind: part.flatten(2) for kind, part in points.items()}


def answers(form, points):  # (count, B, p) -> (count, B, q)
    """Outputs at equilibria that were solved to the last digits, as a fitted C may multiply an error by 1e4."""
    wide, u = form.to(F64), points.flatten(0, 1).to(F64)
    x, drive = exact(form, u)[0], wide.B.apply(u) + (0.0 if wide.bias is None else wide.bias)
    for _ in range(300):
        pieces = (wide.A.apply(x) + drive).split(wide.partition, dim=1)
        x = torch.cat([phi.function(z) for phi, z in zip(wide.activations, pieces, strict=True)], dim=1)
    y = wide.C.apply(x) + wide.D.apply(u) + (0.0 if wide.output_bias is None else wide.output_bias)
    return y.view(*points.shape[:2], -1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::wellposed.errors.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_no_point_of_many_leaves_a_bound(dtype, monkeypatch, capsys):
    """A case is one point of a set against one method's bounds of all outputs."""
    counts = {what: Counter() for what in ("model", "point", "method", "cut short")}
    number, total = 0, 0
    while total < CASES / 2 or number < 3 * len(MODELS):
        name = list(MODELS)[number % len(MODELS)]
        form = model_of(name, number // len(MODELS) % 3).to(dtype)
        torch.manual_seed(number)
        u = torch.rand(4, form.sizes[1], dtype=dtype)
        eps = 10.0 ** -float(3 * torch.rand(()))
        kind = number // len(MODELS) % 3
        inputs = (Box.around(u, eps), SparseBox(u, eps, 2, 0.0, 1.0), Ball(u, eps))[kind]
        points = tried(form, inputs, u, eps, number)
        outputs = {one: answers(form, part) for one, part in points.items()}
        cut = CUTS[number % len(CUTS)]
        monkeypatch.setattr(enclosure, "MAX_SWEEPS", cut[0])
        monkeypatch.setattr(crown, "MAX_STEPS", cut[1])
        for method in METHODS:
            try:
                found = output_bounds(form, inputs, method)
            except (MethodError, IllPosedError):
                continue
            for one, y in outputs.items():
                inside = found.contains(y, SOLVED * (1 + float(y.abs().max())))
                assert inside.all(), f"{name}, trial {number}, {dtype}, {method}, {one}, eps {eps}, cut at {cut}"
                for what, key in zip(counts, (name, one, method, cut != CUTS[0]), strict=True):
                    counts[what][key] += inside.numel()
                total += inside.numel()
        number += 1
    with capsys.disabled():
        print(f"\n{dtype}: {total:,} cases in {number} trials, none outside")
        for what, counted in counts.items():
            print(f"  by {what}: " + ", ".join(f"{key} {count:,}" for key, count in counted.items()))
    assert set(counts["method"]) == set(METHODS) and set(counts["model"]) == set(MODELS)
