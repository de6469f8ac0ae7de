import itertools
import math

import numpy as np
import pytest
import torch
from wellposed_lab.tasks.sequences import RollingArgmax, RollingAverage, Spiky, peaks, spans

from wellposed.errors import InputError

SERIES = Spiky(samples=1000, test_samples=500, regions=4)
TASKS = [RollingAverage(samples=40, test_samples=30), RollingArgmax(samples=40, test_samples=30), SERIES]


def splits(task, seed):
    # the point None is one of the others by another name
    points = [at for at in task.points if at is not None] or [None]
    return [task.train(seed), task.validation(seed), *(task.test(seed, at) for at in points)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_are_determined_by_the_seed_and_share_no_sample(task):
    drawn = splits(task, 3)
    for (u, y), (again, _) in zip(drawn, splits(task, 3), strict=True):
        assert torch.equal(u, again) and len(u) == len(y) and y.dim() == 2
    rows = [{tuple(row) for row in u.tolist()} for u, _ in (*drawn, *splits(task, 4))]
    assert all(not a & b for a, b in itertools.combinations(rows, 2))
    assert torch.equal(task.test(3, task.points[-1])[0], drawn[-1][0])  # without drawing the others first


def test_none_is_the_training_distribution():
    for task, same in ((TASKS[0], 0.0), (TASKS[1], 1.0)):
        assert torch.equal(task.test(0, None)[0], task.test(0, same)[0])


def test_the_rolling_average_and_its_shift():
    task = RollingAverage(samples=20_000, test_samples=20_000)
    u, y = task.test(1, 25.0)
    assert abs(float(u.mean()) - 28) < 0.01 and abs(float(u.std()) - 1) < 0.01
    assert abs(float(task.train(1)[0].mean()) - 3) < 0.01
    expected = np.stack([u[:100, : j + 1].double().numpy().mean(1) for j in range(10)], 1)
    np.testing.assert_allclose(y[:100].numpy(), expected, rtol=1e-6)


def test_the_average_is_scored_at_the_last_step():
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    scores = TASKS[0].score(y + torch.tensor([0.0, 2.0]), y)
    assert scores == {"test_mse": 4.0, "test_sequence_mse": 2.0, "mean_prediction": 5.0}


def test_the_rolling_argmax():
    task = RollingArgmax(samples=20_000, test_samples=20_000)
    u, y = task.test(2, 1e4)
    assert 0 <= u.min() < 1 and 9_999 < u.max() <= 1e4 and task.train(2)[0].max() <= 1
    assert [row.index(max(row)) for row in u[:200].tolist()] == y[:200].argmax(1).tolist()
    assert torch.equal(y.sum(1), torch.ones(20_000)) and y.unique().tolist() == [0, 1]
    assert abs(float(y.mean(0).max()) - 0.1) < 0.01  # labels are uniform


def test_the_argmax_is_a_classification():
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert float(RollingArgmax.loss(logits, y)) == pytest.approx(expected)
    assert TASKS[1].score(logits, y) == {"accuracy": 0.5}


def test_the_spiky_series_is_that_of_the_appendix():
    task = Spiky()
    for split, start, count, regions in (("train", 0, 7000, 20), ("test", 10_000, 3000, 9)):
        series = task.series(5, split)
        found = spans(series.spiky)
        assert sum(stop - start for start, stop in found) == 100 * regions
        assert not series.spiky[: task.window].any() and len(series.values) == count
        x = 0.01 * (start + np.arange(count))
        wild = 5 * (np.sin(2 * x) + np.sin(23 * x) + np.sin(78 * x) + np.sin(100 * x))
        marks, values = series.spiky.numpy(), series.values.double().numpy()
        slope, offset = np.polyfit(wild[marks], values[marks], 1)
        np.testing.assert_allclose(slope * wild[marks] + offset, values[marks], atol=1e-5)
        noise = (values[~marks] - offset) / slope - np.sin(x[~marks])
        assert abs(noise.std() - 0.25) < 0.02 and abs(noise.mean()) < 0.02
    training = task.series(5, "train").values
    assert (training.min(), training.max()) == (0, 1)


def test_windows_are_followed_by_their_target():
    u, y = SERIES.train(0)
    values = SERIES.series(0, "train").values
    assert len(u) == 990
    for index in (0, 17, 989):
        assert torch.equal(u[index], values[index : index + 10]) and y[index, 0] == values[index + 10]


def test_errors_of_the_spikes():
    _, y = SERIES.test(0)
    spiky = SERIES.series(0, "test").spiky[10:]
    exact = SERIES.details(y, y, 0, None)
    assert set(exact.values()) == {0.0}
    late = SERIES.details(torch.cat([y[:1], y[:-1]]), y, 0, None)
    assert 0.8 < late["spike_location_error"] <= 1.1 and late["spike_magnitude_error"] > 0.02
    small = torch.where(spiky[:, None], y.median() + 0.6 * (y - y.median()), y)
    lower = SERIES.details(small, y, 0, None)
    assert lower["calm_mse"] == 0 and lower["spike_magnitude_error"] > 0.05
    wrong = y.clone()
    wrong[spiky] += 0.1
    assert SERIES.details(wrong, y, 0, None)["spike_mse"] == pytest.approx(0.01, rel=1e-4)
    assert SERIES.details(torch.full_like(y, 0.5), y, 0, None)["spike_location_error"] == 100


def test_peaks_and_spans():
    values = torch.tensor([5.0, 1.0, 3.0, 3.0, 1.0, 2.0])
    assert peaks(values, 0.0).tolist() == [0, 2, 5]
    assert peaks(values, 2.5).tolist() == [0, 2]
    assert spans(torch.tensor([False, True, True, False, True])) == [(1, 3), (4, 5)]
    assert spans(torch.zeros(3, dtype=torch.bool)) == []


def test_the_picture_shows_a_region_with_calm_around_it():
    for seed in range(5):
        part = Spiky().excerpt(seed)
        spiky = Spiky().series(seed, "test").spiky[10:][part]
        assert len(spiky) == 160 and spiky[30:130].all() and not spiky[29]


def test_what_cannot_be_made_is_refused():
    with pytest.raises(InputError, match="do not fit"):
        Spiky(samples=300, regions=3).train(0)
    with pytest.raises(InputError, match="one test distribution"):
        SERIES.test(0, 2.0)
    with pytest.raises(InputError, match="tested at numbers"):
        TASKS[0].test(0, "far")
