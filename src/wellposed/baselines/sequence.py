"""What the sequence models share: shapes in and out, and the normalisations that serve as controls."""

from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import InputError, unknown_name

Output = Literal["sequence", "last"]
Normalisation = Literal["first", "max"]
OUTPUTS: tuple[Output, ...] = ("sequence", "last")
NORMALISATIONS: tuple[Normalisation, ...] = ("first", "max")


def as_sequence(u: Tensor, features: int) -> Tensor:  # (B, T) or (B, T, p) -> (B, T, p)
    """Gives a batch of scalar series its feature dimension.

    Example:
        >>> as_sequence(torch.zeros(7, 10), 1).shape
        torch.Size([7, 10, 1])
    """
    sequence = u.unsqueeze(-1) if u.dim() == 2 else u
    if sequence.dim() != 3 or sequence.shape[-1] != features:
        series = " or (B, T)" if features == 1 else ""
        raise InputError(f"u must be (B, T, {features}){series}; received {tuple(u.shape)}")
    return sequence


def arrange(y: Tensor, u: Tensor, output: Output) -> Tensor:  # (B, T, q)
    """Picks the outputs: of the last step (B, q), or of all; a scalar series in gives a scalar series out.

    Example:
        >>> arrange(torch.zeros(7, 10, 1), torch.zeros(7, 10), "sequence").shape
        torch.Size([7, 10])
    """
    if output == "last":
        return y[:, -1]
    return y.squeeze(-1) if u.dim() == 2 and y.shape[-1] == 1 else y


def normalised(
    sequence: Tensor, kind: Normalisation | None
) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, p), (B, 1, p), (B, 1, 1)
    """Returns ``(s - shift) / scale`` with the shift and the scale of every sequence.

    "first" takes the first element as shift, so a translation of the sequence does not show; "max" takes the
    largest magnitude as scale, so a positive factor does not. The latter looks at the whole sequence, also
    for the outputs of early steps.

    Example:
        >>> s, shift, scale = normalised(torch.tensor([[[3.0], [5.0], [-6.0]]]), "max")
        >>> s.flatten().tolist(), scale.item()
        ([0.5, 0.8333333134651184, -1.0], 6.0)
    """
    shift, scale = torch.zeros_like(sequence[:, :1]), torch.ones_like(sequence[:, :1, :1])
    if kind == "first":
        shift = sequence[:, :1]
    elif kind == "max":
        largest = sequence.abs().amax((1, 2), keepdim=True)
        scale = torch.where(largest > 0, largest, scale)
    return (sequence - shift) / scale, shift, scale


def require_choice(kind: str, value: str | None, valid: tuple[str, ...]) -> None:
    """Raises unless the value is one of the valid ones.

    Example:
        >>> require_choice("output", "lats", OUTPUTS)
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown output 'lats'; valid: last, sequence; did you mean 'last'?
    """
    if value not in valid:
        raise unknown_name(kind, value, valid)
