"""Derivatives with respect to the noise, against autograd."""

import pytest
import torch

from wellposed.errors import InputError
from wellposed.models.noise import noise_sensitivity, sensitivity_norms

SIZE, STEPS = 6, 7


def _problem(layers: bool) -> tuple:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [draw(SIZE, SIZE) / 3 for _ in range(STEPS)]
    return (weights if layers else weights[0]), draw(3, SIZE), draw(3, SIZE)


@pytest.mark.parametrize("kind", ["additive", "multiplicative"])
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_recursion_equals_autograd(kind: str, layers: bool, many: bool, activation: str) -> None:
    weights, injection, xi = _problem(layers)
    options = {"kind": kind, "steps": None if layers else STEPS, "activation": activation}
    injections = [injection / (1 + step) for step in range(STEPS)] if many else injection

    def last(noise: torch.Tensor, row: int) -> torch.Tensor:
        part = slice(row, row + 1)
        given = [added[part] for added in injections] if many else injection[part]
        return noise_sensitivity(weights, given, noise[None], 0.3, start=injection[part], **options)[0][0]

    J = noise_sensitivity(weights, injections, xi, 0.3, start=injection, **options)[1]
    for row in range(3):
        expected = torch.autograd.functional.jacobian(lambda noise, row=row: last(noise, row), xi[row])
        torch.testing.assert_close(J[row], expected, rtol=1e-10, atol=1e-12)


def test_equilibrium_derivative_is_the_implicit_one() -> None:
    # At the equilibrium J = (I - diag(s) W)^-1 diag(s) eta, the implicit function theorem.
    W, injection, xi = _problem(False)
    z, J = noise_sensitivity(W, injection, xi, 0.5, steps=400)
    slope = torch.diag_embed(1 - z.square())
    expected = 0.5 * torch.linalg.solve(torch.eye(SIZE, dtype=z.dtype) - slope @ W, slope)
    torch.testing.assert_close(J, expected)
    torch.testing.assert_close(sensitivity_norms(J)[:, 0], expected[:, :, 0].norm(dim=1))


def test_steps_must_fit_the_weights() -> None:
    W, injection, xi = _problem(False)
    with pytest.raises(InputError, match="number of steps"):
        noise_sensitivity(W, injection, xi)
    with pytest.raises(InputError, match="one step a matrix"):
        noise_sensitivity([W, W], injection, xi, steps=3)
