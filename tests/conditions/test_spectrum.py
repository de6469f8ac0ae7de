"""Largest eigenvalues and singular values are never below those of LAPACK, and close to them."""

import pytest
import torch

from wellposed.conditions import norms
from wellposed.conditions.norms import largest_eigenvalue, largest_singular_value
from wellposed.forms import Dense
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
