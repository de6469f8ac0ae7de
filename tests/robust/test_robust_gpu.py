"""Bounds, sensitivities and attacks on a CUDA device against the CPU; run with -m gpu."""

import pytest
import torch
from robust_cases import F64, FORMS, exact, looped, mlp

from wellposed.convert import to_implicit
from wellposed.robust import (
    Ball,
    Box,
    Crown,
    MethodError,
    SparseBox,
    certified_accuracy,
    lipschitz,
    margin_bounds,
    output_bounds,
    sensitivity,
    state_bounds,
    worst_case_loss,
)
from wellposed.robust.attacks import fgsm, pgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
METHODS = ["norm", "box", "interval", "l2", Crown(1), Crown(3), Crown(1, slope_steps=3)]


def answers(form, inputs, method, target):
    """All three kinds of bounds, or why there are none."""
    try:
        return (
            output_bounds(form, inputs, method),
            state_bounds(form, inputs, method),
            margin_bounds(form, inputs, target, method),
        )
    except MethodError as error:
        return str(error)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_bounds_are_those_of_the_cpu(name, method):
    form = FORMS[name]()
    u, target = torch.rand(6, form.sizes[1], dtype=F64), torch.arange(6) % form.sizes[2]
    here = answers(form, Box.around(u, 0.05), method, target)
    there = answers(form.to("cuda"), Box.around(u.cuda(), 0.05), method, target.cuda())
    if isinstance(here, str):
        assert here == there
        return
    for mine, theirs in zip(there, here, strict=True):
        assert mine.lower.is_cuda and mine.slack.is_cuda and mine.method == theirs.method
        scale = 1 + theirs.upper.abs().max() + theirs.lower.abs().max()
        tolerance = (
            1e-3 if isinstance(method, Crown) and "loop" in name else 1e-6
        )  # where nu is iterated in float32
        for one, other in ((mine.lower, theirs.lower), (mine.upper, theirs.upper)):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=float(tolerance * scale))


@pytest.mark.parametrize("name", FORMS)
def test_no_point_of_a_set_leaves_a_bound_in_single_precision(name):
    form = FORMS[name]().to(torch.float32)
    u = torch.rand(4, form.sizes[1])
    there = form.to("cuda")
    for inputs in (Box.around(u, 0.1), SparseBox(u, 0.3, 2, lower=0.0, upper=1.0), Ball(u, 0.2)):
        tried = inputs.sample(20)
        x, y = exact(form, tried.flatten(0, 1))
        for method in METHODS[:5] if isinstance(inputs, Box) else ["box", "interval"]:
            try:
                bounds = output_bounds(there, inputs.to("cuda"), method)
            except MethodError:
                continue
            assert bounds.contains(y.view(20, 4, -1).cuda(), 1e-7).all(), method
            states = state_bounds(there, inputs.to("cuda"), method)
            assert states.contains(x.view(20, 4, -1).cuda(), 1e-7).all(), method


@pytest.mark.parametrize("name", ["pooling network", "averaging network"])
def test_single_precision_bounds_of_convolutions_hold_where_tensor_cores_would_round(name):
    form = FORMS[name]().to(torch.float32)
    u = torch.rand(50, form.sizes[1])
    _, y = exact(form, u)
    for method in ("interval", Crown(1)):
        bounds = output_bounds(form.to("cuda"), Box(u.cuda(), u.cuda()), method)
        assert bounds.contains(y.cuda()).all() and bounds.width.max() < 1e-3


def test_sensitivities_and_constants():
    for form in (looped(12), to_implicit(mlp(), (4,))):
        torch.testing.assert_close(sensitivity(form.to("cuda")).cpu(), sensitivity(form))
        for norm in ("inf", "2"):
            try:
                here = lipschitz(form, norm)
            except MethodError:
                continue
            assert lipschitz(form.to("cuda"), norm) == pytest.approx(here, rel=1e-6)


def test_worst_cases_and_certified_accuracy():
    form = to_implicit(mlp(), (4,))
    u, target = torch.rand(40, 4, dtype=F64), torch.arange(40) % 3
    here, there = Box.around(u, 0.02), Box.around(u.cuda(), 0.02)
    shared = certified_accuracy(form, here, target)
    assert certified_accuracy(form.to("cuda"), there, target.cuda()) == pytest.approx(shared, abs=1e-9)
    torch.testing.assert_close(
        worst_case_loss(form.to("cuda"), there, target.cuda(), "cross_entropy").cpu(),
        worst_case_loss(form, here, target, "cross_entropy"),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("attack", [fgsm, pgd])
def test_attacks_are_those_of_the_cpu(attack):
    form = looped(30, p=10, q=4)
    u, target = torch.rand(32, 10, dtype=F64), torch.arange(32) % 4
    here, there = attack(form, u, target, 0.1), attack(form.to("cuda"), u.cuda(), target.cuda(), 0.1)
    assert there.inputs.is_cuda and there.success.cpu().equal(here.success)
    torch.testing.assert_close(there.inputs.cpu(), here.inputs, rtol=0, atol=1e-3)
    bounds = output_bounds(form.to("cuda"), Box.around(u.cuda(), 0.1), "interval")
    assert bounds.contains(form.to("cuda")(there.inputs), 1e-9).all()
