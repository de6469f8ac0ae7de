"""The network that a command is given: an exported program, or what a factory returns."""

import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from torch import nn
from torch.export import ExportedProgram

from wellposed.cli.exported import check_exported
from wellposed.errors import FileFormatError

Network = nn.Module | ExportedProgram


def read_source(source: str) -> Network:
    """Returns the network that ``model.pt2``, ``package.module:factory`` or ``path/to/file.py:factory`` names.

    A factory is a module, an exported program, or a function or class that makes one without arguments. The
    current folder can be imported from.
    """
    if source.endswith((".pt2", ".pt", ".pth")) or Path(source).is_file():
        return _exported(Path(source))
    module, colon, name = source.rpartition(":")
    if not colon or not module or not name:
        raise _wrong(f"{source!r} is neither an exported program (.pt2) nor module:factory")
    home = _file(Path(module)) if module.endswith(".py") else _module(module)
    found = _attribute(home, module, name)
    if callable(found) and not isinstance(found, nn.Module):
        found = _called(found, source)
    if not isinstance(found, nn.Module | ExportedProgram):
        raise _wrong(f"{source!r} gives {type(found).__name__}; it must give a torch.nn.Module")
    return found


def _exported(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise _wrong(f"there is no file {str(path)!r}")
    if path.suffix != ".pt2":
        raise _wrong(
            f"{str(path)!r} is not an exported program; write one with torch.export.save(torch.export.export("
            f"model, (u,)), 'model.pt2'), or give module:factory"
        )
    try:
        check_exported(path)
    except FileFormatError as error:
        raise click.ClickException(f"{str(path)!r} is not loaded: {error}") from error
    try:
        program: ExportedProgram = torch.export.load(path)
    except Exception as error:
        raise click.ClickException(f"{str(path)!r} cannot be read by torch.export.load: {_line(error)}") from error
    return program


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _wrong(f"there is no file {str(path)!r}")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise _wrong(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise click.ClickException(f"{str(path)!r} fails on import: {_line(error)}") from error
    return module


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(f"{name}:")
    except ValueError as error:
        raise _wrong(f"{name!r} is not the name of a module: {error}") from error
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise _wrong(f"there is no module {missing!r}; the current folder was searched too") from error
        raise click.ClickException(f"{name!r} needs the module {missing!r}, which is not installed") from error
    except Exception as error:
        raise click.ClickException(f"{name!r} fails on import: {_line(error)}") from error


def _attribute(home: Any, module: str, name: str) -> Any:
    found = home
    for part in name.split("."):
        if not hasattr(found, part):
            offered = [key for key in vars(home) if not key.startswith("_") and callable(getattr(home, key))]
            raise _wrong(f"{module!r} has no {name!r}; it offers {', '.join(sorted(offered)[:12]) or 'nothing'}")
        found = getattr(found, part)
    return found


def _called(factory: Any, source: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise click.ClickException(f"{source!r} called without arguments fails: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Returns the first line of an error with its type."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="SOURCE")
