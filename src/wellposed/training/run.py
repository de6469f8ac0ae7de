"""One epoch and one optimisation step, and what they need.

`Run` takes the steps. `make_optimizer`, `make_schedule`, `make_starts` and `check_arguments` turn the arguments
of fit() into what the loop needs, or say what is wrong with them. `EarlyStopping` decides for each
member of an Ensemble by itself.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from wellposed.errors import InputError, NonFiniteLossError, unknown_name
from wellposed.models.ensemble import Ensemble
from wellposed.models.warm_start import WarmStart
from wellposed.training.batches import Batch, Batches
from wellposed.training.team import Team, is_sharded, unwrap

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
                losses, values = self._losses(batch)
            if not values[active].isfinite().all():
                raise NonFiniteLossError(
                    f"the loss is {values.tolist()} in epoch {epoch}, batch {index} (counted from 0); the "
                    "model keeps its latest parameters. Lower the learning rate, set clip, or check the data"
                )
            self._step(losses.masked_fill(~active.to(losses.device), 0.0).sum() * batch.weight * self.team.size)
            total, count = total + values * batch.size, count + batch.size
        return total / _nonzero(count)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:  # () or (M,)
        """Returns the mean loss."""
        self.model.eval()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for whole in batches:
            values = self._losses(whole.shard(self.team.rank, self.team.size))[1]
            total, count = total + values * whole.size, count + whole.size
        return total / _nonzero(count)

    def _started(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Starts the solves of a batch at the samples' last equilibria, if that is wanted."""
        if self.starts is None or batch.rows is None:
            return contextlib.nullcontext()
        return self.starts.of(batch.rows)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Computes the losses of this process and those of the joined batch."""
        u, y = batch.u.to(self.team.device), batch.y.to(self.team.device)
        with torch.autocast(self.team.device.type, self.autocast, enabled=self.autocast is not None):
            if isinstance(unwrap(self.model), Ensemble):
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
            clip_gradients(unwrap(self.model), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.project:
            unwrap(self.model).project_()  # type: ignore[operator]


def shape_of(model: nn.Module) -> torch.Size:
    """Returns the shape of the losses: ``(M,)`` for an Ensemble, ``()`` otherwise."""
    inner = unwrap(model)
    return torch.Size((len(inner),)) if isinstance(inner, Ensemble) else torch.Size()


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> None:
    """Scales gradients down to the norm `limit`, for each member of an Ensemble separately."""
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


INTEGERS = ("epochs", "batch_size", "patience")


def make_optimizer(model: nn.Module, wanted: Optimizer | Callable[[Any], Optimizer] | None) -> Optimizer:
    """Returns the optimiser itself, or makes one for the parameters."""
    if isinstance(wanted, Optimizer):
        return wanted
    return torch.optim.Adam(model.parameters(), lr=1e-2) if wanted is None else wanted(model.parameters())


def make_schedule(optimizer: Optimizer, wanted: Any, epochs: int) -> LRScheduler | None:
    """Returns the schedule of the learning rate, if one is wanted."""
    if wanted is None:
        return None
    if callable(wanted):
        return wanted(optimizer)
    if wanted != "cosine":
        raise unknown_name("schedule", wanted, ["cosine"])
    return CosineAnnealingLR(optimizer, epochs)


def make_starts(model: nn.Module, wanted: bool | WarmStart, samples: int) -> WarmStart | None:
    """Returns the store of the starting points of all training samples, if that is wanted.

    Args:
        samples: of the data; 0 if they have no fixed places.
    """
    if wanted is False:
        return None
    if samples == 0:
        raise InputError("warm_start needs samples that can be told apart: a pair of tensors or a Dataset")
    starts = WarmStart() if wanted is True else wanted
    if not isinstance(starts, WarmStart):
        raise InputError(f"warm_start must be True, False or a WarmStart; received {wanted!r}")
    starts.prepare(model, samples)
    return starts


def seeds_of(model: nn.Module, seed: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns one seed of the data order for every member.

    Example:
        >>> seeds_of(Ensemble([nn.Linear(1, 1), nn.Linear(1, 1)]), None)
        (0, 1)
        >>> seeds_of(nn.Linear(1, 1), 7)
        (7,)
    """
    own = model.seeds if isinstance(model, Ensemble) else (0,)
    if seed is None:
        return own
    if isinstance(seed, float):
        raise InputError(f"seed must be a whole number; received {seed!r}")
    seeds = (int(seed),) * len(own) if isinstance(seed, int) else tuple(seed)
    if any(not -(2**63) <= one < 2**64 for one in seeds):
        raise InputError(f"a seed of torch has 64 bits; received {seed!r}")
    if len(seeds) != len(own):
        raise InputError(f"seed must be one number or one for each of {len(own)} members; received {len(seeds)}")
    return seeds


def reject_sharded(model: nn.Module, **wanted: bool) -> None:
    """Raises if something is asked for that needs all parameters in one process, and they are sharded."""
    names = [name for name, given in wanted.items() if given]
    if names and is_sharded(model):
        raise InputError(
            f"{', '.join(names)} cannot be used with a model that fully_shard has divided; leave it out, or train "
            "without fully_shard"
        )


def check_arguments(
    model: nn.Module, numbers: dict[str, float | None], validated: bool, project: bool, per_member: bool
) -> None:
    """Raises if an argument is out of range or does not fit the model."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InputError(f"{name} must be positive; received {value!r}")
        if (
            name in INTEGERS
            and value is not None
            and (isinstance(value, bool) or not hasattr(value, "__index__") or value >= 2**63)
        ):
            raise InputError(f"{name} must be a whole number below 2^63; received {value!r}")
    if numbers["patience"] is not None and not validated:
        raise InputError("patience watches the validation loss; pass validation=(inputs, targets) with it")
    reject_sharded(model, project=project, patience=numbers["patience"] is not None)
    target = model.stacked if isinstance(model, Ensemble) else model
    if project and not hasattr(target, "project_"):
        raise InputError(f"project=True needs a model with project_(); {type(target).__name__} has none")
    if per_member and not isinstance(model, Ensemble):
        raise InputError(f"per_member=True needs an Ensemble; received {type(model).__name__}")


@dataclass
class EarlyStopping:
    """Stores the best parameters and says which members go on.

    A member that stopped keeps what it had then, as if it had been trained alone.

    Args:
        model: whose best parameters and buffers are stored.
        patience: epochs without improvement after which a member stops; None: nobody stops, nothing is stored.
        active: members at work, ``()`` or ``(M,)``.
    """

    model: nn.Module
    patience: int | None
    active: Tensor
    loss: Tensor = field(init=False)
    epoch: Tensor = field(init=False)
    best_tensors: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = torch.full(self.active.shape, torch.inf, dtype=torch.float64)
        self.epoch = torch.zeros(self.active.shape, dtype=torch.int64)

    def update(self, epoch: int, loss: Tensor) -> None:
        """Records the validation losses of an epoch."""
        if self.patience is None:
            return
        better = self.active & (loss < self.loss)
        self.loss = torch.where(better, loss, self.loss)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.active = self.active & (epoch - self.epoch < self.patience)
        for name, value in self._tensors().items():
            old = self.best_tensors.get(name, value)
            mask = better.reshape(better.shape + (1,) * (value.dim() - better.dim())).to(value.device)
            self.best_tensors[name] = torch.where(mask, value, old).clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Gives every member its best parameters."""
        for name, value in self._tensors().items():
            value.copy_(self.best_tensors.get(name, value))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        return {"active": self.active, "loss": self.loss, "epoch": self.epoch, "kept": self.best_tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.active, self.loss, self.epoch = state["active"], state["loss"], state["epoch"]
        device = {name: value.device for name, value in self._tensors().items()}
        self.best_tensors = {name: value.to(device[name]) for name, value in state["kept"].items()}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
