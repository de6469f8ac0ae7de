"""The states of a network over a data set: what state matching fits a model to.

A `Recorder` notes the activations of a network that has no implicit form, while it runs. `Tables` hold matrices of
many samples, in memory or, above a limit, in a mapped file. `States` are what `record_states` records of a
network. `save_states` writes states to a folder, from which `open_states` maps them without reading them.
"""

import hashlib
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from wellposed.activations import Activation, get_activation, hardtanh, leaky_relu
from wellposed.activations.blockwise import softmax
from wellposed.activations.catalogue import of_function, spellings
from wellposed.atomic import atomic_write_folder, read_folder
from wellposed.convert import UnsupportedError, to_implicit
from wellposed.equilibrium import fixed_point
from wellposed.equilibrium.maps import State
from wellposed.errors import FileFormatError, IllPosedError, InputError, not_a_tensor
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import pack_form, registered_name, unpack_form
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.files import file_digest, write_tensors

Named = Callable[..., Activation]


def _clamp(z: Tensor, min: Any = None, max: Any = None) -> Activation:
    if isinstance(min, int | float) and isinstance(max, int | float):
        return hardtanh(float(min), float(max))
    if min == 0 and max is None:
        return get_activation("relu")
    raise InputError(
        f"clamp(min={min}, max={max}) is not an activation that can be recorded; use relu or hardtanh"
    )


def _softmax(z: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Activation:
    if dim not in (-1, z.dim() - 1):
        raise InputError(f"softmax along dimension {dim} of {tuple(z.shape)} is not recorded; use the last one")
    return softmax(z.shape[-1])


def _prelu(z: Tensor, weight: Tensor) -> Activation:
    slopes = weight.detach().flatten()
    if bool((slopes != slopes[0]).any()):
        raise InputError("PReLU with several slopes has no activation map by name; give it one slope")
    return leaky_relu(float(slopes[0]))


_NAMED: dict[str, Named] = {
    "prelu": _prelu,
    "softmax": _softmax,
    "clamp": _clamp,
    "clamp_min": lambda z, min: _clamp(z, min),
}
_RULES = {function: rule for name, rule in _NAMED.items() for function in spellings(name)}


def _rule(function: Any) -> Named | None:
    """Returns what builds the activation of a call from its arguments; None if the function is no activation."""
    if function in _RULES:
        return _RULES[function]
    family = of_function(function)
    return None if family is None else lambda z, *args, **options: family.of_call(*args, **options)


class Recorder(TorchFunctionMode):
    """Notes argument, result and map of every activation that is called, by whatever name.

    Arguments are copied before the call, since an activation in place would overwrite them; a module that is used
    twice gives two entries. Functions that are not activations are taken to be linear.

    Example:
        >>> with Recorder() as recorder:
        ...     _ = torch.relu(torch.tensor([[-1.0, 2.0]]))
        >>> [(z.tolist(), x.tolist(), phi.name) for z, x, phi in recorder.entries]
        [([[-1.0, 2.0]], [[0.0, 2.0]], 'relu')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Tensor, Tensor, Activation]] = []
        self.rules: dict[Any, Named | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.rules:
            self.rules[func] = _rule(func)
        rule = self.rules[func]
        if rule is None:
            return func(*args, **kwargs)
        z = (args[0] if args else kwargs["input"]).detach().clone()
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        try:
            activation = rule(z, *args[1:], **rest)
        except TypeError as error:
            name = resolve_name(func) or str(func)
            raise InputError(f"{name} is called with arguments that cannot be recorded: {error}") from error
        result = func(*args, **kwargs)
        self.entries.append((z, result.detach().clone(), activation))
        return result


GIBIBYTE = 1 << 30


class Tables:
    """Some matrices of the same samples, filled batch by batch.

    Args:
        limit: bytes that may lie in memory, all matrices together; beyond it everything goes to files.
        folder: where files go; None is a temporary folder that lives as long as the matrices.

    Example:
        >>> tables = Tables(limit=1 << 20)
        >>> tables.append(U=torch.ones(2, 3)); tables.append(U=torch.zeros(1, 3))
        >>> tables.finished()["U"].shape
        torch.Size([3, 3])
    """

    def __init__(self, limit: int, folder: str | Path | None = None) -> None:
        self.limit, self.bytes = limit, 0
        self.folder = None if folder is None else Path(folder)
        self.own = False
        self.spilled = False
        self.pieces: dict[str, list[Tensor]] = {}
        self.widths: dict[str, tuple[int, torch.dtype]] = {}
        self.samples = 0

    def append(self, **columns: Tensor) -> None:  # (B, width) each
        """Adds a batch to every matrix."""
        for name, part in columns.items():
            kind = (part.shape[1], part.dtype)
            if self.widths.setdefault(name, kind) != kind:
                raise InputError(
                    f"{name} had {self.widths[name]} columns and type in the first batch and {kind} now; "
                    "a network whose states depend on the batch cannot be recorded"
                )
            self.pieces.setdefault(name, []).append(part.detach().cpu())
            self.bytes += part.numel() * part.element_size()
        self.samples += len(next(iter(columns.values())))
        if self.spilled or self.bytes > self.limit:
            self._spill()

    def _spill(self) -> None:
        """Moves what is in memory to the files."""
        if self.folder is None:
            self.folder, self.own = Path(tempfile.mkdtemp(prefix="wellposed-states-")), True
        mode = "ab" if self.spilled else "wb"
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, pieces in self.pieces.items():
            with open(self.folder / f"{name}.bin", mode) as file:
                for piece in pieces:
                    file.write(piece.contiguous().numpy().data)
            pieces.clear()
        self.spilled = True

    def finished(self) -> dict[str, Tensor]:
        """Returns the matrices; those in files are mapped, not read."""
        if not self.spilled:
            return {name: torch.cat(pieces) for name, pieces in self.pieces.items()}
        assert self.folder is not None
        return {name: self._mapped(self.folder / f"{name}.bin", *kind) for name, kind in self.widths.items()}

    def _mapped(self, path: Path, width: int, dtype: torch.dtype) -> Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        return _tensor(np.memmap(path, kind, "r+", shape=(self.samples, width)), path if self.own else None)


def scratch(samples: int, width: int, limit: int) -> Tensor:  # (samples, width)
    """Makes room for numbers in double precision, in a temporary file if they take more than `limit` bytes.

    Example:
        >>> scratch(2, 3, limit=8).shape
        torch.Size([2, 3])
    """
    if 8 * samples * width <= limit:
        return torch.empty(samples, width, dtype=torch.float64)
    path = Path(tempfile.mkdtemp(prefix="wellposed-scratch-")) / "scratch.bin"
    return _tensor(np.memmap(path, np.float64, "w+", shape=(samples, width)), path)


def _tensor(array: np.memmap, owned: Path | None) -> Tensor:
    """Wraps a mapped array, which stays alive with the tensor; an owned file goes with it."""
    if owned is not None:
        weakref.finalize(array, _remove, owned)
    return torch.from_numpy(array)


def _remove(path: Path) -> None:
    """Removes a file, and its folder with the last one."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


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
    loader: Iterable[Any] | Tensor,
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
        loader: yields u or (u, target, ...), batch first; a tensor is one batch.
        limit: bytes above which the states go to mapped files.
        folder: where such files go; None is a temporary folder that lives as long as the states.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> states = record_states(network, torch.randn(6, 4).split(3))
        >>> states.blocks, [phi.name for phi in states.activations], tuple(states.X.shape)
        ((5, 8), ['tanh', 'relu'], (6, 13))
    """
    tables, source = Tables(limit, None if folder is None else os.fspath(folder)), None
    loader = [loader] if isinstance(loader, Tensor) else loader
    if hasattr(loader, "__array__"):
        raise not_a_tensor("loader", loader)
    with _evaluating(network), torch.no_grad():
        for batch in loader:
            u = batch if isinstance(batch, Tensor) else batch[0]
            if not isinstance(u, Tensor):
                raise not_a_tensor("u", u)
            if u.dim() < 2:
                raise InputError(f"a batch has the shape (batch, ...); received {tuple(u.shape)}")
            if not len(u):
                continue
            source = source or _source(network, u)
            Z, X, Y = source.run(u)
            tables.append(U=u.reshape(len(u), -1), Z=Z, X=X, Y=Y.reshape(len(u), -1))
    if source is None or tables.samples == 0:
        raise InputError("the loader yields nothing, so there are no states; give it at least one batch")
    states = tables.finished()
    input_shape = tuple(source.input_shape)
    return States(**states, blocks=source.blocks, activations=source.activations, form=source.form,
                  input_shape=input_shape)  # fmt: skip


AGREEMENT = 1e-2  # relative to the outputs, within which a network has the equilibrium that was recorded


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
        try:
            x = own.equilibrium(u).value  # checks u
        except IllPosedError:
            x = None
        y, v = first_tensor(network(u)), form.B @ flat
        v = v if form.bias is None else v + form.bias
        x = self._from_zero(v, flat, y) if x is None else x
        assert isinstance(x, Tensor)
        return (form.A @ x) + v, x, y

    def _from_zero(self, v: Tensor, u: Tensor, y: Tensor) -> Tensor:
        """Solves a form that has no certificate from zero, which is the network's equilibrium if outputs agree."""
        form = self.form
        assert form is not None
        phi = form.activation.function
        x = fixed_point(lambda x, v: phi((form.A @ x) + v), torch.zeros_like(v), v).value
        assert isinstance(x, Tensor)
        own = (form.C @ x) + (form.D @ u) + (0.0 if form.output_bias is None else form.output_bias)
        apart = float((own - y.flatten(1)).abs().max() / y.abs().max().clamp(min=1e-3))
        if not apart <= AGREEMENT:
            raise InputError(
                "no certificate proves that the loop has one equilibrium, and the network finds another one than "
                f"steps from zero (outputs differ by {apart:.2g}); start its solver there or make it well-posed"
            )
        return x


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
    kind = type(output).__name__
    raise InputError(f"a network must return a tensor, or a tuple that starts with one; received {kind}")


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


FORMAT, INDEX, FORM = "wellposed-states-1", "states.json", "form.safetensors"
PIECE = 4096  # samples that are written at a time
_MATRICES = ("U", "Z", "X", "Y")


def save_states(states: States, folder: str | os.PathLike[str]) -> None:
    """Writes states to a folder, in pieces: one NumPy file for each of U, Z, X and Y, the form and an index.

    The folder holds the old states until the new ones are complete, with an index of checksums: a process that is
    killed leaves one or the other.

    Example:
        >>> import tempfile
        >>> one, folder = torch.ones(3, 1), tempfile.mkdtemp()
        >>> save_states(States(one, one, one, one, (1,), (get_activation("relu"),)), folder)
        >>> open_states(folder).X.shape
        torch.Size([3, 1])
    """
    index: dict[str, Any] = {
        "format": FORMAT,
        "blocks": list(states.blocks),
        "activations": [registered_name(phi) for phi in states.activations],
        "input_shape": None if states.input_shape is None else list(states.input_shape),
        "form": states.form is not None,
    }
    with atomic_write_folder(folder) as temporary:
        for name in _MATRICES:
            _write(temporary / f"{name}.npy", getattr(states, name))
        if states.form is not None:
            tensors, metadata = pack_form(states.form)
            stored = {name: part.contiguous().cpu() for name, part in tensors.items()}
            write_tensors(temporary / FORM, stored, metadata)
        index["files"] = {name: file_digest(temporary / name) for name in _files(index["form"])}
        index["sha256"] = _sealed(index)
        (temporary / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def open_states(folder: str | os.PathLike[str], *, verify: bool = True) -> States:
    """Memory-maps the states of a folder, read-only, so that only the pages in use take memory.

    Args:
        folder: that of `save_states`.
        verify: whether to compare the files with their checksums, which reads them once.

    Raises:
        FileFormatError: the folder is not one of `save_states`, or it is damaged.
    """
    path = Path(folder)
    names = (INDEX, *_files(True))
    return read_folder(path, names, lambda paths: _opened(path, paths, verify))


def _opened(folder: Path, paths: dict[str, Path], verify: bool) -> States:
    try:
        index = json.loads(paths[INDEX].read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise FileFormatError(f"its format is {index['format']!r}, expected {FORMAT!r}")
        if "sha256" in index:  # older folders have no checksums
            _check(paths, index, verify)
        return States(
            **{name: _mapped(paths[f"{name}.npy"]) for name in _MATRICES},
            blocks=tuple(index["blocks"]),
            activations=tuple(get_activation(name) for name in index["activations"]),
            form=_form(paths[FORM]) if index["form"] else None,
            input_shape=None if index["input_shape"] is None else tuple(index["input_shape"]),
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise FileFormatError(f"{str(folder)!r} has no states that can be opened: {error}") from error


def _files(form: bool) -> list[str]:
    return [f"{name}.npy" for name in _MATRICES] + [FORM] * form


def _sealed(index: dict[str, Any]) -> str:
    """Returns the checksum of an index without its own entry."""
    entries = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _check(paths: dict[str, Path], index: dict[str, Any], verify: bool) -> None:
    damaged = [INDEX] if index["sha256"] != _sealed(index) else []
    if verify and not damaged:
        damaged = [name for name in _files(index["form"]) if file_digest(paths[name]) != index["files"][name]]
    if damaged:
        raise FileFormatError(f"{damaged[0]} is damaged: its checksum does not match; record the states again")


def _write(path: Path, part: Tensor) -> None:
    kind = torch.empty(0, dtype=part.dtype).numpy().dtype
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tuple(part.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in part.split(PIECE):
            file.write(np.ascontiguousarray(piece.detach().cpu().numpy()).data)


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to
        return torch.from_numpy(np.load(path, mmap_mode="r", allow_pickle=False))


def _form(path: Path) -> ImplicitForm:
    with safe_open(path, framework="pt") as file:
        return unpack_form(file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
