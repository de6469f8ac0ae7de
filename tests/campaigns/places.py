"""Places that do not let work be saved, clocks that go back, and runs that meet in a folder; part of `faults`."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from wellposed_lab.engine import runner
from works import WORKS, Tell, Work, finish, lost, results, silent, start

from wellposed.errors import WellposedError

NOBODY, PAGE = 65534, 4096
Prepare = Callable[[Path], object]


def ended(work: Work, folder: Path, prepare: Prepare, tell: Tell = silent) -> tuple[str, str]:
    """Runs work in a process that `prepare` has spoiled; returns its result and the error that stopped it."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare(folder)
            said = f"done\0{work(folder, tell)}"
        except (WellposedError, OSError) as error:
            said = f"error\0{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"error\0Unexpected {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(send, said.encode()[:4000])
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        kind, _, text = pipe.read().decode().partition("\0")
    finish([child])
    return (text, "") if kind == "done" else ("", text or "Unexpected end")


def clear(error: str) -> bool:
    """Says whether an error is of a kind that is meant for the user and names a file or folder."""
    return "Error: " in error and not error.startswith("Unexpected") and "/" in error


def short(error: str, folder: Path) -> str:
    """Returns the first line of an error, without the name of a folder that no longer is."""
    return error.split("\n")[0].replace(str(folder), "FOLDER")[:300]


def fill(size: int, folder: Path) -> None:
    """Lets no file of this process grow beyond a size, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def lock_folder(folder: Path) -> None:
    """Takes the right to write away, from the superuser too."""
    os.chmod(folder, 0o555)
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def turn_back(folder: Path) -> None:
    """Lets the clock run backwards, and what it wrote into a record."""
    now = [2e9]

    def earlier() -> float:
        now[0] -= 3600
        return now[0]

    time.time, time.time_ns = earlier, lambda: int(1e9 * earlier())
    runner.now = lambda: time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(earlier()))


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[tuple[Path, Prepare, Callable[[], None]]]:
    """Yields a folder on a disk of its own, what to do in its processes, and what makes the disk large.

    Without the right to make such a disk, files of a process cannot grow beyond the size instead.
    """
    with tempfile.TemporaryDirectory() as mount:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "wellposed", mount]
        if not mountable():
            yield Path(mount) / "folder", partial(fill, size), lambda: None
            return
        subprocess.run(command, check=True, capture_output=True)
        try:
            larger = ["mount", "-o", "remount,size=64m", mount]
            yield Path(mount) / "folder", lambda folder: None, lambda: bool(subprocess.run(larger, check=True))
        finally:
            subprocess.run(["umount", mount], check=True)


def mountable() -> bool:
    """Says whether this process may make a disk in memory."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as mount:
        command = ["mount", "-t", "tmpfs", "-o", "size=4k", "wellposed", mount]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        return subprocess.run(["umount", mount], check=False).returncode == 0


def undisturbed(work: Work) -> tuple[str, int]:
    """Returns the result of work, and the bytes it leaves."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "folder"
        result, error = ended(work, folder, lambda folder: None)
        assert result, error
        return result, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_disk(name: str, count: int, generator: random.Random) -> dict[str, Any]:
    """Lets disks of random sizes become full, then makes room: the work must go on to the same result."""
    work = WORKS[name]
    expected, size = undisturbed(work)
    wrong, gone, stops, said = 0, 0, 0, ""
    for _ in range(count):
        with small_disk(PAGE * (1 + generator.randrange(size // PAGE + 6))) as (folder, prepare, enlarge):
            log = Path(tempfile.mkstemp()[1])
            with open(log, "a", buffering=1) as told:
                result, error = ended(work, folder, prepare, partial(print, file=told))
            stops, said = stops + bool(error), short(error, folder) or said
            gone += lost(work, folder, log)
            enlarge()
            again, _ = ended(work, folder, lambda folder: None)
            wrong += again != expected or (not clear(error) if error else result != expected)
            log.unlink()
    how = "tmpfs" if mountable() else "limit of file sizes"
    return {"fault": f"full disk ({how}), {name}", "times": count, "other result": wrong, "lost": gone,
            "stopped": stops, "outcome": said}  # fmt: skip


def read_only(name: str) -> dict[str, Any]:
    """Works in a folder that cannot be written to."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        folder = Path(scratch) / "folder"
        folder.mkdir()
        result, error = ended(WORKS[name], folder, lock_folder)
        os.chmod(folder, 0o755)
        wrong = bool(result) or not clear(error) or any(folder.iterdir())
    return {"fault": f"read-only folder, {name}", "times": 1, "other result": int(wrong), "lost": 0,
            "stopped": int(bool(error)), "outcome": short(error, folder)}  # fmt: skip


def backwards(name: str) -> dict[str, Any]:
    """Works while the clock goes back, and reads it once more."""
    expected, _ = undisturbed(WORKS[name])
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = [ended(WORKS[name], Path(scratch) / "folder", turn_back) for _ in range(2)]
    wrong = any(result != expected for result, _ in outcomes)
    return {"fault": f"clock backwards, {name}", "times": 2, "other result": int(wrong), "lost": 0,
            "outcome": "; ".join(error for _, error in outcomes if error) or "same numbers"}  # fmt: skip


def together(name: str, count: int, writers: int = 2) -> dict[str, Any]:
    """Lets runs meet in a folder from the beginning to the end; all must come to the same result."""
    work, wrong, gone = WORKS[name], 0, 0
    expected, _ = undisturbed(work)
    for _ in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            folder, log = Path(scratch) / "folder", Path(scratch) / "log"
            codes = finish([start(work, folder, log) for _ in range(writers)])
            wrong += any(codes) or results(log) != [expected] * writers
            gone += lost(work, folder, log, writers)
    return {"fault": f"{writers} runs in one folder, {name}", "times": count, "other result": wrong, "lost": gone}


def places(count: int) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
    """Lists full disks, folders without the right to write, clocks that go back, runs that meet."""
    faults: dict[str, Callable[[random.Random], dict[str, Any]]] = {}
    for name in WORKS:
        faults[f"full disk, {name}"] = partial(full_disk, name, count)
        faults[f"read-only folder, {name}"] = partial(_without, read_only, name)
        faults[f"clock backwards, {name}"] = partial(_without, backwards, name)
        faults[f"two runs in one folder, {name}"] = partial(_without, together, name, count)
    return faults


def _without(trial: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Tries what needs no random numbers."""
    *given, _ = arguments
    return trial(*given)
