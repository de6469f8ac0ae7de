"""Forms made of forms: one after the other, side by side, added and multiplied (003, section 2.4).

Nothing is formed: operators are chained and glued. A composition has no loop besides those of its parts, so it is
well-posed if and only if each of them is (003, Theorems 2 and 3), and its certificate looks at those loops alone.
`BlockForm` are the block matrices of a form, which `matmul`, `add_blocks`, `block_diag`, `vstack` and `hstack` put
together; `series`, `parallel`, `concatenate` and `add` are made of these. A `product` of forms is Lipschitz where
its factors are bounded (`product_lipschitz`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from wellposed.activations import Activation, multiply
from wellposed.conditions.rounding import double, upward
from wellposed.errors import InputError
from wellposed.forms.form import OPERATORS, ImplicitForm
from wellposed.forms.operators.base import Operator
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.plain import Identity, Zero, as_operator
from wellposed.forms.operators.structured import Selection


@dataclass(frozen=True)
class BlockForm:
    """A, B, C and D of a form as block matrices: B and D have the same inputs, C and D the same outputs."""

    A: Block
    B: Block
    C: Block
    D: Block
    bias: Tensor | None
    output_bias: Tensor | None
    activations: tuple[Activation, ...]
    labels: tuple[str, ...]

    @classmethod
    def of(cls, form: ImplicitForm) -> "BlockForm":
        """Reads a form; where D is not partitioned like B and C, inputs and outputs become one block each."""
        A, B, C = form.blocks
        D, cuts = form.D, (C.heights, B.widths)
        if isinstance(D, Block) and (D.heights, D.widths) == cuts:
            feedthrough = D
        elif isinstance(D, Zero):
            feedthrough = Block(*cuts, {}, form.dtype, form.device)
        else:
            B, C = one_column(B), one_row(C)
            feedthrough = Block(C.heights, B.widths, {(0, 0): D})
        return cls(A, B, C, feedthrough, form.bias, form.output_bias, form.activations, form.labels)

    def form(self, input_shape: tuple[int, ...]) -> ImplicitForm:
        """Builds the form; blocks without states are left out."""
        blocks = [k for k, size in enumerate(self.A.heights) if size] or [0]
        inputs, outputs = range(len(self.B.widths)), range(len(self.C.heights))
        D = self.D if self.D.parts else Zero(self.D.shape, self.A.dtype, self.A.device)
        return ImplicitForm(
            self.A.chosen(blocks, blocks),
            self.B.chosen(blocks, inputs),
            self.C.chosen(outputs, blocks),
            D,
            self.bias,
            tuple(self.activations[k] for k in blocks),
            input_shape,
            output_bias=self.output_bias,
            labels=tuple(self.labels[k] for k in blocks) if self.labels else None,
        )


def one_column(block: Block) -> Block:
    """Merges the block columns into one."""
    if len(block.widths) == 1:
        return block
    rows = {i: {(0, j): part for j, part in row.items()} for i, row in enumerate(block.rows()) if row}
    blocks = {(i, 0): Block((block.heights[i],), block.widths, row) for i, row in rows.items()}
    return Block(block.heights, (block.shape[1],), dict(blocks), block.kind, block.place)


def one_row(block: Block) -> Block:
    """Merges the block rows into one."""
    if len(block.heights) == 1:
        return block
    columns: dict[int, dict] = {}
    for (i, j), part in block.parts.items():
        columns.setdefault(j, {})[i, 0] = part
    blocks = {(0, j): Block(block.heights, (block.widths[j],), column) for j, column in columns.items()}
    return Block((block.shape[0],), block.widths, dict(blocks), block.kind, block.place)


def identity(sizes: Sequence[int], like: Block) -> Block:
    """Returns the identity with blocks of the given sizes."""
    blocks = {(k, k): Identity(size, like.dtype, like.device) for k, size in enumerate(sizes)}
    return Block(tuple(sizes), tuple(sizes), dict(blocks), like.kind, like.place)


def matmul(left: Block, right: Block) -> Block:
    """Multiplies block by block; partitions that differ are merged.

    Example:
        >>> row = Block((1,), (1, 1), {(0, 0): Identity(1)})
        >>> matmul(row, row.T).to_dense()
        tensor([[1.]])
    """
    if left.widths != right.heights:
        left, right = one_column(left), one_row(right)
    rows = right.rows()
    products: dict[tuple[int, int], Operator] = {}
    for (i, k), factor in sorted(left.parts.items(), key=lambda item: item[0]):
        for j, part in rows[k].items():
            term = factor @ part
            products[i, j] = products[i, j] + term if (i, j) in products else term
    return Block(left.heights, right.widths, products, left.kind, left.place)


def add_blocks(left: Block, right: Block) -> Block:
    """Adds block by block; partitions that differ are merged."""
    if left.heights != right.heights:
        left, right = one_row(left), one_row(right)
    if left.widths != right.widths:
        left, right = one_column(left), one_column(right)
    sums = dict(left.parts)
    for key, part in right.parts.items():
        sums[key] = sums[key] + part if key in sums else part
    return Block(left.heights, left.widths, sums, left.kind, left.place)


def block_diag(first: Block, second: Block) -> Block:
    """Puts two matrices on the diagonal of a larger one."""
    return _placed(first, second, (len(first.heights), len(first.widths)))


def vstack(first: Block, second: Block) -> Block:
    """Puts a matrix on top of another; column partitions that differ are merged."""
    if first.widths != second.widths:
        first, second = one_column(first), one_column(second)
    return _placed(first, second, (len(first.heights), 0))


def hstack(first: Block, second: Block) -> Block:
    """Puts a matrix to the left of another; row partitions that differ are merged."""
    if first.heights != second.heights:
        first, second = one_row(first), one_row(second)
    return _placed(first, second, (0, len(first.widths)))


def _placed(first: Block, second: Block, corner: tuple[int, int]) -> Block:
    down, across = corner
    blocks = first.parts | {(i + down, j + across): part for (i, j), part in second.parts.items()}
    heights = first.heights + second.heights if down else first.heights
    widths = first.widths + second.widths if across else first.widths
    return Block(heights, widths, blocks, first.kind, first.place)


def image(block: Block, vector: Tensor | None) -> Tensor | None:
    """Multiplies a vector; None is zero."""
    return None if vector is None or not block.parts else block.apply(vector[None])[0]


def add_vectors(*vectors: Tensor | None) -> Tensor | None:
    """Adds vectors of which some may be missing."""
    given = [vector for vector in vectors if vector is not None]
    return torch.stack(given).sum(0) if len(given) > 1 else (given[0] if given else None)


def cat_vectors(first: Tensor | None, second: Tensor | None, sizes: tuple[int, int], like: Block) -> Tensor | None:
    """Concatenates two vectors of which one may be missing."""
    if first is None and second is None:
        return None
    empty = [torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes]
    return torch.cat([zero if v is None else v for v, zero in zip((first, second), empty, strict=True)])


def joined_labels(first: BlockForm, second: BlockForm) -> tuple[str, ...]:
    """Lists all labels; blocks of a form without labels are named after their activation."""
    if not first.labels and not second.labels:
        return ()
    labels = [part.labels or tuple(phi.name for phi in part.activations) for part in (first, second)]
    return labels[0] + labels[1]


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
    (q, p), entry_type = D.shape, (D.dtype, D.device)
    heights, widths = (D.heights, D.widths) if isinstance(D, Block) else ((q,), (p,))
    B, C = Block((0,), widths, {}, *entry_type), Block(heights, (0,), {}, *entry_type)
    A = Zero((0, 0), *entry_type)
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
    check_same_device(first, second)
    if first.sizes[2] != second.sizes[1]:
        raise InputError(
            f"in series, the outputs of a form are the inputs of the next; received {first.sizes[2]} outputs "
            f"and {second.sizes[1]} inputs; put a linear form between them"
        )
    f, g = BlockForm.of(first), BlockForm.of(second)
    upper = hstack(g.A, matmul(g.B, f.C))
    lower = hstack(Block(f.A.heights, g.A.widths, {}, g.A.kind, g.A.place), f.A)
    return BlockForm(
        vstack(upper, lower),
        vstack(matmul(g.B, f.D), f.B),
        hstack(g.C, matmul(g.D, f.C)),
        matmul(g.D, f.D),
        cat_vectors(
            add_vectors(g.bias, image(g.B, f.output_bias)), f.bias, (second.sizes[0], first.sizes[0]), g.A
        ),
        add_vectors(g.output_bias, image(g.D, f.output_bias)),
        g.activations + f.activations,
        joined_labels(g, f),
    ).form(first.input_shape)


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
    check_same_device(first, second)
    return _stacked(first, second, (block_diag,) * 3, (first.sizes[1] + second.sizes[1],))


def concatenate(first: ImplicitForm, *rest: ImplicitForm) -> ImplicitForm:
    """Gives forms the same input and stacks their outputs: ``concatenate(f, g)(u) = (f(u), g(u))``.

    Example:
        >>> import torch
        >>> concatenate(linear(torch.eye(1)), linear(2 * torch.eye(1)))(torch.ones(1, 1))
        tensor([[1., 2.]])
    """
    return reduce(_concatenate, rest, first)


def _concatenate(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    check_same_device(first, second)
    check_same_inputs(first, second)
    return _stacked(first, second, (vstack, block_diag, vstack), first.input_shape)


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
    check_same_device(first, second)
    check_same_inputs(first, second)
    check_same_outputs(first, second)
    return _stacked(first, second, (vstack, hstack, add_blocks), first.input_shape)


def _stacked(
    first: ImplicitForm, second: ImplicitForm, how: tuple[Arrange, Arrange, Arrange], shape: tuple[int, ...]
) -> ImplicitForm:
    """Joins forms that do not feed one another; `how` arranges B, C and D."""
    f, g = BlockForm.of(first), BlockForm.of(second)
    states, outputs = (first.sizes[0], second.sizes[0]), (first.sizes[2], second.sizes[2])
    if how[1] is hstack:
        shift = add_vectors(f.output_bias, g.output_bias)
    else:
        shift = cat_vectors(f.output_bias, g.output_bias, outputs, f.A)
    return BlockForm(
        block_diag(f.A, g.A),
        how[0](f.B, g.B),
        how[1](f.C, g.C),
        how[2](f.D, g.D),
        cat_vectors(f.bias, g.bias, states, f.A),
        shift,
        f.activations + g.activations,
        joined_labels(f, g),
    ).form(shape)


def check_same_device(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms have the same dtype and device."""
    if (first.dtype, first.device) != (second.dtype, second.device):
        raise InputError(
            f"forms are composed in one type and on one device; received {first.dtype} on {first.device} and "
            f"{second.dtype} on {second.device}; convert one with .to()"
        )


def check_same_inputs(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms have the same number of inputs."""
    if first.sizes[1] != second.sizes[1]:
        raise InputError(
            f"forms of one input need as many entries in it; received {first.sizes[1]} and {second.sizes[1]}"
        )


def check_same_outputs(first: ImplicitForm, second: ImplicitForm) -> None:
    """Raises unless both forms have the same number of outputs."""
    if first.sizes[2] != second.sizes[2]:
        raise InputError(
            f"outputs are combined one by one, so both forms need as many; received {first.sizes[2]} and "
            f"{second.sizes[2]}"
        )


def product(first: ImplicitForm, second: ImplicitForm, bounds: tuple[float, float] | None = None) -> ImplicitForm:
    """Multiplies the outputs of two forms with the same input: ``product(f, g)(u) = f(u) * g(u)``.

    A block of pairs (f_i, g_i) -> (f_i g_i, 0) is put in front of the states of both. The factors are clipped
    at their bounds ``|f(u)| <= c1`` and ``|g(u)| <= c2``, which makes the block Lipschitz (003, section 2.4;
    `product_lipschitz`); within the bounds the product is exact.

    Args:
        bounds: (c1, c2); None derives them from the images of the activations that C reads, ``|C| |x| + |c|``,
            which are bounded only where D is zero.

    Example:
        >>> from wellposed.forms.compose import linear
        >>> same = linear(torch.eye(1))
        >>> product(same, same, bounds=(10.0, 10.0))(torch.tensor([[3.0]]))
        tensor([[9.]])
    """
    check_same_device(first, second)
    check_same_inputs(first, second)
    check_same_outputs(first, second)
    c1, c2 = (output_bound(first), output_bound(second)) if bounds is None else bounds
    if not (0 <= c1 < math.inf and 0 <= c2 < math.inf):
        raise InputError(
            f"a product is Lipschitz for bounded factors only; here |f| <= {c1:g} and |g| <= {c2:g}; pass "
            "bounds=(c1, c2), at which they are clipped, or end the factors with a bounded activation as tanh"
        )
    q, entry_type = first.sizes[2], (first.dtype, first.device)
    entry = torch.arange(2 * q, device=first.device)
    inputs = {
        (0, 0): Selection(torch.where(entry % 2 == 0, entry // 2, -1), q, first.dtype),
        (0, 1): Selection(torch.where(entry % 2 == 1, entry // 2, -1), q, first.dtype),
    }
    pairs = ImplicitForm(
        Block((2 * q,), (2 * q,), {}, *entry_type),
        Block((2 * q,), (q, q), dict(inputs)),
        Selection(entry[::2], 2 * q, first.dtype),
        activation=[multiply(c1, c2)],
        labels=["product"] if first.labels or second.labels else None,
    )
    return series(concatenate(first, second), pairs)


OPERATORS.update({">>": series, "+": add, "*": product})


def output_bound(form: ImplicitForm) -> float:
    """Bounds every ``|y_i|`` over all inputs, rounded up; infinite where D is not zero or a state unbounded.

    Example:
        >>> from wellposed.forms.compose import linear
        >>> squashed = ImplicitForm(torch.zeros(1, 1), torch.eye(1), 2 * torch.eye(1), activation="tanh")
        >>> output_bound(squashed) < 2.00001, output_bound(linear(torch.eye(1)))
        (True, inf)
    """
    f = BlockForm.of(form)
    if f.D.parts:
        return math.inf
    limits = [max(abs(low), abs(high)) for low, high in (phi.image for phi in f.activations)]
    bound = torch.zeros(form.sizes[2], dtype=torch.float64, device=form.device)
    if form.output_bias is not None:
        bound = bound + double(form.output_bias).abs()
    if not all(math.isfinite(limits[j]) for _, j in f.C.parts):
        return math.inf
    sizes = [limit if math.isfinite(limit) else 0.0 for limit in limits]
    states = [bound.new_full((1, n), size) for n, size in zip(f.A.heights, sizes, strict=True)]
    with torch.no_grad():
        bound = bound + f.C.to(torch.float64).abs().apply(torch.cat(states, dim=1))[0]
    # the last factor lets sums that are rounded in the form's own type pass unclipped
    return float(upward(bound, form.sizes[0] + 2).amax()) * (1 + form.sizes[0] * torch.finfo(form.dtype).eps)


def product_lipschitz(c1: float, gamma1: float, c2: float, gamma2: float) -> float:
    """Returns the Lipschitz constant max(c2 gamma_1, c1 gamma_2) of a product of bounded maps (003, section 2.4).

    ``|phi_1(a) phi_2(b) - phi_1(a') phi_2(b')| <= c2 gamma_1 |a - a'| + c1 gamma_2 |b - b'|``, so the constant is
    that of the l1 norm of (a, b).

    Args:
        c1, c2: bounds of ``|phi_1|`` and ``|phi_2|``.
        gamma1, gamma2: their Lipschitz constants.

    Example:
        >>> product_lipschitz(1.0, 0.25, 3.0, 1.0)
        1.0
    """
    return max(c2 * gamma1, c1 * gamma2)
