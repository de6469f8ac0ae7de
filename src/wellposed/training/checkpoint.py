"""Checkpoints: everything needed to resume a training run, in one file.

A `Checkpoint` is a nested state in one safetensors file, written atomically and checked when read. A `Snapshot`
takes and restores the state of a run.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from wellposed.atomic import atomic_write
from wellposed.errors import FileFormatError, InputError
from wellposed.models.io.files import checksum, write_tensors
from wellposed.training.batches import Batches
from wellposed.training.history import History
from wellposed.training.run import EarlyStopping, Run, reject_sharded
from wellposed.training.team import unwrap

FORMAT = "wellposed-checkpoint-1"
TRIES = 100  # to read a file that another run replaces


class Checkpoint:
    """A file from which `fit` resumes, rewritten after every epoch.

    If the file exists, training goes on from there to the very numbers of a run that was never stopped. For that,
    an iterable of batches must repeat its own order; and several processes with warm starts all go on with those
    of the first one, so that their numbers agree within the tolerance of the solves.

    A new state replaces the old one only when it is completely on the disk, so that whatever happens one of
    the two is there. Reading verifies a checksum and that the file belongs to the same run. Nothing is pickled.

    Args:
        path: the file.
        key: names the run; a file with another key is refused.

    Example:
        >>> import tempfile
        >>> import torch
        >>> file = Checkpoint(tempfile.mkdtemp() + "/run.ckpt", key="run 7")
        >>> file.load() is None
        True
        >>> file.save({"epoch": 3, "weights": (torch.ones(2), None)})
        >>> file.load()
        {'epoch': 3, 'weights': (tensor([1., 1.]), None)}
    """

    def __init__(self, path: str | os.PathLike[str], key: str = "") -> None:
        self.path, self.key = Path(path), key

    def save(self, state: Any) -> None:
        """Replaces what the file holds; a full disk or a lost process leaves the old state."""
        tensors: dict[str, Tensor] = {}
        skeleton = json.dumps(_split_tensors(state, tensors))
        metadata = {"format": FORMAT, "key": self.key, "skeleton": skeleton, "sha256": checksum(skeleton, tensors)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as temporary:
            write_tensors(temporary, tensors, metadata)

    def load(self) -> Any:
        """Returns the state that was saved last; None if there is no file."""
        try:
            metadata, tensors = self._read()
        except FileNotFoundError:  # asked here and not before: another run may remove the file at any moment
            return None
        if metadata.get("format") != FORMAT:
            raise self._refuse(f"its format is {metadata.get('format')!r}, expected {FORMAT!r}")
        if metadata.get("key") != self.key:
            raise self._refuse(f"it belongs to another run ({metadata.get('key')!r}, expected {self.key!r})")
        if metadata.get("sha256") != checksum(metadata.get("skeleton", ""), tensors):
            raise self._refuse("its checksum does not match: the file is damaged")
        try:
            return _join_tensors(json.loads(metadata["skeleton"]), tensors)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self._refuse(f"its content makes no sense ({error})") from error

    def remove(self) -> None:
        """Deletes the file, if there is one."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Reads the file; retries if another run replaces it meanwhile, as it is opened by name twice."""
        for _ in range(TRIES):
            before, content, damage = self._version(), None, None
            try:
                with safe_open(self.path, framework="pt") as file:
                    content = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, RuntimeError) as error:  # the latter of a file that has become shorter
                damage = error
            if self._version() != before:
                continue
            if content is not None:
                return content
            raise self._refuse(f"it is not a checkpoint or is damaged ({damage})") from damage
        raise self._refuse("other runs replace it all the time")

    def _version(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_ino, status.st_mtime_ns

    def _refuse(self, reason: str) -> FileFormatError:
        return FileFormatError(
            f"the checkpoint {str(self.path)!r} cannot be used: {reason}. Delete it to begin this run anew"
        )


def _split_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Splits a nested state into JSON and tensors."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_split_tensors(part, tensors) for part in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_split_tensors(part, tensors) for part in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise InputError(
        f"a checkpoint holds tensors, numbers, texts, lists and dicts; received {type(value).__name__}"
    )


def _join_tensors(node: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {_join_tensors(key, tensors): _join_tensors(item, tensors) for key, item in content}
    items = [_join_tensors(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint saves of a run: parameters, optimiser, schedule, data order, random numbers."""

    run: Run
    batches: Batches
    schedule: LRScheduler | None
    best: EarlyStopping
    history: History

    def resume(self, checkpoint: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
        """Resumes from the file of the first process, if there is one; returns the checkpoint to write to."""
        if checkpoint is None:
            return None
        reject_sharded(unwrap(self.run.model), checkpoint=True)
        file = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        team = self.run.team
        state = team.share(file.load() if team.rank == 0 else None)
        if state is not None:
            self.restore(state)
        return file

    def take(self) -> dict[str, Any]:
        """Returns the state after an epoch."""
        return {
            "model": unwrap(self.run.model).state_dict(),
            "optimizer": self.run.optimizer.state_dict(),
            "scaler": self.run.scaler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "order": [generator.get_state() for generator in self.batches.generators],
            "best": self.best.state_dict(),
            "history": self.history.state_dict(),
            "starts": None if self.run.starts is None else self.run.starts.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state; the run then ends with the numbers of one that was never stopped."""
        try:
            unwrap(self.run.model).load_state_dict(state["model"])
            self.run.optimizer.load_state_dict(state["optimizer"])
            self.run.scaler.load_state_dict(state["scaler"])
            if self.schedule is not None:
                self.schedule.load_state_dict(state["schedule"])
            for generator, value in zip(self.batches.generators, state["order"], strict=True):
                generator.set_state(value)
            if self.run.starts is not None:
                self.run.starts.load_state_dict(state.get("starts") or {})
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise FileFormatError(
                f"the checkpoint does not fit this run: {error}. Delete it, or call fit as it was called before"
            ) from error
        self.best.load_state_dict(state["best"])
        self.history.load_state_dict(state["history"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])
