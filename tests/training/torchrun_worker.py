"""What torchrun starts in tests/training/test_torchrun.py: the same trainings in every process, kept by rank."""

import os
import sys
from pathlib import Path

import torch
from deq_cells import Cell
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from training_problems import problem

from wellposed import DEQ, ImplicitModel, ImplicitRNN, Relative, fit
from wellposed.training import Checkpoint

STOP = Relative(1e-12)
EPOCHS = 5


def implicit() -> nn.Module:
    torch.manual_seed(0)
    return ImplicitModel(4, 1, 6, kappa=0.8, bias=True, stop=STOP).double()


def deq() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 3), DEQ(Cell(), state_shape=4, stop=STOP), nn.Linear(4, 1)
    return nn.Sequential(*layers).double()


def sgd(rate: float):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def options(**others):
    common = {"epochs": EPOCHS, "batch_size": 13, "validation": problem(20, 1), "progress": False}
    return {**common, "optimizer": sgd(0.02), **others}


TRAININGS = {
    "plain": (implicit, options(clip=0.5)),
    "projected": (implicit, options(project=True, optimizer=sgd(0.05), clip=1.0)),
    "stopped": (implicit, options(epochs=30, patience=2, optimizer=adam, project=True)),
    "deq": (deq, options(patience=3)),
}


def train(name: str, **others) -> dict:
    """Trains one of them and tells how it ended."""
    factory, given = TRAININGS[name]
    model = factory()
    history = fit(model, problem(), mse_loss, **{**given, **others})
    best = None if history.best_epoch is None else int(history.best_epoch)
    return {"state": model.state_dict(), "loss": history.validation_loss, "epochs": len(history), "best": best}


def resumed(folder: Path) -> dict:
    """Trains two epochs, and a second model from the checkpoint on to the end; every rank has its own folder."""
    train("plain", epochs=2, checkpoint=Checkpoint(folder / "run.ckpt"))
    return train("plain", checkpoint=Checkpoint(folder / "run.ckpt"))


def tame(factory) -> nn.Module:
    """Builds a model whose free parameter is A itself, so that kernels read the parameter."""
    model = factory()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("raw"):
                value.mul_(0.1)
    return model


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return _Last().double()


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = ImplicitRNN(4, 4, 5, out_features=1, stop=STOP, batch_first=True)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.rnn(u[:, None].expand(-1, 3, -1))[0][:, -1]


def stepped(model: nn.Module, rows: slice) -> nn.Module:
    """Takes three steps in a loop of one's own."""
    optimizer, (u, y) = sgd(0.02)(model.parameters()), problem(24)
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(model(u[rows]), y[rows]).backward()
        optimizer.step()
    return model


def own_loop(rank: int) -> dict:
    """Trains divided models of both kinds without `fit`."""
    states = {}
    for name, factory in {"implicit": implicit, "recurrent": recurrent}.items():
        model = stepped(fully_shard(tame(factory)), slice(rank, None, 2))
        states[name] = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return states


def sharded() -> dict:
    """Trains a model whose parameters are divided among the processes."""
    model = fully_shard(implicit())
    local = {name: tuple(value.to_local().shape) for name, value in model.named_parameters()}
    history = fit(model, problem(), mse_loss, **options(clip=0.5))
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    refused = ""
    try:
        fit(model, problem(), mse_loss, **options(project=True, patience=2))
    except ValueError as error:
        refused = str(error)
    return {"state": state, "loss": history.validation_loss, "local": local, "refused": refused}


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    results = {name: train(name) for name in TRAININGS}
    results["resumed"] = resumed(folder / rank)
    results["sharded"], results["own loop"] = sharded(), own_loop(int(rank))
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
