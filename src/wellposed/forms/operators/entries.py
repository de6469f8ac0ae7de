"""The entries of operators: bounds of their absolute values, and lists of those that are not zero.

`abs_upper_bound` returns an operator that bounds the absolute value of another, entry by entry, rounding included.
`entries` lists rows, columns and values in pieces that fit in memory.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wellposed.conditions.rounding import EPS
from wellposed.forms.operators.base import Operator, Product, Sum, chain, tensors
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.plain import Dense, LowRank, Repeated
from wellposed.forms.operators.structured import Convolution

SMALLEST = 1e-150  # products of entries below it are not formed
LARGEST_DENSE = 8192  # states up to which a matrix is formed for a finer proof


def abs_upper_bound(operator: Operator, formed: bool = True) -> Operator:
    """Returns a float64 operator that is nowhere below the absolute value of the exact one.

    The absolute value of a product is formed if that is asked for and affordable, and what its rounding may have
    lost through cancellation is added; else it is bounded by the product of absolute values, which forms nothing.

    Example:
        >>> one = torch.ones(2, 1, dtype=torch.float64)
        >>> abs_upper_bound(LowRank(one, -one)).to_dense().round()
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """
    if isinstance(operator, Block):
        return abs_upper_bound_block(operator, operator.device, formed)
    if isinstance(operator, Repeated):
        return Repeated(abs_upper_bound(operator.inner, formed), operator.count)
    if isinstance(operator, Product | Sum | LowRank):
        return _bound_compound(operator, formed)
    return operator.abs()


def _bound_compound(operator: Product | Sum | LowRank, formed: bool) -> Operator:
    if not isinstance(operator, Sum) and least_entry(operator) < SMALLEST:
        return _bound_small(operator)
    if isinstance(operator, Product):
        bounds = [abs_upper_bound(factor, formed) for factor in operator.factors]
        outer, length = bounds[0], sum(part.shape[1] for part in bounds)
        for part in bounds[1:]:
            outer = chain(outer, part)
    elif isinstance(operator, Sum):
        terms = [abs_upper_bound(term, formed) for term in operator.terms]
        outer, length = terms[0], len(terms) + max(sum_length(term) for term in terms)
        for term in terms[1:]:
            outer = outer + term
    else:
        outer, length = LowRank(operator.left.abs(), operator.right.abs()), operator.left.shape[1]
        formed = True
    if operator.nonnegative() or not formed or math.prod(operator.shape) > LARGEST_DENSE**2:
        return outer
    return operator.abs() + outer.scaled(2 * (length + 2) * EPS)


def _bound_small(operator: Product | LowRank) -> Operator:
    """Bounds a product that would underflow while it is formed, by entries that do not."""
    given = operator.factors if isinstance(operator, Product) else (Dense(operator.left), Dense(operator.right.mT))
    floor = SMALLEST ** (1 / len(given))
    first, *rest = (_raised(abs_upper_bound(factor, False), floor) for factor in given)
    for part in rest:
        first = chain(first, part)
    return first


def _raised(value: Any, floor: float) -> Any:
    """Raises the positive entries of an operator to a number."""
    if isinstance(value, Tensor) and value.is_sparse:
        raised = _raised(value.values(), floor)
        return torch.sparse_coo_tensor(value.indices(), raised, value.shape, check_invariants=False).coalesce()
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.where(value > 0, value.clamp(min=floor), value)
    if isinstance(value, Operator):
        fields = {part.name: _raised(getattr(value, part.name), floor) for part in dataclasses.fields(value)}  # type: ignore[arg-type]
        return replace(value, **fields)  # type: ignore[type-var]
    if isinstance(value, dict):
        return {key: _raised(part, floor) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_raised(part, floor) for part in value)
    return value


def abs_upper_bound_block(block: Block, device: torch.device, formed: bool) -> Block:
    """Bounds every block of a matrix, in float64 on the given device."""
    exact = {key: part.to(device=device, dtype=torch.float64) for key, part in block.parts.items()}
    bounds = {key: abs_upper_bound(part, formed) for key, part in exact.items()}
    return Block(block.heights, block.widths, bounds, torch.float64, device)


def sum_length(operator: Operator) -> int:
    """Bounds how many roundings an entry of a product with the operator passes through."""
    if isinstance(operator, Product):
        return sum(sum_length(factor) for factor in operator.factors)
    if isinstance(operator, Sum):
        return len(operator.terms) + max(sum_length(term) for term in operator.terms)
    if isinstance(operator, Block):
        return max((sum(sum_length(part) for part in row.values()) for row in operator.rows()), default=0)
    if isinstance(operator, Repeated):
        return sum_length(operator.inner)
    if isinstance(operator, LowRank):
        return operator.shape[1] + operator.left.shape[1]
    return operator.shape[1] + 1


def underflow(operator: Operator, tiny: float) -> float:
    """Bounds what underflow may take from an entry of a product with the operator.

    A product of two numbers is off by `tiny` at most; in a product of operators, what the first one to be applied
    loses is multiplied by the others.

    Example:
        >>> underflow(Dense(torch.ones(2, 3)), 1.0)
        4.0
    """
    if isinstance(operator, LowRank):
        operator = Product((Dense(operator.left), Dense(operator.right.mT)))
    if isinstance(operator, Product):
        total = 0.0
        for factor in reversed(operator.factors):
            rows = abs_upper_bound(factor.to(torch.float64)).row_sums()
            total = total * float(rows.max() if len(rows) else 0.0) * (1 + 1e-6) + underflow(factor, tiny)
        return total
    if isinstance(operator, Sum):
        return sum(underflow(term, tiny) for term in operator.terms)
    if isinstance(operator, Block):
        return max((sum(underflow(part, tiny) for part in row.values()) for row in operator.rows()), default=0.0)
    if isinstance(operator, Repeated):
        return underflow(operator.inner, tiny)
    return (operator.shape[1] + 1) * tiny


def least_entry(operator: Operator) -> float:
    """Returns a number up to one that no product of entries, one a factor, is smaller than, zeros apart.

    Example:
        >>> least_entry(Dense(torch.tensor([[0.0, -0.25, 3.0]])))
        0.25
        >>> least_entry(Product((Dense(torch.tensor([[0.25]])), Dense(torch.tensor([[0.5]])))))
        0.125
    """
    if isinstance(operator, Product):
        return math.prod(least_entry(factor) for factor in operator.factors)
    if isinstance(operator, LowRank):
        return _least(operator.left) * _least(operator.right)
    if isinstance(operator, Sum):
        return min(least_entry(term) for term in operator.terms)
    if isinstance(operator, Block):
        return min((least_entry(part) for part in operator.parts.values()), default=1.0)
    if isinstance(operator, Repeated):
        return least_entry(operator.inner)
    return min((_least(part) for part in tensors(operator)), default=1.0)


def _least(values: Tensor) -> float:
    if not values.is_floating_point() or not values.numel():
        return 1.0
    size = values.detach().abs().double()
    return float(torch.where(size > 0, size, 1.0).amin().clamp(max=1.0))


def largest_entry(operator: Operator) -> float:
    """Returns a number from one on that no product of entries, one a factor, is larger than.

    Example:
        >>> largest_entry(Product((Dense(torch.tensor([[0.25]])), Dense(torch.tensor([[8.0]])))))
        8.0
    """
    if isinstance(operator, Product):
        return math.prod(largest_entry(factor) for factor in operator.factors)
    sizes = (part.detach().abs().double() for part in tensors(operator) if part.is_floating_point())
    return max([1.0, *(float(size.amax()) for size in sizes if size.numel())])


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
        nonzero = (values != 0).nonzero()[:, 0]
        yield (
            (rows, columns, values)
            if len(nonzero) == len(values)
            else (rows[nonzero], columns[nonzero], values[nonzero])
        )


def _pieces(operator: Operator) -> Iterator[Entries]:
    if isinstance(operator, Block):
        down, across = ([0, *accumulate(sizes)] for sizes in (operator.heights, operator.widths))
        for (i, j), part in operator.parts.items():
            yield from _shifted(_pieces(part), down[i], across[j])
    elif isinstance(operator, Dense | LowRank):
        step = max(1, PIECE // max(1, operator.shape[1]))
        for start in range(0, operator.shape[0], step):
            rows = slice(start, start + step)
            if isinstance(operator, Dense):
                yield from _shifted([Dense(operator.matrix[rows]).coordinates()], start, 0)
            else:
                yield from _shifted([LowRank(operator.left[rows], operator.right).coordinates()], start, 0)
    elif isinstance(operator, Convolution) and operator.groups == 1:
        yield from _channel_pieces(operator)
    else:
        yield operator.coordinates()


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
