"""Everything that decides how a training run goes on."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from wellposed.errors import FileFormatError
from wellposed.training.arguments import require_whole
from wellposed.training.batches import Batches
from wellposed.training.best import Best
from wellposed.training.checkpoint import Checkpoint
from wellposed.training.history import History
from wellposed.training.run import Run
from wellposed.training.team import bare


@dataclass(frozen=True)
class Snapshot:
    """The parts of a run whose state is saved: parameters, optimiser, schedule, data order, random numbers."""

    run: Run
    batches: Batches
    schedule: LRScheduler | None
    best: Best
    history: History

    def resume(self, checkpoint: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
        """Goes on from the file of the first process, if there is one, and returns where further states go."""
        if checkpoint is None:
            return None
        require_whole(bare(self.run.model), checkpoint=True)
        file = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        team = self.run.team
        state = team.share(file.load() if team.rank == 0 else None)
        if state is not None:
            self.restore(state)
        return file

    def take(self) -> dict[str, Any]:
        """Returns the state after an epoch."""
        return {
            "model": bare(self.run.model).state_dict(),
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
        """Goes back to a state; the run then ends with the numbers of one that was never stopped."""
        try:
            bare(self.run.model).load_state_dict(state["model"])
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
        _set_random(state["random"], state["random_cuda"])


def _set_random(cpu: Tensor, cuda: list[Tensor]) -> None:
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)
