"""How states move with the noise: the derivatives of 004 (section 3.3 and appendix A), by their recursions."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jvp

from wellposed.activations import Activation, get_activation
from wellposed.errors import InputError
from wellposed.models.noise import Kind


def noise_sensitivity(
    weights: Tensor | Sequence[Tensor],
    injection: Tensor | Sequence[Tensor],
    xi: Tensor,
    eta: float = 1.0,
    *,
    activation: str | Activation = "tanh",
    kind: Kind = "additive",
    steps: int | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the last state and its derivative with respect to noise that is held fixed.

    States follow ``z <- phi(s + g xi)`` with ``s = W z + injection``; g is `eta` (additive, 004 eqs. 8 and 13) or
    ``eta |s|_2`` (multiplicative, eqs. 22 and 41). The derivative J follows
    ``J <- diag(phi') (W J + g I + xi (dg)')`` with ``(dg)' = eta s' W J / |s|_2``, which is eqs. 9, 11, 25 and 44;
    the closed forms (21), (31) and (40) of 004 move diagonal matrices past W and are something else.

    Args:
        weights: one matrix for all steps (an equilibrium model), or one for each (a feed-forward network).
        injection: what input and bias add to every step, ``(B, d)``, or one such tensor for each step. A
            feed-forward network whose input enters only by its first state (004 eqs. 10 and 32) has its biases
            here and the input as `start`.
        xi: the noise, ``(B, d)``.
        eta: its amplitude.
        steps: of an equilibrium model; as many as there are weights otherwise.
        start: the first state, zeros if None.

    Returns:
        the states ``(B, d)`` and the derivatives ``(B, d, d)``, one column for each entry of xi.
    """
    matrices = _matrices(weights, steps)
    function = get_activation(activation).function
    injections = [injection] * len(matrices) if isinstance(injection, Tensor) else list(injection)
    z = torch.zeros_like(xi) if start is None else start
    J = z.new_zeros(*z.shape, z.shape[1])
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    for W, added in zip(matrices, injections, strict=True):
        s = z @ W.mT + added
        moved = W @ J  # (B, d, d)
        if kind == "additive":
            total, moved = s + eta * xi, moved + eta * eye
        else:
            size = torch.linalg.vector_norm(s, dim=1, keepdim=True)
            gradient = eta * (s / size)[:, None, :] @ moved  # (B, 1, d)
            total, moved = s + eta * size * xi, moved + eta * size[:, :, None] * eye + xi[:, :, None] * gradient
        z, slope = jvp(function, (total,), (torch.ones_like(total),))[:2]
        J = slope[:, :, None] * moved
    return z, J


def sensitivity_norms(J: Tensor) -> Tensor:  # (B, d)
    """Returns ``|dz / dxi_i|_2`` for each entry of the noise, the quantity of 004 Figure 2b.

    Example:
        >>> sensitivity_norms(torch.eye(3)[None])
        tensor([[1., 1., 1.]])
    """
    return torch.linalg.vector_norm(J, dim=1)


def _matrices(weights: Tensor | Sequence[Tensor], steps: int | None) -> list[Tensor]:
    if isinstance(weights, Tensor):
        if steps is None or steps < 1:
            raise InputError(f"an equilibrium model needs a number of steps, at least 1; received {steps}")
        return [weights] * steps
    if steps is not None and steps != len(weights):
        raise InputError(f"a feed-forward network has one step a matrix: {len(weights)}; received {steps}")
    return list(weights)
