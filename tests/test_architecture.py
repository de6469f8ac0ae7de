"""Enforces ARCHITECTURE.md on the source text alone: layers, 12 modules a folder, optional imports, no cycle."""

import ast
import graphlib
import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import wellposed as wp

ROOT = Path(__file__).parents[1]
SOURCES = {"wellposed": ROOT / "src", "wellposed_lab": ROOT / "lab"}
FILES = {
    path.relative_to(folder): path.read_text()
    for package, folder in SOURCES.items()
    for path in sorted((folder / package).rglob("*.py"))
}
MAX_MODULES = 12

CHAIN = [
    "errors",
    "atomic",
    "pages",
    "workers",
    "registry",
    "activations",
    "equilibrium",
    "conditions",
    "forms",
    "kernels",
    "models",
]
MAY_IMPORT = {part: set(CHAIN[:index]) for index, part in enumerate(CHAIN)}
MAY_IMPORT |= {"checker": set(), "models": {*CHAIN[:-1], "checker"}, "convert": set(CHAIN), "compat": set(CHAIN)}
MAY_IMPORT |= {"convex": {*CHAIN, "convert"}, "robust": {*CHAIN, "convert"}}
MAY_IMPORT["training"] = {*CHAIN, "convert", "convex", "robust"}
MAY_IMPORT |= {part: {*MAY_IMPORT["training"], "training"} for part in ("estimators", "data")}
MAY_IMPORT["cli"] = {*MAY_IMPORT["data"], "checker", "estimators", "data"}

LAB = ["config", "cache", "tasks", "networks", "engine", "report", "experiments", "cli"]
LAB_MAY_IMPORT = {part: set(LAB[:index]) for index, part in enumerate(LAB)} | {
    "reference": {"config", "cache", "tasks", "networks"}
}
# An experiment imports no other one, but for these.
EXPERIMENTS = {("earthquake", "sparsify")}
DYNAMIC = {  # where a module is imported by a name that is not written there
    Path("wellposed/__init__.py"),
    Path("wellposed/errors.py"),
    Path("wellposed/cli/__init__.py"),
    Path("wellposed_lab/engine/experiment.py"),
}
ASKED = {("wellposed/equilibrium/compiled.py", "wellposed.kernels.recognise")}  # a higher part, by name
LAZY = {
    Path("wellposed/cli/verify.py")
}  # proves without torch, and imports it only to load a model that is proven

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
ALWAYS_THERE = sys.stdlib_module_names | {re.split(r"\W", dependency)[0] for dependency in DEPENDENCIES}


def imports(tree: ast.AST, path: Path) -> list[tuple[str, int]]:
    """Every imported dotted name with its line; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = path.parts[: len(path.parts) - node.level] if node.level else []
            base = ".".join([*here, *filter(None, [node.module])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def layer_problems(found: list[tuple[str, int]], path: Path) -> Iterator[str]:
    package, part = path.parts[0], path.parts[1].removesuffix(".py")
    if part == "__init__":
        return
    order = MAY_IMPORT if package == "wellposed" else LAB_MAY_IMPORT
    if part not in order:
        yield f"1: {part!r} has no place in the import order; give it one here and in ARCHITECTURE.md"
        return
    for name, line in found:
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0] or top
        if top == "wellposed_lab" and package == "wellposed":
            yield f"{line}: the library may not import the lab"
        elif top == package and target not in {part, *order[part]}:
            yield f"{line}: {part} may not import {target}, only {sorted(order[part])}"


def experiment_problems(found: list[tuple[str, int]], path: Path) -> Iterator[str]:
    if path.parts[:2] != ("wellposed_lab", "experiments") or len(path.parts) < 4:
        return
    for name, line in found:
        parts = name.split(".")
        if parts[:2] == ["wellposed_lab", "experiments"] and len(parts) > 2:
            pair = (path.parts[2], parts[2])
            if pair[0] != pair[1] and pair not in EXPERIMENTS:
                yield f"{line}: experiments do not import each other; {pair[0]} imports {pair[1]}"


def optional_problems(tree: ast.AST, found: list[tuple[str, int]], path: Path) -> Iterator[str]:
    for name, line in found:
        if name.partition(".")[0] not in ALWAYS_THERE | {"wellposed", "wellposed_lab"}:
            yield f"{line}: {name} is optional; use errors.require instead of import"
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", None))
        if name in ("import_module", "__import__") and path not in DYNAMIC:
            yield f"{node.lineno}: a hidden import; use errors.require"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
            asked = [(value.value, node.lineno) for value in node.args if isinstance(value, ast.Constant)]
            if asked and (path.as_posix(), asked[0][0]) not in ASKED:
                yield from layer_problems(asked[:1], path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path not in LAZY:
            for inner, line in imports(node, path):
                if inner.startswith("wellposed"):
                    yield f"{line}: {inner} is imported inside a function; move it to the top of the file"


def problems_of(source: str, path: Path) -> list[str]:
    tree = ast.parse(source)
    found = imports(tree, path)
    problems = [*layer_problems(found, path), *experiment_problems(found, path)]
    return [f"{path}:{problem}" for problem in [*problems, *optional_problems(tree, found, path)]]


def crowded(paths: list[Path]) -> list[str]:
    """The folders with too many modules."""
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")
    return [f"{folder} has {count} modules" for folder, count in modules.items() if count > MAX_MODULES]


def cycle_of(files: dict[Path, str]) -> list[str]:
    """The modules of one import cycle, or nothing."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    modules.pop("wellposed", None)  # its imports are for type checkers only
    graph = {}
    for module, path in modules.items():
        names = [name for name, _ in imports(ast.parse(files[path]), path)]
        graph[module] = {n if n in modules else n.rpartition(".")[0] for n in names} & modules.keys() - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", SOURCES)
def test_files_follow_the_architecture(package):
    own = {path: text for path, text in FILES.items() if path.parts[0] == package}
    problems = [problem for path, text in own.items() for problem in problems_of(text, path)]
    assert own and not problems, "\n".join(problems)


def test_no_folder_is_crowded():
    assert not crowded(list(FILES))


def test_no_import_cycle():
    cycle = cycle_of(FILES)
    assert not cycle, f"import cycle: {' <- '.join(cycle)}"


def test_public_names_exist_and_are_few():
    stub = ast.parse((Path(wp.__file__).parent / "__init__.pyi").read_text())
    spelt = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert len(spelt) == len(set(spelt)) and set(dir(wp)) == {*spelt, "__version__"}
    for name in spelt:
        assert getattr(wp, name) is not None
    things = [name for name in spelt if not inspect.ismodule(getattr(wp, name))]
    assert len(things) <= 44, "a name that few users need belongs in its package"
    with pytest.raises(AttributeError, match=r"it is wellposed\.equilibrium\.Polished"):
        wp.Polished  # noqa: B018
    with pytest.warns(DeprecationWarning, match=r"use wellposed\.models\.Noisy"):
        assert wp.Noisy is wp.models.Noisy


@pytest.mark.parametrize("path", sorted({path.parent for path in FILES}), ids=str)
def test_a_folder_says_what_it_is(path):
    """ARCHITECTURE.md has a line a folder; the rest is the docstring of its `__init__`."""
    assert ast.get_docstring(ast.parse(FILES[path / "__init__.py"]))
    assert f"{path.name}/" in (ROOT / "ARCHITECTURE.md").read_text()


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("wellposed/equilibrium/loop.py", "from wellposed.models import ImplicitModel", "may not import models"),
        ("wellposed/equilibrium/loop.py", "from ..forms.form import ImplicitForm", "may not import forms"),
        ("wellposed/errors.py", "from . import activations", "may not import activations"),
        ("wellposed/forms/form.py", "module = require('wellposed.models.deq')", "may not import models"),
        ("wellposed/equilibrium/loop.py", "require('wellposed.kernels.recognise')", "may not import kernels"),
        ("wellposed/convex/fit.py", "import wellposed.robust.bounds", "may not import robust"),
        ("wellposed/convert/linear.py", "from wellposed.convex import States", "may not import convex"),
        ("wellposed/models/deq.py", "from wellposed import fixed_point", "may not import fixed_point"),
        ("wellposed/models/deq.py", "import wellposed", "may not import wellposed"),
        ("wellposed/cli/verify.py", "from wellposed_lab.config import Choice", "may not import the lab"),
        ("wellposed/helpers.py", "", "no place in the import order"),
        ("wellposed/cli/show.py", "def f():\n    from wellposed import models", "inside a function"),
        ("wellposed/training/loop.py", "import sklearn", "sklearn is optional"),
        ("wellposed/training/loop.py", "def f():\n    import scipy.linalg", "scipy.linalg is optional"),
        ("wellposed/training/loop.py", "import importlib\nimportlib.import_module('scipy')", "hidden import"),
        ("wellposed_lab/tasks/task.py", "from wellposed_lab.networks.mlp import MLP", "may not import networks"),
        ("wellposed_lab/engine/run.py", "import wellposed_lab.experiments.depth", "may not import experiments"),
        ("wellposed_lab/experiments/a/run.py", "from wellposed_lab.experiments.b import run", "a imports b"),
    ],
)
def test_violation_is_reported(path, source, complaint):
    assert any(complaint in problem for problem in problems_of(source, Path(path)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "wellposed/equilibrium/loop.py",
            "from .solution import Solution\nfrom ..errors import MapError",
        ),
        ("wellposed/robust/bounds.py", "from wellposed.convert import to_implicit\nfrom wellposed import forms"),
        (
            "wellposed/estimators/a.py",
            "from ..errors import require\nbase = require('sklearn.base', extra='sklearn')",
        ),
        (
            "wellposed_lab/engine/run.py",
            "from wellposed_lab.tasks.task import Task\nimport wellposed.models",
        ),
        ("wellposed_lab/experiments/a/run.py", "from wellposed_lab.experiments.a.models import build"),
    ],
)
def test_clean_source_passes(path, source):
    assert problems_of(source, Path(path)) == []


def test_a_crowded_folder_and_a_cycle_are_reported():
    many = [Path(f"wellposed/forms/{name}.py") for name in "abcdefghijklm"]
    assert crowded(many) == ["wellposed/forms has 13 modules"] and not crowded(many[1:])
    files = {
        Path("wellposed/forms/__init__.py"): "from .a import A",
        Path("wellposed/forms/a.py"): "from wellposed.forms.b import B",
        Path("wellposed/forms/b.py"): "from . import A",
    }
    assert set(cycle_of(files)) == {"wellposed.forms", "wellposed.forms.a", "wellposed.forms.b"}
    assert not cycle_of({**files, Path("wellposed/forms/b.py"): "import torch"})


# Calls that write to a place directly. In a block of `atomic_write` and the like the place is a temporary one.
WRITING = {"write_text", "write_bytes", "savez", "savez_compressed", "save_file", "savefig", "touch", "to_csv",
           "write_tensors", "tofile", "to_parquet"}  # fmt: skip
ATOMIC = {"atomic_write", "atomic_write_with_proof", "atomic_write_folder"}
DIRECT = {  # where, and why nothing can be lost there
    ("wellposed/models/io/files.py", "write_tensors"): "writes where its callers tell it",
    ("wellposed/models/io/certificates.py", "prove_file"): "writes where its callers tell it",
    ("wellposed/convex/states.py", "_write"): "writes where its callers tell it",
    ("wellposed/convex/states.py", "_spill"): "recorded states of a running process, which begins anew",
    ("wellposed/cli/inputs.py", "write_file"): "a terminal or a pipe",
    ("wellposed/data/cache.py", "_stream"): "pooch moves it to its place once its checksum is right",
    ("wellposed_lab/engine/store.py", "_append"): "appends lines with checksums, under a lock",
}


def _writes(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "save" and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "np":
        return True
    if name == "open":
        texts = [part.value for part in (*node.args, *(word.value for word in node.keywords))
                 if isinstance(part, ast.Constant) and isinstance(part.value, str)]  # fmt: skip
        flags = any(isinstance(part, ast.Attribute) and part.attr == "O_CREAT" for part in ast.walk(node))
        return flags or any(re.fullmatch(r"[wax]b?\+?|rb?\+|[wax]t?", text) for text in texts)
    return name in WRITING


def direct_writes(tree: ast.AST, path: str) -> list[str]:
    """Lists the calls that write, outside of blocks whose files are put in their places as a whole."""
    found: list[str] = []

    def look(node: ast.AST, function: str, safe: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.With):
            opened = [getattr(item.context_expr, "func", None) for item in node.items]
            safe = safe or any(getattr(func, "id", "") in ATOMIC for func in opened)
        if isinstance(node, ast.Call) and _writes(node) and not safe and (path, function) not in DIRECT:
            to_memory = node.args and getattr(node.args[0], "id", "") in ("stream", "drawn", "out", "file")
            if not to_memory:
                found.append(f"{path}, line {node.lineno}: {ast.unparse(node)[:60]}")
        for child in ast.iter_child_nodes(node):
            look(child, function, safe)

    look(tree, "", False)
    return found


def test_whatever_is_kept_is_written_as_a_whole():
    """A process that is killed leaves the old file or the new one; see wellposed/atomic.py."""
    found = [line for path, text in FILES.items() if path != Path("wellposed/atomic.py")
             for line in direct_writes(ast.parse(text), path.as_posix())]  # fmt: skip
    assert not found, "\n".join(["write through wellposed.atomic:", *found])


@pytest.mark.parametrize(("text", "count"), [
    ("path.write_text('a')", 1),
    ("with open(path, 'wb') as file: pass", 1),
    ("with open(path, 'rb') as file: pass", 0),
    ("np.save(path, array)", 1),
    ("figure.savefig(path, dpi=200)", 1),
    ("with atomic_write(path) as place:\n    place.write_text('a')\npath.write_text('b')", 1),
    ("with atomic_write(path) as place, open(place, 'wb') as file:\n    np.savez(file)", 0),
    ("os.open(path, os.O_RDWR | os.O_CREAT)", 1),
])  # fmt: skip
def test_direct_writes_are_noticed(text, count):
    assert len(direct_writes(ast.parse(text), "a.py")) == count
