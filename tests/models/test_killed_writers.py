"""Writers that die before any of their steps: what they leave is all old or all new, with no proof of another."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import wellposed as wp
from wellposed.atomic import NEW, atomic_write_folder, atomic_write_with_proof, read_folder
from wellposed.checker import RefusedError, check
from wellposed.convex import open_states, record_states, save_states
from wellposed.errors import FileFormatError, IllPosedError
from wellposed.models.io.storage import ReferenceModel, store_reference

FILE = "m.safetensors"
STEPS = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "open"})
CARD = ReferenceModel("m", "A model.", "none", {}, "inf", 1, "none")


def model(seed):
    torch.manual_seed(seed)
    return wp.ImplicitModel(2, 1, 3 + seed)


def states(seed):
    return record_states(model(seed), [torch.ones(4 + seed, 2)])


WRITERS = {
    "file": (lambda place, k: wp.save(model(k), place / FILE), lambda place: wp.load(place / FILE)),
    "file, proven": (
        lambda place, k: wp.save(model(k), place / FILE, certificate=True),
        lambda place: wp.load(place / FILE),
    ),
    "folder": (lambda place, k: wp.models.save_pretrained(model(k), place), wp.models.from_pretrained),
    "folder, proven": (
        lambda place, k: wp.models.save_pretrained(model(k), place, certificate=True),
        wp.models.from_pretrained,
    ),
    "reference": (
        lambda place, k: store_reference(model(k), CARD, place),
        lambda place: wp.models.from_pretrained(place / "m"),
    ),
    "states": (lambda place, k: save_states(states(k), place), open_states),
}


def size(loaded):
    """Tells the two versions apart."""
    return loaded.X.shape[0] - 4 if hasattr(loaded, "X") else loaded.state_features - 3


def dies(work, step):
    """Runs work in a process that ends without a word before a step; False if it came to its end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            count = [0]

            def look(event, args):
                if event in STEPS and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                    count[0] += 1
                    if count[0] == step:
                        os._exit(7)

            sys.addaudithook(look)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 7)
    return code == 7


def proven(place):
    """Lists the model files whose certificates hold."""
    found = []
    for path in sorted(place.rglob("*.safetensors")):
        try:
            check(path)
            found.append(path)
        except (RefusedError, OSError):
            pass
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_dies_at_any_step_leaves_the_old_or_the_new(name, tmp_path):
    write, read = WRITERS[name]
    (tmp_path / "old").mkdir()
    write(tmp_path / "old", 0)
    seen, step = [], 0
    while True:
        step, place = step + 1, tmp_path / f"step{step}"
        shutil.copytree(tmp_path / "old", place)
        died = dies(lambda place=place: write(place, 1), step)
        seen.append(size(read(place)))
        files = [path for path in proven(place) if NEW not in str(path.parent)]
        for path in files:  # the file that is proven is the model that is loaded
            loaded = wp.load(path) if name.startswith("file") else wp.models.from_pretrained(path.parent)
            assert size(loaded) == seen[-1]
        write(place, 1)  # goes on after what was left
        assert size(read(place)) == 1 and not list(place.rglob(NEW))
        assert bool(proven(place)) == name.endswith("proven")
        if not died:
            break
    assert seen == sorted(seen) and {0, 1} == set(seen) and step >= 2


@pytest.mark.parametrize("name", [name for name in WRITERS if name.endswith("proven")])
def test_a_certificate_that_is_refused_leaves_the_model_alone(name, tmp_path, monkeypatch):
    write, read = WRITERS[name]
    write(tmp_path, 0)

    def refuse(*_):
        raise RefusedError("no")

    monkeypatch.setattr("wellposed.models.io.certificates.check", refuse)
    with pytest.raises(IllPosedError, match="refuses"):
        write(tmp_path, 1)
    assert size(read(tmp_path)) == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".cert" or path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_whole_stays(tmp_path):
    wp.models.save_pretrained(model(0), tmp_path, certificate=True)
    before = sorted(tmp_path.iterdir())

    def fill():
        with atomic_write_folder(tmp_path) as place:
            (place / "config.json").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="could not be written"):
        fill()
    assert sorted(tmp_path.iterdir()) == before and size(wp.models.from_pretrained(tmp_path)) == 0
    assert proven(tmp_path)


def test_a_proof_goes_with_the_file_that_it_is_of(tmp_path):
    (tmp_path / "a.cert").write_text("of the old one")
    with atomic_write_with_proof(tmp_path / "a", tmp_path / "a.cert") as (place, _):
        place.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_is_read_again_while_others_replace_it(tmp_path):
    def write(text):
        with atomic_write_folder(tmp_path) as place:
            for name in "ab":
                (place / name).write_text(text)

    write("0")
    left = ["1", "2"]

    def read(places):
        first = places["a"].read_text()
        if left:
            write(left.pop(0))
        if (second := places["b"].read_text()) != first:
            raise FileFormatError("two versions")
        return first + second

    assert read_folder(tmp_path, "ab", read) == "22"


def test_a_file_that_is_moved_to_its_place_while_it_is_read_is_found_there(tmp_path):
    (tmp_path / NEW).mkdir()
    (tmp_path / NEW / "a").write_text("new")

    def read(places):
        if (tmp_path / NEW / "a").exists():
            os.replace(tmp_path / NEW / "a", tmp_path / "a")
        return places["a"].read_text()

    assert read_folder(tmp_path, "a", read) == "new"


def test_a_newer_version_beside_a_proven_one_is_not_passed_over(tmp_path):
    """What is proven must be what is loaded."""
    wp.models.save_pretrained(model(0), tmp_path, certificate=True)
    wp.models.save_pretrained(model(1), tmp_path / NEW)
    assert size(wp.models.from_pretrained(tmp_path)) == 1
    with pytest.raises(RefusedError, match="newer model"):
        check(Path(tmp_path) / "model.safetensors")
