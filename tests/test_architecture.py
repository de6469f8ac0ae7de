"""Enforces ARCHITECTURE.md on the source text alone; nothing of the package is imported."""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "wellposed"
FILES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

CHAIN = ["errors", "workers", "activations", "equilibrium", "forms", "kernels", "models"]
MAY_IMPORT = {part: set(CHAIN[:index]) for index, part in enumerate(CHAIN)}
MAY_IMPORT |= {"checker": set(), "models": {*CHAIN[:-1], "checker"}}
MAY_IMPORT |= {"baselines": set(CHAIN[:-1]), "tasks": set(CHAIN[:-1]), "convert": set(CHAIN)}
MAY_IMPORT |= {"convex": {*CHAIN, "convert"}, "robust": {*CHAIN, "convert"}}
MAY_IMPORT["training"] = {*CHAIN, "convert", "convex", "robust"}
MAY_IMPORT["experiments"] = {*MAY_IMPORT["training"], "training", "baselines", "tasks"}
MAY_IMPORT |= {"compat": set(CHAIN), "estimators": MAY_IMPORT["experiments"]}
MAY_IMPORT["cli"] = {*MAY_IMPORT["experiments"], "checker", "estimators", "experiments"}
COMMANDS = Path("experiments/commands.py")  # part of the command line
LAZY = Path("cli/verify.py")  # proves without torch, and imports it only to load a model that is proven

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
ALWAYS_THERE = sys.stdlib_module_names | {re.split(r"\W", dependency)[0] for dependency in DEPENDENCIES}


def imports(tree: ast.AST, path: Path) -> list[tuple[str, int]]:
    """Every imported dotted name with its line; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["wellposed", *path.parts[: len(path.parts) - node.level]] if node.level else []
            base = ".".join([*here, *filter(None, [node.module])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def direction_problems(found: list[tuple[str, int]], part: str) -> Iterator[str]:
    if part not in MAY_IMPORT:
        yield f"1: {part!r} has no place in the import order; give it one here and in ARCHITECTURE.md"
        return
    for name, line in found:
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0] or "wellposed"
        if top == "wellposed" and target not in {part, *MAY_IMPORT[part]}:
            yield f"{line}: {part} may not import {target}, only {sorted(MAY_IMPORT[part])}"


def optional_problems(tree: ast.AST, found: list[tuple[str, int]], part: str) -> Iterator[str]:
    for name, line in found:
        if name.partition(".")[0] not in ALWAYS_THERE | {"wellposed"}:
            yield f"{line}: {name} is optional; use errors.require instead of import"
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", None))
        if name in ("import_module", "__import__") and part not in ("__init__", "errors"):
            yield f"{node.lineno}: a hidden import; use errors.require"


def function_problems(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
            for name, line in imports(node, path):
                if name.startswith("wellposed") and path != LAZY:
                    yield f"{line}: {name} is imported inside a function; move it to the top of the file"


def problems_of(source: str, path: Path) -> list[str]:
    tree, part = ast.parse(source), "cli" if path == COMMANDS else path.parts[0].removesuffix(".py")
    found = imports(tree, path)
    problems = [*optional_problems(tree, found, part), *function_problems(tree, path)]
    if part != "__init__":
        problems += direction_problems(found, part)
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        problems.append(f"{lines}: the file has {lines} lines, at most {MAX_FILE_LINES}; split it")
    return [f"src/wellposed/{path}:{problem}" for problem in problems]


def cycle_of(files: dict[Path, str]) -> list[str]:
    """The modules of one import cycle, or nothing."""
    parts = {path: ".".join(["wellposed", *path.with_suffix("").parts]) for path in files}
    modules = {name.removesuffix(".__init__"): path for path, name in parts.items()}
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


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_follows_the_architecture(path):
    problems = problems_of(FILES[path], path)
    assert not problems, "\n".join(problems)


def test_no_import_cycle():
    cycle = cycle_of(FILES)
    assert not cycle, f"import cycle: {' <- '.join(cycle)}"


def test_public_names_agree():
    tree = ast.parse(FILES[Path("__init__.py")])
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}
    typed = {name for name, _ in imports(tree, Path("__init__.py")) if name.startswith("wellposed")}
    lazy = {f"{module}.{name}" for name, module in values["_HOME"].items()}
    assert typed == lazy, f"TYPE_CHECKING block and _HOME differ in {sorted(typed ^ lazy)}"
    assert [name for name, home in values["_HOME"].items() if home != "wellposed.estimators"] == values["__all__"]


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("equilibrium/loop.py", "from wellposed.models import ImplicitModel", "may not import models"),
        ("equilibrium/loop.py", "from ..forms.form import ImplicitForm", "may not import forms"),
        ("errors.py", "from . import activations", "may not import activations"),
        ("convex/fit.py", "import wellposed.robust.bounds", "may not import robust"),
        ("convert/linear.py", "from wellposed.convex import States", "may not import convex"),
        ("tasks/math.py", "from wellposed import models", "may not import models"),
        ("models/deq.py", "from wellposed import fixed_point", "may not import fixed_point"),
        ("models/deq.py", "import wellposed", "may not import wellposed"),
        ("helpers.py", "", "no place in the import order"),
        ("cli.py", "def f():\n    from wellposed import models", "inside a function"),
        ("training.py", "import sklearn", "sklearn is optional"),
        ("training.py", "def f():\n    import scipy.linalg", "scipy.linalg is optional"),
        ("training.py", "import importlib\nimportlib.import_module('scipy')", "hidden import"),
        ("training.py", "\n" * 401, "401 lines"),
        ("training.py", "def f():\n" + "    pass\n" * 60, "f has 61 lines"),
    ],
)
def test_violation_is_reported(path, source, complaint):
    assert any(complaint in problem for problem in problems_of(source, Path(path)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "equilibrium/loop.py",
            "from .solution import Solution\nfrom ..errors import MapError\nimport torch",
        ),
        (
            "robust/bounds.py",
            "from wellposed.convert import to_implicit\nfrom wellposed import forms, models",
        ),
        ("experiments/suites/math.py", "from ...tasks.math import Sum\nfrom ..config import Config"),
        ("estimators.py", "from .errors import require\nbase = require('sklearn.base', extra='sklearn')"),
        ("training.py", "def f():\n" + "    pass\n" * 59),
    ],
)
def test_clean_source_passes(path, source):
    assert problems_of(source, Path(path)) == []


def test_cycle_is_reported():
    files = {
        Path("forms/__init__.py"): "from .a import A",
        Path("forms/a.py"): "from wellposed.forms.b import B",
        Path("forms/b.py"): "from . import A",
    }
    assert set(cycle_of(files)) == {"wellposed.forms", "wellposed.forms.a", "wellposed.forms.b"}
    assert not cycle_of({**files, Path("forms/b.py"): "import torch"})
