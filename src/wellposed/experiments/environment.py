"""Where a run was carried out."""

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "numba")


def environment(device: str) -> dict[str, Any]:
    """Returns versions, commit, device and threads."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "wellposed": sys.modules["wellposed"].__version__,
        **{package: _version(package) for package in PACKAGES},
        "commit": commit(),
        "device": _device(device),
        "threads": torch.get_num_threads(),
    }


def now() -> str:
    """Returns the time in UTC to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"


@functools.cache
def commit() -> str | None:
    """Returns the commit of a checkout, with + if files have changed since; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
