"""Distributions of nothing but entry points, to be put on the path."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

GROUP = "wellposed.commands"


def declared_commands() -> dict[str, str]:
    """The commands of the lab as pyproject.toml declares them."""
    project = tomllib.loads((Path(__file__).parents[1] / "lab" / "pyproject.toml").read_text())["project"]
    return project["entry-points"][GROUP]


def write_distribution(folder: Path, name: str, commands: Mapping[str, str]) -> Path:
    """Writes what an installer would write for a package that adds these commands."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = (f"{command} = {value}\n" for command, value in commands.items())
    (info / "entry_points.txt").write_text("".join([f"[{GROUP}]\n", *points]))
    return folder
