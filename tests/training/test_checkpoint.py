"""Checkpoints: what comes back, what is refused, and that a run goes on as if nothing had happened."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_problems import QUIET, implicit, problem, seeded

from wellposed.errors import FileFormatError, InputError
from wellposed.models import Ensemble
from wellposed.training import Checkpoint, Interrupted, checkpoint, fit


def state():
    nested = {"a": [torch.arange(3), (1, None, "x")], 7: {"b": torch.zeros(0, 2), "c": 2.5, "d": True}}
    return {**nested, "short": torch.ones(2, dtype=torch.bfloat16), "bytes": torch.get_rng_state()}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    file = Checkpoint(tmp_path / "run.ckpt")
    file.save({"epoch": 1, "weights": torch.zeros(3)})
    plain, left = checkpoint.safe_open, [2, 3]

    def replacing(path, framework):
        opened = plain(path, framework=framework)
        if left:
            epoch = left.pop(0)
            file.save({"epoch": epoch, "weights": torch.full((3 * epoch,), 1.0)})
        return opened

    monkeypatch.setattr(checkpoint, "safe_open", replacing)
    assert same(file.load(), {"epoch": 3, "weights": torch.ones(9)})
    left.extend([4] * checkpoint.TRIES)
    with pytest.raises(FileFormatError, match="other runs replace it"):
        file.load()


def test_everything_comes_back(tmp_path):
    file = Checkpoint(tmp_path / "deep" / "run.ckpt", key="k")
    assert file.load() is None
    before = state()
    file.save(before)
    assert same(file.load(), before)
    assert [p.name for p in file.path.parent.iterdir()] == ["run.ckpt"]
    file.remove()
    assert file.load() is None
    with pytest.raises(InputError, match="received function"):
        file.save({"f": state.__call__.__func__ if hasattr(state.__call__, "__func__") else state})


def test_a_file_that_another_run_removes_while_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert Checkpoint(tmp_path / "run.ckpt").load() is None


def test_damaged_or_foreign_files_are_refused(tmp_path):
    file = Checkpoint(tmp_path / "run.ckpt", key="mine")
    file.save(state())
    whole = file.path.read_bytes()
    with pytest.raises(FileFormatError, match=r"another run \('mine', expected 'yours'\).*Delete it"):
        Checkpoint(file.path, key="yours").load()
    for cut in (0, 1, 7, 100, len(whole) - 1):
        file.path.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match="cannot be used"):
            file.load()
    for place in range(len(whole) - 1, 8, -max(1, len(whole) // 60)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        file.path.write_bytes(bytes(flipped))
        with pytest.raises(FileFormatError, match="cannot be used"):
            file.load()
    file.path.write_bytes(whole)
    assert file.load() is not None


def test_a_failed_write_leaves_the_old_state(tmp_path, monkeypatch):
    file = Checkpoint(tmp_path / "run.ckpt")
    file.save({"epoch": 1})

    def broken(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        file.save({"epoch": 2})
    monkeypatch.undo()
    assert file.load() == {"epoch": 1} and [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


class Noisy(nn.Module):
    """Draws random numbers in training, so that their state matters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, u):
        return self.layers(u)


MODELS = {
    "noisy": lambda: seeded(Noisy, 0).double(),
    "implicit": lambda: seeded(implicit, 0),
    "ensemble": lambda: Ensemble.of(implicit, [0, 1, 2]).double(),
}


def train(model, epochs=6, **options):
    torch.manual_seed(3)
    common = {"batch_size": 7, "schedule": "cosine", "validation": problem(20, 1), "patience": 4, **QUIET}
    return fit(model, problem(), F.mse_loss, epochs=epochs, **common, **options)


class Stop(Checkpoint):
    """Is interrupted when the third epoch has been saved."""

    def save(self, state):
        super().save(state)
        if len(state["history"]["train_loss"]) == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_equals_one_that_never_stopped(name, tmp_path):
    whole = MODELS[name]()
    expected = train(whole)
    with pytest.raises(Interrupted):
        train(MODELS[name](), checkpoint=Stop(tmp_path / "run.ckpt"))
    torch.manual_seed(99)  # whatever happened in between
    resumed = MODELS[name]()
    history = train(resumed, checkpoint=tmp_path / "run.ckpt")
    for column in ("train_loss", "validation_loss", "steps", "failed_share"):
        assert torch.equal(getattr(history, column).nan_to_num(), getattr(expected, column).nan_to_num()), column
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key
    again = train(MODELS[name](), checkpoint=tmp_path / "run.ckpt")  # nothing left to do
    assert torch.equal(again.train_loss.nan_to_num(), expected.train_loss.nan_to_num())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(MODELS["noisy"](), epochs=1, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(FileFormatError, match="does not fit this run"):
        train(MODELS["implicit"](), checkpoint=tmp_path / "run.ckpt")
