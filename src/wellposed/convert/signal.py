"""Signals: what flows through a network while it is converted, as an affine function of input and states.

A `Signal` belongs to the `Network` of states that a conversion has found so far. `Rules` say which rule converts
which module or function; `RULES` are open to rules of one's own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.activations.catalogue import of_function, of_layer, spellings
from wellposed.errors import InputError
from wellposed.forms import Block, Diagonal, Identity, ImplicitForm, Operator, Product, Selection, Zero
from wellposed.forms.operators.entries import largest_entry, least_entry

INPUT = -1
_LIGHT = (Identity, Selection, Diagonal)


@dataclass(frozen=True, eq=False)
class Signal:
    """An affine function ``sum_k M_k x_k + offset`` of the input and of states, for one sample.

    Args:
        network: where new states are registered.
        shape: of the tensor that the network sees, a batch of one sample included.
        terms: M by the number of the state, `INPUT` for the input.
        offset: ``(prod(shape),)``, zero if None.
        multiple_of: another signal and the factors that make this one of it, where that is known.
    """

    network: "Network"
    shape: tuple[int, ...]
    terms: Mapping[int, Operator]
    offset: Tensor | None = None
    multiple_of: "tuple[Signal, Tensor] | None" = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.network.device

    def zeros(self) -> Tensor:
        """Returns zeros of its shape, as an example of what the network sees."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def linear(self, operator: Operator, shape: Sequence[int], offset: Tensor | None = None) -> "Signal":
        """Multiplies by an operator and adds an offset."""
        source = self if operator.picks and operator.one_entry_per()[0] else self.apart()
        moved = None if source.offset is None else (operator @ source.offset[None])[0]
        terms = {k: operator @ part for k, part in source.terms.items()}
        if not self.network.can_form(terms):
            return source.split().linear(operator, shape, offset)
        nonzero = {k: part for k, part in terms.items() if not isinstance(part, Zero)}
        product = Signal(self.network, tuple(shape), nonzero, moved)
        if offset is None:
            return product
        return product.plus(Signal(self.network, product.shape, {}, offset.to(self.dtype).clone().reshape(-1)))

    def apart(self) -> "Signal":
        """Makes states of the offset where it must not be rounded: what multiplies it then is part of A.

        Entries that are equal, such as those of a channel, share a state.
        """
        if not self.network.exact or self.offset is None or not bool(self.offset.isfinite().all()):
            return self
        if not bool(self.offset.any()):
            return replace(self, offset=None)
        values, index = self.offset.unique(return_inverse=True)
        (k,) = self.network.constant(values).activate("identity").terms
        self.network.constants[k] = values
        self.network.added.add(k)
        chosen = Selection(torch.where(self.offset == 0, -1, index), len(values), self.dtype)
        return replace(self, terms={**self.terms, k: chosen}, offset=None)

    def split(self) -> "Signal":
        """Makes a block of states with phi = identity where products of weights would leave the number range."""
        state = self.as_state()
        self.network.added.update(state.terms)
        return state

    def reshape(self, shape: Sequence[int]) -> "Signal":
        """Reads the numbers in another shape."""
        if math.prod(shape) != self.size:
            raise InputError(f"a signal of shape {self.shape} cannot be read as {tuple(shape)}")
        return Signal(self.network, tuple(shape), self.terms, self.offset)

    def select(self, index: Tensor) -> "Signal":
        """Picks entries by flat index, in the shape of `index`; -1 gives zero."""
        flat = index.reshape(-1)
        if len(flat) == self.size and torch.equal(flat, torch.arange(self.size, device=flat.device)):
            return self.reshape(tuple(index.shape))
        return self.linear(Selection(flat.to(self.device), self.size, self.dtype), tuple(index.shape))

    def indices(self) -> Tensor:
        """Returns the flat index of every entry, in the shape of the signal."""
        return torch.arange(self.size, device=self.device).reshape(self.shape)

    def scaled(self, factors: Tensor | float) -> "Signal":
        """Multiplies every entry by its own factor."""
        wide = torch.as_tensor(factors, dtype=self.dtype, device=self.device)
        values = wide.broadcast_to(self.shape).clone().reshape(-1)
        origin, before = self.multiple_of or (self, torch.ones_like(values))
        return replace(self.linear(Diagonal(values), self.shape), multiple_of=(origin, values * before))

    def shifted(self, offset: Tensor | float) -> "Signal":
        """Adds a constant to every entry."""
        wide = torch.as_tensor(offset, dtype=self.dtype, device=self.device).broadcast_to(self.shape)
        return self.linear(Identity(self.size, self.dtype, self.device), self.shape, wide)

    def plus(self, other: "Signal") -> "Signal":
        """Adds two signals of the same shape."""
        rounds = self.offset is not None and other.offset is not None and _rounds(self.offset, other.offset)
        source = self.apart() if rounds else self
        terms = dict(source.terms)
        for k, part in other.terms.items():
            terms[k] = terms[k] + part if k in terms else part
        offsets = [offset for offset in (source.offset, other.offset) if offset is not None]
        return Signal(self.network, self.shape, terms, reduce(add, offsets) if offsets else None)

    @property
    def sources(self) -> dict[int, Operator]:
        """The terms that depend on the input."""
        return {k: part for k, part in self.terms.items() if k not in self.network.constants}

    @property
    def costly(self) -> bool:
        """Whether computing it takes more than picking and scaling entries of one source."""
        operators = [factor for part in self.sources.values() for factor in factors(part)]
        return len(self.sources) > 1 or not all(isinstance(part, _LIGHT) for part in operators)

    def gathered(self) -> "Signal":
        """Turns a sum into a block of states with phi = identity, so that what follows is applied once.

        Terms that fill different entries, as concatenation makes them, stay apart.
        """
        filled = sum(_filled(part) for part in self.sources.values())
        return self.as_state() if len(self.sources) > 1 and filled > self.size else self

    def as_state(self) -> "Signal":
        """Makes a block of states with phi = identity, so that the signal is computed once."""
        return self.activate("identity")

    def activate(self, activation: Activation | str, name: str = "") -> "Signal":
        """Makes a new block of states, phi of this signal."""
        return self.network.state(self, get_activation(activation), name)


def _rounds(a: Tensor, b: Tensor) -> bool:
    """Returns whether a sum of two vectors is rounded anywhere (Knuth's two-sum)."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    return bool((lost != 0)[total.isfinite()].any())


def factors(operator: Operator) -> tuple[Operator, ...]:
    """Lists what an operator is a product of."""
    return operator.factors if isinstance(operator, Product) else (operator,)


def _filled(operator: Operator) -> int:
    """Counts the rows that are not known to be zero."""
    first = factors(operator)[0]
    return int((first.index >= 0).sum()) if isinstance(first, Selection) else operator.shape[0]


def stacked(signals: Sequence[Signal]) -> Signal:
    """Lays the entries of several signals one after the other, in one flat signal.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> stacked([network.input, network.input]).shape
        (4,)
    """
    network, sizes = signals[0].network, tuple(signal.size for signal in signals)
    sources = sorted({k for signal in signals for k in signal.terms})
    terms: dict[int, Operator] = {}
    for k in sources:
        blocks = {(i, 0): signal.terms[k] for i, signal in enumerate(signals) if k in signal.terms}
        whole = Block(sizes, (network.width(k),), blocks, network.dtype, network.device)
        terms[k] = _placed(sizes, *next(iter(blocks.items()))) if len(blocks) == 1 else whole
    offset = None
    if any(signal.offset is not None for signal in signals):
        zero = torch.zeros(max(sizes), dtype=network.dtype, device=network.device)
        pieces = [zero[: signal.size] if signal.offset is None else signal.offset for signal in signals]
        offset = torch.cat(pieces)
    return Signal(network, (sum(sizes),), terms, offset)


def _placed(sizes: tuple[int, ...], corner: tuple[int, int], part: Operator) -> Operator:
    """Pads one block with zero rows above and below."""
    index = torch.full((sum(sizes),), -1, device=part.device)
    start, size = sum(sizes[: corner[0]]), sizes[corner[0]]
    index[start : start + size] = torch.arange(size, device=part.device)
    placed: Operator = Selection(index, size, part.dtype) @ part
    return placed


@dataclass
class Network:
    """The states that a conversion has found so far.

    Args:
        input_shape: of one sample.
        dtype, device: of the weights.
        exact: whether nothing that rounds is multiplied out: offsets before a linear map become states of their
            own, `constants`, by their number.
        added: the states that there are only because of that.
        opened: the sizes of signals that are known only later, by their numbers, which are below `INPUT`.
    """

    input_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    exact: bool = False
    constants: dict[int, Tensor] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    opened: dict[int, int] = field(default_factory=dict)
    sources: list[Signal] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    path: str = ""  # of the module at work, for labels and errors

    @property
    def input(self) -> Signal:
        """The input as a signal, a batch of one."""
        p = math.prod(self.input_shape)
        return Signal(self, (1, *self.input_shape), {INPUT: Identity(p, self.dtype, self.device)})

    def width(self, k: int) -> int:
        """The size of a state, or of the input."""
        if k in self.opened:
            return self.opened[k]
        return math.prod(self.input_shape) if k == INPUT else self.sources[k].size

    def can_form(self, terms: Mapping[int, Operator]) -> bool:
        """Returns whether products of weights stay in the number range, where nothing may be rounded."""
        products = [part for part in terms.values() if isinstance(part, Product)] if self.exact else []
        least = 2.0**-450 if self.dtype == torch.float64 else 2.0**-100
        return all(least_entry(part) >= least and largest_entry(part) <= 1 / least for part in products)

    def constant(self, value: Any) -> Signal:
        """A signal that depends on nothing."""
        tensor = torch.as_tensor(value, dtype=self.dtype, device=self.device)
        return Signal(self, tuple(tensor.shape), {}, tensor.reshape(-1).clone())

    def state(self, source: Signal, activation: Activation, name: str = "") -> Signal:
        """Registers ``x_k = phi(source)`` and returns x_k."""
        if activation.block and source.size % activation.block:
            raise InputError(f"{activation.name} acts on blocks of {activation.block}; got {source.size} entries")
        k = len(self.sources)
        self.sources.append(source)
        self.activations.append(activation)
        self.labels.append(name or self.path or activation.name)
        return Signal(self, source.shape, {k: Identity(source.size, self.dtype, self.device)})

    def loop(self, source: Signal, feedback: Operator, activation: Activation, name: str = "") -> Signal:
        """Registers ``x_k = phi(feedback x_k + source)`` and returns x_k."""
        state = self.state(source, activation, name)
        k = len(self.sources) - 1
        self.sources[k] = replace(source, terms={**source.terms, k: feedback})
        return state

    def open(self, shape: Sequence[int]) -> Signal:
        """A signal that `close` replaces by another, which may depend on it: that is a loop."""
        k = INPUT - 1 - len(self.opened)
        self.opened[k] = math.prod(shape)
        return Signal(self, tuple(shape), {k: Identity(self.opened[k], self.dtype, self.device)})

    def close(self, opened: Sequence[Signal], values: Sequence[Signal]) -> list[Signal]:
        """Puts values in the places of open signals, in all states, and returns them.

        A value that takes some computing and is read more than once becomes a state, and so does one that is an
        affine function of open signals themselves.
        """
        keys = [next(iter(signal.terms)) for signal in opened]
        closed = dict(zip(keys, values, strict=True))
        for k, value in closed.items():
            readers = sum(k in source.terms for source in self.sources)
            if (value.costly and readers > 1) or not closed.keys().isdisjoint(value.terms):
                closed[k] = value.as_state()
        for number, source in enumerate(list(self.sources)):
            whole = replace(source, terms={k: part for k, part in source.terms.items() if k not in closed})
            for k, part in source.terms.items():
                if k in closed:
                    whole = whole.plus(closed[k].linear(part, source.shape))
            self.sources[number] = whole
        return list(closed.values())

    def form(self, output: Signal) -> ImplicitForm:
        """Puts the form together, last layer first (003 eq. 2.10)."""
        last, entry = len(self.sources) - 1, (self.dtype, self.device)
        sizes = tuple(signal.size for signal in reversed(self.sources)) or (0,)
        p, q = math.prod(self.input_shape), output.size
        A: dict[tuple[int, int], Operator] = {}
        B: dict[tuple[int, int], Operator] = {}
        for k, source in enumerate(self.sources):
            for j, part in source.terms.items():
                if j == INPUT:
                    B[last - k, 0] = part
                else:
                    A[last - k, last - j] = part
        C = {(0, last - j): part for j, part in output.terms.items() if j != INPUT}
        D = output.terms.get(INPUT)
        return ImplicitForm(
            Block(sizes, sizes, A, *entry),
            Block(sizes, (p,), B, *entry),
            Block((q,), sizes, C, *entry),
            D,
            self._bias(),
            tuple(reversed(self.activations)) or (get_activation("identity"),),
            self.input_shape,
            output_bias=output.offset,
            labels=_distinct(list(reversed(self.labels))) or ("nothing",),
        )

    def _bias(self) -> Tensor | None:
        if all(source.offset is None for source in self.sources):
            return None
        factory_kwargs: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        pairs = [(source.offset, source.size) for source in reversed(self.sources)]
        return torch.cat(
            [torch.zeros(size, **factory_kwargs) if value is None else value for value, size in pairs]
        )


def _distinct(labels: list[str]) -> tuple[str, ...]:
    """Numbers labels that occur more than once."""
    seen: dict[str, int] = {}
    distinct = []
    for label in reversed(labels):
        seen[label] = seen.get(label, 0) + 1
        distinct.append(label if labels.count(label) == 1 else f"{label} ({seen[label]})")
    return tuple(reversed(distinct))


ModuleRule = Callable[..., Any]  # (module, *signals) -> signal
FunctionRule = Callable[..., Any]  # the arguments of the function, with signals in place of tensors


class Rules:
    """The registered rules of modules, by type, and of functions, by themselves or by method name."""

    def __init__(self) -> None:
        self.modules: dict[type[nn.Module], ModuleRule] = {}
        self.functions: dict[Any, FunctionRule] = {}

    def module(self, *kinds: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
        """Registers the rule of some module types."""

        def register(rule: ModuleRule) -> ModuleRule:
            self.modules.update(dict.fromkeys(kinds, rule))
            return rule

        return register

    def function(self, *functions: Any) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of functions, operators of ATen, or methods of a tensor given by name.

        The rule of ``torch.nn.functional.relu`` or of the method ``"relu"`` holds for the ATen operator of the
        same name and arguments if that is given too, for instance ``torch.ops.aten.relu``.
        """

        def register(rule: FunctionRule) -> FunctionRule:
            for function in functions:
                self.functions[function] = rule
            return rule

        return register

    def named(self, *names: str) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of everything that torch calls by these names; see `spellings`."""
        return self.function(*(function for name in names for function in spellings(name)))

    def of_module(self, module: nn.Module) -> ModuleRule | None:
        """Finds the rule of a module by its type or the nearest base class that has one or is an activation."""
        for kind in type(module).__mro__:
            if kind in self.modules:
                return self.modules[kind]
            if (family := of_layer(kind)) is not None:
                return lambda module, signal: signal.activate(family.of_layer(module))
        return None

    def of_function(self, function: Any) -> FunctionRule | None:
        """Finds the rule of a function, or its activation; an ATen overload has that of its operator."""
        if function in self.functions:
            return self.functions[function]
        if isinstance(function, torch._ops.OpOverload):
            return self.of_function(function.overloadpacket)
        if (family := of_function(function)) is not None:
            return lambda signal, *args, **options: signal.activate(family.of_call(*args, **options))
        return None


RULES = Rules()


class UnsupportedError(InputError):
    """A module or function that no rule converts.

    Args:
        placed: whether the message says where in the network it is.
    """

    def __init__(self, message: str, placed: bool = False) -> None:
        super().__init__(message)
        self.placed = placed


def signals_in(value: Any) -> Iterable[Signal]:
    """Lists the signals among arguments."""
    if isinstance(value, Signal):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from signals_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from signals_in(part)
