"""Training by torchrun: two processes end where one does that has every batch to itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchrun_worker
from torchrun_worker import TRAININGS, stepped, tame, train

from wellposed import load

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Starts a script as a user would."""
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, *map(str, arguments)]
    done = subprocess.run(
        command,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each of two processes has found, and their folder."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    folder = tmp_path_factory.mktemp("together")
    torchrun(torchrun_worker.__file__, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], folder


def assert_same(theirs: dict, ours: dict) -> None:
    assert theirs["state"].keys() == ours["state"].keys()
    for name, value in ours["state"].items():
        torch.testing.assert_close(theirs["state"][name], value, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs["loss"], ours["loss"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_end_where_one_does(together, name):
    ours = train(name)
    for found in together[0]:
        assert_same(found[name], ours)
        assert found[name]["epochs"] == ours["epochs"] and found[name]["best"] == ours["best"]


def test_early_stopping_and_projection_had_something_to_do():
    start = TRAININGS["projected"][0]()
    stopped, projected, plain = train("stopped"), train("projected"), train("projected", project=False)
    assert stopped["epochs"] < 30 and stopped["best"] < stopped["epochs"] - 1
    raw = projected["state"]["state.raw"]
    assert raw.abs().sum(1).max() <= 0.8 * (1 + 1e-12) < plain["state"]["state.raw"].abs().sum(1).max()
    assert not torch.allclose(raw, start.state_dict()["state.raw"], atol=1e-2)


def test_the_first_process_writes_the_checkpoint_and_all_go_on_from_it(together):
    found, folder = together
    assert (folder / "0" / "run.ckpt").exists() and not (folder / "1").exists()
    for rank in range(2):
        assert_same(found[rank]["resumed"], train("plain"))


def test_divided_parameters_are_trained_alike(together):
    ours = train("plain")
    for found in together[0]:
        assert_same(found["sharded"], ours)
        assert found["sharded"]["local"]["state.raw"] == (3, 6)
        assert "project, patience" in found["sharded"]["refused"]


@pytest.mark.parametrize("kind", ["implicit", "recurrent"])
def test_divided_parameters_that_are_A_itself_are_freed_and_trained_alike(together, kind):
    ours = stepped(tame(getattr(torchrun_worker, kind)), slice(None)).state_dict()
    for found in together[0]:
        for name, value in ours.items():
            torch.testing.assert_close(found["own loop"][kind][name], value, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_example_prints_the_same_loss_from_one_process_and_from_two(tmp_path):
    script = ROOT / "examples" / "distributed.py"
    options = "--epochs", "3", "--states", "24"
    texts = [
        torchrun(script, *options, processes=1).stdout,
        torchrun(script, *options).stdout,
        torchrun(script, *options, "--shard", "--out", tmp_path / "model.safetensors").stdout,
    ]
    losses = [next(line for line in text.splitlines() if line.startswith("loss")) for text in texts]
    assert losses[0] == losses[1] == losses[2]
    assert "2 processes with 824 parameters each" in texts[1] and "428 parameters" in texts[2]
    assert load(tmp_path / "model.safetensors").certificate().holds
