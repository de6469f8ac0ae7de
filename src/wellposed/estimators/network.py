"""What the estimators train: an implicit model with an offset, read at the end of a sequence if there is one."""

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN

MAX_STEPS = 2000  # what a cap close to one may need; a solve that is done earlier ends earlier


class Network(nn.Module):
    """Computes ``y = body(u) + offset``, of sequences at the last step of time.

    Args:
        body: in standardised units.
        outputs: columns of y.

    Example:
        >>> Network.of_rows(3, 2, 8)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, body: ImplicitModel | ImplicitRNN, outputs: int) -> None:
        super().__init__()
        self.body, self.offset = body, nn.Parameter(torch.zeros(outputs))

    @classmethod
    def of_rows(
        cls, inputs: int, outputs: int, states: int, *, kappa: float = 0.95, activation: str = "relu"
    ) -> "Network":
        """Builds a network for inputs ``(B, p)``."""
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS}
        return cls(ImplicitModel(inputs, outputs, states, bias=True, **options), outputs)

    @classmethod
    def of_sequences(
        cls, inputs: int, outputs: int, states: int, *, kappa: float = 0.95, activation: str = "relu"
    ) -> "Network":
        """Builds a network for inputs ``(B, T, p)``; the hidden state is as wide as the equilibrium."""
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS, "bias": True}
        body = ImplicitRNN(inputs, states, states, out_features=outputs, readout_bias=False, **options)
        return cls(body, outputs)

    @property
    def cell(self) -> ImplicitModel:
        """The implicit model that is solved, at every step of time of a sequence."""
        return self.body if isinstance(self.body, ImplicitModel) else self.body.cell(0)

    def forward(self, u: Tensor) -> Tensor:  # (B, p) or (B, T, p) -> (B, q)
        if isinstance(self.body, ImplicitModel):
            return self.body(u) + self.offset
        output, _ = self.body(u)
        return output[:, -1] + self.offset
