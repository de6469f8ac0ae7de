"""Prefix sums, mazes, matrix addition and the bump: targets by other means, splits, published files."""

import itertools
import operator
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from wellposed_lab.experiments.algorithms.tasks import (
    MatrixAddition,
    Mazes,
    PrefixSums,
    draw_mazes,
    load_mazes,
    load_prefix_sums,
)
from wellposed_lab.experiments.noise.regression import BumpRegression
from wellposed_lab.tasks.task import Task

from wellposed.data.cache import MissingDataError
from wellposed.errors import FileFormatError, InputError

TASKS: list[Task] = [
    PrefixSums(samples=40, test_samples=30),
    Mazes(samples=40, test_samples=30, points=(9, 13)),
    MatrixAddition(side=3, samples=40, test_samples=30),
    BumpRegression(samples=40, test_samples=30),
]


def parities(bits: list[int]) -> list[int]:
    return list(itertools.accumulate(bits, operator.xor))


def squares_on_path(u: Tensor) -> set[tuple[int, int]]:
    """Finds the way from the green to the red square breadth first."""
    free = {(int(y), int(x)) for y, x in u.amax(0).nonzero()}
    (start,) = {(y, x) for y, x in free if u[:, y, x].tolist() == [0, 1, 0]}
    (end,) = {(y, x) for y, x in free if u[:, y, x].tolist() == [1, 0, 0]}
    before: dict[tuple[int, int], tuple[int, int] | None] = {start: None}
    queue = deque([start])
    while queue:
        y, x = queue.popleft()
        for place in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            if place in free and place not in before:
                before[place] = (y, x)
                queue.append(place)
    assert set(before) == free, "all corridors hang together"
    path, here = set(), end
    while here is not None:
        path.add(here)
        here = before[here]  # type: ignore[assignment]
    return path


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_are_determined_by_the_seed_and_share_no_sample(task: Task) -> None:
    drawn = [task.train(3), task.validation(3), *(task.test(3, at) for at in task.points)]
    again = [task.train(3), task.validation(3), *(task.test(3, at) for at in task.points)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(drawn, again, strict=True))
    rows = [{tuple(row) for row in u.flatten(1).tolist()} for u, _ in (*drawn, task.train(4))]
    wide = [one for one in rows if len(next(iter(one))) != 16]  # strings of 16 bits may meet by chance
    assert all(not a & b for a, b in itertools.combinations(wide, 2))


@pytest.mark.parametrize("length", [16, 512])
def test_prefix_sums_are_what_xor_accumulates(length: int) -> None:
    u, y = PrefixSums(test_samples=5).test(1, length)
    assert u.shape == y.shape == (5, 1, length) and set(u.unique().tolist()) == {-1.0, 1.0}
    for bits, sums in zip(((u[:, 0] + 1) / 2).int().tolist(), y[:, 0].int().tolist(), strict=True):
        assert sums == parities(bits)


@pytest.mark.parametrize("size", [3, 9, 21])
def test_mazes_are_trees_and_their_paths_those_of_a_search(size: int) -> None:
    cells = (size + 1) // 2
    images, paths = draw_mazes(6, size, torch.Generator().manual_seed(size))
    assert images.shape == (6, 3, size + 2, size + 2)
    for u, path in zip(images, paths, strict=True):
        assert int(u.amax(0).sum()) == 2 * cells**2 - 1  # cells, and one door for each but the first
        assert {(int(y), int(x)) for y, x in path.nonzero()} == squares_on_path(u)


def test_mazes_differ_and_their_ends_are_everywhere() -> None:
    images, _ = draw_mazes(400, 5, torch.Generator().manual_seed(0))
    walls = {tuple(u.amax(0).flatten().tolist()) for u in images}
    assert len(walls) > 60
    for first, second in ((0, 1), (1, 0)):  # red is the end, green the start
        ends = ((images[:, first] > 0) & (images[:, second] == 0)).sum(0)
        assert bool((ends[1::2, 1::2] > 20).all()) and int(ends.sum()) == 400


def test_published_form_of_a_maze() -> None:
    (u, y), (fine, path) = (Mazes(samples=3, pixels=pixels).train(0) for pixels in (2, 1))
    assert u.shape == (3, 3, 24, 24) and y.shape == (3, 1, 24, 24)
    assert torch.equal(u[..., 1:-1:2, 1:-1:2], fine) and torch.equal(u[..., 2:-1:2, 2:-1:2], fine)
    assert torch.equal(y[..., 1:-1:2, 2:-1:2], path)
    assert float(u[..., :3, :].sum() + u[..., -3:].sum()) == 0  # an outer wall of three pixels


def test_scores_of_decisions() -> None:
    target = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]])
    logits = torch.tensor([[[3.0, -1.0]], [[-1.0, 2.0]]])
    assert PrefixSums().score(logits, target) == {"accuracy": 0.75, "solved": 0.5}
    assert Mazes().score(logits, target)["without_path"] == 0.25
    assert float(Mazes.loss(logits, target)) == pytest.approx(
        float(torch.log(1 + torch.exp(torch.tensor([-3.0, -1.0, 1.0, -2.0]))).mean())
    )


def test_sums_and_scales() -> None:
    task = MatrixAddition(side=4, test_samples=200)
    u, y = task.test(0, 500.0)
    torch.testing.assert_close(y, u.reshape(200, 2, 16).sum(1))
    assert 490 < float(u.abs().max()) <= 500 and float(u.min()) < -490
    scores = task.score(torch.zeros_like(y), y)
    assert scores["relative_mse"] == 1.0 and scores["test_mse"] == pytest.approx(float(y.square().mean()))


def test_the_bump() -> None:
    u, y = BumpRegression(samples=500).train(0)
    assert float(u.min()) < -0.97 and float(u.max()) > 0.97
    expected = [2 * np.exp(-8 * value**2) - 1 for value in u[:, 0].tolist()]
    torch.testing.assert_close(y[:, 0], torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefixSums(length=0),
        lambda: PrefixSums(source="bought"),  # type: ignore[arg-type]
        lambda: Mazes(size=8),
        lambda: Mazes(pixels=0),
        lambda: Mazes(source="published", pixels=1),
        lambda: MatrixAddition(side=0),
        lambda: BumpRegression(width=0.0),
        lambda: MatrixAddition().test(0, -1.0),
        lambda: BumpRegression().test(0, 3.0),
        lambda: Mazes().test(0, "large"),
        lambda: load_mazes(9, "holdout", "."),
    ],
)
def test_impossible_settings(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="received"):
        make()


def test_published_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "prefix_sums_data" / "len_4"
    place.mkdir(parents=True)
    bits = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]])
    sums = torch.tensor([parities(row) for row in bits.tolist()])
    torch.save(bits.float(), place / "4_data.pth")
    torch.save(sums, place / "4_targets.pth")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    task = PrefixSums(length=4, samples=2, test_samples=1, source="published")
    assert torch.equal(task.train(0)[0][:, 0], 2.0 * bits[:2] - 1) and torch.equal(
        task.train(9)[1][:, 0], sums[:2]
    )
    assert torch.equal(task.test(0, 4)[1][:, 0], sums[2:].float())  # not those of the training
    with pytest.raises(MissingDataError, match=r"8_data\.pth.*generated"):
        task.test(0, 8)
    torch.save(bits[:, :3].float(), place / "4_data.pth")
    with pytest.raises(FileFormatError, match=r"shape \(N, 4\)"):
        load_prefix_sums(4)
    torch.save(bits + 1, place / "4_data.pth")
    with pytest.raises(FileFormatError, match="zeros and ones"):
        load_prefix_sums(4)


class Trap:
    """Leaves a trace if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (self.path,)


def test_published_mazes_and_refused_pickles(tmp_path: Path) -> None:
    u, y = Mazes(samples=2).train(0)
    place = tmp_path / "maze_data_test_9"
    place.mkdir()
    np.save(place / "inputs.npy", u.numpy().astype(np.float64))
    with pytest.raises(MissingDataError, match=r"solutions\.npy"):
        load_mazes(9, folder=tmp_path)
    np.save(place / "solutions.npy", y[:, 0].numpy())
    images, paths = load_mazes(9, folder=tmp_path)
    assert torch.equal(images, u) and torch.equal(paths, y[:, 0])
    np.save(place / "solutions.npy", y[:1, 0].numpy())
    with pytest.raises(FileFormatError, match=r"\(2, 3, 24, 24\) and \(1, 24, 24\)"):
        load_mazes(9, folder=tmp_path)
    touched = tmp_path / "touched"
    np.save(place / "solutions.npy", np.array([Trap(touched)], dtype=object), allow_pickle=True)
    with pytest.raises(FileFormatError, match=r"no \.npy file of numbers"):
        load_mazes(9, folder=tmp_path)
    strings = tmp_path / "prefix_sums_data" / "len_4"
    strings.mkdir(parents=True)
    torch.save(Trap(touched), strings / "4_data.pth")
    with pytest.raises(FileFormatError, match="no tensor"):
        load_prefix_sums(4, tmp_path)
    assert not touched.exists()


def test_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    with pytest.raises(MissingDataError, match="set WELLPOSED_DATA"):
        Mazes(source="published").train(0)
