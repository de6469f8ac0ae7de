"""A step of two data-parallel processes is the step of one on the joined batch."""

import os
import socket

import pytest
import torch
from deq_cells import Cell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wellposed import DEQ, ImplicitModel, ImplicitRNN, Relative


class _Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = ImplicitRNN(3, 4, 5, out_features=2, stop=Relative(1e-12), batch_first=True)

    def forward(self, u):
        return self.rnn(u[:, None].expand(-1, 4, -1))[0][:, -1]


MODELS = {
    "implicit": lambda: ImplicitModel(3, 2, 6, bias=True, stop=Relative(1e-12)),
    "recurrent": _Last,
    "deq": lambda: nn.Sequential(DEQ(Cell(), state_shape=4, stop=Relative(1e-12)), nn.Linear(4, 2)),
}


def _step(module, u, target):
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        (module(u) - target).square().mean().backward()
        optimiser.step()


def _data():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return draw(8, 3), draw(8, 2)


def _model(name):
    torch.manual_seed(1)
    return MODELS[name]().double()


def _work(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    u, target = _data()
    for name in MODELS:
        model = _model(name)
        _step(DistributedDataParallel(model), u[4 * rank : 4 * rank + 4], target[4 * rank : 4 * rank + 4])
        torch.save(model.state_dict(), f"{folder}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # torchrun starts two processes in tests/training/test_torchrun.py
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_work, (port, tmp_path), nprocs=2)
    for name in MODELS:
        alone, start = _model(name), _model(name).state_dict()
        _step(alone, *_data())
        for rank in range(2):
            theirs = torch.load(tmp_path / f"{name}-{rank}.pt")
            for key, value in alone.state_dict().items():
                torch.testing.assert_close(theirs[key], value, rtol=1e-8, atol=1e-9)
        assert any(not torch.equal(start[key], value) for key, value in alone.state_dict().items())
