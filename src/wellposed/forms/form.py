"""ImplicitForm: the matrices of an implicit model, evaluating themselves.

`check_options` checks the options of an evaluation, `report_overflow` says when it leaves the range of its
numbers. `rescaled_blocks` chooses other units for the blocks of a state, so that |A|_inf shrinks and nothing else
changes. `ImplicitForm` is all of a form: operators, activations, certificate and evaluation.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation, rescaled
from wellposed.activations.blockwise import piecewise
from wellposed.conditions.certificate import Certificate
from wellposed.conditions.rescaling import apply_rescaling, rescaling
from wellposed.equilibrium.method import check_policy, make_options, require_finite
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import (
    ConvergenceError,
    ConvergenceWarning,
    InputError,
    MissingExtraError,
    not_a_tensor,
    unknown_name,
)
from wellposed.forms.evaluation import Evaluation, EvaluationOrder, block_norms
from wellposed.forms.operators.base import Operator, tensors
from wellposed.forms.operators.block import Block, combine, partitioned
from wellposed.forms.operators.plain import Diagonal, Zero, as_operator

OPTIONS = ("solver", "stop", "max_steps", "gradient", "on_failure", "generator", "x0")


def check_options(options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises where an option is unknown or does not fit, even if the form has no loop to use it.

    Args:
        options: those of `fixed_point` and the start x0.
        shape: the numbers of samples and states.

    Example:
        >>> check_options({"slover": "picard"}, (1, 1), torch.float32)
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown option 'slover'; ...
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown_name("option", name, OPTIONS)
    start = options.get("x0")
    if start is not None and (tuple(start.shape) != shape or start.dtype != dtype):
        raise InputError(
            f"x0 must have the shape {shape} and be {dtype}; received {tuple(start.shape)}, {start.dtype}"
        )
    solver, stop, max_steps = (options.get(name) for name in ("solver", "stop", "max_steps"))
    make_options(solver, stop, max_steps, options.get("on_failure", "warn"))


def report_overflow(values: Tensor, on_failure: str) -> None:
    """Warns or raises if some samples hold NaN or infinity.

    Example:
        >>> report_overflow(torch.full((2, 1), torch.inf), "raise")
        Traceback (most recent call last):
            ...
        wellposed.errors.ConvergenceError: 2 of 2 samples left the range of torch.float32; ...
    """
    check_policy(on_failure)
    lost = ~values.isfinite().all(1)
    if on_failure == "ignore" or not bool(lost.any()):
        return
    message = (
        f"{int(lost.sum())} of {len(lost)} samples left the range of {values.dtype}; "
        "rescale the form, shrink its inputs or convert both to float64"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=4)


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
    new_bias = None
    if bias is not None:
        pieces = zip(bias.split(A.heights), power, strict=True)
        new_bias = torch.cat([_times(Diagonal(piece), value).row_sums() for piece, value in pieces])
    return RescaledBlocks(
        Block(A.heights, A.widths, new_A, A.dtype, A.device),
        Block(B.heights, B.widths, new_B, B.dtype, B.device),
        Block(C.heights, C.widths, new_C, C.dtype, C.device),
        new_bias,
        tuple(rescaled(phi, value) for phi, value in zip(activations, power, strict=True)),
    )


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


MODEL_BUILDERS: list[Callable[..., Any]] = []  # filled by wellposed.models
OPERATORS: dict[str, Callable[..., "ImplicitForm"]] = {}  # of `>>`, `+`, `*`: filled by wellposed.forms.compose


class ImplicitForm:
    """The prediction rule ``x = phi(Ax + Bu + b)``, ``y = Cx + Du + c`` (003 eq. 2.1) with operators as blocks.

    Where A is a `Block`, its blocks are the layers of the form, and each may have its own phi. Blocks that do
    not depend on themselves are computed by substitution, in one pass; loops are solved as fixed points.

    Forms compose: ``f >> g`` is `series`, ``f + g`` is `add` and ``f * g`` is `product`.

    Args:
        A, B, C, D: operators or tensors, dense or sparse; D None is zero.
        bias: b, zero if None.
        activation: phi, by name or object; a sequence of them gives every block of A its own.
        input_shape: the shape of one input; ``(p,)`` if None.
        output_bias: c, zero if None.
        labels: a name for every block of A.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.ones(1, 2))
        >>> form(torch.tensor([[1.0, -3.0]]))
        tensor([[1.]])
        >>> (form + form)(torch.tensor([[1.0, -3.0]]))
        tensor([[2.]])
    """

    def __init__(
        self,
        A: Operator | Tensor,
        B: Operator | Tensor,
        C: Operator | Tensor,
        D: Operator | Tensor | None = None,
        bias: Tensor | None = None,
        activation: Activation | str | Sequence[Activation | str] = "relu",
        input_shape: tuple[int, ...] | None = None,
        *,
        output_bias: Tensor | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        self.A, self.B, self.C = as_operator(A), as_operator(B), as_operator(C)
        _, p, q = self.sizes
        self.D = Zero((q, p), self.A.dtype, self.A.device) if D is None else as_operator(D)
        self.bias, self.output_bias = bias, output_bias
        self.input_shape = (p,) if input_shape is None else tuple(input_shape)
        self._check()
        self.activations = self._given(activation)
        self.activation = piecewise(self.activations, self.partition)
        self.labels = tuple(labels or ())
        if self.labels and len(self.labels) != len(self.partition):
            raise InputError(f"{len(self.partition)} blocks need as many labels; received {len(self.labels)}")

    def _check(self) -> None:
        n, p, q = self.sizes
        for name, shape in {"A": (n, n), "B": (n, p), "C": (q, n), "D": (q, p)}.items():
            if (received := getattr(self, name).shape) != shape:
                raise InputError(f"{name} must have the shape {shape} to fit; received {received}")
        for name, value, size in (("bias", self.bias, n), ("output_bias", self.output_bias, q)):
            if value is not None and tuple(value.shape) != (size,):
                raise InputError(f"{name} must have the shape {(size,)}; received {tuple(value.shape)}")
        kinds = {name: part.dtype for name in "BCD" if (part := getattr(self, name)).stored()}
        kinds |= {name: v.dtype for name in ("bias", "output_bias") if (v := getattr(self, name)) is not None}
        for name, kind in kinds.items():
            if kind != self.dtype:
                raise InputError(f"{name} is {kind} and A {self.dtype}; convert one of them")
        if not self.dtype.is_floating_point:
            raise InputError(f"a form has real numbers of floating point; received {self.dtype}; use float32, say")
        if math.prod(self.input_shape) != p:
            raise InputError(f"input_shape {self.input_shape} has not the {p} entries that B takes")

    def _given(self, activation: Activation | str | Sequence[Activation | str]) -> tuple[Activation, ...]:
        if isinstance(activation, str) or not isinstance(activation, Sequence):
            single = get_activation(activation)
            natural = _natural(self.A)
            fits = single.componentwise or (single.block and not any(size % single.block for size in natural))
            self.partition = natural if fits else (self.A.shape[0],)
            return (single,) * len(self.partition)
        self.partition = _natural(self.A)
        if len(activation) != len(self.partition):
            raise InputError(
                f"A has {len(self.partition)} blocks; received {len(activation)} activations, give one for each"
            )
        given = tuple(get_activation(part) for part in activation)
        for phi, size in zip(given, self.partition, strict=True):
            if phi.block and size % phi.block:
                raise InputError(f"{phi.name} acts on blocks of {phi.block}; received a block of {size} states")
        return given

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers n of states, p of inputs and q of outputs."""
        return self.A.shape[0], self.B.shape[1], self.C.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self.A.dtype

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.A.device

    def __repr__(self) -> str:
        n, p, q = self.sizes
        return f"ImplicitForm({n} states, {p} inputs, {q} outputs, {self.activation.name})"

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block]:
        """A, B and C as block matrices along the blocks of the state."""
        widths = self.B.widths if isinstance(self.B, Block) else (self.B.shape[1],)
        heights = self.C.heights if isinstance(self.C, Block) else (self.C.shape[0],)
        A = partitioned(self.A, self.partition, self.partition)
        return A, partitioned(self.B, self.partition, widths), partitioned(self.C, heights, self.partition)

    @cached_property
    def order(self) -> EvaluationOrder:
        """The order in which the blocks are computed, with the loops among them."""
        return EvaluationOrder(self.blocks[0], self.activations)

    def __call__(self, u: Tensor) -> Tensor:  # (B, *input_shape) or (B, p) -> (B, q)
        """Evaluates the rule."""
        flat, C = self._flat(u), self.blocks[2]
        read = frozenset(j for _, j in C.parts)
        evaluation = Evaluation(self.order, self._offset(flat), outputs=read).run()
        y = self._output(C, evaluation.states, flat)
        if not under_transform() and not bool((evaluation.total + y.detach().sum(1)).isfinite().all()):
            self._check_finite(flat, y)
        return y

    def evaluated(self, u: Tensor, make: Callable[..., Evaluation]) -> Tensor:
        """Evaluates the rule by another `Evaluation`, without reading a value on the host."""
        flat, C = self._flat(u), self.blocks[2]
        return self._output(C, make(self.order, self._offset(flat)).run().states, flat)

    @torch.no_grad()
    def _check_finite(self, flat: Tensor, y: Tensor) -> None:
        """Warns of states or outputs that are not finite; their total may have been too large as well."""
        solution = Evaluation(self.order, self._offset(flat), {"on_failure": "ignore"}).run().solution()
        assert isinstance(solution.value, Tensor)
        report_overflow(torch.cat([solution.value, y.detach()], dim=1), "warn")

    def _output(self, C: Block, states: Sequence[Tensor | None], flat: Tensor) -> Tensor:
        start = self.D @ flat
        if self.output_bias is not None:
            start = start + self.output_bias
        pieces = start.split(C.heights, dim=1)
        return torch.cat([combine(row, states, part) for row, part in zip(C.rows(), pieces, strict=True)], dim=1)

    def __rshift__(self, other: "ImplicitForm") -> "ImplicitForm":
        return OPERATORS[">>"](self, other) if isinstance(other, ImplicitForm) else NotImplemented

    def __add__(self, other: "ImplicitForm") -> "ImplicitForm":
        return OPERATORS["+"](self, other) if isinstance(other, ImplicitForm) else NotImplemented

    def __mul__(self, other: "ImplicitForm") -> "ImplicitForm":
        return OPERATORS["*"](self, other) if isinstance(other, ImplicitForm) else NotImplemented

    def equilibrium(self, u: Tensor, **options: Any) -> Solution:
        """Computes the states and tells how they were reached.

        `options` are those of `fixed_point` and concern the loops; blocks without one are substituted.
        """
        flat = self._flat(u)
        offset = self._offset(flat)
        check_options(options, (flat.shape[0], self.sizes[0]), self.dtype)
        evaluation = Evaluation(self.order, offset, options).run()
        solution = evaluation.solution()
        if not under_transform():
            assert isinstance(solution.value, Tensor)
            report_overflow(solution.value.detach(), options.get("on_failure", "warn"))
        if len(self.order.stages) == 1 and evaluation.solutions:
            whole = evaluation.solutions[0]
            assert isinstance(whole.value, Tensor)
            x, inputs, v = whole.value.detach(), flat.detach(), torch.cat(list(offset), dim=1).detach()
            return replace(whole, bound=lambda: self._bound(x, inputs, v))
        return solution

    def certificate(self) -> Certificate:
        """Proves that every input has exactly one equilibrium, or raises `IllPosedError`.

        A form is well-posed if each of its loops is (003, Theorems 2 and 3), so the big matrix is not formed.
        """
        loops = self.order.loops
        if len(self.order.stages) == 1 and loops:
            return loops[0].certificate
        if not loops:
            note = f"{len(self.partition)} blocks and no loop: the Perron-Frobenius eigenvalue is 0"
            return Certificate.of("triangular", 0.0, note=note)
        proofs = [loop.certificate for loop in loops]
        worst = max(proofs, key=lambda proof: proof.value)
        kinds = ", ".join(sorted({proof.condition for proof in proofs}))
        note = f"{len(loops)} of {len(self.order.stages)} parts have a loop, proven by {kinds}"
        return Certificate.of("components", worst.value, note=note)

    def _offset(self, flat: Tensor) -> Sequence[Tensor]:
        """Returns ``Bu + b``, block by block."""
        B = self.blocks[1]
        pieces = flat.split(B.widths, dim=1)
        if self.bias is None:
            zero = flat.new_zeros(1, 1)
            starts = [zero.expand(flat.shape[0], size) for size in self.partition]
        else:
            starts = list(self.bias.expand(flat.shape[0], -1).split(self.partition, dim=1))
        return [combine(row, pieces, start) for row, start in zip(B.rows(), starts, strict=True)]

    def _bound(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor | None:
        size = self.B.abs() @ u.abs()
        if self.bias is not None:
            size = size + self.bias.abs()
        n, p, _ = self.sizes
        return self.order.loops[0].bound(x, v, size, n + p + 2)

    def _flat(self, u: Tensor) -> Tensor:
        _, p, _ = self.sizes
        if not isinstance(u, Tensor):
            raise not_a_tensor("u", u)
        if u.dim() == 0 or tuple(u.shape[1:]) not in ((p,), self.input_shape):
            raise InputError(
                f"u must have the shape (batch, {p}) or (batch, *{self.input_shape}); received {tuple(u.shape)}"
            )
        if u.dtype != self.A.dtype:
            way = f"u = u.to({self.A.dtype})"
            way += f" or form = form.to({u.dtype})" if u.is_floating_point() else ""
            raise InputError(f"u is {u.dtype} and the form {self.A.dtype}; convert one of them: {way}")
        require_finite("u", u)
        return u.reshape(u.shape[0], p)

    def replaced(self, **changes: Any) -> "ImplicitForm":
        """Copies the form with some of its constructor's arguments changed."""
        same = {name: getattr(self, name) for name in ("A", "B", "C", "D", "bias", "input_shape", "output_bias")}
        activation = self.activations[0] if len(self.partition) == 1 else self.activations
        return ImplicitForm(**{**same, "activation": activation, "labels": self.labels, **changes})

    def to(self, *args: Any, **kwargs: Any) -> "ImplicitForm":
        """Returns the form with all entries converted, as `torch.Tensor.to` does; this one stays as it is."""
        blocks = {name: getattr(self, name).to(*args, **kwargs) for name in "ABCD"}
        values = {"bias": self.bias, "output_bias": self.output_bias}
        moved = {name: None if v is None else v.to(*args, **kwargs) for name, v in values.items()}
        return self.replaced(**blocks, **moved)

    def to_dense(self, *, keep_blocks: bool = False) -> "ImplicitForm":
        """Forms all matrices; the states of different activations stay apart.

        Args:
            keep_blocks: whether all blocks of states stay apart, so that the form keeps its order.
        """
        if keep_blocks:
            A = self.blocks[0]
            dense = {key: as_operator(part.to_dense()) for key, part in A.parts.items()}
            formed = Block(A.heights, A.widths, dense, A.dtype, A.device)
            return self.replaced(A=formed, B=self.B.to_dense(), C=self.C.to_dense(), D=self.D.to_dense())
        if len(set(self.activations)) == 1 and self.activations[0].block != 0:
            blocks = {name: getattr(self, name).to_dense() for name in "ABCD"}
            return self.replaced(**blocks, activation=self.activations[0], labels=None)
        A = partitioned(as_operator(self.A.to_dense()), self.partition, self.partition)
        return self.replaced(A=A, B=self.B.to_dense(), C=self.C.to_dense(), D=self.D.to_dense())

    def rescale(self, kappa: float) -> "ImplicitForm":
        """Changes the units of the states so that ``|A|_inf < kappa``; outputs stay the same.

        Every block gets one power of two where A has several, so operators keep their kind; else every state.
        """
        if len(self.partition) > 1:
            return self.replaced(**rescaled_blocks(self.blocks, self.bias, self.activations, kappa)._asdict())
        A, B, C = (block.to_dense() for block in (self.A, self.B, self.C))
        scale = rescaling(A, kappa, blocks=self.activation.block)
        new = apply_rescaling(A, B, C, self.bias, scale, self.activation)
        return self.replaced(A=new.A, B=new.B, C=new.C, bias=new.bias, activation=new.activation)

    def to_model(self, **options: Any) -> Any:
        """Returns an `ImplicitModel` with these matrices, to go on training; `options` are its keywords."""
        if not MODEL_BUILDERS:
            raise MissingExtraError("import wellposed.models before calling to_model()")
        return MODEL_BUILDERS[-1](self, **options)

    # Last, because `float` is the name of a type above.
    def float(self) -> "ImplicitForm":
        """Returns the form in float32."""
        return self.to(torch.float32)

    def double(self) -> "ImplicitForm":
        """Returns the form in float64."""
        return self.to(torch.float64)

    def half(self) -> "ImplicitForm":
        """Returns the form in float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> "ImplicitForm":
        """Returns the form in bfloat16."""
        return self.to(torch.bfloat16)

    def cpu(self) -> "ImplicitForm":
        """Returns the form on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> "ImplicitForm":
        """Returns the form on a CUDA device, the current one if None."""
        if not torch.cuda.is_available():
            raise InputError("torch finds no CUDA device here; the form stays where it is: form.cpu()")
        target = torch.device("cuda", device) if isinstance(device, int) else device
        return self.to("cuda" if target is None else target)

    def eval(self) -> "ImplicitForm":
        """Returns the form itself: it has one mode only, that of evaluation."""
        return self

    def train(self, mode: bool = True) -> "ImplicitForm":
        """Refuses to train, as a form has no parameters; `to_model` makes a model of it that does."""
        if mode:
            raise InputError("a form has no parameters to train; form.to_model() makes a model that has some")
        return self


def _natural(A: Operator) -> tuple[int, ...]:
    return A.heights if isinstance(A, Block) and A.heights == A.widths and A.heights else (A.shape[0],)
