"""20 Newsgroups: order, splits and headers, whether from an archive or from scikit-learn's cache."""

import codecs
import pickle

import pooch
import pytest
import torch
from data_files import put, tar
from wellposed_lab.experiments.sparsify.texts import Texts, load_newsgroups

from wellposed.data import files
from wellposed.data.cache import ChecksumError, MissingDataError
from wellposed.errors import FileFormatError, InputError, UnknownNameError

POSTS = {
    "20news-bydate-train/sci.space/100": "From: a\nSubject: orbit\n\nUp.\n\nMore.",
    "20news-bydate-train/sci.space/99": "From: b\n\nDown \xe9",
    "20news-bydate-train/alt.atheism/7": "no header",
    "20news-bydate-test/sci.space/101": "From: c\n\nLater",
    "20news-bydate-test/alt.atheism/8": "From: d\n\nLater too",
}
ARCHIVE = tar({name: text.encode("latin-1") for name, text in POSTS.items()} | {"README": b"x"}, "w:xz")
TRAIN = ["no header", "From: b\n\nDown \xe9", "From: a\nSubject: orbit\n\nUp.\n\nMore."]


@pytest.fixture
def archive(bare, monkeypatch):
    file = put(bare, "20newsgroups/20news-bydate.tar.xz", ARCHIVE)
    monkeypatch.setattr(files, "NEWSGROUPS", (files.NEWSGROUPS[0], file))
    return bare / file.path


@pytest.fixture
def cached(bare, tmp_path):
    """What scikit-learn keeps, shuffled as it does."""
    utils = pytest.importorskip("sklearn.utils")
    content = {}
    for split in ("train", "test"):
        posts = {name: text for name, text in POSTS.items() if name.split("/")[0].endswith(split)}
        names = sorted(posts, reverse=True)
        groups = ["alt.atheism", "sci.space"]
        content[split] = utils.Bunch(
            data=[posts[name] for name in names],
            filenames=[f"/home/someone/{name}" for name in names],
            target=[groups.index(name.split("/")[1]) for name in names],
            target_names=groups,
        )
    (tmp_path / "sklearn").mkdir()
    packed = codecs.encode(pickle.dumps(content), "zlib_codec")
    (tmp_path / "sklearn" / "20news-bydate_py3.pkz").write_bytes(packed)


def test_archive_is_sorted_by_group_and_number(archive):
    train, test = load_newsgroups(), load_newsgroups("test")
    assert train.texts == TRAIN
    assert train.labels.tolist() == [0, 1, 1] and train.labels.dtype == torch.int64
    assert test.texts == ["From: d\n\nLater too", "From: c\n\nLater"] and test.labels.tolist() == [0, 1]
    assert train.classes == test.classes == ("alt.atheism", "sci.space")
    assert train.source == "20newsgroups train: 20newsgroups/20news-bydate.tar.xz"


def test_headers_can_be_left_out(archive):
    assert load_newsgroups(headers=False).texts == ["", "Down \xe9", "Up.\n\nMore."]


def test_scikit_learn_s_cache_gives_the_same(cached):
    train = load_newsgroups()
    assert train.texts == TRAIN and train.labels.tolist() == [0, 1, 1]
    assert train.classes == ("alt.atheism", "sci.space")
    assert train.source == "20newsgroups train: the cache of scikit-learn"
    assert len(load_newsgroups("test")) == 2


def test_scikit_learn_s_cache_comes_before_a_download(cached, monkeypatch):
    monkeypatch.delenv("WELLPOSED_OFFLINE")
    monkeypatch.setattr(pooch, "retrieve", lambda *args, **options: pytest.fail("tried to download"))
    assert len(load_newsgroups()) == 3


def test_the_archive_comes_first(cached, archive):
    assert load_newsgroups().source.endswith(".tar.xz")


def test_a_damaged_archive_is_an_error(cached, archive):
    archive.write_bytes(ARCHIVE[:-8])
    with pytest.raises(ChecksumError, match=r"20news-bydate\.tar\.xz"):
        load_newsgroups()


def test_nothing_is_here(bare):
    with pytest.raises(MissingDataError, match="fetch_20newsgroups") as caught:
        load_newsgroups()
    assert str(bare / "20newsgroups/20news-bydate.tar.gz") in str(caught.value)
    assert "https://ndownloader.figshare.com/files/5975967" in str(caught.value)


@pytest.mark.parametrize("member", ["20news-bydate-train/../etc/1", "20news-bydate-train/a/b/1", "other/a/1"])
def test_an_archive_of_something_else(bare, monkeypatch, member):
    file = put(bare, "20newsgroups/20news-bydate.tar.gz", tar({member: b"x"}))
    monkeypatch.setattr(files, "NEWSGROUPS", (file,))
    with pytest.raises(FileFormatError, match="holds no posts"):
        load_newsgroups()


def test_unknown_split():
    with pytest.raises(UnknownNameError, match="valid: test, train"):
        load_newsgroups("all")


def test_subsets_are_nested_and_seeded():
    texts = Texts([str(number) for number in range(100)], torch.arange(100), ("x",) * 100, "all")
    small, large = texts.subset(10, seed=1), texts.subset(30, seed=1)
    assert large.texts[:10] == small.texts and len(set(large.texts)) == 30
    assert [int(text) for text in large.texts] == large.labels.tolist()
    assert small.texts != texts.subset(10, seed=2).texts
    for count in (0, 101):
        with pytest.raises(InputError, match="from 1 to 100"):
            texts.subset(count)


@pytest.mark.parametrize("labels", [torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_texts_check_their_labels(labels):
    with pytest.raises(InputError, match=r"int64 \(2,\)"):
        Texts(["a", "b"], labels, ("x",), "")
