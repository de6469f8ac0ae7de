import pytest
import torch
from robust_cases import F64, corners, sparse_corners

from wellposed.errors import InputError
from wellposed.robust import Ball, Box, ConvexSet, SparseBox


def test_support_of_a_box_is_attained_at_a_corner():
    lower, upper = -torch.rand(3, 4, dtype=F64), torch.rand(3, 4, dtype=F64)
    functionals = torch.randn(5, 4, dtype=F64)
    expected = torch.stack([(corners(a, b) @ functionals.mT).amax(0) for a, b in zip(lower, upper, strict=True)])
    torch.testing.assert_close(Box(lower, upper).support(functionals), expected)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_support_of_few_changes_is_that_of_all_of_them(k):
    center = torch.rand(2, 5, dtype=F64)
    few = SparseBox(center, 0.6, k, lower=0.0, upper=1.0)
    box = Box.around(center, 0.6)
    functionals = torch.randn(2, 7, 5, dtype=F64)
    for b in range(2):
        every = sparse_corners(center[b], box.lower[b], box.upper[b], k) if k else center[b : b + 1]
        torch.testing.assert_close(few.support(functionals)[b], (functionals[b] @ every.mT).amax(1))


def test_support_of_a_ball_is_its_radius_times_the_norm():
    ball = Ball(torch.zeros(1, 3, dtype=F64), 2.0)
    torch.testing.assert_close(
        ball.support(torch.tensor([[2.0, 1.0, 2.0]], dtype=F64)), torch.tensor([[6.0]], dtype=F64)
    )


def test_rows_of_a_convex_set_find_their_samples():
    box = Box(-torch.ones(3, 2, dtype=F64), torch.ones(3, 2, dtype=F64))
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    shape = ConvexSet(lambda lam: scale[:, None] * lam.abs().amax(-1), box)
    rows, sample = torch.randn(6, 2, dtype=F64), torch.tensor([2, 0, 2, 1, 0, 2])
    torch.testing.assert_close(shape.support_rows(rows, sample), scale[sample] * rows.abs().amax(1))


@pytest.mark.parametrize("make", [
    lambda u: Box.around(u, torch.tensor([0.1, 0.0, 0.3])),
    lambda u: SparseBox(u, 0.4, 2, 0.0, 1.0),
    lambda u: Ball(u, torch.tensor([0.1, 0.5])),
    lambda u: ConvexSet(Ball(u, 0.3).support, Ball(u, 0.3).box(), u),
])  # fmt: skip
def test_samples_lie_in_the_set_and_reach_its_ends(make):
    inputs = make(torch.rand(2, 3, dtype=F64))
    drawn = inputs.sample(400)
    functionals = torch.randn(8, 3, dtype=F64)
    reached = (drawn @ functionals.mT).amax(0)
    support = inputs.support(functionals)
    base = inputs.center @ functionals.mT
    assert (reached <= support + 1e-9).all()
    assert (reached >= base + 0.6 * (support - base) - 1e-9).all()
    box = inputs.box()
    assert ((drawn >= box.lower - 1e-12) & (drawn <= box.upper + 1e-12)).all()


def test_conversion_keeps_the_set():
    u = torch.rand(2, 1, 3)
    for inputs in (Box.around(u, 0.1), SparseBox(u, 0.4, 2, 0.0, 1.0), Ball(u, 0.2)):
        wide = inputs.to(F64)
        assert wide.dtype == F64 and wide.sample_shape == (1, 3) and len(wide) == 2
        rows = torch.randn(4, 3)
        torch.testing.assert_close(wide.support(rows.double()).float(), inputs.support(rows))


ONE, NAN = torch.ones(1, 2), torch.full((1, 2), torch.nan)
BAD = {
    "lower <= upper": lambda: Box(ONE, 0 * ONE),
    "NaN": lambda: Box(NAN, ONE),
    "one shape and type": lambda: Box(torch.zeros(1, 3), ONE),
    "not negative; received -0.1": lambda: Box.around(ONE, -0.1),
    "finite and not negative": lambda: Box.around(ONE, torch.nan),
    "one a feature": lambda: Box.around(ONE, torch.ones(5)),
    "lie in the range": lambda: Box.around(3 * ONE, 0.1),
    "floating-point tensor": lambda: Box.around(torch.ones(2), 0.1),
    "k counts entries": lambda: SparseBox(ONE, 0.1, 3),
    "must lie in the range": lambda: SparseBox(1.05 * ONE, 0.1, 1, 0.0, 1.0),
    "one a sample": lambda: Ball(ONE, torch.ones(3)),
    "functionals have the shape": lambda: Box(0 * ONE, ONE).support(torch.ones(1, 3)),
    "must return finite values": lambda: ConvexSet(lambda lam: lam, Box(0 * ONE, ONE)).support(torch.ones(1, 2)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_sets_say_what_is_wrong(message):
    with pytest.raises(InputError, match=message):
        BAD[message]()
