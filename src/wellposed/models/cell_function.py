"""A cell as the function of one solve: with its input half, its weights and its masks computed once."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.equilibrium.maps import State
from wellposed.models.cell_parts import Cell
from wellposed.models.dropout import VariationalDropout, select_rows

_TURN = threading.RLock()


class CellFunction:
    """Evaluates ``x -> cell(x, u)`` given the inputs of a solve.

    Args:
        cell: the module, of which everything but `weights` is read where it lies.
        step: a step of the state, given what `halves` made of the input.
        single: whether the step takes one tensor rather than a tuple.
        masks: dropout layers that hold masks; the last input then numbers the samples.
        places: layers and names of weights under a parametrisation.
        weights: these weights, computed once for the solve.
    """

    def __init__(
        self,
        cell: nn.Module,
        step: Callable[[Any, Any], State],
        single: bool,
        masks: tuple[VariationalDropout, ...],
        places: tuple[tuple[nn.Module, str], ...],
        weights: tuple[Tensor, ...],
    ) -> None:
        self.cell, self.step, self.single, self.masks = cell, step, single, masks
        self.places, self.weights = places, weights

    def __call__(self, x: State, *arguments: Tensor) -> State:
        if self.masks:
            select_rows(self.masks, arguments[-1])
            arguments = arguments[:-1]
        return self.step(x, arguments[0] if self.single else arguments)

    def holding(self, weights: tuple[Tensor, ...]) -> "CellFunction":
        """Returns the function with other weights."""
        return CellFunction(self.cell, self.step, self.single, self.masks, self.places, weights)

    def problem(self) -> str:
        """Says why a captured step would not do what the cell does; nothing if it would."""
        for layer in self.masks:
            if layer.training and layer.p > 0:
                return "VariationalDropout draws a mask for every solve"
        for name, layer in self.cell.named_modules():
            if layer._forward_hooks or layer._forward_pre_hooks:
                return f"the cell has a forward hook at {name!r}"
            if hasattr(layer, "equilibrium"):
                return f"the cell has an equilibrium of its own at {name!r}"
        return ""

    def fingerprint(self) -> Hashable:
        """Returns the addresses of all tensors that the layers hold, and all their settings.

        What a layer reads from elsewhere, such as a global variable, is not seen; it must stay as it is.
        """
        passing = ("_masks", "_rows")  # of dropout, which is the same for all solves where it is captured
        return tuple(
            _print_of(value)
            for layer in self.cell.modules()
            for name, value in layer.__dict__.items()
            if not (name in passing and isinstance(layer, VariationalDropout))
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Has the cell read `weights` for its computed weights, in the block."""
        held = zip(self.places, self.weights, strict=True)
        table = {(id(layer), name): weight for (layer, name), weight in held}
        kinds = {(type(layer), name) for layer, name in self.places}  # a parametrised layer has a class of its own
        properties = [(kind, name, kind.__dict__[name]) for kind, name in kinds]
        for kind, name, computed in properties:
            setattr(kind, name, _shown(table, name, computed))
        try:
            yield
        finally:
            for kind, name, computed in properties:
                setattr(kind, name, computed)


def _print_of(value: Any) -> Hashable:
    """Returns the address of a tensor, plain values as they are, containers entry by entry, and who others are."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_print_of(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _print_of(part)) for key, part in value.items())
    return id(value)


def _shown(table: dict[tuple[int, str], Tensor], name: str, computed: property) -> property:
    """Returns a property that shows the tensor of the table where there is one."""

    def show(layer: nn.Module) -> Any:
        held = table.get((id(layer), name))
        return computed.__get__(layer) if held is None else held

    return property(show)


def halves(cell: nn.Module, u: State) -> tuple[Callable[[Any, Any], State], State]:
    """Returns the map and its input; of a `Cell`, a step and what the input adds to it, computed once."""
    if not isinstance(cell, Cell) or cell._forward_hooks or cell._forward_pre_hooks:
        return cell, u
    return cell.step, cell.inject(u)


@contextlib.contextmanager
def weights_computed_once(cell: nn.Module) -> Iterator[dict[tuple[nn.Module, str], Tensor]]:
    """Holds parametrised weights fixed: spectral norm would otherwise move them at every step.

    They are computed here, in the caller's grad mode, since the steps of a solve run without one. Threads take
    turns: what holds the weights is shared by all of them, and each has a grad mode and a graph of its own.
    """
    places = [
        (layer, name)
        for layer in cell.modules()
        if parametrize.is_parametrized(layer)
        for name in layer.parametrizations  # type: ignore[union-attr]
    ]
    if not places:
        yield {}
        return
    with _TURN, parametrize.cached():
        yield {(layer, name): getattr(layer, name) for layer, name in places}
