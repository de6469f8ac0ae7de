"""Turns the arguments of fit() into what the loop needs, or says what is wrong with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from wellposed.errors import InputError, unknown_name
from wellposed.models.ensemble import Ensemble
from wellposed.models.warm_start import WarmStart
from wellposed.training.team import is_sharded

WHOLE = ("epochs", "batch_size", "patience")


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
    """Returns where the starts of all training samples are kept, if that is wanted.

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


def require_whole(model: nn.Module, **wanted: bool) -> None:
    """Raises if something is wanted that needs all parameters in one process, and they are divided."""
    names = [name for name, given in wanted.items() if given]
    if names and is_sharded(model):
        raise InputError(
            f"{', '.join(names)} cannot be used with a model that fully_shard has divided; leave it out, or train "
            "without fully_shard"
        )


def require_sensible(
    model: nn.Module, numbers: dict[str, float | None], validated: bool, project: bool, per_member: bool
) -> None:
    """Raises if an argument is out of range or does not fit the model."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InputError(f"{name} must be positive; received {value!r}")
        if (
            name in WHOLE
            and value is not None
            and (isinstance(value, bool) or not hasattr(value, "__index__") or value >= 2**63)
        ):
            raise InputError(f"{name} must be a whole number below 2^63; received {value!r}")
    if numbers["patience"] is not None and not validated:
        raise InputError("patience watches the validation loss; pass validation=(inputs, targets) with it")
    require_whole(model, project=project, patience=numbers["patience"] is not None)
    target = model.stacked if isinstance(model, Ensemble) else model
    if project and not hasattr(target, "project_"):
        raise InputError(f"project=True needs a model with project_(); {type(target).__name__} has none")
    if per_member and not isinstance(model, Ensemble):
        raise InputError(f"per_member=True needs an Ensemble; received {type(model).__name__}")
