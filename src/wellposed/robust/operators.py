"""The operators of a form as bounds need them: themselves, their absolute values and their transposes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellposed.forms import Block, ImplicitForm, Operator
from wellposed.forms.compose import Blocks
from wellposed.forms.evaluation import Plan
from wellposed.forms.operators.entries import cover, sum_length

Parts = dict[tuple[int, int], Operator]


@dataclass(frozen=True)
class Operators:
    """A form's operators in its own type, block by block.

    `size` is nowhere below ``|P||Q|`` where an operator is a product PQ and bounds the rounding of a product with
    it; `absolute` is nowhere below ``|PQ|``, which may be smaller.
    """

    form: ImplicitForm

    @cached_property
    def blocks(self) -> Blocks:
        """A, B, C and D cut alike."""
        return Blocks.of(self.form)

    @property
    def plan(self) -> Plan:
        """The order of the blocks."""
        return self.form.plan

    @cached_property
    def inputs(self) -> list[Block]:
        """The block rows of B, each an operator on all inputs."""
        B = self.blocks.B
        rows = enumerate(B.rows())
        return [Block(B.heights[k : k + 1], B.widths, {(0, j): part for j, part in row.items()}, *home(B))
                for k, row in rows]  # fmt: skip

    @cached_property
    def inputs_transposed(self) -> list[Block]:
        """The transposes of the block rows of B."""
        return [row.T for row in self.inputs]

    @cached_property
    def transposed(self) -> Parts:
        """The transposed blocks of A by their place in A."""
        return {key: part.T for key, part in self.blocks.A.parts.items()}

    @cached_property
    def absolute(self) -> Parts:
        """Bounds of the absolute values of the blocks of A."""
        return {key: self.cover(part, True) for key, part in self.blocks.A.parts.items()}

    @cached_property
    def size(self) -> Parts:
        """The same with products of absolute values."""
        return {key: self.cover(part, False) for key, part in self.blocks.A.parts.items()}

    def form_size(self, k: int) -> int:
        """Returns how many states a block has."""
        return self.form.partition[k]

    def cover(self, operator: Operator, formed: bool) -> Operator:
        """Bounds the absolute value of an operator, in the form's type."""
        return cover(operator.to(torch.float64), formed).to(self.form.dtype)

    def biases(self) -> list[Tensor]:
        """b, block by block."""
        n = self.form.sizes[0]
        zero = torch.zeros(n, dtype=self.form.dtype, device=self.form.device)
        whole = zero if self.form.bias is None else self.form.bias
        return list(whole.split(self.form.partition))

    @cached_property
    def terms(self) -> int:
        """The length of the longest sum in any product with these operators or their transposes."""
        parts = (self.blocks.A, self.blocks.B, self.blocks.C, self.blocks.D)
        down = max(sum_length(part) for part in parts)
        across = max(sum_length(part.T) for part in parts)
        return 2 * max(down, across) + len(self.form.partition) + 16


def home(block: Block) -> tuple[torch.dtype, torch.device]:
    """Returns the type and device of a block matrix, for an empty one beside it."""
    return block.dtype, block.device
