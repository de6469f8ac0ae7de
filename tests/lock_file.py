"""Writes requirements.lock from what `pip lock` found: every package with its version and hashes.

``python tests/lock_file.py pylock.all.toml requirements.lock``; `make lock` calls it. Hashes of the same version
that the file had before are kept, so that the files of several platforms add up.
"""

import re
import sys
import tomllib
from pathlib import Path

HEAD = """\
# Every package of constraints.txt with the hashes of its files, made by `make lock`. Install exactly these with
#   pip install --require-hashes --no-deps -r requirements.lock
# For torch both the file of PyPI and the smaller one for processors alone (2.13.0+cpu) are accepted.
"""
Locked = dict[str, tuple[str, set[str]]]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> Locked:
    """Returns version and hashes by name."""
    found: Locked = {}
    for line in path.read_text().replace("\\\n", " ").splitlines() if path.exists() else ():
        if match := re.match(r"([\w.-]+)==([\w.+]+) +(.*)", line):
            name, version, rest = match.groups()
            found[normal(name)] = version, set(re.findall(r"--hash=sha256:([0-9a-f]{64})", rest))
    return found


def read_pylock(path: Path) -> Locked:
    found: Locked = {}
    for package in tomllib.loads(path.read_text())["packages"]:
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
        version = package["version"].partition("+")[0]
        found[normal(package["name"])] = version, {file["hashes"]["sha256"] for file in files}
    return found


def merged(old: Locked, new: Locked) -> Locked:
    kept = {
        name: old[name][1] if old.get(name, ("",))[0] == version else set() for name, (version, _) in new.items()
    }
    return {name: (version, hashes | kept[name]) for name, (version, hashes) in new.items()}


def text(locked: Locked) -> str:
    lines = []
    for name, (version, hashes) in sorted(locked.items()):
        lines.append(
            " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])
        )
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(text(merged(read_lock(target), read_pylock(source))))
