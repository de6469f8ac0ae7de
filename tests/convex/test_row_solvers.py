"""Every row solver against the conic oracle, on hundreds of rows of every kind of degeneracy."""

import math

import pytest
import torch
from row_cases import KINDS, agrees, case

from wellposed.convex import (
    ROW_SOLVERS,
    Automatic,
    Clarabel,
    Cvxpy,
    Design,
    Homotopy,
    Projected,
    Schur,
    duality_gap,
    row_problem,
)
from wellposed.errors import InputError, UnknownNameError

KAPPAS = (0.1, 0.7, 3.0, 1e2)
ROW = {"homotopy": Homotopy(), "projected": Projected(tol=1e-8), "automatic": Automatic()}
STATE = {
    "homotopy": Schur(Homotopy()),
    "refined": Schur(Homotopy(), refine=1),
    "projected": Schur(Projected(tol=1e-8)),
    "automatic": Automatic(),
}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROW)
def test_bound_on_the_row_agrees_with_the_oracle(name, kind):
    for seed, kappa in enumerate(KAPPAS):
        problem = case(kind, seed).problem(kappa)
        agrees(ROW[name], problem, Clarabel().solve(problem), 1e-8 if name == "projected" else 1e-9)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATE)
def test_bound_on_the_state_agrees_with_the_oracle(name, kind):
    for seed, kappa in enumerate(KAPPAS):
        problem = case(kind, seed).problem(kappa, capped=8)
        agrees(STATE[name], problem, Clarabel().solve(problem), 1e-6)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("capped", [12, 8, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_elastic_net_agrees_with_the_oracle(kind, capped):
    for kappa in (0.4, 5.0) if capped else (math.inf,):
        problem = case(kind, 3).problem(kappa, capped=capped, lasso=0.8, ridge=0.3)
        agrees(Automatic(), problem, Clarabel().solve(problem), 1e-8)


def test_modelled_solves_the_same_problem_and_one_of_its_own():
    problem = case("bias", 0, rows=2).problem(0.7, capped=11)
    plain = Cvxpy().solve(problem)
    assert plain.relative_gap.max() < 1e-6
    cvxpy = pytest.importorskip("cvxpy")
    grouped = Cvxpy(penalty=lambda a, b: 1e3 * cvxpy.norm(b)).solve(problem)
    assert grouped.weights[:, 11:].abs().max() < 1e-6 < plain.weights[:, 11:].abs().min()


def test_a_solver_that_gives_up_is_an_error_of_ours(monkeypatch):
    cvxpy = pytest.importorskip("cvxpy")

    def fail(self, **options):
        raise cvxpy.error.SolverError("no progress")

    monkeypatch.setattr(cvxpy.Problem, "solve", fail)
    with pytest.raises(InputError, match=r"CLARABEL gave up on row 0 .* scales"):
        Cvxpy().solve(case("plain", 0).problem(0.7))


def test_exact_states_are_met_or_refused():
    M = torch.eye(3, dtype=torch.float64)
    problem = row_problem(Design.of(M), torch.full((3, 1), 0.2, dtype=torch.float64), kappa=0.9, capped=3)
    assert Cvxpy(equality=True).solve(problem).weights.sub(0.2).abs().max() < 1e-6
    tight = row_problem(Design.of(M), torch.ones(3, 1, dtype=torch.float64), kappa=0.9, capped=3)
    with pytest.raises(InputError, match="no solution"):
        Cvxpy(equality=True).solve(tight)


def test_refinement_recovers_digits_that_the_complement_loses():
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    X = U @ torch.randn(6, 5, generator=generator, dtype=torch.float64)
    X = X + 1e-5 * torch.randn(60, 5, generator=generator, dtype=torch.float64)
    z = X @ torch.randn(5, 3, generator=generator, dtype=torch.float64)
    problem = row_problem(Design.of(X, U), z, kappa=0.5, capped=5)
    plain, refined = (Schur(refine=k).solve(problem) for k in (0, 2))
    gaps = [duality_gap(problem, found.weights, exact=True).max() for found in (plain, refined)]
    assert gaps[1] < gaps[0] / 10


def test_inactive_cap_gives_least_squares():
    data = case("plain", 0)
    exact = torch.linalg.lstsq(data.M, data.z).solution.mT
    for solver in (Homotopy(), Projected(tol=1e-11)):
        assert torch.allclose(solver.solve(data.problem(1e3)).weights, exact, atol=1e-6)


def test_path_ends_exactly_at_the_cap():
    data = case("plain", 0, m=80, d=40)
    for kappa in (0.3, 0.99):
        norm = Homotopy().solve(data.problem(kappa)).weights.abs().sum(1)
        assert (norm <= kappa).all() and (norm > kappa * (1 - 1e-12)).all()


def test_equal_columns_that_meet_again_with_the_other_sign():
    torch.manual_seed(0)
    M, z = torch.randn(50, 30).double(), torch.randn(50, 200).double()
    problem = row_problem(Design.of(M), z, kappa=5.0, capped=30)
    assert Homotopy().solve(problem).relative_gap.max() < 1e-10


def test_names_and_refusals():
    problem = case("plain", 0).problem(0.5, capped=8, lasso=0.1)
    with pytest.raises(InputError, match="Projected"):
        Schur().solve(problem)
    with pytest.raises(UnknownNameError, match="homotopy"):
        ROW_SOLVERS.get("homotopi")
    plain = case("plain", 0).problem(0.5, capped=8)
    for name in ("automatic", "homotopy", "conic", "cvxpy"):
        assert ROW_SOLVERS.get(name).solve(plain).relative_gap.max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kappa": 0.0}, "kappa"),
        ({"capped": 99}, "capped"),
        ({"lasso": -1.0}, "lasso"),
        ({"ridge": math.nan}, "ridge"),
        ({"support": torch.ones(3)}, "support"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    data = case("plain", 0)
    with pytest.raises(InputError, match=message):
        row_problem(Design.of(data.M), data.z, **{"kappa": 1.0, "capped": 12, **change})


def test_states_that_are_not_finite_are_refused():
    data = case("plain", 0)
    with pytest.raises(InputError, match="NaN"):
        row_problem(Design.of(data.M.log()), data.z, kappa=1.0, capped=12)
    with pytest.raises(InputError, match="samples"):
        row_problem(Design.of(data.M[:0]), data.z[:0], kappa=1.0, capped=12)
