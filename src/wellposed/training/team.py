"""The processes that train together: one, or those that torchrun started."""

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from wellposed.errors import InputError


@dataclass(frozen=True)
class Team:
    """This process among those that share every batch.

    Example:
        >>> Team(torch.device("cpu")).sum(torch.tensor(2.0))
        tensor(2.)
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, model: nn.Module, device: torch.device | str | None) -> "Team":
        """Finds the device and, where the environment says WORLD_SIZE > 1, joins the process group."""
        first = next(model.parameters(), torch.empty(0))
        wanted = first.device if device is None else find_device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(wanted)
        if wanted == torch.device("cuda"):
            wanted = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if wanted.type == "cuda" else "gloo")
            atexit.register(_leave)
        return cls(wanted, distributed.get_rank(), distributed.get_world_size())

    def wrap(self, model: nn.Module) -> nn.Module:
        """Makes the backward pass average gradients over the processes; one that is sharded does so itself."""
        if self.size == 1 or isinstance(model, DistributedDataParallel) or is_sharded(model):
            return model
        return DistributedDataParallel(model)

    def sum(self, value: Tensor) -> Tensor:
        """Adds up what every process has."""
        if self.size == 1:
            return value
        total = value.detach().to(self.device, copy=True)
        distributed.all_reduce(total)
        return total.to(value.device)

    def share(self, value: Any) -> Any:
        """Gives every process what the first one has."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def find_device(wanted: torch.device | str) -> torch.device:
    """Returns a device that exists; ``"auto"``: CUDA if there is one, else the CPU.

    Example:
        >>> find_device("gpu")
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: device must be a device of torch, such as 'cpu' or 'cuda'; received 'gpu'
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"device must be a device of torch, such as 'cpu' or 'cuda'; received {wanted!r}"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        present = torch.cuda.device_count() or "no"
        raise InputError(f"device {str(device)!r} is not there: torch finds {present} CUDA device; use 'cpu'")
    return device


def is_sharded(model: nn.Module) -> bool:
    """Returns whether `torch.distributed.fsdp.fully_shard` has sharded a module; by class name, to import nothing.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the module inside a DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
