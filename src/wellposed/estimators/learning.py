"""How a network learns from arrays: batches, weights, early stopping, by the one training loop."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from wellposed.errors import InputError
from wellposed.estimators.network import Network
from wellposed.estimators.units import Array
from wellposed.training import History, fit
from wellposed.training.run import Loss

SMALLEST_BATCH, UPDATES = 200, 100  # rows of a batch, unless an epoch would then take more updates than this
PRIOR, LARGEST_DECAY = 1000.0, 3.0  # weight decay times samples, up to a limit; tried out on four tables
MANY = 10_000  # samples from which some can be spared for validation
PREDICTED_AT_ONCE = 8192


@dataclass(frozen=True)
class Samples:
    """Standardised inputs with targets, whose last column is the weight of the sample.

    Example:
        >>> Samples.of(np.ones((2, 3)), np.zeros((2, 1)), np.array([1.0, 3.0])).targets
        tensor([[0.0000, 0.5000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """

    inputs: Tensor  # (N, p) or (N, T, p)
    targets: Tensor  # (N, k + 1)

    @classmethod
    def of(cls, inputs: Array, targets: Array, weights: Array) -> "Samples":
        """Joins arrays; weights are divided by their mean."""
        dtype = torch.float32 if inputs.dtype == np.float32 else torch.float64
        shares = (weights / weights.mean())[:, None]
        columns = np.concatenate([targets, shares], axis=1)
        return cls(torch.tensor(inputs, dtype=dtype), torch.tensor(columns, dtype=dtype))

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def chosen(self, rows: np.ndarray) -> "Samples":
        """Takes some of the samples, with weights whose mean is one again."""
        index = torch.as_tensor(rows)
        inputs, targets = self.inputs[index], self.targets[index]
        targets[:, -1] /= targets[:, -1].mean()
        return Samples(inputs, targets)


def make_optimizer(network: Network, rate: float, decay: float) -> Optimizer:
    """Returns Adam with decoupled weight decay, which leaves offsets alone."""
    offsets = [value for value in network.parameters() if value.dim() == 1]
    matrices = [value for value in network.parameters() if value.dim() > 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": offsets, "weight_decay": 0.0}]
    return AdamW(groups, lr=rate, fused=True)


def batch_rows(wanted: int | str, samples: int) -> int:
    """Returns the rows of a batch; ``"auto"``: 200, more where an epoch would take over a hundred updates.

    Example:
        >>> batch_rows("auto", 150), batch_rows("auto", 20_000), batch_rows("auto", 60_000), batch_rows(64, 150)
        (150, 200, 600, 64)
    """
    if wanted == "auto":
        return min(samples, max(SMALLEST_BATCH, samples // UPDATES))
    if not isinstance(wanted, int | np.integer) or wanted < 1:
        raise InputError(f"batch_size must be a positive integer or 'auto'; received {wanted!r}")
    return min(int(wanted), samples)


def decay_rate(wanted: float | str, samples: int) -> float:
    """Returns the weight decay; ``"auto"``: 1000 / samples, at most 3, as data outweigh a prior.

    Example:
        >>> decay_rate("auto", 100), decay_rate("auto", 2000), decay_rate(0.1, 100)
        (3.0, 0.5, 0.1)
    """
    if wanted == "auto":
        return min(LARGEST_DECAY, PRIOR / samples)
    if not isinstance(wanted, float | int) or wanted < 0:
        raise InputError(f"weight_decay must be a number that is not negative, or 'auto'; received {wanted!r}")
    return float(wanted)


def stops_early(wanted: bool | str, samples: int) -> bool:
    """Says whether samples are set aside for validation; ``"auto"``: if there are over 10 000.

    Example:
        >>> stops_early("auto", 500), stops_early("auto", 50_000), stops_early(True, 500)
        (False, True, True)
    """
    if not isinstance(wanted, bool | np.bool_) and wanted != "auto":
        raise InputError(f"early_stopping must be True, False or 'auto'; received {wanted!r}")
    return samples > MANY if wanted == "auto" else bool(wanted)


def find_device(wanted: str | torch.device) -> torch.device:
    """Returns the device; ``"auto"``: CUDA if there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def learn(
    network: Network,
    samples: Samples,
    loss: Loss,
    optimizer: Optimizer,
    *,
    epochs: int,
    cosine: bool,
    batch_size: int,
    seed: int,
    device: torch.device,
    validation: Samples | None = None,
    patience: int | None = None,
    progress: bool = False,
) -> History:
    """Trains in place and leaves everything on the CPU, where it can be stored."""
    network.to(device)
    optimizer.load_state_dict(optimizer.state_dict())  # which moves the moments to the parameters
    try:
        return fit(
            network,
            samples.pair,
            loss,
            epochs=epochs,
            optimizer=optimizer,
            schedule="cosine" if cosine else None,
            batch_size=batch_size,
            validation=None if validation is None else validation.pair,
            patience=patience,
            device=device,
            seed=seed,
            progress=progress,
        )
    finally:
        network.cpu()
        optimizer.load_state_dict(optimizer.state_dict())


@torch.no_grad()
def outputs(network: Network, inputs: Array, device: torch.device) -> Array:  # (N, q)
    """Computes what a network says about standardised inputs."""
    u = torch.tensor(inputs, dtype=network.offset.dtype)
    network.to(device)
    try:
        parts = [network(rows.to(device)).cpu() for rows in u.split(PREDICTED_AT_ONCE)]
    finally:
        network.cpu()
    return torch.cat(parts).numpy()
