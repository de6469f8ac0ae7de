"""Archives that are one thing to one reader and another to the next, and small files that ask for much memory."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from wellposed.cli import cli
from wellposed.cli.inputs import check_exported, read_samples
from wellposed.data.files import read_members
from wellposed.data.images import read_table
from wellposed.errors import FileFormatError
from wellposed.models.io import archives
from wellposed.models.io.archives import read_torch, read_zip, write_zip
from wellposed.models.io.arrays import read_arrays

END = "<4s4H2LH"
WEIGHTS = "data/weights/model_weights_config.json"
Members = dict[str, bytes]


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


class Reserved:
    """Asks for memory when it is unpickled."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __reduce__(self):
        return bytearray, (self.count,)


def saved(value) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def members_of(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def stored(members: Members) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def halves(members: Members) -> tuple[bytearray, bytearray, int]:
    """An archive as its files, its directory and the number of both."""
    raw = stored(members)
    *_, count, size, start, _ = struct.unpack(END, raw[-22:])
    return bytearray(raw[:start]), bytearray(raw[start : start + size]), count


def entries(directory: bytearray):
    place = 0
    while place < len(directory):
        yield place
        place += 46 + sum(struct.unpack_from("<3H", directory, place + 28))


def ended(files: bytes, directory: bytes, count: int, start: int | None = None, extra: bytes = b"") -> bytes:
    place = len(files) if start is None else start
    head = struct.pack(END, b"PK\5\6", 0, 0, count, count, len(directory), place, len(extra))
    return bytes(files) + bytes(directory) + head + extra


def two_directories(good: Members, evil: Members) -> bytes:
    """One reader goes to where the end says that the directory is, the other to what lies before the end."""
    evil_files, evil_directory, _ = halves(evil)
    files, directory, count = halves(good)
    evil_directory += bytes(len(directory) - len(evil_directory))
    evil_files += bytes(max(0, len(files) - len(evil_files) + 64))
    base, start = len(evil_files) + len(evil_directory), len(evil_files)
    shift = base - (base + len(files) - start)
    for place in entries(directory):
        (offset,) = struct.unpack_from("<L", directory, place + 42)
        struct.pack_into("<L", directory, place + 42, offset + shift)
    return ended(bytes(evil_files + evil_directory + files), directory, count, start)


def before(good: Members, evil: Members) -> bytes:
    return stored(evil) + stored(good)


def behind(good: Members, evil: Members) -> bytes:
    files, directory, count = halves(good)
    return ended(files, directory, count, extra=stored(evil)[:60000])


def twice(good: Members, evil: Members) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for given in (evil, good):
            for name, data in given.items():
                archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def capitals(good: Members, evil: Members) -> bytes:
    other = {name.replace("model_", "MODEL_"): data for name, data in evil.items() if name.endswith(WEIGHTS)}
    return stored(other | {n: evil[n] if n.endswith("weight_0") else data for n, data in good.items()})


def overlapping(good: Members, evil: Members) -> bytes:
    files, directory, count = halves(good)
    first = next(place for place in entries(directory) if struct.unpack_from("<L", directory, place + 42)[0] == 0)
    struct.pack_into("<2L", directory, first + 20, len(files) - 200, len(files) - 200)
    return ended(files, directory, count)


def other_names(good: Members, evil: Members) -> bytes:
    files, directory, count = halves(good)
    return ended(bytes(files).replace(b"weight_0", b"weight_9"), directory, count)


def other_sizes(good: Members, evil: Members) -> bytes:
    files, directory, count = halves(evil)
    for place in entries(directory):
        (length,) = struct.unpack_from("<H", directory, place + 28)
        if directory[place + 46 : place + 46 + length].endswith(WEIGHTS.encode()):
            struct.pack_into("<2L", directory, place + 20, 2, 2)
    return ended(files, directory, count)


def two_folders(good: Members, evil: Members) -> bytes:
    return stored({f"a{name}": data for name, data in evil.items()} | good)


def each_entry(change):
    """Makes the harmless archive, with every entry of its directory changed, or that of the weight alone."""

    def forge(good: Members, evil: Members) -> bytes:
        files, directory, count = halves(good)
        parts, ends = [*entries(directory)], [*entries(directory)][1:]
        cut = [bytearray(directory[a:b]) for a, b in zip(parts, [*ends, len(directory)], strict=True)]
        return ended(files, b"".join(bytes(change(one)) for one in cut), count)

    forge.__name__ = change.__name__
    return forge


def descriptors(entry: bytearray) -> bytearray:
    """Says that sizes follow the data, which they do not."""
    entry[8] |= 8
    return entry


def with_extra(entry: bytearray, extra: bytes) -> bytearray:
    length, old = struct.unpack_from("<2H", entry, 28)
    struct.pack_into("<H", entry, 30, old + len(extra))
    return entry[: 46 + length] + extra + entry[46 + length :]


def other_path(entry: bytearray) -> bytearray:
    """Gives another name in the field for names in Unicode (0x7075)."""
    (length,) = struct.unpack_from("<H", entry, 28)
    name = bytes(entry[46 : 46 + length])
    body = struct.pack("<BL", 1, zlib.crc32(name)) + name.replace(b"weight_0", b"weight_1")
    return with_extra(entry, struct.pack("<2H", 0x7075, len(body)) + body)


def sixty_four(entry: bytearray) -> bytearray:
    """Has sizes and place in the field of zip64, the sizes as they are."""
    packed, size = struct.unpack_from("<2L", entry, 20)
    (place,) = struct.unpack_from("<L", entry, 42)
    struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
    return with_extra(entry, struct.pack("<2H3Q", 1, 24, size, packed, place))


def sixty_four_too_large(entry: bytearray) -> bytearray:
    struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    return with_extra(entry, struct.pack("<2H2Q", 1, 16, 1 << 50, 1 << 50))


def renamed(old: str, new: str):
    def forge(good: Members, evil: Members) -> bytes:
        return stored({name.replace(old, new): data for name, data in good.items()})

    forge.__name__ = f"named_{new}"
    return forge


def named_twice_by_nul(good: Members, evil: Members) -> bytes:
    """Has names that end early for one reader, and not for another."""
    name = f"n/{WEIGHTS}"
    files, directory, count = halves({f"{name}XX": evil[name]} | good)
    old, new = f"{name}XX".encode(), f"{name}\0X".encode()
    return ended(bytes(files).replace(old, new), bytes(directory).replace(old, new), count)


def behind_itself(good: Members, evil: Members) -> bytes:
    """Ends twice: the last end tells of the harmless archive."""
    first = stored(evil)
    files, directory, count = halves(good)
    for place in entries(directory):
        (offset,) = struct.unpack_from("<L", directory, place + 42)
        struct.pack_into("<L", directory, place + 42, offset + len(first))
    return ended(first + bytes(files), directory, count)


FORGED = [
    *map(each_entry, (descriptors, other_path, sixty_four, sixty_four_too_large)),
    named_twice_by_nul, behind_itself,
    renamed("data/", "data/../data/"), renamed("n/", "/n/"), renamed("n/", "../n/"), renamed("/", "\\"),
    renamed("n/", ""), renamed("data/weights/weight_0", "data/weights/weight_0/"),
]  # fmt: skip
FORGED += [two_directories, before, behind, twice, capitals, overlapping, other_names, other_sizes, two_folders]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "n.pt2"
    torch.export.save(torch.export.export(network(), (torch.zeros(1, 2),)), path)
    return path


def with_trap(good: Members, trace: Path) -> Members:
    """The same program, but its first weight is to be unpickled."""
    name = f"n/{WEIGHTS}"
    said = json.loads(good[name])
    said["config"]["0.weight"]["use_pickle"] = True
    return good | {name: json.dumps(said).encode(), "n/data/weights/weight_0": saved(Trap(trace))}


def converted(path: Path) -> tuple[int, str]:
    words = ["convert", str(path), "--input-shape", "2", "-o", str(path.parent / "f.safetensors")]
    result = CliRunner().invoke(cli, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_program_is_refused_or_is_what_was_checked(forge, exported, tmp_path):
    good, trace = members_of(exported), tmp_path / "trace"
    path = tmp_path / "n.pt2"
    path.write_bytes(forge(good, with_trap(good, trace)))
    code, _ = converted(path)
    assert not trace.exists() and code in (0, 1)
    if code == 0:
        found = torch.export.load(check_exported(path)).state_dict
        assert all(torch.equal(found[name], value) for name, value in network().state_dict().items())


def test_the_trap_of_the_program_works(exported, tmp_path):
    """So that the test above could fail: torch itself obeys a second directory."""
    good, trace = members_of(exported), tmp_path / "trace"
    path = tmp_path / "n.pt2"
    path.write_bytes(two_directories(good, with_trap(good, trace)))
    assert members_of(path) == good
    with contextlib.suppress(Exception):  # by then it has run
        torch.export.load(path)
    assert trace.exists()


class Dictionaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("spread", torch.ones(1).expand(3))

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.linear(given["u"]) * given["u"].shape[0] ** 2 + self.spread, "z": given["u"]}


def test_an_honest_program_loads_as_it_would_from_its_file(exported, tmp_path):
    batch = {"given": {"u": {0: torch.export.Dim("b", min=2, max=64)}}}
    program = torch.export.export(Dictionaries(), ({"u": torch.rand(4, 2)},), dynamic_shapes=batch)
    torch.export.save(program, tmp_path / "d.pt2")
    for path in (exported, tmp_path / "d.pt2"):
        one, other = torch.export.load(check_exported(path)), torch.export.load(path)
        assert str(one) == str(other) and one.range_constraints == other.range_constraints
        for a, b in zip(one.state_dict.values(), other.state_dict.values(), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and type(a) is type(b)
        assert str(one.example_inputs) == str(other.example_inputs)


def changed(ending: str, edit):
    def change(members: Members) -> Members:
        (name,) = (name for name in members if name.endswith(ending))
        said = json.loads(members[name])
        edit(said)
        return members | {name: json.dumps(said).encode()}

    return change


def stored_size(*sizes: int):
    def edit(said):
        meta = said["config"]["0.weight"]["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": n} for n in sizes], [{"as_int": 0} for _ in sizes]

    return changed("model_weights_config.json", edit)


def symbolic(text: str):
    def edit(said):
        value = next(iter(said["graph_module"]["graph"]["tensor_values"].values()))
        value["sizes"] = [{"as_expr": {"expr_str": text, "hint": None}}]

    return changed("models/model.json", edit)


def structure(kind: str, context):
    def edit(said):
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = [1, {"type": kind, "context": context, "children_spec": [leaf]}]
        for call in said["graph_module"]["module_call_graph"]:
            if call["signature"] is not None:
                call["signature"]["in_spec"] = json.dumps(spec)

    return changed("models/model.json", edit)


def calling(*calls: tuple[str, dict]):
    """Puts nodes without inputs before the program, each with arguments of its own."""

    def edit(said):
        graph = said["graph_module"]["graph"]
        some = next(iter(graph["tensor_values"].values()))
        for k, (target, given) in enumerate(reversed(calls)):
            name = f"made{len(calls) - k}"
            number = target.startswith(("_operator", "math"))
            graph["sym_int_values" if number else "tensor_values"][name] = {"as_int": 1} if number else some
            inputs = [{"name": key, "arg": value, "kind": 1} for key, value in given.items()]
            out = {"as_sym_int": {"as_name": name}} if number else {"as_tensor": {"name": name}}
            graph["nodes"].insert(0, {"target": target, "inputs": inputs, "outputs": [out], "metadata": {},
                                      "is_hop_single_tensor_return": None, "name": name})  # fmt: skip

    return changed("models/model.json", edit)


def made(*sizes: int, target: str = "torch.ops.aten.ones.default"):
    return target, {"size": {"as_ints": [*sizes]}}


def integers(target: str, one: int, other: int) -> tuple[str, dict]:
    return target, {"a": {"as_int": one}, "b": {"as_int": other}}


def tensor(name: str) -> dict:
    return {"as_tensor": {"name": name}}


FACTORY = {"default_factory_module": "trapped", "default_factory_name": "x", "dict_context": ["a"]}
ASKING = {
    "a weight of one number and 4e9 places": stored_size(65536, 65536),
    "an empty weight": lambda m: stored_size(65536, 65536)(m) | {"n/data/weights/weight_0": b""},
    "a tower of powers": symbolic("9**9**9"),
    "a tower of calls": symbolic("Pow(Integer(9), Pow(Integer(9), Integer(9)))"),
    "a tower of small powers": symbolic("((((9**60)**60)**60)**60)**60"),
    "a factorial": symbolic("99999999!"),
    "a shift": symbolic("1 << 99999999999"),
    "a constant of 4e10 entries": calling(made(200_000, 200_000)),
    "a constant of 4e9 entries without memory": calling(
        made(1), ("torch.ops.aten.expand.default", {"self": tensor("made1"), "size": {"as_ints": [1 << 32]}})
    ),
    "many constants": calling(*[made(1000, 1000)] * 40),
    "a constant in pieces": calling(
        made(3000, 1),
        made(1, 3000),
        ("torch.ops.aten.mul.Tensor", {"self": tensor("made1"), "other": tensor("made2")}),
    ),
    "a sequence": calling(("torch.ops.aten.arange.default", {"end": {"as_int": 10**10}})),
    "a unit matrix": calling(("torch.ops.aten.eye.default", {"n": {"as_int": 100_000}})),
    "a power of whole numbers": calling(integers("_operator.pow", 9, 10**9)),
    "a shift of whole numbers": calling(integers("_operator.lshift", 1, 10**11)),
    "a method": calling(("_operator.methodcaller", {"": {"as_string": "numpy"}})),
    "an attribute": calling(("_operator.attrgetter", {"": {"as_string": "__class__"}})),
    "a factorial to call": calling(("math.factorial", {"": {"as_int": 10**9}})),
    "a loop": calling(("torch.ops.higher_order.while_loop", {"": tensor("input")})),
    "a factory to import": structure("collections.defaultdict", FACTORY),
    "a name to import": structure("builtins.dict", '[{"__enum__": true, "fqn": "trapped:X", "name": "x"}]'),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_program_that_asks_for_much_or_for_imports_is_refused(name, exported, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    (tmp_path / "trapped.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "n.pt2"
    path.write_bytes(stored(ASKING[name](members_of(exported))))
    code, output = converted(path)
    assert code == 1 and ("refused" in output or "entries" in output) and not trace.exists()


def test_constants_of_an_honest_size_are_made(exported, tmp_path):
    """So that the test above refuses sizes, and not nodes of its own making."""
    path = tmp_path / "n.pt2"
    small = calling(made(30, 40), ("torch.ops.aten.arange.default", {"end": {"as_int": 50}}))
    path.write_bytes(stored(small(members_of(exported))))
    assert converted(path)[0] == 0


def test_a_program_without_sample_inputs_takes_the_inputs_of_its_graph(exported, tmp_path):
    """What is run on tensors without memory is run with inputs of the same shape later."""
    path = tmp_path / "n.pt2"
    plain = {name: b"" if "sample_inputs" in name else data for name, data in members_of(exported).items()}
    path.write_bytes(stored(plain))
    assert converted(path)[0] == 0
    result = CliRunner().invoke(
        cli, ["convert", str(path), "--input-shape", "3", "-o", str(tmp_path / "f.safetensors")]
    )
    assert result.exit_code != 0 and "takes inputs of the shape (2,)" in " ".join(result.output.split())


class Padded(nn.Module):
    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(u, (0, 10**7))


def test_a_program_that_makes_much_of_its_input_is_refused(tmp_path):
    torch.export.save(torch.export.export(Padded(), (torch.zeros(1, 2),)), tmp_path / "n.pt2")
    code, output = converted(tmp_path / "n.pt2")
    assert code == 1 and "entries" in output


@pytest.mark.parametrize(
    "text", ["s0**2", "Pow(Symbol('s44', positive=True, integer=True), Integer(2))", "2*s0 - 1", "Mod(s0, 2)"]
)
def test_honest_sizes_are_arithmetic(text, exported, tmp_path):
    path = tmp_path / "n.pt2"
    path.write_bytes(stored(symbolic(text)(members_of(exported))))
    check_exported(path)


def expanded() -> bytes:
    return saved({"u": torch.rand(1, 2).expand(10**9, 2), "y": torch.zeros(1, dtype=torch.int64).expand(10**9)})


def sparse() -> bytes:
    at = torch.zeros(2, 1, dtype=torch.int64)
    return saved({"u": torch.sparse_coo_tensor(at, torch.ones(1), (10**6, 10**6), check_invariants=False)})


def deflated(data: bytes, kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", kind) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return out.getvalue()


def hollow(kind: str, count: int) -> bytes:
    """An .npy file of things that take no room."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": kind, "fortran_order": False, "shape": (count,)})
    return out.getvalue()


def layered(data: bytes, copies: int) -> bytes:
    """An archive whose directory names the same bytes many times."""
    files, directory, _ = halves({"u000.npy": data})
    one = bytes(directory)
    return ended(files, b"".join(one.replace(b"u000", b"u%03d" % k) for k in range(copies)), copies)


def npy(count: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(count))
    return out.getvalue()


def zeros_npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, u=np.zeros((1000, 1000)))
    return out.getvalue()


BOMBS = {
    "expanded.pt": expanded,
    "sparse.pt": sparse,
    "reserved.pt": lambda: saved({"u": torch.ones(2, 2), "y": Reserved(1 << 28)}),
    "legacy.pt": lambda: pickle.dumps({"u": Reserved(1 << 28)}, protocol=2),
    "packed.pt": lambda: deflated(saved({"u": torch.zeros(2000, 2000)})),
    "lzma.npz": lambda: deflated(zeros_npz(), zipfile.ZIP_LZMA),
    "layers.npz": lambda: layered(npy(10**5), 100),
    "hollow.npy": lambda: hollow("<U0", 10**8),
    "hollow.npz": lambda: stored({"u.npy": hollow("|S0", 10**8)}),
    "meta.pt": lambda: saved({"u": torch.zeros(3, 2, device="meta")}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_data_files_take_little_memory(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(BOMBS[name]())
    tracemalloc.start()  # which numpy and Python report to, torch does not
    try:
        with pytest.raises(click.BadParameter):
            read_samples(str(path))
        assert tracemalloc.get_traced_memory()[1] < 20 * path.stat().st_size + (1 << 24)
    finally:
        tracemalloc.stop()


def test_honest_data_files_load_as_they_would_by_torch_and_numpy(tmp_path):
    u, y = torch.rand(5, 3), torch.arange(5)
    for value in ({"u": u, "y": y}, (u.T.contiguous().T, y), u, {"u": u[:1].expand(5, 3)}, {"u": u.to_sparse()}):
        for new in (True, False):
            torch.save(value, tmp_path / "s.pt", _use_new_zipfile_serialization=new)
            with open(tmp_path / "s.pt", "rb") as file:
                found = read_torch(file)
            assert str(found) == str(torch.load(tmp_path / "s.pt", weights_only=True))
            assert torch.equal(read_samples(str(tmp_path / "s.pt")).u[:1], u[:1])
    arrays = {"u": u.numpy(), "U": y.numpy(), "names": np.array(["a", "bc"]), "none": np.zeros((0, 3))}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "s.npz", **arrays)
        found = read_arrays(tmp_path / "s.npz")
        assert list(found) == list(arrays)
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_an_archive_is_read_once_and_written_anew():
    members = {"a/b": b"text", "a/c": os.urandom(100)}
    assert read_zip(write_zip(dict(members))) == members
    with pytest.raises(FileFormatError, match="at most 50"):
        read_zip(io.BytesIO(stored(members)), 50)
    with pytest.raises(FileFormatError, match="capitals"):
        write_zip({"a": b"", "A": b""})


def gzipped(text: bytes, count: int) -> bytes:
    return gzip.compress(text * count, 1)


def tarred(kind: str, *members: tuple[str, int], behind: int = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    data = out.getvalue() + bytes(behind)
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind](data)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_archives_are_not_unpacked_without_end(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED_FREE", 1 << 16)
    path = tmp_path / f"a.tar.{kind}"
    for members, behind in (([("other", 1 << 23)], 0), ([("wanted", 10)], 1 << 23)):
        path.write_bytes(tarred(kind, *members, behind=behind))
        with pytest.raises(FileFormatError, match="refused"):
            list(read_members(path, lambda name: name == "wanted", 1 << 30))
    path.write_bytes(tarred(kind, ("wanted", 10)))
    assert list(read_members(path, lambda name: True, 1 << 30)) == [("wanted", bytes(10))]


def test_compressed_tables_are_not_unpacked_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED_FREE", 1 << 16)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzipped(b"7,0,50,100,150\n", 10**6))
    with pytest.raises(FileFormatError, match="unpacks to more than"):
        read_table(path, side=2, label=0)
    path.write_bytes(gzipped(b"7,0,50,100,150\n", 10))
    assert len(read_table(path, side=2, label=0)[1]) == 10
