"""A run: a frozen configuration that can be executed."""

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from wellposed.training.checkpoint import Checkpoint
from wellposed_lab.config import describe, digest, identity
from wellposed_lab.engine.store import Result

Role = Literal["ours", "baseline", "control"]


@dataclass(frozen=True)
class Context:
    """Where a run is executed; none of it changes a result.

    Args:
        folder: for checkpoints; None: none are written.
        device: of the tensors.
        progress: whether to show a bar.
    """

    folder: Path | None = None
    device: str = "cpu"
    progress: bool = False

    def checkpoint(self, runs: "Sequence[Run]") -> Checkpoint | None:
        """Returns the checkpoint of runs that are executed together."""
        if self.folder is None:
            return None
        key = identity(tuple(run.id for run in runs))
        return Checkpoint(self.folder / f"{runs[0].suite}-{key}.ckpt", key)


@dataclass(frozen=True, kw_only=True)
class Run(abc.ABC):
    """One model on one task with one seed; concrete runs are frozen dataclasses that add their settings.

    Args:
        suite: to which it belongs.
        seed: of data, initial weights and data order.
        scale: "tiny", "default" or "paper".
        role: of the model in the comparison.
        kind: "run", or "search" for a fold of a search.
    """

    suite: str
    seed: int
    scale: str
    role: Role = "ours"
    kind: Literal["run", "search"] = "run"
    not_identity: ClassVar[tuple[str, ...]] = ("role",)
    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # kinds that the run can use
    resumable: ClassVar[bool] = False  # whether a stopped run goes on from its last epoch, by `Context.checkpoint`

    @property
    @abc.abstractmethod
    def labels(self) -> tuple[str, str, str | None]:
        """Task, model and size, as tables name them."""

    def device_for(self, wanted: str) -> str:
        """Returns the device on which the run is executed: the wanted one, or the CPU if it cannot use that."""
        return wanted if device_kind(wanted) in self.devices else "cpu"

    @property
    def batch_seeds(self) -> bool:
        """Whether runs of one family are executed as one."""
        return False

    @abc.abstractmethod
    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        """Executes `runs`, which are of the same family as this one."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as data."""
        return describe(self)

    @property
    def id(self) -> str:
        """A hash of everything that decides the numbers."""
        plain = dataclasses.replace(self, **{name: _default(self, name) for name in self.not_identity})
        return digest(plain.config)

    @property
    def family(self) -> str:
        """The same for runs that can be executed as one: those that differ in their seed only."""
        return dataclasses.replace(self, seed=0).id

    def with_seed(self, seed: int) -> Self:
        """Returns the same run with another seed."""
        return dataclasses.replace(self, seed=seed)


def device_kind(device: str) -> str:
    """Returns the kind of a device.

    Example:
        >>> device_kind("cuda:1")
        'cuda'
    """
    return device.partition(":")[0]


def _default(run: Run, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(run) if f.name == name)


@dataclass(frozen=True)
class Group:
    """Runs that are executed together."""

    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """What a progress bar says."""
        task, model, size = self.runs[0].labels
        seeds = len(self.runs)
        sized = f" ({size})" if size else ""
        others = len({run.labels for run in self.runs}) - 1
        if others:
            return f"{task}: {model}{sized} and {others} other{'s' if others > 1 else ''}, {seeds} runs"
        return f"{task}: {model}{sized}, {seeds} seed{'s' if seeds > 1 else ''}"


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Groups runs that can be executed together, in the order of their first."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(run.family if run.batch_seeds else run.id, []).append(run)
    return [Group(tuple(members)) for members in families.values()]
