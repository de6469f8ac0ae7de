"""Largest eigenvalues and singular values are never below those of LAPACK, and close to them."""

from fractions import Fraction

import pytest
import torch

from wellposed.conditions import norms
from wellposed.conditions.norms import largest_eigenvalue, largest_singular_value
from wellposed.forms import Dense
from wellposed.robust import boxes
from wellposed.robust.boxes import SMALL, operator_norm

F64 = torch.float64
MATRICES = {
    "random": lambda n: torch.randn(n, n, dtype=F64),
    "ones": lambda n: torch.ones(n, n, dtype=F64),
    "negative": lambda n: -torch.eye(n, dtype=F64),
    "zero": lambda n: torch.zeros(n, n, dtype=F64),
    "spread": lambda n: torch.diag(torch.linspace(-3, 2, n, dtype=F64)),
    "negative definite": lambda n: -(torch.eye(n, dtype=F64) + torch.ones(n, n, dtype=F64)),
    "tiny": lambda n: 1e-120 * torch.randn(n, n, dtype=F64),
}


@pytest.mark.parametrize("n", [1, 3, 120])
@pytest.mark.parametrize("name", MATRICES)
def test_eigenvalue_is_bounded_closely(name, n):
    S = MATRICES[name](n)
    S = (S + S.mT) / 2
    size = float(S.abs().sum(1).max())
    wanted = float(torch.linalg.eigvalsh(S)[-1])
    found = largest_eigenvalue(S)
    assert wanted - 1e-14 * size <= found <= wanted + 1e-3 * size


@pytest.mark.parametrize("shape", [(100, 80), (70, 300), (1, 5), (200, 2)])
def test_singular_value_is_bounded_closely(shape):
    matrix = torch.randn(shape, dtype=F64)
    wanted = float(torch.linalg.svdvals(matrix)[0])
    assert wanted * (1 - 1e-15) <= largest_singular_value(matrix) <= wanted * (1 + 1e-4)
    assert wanted * (1 - 1e-15) <= operator_norm(Dense(matrix)) <= wanted * (1 + 1e-4)
    assert max(shape) > SMALL or min(shape) <= SMALL


def test_a_wrong_guess_is_found_out(monkeypatch):
    """The proof is the factorisation: a guess that is too small is raised until it holds."""
    S = MATRICES["spread"](100)
    monkeypatch.setattr(norms, "_lanczos", lambda symmetric: (1.5, 0.01))
    assert 2 <= largest_eigenvalue(S) < 3.01
    monkeypatch.setattr(norms, "_lanczos", lambda symmetric: (-3.0, 1e-12))
    assert 2 <= largest_eigenvalue(S) <= 3.01


@pytest.mark.parametrize("missing", [2**-50, 2**-52])
def test_a_value_just_below_an_eigenvalue_is_not_proven(missing):
    S = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)  # eigenvalues -1 and 1
    assert not norms._not_above(S, 1 - missing)
    assert norms._not_above(S, 1 + 2**-40)


def test_a_residual_is_bounded_with_the_rounding_of_computing_it():
    left, right = torch.randn(2, 200, 1, 1, dtype=F64)
    bounds = norms._residual(left * right, left, right)  # of which only roundings are left
    for a, b, bound in zip(left.flatten().tolist(), right.flatten().tolist(), bounds.tolist(), strict=True):
        assert abs(Fraction(a * b) - Fraction(a) * Fraction(b)) <= Fraction(bound)


@pytest.mark.parametrize("shape", [(1, 300), (300, 1), (20, 30)])
def test_a_norm_of_what_is_too_large_for_singular_values_is_bounded(shape, monkeypatch):
    monkeypatch.setattr(boxes, "LARGEST_SVD", 0)
    found = operator_norm(Dense(torch.ones(shape, dtype=F64)))
    assert shape[0] * shape[1] <= Fraction(found) ** 2 <= shape[0] * shape[1] * (1 + 1e-9)
