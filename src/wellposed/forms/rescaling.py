"""Other units for the blocks of a state, so that |A|_inf shrinks and nothing else changes."""

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation, rescaled
from wellposed.conditions.rescaling import rescaling
from wellposed.errors import InputError
from wellposed.forms.block import Block
from wellposed.forms.operator import Operator, tensors
from wellposed.forms.operators import Diagonal
from wellposed.forms.system import block_norms

_OUT_OF_RANGE = (
    "the rescaled weights leave the range of {}; convert the form to float64, or ask for a larger kappa"
)


class RescaledBlocks(NamedTuple):
    """The operators and activations in the new units."""

    A: Block
    B: Block
    C: Block
    bias: Tensor | None
    activation: tuple[Activation, ...]


def rescaled_blocks(
    blocks: tuple[Block, Block, Block], bias: Tensor | None, activations: tuple[Activation, ...], kappa: float
) -> RescaledBlocks:
    """Rescales x_k <- d_k x_k with one d_k a block so that ``|A|_inf < kappa``, forming nothing.

    The d_k come from the norms of the blocks, N(A) of 003 eq. (2.6): if ``|D N D^-1|_inf < kappa`` then
    ``|D A D^-1|_inf < kappa``. They are powers of two, so that every bit of the outputs stays, wherever a
    power of two fits, which is always the case without loops.
    """
    A, B, C = blocks
    scale = rescaling(block_norms(A), kappa)
    power = [float(value) for value in scale.log2]
    new_A = {(i, j): _times(part, power[i] - power[j]) for (i, j), part in A.parts.items()}
    new_B = {(i, j): _times(part, power[i]) for (i, j), part in B.parts.items()}
    new_C = {(i, j): _times(part, -power[j]) for (i, j), part in C.parts.items()}
    return RescaledBlocks(
        Block(A.heights, A.widths, new_A, A.dtype, A.device),
        Block(B.heights, B.widths, new_B, B.dtype, B.device),
        Block(C.heights, C.widths, new_C, C.dtype, C.device),
        None if bias is None else _scaled_bias(bias, A.heights, power),
        tuple(rescaled(phi, value) for phi, value in zip(activations, power, strict=True)),
    )


def _scaled_bias(bias: Tensor, sizes: tuple[int, ...], power: list[float]) -> Tensor:
    pieces = zip(bias.split(sizes), power, strict=True)
    scaled = [_times(Diagonal(piece), value) for piece, value in pieces]
    return torch.cat([part.row_sums() for part in scaled])


def _times(operator: Operator, power: float) -> Operator:
    if power == 0:
        return operator
    scaled = operator.scaled(_power_of_two(power))
    # scaling back gives every bit unless a weight became infinite, or lost digits near the smallest numbers
    pairs = zip(tensors(operator.scaled(1.0)), tensors(scaled.scaled(_power_of_two(-power))), strict=True)
    tolerance = 0.0 if power.is_integer() else 8 * torch.finfo(operator.dtype).eps
    if not all(torch.allclose(old, new, rtol=tolerance, atol=0.0) for old, new in pairs):
        raise InputError(_OUT_OF_RANGE.format(operator.dtype))
    return scaled


def _power_of_two(power: float) -> float:
    if abs(power) > 1000:
        raise InputError(_OUT_OF_RANGE.format("any dtype"))
    return float(2.0**power)
