"""The lock file has every pinned package, with hashes."""

import re
from pathlib import Path

from lock_file import merged, normal, read_lock, text

ROOT = Path(__file__).parents[1]


def test_every_pinned_package_is_locked():
    """If this fails after a change of constraints.txt, run: make lock."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(m[1]): m[2] for line in lines if (m := re.match(r"([\w.-]+)==([\w.]+)", line))}
    locked = read_lock(ROOT / "requirements.lock")
    assert {name: version for name, (version, _) in locked.items()} == pinned
    assert all(hashes for _, hashes in locked.values())


def test_hashes_of_other_platforms_stay_until_the_version_changes(tmp_path):
    old, new = (
        {"a": ("1.0", {"0" * 64}), "b": ("1", {"1" * 64})},
        {"a": ("1.0", {"2" * 64}), "b": ("2", {"3" * 64})},
    )
    found = merged(old, new)
    assert found == {"a": ("1.0", {"0" * 64, "2" * 64}), "b": ("2", {"3" * 64})}
    (tmp_path / "lock").write_text(text(found))
    assert read_lock(tmp_path / "lock") == found
