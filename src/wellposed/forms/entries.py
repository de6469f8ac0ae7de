"""The non-zero entries of an operator, listed in pieces that fit in memory."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from wellposed.forms.block import Block
from wellposed.forms.convolution import Convolution
from wellposed.forms.operator import Operator
from wellposed.forms.operators import Dense, LowRank

PIECE = 1_000_000  # entries listed at once
Entries = tuple[Tensor, Tensor, Tensor]  # rows, columns, values


def entries(operator: Operator) -> Iterator[Entries]:
    """Lists rows, columns and values of the entries that differ from zero, piece by piece.

    Example:
        >>> import torch
        >>> [values.tolist() for _, _, values in entries(Dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])))]
        [[2.0, 3.0]]
    """
    for rows, columns, values in _pieces(operator):
        kept = (values != 0).nonzero()[:, 0]
        yield (rows, columns, values) if len(kept) == len(values) else (rows[kept], columns[kept], values[kept])


def _pieces(operator: Operator) -> Iterator[Entries]:
    if isinstance(operator, Block):
        down, across = ([0, *accumulate(sizes)] for sizes in (operator.heights, operator.widths))
        for (i, j), part in operator.parts.items():
            yield from _shifted(_pieces(part), down[i], across[j])
    elif isinstance(operator, Dense):
        yield from _row_pieces(operator.matrix)
    elif isinstance(operator, LowRank):
        step = max(1, PIECE // max(1, operator.shape[1]))
        for start in range(0, operator.shape[0], step):
            part = LowRank(operator.left[start : start + step], operator.right)
            yield from _shifted([part.coordinates()], start, 0)
    elif isinstance(operator, Convolution) and operator.groups == 1:
        yield from _channel_pieces(operator)
    else:
        yield operator.coordinates()


def _row_pieces(matrix: Tensor) -> Iterator[Entries]:
    step = max(1, PIECE // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        yield from _shifted([Dense(matrix[start : start + step]).coordinates()], start, 0)


def _channel_pieces(operator: Convolution) -> Iterator[Entries]:
    """Lists some output channels of a convolution at a time."""
    windows = math.prod(operator.output_shape[1:])
    step = max(1, PIECE // (windows * operator.weight[0].numel()))
    for start in range(0, operator.weight.shape[0], step):
        part = replace(operator, weight=operator.weight[start : start + step])
        down, across = (0, start * windows) if operator.transposed else (start * windows, 0)
        yield from _shifted([part.coordinates()], down, across)


def _shifted(pieces: Iterator[Entries] | list[Entries], down: int, across: int) -> Iterator[Entries]:
    for rows, columns, values in pieces:
        yield rows + down, columns + across, values
