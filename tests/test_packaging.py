"""A wheel and an sdist are built, and the wheel is installed where only the core dependencies are."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import wellposed

ROOT = Path(__file__).parents[1]
CORE = ("torch", "numpy", "networkx", "safetensors", "click", "rich")

CHECK = """
import importlib.util, warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import wellposed as wp
    from wellposed import *
    import torch
    model = wp.ImplicitModel(3, 2, 8)
    model(torch.zeros(4, 3)).sum().backward()
    assert model.certificate().holds
assert importlib.util.find_spec("sklearn") is None, "the environment has more than the core"
try:
    wp.ImplicitRegressor
except ImportError as error:
    assert "wellposed[sklearn]" in str(error), error
else:
    raise AssertionError("an estimator without scikit-learn")
print(wp.__file__)
"""


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist."""
    hatchling = pytest.importorskip(
        "hatchling", reason="hatchling, which builds the distributions, is not installed"
    )
    assert hatchling
    target = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-d", target, cwd=ROOT)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_has_all_of_the_package(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert "wellposed/py.typed" in names
    sources = {f"wellposed/{p.relative_to(ROOT / 'src/wellposed')}" for p in ROOT.glob("src/wellposed/**/*.py")}
    assert sources <= names
    assert not [name for name in names if name.split("/")[0] not in ("wellposed",) and ".dist-info/" not in name]
    assert not [name for name in names if ("claims" in name and name.endswith(".toml")) or "resnet" in name]
    assert built[0].stat().st_size < 1 << 20


@pytest.mark.slow
def test_sdist_has_sources_tests_and_licence(built):
    with tarfile.open(built[1]) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/wellposed/py.typed", "tests/test_packaging.py"} <= names


def _dependencies(names: tuple[str, ...]) -> set[str]:
    """The installed distributions that these need, with those that they need, and so on."""
    needed, left = set(), list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in needed:
            continue
        needed.add(name)
        for line in metadata.requires(name) or ():
            requirement = pytest.importorskip("packaging.requirements").Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted:
                left.append(requirement.name)
    return needed


def _link(distribution: metadata.Distribution, target: Path) -> None:
    """Makes an installed distribution visible in another environment without a second copy of it."""
    for place in {
        file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
    }:
        if not (target / place).exists():
            (target / place).symlink_to(Path(str(distribution.locate_file(place))))


def _install(wheel: Path, target: Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--target")
    _run(sys.executable, "-m", "pip", "install", *options, target, wheel, cwd=target)


@pytest.mark.slow
def test_wheel_works_with_the_core_dependencies_alone(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for name in _dependencies(CORE):
        _link(metadata.distribution(name), site)
    _install(built[0], site)
    found = _run(python, "-c", CHECK, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(tmp_path)


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_is_the_same(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist", cwd=source)
    (again,) = (tmp_path / "dist").glob("*.whl")
    names, others = (sorted(zipfile.ZipFile(wheel).namelist()) for wheel in (built[0], again))
    assert names == others


@pytest.mark.slow
def test_metadata_says_what_is_supported(built):
    wheel = zipfile.ZipFile(built[0])
    (place,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(place).decode()
    assert "Requires-Python: >=3.11\n" in text and "Requires-Dist: torch>=2.11\n" in text
    classifiers = (
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Typing :: Typed",
    )
    assert all(f"Classifier: {name}\n" in text for name in classifiers)
    core = [line for line in text.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert sorted(re.split(r"\W", line.removeprefix("Requires-Dist: "))[0] for line in core) == sorted(CORE)
    assert len(re.findall(r"^Provides-Extra: ", text, re.M)) <= 8


@pytest.mark.slow
def test_wheel_is_installed_by_pip_in_a_clean_environment(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    command = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    offered = subprocess.run([*command, "--dry-run", "--no-deps", "click"], capture_output=True, check=False)
    if offered.returncode != 0:
        pytest.skip("no package index can be reached")
    _run(*command, built[0], cwd=tmp_path)
    found = _run(python, "-W", "error", "-c", CHECK, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(tmp_path)
    assert "demo" in _run(tmp_path / "env" / "bin" / "wellposed", "--help", cwd=tmp_path)
    assert "No broken requirements" in _run(python, "-m", "pip", "check", cwd=tmp_path)


@pytest.mark.slow
def test_command_line_starts(built, tmp_path):
    _install(built[0], tmp_path)
    program = "from wellposed.cli import main; main()"
    text = _run(sys.executable, "-c", program, "--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "demo" in text


def test_one_version_everywhere():
    changes = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]["version"]
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert [wellposed.__version__] == [lab] == cited == changes[:1]


@pytest.mark.slow
def test_no_link_of_the_description_is_relative(built):
    wheel = zipfile.ZipFile(built[0])
    (place,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    head, _, description = wheel.read(place).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head and "## Install" in description
    assert not re.findall(r"\]\((?!https?://)", description)


@pytest.mark.slow
def test_the_lab_is_built_and_asks_for_this_library(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling, which builds the distributions, is not installed")
    _run(sys.executable, "-m", "hatchling", "build", "-d", tmp_path, cwd=ROOT / "lab")
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (place,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(place).decode()
    assert f"Version: {wellposed.__version__}\n" in text
    assert re.search(r"Requires-Dist: wellposed\[[^\]]*\]>=0\.2\b", text)
    assert "](../" not in text
