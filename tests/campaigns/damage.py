"""Files that are cut off, have a bit flipped, or are others than they should be; part of `faults`."""

import hashlib
import json
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from wellposed_lab.config import Training
from wellposed_lab.engine.runner import Order, orders
from wellposed_lab.engine.store import Record, Store
from wellposed_lab.networks.trained import train_or_load
from works import digest, silent, sparsify

import wellposed as wp
from wellposed.checker import RefusedError, check
from wellposed.convex import open_states, record_states, save_states
from wellposed.data.cache import DataFile, fetch
from wellposed.data.idx import read_idx
from wellposed.errors import WellposedError
from wellposed.estimators.estimator import read_estimator, write_estimator
from wellposed.training import Checkpoint

OUTCOMES = ("refused", "read as written", "damaged part skipped", "weaker and proven")
TICK = 0.01  # seconds, longer than the clock of a file system takes to notice a change


@dataclass(frozen=True)
class Damaged:
    """A file, how it is read, and which damages matter.

    Args:
        path: of the file.
        read: reads it; what it returns is compared by its text.
        parts: whether the reader skips what is damaged and names it.
        pause: whether a file must differ in its date to be read again.
        weaker: whether what was read says less than what was written, and is true.
    """

    path: Path
    read: Callable[[], Any]
    parts: bool = False
    pause: bool = False
    weaker: Callable[[Any], bool] = lambda found: False


def append(folder: Path, tell: Callable[[str], None], first: int, count: int) -> str:
    """Appends records and tells each one when the store says that it is on the disk."""
    store = Store(folder)
    for number in range(first, first + count):
        about = ("small", "tiny", "task", "model", None, number, "ours", "run")
        store.append(Record(f"id{number}", *about, {}, (), {}, {}, {}, "", 0.0))
        tell(str(number))
    return "written"


def data_set(folder: Path) -> Damaged:
    """Makes a data set known by its checksum, as those that are downloaded are."""
    path = folder / "data" / "made" / "images"
    path.parent.mkdir(parents=True)
    content = struct.pack(">4B3I", 0, 0, 8, 3, 20, 5, 5) + bytes(range(250)) * 2
    path.write_bytes(content)
    file = DataFile("made/images", hashlib.sha256(content).hexdigest(), len(content))

    def read_data() -> str:
        with mock.patch.dict("os.environ", {"WELLPOSED_DATA": str(folder / "data"), "WELLPOSED_OFFLINE": "1"}):
            _, (path,) = fetch("made", [[file]], "it cannot be got")
        return hashlib.sha256(np.ascontiguousarray(read_idx(path, 3)).tobytes()).hexdigest()

    return Damaged(path, read_data, pause=True)


def trained(folder: Path) -> Damaged:
    """Makes a network that is kept in the cache."""

    def get() -> str:
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        train_or_load("net", Training(epochs=1), network, partial(nn.init.ones_, network.weight), folder)
        return digest(*network.parameters())

    get()
    return Damaged(next((folder / "networks").iterdir()), get)


def states_of(folder: Path) -> str:
    states = open_states(folder)
    return digest(states.U, states.Z, states.X, states.Y) + repr(
        (states.blocks, states.activations, states.input_shape)
    )


def settled(model: Any) -> str:
    return repr(model) + digest(*model.state_dict().values())


def less(model: wp.ImplicitModel, claims: Any) -> bool:
    """Says whether a changed certificate claims no more than the norm of the matrix gives."""
    (claim,) = claims
    condition, _, value = claim.stated.removesuffix(" < 1").partition(": ")
    return condition == "inf" and float(model.A.detach().abs().sum(1).max()) <= float(value) < 1


def kinds(folder: Path) -> dict[str, Damaged]:
    """Writes a file of every kind and returns how it is read."""
    torch.manual_seed(0)
    checkpoint = Checkpoint(folder / "run.ckpt")
    checkpoint.save({"a": torch.arange(50), "b": [1, "x"]})
    model, shared = wp.ImplicitModel(3, 2, 6).double(), folder / "shared"
    wp.save(model, folder / "model.safetensors", certificate=True)
    wp.models.save_pretrained(model, shared)
    append(folder / "store", silent, 0, 20)
    sparsify(folder / "rows", silent)
    write_estimator(folder / "estimator", {"a": torch.arange(40.0)}, {"kind": "K", "parameters": {"kappa": 0.5}})
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    save_states(record_states(network, [torch.randn(9, 4)]), folder / "states")
    Order("identity", "tiny", 3).save(folder / "out")
    plan, states = folder / "out" / "plans" / "identity-tiny.json", folder / "states"
    return {
        "checkpoint": Damaged(checkpoint.path, checkpoint.load),
        "model file": Damaged(
            folder / "model.safetensors", lambda: settled(wp.load(folder / "model.safetensors"))
        ),
        "certificate": Damaged(
            folder / "model.cert", lambda: check(folder / "model.safetensors"), weaker=partial(less, model)
        ),
        "folder of a model, weights": Damaged(
            shared / "model.safetensors", lambda: settled(wp.models.from_pretrained(shared))
        ),
        "folder of a model, configuration": Damaged(
            shared / "config.json", lambda: settled(wp.models.from_pretrained(shared))
        ),
        "estimator": Damaged(folder / "estimator", lambda: repr(read_estimator(folder / "estimator", "K"))),
        "network in the cache": trained(folder),
        "store": Damaged(
            folder / "store" / "records.jsonl",
            lambda: [record.id for record in Store(folder / "store").records()],
            parts=True,
        ),
        "order of an experiment": Damaged(plan, lambda: orders(folder / "out")),
        "kept rows": Damaged(next((folder / "rows").iterdir()), lambda: sparsify(folder / "rows", silent)),
        "recorded states": Damaged(states / "X.npy", lambda: states_of(states)),
        "index of recorded states": Damaged(states / "states.json", lambda: states_of(states)),
        "data set": data_set(folder),
    }


def cut(data: bytes, generator: random.Random) -> bytes:
    """Returns the beginning of a file."""
    return data[: generator.randrange(len(data))]


def flip(data: bytes, generator: random.Random) -> bytes:
    """Returns a file with one bit changed."""
    position, changed = generator.randrange(len(data)), bytearray(data)
    changed[position] ^= 1 << generator.randrange(8)
    return bytes(changed)


def other(data: bytes, generator: random.Random) -> bytes:
    """Returns another file that begins alike and is as long."""
    length = generator.randrange(len(data))
    return data[:length] + generator.randbytes(len(data) - length)


CHANGES = {"truncated": cut, "bit flipped": flip, "another file": other}


def outcome(file: Damaged, expected: str) -> str:
    """Reads a damaged file; an error that is not ours passes through."""
    try:
        value = file.read()
    except (WellposedError, RefusedError):
        return "refused"
    if repr(value) == expected:
        return "read as written"
    if file.parts and set(value) <= set(json.loads(expected.replace("'", '"'))):
        return "damaged part skipped"
    return "weaker and proven" if file.weaker(value) else ""


def judge(name: str, file: Damaged, kind: str, count: int, generator: random.Random) -> dict[str, Any]:
    """Damages one file again and again; it must be refused, skipped in part, or read as it was written."""
    whole, expected = file.path.read_bytes(), repr(file.read())
    outcomes = dict.fromkeys(OUTCOMES, 0)
    wrong = 0
    for _ in range(count):
        file.path.write_bytes(CHANGES[kind](whole, generator))
        time.sleep(TICK if file.pause else 0)
        try:
            ended = outcome(file, expected)
        except Exception as error:
            ended = ""
            print(f"{name}, {kind}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if ended:
            outcomes[ended] += 1
        wrong += not ended
    file.path.write_bytes(whole)
    return {"fault": f"{name}, {kind}", "times": count, "other result": wrong, "lost": 0, **outcomes}


def damages(count: int, root: Path) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
    """Lists all kinds of files, below a folder, with all kinds of damages."""
    return {
        f"{name}, {kind}": partial(judge, name, file, kind, count)
        for name, file in kinds(root).items()
        for kind in CHANGES
    }
