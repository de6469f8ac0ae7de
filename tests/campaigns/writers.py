"""Every writer of the library and of the lab, with a reader that knows what it may find; part of `faults`.

`Writer.write` saves one of several versions over what is there, and `Writer.read` says which one that is. A writer
is killed at random moments, and at the very steps at which it makes, renames or removes a file.
"""

import functools
import hashlib
import io
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from silent import be_silent
from torch import nn
from wellposed_lab.config import Training
from wellposed_lab.engine.runner import Order, orders
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.experiments.earthquake.travel_times import TravelTimes, read_table, save_table
from wellposed_lab.networks.resnet import Normalised, ResNet, save_weights, trained_resnet20
from wellposed_lab.networks.trained import train_or_load
from wellposed_lab.report.page import write_report
from wellposed_lab.report.paper import Album, _write
from works import digest

import wellposed as wp
from wellposed.checker import RefusedError, check
from wellposed.cli import cli
from wellposed.convert import to_implicit
from wellposed.convex import RowFit, open_states, record_states, save_states
from wellposed.estimators.estimator import read_estimator, write_estimator
from wellposed.forms.draw.diagram import graph
from wellposed.forms.draw.spy import spy
from wellposed.models.io.archives import read_torch
from wellposed.models.io.certificates import with_projected_parameters, write_certificate
from wellposed.models.io.export import export_onnx
from wellposed.models.io.storage import ReferenceModel, store_reference
from wellposed.robust.attacks import pgd
from wellposed.robust.draw import gallery
from wellposed.training import Checkpoint

VERSIONS, FAILED = 3, 3
STEPS = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "open"})
FILE, CARD = "m.safetensors", ReferenceModel("m", "A model.", "none", {}, "inf", 1, "none")


@dataclass(frozen=True)
class Writer:
    """Saves versions over one another.

    Args:
        write: saves the version of a number in a folder.
        read: returns what is there, in words that tell versions apart; raises if it is neither.
        versions: whether readers can tell versions apart; pages say how long something took.
        slow: whether a version takes seconds; it is killed less often.
    """

    write: Callable[[Path, int], Any]
    read: Callable[[Path], str]
    versions: bool = True
    slow: bool = False


@functools.cache
def model(number: int) -> wp.ImplicitModel:
    torch.manual_seed(number)
    return wp.ImplicitModel(3, 2, 5 + number)


@functools.cache
def proven(number: int) -> Any:
    return with_projected_parameters(model(number))


@functools.cache
def network(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def numbers_of(model: Any) -> str:
    if isinstance(model, wp.ImplicitForm):
        return digest(*(getattr(model, name).to_dense() for name in "ABCD"))
    return digest(*model.state_dict().values())


def with_proof(file: Path, model: Any) -> str:
    """Adds whether there is a proof; one of another model is an error."""
    try:
        check(file)
    except OSError:
        return f"{numbers_of(model)} without a proof"
    except RefusedError as error:
        if "newer model" in str(error):  # it waits for the next save
            return f"{numbers_of(model)} without a proof"
        raise
    return f"{numbers_of(model)} proven"


def fresh(folder: Path, number: int) -> None:
    """Saves to a folder that is not there yet."""
    taken = len(list(folder.iterdir())) if folder.exists() else 0
    wp.models.save_pretrained(model(number), folder / f"{taken}")


def all_fresh(folder: Path) -> str:
    """Reads every folder in which a save has come to its end; of the others nothing is to be seen."""
    for saved in folder.iterdir():
        if any(not path.name.startswith(".new.") for path in saved.iterdir()):
            wp.models.from_pretrained(saved)
    return "whole"


def certify_again(folder: Path, number: int) -> None:
    """Writes the certificate of one file once more."""
    if not (folder / FILE).exists():
        wp.save(proven(0), folder / FILE)
    write_certificate(proven(0), folder / FILE)


def kept_rows(folder: Path, number: int) -> str:
    torch.manual_seed(number)
    X = torch.randn(40, 6, dtype=torch.float64)
    z = X @ torch.randn(6, 8, dtype=torch.float64)
    return digest(RowFit(kappa=0.9, folder=folder, chunk=2).solve(X, X[:, :0], z).weights)


def kept_network(folder: Path, number: int) -> str:
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    train_or_load("net", Training(epochs=number + 1), network, partial(nn.init.ones_, network.weight), folder)
    return digest(*network.parameters())


def anew(write: Callable[[Path, int], str]) -> Writer:
    """Makes a writer of a cache, which is emptied first; what is there is read, and the rest is made."""

    def again(folder: Path, number: int) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                path.unlink(missing_ok=True)
        write(folder, number)

    return Writer(again, lambda folder: " ".join(write(folder, k) for k in range(VERSIONS)), versions=False)


def table(number: int) -> TravelTimes:
    axis = torch.tensor([0.0, 10.0])
    return TravelTimes("flat", "made up", axis, 10 * axis, torch.full((2, 2), 0.1 + number))


@functools.cache
def residual_network(number: int) -> Normalised:
    torch.manual_seed(number)
    return Normalised(ResNet(20)).eval()


def record(number: int) -> Record:
    about = ("identity", "tiny", "identity", "implicit", None, number, "ours", "run")
    return Record(f"id{number}", *about, {}, (Value("test_mse", 1.0, 10.0),), {}, {}, {}, "", 0.0)


def append(folder: Path, number: int) -> None:
    Store(folder).append(record(number))


def records(folder: Path) -> str:
    stored = Store(folder).records()
    if not stored:
        raise ValueError("no record is left")
    return "some"


def whole_page(path: Path) -> str:
    text = path.read_text()
    if not text.lstrip().lower().startswith("<!doctype html>") or not text.rstrip().endswith("</html>"):
        raise ValueError(f"{path.name} is not whole")
    return "whole"


def whole_picture(path: Path) -> str:
    with Image.open(path) as picture:
        picture.load()
        return f"{picture.size}"


@functools.cache
def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60 + number, 3), dtype=np.uint8)).save(
        out, "png"
    )
    return out.getvalue()


def album(folder: Path, number: int) -> None:
    """Draws a picture that is not there yet; one that is there, even half of one, would stay."""
    (folder / f"p{number}.png").unlink(missing_ok=True)
    drawn = SimpleNamespace(draw=lambda records: picture(number))
    Album(folder, "pictures").show(f"p{number}", partial(_write, drawn, []), "a picture", "of noise")


def all_pictures(folder: Path) -> str:
    for path in folder.glob("*.png"):
        whole_picture(path)
    return "whole"


@functools.cache
def attacked(number: int) -> tuple[Any, ...]:
    u = torch.rand(4, 4, generator=torch.Generator().manual_seed(number))
    y = network(number)(u).argmax(1)
    return network(number), u, pgd(network(number), u, y, 0.1, steps=2), y


def draw_attack(folder: Path, number: int) -> None:
    model, u, attack, y = attacked(number)
    gallery(model, u, attack, y, count=1 + number, path=folder / "a.png")


CODE = """
import torch
from torch import nn

def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

n0, n1, n2 = map(make, range(3))
"""


@functools.cache
def sources() -> Path:
    """Makes networks and data for the command."""
    folder = Path(tempfile.mkdtemp(prefix="wellposed-sources-"))
    (folder / "networks.py").write_text(CODE)
    for k in range(VERSIONS):
        wp.save(to_implicit(network(k), (4,)), folder / f"f{k}.safetensors")
        u = torch.rand(20, 4, generator=torch.Generator().manual_seed(k))
        np.savez(folder / f"d{k}.npz", u=u.numpy(), y=network(k)(u).argmax(1).numpy())
    return folder


def command(words: str) -> Callable[[Path, int], None]:
    """Runs the command; {k} is the number of the version, {at} has networks and data, {out} is the folder."""

    def run(folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        texts = [word.format(k=number, at=sources(), out=folder) for word in words.split()]
        with io.StringIO() as out, io.StringIO() as err:
            kept, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), out, err
            try:
                cli.main(texts, standalone_mode=False)
            finally:
                sys.stdout, sys.stderr = kept

    return run


def sparsified(folder: Path) -> str:
    whole_page(folder / "r.html") if (folder / "r.html").exists() else None
    return with_proof(folder / FILE, wp.load(folder / FILE))


def attack_files(folder: Path) -> str:
    if (folder / "u.pt").exists():
        with (folder / "u.pt").open("rb") as file:
            read_torch(file)
    return whole_page(folder / "a.html")


def drawings(folder: Path) -> str:
    for name in ("p.html", "g.html"):
        if (folder / name).exists():
            whole_page(folder / name)
    if (folder / "p.png").exists():
        whole_picture(folder / "p.png")
    return "whole"


def draw_form(folder: Path, number: int) -> None:
    form = model(number).form()
    spy(form, folder / "p.png")
    spy(form, folder / "p.html")
    graph(form, folder / "g.html")


CERTIFY = "certify --model {at}/f{k}.safetensors --data {at}/d{k}.npz --epsilon 0.01 --samples 3 --steps 2 --quiet"
ATTACK = "attack --model {at}/f{k}.safetensors --data {at}/d{k}.npz --epsilon 0.1 --samples 4 --steps 2 --quiet"
CONVERT = "convert {at}/networks.py:n{k} --input-shape 4 -o {out}/m.safetensors"
SPARSIFY = "sparsify --network {at}/networks.py:n{k} --data {at}/d{k}.npz --test {at}/d{k}.npz --quiet"
WRITERS: dict[str, Writer] = {
    "save": Writer(lambda f, k: wp.save(model(k), f / FILE), lambda f: numbers_of(wp.load(f / FILE))),
    "save, with its certificate": Writer(
        lambda f, k: wp.save(model(k), f / FILE, certificate=True),
        lambda f: with_proof(f / FILE, wp.load(f / FILE)),
    ),
    "save_pretrained": Writer(
        lambda f, k: wp.models.save_pretrained(model(k), f), lambda f: numbers_of(wp.models.from_pretrained(f))
    ),
    "save_pretrained, with its certificate": Writer(
        lambda f, k: wp.models.save_pretrained(model(k), f, certificate=True),
        lambda f: with_proof(f / "model.safetensors", wp.models.from_pretrained(f)),
    ),
    "save_pretrained, a fresh folder": Writer(fresh, all_fresh, versions=False),
    "write_certificate": Writer(
        certify_again, lambda f: with_proof(f / FILE, wp.load(f / FILE)), versions=False
    ),
    "reference model": Writer(
        lambda f, k: store_reference(model(k), CARD, f), lambda f: numbers_of(wp.models.from_pretrained(f / "m"))
    ),
    "recorded states": Writer(
        lambda f, k: save_states(record_states(network(k), [torch.ones(6 + k, 4)]), f),
        lambda f: digest(open_states(f).X, open_states(f).U),
    ),
    "checkpoint": Writer(
        lambda f, k: Checkpoint(f / "run.ckpt").save({"a": torch.arange(50 + k)}),
        lambda f: digest(Checkpoint(f / "run.ckpt").load()["a"]),
    ),
    "estimator": Writer(
        lambda f, k: write_estimator(f / "e", {"a": torch.arange(40.0 + k)}, {"kind": "K", "parameters": {}}),
        lambda f: repr(read_estimator(f / "e", "K")),
    ),
    "kept rows": anew(kept_rows),
    "network in the cache": anew(kept_network),
    "travel times in the cache": Writer(
        lambda f, k: save_table(table(k), f / "t.npz"), lambda f: digest(read_table(f / "t.npz", "test").direct)
    ),
    "weights of a network": Writer(
        lambda f, k: save_weights(residual_network(k), f / "w.safetensors"),
        lambda f: digest(*trained_resnet20(f / "w.safetensors").parameters()),
    ),
    "records": Writer(append, records, versions=False),
    "order of an experiment": Writer(
        lambda f, k: Order("identity", "tiny", k + 1).save(f), lambda f: repr(orders(f)[0])
    ),
    "report": Writer(
        lambda f, k: write_report([record(k)], f / "r.html"), lambda f: whole_page(f / "r.html"), versions=False,
        slow=True,
    ),
    "pictures of a report": Writer(album, all_pictures, versions=False),
    "drawings of a form": Writer(draw_form, drawings, versions=False, slow=True),
    "gallery of an attack": Writer(draw_attack, lambda f: str(bool(whole_picture(f / "a.png"))), versions=False),
    "ONNX": Writer(
        lambda f, k: export_onnx(model(k), f / "m.onnx", torch.ones(2, 3), steps=3),
        lambda f: hashlib.sha256(__import__("onnx").load(f / "m.onnx").SerializeToString()).hexdigest(),
        slow=True,
    ),
    "wellposed convert": Writer(command(CONVERT), lambda f: with_proof(f / FILE, wp.load(f / FILE))),
    "wellposed sparsify": Writer(
        command(SPARSIFY + " -o {out}/m.safetensors --report {out}/r.html"), sparsified
    ),
    "wellposed certify": Writer(
        command(CERTIFY + " --out {out}/c.html"), lambda f: whole_page(f / "c.html"), versions=False
    ),
    "wellposed attack": Writer(
        command(ATTACK + " --out {out}/a.html --save {out}/u.pt"), attack_files, versions=False
    ),
}  # fmt: skip


def known(writer: Writer, root: Path) -> tuple[set[str], float, int]:
    """Writes all versions undisturbed; returns what is read of them, the time of one and its steps."""
    versions, times, steps = set(), [], 0
    for number in range(VERSIONS):
        folder = root / f"known{number}"
        folder.mkdir()
        began = time.monotonic()
        writer.write(folder, number)
        times.append(time.monotonic() - began)
        versions.add(writer.read(folder))
        steps = steps or _counted(partial(writer.write, folder, (number + 1) % VERSIONS))
    assert len(versions) == (VERSIONS if writer.versions else 1), versions
    return versions | {text.replace(" proven", " without a proof") for text in versions}, min(times), steps


def _hooked(act: Callable[[int], None]) -> None:
    """Calls `act` with the number of each step of this process, before it is taken."""
    count = [0]

    def look(event: str, args: Any) -> None:
        if event in STEPS and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            count[0] += 1
            act(count[0])

    sys.addaudithook(look)


def _counted(work: Callable[[], Any]) -> int:
    """Counts the steps of work in a process of its own."""
    with tempfile.NamedTemporaryFile("rb") as log:
        handle = os.open(log.name, os.O_WRONLY | os.O_APPEND)
        child = os.fork()
        if not child:
            try:
                be_silent()
                _hooked(lambda step: (os.write(handle, b"."), None)[1])
                work()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(handle)
        return max(1, len(log.read()))


def _started(writer: Writer, folder: Path, number: int, step: int) -> int:
    """Writes version after version in a process, which is killed before one of its steps, if it is told one."""
    child = os.fork()
    if not child:
        try:
            be_silent()
            if step:
                _hooked(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None)
            for k in range(number, number + 100):
                writer.write(folder, k % VERSIONS)
        except Exception:
            os._exit(FAILED)
        finally:
            os._exit(0)
    return child


def kill_writer(name: str, count: int, generator: random.Random) -> dict[str, Any]:
    """Kills a writer, half of the time before one of its steps and sometimes beside another one, and reads."""
    writer, kills, gone, failed, said = WRITERS[name], 0, 0, 0, ""
    with tempfile.TemporaryDirectory() as scratch:
        versions, seconds, steps = known(writer, Path(scratch))
        folder = Path(scratch) / "folder"
        folder.mkdir()
        writer.write(folder, 0)
        while kills < (count // 4 if writer.slow else count):
            exact = generator.random() < 0.5
            step = generator.randint(1, steps) if exact else 0
            writers = 2 if generator.random() < 0.2 else 1
            children = [_started(writer, folder, generator.randrange(VERSIONS), step) for _ in range(writers)]
            time.sleep(0 if exact else generator.uniform(0, 2 * seconds))
            for child in children:
                if not exact:
                    os.kill(child, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                kills += code == -signal.SIGKILL
                failed += code == FAILED
            try:
                read = writer.read(folder)
                wrong = "" if read in versions else f"neither version: {read[:60]}"
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[:200]}"
            gone, said = gone + bool(wrong), said or wrong
            if wrong:
                writer.write(folder, 0)
    row = {"fault": f"kill -9, {name}", "times": kills, "other result": failed, "lost": gone, "steps": steps}
    return row | ({"outcome": said} if said else {})
