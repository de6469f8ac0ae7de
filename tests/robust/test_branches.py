"""Branches of equilibria proven without a certificate: they hold what continuation reaches, and folds refuse.

The oracles share no code with the library: Newton's method along paths in numpy, and determinants in fractions.
"""

import itertools
import math
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from wellposed.activations import get_activation, max_pool
from wellposed.activations.slopes import SlopeRange
from wellposed.conditions import branches
from wellposed.conditions.branches import BranchEquation
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import ImplicitForm
from wellposed.models import DEQ
from wellposed.robust import (
    Ball,
    Box,
    CertifiedLoss,
    SparseBox,
    certification,
    certified,
    intervals,
    margin_bounds,
    output_bounds,
    state_bounds,
)
from wellposed.robust.attacks import Attack
from wellposed.robust.bounds import continuations
from wellposed.robust.certification import Forbidden, branch_and_bound, decide, examine_radii

F64 = torch.float64
PHI = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (lambda z: 1 / (1 + np.exp(-z)), lambda z: np.exp(-abs(z)) / (1 + np.exp(-abs(z))) ** 2),
    "leaky_relu(0.1)": (lambda z: np.where(z > 0, z, 0.1 * z), lambda z: np.where(z > 0, 1.0, 0.1)),
    "softplus": (lambda z: np.logaddexp(0, z), lambda z: 1 / (1 + np.exp(-z))),
}

GAINS = {"sigmoid": 10.0, "tanh": 2.0}


def steep(seed, n=6, p=3, phi="tanh", gain=2.0, dtype=F64):
    """A loop that no condition proves."""
    generator = torch.Generator().manual_seed(seed)
    A, B, C, b = (torch.randn(*size, generator=generator, dtype=F64) for size in ((n, n), (n, p), (2, n), (n,)))
    return ImplicitForm(gain * A / n**0.5, B, C, activation=phi, bias=b).to(dtype)


def followed(form, phi, x, start, end, steps=60):
    """The equilibrium at `end` by Newton's method along the way from `start`; None where that gets lost."""
    A, B = (getattr(form, name).to_dense().double().numpy() for name in "AB")
    b = np.zeros(len(A)) if form.bias is None else form.bias.double().numpy()
    function, slope = PHI[phi]
    z = A @ x + B @ start + b
    for share in np.linspace(0, 1, steps + 1):
        v = B @ ((1 - share) * start + share * end) + b
        for _ in range(40):
            residual = z - A @ function(z) - v
            if np.abs(residual).max() < 1e-12:
                break
            z = z - np.linalg.solve(np.eye(len(A)) - A * slope(z), residual)
        else:
            return None
    return function(z)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("phi", PHI)
def test_paths_stay_within_the_bounds(phi, dtype):
    proven = 0
    for seed in range(6):
        form, points = (
            steep(seed, phi=phi, gain=GAINS.get(phi, 1.4), dtype=dtype),
            np.random.default_rng(seed),
        )
        with pytest.raises(IllPosedError):
            form.certificate()
        u = torch.tensor(points.uniform(-1, 1, (1, 3))).to(dtype)
        for radius in (0.003, 0.03):
            box = Box.around(u, radius, None, None)
            bounds = state_bounds(form, box)
            if not bool(bounds.branch.proven):
                assert bounds.branch.why_not[0] and not bounds.width.isfinite().any()
                continue
            proven += 1
            assert bounds.width.isfinite().all()
            middle, low, high = (end[0].double().numpy() for end in (box.center, box.lower, box.upper))
            x = bounds.branch.states[0].numpy()
            ends = [np.where(points.uniform(size=3) < 0.5, low, high) for _ in range(8)]
            ends += [points.uniform(low, high) for _ in range(8)]
            for start, end in itertools.pairwise([middle, *ends]):
                x = followed(form, phi, x, start, end)
                assert x is not None, "a branch that is proven has been lost"
                assert ((x >= bounds.lower[0].numpy() - 1e-9) & (x <= bounds.upper[0].numpy() + 1e-9)).all()
    assert proven >= 4


def determinant(matrix):
    """Exactly, by elimination in fractions."""
    rows, sign = [list(row) for row in matrix], 1
    for k in range(len(rows)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return Fraction(0)
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        for i in range(k + 1, len(rows)):
            share = rows[i][k] / rows[k][k]
            rows[i] = [a - share * b for a, b in zip(rows[i], rows[k], strict=True)]
    return sign * math.prod((rows[k][k] for k in range(len(rows))), start=Fraction(1))


def test_slopes_that_are_proven_non_singular_are_so_in_exact_arithmetic():
    """det(I - A D) is affine in each slope, so it vanishes nowhere if all corners have one sign."""
    said = {True: 0, False: 0}
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        n = 2 + seed % 3
        A = 1.6 * torch.randn(n, n, generator=generator, dtype=F64)
        z = torch.randn(n, generator=generator, dtype=F64)
        radius = 1.5 * torch.rand(n, generator=generator, dtype=F64)
        equation = BranchEquation(A, torch.zeros_like(A), ((get_activation("relu"), n),))
        _, change = equation._contraction(equation.slopes(z, radius))
        proven = branches.perron_weights(change)[1] < 1
        exact = [[Fraction(float(entry)) for entry in row] for row in A]
        choices = [
            [Fraction(0)] * (low <= 0) + [Fraction(1)] * (high >= 0)
            for low, high in zip((z - radius).tolist(), (z + radius).tolist(), strict=True)
        ]
        signs = set()
        for slopes in itertools.product(*choices):
            system = [[(i == j) - exact[i][j] * slopes[j] for j in range(n)] for i in range(n)]
            signs.add(float(np.sign(determinant(system))))
        regular = len(signs) == 1 and 0.0 not in signs
        assert regular or not proven
        said[proven] += 1
    assert min(said.values()) >= 10


def hysteresis(shift=0.3):
    """x = tanh(3x + u + shift): the upper branch ends at a fold where u + shift = -1.3033."""
    one = torch.ones(1, 1, dtype=F64)
    return ImplicitForm(3 * one, one, one, activation="tanh", bias=torch.tensor([shift], dtype=F64))


def test_a_fold_inside_of_the_set_is_refused():
    form, u = hysteresis(), torch.zeros(1, 1, dtype=F64)
    inside, across = (output_bounds(form, Box(u - radius, u + radius)) for radius in (1.5, 1.61))
    assert inside.branch.proven.all() and inside.lower > 0.8
    assert "for the branch through the equilibrium at the center" in inside.method
    assert followed(form, "tanh", inside.branch.states[0].numpy(), np.array([0.0]), np.array([-1.6])) > 0.8
    assert not across.branch.proven.any() and across.lower == -math.inf and across.upper == math.inf
    assert "own image" in across.branch.why_not[0] or "singular" in across.branch.why_not[0]
    assert "proven for 0 of 1" in str(across.branch)
    near = output_bounds(form, Box(u - 1.6, u + 1.6))  # a box, but not one in which equilibria are proven unique
    assert not near.branch.proven.any() and "I - A D may be singular" in near.branch.why_not[0]
    assert near.branch.value > 1


def test_without_uniqueness_or_with_narrow_slopes_the_fold_would_pass():
    """What the tests above would notice: slopes that are too narrow."""
    form, u = hysteresis(), torch.zeros(1, 1, dtype=F64)
    real = branches.slope_range

    def narrow(phi, center, radius, secants=False):
        middle, spread = real(phi, center, torch.zeros_like(radius), secants)
        return SlopeRange(middle, torch.zeros_like(spread))

    with mock.patch.object(branches, "slope_range", narrow):
        assert output_bounds(form, Box(u - 1.61, u + 1.61)).branch.proven.all()


def test_a_sample_does_not_depend_on_its_companions():
    form = hysteresis()
    u = torch.tensor([[0.0], [-0.5], [1.0]], dtype=F64)
    radius = torch.tensor([[0.1], [3.0], [0.2]], dtype=F64)
    together = output_bounds(form, Box(u - radius, u + radius))
    assert together.branch.proven.tolist() == [True, False, True]
    for k in range(3):
        alone = output_bounds(form, Box(u[k : k + 1] - radius[k], u[k : k + 1] + radius[k]))
        torch.testing.assert_close(alone.upper[0], together.upper[k])
        torch.testing.assert_close(alone.lower[0], together.lower[k])


@pytest.mark.parametrize("method", ["interval", "crown", "optimised", "triangle", "best"])
def test_every_method_that_starts_from_states_bounds_the_branch(method):
    form = steep(0, phi="relu", gain=1.5)
    u = torch.rand(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    for inputs in (Box.around(u, 0.01, None, None), SparseBox(u, 0.01, 1), Ball(u, 0.01)):
        bounds = output_bounds(form, inputs, method)
        assert bounds.branch.proven.any()
        for k in bounds.branch.proven.nonzero()[:, 0].tolist():
            end = inputs.sample(1)[0, k]
            x = followed(form, "relu", bounds.branch.states[k].numpy(), inputs.center[k].numpy(), end.numpy())
            y = torch.tensor(x) @ form.C.to_dense().mT
            assert ((y >= bounds.lower[k] - 1e-9) & (y <= bounds.upper[k] + 1e-9)).all()


def test_sets_that_are_cut_off_on_one_side_are_held():
    """Their center is not that of their box."""
    form = steep(0, phi="relu", gain=1.5)
    u = torch.rand(1, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    inputs = SparseBox(u, 0.02, 2, lower=u - 0.001, upper=u + 1)
    bounds = state_bounds(form, inputs)
    assert bounds.branch.proven.all()
    for steps in itertools.product((-0.001, 0.0, 0.02), repeat=3):
        if sum(step != 0 for step in steps) <= 2:
            end = u[0].numpy() + np.array(steps)
            x = followed(form, "relu", bounds.branch.states[0].numpy(), inputs.center[0].numpy(), end)
            assert ((x >= bounds.lower[0].numpy() - 1e-9) & (x <= bounds.upper[0].numpy() + 1e-9)).all()


def test_a_center_that_is_not_solved_has_no_branch():
    """The equilibrium in the box is unique all the same, but nobody has found it."""
    form, box = steep(3), Box.around(torch.zeros(1, 3, dtype=F64), 0.01, None, None)
    assert state_bounds(form, box).branch.proven.all()
    real = intervals.states_of_branch
    with mock.patch.object(intervals, "states_of_branch", lambda *given: real(*given) + 1e-3):
        branch = state_bounds(form, box).branch
    assert not branch.proven.any() and branch.why_not == ("no equilibrium was found at the center",)


@pytest.mark.parametrize("method", ["norm", "box", "l2", "lp"])
def test_methods_that_need_a_certificate_refuse(method):
    with pytest.raises((IllPosedError, ValueError)):
        output_bounds(hysteresis(), Box.around(torch.zeros(1, 1, dtype=F64), 0.01, None, None), method)


def test_what_cannot_be_proven_says_why():
    form = steep(0, n=4).replaced(activation=max_pool(2))
    with pytest.raises(IllPosedError, match=r"no branch of equilibria: the Jacobians of 'max_pool\(2\)'"):
        output_bounds(form, Box.around(torch.zeros(1, 3, dtype=F64), 0.01, None, None))
    with pytest.raises(IllPosedError):
        continuations(hysteresis(), Box.around(torch.zeros(1, 1, dtype=F64), 0.01, None, None))


def bistable(width=4, classes=3):
    torch.manual_seed(0)
    cell = type("Cell", (nn.Module,), {"forward": lambda self, x, u: torch.tanh(2 * x + self.mix(u))})()
    cell.mix = nn.Linear(5, width)
    cell.mix.bias.data += 0.4
    return nn.Sequential(DEQ(cell, state_shape=(width,)), nn.Linear(width, classes))


def test_networks_with_a_loop_are_certified_for_a_branch():
    network, u = bistable(), torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target = network(u).argmax(1)
    box = Box.around(u, 0.01, None, None)
    bounds = margin_bounds(network, box, target)
    proven = certified(network, box, target)
    assert proven.any() and not (proven & ~bounds.branch.proven).any()
    with torch.no_grad():
        points = box.sample(200).flatten(0, 1)
        same = network(points).argmax(1).view(200, 6) == target
    assert same.all(0)[proven].all()


def test_a_network_on_another_branch_is_not_certified():
    """Its own solver starts elsewhere than zero and ends at another equilibrium."""
    network, u = bistable(), torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    deq = network[0]

    class Lower(nn.Module):
        def __init__(self):
            super().__init__()
            self.deq, self.head, self.calls = deq, network[1], 0

        def forward(self, v):
            start = None if torch.compiler.is_exporting() or not isinstance(v, torch.Tensor) else lower(v)
            return self.head(self.deq(v, start))

    def lower(v):
        return torch.full((len(v), 4), -0.99)

    box = Box.around(u, 0.001, None, None)
    with torch.no_grad():
        apart = (Lower()(u) - network(u)).abs().amax(1) > 0.1
    assert apart.all()
    form = to_implicit(network, (5,))
    with mock.patch.object(network, "forward", lambda v: Lower()(v)):
        bounds = output_bounds(network, box)
        with torch.no_grad():
            target = network(u).argmax(1)
        examination = examine_radii(network, form, u, target, [0.001], steps=2)
    assert not bounds.branch.proven.any() and "another equilibrium" in bounds.branch.why_not[0]
    assert examination.branch and not examination.radii[0].certified.any()


def test_certified_training_leaves_out_what_is_not_proven():
    network, u = bistable(), torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    clean, proven = nn.functional.cross_entropy(network(u), target), []
    for radius, share in ((0.01, 1.0), (0.6, 0.5), (50.0, 0.5)):
        bounds = output_bounds(network, Box.around(u, radius, None, None))
        loss = CertifiedLoss(network, radius, method="crown", share=share, lower=None, upper=None)
        value = loss(network(u), target)
        network.zero_grad()
        value.backward()
        assert bool(value.isfinite()) and all(bool(part.grad.isfinite().all()) for part in network.parameters())
        if not bounds.branch.proven.any():
            torch.testing.assert_close(value, clean)
        proven.append(int(bounds.branch.proven.sum()))
    assert proven[0] == 6 > proven[1] > proven[2] == 0


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: output_bounds(hysteresis(), Box.around(torch.zeros(1, 3, dtype=F64), 0.1)), "takes 1 inputs"),
        (lambda: output_bounds(hysteresis(), Box.around(torch.zeros(1, 1), 0.1)), "convert one of them"),
        (lambda: output_bounds(bistable(), Box.around(torch.zeros(1, 3), 0.1)), "takes 5 features; received 3"),
        (lambda: output_bounds(hysteresis(), unit(), budget=0), "positive number of seconds; received 0"),
        (lambda: decide(hysteresis(), [Forbidden(unit(), *torch.zeros(2, 1, 1))], 0), "seconds; received 0"),
        (lambda: branch_and_bound(hysteresis(), unit(), torch.tensor([0]), 5), "for ReLU; tanh is no polyhedron"),
        (
            lambda: certified(bistable(), Box.around(torch.zeros(1, 5), 0.1), torch.tensor([7])),
            "classes are 0 to 2",
        ),
        (lambda: CertifiedLoss(bistable(), 0.1, samples=0), "samples must be at least 1; received 0"),
        (lambda: CertifiedLoss(bistable(), -0.1), "a finite radius"),
    ],
)
def test_mistakes_get_one_line(mistake, message):
    with pytest.raises(InputError, match=message) as error:
        mistake()
    assert "\n" not in str(error.value)


def unit():
    return Box.around(torch.zeros(1, 1, dtype=F64), 0.1, None, None)


def test_branch_and_bound_and_properties_say_branch():
    form = steep(3, n=4, p=2, phi="relu", gain=1.5)
    u = torch.rand(1, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    box = Box.around(u, 0.02, None, None)
    bounds = output_bounds(form, box)
    assert bounds.branch.proven.all()
    y = bounds.branch.states @ form.C.to_dense().mT
    target = y.argmax(1)
    (verdict,) = branch_and_bound(form, box, target, budget=20)
    assert verdict.branch and verdict.facts()["branch"] == "for the branch through the equilibrium at the center"
    row = torch.tensor([[1.0, 0.0]], dtype=F64)
    over, under = (
        decide(form, [Forbidden(box, row, torch.tensor([-level], dtype=F64))], budget=20)
        for level in (float(bounds.upper[0, 0]) + 1, float(y[0, 0]) - 1)
    )
    assert (over.status, under.status) == ("proven", "counter-example") and over.branch and under.branch
    fold = Box.around(torch.zeros(1, 1, dtype=F64), 1.61, None, None)
    lost = decide(hysteresis(), [Forbidden(fold, row[:, :1], torch.zeros(1, dtype=F64))], 5, complete=False)
    assert lost.status == "undecided" and lost.branch


def test_counter_examples_are_on_the_branch():
    """The lower branch has negative outputs, the upper one has not: asked about the upper one, none exists."""
    box = Box(torch.full((1, 1), -0.2, dtype=F64), torch.full((1, 1), 0.2, dtype=F64))
    negative = [Forbidden(box, -torch.ones(1, 1, dtype=F64), torch.zeros(1, dtype=F64))]
    verdict = decide(hysteresis(), negative, 5, complete=False)
    assert verdict.status == "proven" and verdict.branch


def test_an_attack_that_leaves_the_branch_is_no_contradiction():
    network, u = bistable(), torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target = network(u).argmax(1)
    examination = examine_radii(network, to_implicit(network, (5,)), u, target, [0.005, 0.3], steps=10)
    assert examination.branch
    outputs = torch.tensor([[0.0, 1.0]])
    attack = Attack(u[:1], torch.tensor([True]), outputs, torch.ones(1), "elsewhere")
    claim = torch.tensor([True]), attack, torch.tensor([0]), "crown at 0.1"
    assert not certification._agreed(*claim, branch=True).any()
    with pytest.raises(certification.UnsoundError):
        certification._agreed(*claim, branch=False)
    shares = [(one.share("certified"), one.share("attacked")) for one in examination.radii]
    assert shares[0][0] > 0 and all(proven <= left for proven, left in shares)
