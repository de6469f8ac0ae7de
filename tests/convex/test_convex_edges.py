"""Edges of the fitting: rows that are zero, units that are tiny, ridges that are there already, old folders."""

import json
from types import SimpleNamespace

import pytest
import torch
from row_cases import case

from wellposed.convex import (
    Automatic,
    Clarabel,
    Cvxpy,
    Design,
    Homotopy,
    Projected,
    Schur,
    States,
    duality_gap,
    fit_states,
    open_states,
    record_states,
    save_states,
)
from wellposed.convex.claims import _reduced
from wellposed.convex.eliminate import FeatureProblem, _counts, _prices, _slack
from wellposed.convex.matching import Objective, _advance, restricted
from wellposed.convex.problem import rounding_of_gap
from wellposed.convex.report import LayerFit, SharedReport, judged, relative_errors
from wellposed.convex.solvers.base import polished
from wellposed.errors import FileFormatError, InputError

F64 = torch.float64


def recorded() -> States:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    return record_states(network, [torch.randn(40, 3, generator=generator)])


def test_automatic_takes_the_path_first_and_the_data_only_where_columns_are_free():
    whole, part = case("plain", 0).problem(0.7), case("plain", 0).problem(0.7, capped=8)
    assert whole.design is not None and part.design is not None and part.free
    assert [type(solver) for solver in Automatic().sequence(whole)] == [Schur, Schur, Clarabel]
    assert [type(solver) for solver in Automatic().sequence(part)] == [Schur, Schur, Schur, Clarabel]
    assert isinstance(Automatic().sequence(whole)[0].inner, Homotopy)
    sparse = case("plain", 0).problem(0.7, lasso=0.1)
    assert [type(solver) for solver in Automatic().sequence(sparse)] == [Homotopy, Projected, Clarabel]


def test_no_path_is_followed_where_the_cap_is_inactive():
    found = Homotopy().solve(case("plain", 0).problem(1e3))
    assert not found.steps.any() and found.relative_gap.max() < 1e-12
    assert Homotopy().solve(case("plain", 0).problem(0.1)).steps.all()


def test_modelled_rows_keep_to_their_support():
    pytest.importorskip("cvxpy")
    problem = case("masked", 0, rows=3).problem(0.7)
    found, best = Cvxpy().solve(problem), Clarabel().solve(problem)
    torch.testing.assert_close(found.weights, best.weights, atol=1e-4, rtol=0)
    assert found.weights[~problem.support].abs().max() < 1e-8


def test_modelled_rows_pay_for_the_lasso():
    pytest.importorskip("cvxpy")
    problem = case("plain", 0, rows=2).problem(0.7, lasso=2.0)
    torch.testing.assert_close(
        Cvxpy().solve(problem).weights, Clarabel().solve(problem).weights, atol=1e-4, rtol=0
    )


def test_shares_are_relative_to_the_row():
    generator = torch.Generator().manual_seed(0)
    X, U, Z = (torch.randn(30, k, generator=generator, dtype=F64) for k in (3, 2, 3))
    Z[:, 0], Z[:, 1] = 0.0, 1e-4 * Z[:, 1]
    full, read = torch.ones(3, 5, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    work = FeatureProblem(X, U, Z, full, read, torch.zeros(3, dtype=torch.bool), 0.5, 1e-6, "row")
    found = work.screened(torch.ones(5, dtype=torch.bool))
    sizes = torch.linalg.vector_norm(torch.cat([X, U], 1), dim=0)
    share = found.weights[1:].abs() * sizes / torch.linalg.vector_norm(Z[:, 1:], dim=0)[:, None]
    torch.testing.assert_close(found.share, share.amax(0), rtol=1e-4, atol=1e-12)


def test_fewer_samples_have_the_same_misfits():
    generator = torch.Generator().manual_seed(0)
    M, Z, W = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((40, 4), (40, 2), (4, 2)))
    for bias in (True, False):
        shift = (M.mean(0), Z.mean(0)) if bias else (0.0, 0.0)
        expected = ((M - shift[0]) @ W - (Z - shift[1])).square().sum(0)
        few, targets = _reduced(M + 0.0, Z + 0.0, bias)
        assert len(few) == 6
        torch.testing.assert_close((few @ W - targets).square().sum(0), expected)


def test_rounding_of_a_gap_counts_that_of_the_lasso():
    plain, sparse = (case("plain", 0).problem(0.7, lasso=lasso) for lasso in (0.0, 1e6))
    weights = torch.ones(6, 12, dtype=F64)
    assert (rounding_of_gap(sparse, weights) > 1.1 * rounding_of_gap(plain, weights)).all()


def test_polish_solves_the_conditions_on_a_support():
    for seed in range(3):
        problem = case("plain", seed).problem(0.7)
        best = Homotopy().solve(problem).weights
        rough = best * (1 + 0.2 * torch.rand(best.shape, generator=torch.Generator().manual_seed(seed), dtype=F64))
        found = polished(problem, rough)
        torch.testing.assert_close(found, best, atol=1e-10, rtol=0)
        assert (duality_gap(problem, found) <= 1e-9 * problem.scale).all()


def test_ridges_add_up():
    plain = case("plain", 0).problem(0.7)
    once = Objective.of("ridge", 0.3).applied(plain)
    twice = Objective.of("ridge", 0.3).applied(once)
    for new, old in ((once, plain), (twice, once)):
        before = torch.zeros(12, dtype=F64) if old.ridge is None else old.ridge
        added = 0.3 * old.gram.diagonal().mean()
        torch.testing.assert_close(new.ridge, before + added)
        torch.testing.assert_close(new.gram, old.gram + added * torch.eye(12, dtype=F64))


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_restricting_a_row_drops_its_ridge(ridge):
    data = case("plain", 0)
    problem = Objective.of("ridge", ridge).applied(data.problem(0.7, capped=8))
    kept = torch.tensor([1, 5, 9])
    found = restricted(problem, 2, kept)
    assert found.capped == 2 and found.rows == 1
    gram = found.gram - torch.diag(found.ridge)
    torch.testing.assert_close(gram, data.M[:, kept].mT @ data.M[:, kept])
    torch.testing.assert_close(found.cross[0], data.M[:, kept].mT @ data.z[:, 2])


def test_states_of_a_fitted_block_are_written_in_its_units():
    weights, bias = torch.tensor([[1.0, -1.0], [2.0, 0.5]], dtype=F64), torch.tensor([0.5, 0.0], dtype=F64)
    M = torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.0, 1.0]], dtype=F64)
    for factors in (None, torch.tensor([4.0, 0.5], dtype=F64)):
        data = SimpleNamespace(X=torch.zeros(3, 2), factors=factors, sizes=(2,), activations=(torch.relu,))
        _advance(data, Design.of(M), SimpleNamespace(weights=weights, bias=bias), 0)
        expected = (M @ weights.mT + bias).relu() / (1.0 if factors is None else factors)
        torch.testing.assert_close(data.X.double(), expected)


def test_prices_count_the_rows_that_matter():
    Z = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]], dtype=F64)
    work = SimpleNamespace(Z=Z, features=None, rows=lambda _: torch.tensor([True, False, True]))
    assert _prices(work, [2, 1]).tolist() == [1 / 30, 0.0, 0.0]


def test_entries_that_are_used_have_no_margin():
    for seed in range(3):
        problem = case("plain", seed).problem(0.5)
        weights = Homotopy().solve(problem).weights
        slack = _slack(problem, weights)
        assert (slack[weights != 0] <= 1e-6).all() and (slack <= 1).all()
        assert (slack[weights == 0] > 0).any()


def test_one_feature_may_be_kept():
    assert _counts([3, 1], 5, "ranked") == [3, 1]
    for keep in (0, 6, 0.0, 1.5, True):
        with pytest.raises(InputError):
            _counts(keep, 5, "ranked")


def test_errors_are_relative_in_any_unit():
    generator = torch.Generator().manual_seed(0)
    found, wanted = torch.randn(2, 4, 3, generator=generator, dtype=F64)
    expected = relative_errors(found, wanted, (1, 2))
    for unit in (1e-8, 1e8):
        torch.testing.assert_close(relative_errors(unit * found, unit * wanted, (1, 2)), expected)


def test_outputs_that_are_zero_are_met_exactly():
    class Silent:
        B = torch.zeros(1)

        def __call__(self, u: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(u), 2)

    states = SimpleNamespace(samples=3, U=torch.ones(3, 1), Y=torch.zeros(3, 2))
    assert judged(Silent(), states, None) == {"output_error": 0.0}
    assert judged(Silent(), SimpleNamespace(samples=3, U=torch.ones(3, 1), Y=torch.ones(3, 2)), None) == {
        "output_error": 1.0
    }


def test_reports_name_the_bound_and_the_largest_rows():
    for bound, which in (("state", "rows of A within"), ("row", "rows of (A, B) within")):
        _, report = fit_states(recorded(), kappa=0.9, bound=bound, support="full")
        assert which in str(report)
        (layer,) = report.facts()["layers"]
        assert layer["largest_norm"] == float(report.norm.max()) > float(report.norm.min())


def test_shared_reports_have_a_heading():
    ones = torch.ones(2)
    parts = {"gap": ones, "relative_gap": ones, "norm": ones, "nonzeros": ones}
    layer = LayerFit(name="first", own=9, shifts=(0.0,), misfit=0.1, **parts)
    text = str(SharedReport((layer,), 0.9, "row"))
    for name in ("layer", "rows", "units", "relative gap", "non-zeros", "misfit", "first"):
        assert name in text


def test_states_are_saved_in_folders_that_are_not_there_yet(tmp_path):
    place = tmp_path / "one" / "two"
    save_states(recorded(), place)
    save_states(recorded(), place)
    assert open_states(place).X.shape == (40, 5)


def test_checksums_are_compared_unless_told_otherwise(tmp_path):
    save_states(recorded(), tmp_path)
    whole = open_states(tmp_path).U.clone()
    data = bytearray((tmp_path / "U.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "U.npy").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"U\.npy is damaged"):
        open_states(tmp_path)
    assert not torch.equal(open_states(tmp_path, verify=False).U, whole)
    index = json.loads((tmp_path / "states.json").read_text())
    del index["sha256"], index["files"]  # as older folders have none
    (tmp_path / "states.json").write_text(json.dumps(index))
    assert open_states(tmp_path).U.shape == whole.shape
