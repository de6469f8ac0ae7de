"""Files that are never half written: what stays, what is left behind and what is said."""

import errno
import os
from pathlib import Path

import pytest

from wellposed.atomic import atomic_write


def fail(target, content, error):
    with atomic_write(target) as place:
        place.write_text(content)
        raise error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EFBIG])
def test_a_write_that_fails_names_the_file_and_keeps_the_old_one(code, tmp_path):
    target = tmp_path / "run.ckpt"
    target.write_text("old")
    with pytest.raises(OSError, match=r"run\.ckpt could not be written.*make room") as caught:
        fail(target, "ne", OSError(code, os.strerror(code)))
    assert caught.value.errno == code and os.strerror(code) in str(caught.value)
    assert isinstance(caught.value, PermissionError) == (code == errno.EACCES)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "a", "x", ZeroDivisionError())
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"^speaks for itself$"):
        fail(tmp_path / "a", "x", OSError("speaks for itself"))


def test_a_temporary_file_that_cannot_be_removed_hides_nothing(tmp_path, monkeypatch):
    def refuse(self, missing_ok=False):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="the first one"):
        fail(tmp_path / "a", "x", OSError("the first one"))
