"""ImplicitRNN: a recurrent network whose step is an implicit model.

`Sequences` brings batches of sequences, padded or packed, to one layout: time after time, longest sequences first.
`ImplicitRNN` reads them step by step; a `RecurrentSolution` holds all equilibria.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from wellposed.conditions.conditions import IterationSystem
from wellposed.equilibrium.method import (
    OnFailure,
    Solve,
    WarnOnce,
    WeightCheck,
    checked_under_functorch,
    no_equilibrium,
    report_outputs,
    require_finite,
)
from wellposed.equilibrium.solution import Status, failed, last_residual
from wellposed.equilibrium.stopping import ErrorBound, Steps
from wellposed.equilibrium.tracing import (
    check_traceable,
    outside_compile,
    under_forward_mode,
    under_functorch,
    under_transform,
)
from wellposed.errors import InputError, not_a_tensor, positive_integer
from wellposed.kernels.engine import COMPILED, NUMBA, Compiled
from wellposed.kernels.gpu.engine import Triton
from wellposed.kernels.sequence import run_sequences
from wellposed.kernels.spec import CellMatrices, SequenceSpec
from wellposed.models.implicit import ImplicitModel

Input = Tensor | PackedSequence


@dataclass(frozen=True)
class Sequences:
    """Sequences in the layout of a `PackedSequence`, and how to return results in the user's layout."""

    data: Tensor  # (N, p): all elements, time after time
    sizes: list[int]  # sequences that are still running at each time
    kind: str  # "packed", "batch", "padded" (a batch with lengths) or "single"
    batch_first: bool = True
    order: tuple[Tensor | None, Tensor | None] = (None, None)  # of the samples: sorted, and back

    @classmethod
    def of(cls, value: Input, width: int, batch_first: bool, lengths: Tensor | None = None) -> "Sequences":
        """Checks the input and brings it into the layout."""
        if isinstance(value, PackedSequence):
            _require_width(value.data, width, "packed data (N, {})")
            if lengths is not None:
                raise InputError("a PackedSequence knows its lengths; leave out lengths")
            return cls._packed(value, "packed", batch_first)
        layout = "(B, T, {}) or (T, {})" if batch_first else "(T, B, {}) or (T, {})"
        if not isinstance(value, Tensor):
            raise not_a_tensor("input", value)
        if value.dim() not in (2, 3):
            shape = layout.format(width, width)
            raise InputError(f"input must have the shape {shape}; received {tuple(value.shape)}")
        _require_width(value, width, layout)
        if value.dim() == 2:
            return cls._single(value, lengths)
        timewise = value.transpose(0, 1) if batch_first else value
        _require_elements(timewise)
        if lengths is not None:
            checked = _check_lengths(lengths, timewise.shape[1], timewise.shape[0])
            packed = pack_padded_sequence(timewise, checked, enforce_sorted=False)
            return cls._packed(packed, "padded", batch_first)
        return cls(timewise.flatten(0, 1), [timewise.shape[1]] * timewise.shape[0], "batch", batch_first)

    @classmethod
    def _single(cls, value: Tensor, lengths: Tensor | None) -> "Sequences":
        if lengths is not None:
            raise InputError(
                "lengths go with a batch of sequences; received one sequence without a batch dimension"
            )
        _require_elements(value[:, None])
        return cls(value, [1] * value.shape[0], "single")

    @classmethod
    def _packed(cls, packed: PackedSequence, kind: str, batch_first: bool) -> "Sequences":
        order = (packed.sorted_indices, packed.unsorted_indices)
        return cls(packed.data, packed.batch_sizes.tolist(), kind, batch_first, order)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.sizes[0]

    def sorted(self, state: Tensor) -> Tensor:  # (K, B, h)
        """Brings per-sequence values into the order of the layout."""
        return state if self.order[0] is None else state.index_select(1, self.order[0])

    def restored(self, state: Tensor) -> Tensor:  # (K, B, h)
        """Brings per-sequence values back into the user's order."""
        state = state if self.order[1] is None else state.index_select(1, self.order[1])
        return state[:, 0] if self.kind == "single" else state

    def in_user_layout(self, data: Tensor) -> Input:
        """Returns values per element in the user's layout."""
        if self.kind == "packed":
            return self._as_packed(data)
        if self.kind == "single":
            return data
        return self.padded(data) if self.batch_first else self.padded(data).transpose(0, 1)

    def padded(self, data: Tensor) -> Tensor:  # (B, T, ...)
        """Returns values per element batch-first, zero beyond the end of a sequence."""
        if self.kind in ("packed", "padded"):
            return pad_packed_sequence(self._as_packed(data), batch_first=True)[0]
        return data.unflatten(0, (len(self.sizes), self.batch)).transpose(0, 1)

    def present(self) -> Tensor:  # (B, T)
        """Marks the elements that belong to a sequence."""
        return self.padded(torch.ones(self.data.shape[0], dtype=torch.bool, device=self.data.device))

    def _as_packed(self, data: Tensor) -> PackedSequence:
        return PackedSequence(data, torch.tensor(self.sizes), *self.order)


def _require_width(value: Tensor, width: int, layout: str) -> None:
    if value.shape[-1] != width:
        shape = layout.format(width, width)
        raise InputError(
            f"input must have the shape {shape} with input_size={width}; received {tuple(value.shape)}"
        )


def _require_elements(timewise: Tensor) -> None:
    if timewise.shape[0] == 0:
        raise InputError(f"sequences must have at least one element; received length 0, {tuple(timewise.shape)}")


def _check_lengths(lengths: Tensor, batch: int, longest: int) -> Tensor:
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise InputError(
            f"lengths must be {batch} integers, one a sequence; received {lengths.dtype} {tuple(lengths.shape)}"
        )
    if batch and (int(lengths.min()) < 1 or int(lengths.max()) > longest):
        raise InputError(
            f"lengths must lie between 1 and the padded length {longest}; "
            f"received values from {int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


@dataclass(frozen=True)
class RecurrentSolution:
    """All equilibria of a batch of sequences; K counts layers times directions, layer by layer.

    Attributes:
        output, h_n: what `ImplicitRNN.forward` returns.
        states: the equilibria, ``(B, T, n)`` for each of the K.
        status: `Status` codes.
        steps: evaluations of the map.
        residual: ``|f(x) - x|_inf`` of the last points, see `Solution.residual`.
        present: elements that belong to a sequence; elsewhere the reports are zero.
    """

    output: Input
    h_n: Tensor
    states: tuple[Tensor, ...]
    status: Tensor  # (B, T, K) int8
    steps: Tensor  # (B, T, K) int64
    residual: Tensor  # (B, T, K)
    present: Tensor  # (B, T) bool

    @property
    def converged(self) -> Tensor:  # (B, T, K) bool
        """Time steps whose stopping rule was met; padding counts as converged."""
        return (self.status == Status.CONVERGED) | ~self.present[..., None]

    @property
    def failed(self) -> Tensor:  # (B, T, K) bool
        """Time steps that did not reach an equilibrium. Later ones start from a wrong state."""
        return failed(self.status) & self.present[..., None]

    def __str__(self) -> str:
        count, solves = int(self.failed.sum()), int(self.present.sum()) * self.status.shape[2]
        return (
            f"{self.status.shape[0]} sequences, {solves} equilibria: {count} failed; "
            f"steps {self.steps[self.present].float().mean():.1f} mean, {int(self.steps.max())} most"
        )


@outside_compile
def _report_outputs(output: Tensor, on_failure: OnFailure, once: WarnOnce) -> None:
    """Reports outputs that are not finite, even if everything else is compiled."""
    if not under_transform():
        report_outputs(output, None, on_failure, once)


class ImplicitRNN(nn.Module):
    """Reads a sequence step by step through an implicit model (001 section 2).

    With the input ``u_i = (s_i, h_{i-1})`` of step i,

        ``x_i = phi(A x_i + B u_i + b)``,  ``h_i = C x_i + D u_i``.

    Follows the conventions of `torch.nn.RNN` for shapes, packed sequences, layers and directions. Every
    equilibrium exists and is unique as in `ImplicitModel`; the solve of a time step starts from the state of
    the step before.

    Args:
        input_size, hidden_size, state_features: of s, h and x.
        out_features: width of a linear readout applied to every output; none if None.
        readout_bias: whether the readout has a bias; None: if the states have one (`bias` of the options).
        batch_first: whether tensors come as ``(B, T, p)``, else, as in torch, as ``(T, B, p)``.
        num_layers: stacked networks, each reading the outputs of the one below.
        bidirectional: whether every layer also reads backwards.
        dropout: probability of zeroing outputs between layers.
        warm_start: whether to start a solve from the state of the step before, else from zero.
        options: keywords of `ImplicitModel`.

    Example:
        >>> rnn = ImplicitRNN(3, 5, 8, batch_first=True)
        >>> output, h_n = rnn(torch.zeros(2, 7, 3))
        >>> output.shape, h_n.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        state_features: int,
        *,
        out_features: int | None = None,
        readout_bias: bool | None = None,
        batch_first: bool = False,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        warm_start: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        input_size, hidden_size = (
            positive_integer("input_size", input_size),
            positive_integer("hidden_size", hidden_size),
        )
        num_layers = positive_integer("num_layers", num_layers)
        out_features = None if out_features is None else positive_integer("out_features", out_features)
        if not 0 <= dropout < 1:
            raise InputError(f"dropout must lie in [0, 1); received {dropout}")
        self.input_size, self.hidden_size, self.out_features = input_size, hidden_size, out_features
        self.batch_first, self.num_layers, self.bidirectional = batch_first, num_layers, bidirectional
        self.dropout, self.warm_start, self.weight_check = dropout, warm_start, WeightCheck()
        width = hidden_size * self.directions
        widths = [input_size] + [width] * (num_layers - 1)
        self.cells = nn.ModuleList(
            ImplicitModel(p + hidden_size, hidden_size, state_features, **options)
            for p in widths
            for _ in range(self.directions)
        )
        bias = self.cell(0).bias is not None if readout_bias is None else readout_bias
        self.readout = None if out_features is None else nn.Linear(width, out_features, bias=bias)

    @property
    def directions(self) -> int:
        """One, or two if bidirectional."""
        return 2 if self.bidirectional else 1

    @property
    def state_features(self) -> int:
        """The number of states of every cell."""
        return self.cell(0).state_features

    def cell(self, index: int) -> ImplicitModel:
        """Returns the model behind one layer and direction, counted layer by layer."""
        return self.cells[index]  # type: ignore[return-value]

    def _cells(self) -> list[ImplicitModel]:
        return list(self.cells)  # type: ignore[arg-type]  # an index into a ModuleList costs as much as a solve

    @classmethod
    def from_matrices(
        cls,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        **options: Any,
    ) -> "ImplicitRNN":
        """Builds a one-layer network that evaluates exactly these matrices.

        Args:
            A, B, C, D: ``(n, n)``, ``(n, p + h)``, ``(h, n)`` and ``(h, p + h)``; the columns that read the input
                come before those that read the hidden state.
            bias: ``(n,)``.
            options: keywords of `ImplicitModel.from_matrices` and ``batch_first``, ``warm_start``.

        Example:
            >>> h = ImplicitRNN.from_matrices(torch.zeros(1, 1), torch.ones(1, 2), torch.ones(1, 1))
            >>> h(torch.ones(3, 1, 1))[0].flatten()  # counts
            tensor([1., 2., 3.], grad_fn=<ViewBackward0>)
        """
        own = {name: options.pop(name) for name in ("batch_first", "warm_start") if name in options}
        cell = ImplicitModel.from_matrices(A, B, C, D, bias=bias, **options)
        hidden = C.shape[0]
        if cell.in_features <= hidden:
            raise InputError(
                f"B must have more columns than the hidden state has entries, (n, input_size + {hidden}); "
                f"received {tuple(B.shape)}"
            )
        rnn = cls(cell.in_features - hidden, hidden, cell.state_features, **own)
        rnn.cells[0] = cell
        return rnn

    def forward(
        self, input: Input, h0: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Input, Tensor]:
        """Computes all outputs and the last hidden states.

        Args:
            input: ``(T, B, p)``, ``(B, T, p)`` with `batch_first`, ``(T, p)``, or a `PackedSequence`.
            h0: ``(K, B, h)`` with K layers times directions, ``(K, h)`` for a single sequence; zeros if None.
            lengths: of the sequences in a padded batch; outputs beyond them are zero.

        Returns:
            the outputs in the layout of the input, and the last hidden states in the shape of `h0`.
        """
        cells = self._cells()
        sequences, h = self._read(input, h0, lengths, cells[0])
        weights = [
            (f"cells.{k}.{name}", value) for k, cell in enumerate(cells) for name, value in cell.state_weights()
        ]
        if self.weight_check.failed(weights, cells[0].on_failure):
            width = self.hidden_size * self.directions if self.out_features is None else self.out_features
            output, h_n = (
                no_equilibrium(part, weights) for part in (sequences.data.new_empty(len(sequences.data), width), h)
            )
            return sequences.in_user_layout(output), sequences.restored(h_n)
        output, h_n, _ = self._run(cells, sequences, h, trace=False)
        return sequences.in_user_layout(output), sequences.restored(h_n)

    def equilibria(
        self, input: Input, h0: Tensor | None = None, lengths: Tensor | None = None
    ) -> RecurrentSolution:
        """Computes what `forward` does and reports every time step of every sequence."""
        cells = self._cells()
        sequences, h = self._read(input, h0, lengths, cells[0])
        output, h_n, passes = self._run(cells, sequences, h, trace=True)
        status, steps, residual = (
            sequences.padded(torch.stack([item.packed(name) for item in passes], -1))
            for name in ("status", "steps", "residual")
        )
        states = tuple(sequences.padded(item.packed("states")) for item in passes)
        results = sequences.in_user_layout(output), sequences.restored(h_n)
        return RecurrentSolution(*results, states, status, steps, residual, sequences.present())

    def _read(
        self, value: Input, h0: Tensor | None, lengths: Tensor | None, cell: ImplicitModel
    ) -> tuple[Sequences, Tensor]:
        check_traceable("an ImplicitRNN", isinstance(cell.stop, Steps))
        sequences = Sequences.of(value, self.input_size, self.batch_first, lengths)
        data, dtype = sequences.data, cell.B.dtype
        if data.is_complex() or (data.dtype != dtype and not torch.is_autocast_enabled(data.device.type)):
            raise InputError(f"input is {data.dtype} and the model {dtype}; convert one of them with .to(...)")
        reads = not data.is_cuda  # on a GPU that would take as long as everything else; there, kernels report
        if reads and not under_transform() and not math.isfinite(data.detach().sum()):
            require_finite("input", data)
        shape = (len(self.cells), sequences.batch, self.hidden_size)
        if h0 is None:
            return sequences, torch.zeros(shape, dtype=dtype, device=data.device)
        expected = (shape[0], shape[2]) if sequences.kind == "single" else shape
        if not isinstance(h0, Tensor) or tuple(h0.shape) != expected:
            received = tuple(h0.shape) if isinstance(h0, Tensor) else type(h0).__name__
            raise InputError(f"h0 must have the shape {expected} (layers x directions, ...); received {received}")
        if reads:
            require_finite("h0", h0)
        return sequences, sequences.sorted(h0.to(dtype).reshape(shape))

    def _run(
        self, cells: list[ImplicitModel], sequences: Sequences, h0: Tensor, *, trace: bool
    ) -> tuple[Tensor, Tensor, list["_Pass"]]:
        passes: list[_Pass] = []
        once, data = WarnOnce(), sequences.data
        autocast, kind = torch.is_autocast_enabled(data.device.type), data.device.type
        with torch.autocast(kind, enabled=False) if autocast else nullcontext():
            data = data.to(cells[0].B.dtype)
            for layer in range(self.num_layers):
                if layer > 0 and self.dropout > 0:
                    data = F.dropout(data, self.dropout, self.training)
                outputs = []
                for direction in range(self.directions):
                    label = f" of layer {layer}" if self.num_layers > 1 else ""
                    label += " backwards" if direction else ""
                    item = _Pass(cells[len(passes)], self.warm_start, trace, label, once)
                    outputs.append(item.run(data, sequences.sizes, h0[len(passes)], backwards=direction == 1))
                    passes.append(item)
                data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        output = data if self.readout is None else self.readout(data)
        policy = cells[0].on_failure
        if output.is_cuda or policy == "ignore" or torch.compiler.is_exporting():
            pass  # on a GPU the kernels report all but the last outputs
        elif under_functorch():
            output = checked_under_functorch(output, torch.zeros_like(output), policy)
        else:
            _report_outputs(output.detach(), policy, once)
        last = passes[0].last[None] if len(passes) == 1 else torch.stack([item.last for item in passes])
        return output, last, passes

    def explain(self, input: Input) -> str:
        """Says how ``model(input)`` is computed, and why not by other engines, one line each.

        Args:
            input: sequences, of which only shape, dtype and device count.

        Example:
            >>> print(ImplicitRNN(3, 5, 8, executor="reference").explain(torch.zeros(4, 2, 3)))
            time by time, reference: executor="reference" was asked for
        """
        cell, sizes = self.cell(0), Sequences.of(input, self.input_size, self.batch_first).sizes
        with torch.no_grad():
            task = _Pass(cell, self.warm_start, False, "", WarnOnce())
            lines = task.choose_engine(sizes[0])
        if task.engine is None:
            element = torch.empty(sizes[0], cell.in_features, dtype=cell.B.dtype, device=cell.B.device)
            return "\n".join([f"time by time, {cell.explain(element)}", *lines])
        dtype = str(task.dtype).removeprefix("torch.")
        solver = type(cell.options().solver).__name__
        first = f"{task.engine.name}: whole sequences in one call, {cell.activation.name}, {dtype}, "
        return "\n".join([f"{first}{cell.state_features} states, {solver}", *lines])

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, hidden_size={self.hidden_size}, state_features={self.state_features}, "
            f"num_layers={self.num_layers}, bidirectional={self.bidirectional}, batch_first={self.batch_first}"
        )


class _Pass:
    """One pass of one cell over the sequences, forwards or backwards in time."""

    def __init__(self, cell: ImplicitModel, warm_start: bool, trace: bool, label: str, once: WarnOnce) -> None:
        self.cell, self.warm_start, self.trace = cell, warm_start, trace
        self.label, self.once, self.spec = label, once, cell.spec()
        self.engine: Compiled | None = None
        self.reports: dict[int, dict[str, Tensor]] = {}

    @cached_property
    def system(self) -> IterationSystem:
        """What to iterate with, at every time step."""
        return self.cell.state.system()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the solves: sequences have kernels in float32 alone on a GPU."""
        return self.cell.B.dtype if isinstance(self.engine, Triton) else self.cell.compute_dtype

    def choose_engine(self, batch: int) -> list[str]:
        """Chooses an engine for whole sequences; returns why those before it were not chosen."""
        cell, lines = self.cell, list[str]()
        spec = cell.spec_of(self.system)
        for engine in COMPILED:
            if cell.executor not in ("auto", engine.name):
                continue
            self.engine = engine
            factors = tuple(factor.detach().to(self.dtype) for factor in self.system.factors)
            reason = engine.sequence_why_not(spec, factors, len(cell.C), batch)
            if not reason:
                return lines
            lines.append(f"not {engine.name} for whole sequences: {reason}")
        self.engine = None
        return lines

    def _plan(self, batch: int) -> tuple[list[str], torch.dtype, float | None]:
        """Chooses an engine; cached for a model, except where values of A decide, as of a shifted one.

        Returns what `choose_engine` does, the dtype of solves and, where the engine projects rows, their radius.
        """
        known, key, cell = self.spec.prepared, ("whole sequences", self.cell.C.shape[0]), self.cell
        asks = batch == 0 or under_transform() or under_forward_mode() or cell.state.shifted
        if key in known and not asks:
            self.engine, lines, dtype, radius = known[key]
            return lines, dtype, radius
        lines, dtype, radius = self.choose_engine(batch), self.dtype, None
        if self.engine is not None and dtype == cell.B.dtype and dtype in self.engine.projects:
            radius = cell.state.row_radius
        if not asks and not NUMBA.is_compiling:
            known[key] = self.engine, lines, dtype, radius
        return lines, dtype, radius

    def run(self, data: Tensor, sizes: list[int], h0: Tensor, *, backwards: bool) -> Tensor:  # (N, h)
        """Returns the hidden states of all elements and stores the last ones."""
        cell, (lines, dtype, radius) = self.cell, self._plan(sizes[0])
        if self.engine is None:
            if cell.executor == "triton":
                reason = lines[0].partition(": ")[2]
                raise InputError(f'executor="triton" cannot compute this: {reason}; use executor="auto"')
            return self._run_by_time(data, sizes, h0, backwards=backwards)
        B, C, D, bias = cell.B, cell.C, cell.D, cell.bias
        A = self.system.factors[0] if radius is None else cell.state.raw
        solve = Solve(self.spec.forward, label=self.label, once=self.once)
        how = tuple(sizes), backwards, self.warm_start, self.trace, radius
        matrices = CellMatrices(A, B, C, D, bias)
        if dtype != B.dtype:
            rest = (None if matrix is None else matrix.to(dtype) for matrix in (D, bias))
            matrices = CellMatrices(A.to(dtype), B.to(dtype), C.to(dtype), *rest)
            data, h0 = data.to(dtype), h0.to(dtype)
        spec = SequenceSpec(self.spec, self.engine, solve, *how)
        result = run_sequences(spec, data, h0, matrices).to(B.dtype)
        if self.trace:
            self.reports = {0: {name: getattr(result, name) for name in ("states", "status", "steps", "residual")}}
        self.last = result.last
        return result.hidden

    def _run_by_time(self, data: Tensor, sizes: list[int], h0: Tensor, *, backwards: bool) -> Tensor:  # (N, h)
        if data.is_cuda:
            require_finite("input", data)
            require_finite("h0", h0)
        cell, p = self.cell, data.shape[1]
        v, inputs = F.linear(data, cell.B[:, :p], cell.bias).split(sizes), data.split(sizes)
        y = None if cell.D is None else F.linear(data, cell.D[:, :p]).split(sizes)
        outputs: dict[int, Tensor] = {}
        finished: list[Tensor] = []
        h, x = h0[: sizes[-1]] if backwards else h0, None
        times = range(len(sizes))
        for t in reversed(times) if backwards else times:
            h, x, left = _resize(h, x, sizes[t], h0)
            finished += left
            x = self._equilibrium(t, v[t] + F.linear(h, cell.B[:, p:]), inputs[t], h, x)
            feedthrough = None if cell.D is None or y is None else y[t] + F.linear(h, cell.D[:, p:])
            h = outputs[t] = F.linear(x, cell.C) if feedthrough is None else F.linear(x, cell.C) + feedthrough
        self.last = torch.cat([h, *reversed(finished)]) if finished else h
        return torch.cat([outputs[t] for t in times])

    def _equilibrium(self, t: int, v: Tensor, s: Tensor, h: Tensor, x: Tensor | None) -> Tensor:
        solve = Solve(self.cell.spec().forward, label=f" at time step {t}{self.label}", once=self.once)
        u = torch.cat([s, h], -1) if isinstance(solve.options.stop, ErrorBound) else s
        start = x.detach() if x is not None and self.warm_start else None
        state, status, steps, residuals = self.cell.solve(self.system, solve, v, u, start, trace=self.trace)
        if self.trace:
            residual = last_residual(residuals, steps)
            self.reports[t] = {"states": state, "status": status, "steps": steps, "residual": residual}
        return state

    def packed(self, name: str) -> Tensor:  # (N, ...)
        """Returns one kind of report for all elements."""
        return torch.cat([self.reports[t][name] for t in sorted(self.reports)])


def _resize(h: Tensor, x: Tensor | None, size: int, h0: Tensor) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Drops sequences that end (they come last) or, backwards in time, adds those that begin, with their `h0`."""
    count = h.shape[0]
    if size < count:
        return h[:size], None if x is None else x[:size], [h[size:]]
    if size > count:
        h = torch.cat([h, h0[count:size]])
        x = None if x is None else torch.cat([x, x.new_zeros(size - count, x.shape[1])])
    return h, x, []
