"""Trains one implicit model with several processes, started by torchrun.

    torchrun --nproc-per-node 2 examples/distributed.py           # every process has the model, half of each batch
    torchrun --nproc-per-node 2 examples/distributed.py --shard   # and only half of its parameters (FSDP)
    python examples/distributed.py                                # the same numbers from one process

On two machines, on each: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29400 examples/distributed.py
With GPUs add --device cuda; every process takes its own. Prints the loss, what every process holds and the proof
that the trained model is well-posed; with --out the trained model is kept in a file.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from wellposed import ImplicitModel, fit, save

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Draws inputs and what a small recursion makes of them; the same in every process."""
    u = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    return u, (u.cumsum(1).tanh() * u).sum(1, keepdim=True)


def model(states: int) -> ImplicitModel:
    """Builds the model with the same first parameters in every process."""
    torch.manual_seed(0)
    return ImplicitModel(8, 1, states, kappa=0.9, bias=True)


def divide(trained: ImplicitModel, device: str) -> None:
    """Leaves every process with some rows of every parameter."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    fully_shard(trained.to(device), mesh=init_device_mesh(device, (WORLD,)))


def whole(trained: ImplicitModel, states: int) -> ImplicitModel:
    """Gathers the parameters of a divided model in a plain one."""
    gathered = get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = model(states)
    if RANK == 0:
        plain.load_state_dict(gathered)
    return plain


def main() -> None:
    """Trains the model; the first process tells how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=64, help="size of A (default 64)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shard", action="store_true", help="divide the parameters among the processes")
    parser.add_argument("--out", type=Path, help="where to keep the trained model")
    options = parser.parse_args()
    trained = model(options.states)
    if options.shard and WORLD > 1:
        divide(trained, options.device)
    local = [part.to_local() if hasattr(part, "to_local") else part for part in trained.parameters()]
    history = fit(trained, data(2048), mse_loss, epochs=options.epochs, device=options.device, progress=False)
    if options.shard and WORLD > 1:
        trained = whole(trained, options.states)
    if RANK > 0:
        return
    print(f"{WORLD} processes with {sum(part.numel() for part in local):,} parameters each")
    print(f"loss {float(history.train_loss[0]):.4f} -> {float(history.train_loss[-1]):.4f}")
    print(f"well-posed: {trained.certificate()}")
    if options.out is not None:
        save(trained, options.out)
        print(f"kept in {options.out}")


if __name__ == "__main__":
    main()
