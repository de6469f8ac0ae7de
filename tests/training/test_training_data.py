"""Batches of every kind of data, and batches that several processes share."""

import os
import socket

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training_problems import QUIET, implicit, problem, seeded

from wellposed.models.ensemble import Ensemble
from wellposed.training import fit
from wellposed.training.batches import Batch, Batches


class Pairs(Dataset):
    def __init__(self, u, y):
        self.u, self.y = u, y

    def __len__(self):
        return len(self.u)

    def __getitem__(self, index):
        return self.u[index], self.y[index]


def test_kinds_of_data_agree():
    u, y = problem()
    results = []
    for data in ((u, y), TensorDataset(u, y), Pairs(u, y)):
        model = seeded(implicit, 0)
        fit(model, data, F.mse_loss, epochs=2, batch_size=8, seed=4, **QUIET)
        results.append(model.B)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    in_order = Batches((u, y), 8)
    loader = DataLoader(TensorDataset(u, y), batch_size=8)
    for ours, (theirs, _) in zip(in_order, loader, strict=True):
        assert torch.equal(ours.u, theirs)
    assert len(fit(seeded(implicit, 0), loader, F.mse_loss, epochs=2, **QUIET)) == 2


def test_data_for_each_member():
    sets = [problem(seed=seed) for seed in range(2)]
    stacked = tuple(torch.stack(part) for part in zip(*sets, strict=True))
    ensemble = Ensemble.of(implicit, [5, 6]).double()
    fit(ensemble, stacked, F.mse_loss, epochs=2, batch_size=10, per_member=True, **QUIET)
    for index, seed in enumerate([5, 6]):
        model = seeded(implicit, seed)
        fit(model, sets[index], F.mse_loss, epochs=2, batch_size=10, seed=seed, **QUIET)
        assert torch.allclose(model.B, ensemble.stacked.B[index], atol=1e-8)


def test_members_have_orders_of_their_own():
    batch = next(iter(Batches(problem(), 10, seeds=[0, 1])))
    assert batch.u.shape == (2, 10, 4)
    assert not torch.equal(batch.u[0], batch.u[1])
    same = next(iter(Batches(problem(), 10, seeds=[1, 1])))
    assert same.shared
    assert torch.equal(same.u, batch.u[1])


def test_shards_cover_a_batch():
    u = torch.arange(5.0)
    whole = Batch(u, u, True, 5)
    parts = [whole.shard(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.u for part in parts]).sort().values, u)
    assert sum(part.weight for part in parts) == 1
    assert Batch(u[:1], u[:1], True, 1).shard(1, 2).weight == 0


def _options():
    checks = problem(20, 1)
    return {"epochs": 3, "batch_size": 13, "clip": 0.5, "validation": checks, "patience": 2, **QUIET}


def _work(rank, port, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    for name, model in _models().items():
        history = fit(model, problem(), F.mse_loss, **_options())
        torch.save((model.state_dict(), history), f"{folder}/{name}-{rank}.pt")


def _models():
    return {"alone": seeded(implicit, 0), "ensemble": Ensemble.of(implicit, [0, 1]).double()}


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_work, (port, tmp_path), nprocs=2)
    for name, model in _models().items():
        history = fit(model, problem(), F.mse_loss, **_options())
        for rank in range(2):
            state, theirs = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False)
            assert torch.allclose(theirs.train_loss, history.train_loss, atol=1e-9)
            assert torch.allclose(theirs.validation_loss, history.validation_loss, atol=1e-9)
            for key, value in model.state_dict().items():
                assert torch.allclose(state[key], value, atol=1e-9), (name, rank, key)
