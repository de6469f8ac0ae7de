"""The states of a network over a data set: what state matching fits a model to."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations import Activation
from wellposed.convert import UnsupportedError, to_implicit
from wellposed.convex.recorder import Recorder
from wellposed.convex.table import GIBIBYTE, Tables
from wellposed.equilibrium.maps import State
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel


@dataclass(frozen=True, eq=False)
class States:
    """Inputs, pre-activations, states and outputs, one row a sample (003 section 3.2, transposed).

    Args:
        U: inputs as the network saw them, flattened, ``(m, p)``.
        Z: pre-activations, last layer first, ``(m, n)``.
        X: states, ``X = phi(Z)``, ``(m, n)``.
        Y: outputs, flattened, ``(m, q)``.
        blocks: how many states each layer has, in the order of the columns of Z.
        activations: phi of each layer.
        form: the network as an implicit form with these states, where it has one.
        input_shape: of one sample, before flattening.

    Example:
        >>> one = torch.ones(3, 1)
        >>> States(one, one, one, one, (1,), (Activation("relu", torch.relu),)).samples
        3
    """

    U: Tensor
    Z: Tensor
    X: Tensor
    Y: Tensor
    blocks: tuple[int, ...]
    activations: tuple[Activation, ...]
    form: ImplicitForm | None = None
    input_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("U", "Z", "X", "Y"):
            part = getattr(self, name)
            if part.dim() != 2 or len(part) != len(self.U):
                raise InputError(
                    f"{name} must have one row for each of the {len(self.U)} samples; received {tuple(part.shape)}"
                )
        if len(self.blocks) != len(self.activations) or sum(self.blocks) != self.X.shape[1]:
            raise InputError(
                f"blocks {self.blocks} with {len(self.activations)} activations do not describe "
                f"{self.X.shape[1]} states; give one activation a block"
            )
        if self.Z.shape != self.X.shape:
            raise InputError(f"Z and X must agree in shape; received {tuple(self.Z.shape)}, {tuple(self.X.shape)}")

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.U)

    def subset(self, rows: Tensor | slice) -> "States":
        """Keeps some samples."""
        U, Z, X, Y = (part[rows] for part in (self.U, self.Z, self.X, self.Y))
        return replace(self, U=U, Z=Z, X=X, Y=Y)


def record_states(
    network: nn.Module | ImplicitForm,
    loader: Iterable[Any],
    *,
    limit: int = GIBIBYTE,
    folder: str | os.PathLike[str] | None = None,
) -> States:
    """Runs a network over a data set and records its inputs, pre-activations, states and outputs.

    The network is converted to an implicit form, whose states these are; implicit models give their equilibrium. A
    network that has no form is watched while it runs, and every call of a known activation (module, function or
    method, in place or not) gives a block of states; what lies between activations is then taken to be linear.
    States come last layer first. The network is run in evaluation mode and put back in its own.

    Args:
        network: a module or a form.
        loader: yields u or (u, target, ...), batch first.
        limit: bytes above which the states go to mapped files.
        folder: where such files go; None is a temporary folder that lives as long as the states.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> states = record_states(network, torch.randn(6, 4).split(3))
        >>> states.blocks, [phi.name for phi in states.activations], tuple(states.X.shape)
        ((5, 8), ['tanh', 'relu'], (6, 13))
    """
    tables, source = Tables(limit, None if folder is None else os.fspath(folder)), None
    with _evaluating(network), torch.no_grad():
        for batch in loader:
            u = batch if isinstance(batch, Tensor) else batch[0]
            if not isinstance(u, Tensor) or u.dim() < 2:
                raise InputError(f"a batch must be a tensor (batch, ...) or start with one; received {_shape(u)}")
            if not len(u):
                continue
            source = source or _source(network, u)
            Z, X, Y = source.run(u)
            tables.append(U=u.reshape(len(u), -1), Z=Z, X=X, Y=Y.reshape(len(u), -1))
    if source is None or tables.samples == 0:
        raise InputError("the loader yields nothing, so there are no states; give it at least one batch")
    found = tables.finished()
    input_shape = tuple(source.input_shape)
    return States(**found, blocks=source.blocks, activations=source.activations, form=source.form,
                  input_shape=input_shape)  # fmt: skip


class _FormSource:
    """States of a form."""

    def __init__(self, form: ImplicitForm, network: nn.Module | ImplicitForm) -> None:
        self.form: ImplicitForm | None = form
        self.network = network
        self.blocks, self.activations, self.input_shape = form.partition, form.activations, form.input_shape

    def run(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        form, network = self.form, self.network
        assert form is not None
        flat = u.reshape(len(u), -1)
        own = network if isinstance(network, ImplicitModel) and u.dim() == 2 else form
        x = own.equilibrium(u).value
        assert isinstance(x, Tensor)
        z = (form.A @ x) + (form.B @ flat)
        if form.bias is not None:
            z = z + form.bias
        return z, x, first_tensor(network(u))


class _WatchedSource:
    """States of a network that is watched while it runs."""

    form = None

    def __init__(self, network: nn.Module, u: Tensor) -> None:
        self.network, self.input_shape = network, tuple(u.shape[1:])
        entries, _ = self._entries(u)
        if not entries:
            raise InputError(
                f"{type(network).__name__} calls no known activation, so it has no states to record; register its "
                "layers with @to_implicit.register or use activations from torch.nn"
            )
        self.blocks = tuple(z[0].numel() for z, _, _ in entries)
        self.activations = tuple(phi for _, _, phi in entries)

    def _entries(self, u: Tensor) -> tuple[list[tuple[Tensor, Tensor, Activation]], State]:
        if isinstance(self.network, DEQ):
            y = self.network(u)
            with Recorder() as recorder:
                self.network.cell(y, u)
        else:
            with Recorder() as recorder:
                y = self.network(u)
        for z, _, phi in recorder.entries:
            if z.dim() == 0 or z.shape[0] != len(u):
                raise InputError(
                    f"{phi.name} is applied to {tuple(z.shape)}, which does not start with the batch of {len(u)}"
                )
        return recorder.entries[::-1], y

    def run(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entries, y = self._entries(u)
        if tuple(z[0].numel() for z, _, _ in entries) != self.blocks:
            raise InputError("the network takes another path for another batch; its states cannot be stacked")
        Z = torch.cat([z.reshape(len(u), -1) for z, _, _ in entries], dim=1)
        X = torch.cat([x.reshape(len(u), -1) for _, x, _ in entries], dim=1)
        return Z, X, first_tensor(y)


def _source(network: nn.Module | ImplicitForm, u: Tensor) -> _FormSource | _WatchedSource:
    """Chooses how states are obtained."""
    if isinstance(network, ImplicitForm):
        return _FormSource(network, network)
    if isinstance(network, ImplicitModel) and u.dim() == 2:
        return _FormSource(network.form(), network)
    if isinstance(network, DEQ):
        return _WatchedSource(network, u)
    try:
        form = to_implicit(network, tuple(u.shape[1:]))
    except UnsupportedError:
        return _WatchedSource(network, u)
    if sum(form.partition) == 0:
        raise InputError(f"{type(network).__name__} has no activation, so there are no states to match")
    return _FormSource(form, network)


def first_tensor(output: Any) -> Tensor:
    """Returns a tensor, or the first one of a tuple.

    Example:
        >>> first_tensor((torch.ones(1), None))
        tensor([1.])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise InputError(f"a network must return a tensor, or a tuple that starts with one; got {_shape(output)}")


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def _evaluating(network: nn.Module | ImplicitForm) -> Iterator[None]:
    """Puts a network in evaluation mode for a while."""
    modes = {part: part.training for part in network.modules()} if isinstance(network, nn.Module) else {}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
