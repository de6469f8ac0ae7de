"""Archives: only ordinary files that were asked for, never more than allowed, nothing on the disk."""

import tarfile

import pytest
from data_files import tar, tar_with_declared_size

from wellposed.data.files import read_members
from wellposed.errors import FileFormatError

MEMBERS = {"a/one": b"1" * 1000, "a/two": b"22", "../outside": b"3"}


def read(tmp_path, data, wanted=lambda name: True, max_bytes=10**6):
    (tmp_path / "archive").write_bytes(data)
    return dict(read_members(tmp_path / "archive", wanted, max_bytes))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_members_come_into_memory_only(tmp_path, mode):
    assert read(tmp_path, tar(MEMBERS, mode)) == MEMBERS
    assert read(tmp_path, tar(MEMBERS, mode), lambda name: name.endswith("two")) == {"a/two": b"22"}
    assert [path.name for path in tmp_path.rglob("*")] == ["archive"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "a/one"
    data = tar(MEMBERS | {"link": info})
    with pytest.raises(FileFormatError, match=r"'link' .* is no ordinary file"):
        read(tmp_path, data)
    assert read(tmp_path, data, lambda name: name != "link") == MEMBERS


def test_folders_are_passed_over(tmp_path):
    info = tarfile.TarInfo("a")
    info.type = tarfile.DIRTYPE
    assert read(tmp_path, tar({"a": info} | MEMBERS)) == MEMBERS


def test_limit_counts_all_members_that_are_read(tmp_path):
    assert len(read(tmp_path, tar(MEMBERS), max_bytes=1003)) == 3
    with pytest.raises(FileFormatError, match="limit of 1002 bytes"):
        read(tmp_path, tar(MEMBERS), max_bytes=1002)
    assert read(tmp_path, tar(MEMBERS), lambda name: name == "a/two", max_bytes=2) == {"a/two": b"22"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive at all" * 100,
        tar({"a": bytes(range(256)) * 40})[:-30],
        tar({"a": bytes(range(256)) * 40}, "w:xz")[:-30],
        tar({"a": bytes(range(256)) * 40}, "w")[:2000],
        tar_with_declared_size("a", 10**5),
    ],
    ids=["empty", "other", "gzip cut off", "xz cut off", "tar cut off", "too little data"],
)
def test_damaged(tmp_path, data):
    with pytest.raises(FileFormatError, match="damaged or not a tar archive"):
        read(tmp_path, data)


def test_a_declared_size_is_refused_unread(tmp_path):
    with pytest.raises(FileFormatError, match="limit of 1000000 bytes"):
        read(tmp_path, tar_with_declared_size("a", 10**12))


def test_an_absent_file_is_no_format_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_members(tmp_path / "absent", lambda name: True, 1))
