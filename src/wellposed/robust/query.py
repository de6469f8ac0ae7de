"""A question about a model, and its answer: which functions of outputs or states are bounded, over which inputs.

`Query` is the question, `Bounds` the answer; `of_states` turns bounds of states into bounds of outputs. Between
them, `Operators` are the operators of a form as bounds need them: themselves, their absolute values and their
transposes. `Functionals` are linear functions of states and inputs, many rows at a time, each of its own sample.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from wellposed.conditions.rounding import rounding_slack
from wellposed.convert import exact_form, to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, ImplicitForm, Operator
from wellposed.forms.compose import BlockForm
from wellposed.forms.evaluation import EvaluationOrder
from wellposed.forms.gains import COMPOUND, require_finite_entries
from wellposed.forms.operators.entries import abs_upper_bound, sum_length, underflow
from wellposed.models import ImplicitModel
from wellposed.robust.sets import Interval, Uncertainty, proven

T = TypeVar("T")


class MethodError(InputError):
    """A method does not apply to the form or set; the message says why and what does."""


def deadline(budget: float | None) -> float:
    """Returns when so many seconds are over; never where they are None.

    Example:
        >>> deadline(None)
        inf
    """
    if budget is None:
        return math.inf
    if not budget > 0:
        raise InputError(f"the time budget is a positive number of seconds; received {budget}")
    return time.monotonic() + budget


@dataclass(frozen=True)
class Query:
    """Asks for bounds of ``combination @ y`` for every sample, or of all states.

    Args:
        combination: (B, k, q), or None for the states.
        deadline: `time.monotonic` after which nothing more is tightened.
        cache: what several methods need, by name; see `once`.
        branches: what was proven where a loop has no certificate; bounds hold of these branches then.
    """

    form: ImplicitForm
    set: Uncertainty
    combination: Tensor | None
    deadline: float = math.inf
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    branches: "list[Branches]" = field(default_factory=list, compare=False, repr=False)

    def once(self, name: str, make: "Callable[[Query], T]") -> "T":
        """Returns what `make` returned when it was first asked for under that name."""
        if name not in self.cache:
            self.cache[name] = make(self)
        value: T = self.cache[name]
        return value

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the bounds."""
        rows = self.form.sizes[0] if self.combination is None else self.combination.shape[1]
        return len(self.set), rows

    @cached_property
    def sample(self) -> Tensor:  # (R,)
        """The sample of every row of the combination, row after row."""
        return torch.arange(len(self.set), device=self.set.device).repeat_interleave(self.shape[1])


def to_form(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None) -> ImplicitForm:
    """Reads a model as a form; a network is converted for inputs of the given shape, without rounding its weights.

    The matrices of an `ImplicitModel` keep their gradients where gradients are recorded.

    Example:
        >>> to_form(ImplicitModel(3, 2, 5), None)
        ImplicitForm(5 states, 3 inputs, 2 outputs, relu)
    """
    if isinstance(model, ImplicitForm):
        return model
    if isinstance(model, ImplicitModel):
        return model.form(detach=not torch.is_grad_enabled())
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an ImplicitForm, ImplicitModel or module; received {type(model).__name__}")
    if input_shape is None:
        raise InputError("a network is converted for inputs of one shape; give input_shape, without the batch")
    return exact_form(model, input_shape)[0]


def as_form(model: ImplicitForm | nn.Module, inputs: Uncertainty) -> ImplicitForm:
    """Reads a model as a form that fits a set: its number of inputs, its type and its device.

    A network is read as `to_implicit` writes it, which is what is saved and drawn.

    Example:
        >>> from wellposed.robust import Box
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> as_form(network, Box(torch.zeros(1, 4), torch.ones(1, 4)))
        ImplicitForm(8 states, 4 inputs, 2 outputs, relu)
    """
    if isinstance(model, nn.Module) and not isinstance(model, ImplicitModel):
        form = to_implicit(model, inputs.sample_shape)
    else:
        form = to_form(model, None)
    return _fitting(form, inputs, form.dtype)


def _fitting(form: ImplicitForm, inputs: Uncertainty, dtype: torch.dtype) -> ImplicitForm:
    if inputs.center.shape[1] != form.sizes[1]:
        raise InputError(
            f"the form takes {form.sizes[1]} inputs {form.input_shape}; the set has {inputs.center.shape[1]} "
            f"{inputs.sample_shape}"
        )
    if (inputs.dtype, inputs.device) != (dtype, form.device):
        raise InputError(
            f"the set is {inputs.dtype} on {inputs.device} and the form {dtype} on {form.device}; "
            "convert one of them with .to()"
        )
    require_finite_entries(form)
    return form


def well_posed(form: ImplicitForm) -> bool:
    """Tells whether a form has a certificate.

    Example:
        >>> well_posed(ImplicitForm(torch.eye(1) / 2, torch.ones(1, 1), torch.ones(1, 1)))
        True
    """
    try:
        return form.certificate().holds
    except IllPosedError:
        return False


class Posed(NamedTuple):
    """A model as proofs need it.

    Args:
        form: its exact values are those of the model.
        set: the inputs, in the type of the form.
        states: which states of the form are those of the model; None for all.
    """

    form: ImplicitForm
    set: Uncertainty
    states: Tensor | None

    @classmethod
    def of(cls, model: ImplicitForm | nn.Module, inputs: Uncertainty) -> "Posed":
        """Reads a model; a network by `exact_form`, as folding its layers would make another network of it.

        Example:
            >>> from wellposed.robust import Box
            >>> network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
            >>> Posed.of(network, Box(torch.zeros(1, 2), torch.ones(1, 2))).form.dtype
            torch.float64
        """
        if isinstance(model, ImplicitForm | ImplicitModel) or not isinstance(model, nn.Module):
            return cls(as_form(model, inputs), inputs, None)
        form, states = exact_form(model, inputs.sample_shape)
        given = [part.dtype for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
        _fitting(form, inputs, given[0] if given else form.dtype)
        return cls(form, inputs.to(form.dtype), states)


def margins(q: int, target: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, q, q)
    """Builds the rows ``e_i - e_target``.

    Example:
        >>> margins(2, torch.tensor([1]), torch.zeros(1))
        tensor([[[ 1., -1.],
                 [ 0.,  0.]]])
    """
    unit = torch.eye(q, dtype=like.dtype, device=like.device)
    return unit - unit[target][:, None, :]


def check_target(target: Tensor, batch: int, q: int) -> Tensor:
    """Checks class labels.

    Example:
        >>> check_target(torch.tensor([1, 0]), 2, 3)
        tensor([1, 0])
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or tuple(target.shape) != (batch,):
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise InputError(f"target holds one class a sample, an integer tensor of shape ({batch},); received {got}")
    if batch and not bool(((target >= 0) & (target < q)).all()):
        raise InputError(
            f"the classes are 0 to {q - 1}; target reaches from {int(target.min())} to {int(target.max())}"
        )
    return target


Parts = dict[tuple[int, int], Operator]


@dataclass(frozen=True)
class Operators:
    """A form's operators in its own type, block by block.

    `size` is nowhere below ``|P||Q|`` where an operator is a product PQ and bounds the rounding of a product with
    it; `absolute` is nowhere below ``|PQ|``, which may be smaller.
    """

    form: ImplicitForm

    @cached_property
    def blocks(self) -> BlockForm:
        """A, B, C and D cut alike."""
        return BlockForm.of(self.form)

    @property
    def order(self) -> EvaluationOrder:
        """The order of the blocks."""
        return self.form.order

    @cached_property
    def inputs(self) -> list[Block]:
        """The block rows of B, each an operator on all inputs."""
        B = self.blocks.B
        rows = [{(0, j): part for j, part in row.items()} for row in B.rows()]
        return [Block(B.heights[k : k + 1], B.widths, row, B.dtype, B.device) for k, row in enumerate(rows)]

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
        return {key: self.abs_upper_bound(part, True) for key, part in self.blocks.A.parts.items()}

    @cached_property
    def size(self) -> Parts:
        """The same with products of absolute values."""
        return {key: self.abs_upper_bound(part, False) for key, part in self.blocks.A.parts.items()}

    def form_size(self, k: int) -> int:
        """Returns how many states a block has."""
        return self.form.partition[k]

    def abs_upper_bound(self, operator: Operator, formed: bool) -> Operator:
        """Bounds the absolute value of an operator, in the form's type."""
        return abs_upper_bound(operator.to(torch.float64), formed).to(self.form.dtype)

    def biases(self) -> list[Tensor]:
        """b, block by block."""
        n = self.form.sizes[0]
        zero = torch.zeros(n, dtype=self.form.dtype, device=self.form.device)
        whole = zero if self.form.bias is None else self.form.bias
        return list(whole.split(self.form.partition))

    @cached_property
    def compound(self) -> bool:
        """Whether a part is a product or sum of operators, which computes with numbers between."""
        wholes = (self.blocks.A, self.blocks.B, self.blocks.C, self.blocks.D)
        return any(isinstance(part, COMPOUND) for whole in wholes for part in whole.parts.values())

    @cached_property
    def lost(self) -> float:
        """What underflow takes at most from a sum of products with these operators or their transposes.

        It is multiplied by whatever the sum is multiplied by, such as a coefficient by the size of a state.
        """
        tiny = torch.finfo(self.form.dtype).tiny
        operators = (self.blocks.A, self.blocks.B, self.blocks.C, self.blocks.D)
        return (
            2 * sum(max(underflow(operator, tiny), underflow(operator.T, tiny)) for operator in operators)
            + 16 * tiny
        )

    @cached_property
    def terms(self) -> int:
        """The length of the longest sum in any product with these operators or their transposes."""
        operators = (self.blocks.A, self.blocks.B, self.blocks.C, self.blocks.D)
        down = max(sum_length(operator) for operator in operators)
        across = max(sum_length(operator.T) for operator in operators)
        return 2 * max(down, across) + len(self.form.partition) + 16


@dataclass(frozen=True)
class Functionals:
    """The functions ``sum_k states_k' x_k + inputs' u + constant``.

    Args:
        states: (R, n_k) by block; blocks that are not read are missing.
        inputs: (R, p).
        constant: (R,).
        size: (R,), a bound of the sum of absolute values of all terms, for the rounding.
        sample: (R,), the sample of every row.
        lost: (R,), what underflow may have taken from the coefficients, times the sizes of states and inputs.
    """

    states: dict[int, Tensor]
    inputs: Tensor
    constant: Tensor
    size: Tensor
    sample: Tensor
    lost: Tensor

    @property
    def negated(self) -> "Functionals":
        """The functions times -1."""
        states = {k: -part for k, part in self.states.items()}
        return replace(self, states=states, inputs=-self.inputs, constant=-self.constant)

    @property
    def both_signs(self) -> "Functionals":
        """The functions, and after them the same times -1."""
        pairs = zip(*(vars(one).items() for one in (self, self.negated)), strict=True)
        joined = {name: torch.cat([a, b]) for (name, a), (_, b) in pairs if name != "states"}
        states = {k: torch.cat([part, -part]) for k, part in self.states.items()}
        return Functionals(states=states, **joined)

    def __len__(self) -> int:
        return len(self.constant)

    def part(self, rows: slice) -> "Functionals":
        """Takes some rows."""
        states = {k: part[rows] for k, part in self.states.items()}
        return Functionals(
            states, self.inputs[rows], self.constant[rows], self.size[rows], self.sample[rows], self.lost[rows]
        )

    @classmethod
    def of_outputs(
        cls, operators: Operators, combination: Tensor, states: list[Interval], inputs: Uncertainty, sample: Tensor
    ) -> "Functionals":  # (R, q)
        """Reads combinations of the outputs ``y = Cx + Du + c``.

        Args:
            states: intervals of all states, for the size of the terms.
        """
        blocks, pieces = operators.blocks, combination.split(operators.blocks.C.heights, dim=1)
        coefficients: dict[int, Tensor] = {}
        for (i, j), part in blocks.C.parts.items():
            image = part.T.apply(pieces[i])
            coefficients[j] = coefficients[j] + image if j in coefficients else image
        offset = operators.form.output_bias
        constant = combination.new_zeros(len(combination)) if offset is None else combination @ offset
        size = output_size(operators, states, inputs)
        total = (combination.abs() * size[sample]).sum(1)
        copied = not operators.compound and bool(((combination == 0) | (combination.abs() == 1)).all())
        reached = 0.0 if copied else sum_sizes([*states, inputs.box().interval])[sample]  # coefficients of C alone
        lost = operators.lost * (8 + torch.zeros_like(total) + reached)
        return cls(coefficients, blocks.D.T.apply(combination), constant, total, sample, lost.detach())

    def largest(self, states: list[Interval], inputs: Uncertainty, terms: int) -> tuple[Tensor, Tensor]:
        """Returns the largest value for states in intervals, and how much of it is allowance for rounding."""
        value = inputs.support_rows(self.inputs, self.sample) + self.constant
        for k, part in self.states.items():
            value = value + states[k].at(self.sample).largest(part)
        width = self.inputs.shape[1] + sum(part.shape[1] for part in self.states.values())
        slack = rounding_slack(4 * self.size, terms + width) + 2 * self.lost
        return value + slack, slack


def sum_sizes(states: list[Interval]) -> Tensor:  # (B,)
    """Adds up the largest absolute values of all states."""
    return torch.cat([x.magnitude for x in states], dim=1).sum(1)


def output_size(operators: Operators, states: list[Interval], inputs: Uncertainty) -> Tensor:  # (B, q)
    """Bounds ``|C||x| + |D||u| + |c|``."""
    C, D = (operators.abs_upper_bound(part, False) for part in (operators.blocks.C, operators.blocks.D))
    size = C.apply(torch.cat([x.magnitude for x in states], dim=1)) + D.apply(inputs.box().interval.magnitude)
    offset = operators.form.output_bias
    return size if offset is None else size + offset.abs()


@dataclass(frozen=True, eq=False)
class Branches:
    """What is proven of a form without a certificate: that one equilibrium continues over the whole set.

    Other equilibria may exist beside it, and nothing is said of them. See `wellposed.conditions.branches`.

    Args:
        proven: (B,), for which samples.
        states: (B, n), the equilibrium at the center of the set through which the branch goes.
        value: (B,), bounds of the Perron-Frobenius eigenvalue behind the proof, the largest of all loops.
        why_not: of every sample, what failed; empty where nothing did.
        preactivations: (B, n), boxes in which every input has one equilibrium; all numbers outside of loops.
    """

    proven: Tensor
    states: Tensor
    value: Tensor
    why_not: tuple[str, ...]
    preactivations: Interval

    def without(self, samples: Tensor, reason: str) -> "Branches":
        """Takes back what was proven of some samples, (B,)."""
        why_not = tuple(
            why or (reason if gone else "") for why, gone in zip(self.why_not, samples.tolist(), strict=True)
        )
        return replace(self, proven=self.proven & ~samples, why_not=why_not)

    def __str__(self) -> str:
        count = f"{int(self.proven.sum())} of {len(self.proven)} samples"
        reasons = sorted({reason for reason in self.why_not if reason})
        failed = f"; elsewhere {'; '.join(reasons[:3])}" if reasons else ""
        return f"{BRANCH}, proven for {count}{failed}"


BRANCH = "for the branch through the equilibrium at the center"


@dataclass(frozen=True)
class Bounds:
    """Proven bounds ``lower <= value <= upper``, per sample, of the exact equilibrium for every input of a set.

    Args:
        lower, upper: (B, k).
        method: what proved them.
        slack: (B, k), how much each bound was moved outward for rounding where it was evaluated.
        branch: what the bounds are about where a loop has no certificate; None where equilibria are unique.

    Example:
        >>> bounds = Bounds(torch.tensor([[0.0]]), torch.tensor([[2.0]]), "box", torch.zeros(1, 1))
        >>> bounds.width, bool(bounds.contains(torch.tensor([[1.5]])))
        (tensor([[2.]]), True)
    """

    lower: Tensor
    upper: Tensor
    method: str
    slack: Tensor
    branch: Branches | None = None

    @property
    def width(self) -> Tensor:
        """``upper - lower``."""
        return self.upper - self.lower

    def contains(self, value: Tensor, tolerance: float = 0.0) -> Tensor:  # (B,)
        """Tells for which samples all values lie within the bounds, up to a tolerance."""
        inside = (value >= self.lower - tolerance) & (value <= self.upper + tolerance)
        return inside.all(-1)

    def stated(self) -> "Bounds":
        """Replaces ends that overflow has left, no numbers or crossed ones, by infinite ones: nothing is proven.

        Example:
            >>> Bounds(torch.tensor([[torch.nan]]), torch.tensor([[2.0]]), "box", torch.zeros(1, 1)).stated().lower
            tensor([[-inf]])
        """
        lower, upper = proven(self.lower, self.upper)
        return replace(self, lower=lower, upper=upper)

    def within(self, other: "Bounds") -> "Bounds":
        """Intersects two proofs of the same values, of which one may have proven nothing."""
        one, two = self.stated(), other.stated()
        lower, upper = torch.maximum(one.lower, two.lower), torch.minimum(one.upper, two.upper)
        slack = torch.where(two.width < one.width, two.slack, one.slack)
        return Bounds(lower, upper, f"{self.method} + {other.method}", slack).stated()

    def named(self, method: str) -> "Bounds":
        """Changes the name."""
        return replace(self, method=method)

    def of_branch(self, branch: Branches) -> "Bounds":
        """Says of which branch the bounds are, and takes back those of samples without one."""
        lower = torch.where(branch.proven[:, None], self.lower, -torch.inf)
        upper = torch.where(branch.proven[:, None], self.upper, torch.inf)
        return replace(self, lower=lower, upper=upper, method=f"{self.method}, {BRANCH}", branch=branch)


def of_states(query: Query, states: list[Interval], method: str) -> Bounds:
    """Answers a query by intervals of the states."""
    if query.combination is None:
        lower = torch.cat([x.lower for x in states], dim=1)
        upper = torch.cat([x.upper for x in states], dim=1)
        eps = torch.finfo(lower.dtype).eps
        return Bounds(lower, upper, method, eps * torch.maximum(lower.abs(), upper.abs()).detach())
    operators = Operators(query.form)
    rows = query.combination.flatten(0, 1)
    functionals = Functionals.of_outputs(operators, rows, states, query.set, query.sample)
    upper, slack = functionals.largest(states, query.set, operators.terms)
    lower, _ = functionals.negated.largest(states, query.set, operators.terms)
    return shaped(query, -lower, upper, method, slack)


def shaped(query: Query, lower: Tensor, upper: Tensor, method: str, slack: Tensor) -> Bounds:
    """Writes the values of rows as a table."""
    return Bounds(lower.view(query.shape), upper.view(query.shape), method, slack.view(query.shape))
