"""Early stopping, each member of an Ensemble by itself."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Best:
    """Keeps the best parameters and says who is still waiting for better ones.

    A member that stopped keeps what it had then, as if it had been trained alone.

    Args:
        model: whose parameters and buffers are kept.
        patience: epochs without improvement after which a member stops; None: nobody stops, nothing is kept.
        active: members at work, ``()`` or ``(M,)``.
    """

    model: nn.Module
    patience: int | None
    active: Tensor
    loss: Tensor = field(init=False)
    epoch: Tensor = field(init=False)
    kept: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = torch.full(self.active.shape, torch.inf, dtype=torch.float64)
        self.epoch = torch.zeros(self.active.shape, dtype=torch.int64)

    def update(self, epoch: int, loss: Tensor) -> None:
        """Takes note of the validation losses after an epoch."""
        if self.patience is None:
            return
        better = self.active & (loss < self.loss)
        self.loss = torch.where(better, loss, self.loss)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.active = self.active & (epoch - self.epoch < self.patience)
        for name, value in self._tensors().items():
            old = self.kept.get(name, value)
            mask = better.reshape(better.shape + (1,) * (value.dim() - better.dim())).to(value.device)
            self.kept[name] = torch.where(mask, value, old).clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Gives every member its best parameters."""
        for name, value in self._tensors().items():
            value.copy_(self.kept.get(name, value))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        return {"active": self.active, "loss": self.loss, "epoch": self.epoch, "kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint holds."""
        self.active, self.loss, self.epoch = state["active"], state["loss"], state["epoch"]
        device = {name: value.device for name, value in self._tensors().items()}
        self.kept = {name: value.to(device[name]) for name, value in state["kept"].items()}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
