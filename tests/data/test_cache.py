"""Where files are looked for, that no wrong file is ever used, and what a download may and may not do."""

import contextlib
import hashlib
import http.server
import os
import threading

import pooch
import pytest
from data_files import put

from wellposed.data import cache
from wellposed.data.cache import ChecksumError, DataFile, MissingDataError, fetch
from wellposed.errors import InputError, MissingExtraError, WellposedError

SCHEMES = cache.SCHEMES
CONTENT = b"the right bytes " * 5000
RIGHT = DataFile("set/part.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), ("https://example.invalid/a",))


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b", ""])
def test_a_path_stays_below_the_data_folder(path):
    with pytest.raises(InputError, match="below the data folder"):
        DataFile(path, "0" * 64)


@pytest.mark.parametrize("sha256", ["", "0" * 63, "G" * 64, "A" * 64])
def test_a_checksum_is_64_digits(sha256):
    with pytest.raises(InputError, match="64 lower-case"):
        DataFile("a", sha256)


def test_data_folder_comes_before_cache_and_cache_before_others(bare, tmp_path):
    places = [bare, tmp_path / "cache", tmp_path / "also"]
    for place in places:
        put(place, RIGHT.path, CONTENT)
    for place in places:
        assert fetch("set", [[RIGHT]], "", also=[tmp_path / "also"]) == (0, [place / RIGHT.path])
        (place / RIGHT.path).unlink()
    with pytest.raises(MissingDataError):
        fetch("set", [[RIGHT]], "", also=[tmp_path / "also"])


def test_first_complete_variant_is_taken(bare):
    other = [put(bare, "set/x", b"x"), put(bare, "set/y", b"y")]
    absent = DataFile("set/absent", "0" * 64)
    assert fetch("set", [[other[0], absent], other, [other[1]]], "") == (1, [bare / "set/x", bare / "set/y"])


@pytest.mark.parametrize(
    "damaged",
    [CONTENT[:-1], CONTENT[:100], b"", CONTENT[:50] + b"\x00" + CONTENT[51:], CONTENT + b"\n"],
    ids=["one byte short", "truncated", "empty", "one byte flipped", "one byte more"],
)
@pytest.mark.parametrize("place", ["data", "cache"])
def test_a_wrong_file_is_an_error_that_tells_what_to_do(bare, tmp_path, damaged, place):
    put(tmp_path / place, RIGHT.path, damaged)
    if place == "data":  # a good copy elsewhere must not hide it
        put(tmp_path / "cache", RIGHT.path, CONTENT)
    with pytest.raises(ChecksumError) as caught:
        fetch("set", [[RIGHT], [put(bare, "other", b"x")]], "")
    message = str(caught.value)
    assert str(tmp_path / place / RIGHT.path) in message
    assert f"expected sha256 {RIGHT.sha256}, received {hashlib.sha256(damaged).hexdigest()}" in message
    assert "delete it" in message and "https://example.invalid/a" in message
    assert (f"({len(damaged)} bytes instead of {len(CONTENT)})" in message) == (len(damaged) != len(CONTENT))


def test_checksum_costs_once_and_sees_every_change(bare, monkeypatch):
    calls, original = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: calls.append(args) or original(*args))
    file = put(bare, "set/once", b"abc")
    for _ in range(3):
        fetch("set", [[file]], "")
    assert len(calls) == 1
    before = (bare / "set/once").stat()
    (bare / "set/once").write_bytes(b"abd")
    os.utime(bare / "set/once", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ChecksumError):
        fetch("set", [[file]], "")
    assert len(calls) == 2


def test_a_changed_copy_with_the_old_date_is_seen(bare):
    file = put(bare, "set/dated", b"abc")
    fetch("set", [[file]], "")
    before, copy = (bare / "set/dated").stat(), bare / "set/copy"
    copy.write_bytes(b"abd")
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(bare / "set/dated")
    with pytest.raises(ChecksumError):
        fetch("set", [[file]], "")


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_offline_never_downloads_and_tells_three_ways(bare, monkeypatch, value):
    monkeypatch.setenv("WELLPOSED_OFFLINE", value)
    monkeypatch.setattr(pooch, "retrieve", lambda *args, **options: pytest.fail("tried to download"))
    with pytest.raises(MissingDataError) as caught:
        fetch("the set", [[RIGHT]], "apt install the-set")
    message = str(caught.value)
    assert "'the set'" in message
    assert f"1. by hand: WELLPOSED_DATA is set: put the file at {bare / RIGHT.path}" in message
    assert "2. by download from https://example.invalid/a: forbidden here by WELLPOSED_OFFLINE" in message
    assert "3. without a connection: apt install the-set" in message
    assert isinstance(caught.value, WellposedError) and isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_offline_can_be_switched_off(bare, monkeypatch, value):
    monkeypatch.setenv("WELLPOSED_OFFLINE", value)
    assert not cache.offline()


def test_message_without_a_data_folder(bare, monkeypatch):
    monkeypatch.delenv("WELLPOSED_DATA")
    with pytest.raises(MissingDataError, match=r"set WELLPOSED_DATA to .* at \$WELLPOSED_DATA/set/part\.bin"):
        fetch("set", [[RIGHT]], "")


def test_without_pooch_the_data_folder_works_and_the_message_names_the_extra(bare, monkeypatch):
    def absent(package, extra):
        raise MissingExtraError(f"{package} is not installed; pip install 'wellposed[{extra}]'")

    monkeypatch.setattr(cache, "require", absent)
    monkeypatch.delenv("WELLPOSED_CACHE")
    monkeypatch.delenv("WELLPOSED_OFFLINE")
    with pytest.raises(MissingDataError, match=r"pooch is not installed; pip install 'wellposed\[data\]'"):
        fetch("set", [[RIGHT]], "")
    put(bare, RIGHT.path, CONTENT)
    assert fetch("set", [[RIGHT]], "") == (0, [bare / RIGHT.path])


def test_cache_folder_is_the_platform_s_unless_set(bare, tmp_path, monkeypatch):
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("WELLPOSED_CACHE")
    assert cache.cache_folder() == pooch.os_cache("wellposed")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the last part of the path and remembers what was asked."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.encodings.append(self.headers["Accept-Encoding"])
        body = {"/right": CONTENT, "/wrong": b"-" * len(CONTENT), "/cut": CONTENT[:100]}.get(self.path)
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while len(self.server.asked) == 1:
                    self.wfile.write(CONTENT)
            return
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(CONTENT) if body else 0))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(bare, monkeypatch):
    monkeypatch.delenv("WELLPOSED_OFFLINE")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(cache, "SCHEMES", ("http",))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads, running.asked, running.encodings = True, [], []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.asked.append("stop")
        running.shutdown()
        thread.join()


def offered(server, *names) -> DataFile:
    urls = tuple(f"http://127.0.0.1:{server.server_port}/{name}" for name in names)
    return DataFile(RIGHT.path, RIGHT.sha256, RIGHT.size, urls)


def left_behind(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_download_goes_to_the_cache_and_happens_once(server, tmp_path):
    file = offered(server, "right")
    for _ in range(2):
        assert fetch("set", [[file]], "") == (0, [tmp_path / "cache" / RIGHT.path])
    assert (tmp_path / "cache" / RIGHT.path).read_bytes() == CONTENT
    assert left_behind(tmp_path) == [tmp_path / "cache" / RIGHT.path]
    assert server.asked == ["/right"]
    assert server.encodings == ["identity"]


def test_only_the_absent_files_are_downloaded(server, bare, tmp_path):
    here = put(bare, "set/here", b"here")
    variants = [[here, offered(server, "right")], [DataFile("other", "0" * 64)]]
    assert fetch("set", variants, "") == (0, [bare / "set/here", tmp_path / "cache" / RIGHT.path])


@pytest.mark.parametrize("bad", ["absent", "wrong", "cut"])
def test_mirrors_are_tried_in_turn(server, tmp_path, bad):
    fetch("set", [[offered(server, bad, "right", "never")]], "")
    assert server.asked == [f"/{bad}", "/right"]
    assert left_behind(tmp_path) == [tmp_path / "cache" / RIGHT.path]


def test_failure_of_all_mirrors_is_told_and_leaves_nothing(server, tmp_path):
    with pytest.raises(MissingDataError) as caught:
        fetch("set", [[offered(server, "absent", "wrong", "cut")]], "ask a friend")
    message = str(caught.value)
    assert "/absent failed: 404" in message
    assert "/wrong failed: SHA256 hash" in message
    assert "/cut failed" in message
    assert "ask a friend" in message
    assert not left_behind(tmp_path)


def test_a_server_that_sends_too_much_is_stopped(server, tmp_path):
    with pytest.raises(MissingDataError, match=f"more than the {len(CONTENT)} bytes"):
        fetch("set", [[offered(server, "endless")]], "")
    assert not left_behind(tmp_path)


def test_plain_http_is_refused(server, monkeypatch):
    monkeypatch.setattr(cache, "SCHEMES", SCHEMES)
    with pytest.raises(MissingDataError, match="only https addresses are used"):
        fetch("set", [[offered(server, "right")]], "")
    assert server.asked == []


def test_a_file_without_an_address_says_so(bare, monkeypatch):
    monkeypatch.delenv("WELLPOSED_OFFLINE")
    with pytest.raises(MissingDataError, match="no address"):
        fetch("set", [[DataFile("a", "0" * 64)]], "")
