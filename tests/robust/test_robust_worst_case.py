import pytest
import torch
from robust_cases import F64, corners, looped, mlp, points

from wellposed.convert import to_implicit
from wellposed.errors import InputError, UnknownNameError
from wellposed.forms import ImplicitForm
from wellposed.robust import Bounds, Box, certified, certified_accuracy, worst_case_loss
from wellposed.robust.bounds import margin_loss, squared_error


def some_bounds():
    lower = torch.randn(3, 4, dtype=F64)
    return Bounds(lower, lower + torch.rand(3, 4, dtype=F64), "box", torch.zeros(3, 4))


def test_losses_over_a_box_are_attained_at_a_corner():
    bounds, target, labels = some_bounds(), torch.randn(3, 4, dtype=F64), torch.tensor([1, 0, 3])
    margins = bounds.upper - bounds.lower.gather(1, labels[:, None])
    found = squared_error(bounds, target), margin_loss(margins, labels)
    for b in range(3):
        every = corners(bounds.lower[b], bounds.upper[b])
        squares = (every - target[b]).square().sum(1).max()
        entropy = torch.nn.functional.cross_entropy(every, labels[b].expand(16), reduction="none").max()
        torch.testing.assert_close(found[0][b], squares, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1][b], entropy, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["box", "interval", "crown"])
def test_no_point_has_a_larger_loss(method):
    form, labels = looped(10), torch.tensor([0, 1, 2])
    box = Box.around(torch.rand(3, 4, dtype=F64), 0.1)
    tried = points(form, box, 50)
    target = torch.randn(3, 3, dtype=F64)
    squares = worst_case_loss(form, box, target, "squared_error", method)
    margins = worst_case_loss(form, box, labels, method=method)
    over_box = worst_case_loss(form, box, labels, "cross_entropy_box", method)
    for u in tried:
        y = form(u)
        entropy = torch.nn.functional.cross_entropy(y, labels, reduction="none")
        assert ((y - target).square().sum(1) <= squares + 1e-7).all()
        assert (entropy <= margins + 1e-7).all()
    assert (margins <= over_box + 1e-9).all() and (margins < 0.99 * over_box).any()


def test_certified_samples_keep_their_class():
    network = mlp((4, 10, 3))
    u = torch.rand(60, 4, dtype=F64)
    labels = network(u).argmax(1)
    counts = []
    for eps in (0.0, 0.03, 0.1, 0.4):
        box = Box.around(u, eps)
        proven = certified(network, box, labels)
        counts.append(int(proven.sum()))
        assert certified_accuracy(network, box, labels) == pytest.approx(counts[-1] / 60)
        for v in points(to_implicit(network, (4,)), box, 40):
            assert (network(v).argmax(1) == labels)[proven].all()
    assert counts[0] == 60 and counts == sorted(counts, reverse=True) and counts[0] > counts[2] > 0
    wrong = (labels + 1) % 3
    assert not certified(network, Box(u, u), wrong).any()


def test_certified_training_lowers_the_worst_case():
    torch.manual_seed(1)
    A = (0.3 * torch.randn(6, 6, dtype=F64) / 6).requires_grad_()
    B, C = (torch.randn(s, dtype=F64).requires_grad_() for s in ((6, 4), (3, 6)))
    u, labels = torch.rand(8, 4, dtype=F64), torch.arange(8) % 3
    optimiser = torch.optim.Adam([A, B, C], 0.05)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = worst_case_loss(ImplicitForm(A, B, C), Box.around(u, 0.05), labels).mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_bad_losses():
    form, box = looped(5), Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    with pytest.raises(UnknownNameError, match="unknown loss"):
        worst_case_loss(form, box, torch.tensor([0, 1]), "hinge")
    with pytest.raises(InputError, match="targets of the outputs' shape"):
        worst_case_loss(form, box, torch.tensor([0, 1]), "squared_error")
    with pytest.raises(InputError, match="classes are"):
        certified(form, box, torch.tensor([0, 7]))
