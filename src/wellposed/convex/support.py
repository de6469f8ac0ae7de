"""Which entries of (A, B) a fit may use."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from wellposed.convex.states import States
from wellposed.errors import InputError, unknown_name

SUPPORTS = ("layered", "network", "triangular", "hollow", "full")


def block_starts(sizes: Sequence[int]) -> list[int]:
    """Returns where blocks begin and where the last one ends.

    Example:
        >>> block_starts((2, 3))
        [0, 2, 5]
    """
    return [0, *accumulate(sizes)]


def support_mask(states: States, support: str | Tensor = "layered") -> Tensor:  # (n, n + p) bool
    """Marks the entries of (A, B) that may differ from zero.

    Args:
        states: of n states and p inputs.
        support: "layered" lets the rows of a layer use what that layer reads (all earlier layers and the inputs
            where the network has no form); "network" the entries that are not zero in the network; "triangular"
            all earlier layers and the inputs; "hollow" everything but diag(A); "full" everything; or a bool mask
            ``(n, n + p)``, or ``(n, n)`` for A alone.

    Example:
        >>> from wellposed.activations import get_activation
        >>> one, relu = torch.ones(4, 1), get_activation("relu")
        >>> support_mask(States(one, torch.ones(4, 2), torch.ones(4, 2), one, (1, 1), (relu, relu)), "triangular")
        tensor([[False,  True,  True],
                [False, False,  True]])
    """
    n, p = states.X.shape[1], states.U.shape[1]
    if isinstance(support, Tensor):
        return _given(support, n, p)
    if support not in SUPPORTS:
        raise unknown_name("support", support, SUPPORTS)
    if support in ("full", "hollow"):
        mask = torch.ones(n, n + p, dtype=torch.bool)
        if support == "hollow":
            mask[:, :n].fill_diagonal_(False)
        return mask
    if support == "triangular" or states.form is None:
        return _triangular(states.blocks, p)
    form = states.form
    if support == "network":
        return torch.cat([form.A.to_dense() != 0, form.B.to_dense() != 0], dim=1)
    return _layered(states)


def _given(mask: Tensor, n: int, p: int) -> Tensor:
    if mask.dtype != torch.bool or tuple(mask.shape) not in ((n, n), (n, n + p)):
        raise InputError(
            f"a support is a bool mask of the shape {(n, n + p)} for (A, B), or {(n, n)} for A; "
            f"received {mask.dtype} {tuple(mask.shape)}"
        )
    if mask.shape[1] == n:
        return torch.cat([mask, torch.ones(n, p, dtype=torch.bool, device=mask.device)], dim=1)
    return mask


def _triangular(sizes: Sequence[int], p: int) -> Tensor:
    n, starts = sum(sizes), block_starts(sizes)
    mask = torch.zeros(n, n + p, dtype=torch.bool)
    for low, high in pairwise(starts):
        mask[low:high, high:] = True
    return mask


def _layered(states: States) -> Tensor:
    form = states.form
    assert form is not None
    A, B, _ = form.blocks
    mask = torch.zeros(A.shape[0], A.shape[1] + B.shape[1], dtype=torch.bool)
    for operator, offset in ((A, 0), (B, A.shape[1])):
        down, right = block_starts(operator.heights), block_starts(operator.widths)
        for i, j in operator.parts:
            mask[down[i] : down[i + 1], offset + right[j] : offset + right[j + 1]] = True
    return mask


def is_feedforward(mask: Tensor, sizes: Sequence[int]) -> bool:
    """Says whether every layer reads only later blocks, that is, earlier layers.

    Example:
        >>> is_feedforward(torch.tensor([[False, True], [False, False]]), (1, 1))
        True
    """
    starts = block_starts(sizes)
    return not any(bool(mask[low:high, :high].any()) for low, high in pairwise(starts))
