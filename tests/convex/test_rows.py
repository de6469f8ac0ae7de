"""All rows of a fit: groups, workers, progress, and what is kept on disk."""

import pickle

import numpy as np
import pytest
import torch
from row_cases import case

from wellposed.convex import Clarabel, Design, Homotopy, RowFit, Schur, row_groups, row_problem
from wellposed.convex.rows import _COMMON, _OWN, _packed, _RowFile, _work
from wellposed.errors import FileFormatError, InputError


def data(rows: int = 20):
    found = case("plain", 0, m=60, d=14, rows=rows)
    return found.M[:, :9], found.M[:, 9:], found.z


@pytest.mark.parametrize("bound", ["state", "row"])
def test_bound_counts_a_or_the_whole_row(bound):
    X, U, Z = data()
    found = RowFit(kappa=0.5, bound=bound).solve(X, U, Z)
    counted = found.weights[:, :9] if bound == "state" else found.weights
    assert (counted.abs().sum(1) <= 0.5).all() and (counted.abs().sum(1) > 0.499).any()
    assert found.weights.abs().sum(1).max() > 0.51 or bound == "row"
    assert found.relative_gap.max() < 1e-9


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_workers_and_chunks_change_nothing(backend):
    X, U, Z = data()
    one = RowFit(kappa=0.5).solve(X, U, Z)
    many = RowFit(kappa=0.5, jobs=2, backend=backend, chunk=3).solve(X, U, Z)
    assert torch.allclose(one.weights, many.weights, atol=1e-12)
    assert torch.allclose(one.gap, many.gap, atol=1e-12)


def test_a_problem_survives_the_way_to_another_process():
    X, U, Z = data()
    problem = row_problem(Design.of(X, U), Z, kappa=0.5, capped=9, support=torch.rand(20, 14) < 0.8)
    here = Schur().solve(problem)
    common, part = _packed(problem, _COMMON), _packed(problem, _OWN)
    common["gram"].setflags(write=False)
    k, there = _work(*pickle.loads(pickle.dumps((common, Schur(), 3, part, _RowFile(None)))))
    assert k == 3
    assert torch.equal(here.weights, there.weights) and torch.equal(here.gap, there.gap)


def test_groups_use_their_columns_alone():
    X, U, Z = data(12)
    support = torch.zeros(12, 14, dtype=torch.bool)
    support[:6, :5], support[6:, 3:12] = True, True
    groups = row_groups(support, capped=9)
    assert sorted(len(group.rows) for group in groups) == [6, 6]
    found = RowFit(kappa=0.5).solve(X, U, Z, groups)
    assert (found.weights[~support] == 0).all() and found.relative_gap.max() < 1e-9
    M = torch.cat([X, U], 1)
    for rows, columns, capped in ((slice(0, 6), slice(0, 5), 5), (slice(6, 12), slice(3, 12), 6)):
        alone = row_problem(Design.of(M[:, columns]), Z[:, rows], kappa=0.5, capped=capped)
        assert torch.allclose(found.weights[rows, columns], Clarabel().solve(alone).weights, atol=1e-5)


def test_no_diagonal_means_a_support_of_its_own_for_every_row():
    X, U, Z = data(9)
    support = torch.ones(9, 14, dtype=torch.bool)
    support[:, :9] = ~torch.eye(9, dtype=torch.bool)
    groups = row_groups(support, capped=9)
    assert len(groups) == 1 and groups[0].support is not None
    found = RowFit(kappa=0.5).solve(X, U, Z, groups)
    assert (found.weights[:, :9].diagonal() == 0).all()
    assert found.relative_gap.max() < 1e-9


def test_progress_counts_rows():
    X, U, Z = data()
    seen = []
    RowFit(kappa=0.5, chunk=8, progress=lambda done, total: seen.append((done, total))).solve(X, U, Z)
    assert seen == [(8, 20), (16, 20), (20, 20)]


class InterruptedFitError(Exception):
    pass


def test_finished_rows_are_kept_and_stale_ones_are_not_used(tmp_path):
    X, U, Z = data()
    options = {"kappa": 0.5, "chunk": 5, "folder": tmp_path}

    def stop(done: int, total: int) -> None:
        if done == 10:
            raise InterruptedFitError

    with pytest.raises(InterruptedFitError):
        RowFit(progress=stop, **options).solve(X, U, Z)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 2
    again = RowFit(**options).solve(X, U, Z)
    assert len(list(tmp_path.iterdir())) == 4
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert torch.equal(again.weights, RowFit(kappa=0.5, chunk=5).solve(X, U, Z).weights)
    RowFit(**{**options, "kappa": 0.6}).solve(X, U, Z)
    RowFit(**options, solver=Homotopy(), bound="row").solve(X, U, Z)
    assert len(list(tmp_path.iterdir())) == 12


def test_finished_rows_are_read_within_the_size_of_the_problem(tmp_path):
    X, U, Z = data(rows=4)
    fit = RowFit(kappa=0.5, chunk=4, folder=tmp_path)
    fit.solve(X, U, Z)
    (path,) = tmp_path.glob("rows-*.npz")
    with np.load(path) as file:
        good = dict(file)
    bombs = [
        {"weights": np.zeros((4, 10**6))},  # a kilobyte for a megabyte
        {"weights": good["weights"][:3]},
        {"gap": np.zeros((4, 1))},
        {"steps": np.array(["a"] * 4)},
        {"more": np.zeros(10**6)},
    ]
    for bomb in bombs:
        np.savez_compressed(path, **good | bomb)
        with pytest.raises(FileFormatError, match=r"Delete it; they are solved anew"):
            fit.solve(X, U, Z)
    np.savez_compressed(path, **good)
    fit.solve(X, U, Z)


def test_outputs_are_fitted_without_a_cap():
    X, U, Z = data()
    exact = torch.linalg.lstsq(torch.cat([X, U], 1), Z).solution.mT
    assert torch.allclose(RowFit(kappa=torch.inf).solve(X, U, Z).weights, exact, atol=1e-8)


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="bound"):
        RowFit(bound="both")
    with pytest.raises(InputError, match="jobs"):
        RowFit(jobs=0)


def test_design_reads_pieces_as_one_matrix():
    X, U, Z = data()
    whole, pieces = Design.of(X, U), Design.of(X.float(), U.float(), samples=7)
    assert torch.allclose(whole.moments(Z).gram, pieces.moments(Z).gram, atol=1e-4)
    columns = torch.tensor([0, 4, 8, 9, 13])
    M = torch.cat([X, U], 1)[:, columns]
    part = Design.of(X, U, samples=7).restricted(torch.arange(0, 14, 1)).restricted(columns)
    assert part.widths == (3, 2)
    assert torch.allclose(part.moments(Z).gram, M.mT @ M)
    w = torch.randn(20, 5, dtype=torch.float64)
    assert torch.allclose(part.gradient(w, Z), (M @ w.mT - Z).mT @ M)
    assert torch.allclose(part.residual(w, Z), (M @ w.mT - Z).square().sum(0))
