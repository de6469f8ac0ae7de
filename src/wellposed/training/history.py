"""The history of a training run, and the exception that ends one early."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.equilibrium.method import SolveLog
from wellposed.equilibrium.solution import failed

_COLUMNS = ("train_loss", "validation_loss", "steps", "failed_share", "seconds")


@dataclass
class History:
    """Numbers of every epoch: tensors ``(E,)``, or ``(E, M)`` for an Ensemble, whose stopped members are NaN.

    Attributes:
        train_loss: mean over the samples, while the parameters were changing.
        validation_loss: after the epoch; NaN without validation data.
        steps: mean steps to equilibrium of a sample in training; NaN where nothing was solved.
        failed_share: share of training samples without an equilibrium, forward or backward.
        seconds: duration of the epoch, validation included, ``(E,)``.
        best_epoch: epoch, counted from 0, of the returned parameters; None without `patience`.

    Example:
        >>> history = History()
        >>> history.append(train_loss=torch.tensor(0.5), seconds=torch.tensor(1.0))
        >>> len(history), float(history.train_loss[-1])
        (1, 0.5)
    """

    train_loss: Tensor = field(default_factory=lambda: torch.empty(0))
    validation_loss: Tensor = field(default_factory=lambda: torch.empty(0))
    steps: Tensor = field(default_factory=lambda: torch.empty(0))
    failed_share: Tensor = field(default_factory=lambda: torch.empty(0))
    seconds: Tensor = field(default_factory=lambda: torch.empty(0))
    best_epoch: Tensor | None = None

    def __len__(self) -> int:
        return len(self.train_loss)

    def append(self, **columns: Tensor) -> None:
        """Adds an epoch; a column that is left out becomes NaN."""
        nothing = torch.full_like(columns["train_loss"], torch.nan, dtype=torch.float64)
        for name in _COLUMNS:
            new = columns.get(name, nothing).to("cpu", torch.float64)[None]
            setattr(self, name, torch.cat([getattr(self, name), new]) if len(getattr(self, name)) else new)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the columns."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the columns from a checkpoint."""
        for name in _COLUMNS:
            setattr(self, name, state[name])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `fit`; `history` has the epochs that were finished, the model its parameters."""

    def __init__(self, history: History) -> None:
        super().__init__(f"interrupted after {len(history)} epochs")
        self.history = history


def solve_counts(log: SolveLog, shape: torch.Size) -> Tensor:  # (4,) or (4, M)
    """Sums steps, samples, failures and solves, for each member of an Ensemble separately."""
    return torch.stack(
        [
            *_sum([steps for _, steps in log.forward], shape),
            *_sum([failed(status) for status, _ in log.forward + log.adjoint], shape),
        ]
    )


def _by_member(part: Tensor, shape: torch.Size) -> Tensor:
    """Splits the samples of a solve; one that the members share counts for each of them."""
    shared = part.numel() % shape.numel() != 0
    return part.flatten().expand(*shape, -1) if shared else part.reshape(*shape, -1)


def _sum(solves: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    rows = [_by_member(solve, shape).to("cpu", torch.float64) for solve in solves]
    table = torch.cat(rows, dim=-1) if rows else torch.zeros(*shape, 0, dtype=torch.float64)
    return table.sum(-1), torch.full(shape, float(table.shape[-1]), dtype=torch.float64)
