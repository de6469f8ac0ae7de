"""Every reader of the library with files that it accepts, for the mutations and for coverage-guided fuzzing."""

import contextlib
import gzip
import io
import json
import pickle
import random
import re
import struct
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn
from wellposed_lab.engine.runner import orders
from wellposed_lab.engine.store import Record, Store
from wellposed_lab.experiments.earthquake.travel_times import read_plain_table
from wellposed_lab.experiments.sparsify.texts import WordPieces, read_newsgroups
from wellposed_lab.experiments.volatility.bars import read_bars
from wellposed_lab.experiments.volatility.market import OwnFile
from wellposed_lab.networks.transformers import load_distilbert

import wellposed as wp
from tests.fuzz.mutations import mutated, mutated_json, mutated_safetensors
from wellposed.activations import get_activation
from wellposed.checker import RefusedError, check
from wellposed.cli import main
from wellposed.cli.inputs import check_exported, read_samples, read_source
from wellposed.convex import record_states
from wellposed.convex.states import open_states, save_states
from wellposed.data.cifar import load_plain, read_binary, read_pickled
from wellposed.data.idx import read_idx
from wellposed.data.images import read_table as read_images
from wellposed.data.vnnlib import read_property
from wellposed.errors import WellposedError
from wellposed.estimators.estimator import read_estimator, write_estimator
from wellposed.models import DenseCell
from wellposed.models.io.onnx_network import FIXED, OPERATORS, read_onnx
from wellposed.training.checkpoint import Checkpoint

# FileNotFoundError: the path itself; click's errors end a command with one line.
OURS = (WellposedError, FileNotFoundError, click.ClickException, RefusedError)
Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Reader:
    """One reader.

    Args:
        name: for reports.
        files: a folder of files that it reads; the first one is changed.
        call: reads the folder.
        mutations: ways to change a file.
    """

    name: str
    files: Callable[[], dict[str, bytes]]
    call: Callable[[Path], Any]
    mutations: tuple[Mutate, ...] = (mutated,)

    def seeds(self) -> dict[str, bytes]:
        torch.manual_seed(0)
        return self.files()

    def read(self, folder: Path, files: dict[str, bytes]) -> str:
        """Reads changed files; returns the kind of error, or nothing. Errors that are not ours pass through."""
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            self.call(folder)
        except OURS as error:
            return type(error).__name__
        return ""


def in_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(mutated_json(json.loads(data), draw)).encode()


def in_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    k = draw.randrange(len(lines))
    lines[k] = in_json(lines[k], draw) if lines[k].startswith(b"{") else mutated(lines[k], draw)
    return b"\n".join(lines)


def in_gzip(data: bytes, draw: random.Random) -> bytes:
    return gzip.compress(mutated(gzip.decompress(data), draw), mtime=0)


def in_arrays(data: bytes, draw: random.Random) -> bytes:
    """Changes one array of an .npz file behind the back of its checksums."""
    with np.load(io.BytesIO(data)) as stored:
        arrays = {name: stored[name] for name in stored.files}
    name = draw.choice(list(arrays))
    change = draw.randrange(4)
    if change == 0:
        del arrays[name]
    elif change == 1:
        arrays[name] = draw.choice(
            (np.float64(3), np.zeros(0), np.zeros((2, 2, 2)), np.array(["a"]), np.array([1j]))
        )
    elif change == 2:
        arrays[name] = arrays[name].astype(draw.choice(("f2", ">f8", "u1", "i8", "M8[s]", "S3", "?")))
    else:
        arrays[name] = np.where(
            np.random.default_rng(draw.randrange(99)).random(arrays[name].shape) < 0.2, np.nan, arrays[name]
        )
    out = io.BytesIO()
    np.savez(out, **arrays)
    return lying_header(out.getvalue(), draw) if draw.random() < 0.3 else out.getvalue()


def lying_header(data: bytes, draw: random.Random) -> bytes:
    """Lets an array of an uncompressed .npz file declare another shape, and makes the checksum right again."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            size = draw.choice((b"99999999999", b"2147483648", b"-1", b"1", b"1e9"))
            if draw.random() < 0.7 and b"'shape': (" in content[:128]:
                (length,) = struct.unpack("<H", content[8:10])
                head = (
                    content[10 : 10 + length].replace(b"'shape': (", b"'shape': (" + size + b", ").rstrip() + b"\n"
                )
                content = content[:8] + struct.pack("<H", len(head)) + head + content[10 + length :]
            new.writestr(info.filename, content)
    return out.getvalue()


def in_zip(data: bytes, draw: random.Random) -> bytes:
    """Changes a member of an archive with its checksum, or says a thing twice, elsewhere or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        infos = old.infolist()
        for info in infos:
            content, choice = old.read(info), draw.randrange(3 * len(infos))
            if choice < 2:
                content = in_json(content, draw) if info.filename.endswith(".json") else mutated(content, draw)
            name = info.filename
            if choice == 2:
                name = draw.choice((name.upper(), f"x/{name}", "x"))
            kind = zipfile.ZIP_DEFLATED if choice == 3 else zipfile.ZIP_STORED
            new.writestr(name, content, kind)
            if choice == 4:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    new.writestr(name, mutated(content, draw))
    return draw.choice((b"", b"", data)) + out.getvalue()


def in_tar(data: bytes, draw: random.Random) -> bytes:
    """Changes the bytes of a member, or its name, kind or size."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            content = old.extractfile(member).read()
            choice = draw.randrange(5)
            content = mutated(content, draw) if choice < 3 else content
            member.size = len(content)
            if choice == 3:
                member.name = draw.choice(("/etc/passwd", "../" * 9 + "x", "", member.name + "/x", "a" * 300))
            if choice == 4:
                member.type, member.linkname = (
                    draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)),
                    "/etc/passwd",
                )
                member.size, content = 0, b""
            new.addfile(member, io.BytesIO(content))
    return out.getvalue()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(write_to: Callable[[Path], Any], *names: str) -> dict[str, bytes]:
    with folder() as path:
        write_to(path)
        return {name: (path / name).read_bytes() for name in names}


MODEL = "m.safetensors"


def model_file(make: Callable[[], Any]) -> Callable[[], dict[str, bytes]]:
    return lambda: written(lambda path: wp.save(make(), path / MODEL), MODEL)


def certified() -> dict[str, bytes]:
    def make(path: Path) -> None:
        wp.save(wp.ImplicitModel(2, 1, 3, condition="weighted").double(), path / MODEL, certificate=True)

    return written(make, "m.cert", MODEL)


def pretrained(make: Callable[[], Any], first: str) -> Callable[[], dict[str, bytes]]:
    names = sorted(("config.json", "model.safetensors"), key=lambda name: name != first)

    def open_to_changes(path: Path) -> None:
        wp.models.save_pretrained(make(), path)
        unsealed(path / "config.json")

    return lambda: written(open_to_changes, *names)


def unsealed(path: Path) -> None:
    """Takes the checksum away, behind which nothing would be looked at."""
    said = json.loads(path.read_text())
    del said["sha256"]
    path.write_text(json.dumps(said))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def checkpoint() -> dict[str, bytes]:
    state = {"epoch": 3, "weights": (torch.ones(2), None), "list": [1.5, "a"]}
    return written(lambda path: Checkpoint(path / "c", key="k").save(state), "c")


def record_line() -> dict[str, bytes]:
    values = [{"metric": "loss", "value": 0.5, "at": None}]
    plain = {name: "x" for name in ("id", "suite", "scale", "task", "model", "size", "role", "kind", "started")}
    more = {
        "config": {},
        "values": values,
        "series": {"loss": [1.0]},
        "facts": {},
        "environment": {},
        "seconds": 1.0,
    }
    record = Record.from_json({**plain, "seed": 0, **more})
    return written(lambda path: Store(path).append(record, record), "records.jsonl")


def bars(name: str) -> Callable[[], dict[str, bytes]]:
    rows = [("2021-01-27 09:30", 19.5), ("2021-01-27 09:31", 19.75), ("2021-01-28 15:59", 8.0)]
    text = "time,vwap\n" + "".join(f"{time},{price}\n" for time, price in rows)

    def make() -> dict[str, bytes]:
        if name.endswith(".gz"):
            return {name: gzip.compress(text.encode(), mtime=0)}
        if name.endswith(".csv"):
            return {name: text.encode()}
        import pyarrow
        import pyarrow.parquet

        out = io.BytesIO()
        columns = {"time": [time for time, _ in rows], "vwap": [price for _, price in rows]}
        pyarrow.parquet.write_table(pyarrow.table(columns), out)
        return {name: out.getvalue()}

    return make


def images(compress: bool) -> Callable[[], dict[str, bytes]]:
    data = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 3) + bytes(range(18))
    return lambda: {"i.gz": gzip.compress(data, mtime=0)} if compress else {"i": data}


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pickled_batch() -> bytes:
    return pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2], "name": "b"}, protocol=3)


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def stored(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def recording() -> dict[str, bytes]:
    names = ("states.json", "form.safetensors", *(f"{name}.npy" for name in "UZXY"))

    def open_to_changes(path: Path) -> None:
        save_states(record_states(network(), [torch.randn(5, 2)]), path)
        unsealed(path / "states.json")

    return written(open_to_changes, *names)


def exported() -> dict[str, bytes]:
    program = torch.export.export(network(), (torch.zeros(1, 2),))
    return written(lambda path: torch.export.save(program, path / "n.pt2"), "n.pt2")


def bert() -> dict[str, bytes]:
    from safetensors.torch import save

    shapes = {
        "embeddings.word_embeddings": (5, 4),
        "embeddings.position_embeddings": (3, 4),
        "embeddings.LayerNorm": (4,),
    }
    layer = {
        "attention.q_lin": (4, 4),
        "attention.k_lin": (4, 4),
        "attention.v_lin": (4, 4),
        "attention.out_lin": (4, 4),
        "sa_layer_norm": (4,),
        "ffn.lin1": (8, 4),
        "ffn.lin2": (4, 8),
        "output_layer_norm": (4,),
    }
    shapes |= {f"transformer.layer.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"pre_classifier": (4, 4), "classifier": (2, 4)}
    tensors = {f"distilbert.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"distilbert.{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    return {"model.safetensors": save(tensors), "config.json": b'{"n_heads": 2}'}


def commanded(path: Path) -> None:
    """Runs the command with the arguments in a file, one a line, as a shell would."""
    words = (path / "arguments").read_bytes().decode("utf-8", "replace").split("\n")
    given, out = ["wellposed", *(word for word in words if "\0" not in word)], io.StringIO()
    with contextlib.chdir(path), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        before, sys.argv = sys.argv, given
        try:
            main()
        except SystemExit as ended:
            if ended.code not in (0, 1, 2, None):
                raise RuntimeError(f"the command ends with {ended.code}") from ended
        finally:
            sys.argv = before


def own_settings(path: Path) -> Any:
    return OwnFile(path / "bars.csv", path / "bars.json").arguments()


def activation(path: Path) -> Any:
    return get_activation((path / "name").read_bytes().decode("utf-8", "replace"))


SETTINGS = json.dumps({"zone": "UTC", "splits": [["2023-08-24", 0.1]], "gaps": "keep"}).encode()
ORDER = json.dumps({"suite": "identity", "scale": "tiny", "seeds": 1, "search": False, "device": "cpu"}).encode()
TABLE = b"7,0,50,100,150\n1,1,2,3,4\n"
TEXT = b"20news-bydate-train/sci.space/1"
TIMES = {"dist_deg": np.arange(4.0), "depth_km": np.arange(3.0) * 50, "time_s": np.ones((3, 4)) * np.arange(4)}
ARGUMENTS = [
    "show\nm.safetensors\n--json",
    "verify\nm.safetensors\n--json",
    "list\n--json",
    "status\n--out\nempty",
    "report\n--out\nempty",
    "certify\n--model\nm.safetensors\n--data\nd.npz\n--epsilon\n0.1\n--samples\n2\n--no-widths\n--quiet\n--steps\n2",
    "convert\nn.py:net\n--input-shape\n2\n-o\nf.safetensors",
    "run\nnothing",
    "sparsify\n--network\nx\n--data\nd.npz\n-o\no",
    "attack\n--model\nm.safetensors\n--data\nd.npz\n--epsilon\n0.1\n--samples\n2",
    "completion\nbash",
    "--version",
]


def arguments() -> dict[str, bytes]:
    model = written(
        lambda path: wp.save(wp.ImplicitModel(2, 2, 3), path / MODEL, certificate=True), MODEL, "m.cert"
    )
    data = npz(u=np.random.default_rng(0).random((4, 2)).astype("f4"), y=np.array([0, 1, 0, 1]))
    return {"arguments": b"\n".join([b"show", b"m.safetensors"]), **model, "d.npz": data}


def in_arguments(data: bytes, draw: random.Random) -> bytes:
    words = draw.choice(ARGUMENTS).split("\n")
    for _ in range(draw.choice((1, 1, 2))):
        k, kind = draw.randrange(len(words)), draw.randrange(4)
        odd = (
            "",
            "-1",
            "nan",
            "1e400",
            "0",
            "--",
            "-",
            "--json",
            "../..",
            "/dev/null",
            "m.cert",
            "d.npz",
            "\u2603",
            "x" * 4000,
            "d.npz:test",
            "1" * 400,
            "--epsilon",
            "--range",
        )
        if kind == 0:
            words[k] = draw.choice(odd)
        elif kind == 1:
            del words[k]
            words = words or [""]
        elif kind == 2:
            words.insert(k, draw.choice(odd))
        else:
            words[k] = mutated(words[k].encode(), draw).decode("utf-8", "replace")
    return "\n".join(words).encode()


def onnx_network() -> dict[str, bytes]:
    """A small network with a convolution, a pool and a computed shape."""

    def constant(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(np.random.default_rng(0).random(shape, dtype=np.float32), name)

    shape = numpy_helper.from_array(np.array([-1], dtype=np.int64), "rest")
    first = numpy_helper.from_array(np.array([0], dtype=np.int64), "first")
    nodes = [
        helper.make_node("Conv", ["u", "W", "b"], ["a"], pads=[1, 0, 1, 0], strides=[2, 1]),
        helper.make_node("MaxPool", ["a"], ["c"], kernel_shape=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Shape", ["c"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["c", "t"], ["d"]),
        helper.make_node("Clip", ["d", "", "high"], ["e"]),
        helper.make_node("Gemm", ["e", "V"], ["y"], transB=1, alpha=0.5),
    ]
    ends = helper.make_tensor_value_info("u", 1, ("N", 2, 5, 4)), helper.make_tensor_value_info("y", 1, ("N", 3))
    constants = [constant("W", 3, 2, 3, 2), constant("b", 3), constant("V", 3, 48), constant("high"), shape, first]
    graph = helper.make_graph(nodes, "graph", [ends[0]], [ends[1]], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return {"n.onnx": model.SerializeToString()}


def in_graph(data: bytes, draw: random.Random) -> bytes:
    """Changes sizes, settings, names and kinds of an ONNX file."""
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    for _ in range(draw.choice((1, 1, 2, 4))):
        node, size = draw.choice(graph.node), draw.choice((0, 1, 2, 3, -1, -7, 10**6, 2**31, 2**62))
        kind = draw.randrange(7)
        if kind == 0 and node.attribute:
            setting = draw.choice(node.attribute)
            if setting.ints:
                setting.ints[draw.randrange(len(setting.ints))] = size
            setting.i, setting.f = size, draw.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
        elif kind == 1:
            tensor = draw.choice(graph.initializer)
            if tensor.dims and draw.random() < 0.5:
                tensor.dims[draw.randrange(len(tensor.dims))] = size
            elif draw.random() < 0.5:
                tensor.data_type = draw.randrange(25)
            else:
                tensor.raw_data = draw.choice((b"", tensor.raw_data[:-1], np.int64(size).tobytes()))
        elif kind == 2:
            draw.choice(graph.input[0].type.tensor_type.shape.dim).dim_value = size
        elif kind == 3 and node.input:
            node.input[draw.randrange(len(node.input))] = draw.choice(("", "u", "W", "nothing", "s", "d"))
        elif kind == 4:
            node.op_type = draw.choice(sorted({*OPERATORS, *FIXED, "Erf", "If"}))
        elif kind == 5:
            graph.node.remove(node)
        else:
            model.opset_import[0].version = draw.choice((1, 6, 11, 13, 18, 99))
        if not graph.node:
            break
    return model.SerializeToString()


PROPERTY = b"""; a robust input
(declare-const X_0 Real)
(declare-const X_1 Real)
(declare-const Y_0 Real)
(declare-const Y_1 Real)
(assert (and (>= X_0 -0.5) (<= X_0 0.5)))
(assert (or (and (<= X_1 1e-3) (>= X_1 0.0)) (and (<= X_1 3.0) (>= X_1 2.5))))
(assert (or (<= Y_0 Y_1) (>= (+ (* 2.0 Y_0) (- Y_1) 1.5) 0.25)))
"""


def in_words(data: bytes, draw: random.Random) -> bytes:
    """Changes words and parentheses of a property."""
    words = re.findall(rb"[()]|[^\s()]+|\n", data)
    odd = (b"(", b")", b"or", b"and", b"+", b"*", b"<=", b"X_0", b"Y_1", b"Y_99999999", b"0", b"1e-320", b"-1e30",
           b"1e999", b"0.1", b"nan", b"(or (<= X_0 1) (>= Y_0 2))", b"\x00", b"assert", b"1" * 500)  # fmt: skip
    for _ in range(draw.choice((1, 1, 2, 4))):
        index = draw.randrange(len(words))
        if draw.random() < 0.3:
            del words[index]
        elif draw.random() < 0.5:
            words.insert(index, draw.choice(odd))
        else:
            words[index] = draw.choice(odd)
    return b" ".join(words)


def reader(name: str, files: Any, call: Callable[[Path], Any], *more: Mutate) -> Reader:
    return Reader(name, files if callable(files) else (lambda: files), call, (mutated, *more))


ST, RNN = mutated_safetensors, lambda: wp.ImplicitRNN(2, 3, 4, out_features=1, num_layers=2, batch_first=True)
CELL = lambda: wp.DEQ(DenseCell(2, 3, depth=2))  # noqa: E731
LOOP = lambda: wp.series(wp.ImplicitModel(2, 3, 3).form(), wp.ImplicitModel(3, 1, 2).form())  # noqa: E731
READERS = [
    reader(
        "model", model_file(lambda: wp.ImplicitModel(2, 1, 3, bias=True)), lambda f: wp.load(f / MODEL), ST, ST
    ),
    reader(
        "low rank", model_file(lambda: wp.ImplicitModel(2, 1, 3, rank=1)), lambda f: wp.load(f / MODEL), ST, ST
    ),
    reader("recurrent", model_file(RNN), lambda f: wp.load(f / MODEL), ST, ST),
    reader("form", model_file(LOOP), lambda f: wp.load(f / MODEL), ST, ST),
    reader("folder, configuration", pretrained(CELL, "config.json"), wp.models.from_pretrained, in_json, in_json),
    reader(
        "folder, model",
        pretrained(lambda: wp.ImplicitModel(2, 1, 3), "config.json"),
        wp.models.from_pretrained,
        in_json,
    ),
    reader("folder, form", pretrained(LOOP, "config.json"), wp.models.from_pretrained, in_json, in_json),
    reader("folder, weights", pretrained(CELL, "model.safetensors"), wp.models.from_pretrained, ST),
    reader("certificate", certified, lambda f: check(f / MODEL), ST, ST),
    reader("certified model", lambda: dict(reversed(certified().items())), lambda f: check(f / MODEL), ST),
    reader(
        "estimator",
        lambda: written(lambda p: write_estimator(p / "e", {"a": torch.ones(2)}, {"kind": "K"}), "e"),
        lambda f: read_estimator(f / "e", "K"),
        ST,
    ),
    reader("checkpoint", checkpoint, lambda f: Checkpoint(f / "c", key="k").load(), ST),
    reader("records", record_line, lambda f: Store(f).records(), in_lines),
    reader("orders", {"plans/a.json": ORDER}, orders, in_json),
    reader("recorded states", recording, open_states, in_json),
    reader("bars, CSV", bars("b.csv"), lambda f: read_bars(f / "b.csv")),
    reader("bars, CSV compressed", bars("b.csv.gz"), lambda f: read_bars(f / "b.csv.gz"), in_gzip),
    reader("bars, Parquet", bars("b.parquet"), lambda f: read_bars(f / "b.parquet")),
    reader("bars, settings", {"bars.json": SETTINGS}, own_settings, in_json),
    reader("IDX", images(False), lambda f: read_idx(f / "i", 3)),
    reader("IDX compressed", images(True), lambda f: read_idx(f / "i.gz", 3), in_gzip),
    reader("images, table", {"t.csv": TABLE}, lambda f: read_images(f / "t.csv", 2, 0)),
    reader(
        "CIFAR, pickled",
        lambda: {"c.tar": tar_of({"x/b": pickled_batch()})},
        lambda f: read_pickled(f / "c.tar", ["b"], 10),
        in_tar,
    ),
    reader(
        "CIFAR, binary",
        lambda: {"c.tar": tar_of({"x/b": bytes(2 * 3073)})},
        lambda f: read_binary(f / "c.tar", ["b"], 10),
        in_tar,
    ),
    reader(
        "pickle",
        lambda: {"p": pickle.dumps({"labels": [3, 1], "name": "b", "x": (1.5, None)}, protocol=2)},
        lambda f: load_plain((f / "p").read_bytes()),
    ),
    reader(
        "newsgroups",
        lambda: {"n.tar": tar_of({TEXT.decode(): b"From: a\n\nb"})},
        lambda f: read_newsgroups(f / "n.tar", "train", ""),
        in_tar,
    ),
    reader(
        "travel times",
        lambda: {"t.npz": npz(**TIMES)},
        lambda f: read_plain_table(f / "t.npz", ""),
        in_arrays,
        in_arrays,
    ),
    reader(
        "vocabulary", {"v.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n##b\n"}, lambda f: WordPieces.read(f / "v.txt")
    ),
    reader("DistilBERT", bert, load_distilbert, ST),
    reader(
        "samples, npz",
        lambda: {"s.npz": npz(u=np.ones((3, 2)), y=np.arange(3))},
        lambda f: read_samples(str(f / "s.npz")),
        in_arrays,
    ),
    reader("samples, npy", lambda: {"s.npy": npy(np.ones((3, 2)))}, lambda f: read_samples(str(f / "s.npy"))),
    reader(
        "samples, torch",
        lambda: {"s.pt": stored({"u": torch.ones(3, 2)})},
        lambda f: read_samples(str(f / "s.pt")),
        in_zip,
    ),
    reader(
        "samples, safetensors",
        lambda: written(
            lambda p: write_estimator(p / "s.safetensors", {"u": torch.ones(3, 2)}, {}), "s.safetensors"
        ),
        lambda f: read_samples(str(f / "s.safetensors")),
        ST,
    ),
    reader("exported program", exported, lambda f: check_exported(f / "n.pt2"), in_zip, in_zip),
    reader("exported program, loaded", exported, lambda f: read_source(str(f / "n.pt2")), in_zip),
    reader("ONNX", onnx_network, lambda f: read_onnx(f / "n.onnx"), in_graph, in_graph),
    reader("property", {"p": PROPERTY}, lambda f: read_property(f / "p").forbidden(), in_words, in_words),
    reader("activation", {"name": b"leaky_relu(0.25)"}, activation),
    reader("arguments", arguments, commanded, in_arguments, in_arguments, in_arguments),
]
