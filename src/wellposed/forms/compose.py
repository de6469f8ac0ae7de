"""Forms made of forms: one after the other, side by side, and added (003, section 2.4).

Nothing is formed: operators are chained and glued. A composition has no loop besides those of its parts, so it
is well-posed if and only if each of them is (003, Theorems 2 and 3), and its certificate looks at those loops
alone.
"""

from collections.abc import Callable
from functools import reduce

from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.block import Block
from wellposed.forms.blocks import (
    Blocks,
    above,
    beside,
    diagonal,
    image,
    joined,
    joined_labels,
    plus,
    times,
    total,
)
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operator import Operator
from wellposed.forms.operators import Zero, as_operator

Arrange = Callable[[Block, Block], Block]


def linear(
    D: Operator | Tensor, output_bias: Tensor | None = None, input_shape: tuple[int, ...] | None = None
) -> ImplicitForm:
    """Builds the form ``y = Du + c``, which has no states.

    Example:
        >>> import torch
        >>> linear(torch.tensor([[2.0, 1.0]]))(torch.ones(1, 2))
        tensor([[3.]])
    """
    D = as_operator(D)
    (q, p), home = D.shape, (D.dtype, D.device)
    heights, widths = (D.heights, D.widths) if isinstance(D, Block) else ((q,), (p,))
    B, C = Block((0,), widths, {}, *home), Block(heights, (0,), {}, *home)
    A = Zero((0, 0), *home)
    return ImplicitForm(A, B, C, D, None, "identity", input_shape, output_bias=output_bias)


def series(first: ImplicitForm, *rest: ImplicitForm) -> ImplicitForm:
    """Puts forms one after the other: ``series(f, g)(u) = g(f(u))``.

    The state is (x_g, x_f) and, as in 003, section 2.4, with the biases carried along,
    ``A = [[A_g, B_g C_f], [0, A_f]]``, ``B = [B_g D_f; B_f]``, ``C = (C_g, D_g C_f)``, ``D = D_g D_f``,
    ``b = (b_g + B_g c_f, b_f)``, ``c = c_g + D_g c_f``.

    Example:
        >>> import torch
        >>> double, shift = linear(2 * torch.eye(1)), linear(torch.eye(1), torch.ones(1))
        >>> series(double, shift)(torch.ones(1, 1)), series(shift, double)(torch.ones(1, 1))
        (tensor([[3.]]), tensor([[4.]]))
    """
    return reduce(_after, rest, first)


def _after(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    same_home(first, second)
    if first.sizes[2] != second.sizes[1]:
        raise InputError(
            f"in series, the outputs of a form are the inputs of the next; received {first.sizes[2]} outputs "
            f"and {second.sizes[1]} inputs; put a linear form between them"
        )
    f, g = Blocks.of(first), Blocks.of(second)
    upper = beside(g.A, times(g.B, f.C))
    lower = _below(g.A, f.A)
    return Blocks(
        above(upper, lower),
        above(times(g.B, f.D), f.B),
        beside(g.C, times(g.D, f.C)),
        times(g.D, f.D),
        joined(total(g.bias, image(g.B, f.output_bias)), f.bias, (second.sizes[0], first.sizes[0]), g.A),
        total(g.output_bias, image(g.D, f.output_bias)),
        g.activations + f.activations,
        joined_labels(g, f),
    ).form(first.input_shape)


def _below(first: Block, second: Block) -> Block:
    """Returns ``(0, second)`` with as many columns of zeros as `first` has."""
    return beside(Block(second.heights, first.widths, {}, first.kind, first.place), second)


def parallel(first: ImplicitForm, *rest: ImplicitForm) -> ImplicitForm:
    """Puts forms side by side: ``parallel(f, g)(u, v) = (f(u), g(v))``.

    All matrices are block diagonal.

    Example:
        >>> import torch
        >>> parallel(linear(torch.eye(1)), linear(2 * torch.eye(1)))(torch.ones(1, 2))
        tensor([[1., 2.]])
    """
    return reduce(_parallel, rest, first)


def _parallel(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    same_home(first, second)
    return _stacked(first, second, (diagonal,) * 3, (first.sizes[1] + second.sizes[1],))


def concatenate(first: ImplicitForm, *rest: ImplicitForm) -> ImplicitForm:
    """Gives forms the same input and stacks their outputs: ``concatenate(f, g)(u) = (f(u), g(u))``.

    Example:
        >>> import torch
        >>> concatenate(linear(torch.eye(1)), linear(2 * torch.eye(1)))(torch.ones(1, 1))
        tensor([[1., 2.]])
    """
    return reduce(_concatenate, rest, first)


def _concatenate(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    same_home(first, second)
    same_input(first, second)
    return _stacked(first, second, (above, diagonal, above), first.input_shape)


def add(first: ImplicitForm, *rest: ImplicitForm) -> ImplicitForm:
    """Adds the outputs of forms with the same input: ``add(f, g)(u) = f(u) + g(u)``.

    ``A = diag(A_f, A_g)``, ``B = [B_f; B_g]``, ``C = (C_f, C_g)``, ``D = D_f + D_g``.

    Example:
        >>> import torch
        >>> add(linear(torch.eye(1)), linear(2 * torch.eye(1)))(torch.ones(1, 1))
        tensor([[3.]])
    """
    return reduce(_add, rest, first)


def _add(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    same_home(first, second)
    same_input(first, second)
    same_output(first, second)
    return _stacked(first, second, (above, beside, plus), first.input_shape)


def _stacked(
    first: ImplicitForm, second: ImplicitForm, how: tuple[Arrange, Arrange, Arrange], shape: tuple[int, ...]
) -> ImplicitForm:
    """Joins forms that do not feed one another; `how` arranges B, C and D."""
    f, g = Blocks.of(first), Blocks.of(second)
    states, outputs = (first.sizes[0], second.sizes[0]), (first.sizes[2], second.sizes[2])
    if how[1] is beside:
        shift = total(f.output_bias, g.output_bias)
    else:
        shift = joined(f.output_bias, g.output_bias, outputs, f.A)
    return Blocks(
        diagonal(f.A, g.A),
        how[0](f.B, g.B),
        how[1](f.C, g.C),
        how[2](f.D, g.D),
        joined(f.bias, g.bias, states, f.A),
        shift,
        f.activations + g.activations,
        joined_labels(f, g),
    ).form(shape)


def same_home(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms have one type of numbers and one device."""
    if (first.dtype, first.device) != (second.dtype, second.device):
        raise InputError(
            f"forms are composed in one type and on one device; received {first.dtype} on {first.device} and "
            f"{second.dtype} on {second.device}; convert one with .to()"
        )


def same_input(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms take as many inputs."""
    if first.sizes[1] != second.sizes[1]:
        raise InputError(
            f"forms of one input need as many entries in it; received {first.sizes[1]} and {second.sizes[1]}"
        )


def same_output(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms have as many outputs."""
    if first.sizes[2] != second.sizes[2]:
        raise InputError(
            f"outputs are combined one by one, so both forms need as many; received {first.sizes[2]} and "
            f"{second.sizes[2]}"
        )
