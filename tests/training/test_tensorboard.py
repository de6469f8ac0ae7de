"""The event files that TensorBoard reads, read back."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from training_problems import QUIET, implicit, problem, seeded

from wellposed.errors import InputError, MissingExtraError
from wellposed.models.ensemble import Ensemble
from wellposed.training import TensorBoard, fit

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
SummaryWriter = pytest.importorskip("torch.utils.tensorboard").SummaryWriter


def read(folder):
    """All that the event files of a folder say, as TensorBoard itself reads them."""
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def curve(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def test_every_epoch_is_written(tmp_path):
    model = seeded(implicit, 0)
    with TensorBoard(tmp_path, {"norm/A": lambda: float(model.A.detach().abs().sum(1).max())}) as board:
        history = fit(model, problem(), F.mse_loss, epochs=3, validation=problem(20, 1), on_epoch=board, **QUIET)
    events = read(tmp_path)
    names = ("train_loss", "validation_loss", "steps", "failed_share", "seconds")
    assert set(events.Tags()["scalars"]) == {*names, "norm/A"}
    for name in names:
        assert curve(events, name) == pytest.approx(dict(enumerate(getattr(history, name).tolist())), rel=1e-6)
    assert curve(events, "norm/A")[2] == pytest.approx(float(model.A.detach().abs().sum(1).max()), rel=1e-6)


def test_an_epoch_is_on_the_disk_before_the_next_begins(tmp_path, monkeypatch):
    board, seen, flushed = TensorBoard(tmp_path), [], []
    flush = SummaryWriter.flush
    monkeypatch.setattr(SummaryWriter, "flush", lambda writer: (flushed.append(len(seen)), flush(writer)))

    def on_epoch(history):
        board(history)
        seen.append(max(curve(read(tmp_path), "train_loss")))

    fit(seeded(implicit, 0), problem(), F.mse_loss, epochs=3, on_epoch=on_epoch, **QUIET)
    assert seen == flushed == [0, 1, 2]  # its thread may write in time without being asked, but need not
    board.close()


def test_without_validation_nothing_is_made_up(tmp_path):
    with TensorBoard(tmp_path) as board:
        fit(torch.nn.Linear(4, 1).double(), problem(), F.mse_loss, epochs=1, on_epoch=board, **QUIET)
    assert set(read(tmp_path).Tags()["scalars"]) == {"train_loss", "seconds"}  # nor are steps, of a linear layer


def test_members_have_curves_of_their_own(tmp_path):
    ensemble = Ensemble.of(implicit, [3, 8]).double()
    with TensorBoard(tmp_path) as board:
        history = fit(ensemble, problem(), F.mse_loss, epochs=2, on_epoch=board, **QUIET)
    events = read(tmp_path)
    for member in range(2):
        expected = dict(enumerate(history.train_loss[:, member].tolist()))
        assert curve(events, f"train_loss/{member}") == pytest.approx(expected, rel=1e-6)
    assert "seconds" in events.Tags()["scalars"] and "train_loss" not in events.Tags()["scalars"]


def test_a_resumed_run_goes_on_in_the_same_curve(tmp_path):
    options = {"checkpoint": tmp_path / "run.ckpt", **QUIET}
    with TensorBoard(tmp_path / "events") as board:
        fit(seeded(implicit, 0), problem(), F.mse_loss, epochs=2, on_epoch=board, **options)
    with TensorBoard(tmp_path / "events") as board:
        whole = fit(seeded(implicit, 0), problem(), F.mse_loss, epochs=4, on_epoch=board, **options)
    assert curve(read(tmp_path / "events"), "train_loss") == pytest.approx(
        dict(enumerate(whole.train_loss.tolist())), rel=1e-6
    )


def test_histograms_come_when_asked_for(tmp_path):
    model = seeded(implicit, 0)
    with TensorBoard(tmp_path, parameters=model, every=2) as board:
        fit(model, problem(), F.mse_loss, epochs=3, on_epoch=board, **QUIET)
    events = read(tmp_path)
    names = {name for name, _ in model.named_parameters()}
    expected = {f"parameters/{name}" for name in names} | {f"gradients/{name}" for name in names}
    assert set(events.Tags()["histograms"]) == expected
    tag = f"parameters/{min(names)}"
    assert [event.step for event in events.Histograms(tag)] == [0, 2]
    last = events.Histograms(tag)[-1].histogram_value
    values = model.get_parameter(min(names)).detach()
    assert last.num == values.numel() and math.isclose(last.sum, float(values.sum()), rel_tol=1e-4, abs_tol=1e-5)


def test_on_epoch_takes_any_function():
    lengths = []
    fit(
        seeded(implicit, 0),
        problem(),
        F.mse_loss,
        epochs=3,
        on_epoch=lambda history: lengths.append(len(history)),
        **QUIET,
    )
    assert lengths == [1, 2, 3]


def test_wrong_arguments_are_explained(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="every must be at least 1"):
        TensorBoard(tmp_path, every=0)
    with pytest.raises(InputError, match="written anyway: steps"):
        TensorBoard(tmp_path, {"steps": lambda: 1.0})
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"wellposed\[plots\]"):
        TensorBoard(tmp_path)
