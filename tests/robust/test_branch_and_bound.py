"""Branch and bound against mixed-integer programs that share no code with it."""

import math

import pytest
import torch
from torch import nn

from tests.campaigns.complete import KINDS, instance
from tests.robust.robust_cases import F64, exact_maximum, looped, mlp
from tests.robust.test_continuation_enclosures import rotating
from wellposed.convert import to_implicit
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.robust import Ball, Box, MethodError, certification, certified
from wellposed.robust.certification import Forbidden, branch_and_bound, decide

MAKERS = {
    "loop": lambda: looped(6),
    "monotone": lambda: rotating(5, turn=0.3, bias=0.3),
    "layers": lambda: to_implicit(mlp((3, 5, 4, 2)), (3,)),
}


def largest_lead(form: ImplicitForm, box: Box, target: int) -> float:
    """The exact lead of the best other class."""
    C, D = form.C.to_dense().numpy(), form.D.to_dense().numpy()
    c = [0.0] * len(C) if form.output_bias is None else form.output_bias.tolist()
    rows = [row for row in range(len(C)) if row != target]
    return max(
        exact_maximum(form, box, C[row] - C[target], D[row] - D[target]) + c[row] - c[target] for row in rows
    )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("seed", "far"), [(0, certification.FAR), (1, certification.FAR), (0, 0.0), (2, 0.0)])
def test_every_sample_is_decided_as_the_exact_program_decides_it(kind, seed, far, monkeypatch):
    """Also with loops enclosed only as far as classes are kept, which else is the last resort."""
    monkeypatch.setattr(certification, "FAR", far)
    torch.manual_seed(seed)
    form = MAKERS[kind]()
    u = torch.rand(3, form.sizes[1], dtype=F64)
    box, target = Box.around(u, 0.2), form(u).argmax(1)
    verdicts = branch_and_bound(form, box, target, 20.0)
    for index, verdict in enumerate(verdicts):
        one = Box(box.lower[index : index + 1], box.upper[index : index + 1])
        lead = largest_lead(form, one, int(target[index]))
        if abs(lead) > 1e-5:
            assert verdict.status == ("proven" if lead < 0 else "counter-example")
            assert verdict.gap >= lead - 1e-6 if verdict.status == "proven" else verdict.gap <= lead + 1e-6
        if verdict.input is not None:
            assert ((verdict.input >= one.lower) & (verdict.input <= one.upper)).all()
            assert int(form(verdict.input).argmax()) != int(target[index])
    proven = certified(form, box, target)
    assert all(verdict.status == "proven" for verdict, held in zip(verdicts, proven, strict=True) if held)


def test_it_proves_what_linear_bounds_leave_open():
    torch.manual_seed(0)
    form = rotating(8, turn=1.0, bias=0.0)
    u = torch.rand(4, 3, dtype=F64)[2:3]
    box, target = Box.around(u, 0.2), form(u).argmax(1)
    (verdict,) = branch_and_bound(form, box, target, 30.0)
    assert not certified(form, box, target).any() and verdict.status == "proven" and verdict.nodes > 1


def test_a_loop_is_enclosed_as_far_as_the_class_is_kept(monkeypatch):
    torch.manual_seed(0)
    form = rotating(8, turn=1.0, bias=0.0)
    u = torch.rand(4, 3, dtype=F64)
    box, target = Box.around(u, 0.2), form(u).argmax(1)
    boxes, kept = [], certification._Search._kept

    def spied(self, root, z):
        boxes.append(kept(self, root, z))
        return boxes[-1]

    monkeypatch.setattr(certification._Search, "_kept", spied)
    branch_and_bound(form, box, target, 20.0)
    assert boxes and all(one is None for one in boxes), "these loops can be enclosed for all inputs"
    monkeypatch.setattr(certification, "FAR", 0.0)
    boxes.clear()
    verdicts = branch_and_bound(form, box, target, 20.0)
    assert all(one is not None for one in boxes) and all(one.status == "proven" for one in verdicts)


def test_parts_of_such_a_loop_are_told_apart_by_their_bounds(monkeypatch):
    """With the goal assumed to be negative as well, all bounds would be zero and no split better than others."""
    torch.manual_seed(0)
    form = rotating(8, turn=1.0, bias=0.0)
    u = torch.rand(4, 3, dtype=F64)[2:3]
    box, target = Box.around(u, 0.3), form(u).argmax(1)
    monkeypatch.setattr(certification, "FAR", 0.0)
    monkeypatch.setattr(certification, "ROUNDS", 1)
    parts, examined = [], certification._Search._examined

    def spied(*given):
        parts.extend(examined(*given))
        raise KeyboardInterrupt  # the first are enough

    monkeypatch.setattr(certification._Search, "_examined", spied)
    with pytest.raises(KeyboardInterrupt):
        branch_and_bound(form, box, target, 600.0)
    assert parts[0].bound > 0.1 and parts[0].scores.max() > 0.01


@pytest.mark.parametrize("first", [1e150, 1e200, 1e300])
@pytest.mark.parametrize("second", [1e108, 1e157, 1e158, 1e200])
def test_outputs_that_overflow_prove_nothing(first, second):
    """The second output is far larger than the first, which in float64 is infinity more than zero."""
    B, C = torch.tensor([[first]], dtype=F64), torch.tensor([[0.0], [second]], dtype=F64)
    form = ImplicitForm(torch.zeros(1, 1, dtype=F64), B, C)
    box = Box(torch.ones(1, 1, dtype=F64), 2 * torch.ones(1, 1, dtype=F64))
    rows = torch.tensor([[-1.0, 1.0], [1.0, 0.0]], dtype=F64)
    verdicts = branch_and_bound(form, box, torch.tensor([0]), 5.0)
    for count in (1, 2):
        verdicts.append(decide(form, [Forbidden(box, rows[:count], torch.zeros(count, dtype=F64))], 5.0))
    assert all(verdict.status != "proven" for verdict in verdicts)


@pytest.mark.parametrize("weight", [1e150, 1e200, 1e300])
def test_states_that_overflow_prove_nothing(weight):
    A, B = torch.zeros(3, 3, dtype=F64), torch.zeros(3, 1, dtype=F64)
    A[1, 2] = B[2, 0] = weight
    box = Box(torch.full((1, 1), -1.0, dtype=F64), torch.full((1, 1), 0.5, dtype=F64))
    (verdict,) = branch_and_bound(ImplicitForm(A, B, torch.eye(3, dtype=F64)), box, torch.tensor([2]), 5.0)
    assert verdict.status != "proven" and verdict.gap > 0


def test_time_that_is_over_leaves_a_gap():
    torch.manual_seed(1)
    form = looped(20, kappa=0.9)
    u = torch.rand(1, 4, dtype=F64)
    box, target = Box.around(u, 0.02), form(u).argmax(1)
    (verdict,) = branch_and_bound(form, Box.around(u, 0.5, None, None), 1 - target.clamp(max=1), 1e-9)
    assert verdict.status in ("counter-example", "undecided") and verdict.gap > -math.inf
    assert branch_and_bound(form, box, target, 20.0)[0].status == "proven"


def test_bad_input_is_refused():
    form = looped(4)
    box, target = Box.around(torch.rand(1, 4, dtype=F64), 0.1), torch.tensor([0])
    with pytest.raises(InputError, match="positive number of seconds; received 0"):
        branch_and_bound(form, box, target, 0)
    with pytest.raises(InputError, match="splits boxes; received a Ball"):
        branch_and_bound(form, Ball(torch.rand(1, 4, dtype=F64), 0.1), target)
    with pytest.raises(MethodError, match="tanh"):
        branch_and_bound(looped(4, "tanh"), box, target)
    with pytest.raises(InputError, match="classes are 0 to 2"):
        branch_and_bound(form, box, torch.tensor([5]))


# The last three were undecided while counter-examples had to be solved better than the form solves them.
@pytest.mark.parametrize(
    ("seed", "number"), [*((11, number) for number in range(len(KINDS))), (0, 2), (0, 5), (0, 15)]
)
def test_properties_are_decided_as_the_exact_program_decides_them(seed, number):
    """A sample of the campaign: sets of outputs of one to three inequalities."""
    *_, wrong = instance(seed, number)
    assert wrong == []


def test_rows_that_cannot_hold_together_are_proven_apart():
    """Each of two inequalities holds somewhere, never both: only the sum of them is negative."""
    form = ImplicitForm(torch.zeros(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64))
    box = Box(torch.tensor([[-1.0]], dtype=F64), torch.tensor([[1.0]], dtype=F64))
    rows, apart = torch.tensor([[1.0], [-1.0]], dtype=F64), torch.tensor([-0.5, 0.4], dtype=F64)
    assert decide(form, [Forbidden(box, rows, apart)]).status == "proven"
    assert decide(form, [Forbidden(box, rows, apart)], complete=False).status == "undecided"
    meeting = Forbidden(box, rows, torch.tensor([-0.5, 0.6], dtype=F64))
    verdict = decide(form, [meeting])
    assert verdict.status == "counter-example" and 0.5 <= verdict.input.item() <= 0.6


def test_one_class_is_kept():
    form, u = ImplicitForm(torch.zeros(2, 2), torch.ones(2, 1), torch.ones(1, 2)), torch.zeros(2, 1)
    verdicts = branch_and_bound(form, Box(u - 1, u + 1), torch.zeros(2, dtype=torch.int64))
    assert [verdict.status for verdict in verdicts] == ["proven", "proven"]


@pytest.mark.parametrize(("apart", "status"), [(-1e-3, "proven"), (1e-3, "counter-example")])
def test_networks_without_states_are_decided(apart, status):
    """Of two rows, each of which alone is nonnegative somewhere."""
    torch.manual_seed(0)
    network, box = nn.Linear(3, 2).double(), Box(torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=F64))
    rows, middle = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64), network(box.center).detach()[0, 0]
    forbidden = Forbidden(box, rows, torch.stack([apart - middle, apart + middle]))
    assert decide(network, [forbidden]).status == status
    empty = ImplicitForm(torch.zeros(0, 0), torch.zeros(0, 3), torch.zeros(0, 0))
    nothing = Forbidden(Box(torch.zeros(1, 3), torch.ones(1, 3)), torch.zeros(1, 0), torch.tensor([apart]))
    assert decide(empty, [nothing]).status == status


def test_properties_that_do_not_fit_are_refused():
    box = Box(torch.zeros(1, 4, dtype=F64), torch.ones(1, 4, dtype=F64))
    forbidden = Forbidden(box, torch.ones(1, 5, dtype=F64), torch.zeros(1, dtype=F64))
    with pytest.raises(InputError, match="the property has 5 outputs, the network 3"):
        decide(looped(4), [forbidden])
    with pytest.raises(InputError, match="finite numbers; received"):
        decide(looped(4), [Forbidden(box, torch.ones(1, 3, dtype=F64), torch.full((1,), math.nan, dtype=F64))])
    with pytest.raises(InputError, match="received -1"):
        decide(looped(4), [], budget=-1)
    assert decide(looped(4), []).status == "proven", "nothing is forbidden"
