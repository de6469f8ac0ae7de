import itertools

import pytest
import torch
from wellposed_lab.tasks.mathematics import Addition, HardAddition, HardSubtraction, Identity, Subtraction

from wellposed.errors import InputError

TASKS = [
    kind(samples=40, test_samples=30) for kind in (Identity, Addition, Subtraction, HardAddition, HardSubtraction)
]


def splits(task, seed):
    tests = [task.test(seed, at) for at in task.points]
    return [task.train(seed), task.validation(seed), *tests]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_are_determined_by_the_seed_and_share_no_sample(task):
    drawn = splits(task, 3)
    for (u, y), (again, _) in zip(drawn, splits(task, 3), strict=True):
        assert torch.equal(u, again) and len(u) == len(y) and y.dim() == 2
    rows = [{tuple(row) for row in u.tolist()} for u, _ in (*drawn, *splits(task, 4))]
    assert all(not a & b for a, b in itertools.combinations(rows, 2))
    reordered = task.test(3, task.points[-1])  # without drawing the others first
    assert torch.equal(reordered[0], drawn[-1][0])


def test_distributions_are_those_of_the_papers():
    big = {"samples": 4000, "test_samples": 4000}
    for task, at, low, high in [
        (Identity(**big), 205.0, -205, 205),
        (Identity(**big), None, -10, 10),
        (Addition(**big), 100.0, -50, 50),
        (HardAddition(**big), None, 2, 5),
    ]:
        u, _ = task.test(0, at)
        assert low <= u.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < u.max() <= high
    assert Identity(**big).train(0)[0].abs().max() <= 5
    hard = HardSubtraction(**big).train(0)[0]
    assert hard.min() >= 1 and hard.max() <= 2 and hard.shape == (4000, 100)


@pytest.mark.parametrize("task", TASKS[1:], ids=lambda task: task.name)
def test_targets_are_the_operation(task):
    operation = task.operation(5)
    u, y = task.test(5, task.points[-1])
    (i, j), (k, m) = operation.first, operation.second
    sign = 1 if "addition" in task.name else -1
    expected = u[:, i : j + 1].double().sum(1) + sign * u[:, k : m + 1].double().sum(1)
    torch.testing.assert_close(y[:, 0].double(), expected, rtol=1e-4, atol=1e-2 * float(u.abs().max()))
    assert task.operation(6) != operation


def test_scores_and_bad_points():
    y = torch.tensor([[1.0], [3.0]])
    assert TASKS[0].score(y + 2, y) == {"test_mse": 4.0}
    with pytest.raises(InputError, match="tested at numbers"):
        TASKS[1].test(0, "far")
    with pytest.raises(InputError, match="one test distribution"):
        TASKS[3].test(0, 2.0)
