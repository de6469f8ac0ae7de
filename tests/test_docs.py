"""Runs every ```python block of the documentation, but for ```python no-run, and misses no page or name.

Two pages run by default and the others with ``make docs``; those of README are run by test_readme.py.
"""

import ast
import importlib
import importlib.util
import pkgutil
import re
import types
from pathlib import Path
from typing import TypeVar

import pytest
import wellposed_lab
from wellposed_lab.engine.claims import PAPERS, load_claims, read_claims

import wellposed

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts)
FIRST = (ROOT / "docs" / "index.md", ROOT / "docs" / "tour.md")
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)`*[ ]*$",
    re.M | re.S,
)


def blocks(text: str) -> list[tuple[int, str]]:
    """The line where each runnable block begins, and its code."""
    return [
        (text.count("\n", 0, match.start("body")), re.sub(f"(?m)^{match['indent']}", "", match["body"]))
        for match in FENCE.finditer(text)
        if match["info"].strip() == "python"
    ]


@pytest.mark.filterwarnings("default")  # a page may show what a warning looks like
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in FIRST else pytest.mark.docs) for page in PAGES],
    ids=[page.relative_to(ROOT).as_posix() for page in PAGES],
)
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page.read_text()):
        # The blank lines make a traceback point at the line of the page.
        exec(compile("\n" * line + code, page, "exec"), namespace)


def test_only_plain_python_blocks_are_taken():
    skipped = "```python no-run\n1 / 0\n```\n```bash\nls\n```\n````md\n```python\n1 / 0\n```\n````\n"
    text = f"{skipped}```python\nx = 1\n```\n"
    assert blocks(text) == [(skipped.count("\n") + 1, "x = 1\n")]


def test_a_failing_block_names_its_line():
    (line, code) = blocks("text\n\n```python\n1 / 0\n```\n")[0]
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n" * line + code, "page.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 4


DIRECTIVE = re.compile(r"^\s*\.\. auto(?P<kind>class|function|data|module):: (?P<name>[\w.]+)", re.M)
NESTED = ("compat.torchdeq", "robust.attacks")
PARTS = (*(part.name for part in pkgutil.iter_modules(wellposed.__path__) if part.name != "cli"), *NESTED)
# Of the lab: parts all of whose classes are described, and names besides.
LAB = ("config", "cache", "tasks", "networks", "engine")
LAB_FOLDER = Path(wellposed_lab.__file__).parent
LAB_NAMES = {
    "engine.claims": ("load_claims",),
    "engine.experiment": ("all_suites", "get_suite"),
    "engine.judge": ("verdicts",),
    "engine.runner": ("run_suite",),
    "experiments.sparsify.texts": ("Texts", "Vocabulary", "load_newsgroups"),
    "networks.mlp": ("MLP_ACTIVATIONS", "parameter_count"),
    "networks.published": ("PUBLISHED", "build", "parameter_table"),
    "report": ("write_report",),
    "tasks.mathematics": ("addition", "subtraction"),
}


def own_names(module: types.ModuleType) -> dict[str, object]:
    """The public names that a module defines itself; type variables apart."""
    names = {name: value for name, value in vars(module).items() if name[0] != "_"}
    own = {name: value for name, value in names.items() if getattr(value, "__module__", "") == module.__name__}
    return {name: value for name, value in own.items() if not isinstance(value, TypeVar)}


def public_names() -> set[tuple[str, str]]:
    """The module and the name of everything that a part of the library offers, modules apart, and of the lab's."""
    found = set()
    for part in ("", *PARTS):
        module = importlib.import_module(f"wellposed.{part}".rstrip("."))
        for name in getattr(module, "__all__", own_names(module)):
            if not isinstance(getattr(module, name), types.ModuleType):
                found.add((module.__name__, name))
    return found | lab_names()


def lab_names() -> set[tuple[str, str]]:
    """The classes that experiments may share, functions that two of them share, and what is listed above."""
    found = {(f"wellposed_lab.{module}", name) for module, names in LAB_NAMES.items() for name in names}
    for part in LAB:
        package = importlib.import_module(f"wellposed_lab.{part}")
        inner = pkgutil.iter_modules(getattr(package, "__path__", []), f"{package.__name__}.")
        for module in (package, *(importlib.import_module(module.name) for module in inner)):
            classes = [name for name, value in own_names(module).items() if isinstance(value, type)]
            found |= {(module.__name__, name) for name in classes}
    return found | shared_functions()


def shared_functions() -> set[tuple[str, str]]:
    """The functions of the lab that at least two experiments import."""
    users = {}
    for path in LAB_FOLDER.glob("experiments/*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"wellposed_lab\.(?!experiments)", node.module or ""):
                for alias in node.names:
                    users.setdefault((node.module, alias.name), set()).add(path.parent.name)
    shared = {pair for pair, folders in users.items() if len(folders) > 1}
    return {pair for pair in shared if isinstance(lookup(*pair), types.FunctionType)}


def documented(pages: list[Path]) -> list[tuple[str, str]]:
    """The module and the name of everything that a page of the reference describes."""
    found = []
    for page in pages:
        for match in DIRECTIVE.finditer(page.read_text()):
            if match["kind"] == "module":
                module = importlib.import_module(match["name"])
                found += [(match["name"], name) for name in vars(module)]
            else:
                home, _, name = match["name"].rpartition(".")
                found.append((home, name))
    return found


def undocumented(pages: list[Path]) -> list[str]:
    known = {id(getattr(importlib.import_module(home), name)) for home, name in documented(pages)}
    return sorted(f"{home}.{name}" for home, name in public_names() if id(lookup(home, name)) not in known)


def lookup(home: str, name: str) -> object:
    return getattr(importlib.import_module(home), name)


def test_every_public_name_has_its_place_in_the_reference():
    missing = undocumented(sorted((ROOT / "docs" / "api").glob("*.md")))
    assert not missing, f"no page of docs/api describes {', '.join(missing)}"


def test_a_name_without_a_place_is_noticed(tmp_path):
    page = tmp_path / "equilibrium.md"
    text = (ROOT / "docs" / "api" / "equilibrium.md").read_text()
    page.write_text(text.replace(".. autoclass:: wellposed.Broyden", ""))
    missing = undocumented([page])
    assert "wellposed.Broyden" in missing and "wellposed.Picard" not in missing


@pytest.mark.parametrize(
    "name", ["engine.experiment.Suite", "networks.nalu.NALU", "engine.training.training_runs"]
)
def test_a_name_of_the_lab_without_a_place_is_noticed(name, tmp_path):
    page = tmp_path / "lab.md"
    text = (ROOT / "docs" / "api" / "lab.md").read_text()
    page.write_text(re.sub(rf"\.\. auto\w+:: wellposed_lab\.{re.escape(name)}\n", "", text))
    missing = undocumented([page])
    assert f"wellposed_lab.{name}" in missing and "wellposed_lab.engine.store.Store" not in missing


def test_no_name_is_described_twice():
    found = documented(sorted((ROOT / "docs" / "api").glob("*.md")))
    plain = [name for name in found if name[0] not in ("wellposed.errors", "wellposed.compat.torchdeq")]
    assert len(plain) == len(set(plain))


def test_every_page_can_be_reached():
    listed = set()
    for page in PAGES:
        for block in FENCE.finditer(page.read_text()):
            if block["info"].strip() == "{toctree}":
                entries = [line for line in block["body"].splitlines() if line and not line.startswith(":")]
                listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert {page.resolve() for page in PAGES} - listed == {(ROOT / "docs" / "index.md").resolve()}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_paper_has_a_page_made_from_its_records(paper):
    text = (ROOT / "docs" / "papers" / f"{paper}.md").read_text()
    assert f"```{{paper}} {paper}\n```" in text and text.startswith(f"# {paper}: {PAPERS[paper]}")


def test_the_claims_of_the_guide_can_be_read(tmp_path):
    text = (ROOT / "docs" / "guides" / "experiments.md").read_text()
    (shown,) = (block["body"] for block in FENCE.finditer(text) if block["info"].strip() == "toml")
    (tmp_path / "claims.toml").write_text(shown)
    (claim,) = read_claims(tmp_path / "claims.toml")
    assert claim in load_claims()


@pytest.fixture
def docstrings():
    pytest.importorskip("docutils", reason="docutils is not installed: make docs installs it with sphinx")
    specification = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_defaults_in_signatures_are_names_or_dots(docstrings):
    before = "(x=1.0, loss=<function mse_loss>, kind=<class 'a.b.C'>, f=<function Suite.<lambda>>, d=<factory>)"
    assert docstrings.plain_defaults(before) == "(x=1.0, loss=mse_loss, kind=C, f=..., d=...)"


def test_bars_in_docstrings_are_no_substitutions(docstrings):
    before = ["Minimises |w| by ``a | b``.", ">>> print('|')", "|", "", "|x|"]
    after = [r"Minimises \|w\| by ``a | b``.", ">>> print('|')", "|", "", r"\|x\|"]
    assert docstrings.escape_bars(before) == after
