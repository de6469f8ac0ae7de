"""The soundness campaign in small, and that it sees bounds, certificates and gaps that are a little too good."""

import json
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch

from tests.campaigns import (
    extended,
    rationals,
    soundness,
    soundness_bounds,
    soundness_conditions,
    soundness_gaps,
    soundness_range,
)
from tests.robust.robust_cases import exact, looped
from wellposed.activations import get_activation
from wellposed.conditions import conditions
from wellposed.conditions.conditions import CONDITIONS
from wellposed.conditions.norms import largest_eigenvalue
from wellposed.convert import to_implicit
from wellposed.convex import duality_gap
from wellposed.robust import METHODS, boxes, query

LOOP, LAYERS = 0, 9  # numbers of trials about a loop, to which every method applies, and about layers of ReLU
CRITICAL = 1  # the number of matrices whose rows are near one, for relu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_stay_within_every_kind_of_bound(dtype):
    tally = soundness_bounds.trial(0, LOOP, dtype, drawn=8)
    assert not tally.wrong
    assert {f"outputs, {method}" for method in METHODS} <= tally.kinds.keys()
    further = {"sensitivity", "error bound of a solve", "separable function, convex", "claimed enclosures of x"}
    assert further <= tally.kinds.keys()
    assert tally.points["gradients"] > 100 and tally.reached["outputs, best"] > 0.99


def test_bounds_that_are_a_thousandth_too_narrow_are_reported():
    tally = soundness_bounds.trial(0, LAYERS, torch.float32, drawn=8, change=soundness_bounds.shrunk)
    assert {note["kind"] for note in tally.wrong} >= {"outputs, triangle", "outputs, best"}
    assert all(note["by"] > 0 and note["points"] > 0 for note in tally.wrong)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0), (torch.float64, 4)])
def test_bounds_without_their_slack_for_rounding_are_reported(dtype, number):
    options = {"drawn": 8, "tiny": True}
    assert not soundness_bounds.trial(0, number, dtype, **options).wrong
    assert soundness_bounds.trial(0, number, dtype, change=soundness_bounds.unrounded, **options).wrong


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 3), (torch.float64, 40)])
def test_models_at_the_ends_of_the_number_range_stay_within_their_bounds(number, dtype):
    tally = soundness_range.trial(0, number, dtype)
    assert not tally.wrong and tally.kinds.total() > 500


def test_networks_bounded_by_the_form_that_folds_them_are_reported():
    folded = mock.patch.object(query, "exact_form", lambda model, shape: (to_implicit(model, shape), None))
    with folded:
        wrong = [
            note for number in (3, 7, 11, 15) for note in soundness_range.trial(0, number, torch.float32).wrong
        ]
    assert wrong


def test_residuals_that_are_no_number_do_not_become_zero():
    bound = boxes.lipschitz_image(get_activation("relu"), torch.tensor([torch.nan, 2.0]))
    assert bound.isinf().tolist() == [True, False]


def test_numbers_that_are_not_numbers_lie_outside():
    tally, one = soundness_bounds.Tally(), np.ones((1, 1))
    tally.compare("any", np.nan * one, -one, one, 0 * one, {})
    assert len(tally.wrong) == 1


def test_extended_precision_solves_what_float64_cannot():
    torch.manual_seed(0)
    form, u = looped(6), torch.rand(5, 4, dtype=torch.float64)
    start = exact(form, u)[0]
    found = extended.solve(form, u, start)
    A, B = (extended.dense(part) for part in (form.A, form.B))
    z = found.x @ A.T + u.numpy().astype(extended.WIDE) @ B.T + form.bias.numpy()
    assert np.abs(np.maximum(z, 0) - found.x).max() < 1e-18
    assert 0 < np.abs(found.x - start.numpy()).max() < 1e-10
    assert found.y_slack.max() < 1e-15


def test_certificates_stand_up_to_matrices_made_to_deceive_them():
    for number in range(22):
        counts, wrong = soundness_conditions.examine(3, number)
        assert counts and not wrong, wrong


def test_certificates_without_outward_rounding_are_reported():
    wrong = set()
    with (
        mock.patch.object(conditions, "upward", lambda value, terms: value),
        mock.patch.object(conditions, "EPS", 0.0),
    ):
        for seed in range(60):
            _, A, phi, _ = soundness_conditions.matrix(seed, CRITICAL)
            wrong |= {kind for kind, good, _ in soundness_conditions.conditions(A, phi) if not good}
    assert {"inf, holds", "mu, holds"} <= wrong


def test_gaps_bound_the_distance_to_the_conic_solution():
    for number in (0, 10):
        counts, wrong = soundness_gaps.examine(0, number)
        assert counts["gap, automatic"] == 4 and not wrong, wrong


def test_gaps_that_are_too_small_are_reported():
    with mock.patch.object(
        soundness_gaps, "duality_gap", lambda *given, **options: 0.1 * duality_gap(*given, **options)
    ):
        assert soundness_gaps.examine(0, 9)[1]


def test_fractions_agree_with_floating_point():
    draw = np.random.default_rng(0)
    for _ in range(30):
        A = torch.tensor(draw.integers(-3, 4, (3, 3)).astype(float))
        E, size = rationals.exact(A), float(torch.linalg.matrix_norm(A, 2))
        assert rationals.spectral_below(E, Fraction(size * 1.001 + 1e-9))
        assert size < 1e-9 or not rationals.spectral_below(E, Fraction(size * 0.999))
        assert abs(float(rationals.spectral_from_below(E)) - size) < 1e-12
        top = float(torch.linalg.eigvalsh((A + A.mT) / 2)[-1])
        assert rationals.symmetric_below(E, Fraction(top + 1e-9)) and not rationals.symmetric_below(
            E, Fraction(top - 1e-9)
        )
        power = torch.linalg.matrix_power((A != 0).double(), 3)
        assert rationals.cyclic(E) == bool(power.any())


def test_exact_equilibria_of_relu():
    A, v = torch.tensor([[0.5, -0.25], [0.25, -3.0]]), torch.tensor([1.0, 2.0])
    x = rationals.relu_equilibrium(rationals.exact(A), [Fraction(1), Fraction(2)])
    found = torch.tensor([float(entry) for entry in x])
    assert torch.allclose(found, torch.relu(A @ found + v), atol=1e-6)


def test_a_symmetric_part_that_overflows_proves_nothing():
    A = torch.tensor([[0.5, 1.7e308], [1.7e308, 0.5]], dtype=torch.float64)
    assert not conditions.Monotone().certify(A, get_activation("relu")).holds


def test_the_step_of_a_huge_skew_part_does_not_overflow():
    A = torch.tensor([[0.5, 1e200], [-1e200, 0.0]], dtype=torch.float64)
    assert 0 <= float(conditions.Monotone().equivalent(A, get_activation("relu")).scale) < 1


@pytest.mark.parametrize("decomposition", ["svd", "eigh"])
def test_a_decomposition_that_fails_proves_nothing_more(decomposition, monkeypatch):
    def fail(*given, **options):
        raise torch.linalg.LinAlgError("no convergence")

    A = torch.tensor([[0.3, 0.4], [-0.4, 0.3]], dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, decomposition, fail)
    found = {name: CONDITIONS[name].certify(A, get_activation("relu")) for name in ("spectral", "monotone")}
    assert found["monotone"].holds == (decomposition == "svd")
    assert 0.5 <= found["spectral"].value < 0.7001


def test_the_rounding_of_a_gap_counts_that_of_the_lasso():
    counts, wrong = soundness_gaps.examine(0, 24)  # a dead row, whose gap is all lasso
    assert counts["gap, conic"] == 4 and not wrong, wrong


def test_sizes_beyond_what_squares_can_hold_prove_their_row_sums():
    for size in (1e-200, 1e200, 1e308):
        symmetric = size * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        assert size <= largest_eigenvalue(symmetric) <= 1.001 * size or size == 1e308


def test_command_writes_what_it_ran_and_keeps_the_rest(tmp_path):
    out = tmp_path / "soundness.json"
    out.write_text(json.dumps({"gaps, seed 0": {"cases": 7}}))
    assert soundness.main(["--only", "conditions", "--matrices", "6", "--jobs", "0", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["gaps, seed 0"] == {"cases": 7}
    found = report["conditions, seed 0"]
    assert found["examined"] == 6
    assert found["violations"] == 0 < found["cases"] and found["asked"]["seed"] == 0
