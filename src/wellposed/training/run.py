"""One pass over the data, and one step of it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from wellposed.errors import InputError, NonFiniteLossError
from wellposed.models.ensemble import Ensemble
from wellposed.models.warm_start import WarmStart
from wellposed.training.batches import Batch, Batches
from wellposed.training.team import Team, bare

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """A model and how to take one step with it."""

    model: nn.Module
    loss: Loss
    optimizer: Optimizer
    team: Team
    scaler: torch.amp.GradScaler
    clip: float | None
    project: bool
    autocast: torch.dtype | None
    starts: WarmStart | None = None

    def train(self, batches: Batches, epoch: int, active: Tensor) -> Tensor:  # () or (M,)
        """Takes a step for every batch and returns the mean loss."""
        self.model.train()
        total, count = torch.zeros(active.shape, dtype=torch.float64), 0
        for index, whole in enumerate(batches):
            batch = whole.shard(self.team.rank, self.team.size)
            with self._started(batch):
                losses, known = self._losses(batch)
            if not known[active].isfinite().all():
                raise NonFiniteLossError(
                    f"the loss is {known.tolist()} in epoch {epoch}, batch {index} (counted from 0); the "
                    "model keeps its latest parameters. Lower the learning rate, set clip, or check the data"
                )
            self._step(losses.masked_fill(~active.to(losses.device), 0.0).sum() * batch.weight * self.team.size)
            total, count = total + known * batch.size, count + batch.size
        return total / _nonzero(count)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:  # () or (M,)
        """Returns the mean loss."""
        self.model.eval()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for whole in batches:
            known = self._losses(whole.shard(self.team.rank, self.team.size))[1]
            total, count = total + known * whole.size, count + whole.size
        return total / _nonzero(count)

    def _started(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Lets the samples of a batch begin where they ended, if that is wanted."""
        if self.starts is None or batch.rows is None:
            return contextlib.nullcontext()
        return self.starts.of(batch.rows)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Computes the losses of this process and those of the joined batch."""
        u, y = batch.u.to(self.team.device), batch.y.to(self.team.device)
        with torch.autocast(self.team.device.type, self.autocast, enabled=self.autocast is not None):
            if isinstance(bare(self.model), Ensemble):
                judge = vmap(self.loss, (0, None if batch.shared else 0), randomness="different")
                losses = judge(self.model(u, shared=batch.shared), y)
            else:
                losses = self.loss(self.model(u), y)
        if losses.shape != shape_of(self.model):
            raise InputError(f"loss must return one number, the mean; received the shape {tuple(losses.shape)}")
        return losses, self.team.sum(losses.detach().to("cpu", torch.float64) * batch.weight)

    def _step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_gradients(bare(self.model), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.project:
            bare(self.model).project_()  # type: ignore[operator]


def shape_of(model: nn.Module) -> torch.Size:
    """Returns the shape of the losses: ``(M,)`` for an Ensemble, ``()`` otherwise."""
    inner = bare(model)
    return torch.Size((len(inner),)) if isinstance(inner, Ensemble) else torch.Size()


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> None:
    """Scales gradients down to the norm `limit`, those of every member of an Ensemble apart."""
    if not isinstance(model, Ensemble):
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        return
    rows = [p.grad.view(len(model), -1) for p in model.parameters() if p.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for row in rows:
        row.mul_(factors[:, None])


def _nonzero(count: int) -> int:
    if count == 0:
        raise InputError("data gave no batch; pass something that can be iterated once an epoch, not an iterator")
    return count
