"""Maps on packed states, with what a solver or a stopping rule may ask of them.

`Packing` flattens a state, a tensor of any shape or a tuple of them, to one ``(B, n)`` tensor. `Map` is what
solvers iterate on; `FunctionMap` makes one of a user's function, which may be declared a `Contraction`.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.tracing import under_forward_mode, under_functorch
from wellposed.errors import InputError, MapError

State = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Packing:
    """Remembers the shapes of a state so that it can be flattened and restored.

    Example:
        >>> packing = Packing.of((torch.zeros(5, 2, 3), torch.zeros(5)))
        >>> packing.pack((torch.zeros(5, 2, 3), torch.ones(5))).shape
        torch.Size([5, 7])
    """

    shapes: tuple[tuple[int, ...], ...]  # without the batch dimension
    single: bool
    batch: int
    dtype: torch.dtype

    @classmethod
    def of(cls, state: State) -> "Packing":
        """Reads shapes off a state and checks that it can be packed."""
        single = isinstance(state, Tensor)
        tensors: tuple[Tensor, ...] = (state,) if isinstance(state, Tensor) else tuple(state)
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            kinds = ", ".join(type(tensor).__name__ for tensor in tensors) or "nothing"
            raise InputError(f"a state is a tensor or a tuple of tensors; received {kinds}")
        for tensor in tensors:
            if tensor.dim() == 0 or not tensor.is_floating_point():
                raise InputError(
                    "a state is batch-first and floating point; received shape "
                    f"{tuple(tensor.shape)}, {tensor.dtype}"
                )
            if tensor.shape[0] != tensors[0].shape[0] or tensor.dtype != tensors[0].dtype:
                raise InputError(
                    "all parts of a state share batch size and dtype; received "
                    + ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
                )
        return cls(tuple(tuple(p.shape[1:]) for p in tensors), single, tensors[0].shape[0], tensors[0].dtype)

    @property
    def plain(self) -> bool:
        """Whether a state is packed as it is: one tensor of rows."""
        return self.single and len(self.shapes[0]) == 1

    def pack(self, state: State) -> Tensor:  # (B, n)
        """Flattens a state."""
        if self.plain and isinstance(state, Tensor):
            return state
        tensors = (state,) if isinstance(state, Tensor) else state
        flat = [tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:])) for tensor in tensors]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    def unpack(self, x: Tensor) -> State:
        """Restores the shapes of a packed state."""
        if self.plain:
            return x
        if self.single:
            return x.reshape(x.shape[0], *self.shapes[0])
        pieces = x.split([math.prod(shape) for shape in self.shapes], dim=1)
        return tuple(p.reshape(x.shape[0], *shape) for p, shape in zip(pieces, self.shapes, strict=True))

    def cast(self, state: State) -> State:
        """Converts a state to the dtype that is packed."""
        if isinstance(state, Tensor):
            return state.to(self.dtype)
        return tuple(tensor.to(self.dtype) if isinstance(tensor, Tensor) else tensor for tensor in state)

    def pack_result(self, result: State, batch: int | None = None) -> Tensor:
        """Flattens the result of a map, after checking that it has the form of the state."""
        rows = self.batch if batch is None else batch
        fits = self.plain and isinstance(result, Tensor) and result.shape == (rows, *self.shapes[0])
        if fits and isinstance(result, Tensor) and result.dtype == self.dtype:
            return result
        tensors = (result,) if isinstance(result, Tensor) else result
        expected = [(rows, *shape) for shape in self.shapes]
        if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise MapError(f"f must return a tensor or a tuple of tensors; received {type(result).__name__}")
        if self.single != isinstance(result, Tensor) or [tuple(p.shape) for p in tensors] != expected:
            raise MapError(
                f"f must return the shape of its state, {expected}; received {[tuple(p.shape) for p in tensors]}"
            )
        if any(tensor.dtype != self.dtype for tensor in tensors):
            raise MapError(
                f"f must return the dtype of its state, {self.dtype}; received {[p.dtype for p in tensors]}; "
                "cast inside f or start from an x0 of that dtype"
            )
        return self.pack(tuple(tensors))


class Map(abc.ABC):
    """A map ``x -> f(x)`` on packed states ``(B, n)`` that treats every row by itself."""

    steps_per_check: int = 1  # evaluations that may be wasted by judging several steps at once
    may_decay: bool = True  # whether states may decay to zero, so that the first residual sets the scale
    min_size_to_gather: int = 0  # below so many numbers, dropping finished rows costs more than it saves
    contracts: bool = False  # whether f(x) is known to be nearer to the equilibrium than x, in some norm

    @abc.abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Evaluates the map."""

    def rows(self, keep: Tensor) -> "Map | None":
        """Restricts the map to some rows of the batch; None where that is not possible."""
        return None

    def noiseless(self, x: Tensor) -> Tensor:
        """Evaluates the map without its noise, if it has any."""
        return self(x)

    def jvp(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Multiplies the Jacobian at ``x`` with ``tangent``, row by row."""
        if under_forward_mode() and not under_functorch():  # dual numbers do not nest
            transposed = torch.func.vjp(self.__call__, x)[1]
            product: Tensor = torch.func.vjp(lambda w: transposed(w)[0], torch.zeros_like(x))[1](tangent)[0]
            return product
        return torch.func.jvp(self.__call__, (x,), (tangent,))[1]

    def jacobian(self, x: Tensor) -> Tensor:  # (B, n, n)
        """Assembles the Jacobian of every row from its columns."""
        basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return torch.stack([self.jvp(x, unit.expand_as(x)) for unit in basis], dim=-1)

    def eps(self, x: Tensor) -> float:
        """Returns the rounding unit of the arithmetic in which the map is evaluated."""
        return torch.finfo(x.dtype).eps

    def rounding(self, x: Tensor, fx: Tensor) -> Tensor:  # (B,)
        """Estimates how far rounding moves ``f(x)``; a residual of this size is noise."""
        eps = self.eps(x)
        long_sums = eps > torch.finfo(x.dtype).eps  # mixed precision rounds results, not sums
        units = 4 + (0 if long_sums else x.shape[1] ** 0.5)
        return units * eps * torch.maximum(max_norm(x), max_norm(fx))

    def error_bound(self, x: Tensor, fx: Tensor) -> Tensor | None:  # (B,)
        """Bounds the distance of ``x`` to the equilibrium; None without a known contraction."""
        return None

    def attach(self, x: Tensor, solve: Any, options: Any) -> Tensor | None:
        """Returns the solution ``x`` with its gradient, where the map knows a way of its own; else None.

        Args:
            solve: the `Solve` that has found it.
            options: of the backward solve.
        """
        return None


def max_norm(x: Tensor) -> Tensor:  # (..., B), from (..., B, n)
    """Returns the largest absolute entry of every row, zero for rows without entries."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    if x.is_cuda:
        split = x.unflatten(-1, (pieces(x), -1))
        # Without a copy for the absolute values.
        return torch.linalg.vector_norm(split, torch.inf, dim=-1).amax(-1)
    return x.abs().amax(-1)  # several times faster than vector_norm on a CPU


def pieces(x: Tensor) -> int:
    """Returns how many pieces to cut the rows of a state into: on a GPU a few long rows are slow to reduce."""
    count, length = 1, x.shape[-1] if x.is_cuda else 1
    while length // count > 1024 and length % (2 * count) == 0:
        count *= 2
    return count


def piece_norms(x: Tensor) -> Tensor:  # (..., B, pieces), from (..., B, n)
    """Returns the largest absolute entry of every piece of every row."""
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    split = x.unflatten(-1, (pieces(x), -1))
    return torch.linalg.vector_norm(split, torch.inf, dim=-1) if x.is_cuda else split.abs().amax(-1)


def distance(x: Tensor, y: Tensor, finite: bool) -> Tensor:  # (..., B), from (..., B, n) twice
    """Returns the largest absolute difference of every row, given whether all of `y` is known to be finite."""
    narrow = x.shape[-1] < 48 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not (finite and narrow and x.numel()):
        return max_norm(y - x)
    rows = (-1, 1, x.shape[-1])
    # On a CPU this is the fastest way for short rows; it ignores NaN, which `finite` rules out.
    return torch.cdist(x.reshape(rows), y.reshape(rows), p=torch.inf).reshape(x.shape[:-1])


class Contraction:
    """Declares that a function contracts: ``|f(x) - f(y)|_inf <= factor |x - y|_inf`` on the packed state.

    Solutions of a declared contraction carry `error_bound` and may stop by `ErrorBound`.

    Args:
        function: the map.
        factor: below one.
        rounding: bounds the rounding of f, relative to ``|f(x)|_inf``; None assumes 4 + sqrt(n) units.

    Example:
        >>> half = Contraction(lambda x: 0.5 * x + 1, factor=0.5)
        >>> half(torch.zeros(1, 1))
        tensor([[1.]])
    """

    def __init__(self, function: Callable, factor: float, rounding: float | None = None) -> None:
        if not 0 <= factor < 1:
            raise InputError(f"a contraction has a factor in [0, 1); received {factor}")
        self.function, self.factor, self.rounding = function, factor, rounding

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class FunctionMap(Map):
    """A user's function of a structured state and batch-first inputs."""

    equation: Any = None  # of which it is the map, once that is known; see `CompiledLoop`

    def __init__(
        self,
        function: Callable,
        inputs: Sequence[Tensor],
        packing: Packing,
        precision: torch.dtype | None = None,
    ) -> None:
        self.function, self.inputs, self.packing = function, tuple(inputs), packing
        self.precision = precision  # of autocast, where that is on
        self.differentiated = torch.is_grad_enabled()  # by the caller, whatever solvers do
        self.plain = packing.plain and precision is None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == self.packing.batch:
            return self._evaluate(x)
        try:
            return self._evaluate(x)
        except RuntimeError as error:
            raise MapError(
                f"f failed on {x.shape[0]} of {self.packing.batch} rows: {error}. Samples that have converged "
                "are dropped from the computation, so everything in f that has a batch dimension must be "
                "one of its inputs: fixed_point(f, x0, *inputs)"
            ) from error

    def _evaluate(self, x: Tensor) -> Tensor:
        return self._apply(self.function, x)

    def noiseless(self, x: Tensor) -> Tensor:
        return self._apply(getattr(self.function, "noiseless", self.function), x)

    def _apply(self, function: Callable, x: Tensor) -> Tensor:
        if self.plain:
            result = function(x, *self.inputs)
            fits = isinstance(result, Tensor) and result.shape == x.shape and result.dtype == x.dtype
            return result if fits else self.packing.pack_result(result, batch=x.shape[0])
        state = self.packing.unpack(x)
        if self.precision is None:
            return self.packing.pack_result(function(state, *self.inputs), batch=x.shape[0])
        with torch.autocast(x.device.type, dtype=self.precision):
            result = function(state, *self.inputs)
        return self.packing.pack_result(self.packing.cast(result), batch=x.shape[0])

    def eps(self, x: Tensor) -> float:
        return max(torch.finfo(dtype).eps for dtype in (x.dtype, self.precision or x.dtype))

    def error_bound(self, x: Tensor, fx: Tensor) -> Tensor | None:
        if not isinstance(self.function, Contraction):
            return None
        relative = self.function.rounding
        rounding = self.rounding(x, fx) if relative is None else relative * max_norm(fx)
        return (max_norm(fx - x) + rounding) / (1 - self.function.factor)

    def attach(self, x: Tensor, solve: Any, options: Any) -> Tensor | None:
        return None if self.equation is None else self.equation.attach(x, solve, options)

    def rows(self, keep: Tensor) -> "FunctionMap | None":
        if not self.inputs:
            return None
        inputs = [value[keep] for value in self.inputs]
        return FunctionMap(self.function, inputs, self.packing, self.precision)
