"""Bounds by multipliers of triangle programs, and loops that only these enclose."""

import math
from dataclasses import replace

import pytest
import torch

from tests.robust.robust_cases import F64, looped
from tests.robust.test_continuation_enclosures import rotating
from wellposed.robust import Box, linear_programs
from wellposed.robust.boxes import solve_states
from wellposed.robust.crown import center_preactivations, enclosed
from wellposed.robust.linear_programs import (
    Objectives,
    Regions,
    Relaxation,
    ReluConstraints,
    continued_box,
    side_by_side,
    tightest_intervals,
)
from wellposed.robust.query import Query
from wellposed.robust.sets import Interval


def posed(form, u, eps):
    """A query about all outputs, and regions with the intervals that CROWN proves."""
    unit = torch.eye(form.sizes[2], dtype=F64)[None]
    query = Query(form, Box.around(u, eps, None, None), unit)
    enclosure = enclosed(query, 3, False)[0].enclosure
    objectives = Objectives.of(query, enclosure.states)
    z = side_by_side(enclosure.preactivations)
    constraints = ReluConstraints.of(form, "test")
    regions = Regions(constraints, query.set.box().interval.at(0), z, objectives.part([]))
    return query, objectives, regions


def values(form, u):
    """Outputs and pre-activations at many inputs."""
    x = solve_states(form, u, polish=True)
    y = form.C.apply(x) + form.D.apply(u)
    y = y if form.output_bias is None else y + form.output_bias
    return y, form.A.apply(x) + form.B.apply(u) + form.bias


@pytest.mark.parametrize("seed", range(3))
def test_any_multipliers_give_sound_bounds(seed):
    torch.manual_seed(seed)
    form = looped(8)
    query, objectives, regions = posed(form, torch.rand(1, form.sizes[1], dtype=F64), 0.3)
    y, _ = values(form, query.set.sample(400)[:, 0])
    region = torch.zeros(len(objectives), dtype=torch.int64)
    for scale in (0.0, 0.1, 1.0, 10.0):
        lam = scale * torch.randn(len(objectives), form.sizes[0], dtype=F64)
        bound = regions.bounds(objectives, region, lam, lam.new_zeros(len(lam), 0))
        assert (y.amax(0) <= bound).all()


def test_conditions_hold_for_points_that_meet_them():
    torch.manual_seed(0)
    form = looped(8)
    query, objectives, regions = posed(form, torch.rand(1, form.sizes[1], dtype=F64), 0.5)
    y, z = values(form, query.set.sample(2000)[:, 0])
    least = float(y[:, 0].quantile(0.7))
    row = objectives.part([0])
    regions = replace(regions, conditions=replace(row, constant=row.constant - least))
    unit = torch.arange(form.sizes[0])
    region = torch.zeros_like(unit)
    upper, lower = regions.maximum(regions.units(region, unit), region.repeat(2), 60).bound.chunk(2)
    some = z[y[:, 0] >= least]
    assert len(some) > 100 and (some <= upper).all() and (some >= -lower).all()
    without = replace(regions, conditions=row.part([]))
    wide = without.maximum(without.units(region, unit), region.repeat(2), 60).bound.chunk(2)
    assert (upper + lower).sum() < 0.95 * (wide[0] + wide[1]).sum(), "the condition narrows the intervals"


def test_it_comes_near_the_linear_program():
    torch.manual_seed(1)
    form = looped(12, kappa=0.9)
    query, objectives, regions = posed(form, torch.rand(1, form.sizes[1], dtype=F64), 0.3)
    region = torch.zeros(len(objectives), dtype=torch.int64)
    first, many = (regions.maximum(objectives, region, steps).bound for steps in (0, 400))
    exact = []
    for row in range(len(objectives)):
        polyhedron = linear_programs.triangle_set(
            regions.constraints, Interval(*(regions.values(end[0]) for end in regions.z)), regions.z.at(0),
            query.set, 0,
        )  # fmt: skip
        exact.append(objectives.maximum(polyhedron, 0, row, 1, query))
    exact = torch.tensor(exact, dtype=F64)
    size = 1 + exact.abs().max()
    assert (many >= exact - 1e-7 * size).all() and (many <= exact + 1e-3 * size).all()
    assert (first > exact + 1e-2 * size).any(), "the first multipliers are not good enough to need no steps"


def test_a_search_goes_on_where_it_ended():
    """The points are what it needs: multipliers alone are no better after a few steps from points anew."""
    torch.manual_seed(1)
    form = looped(12, kappa=0.9)
    _, objectives, regions = posed(form, torch.rand(1, form.sizes[1], dtype=F64), 0.3)
    region = torch.zeros(len(objectives), dtype=torch.int64)
    first, many = (regions.maximum(objectives, region, steps) for steps in (20, 400))
    on = anew = first
    for _ in range(12):
        on = regions.maximum(objectives, region, 5, on.start)
        anew = regions.maximum(objectives, region, 5, (*anew.start[:2], first.point))
    gained, possible = first.bound - on.bound, first.bound - many.bound
    assert (gained >= 0).all() and gained.sum() > 0.9 * possible.sum() > 0
    assert gained.sum() > 1.2 * (first.bound - anew.bound).sum()


def test_pairs_are_projected_on_the_nearest_point_of_their_triangle():
    torch.manual_seed(0)
    low = torch.tensor([-1.0, -2.0, 0.5, -3.0, -1e-3], dtype=F64)  # open, open, on, off, nearly on
    high = torch.tensor([2.0, 0.5, 2.0, -1.0, 4.0], dtype=F64)
    most = high.clamp(min=1e-20), (-low).clamp(min=1e-20)
    project = linear_programs._Corners(low, high, most)
    z = low + torch.linspace(0, 1, 801, dtype=F64)[:, None] * (high - low)
    relu, chord = z.clamp(min=0), high.clamp(min=0) * (z - low) / (high - low)
    chord = torch.where((low < 0) & (high > 0), chord, relu)
    x = relu + torch.linspace(0, 1, 41, dtype=F64)[:, None, None] * (chord - relu)  # all of every triangle
    candidates = torch.stack([x, x - z]).flatten(1, 2)  # x and w
    sizes = torch.stack([torch.where(one > 1e-9, one, 1.0) for one in most])
    for _ in range(50):
        pair = 3 * torch.randn(2, 5, dtype=F64)
        nearest = torch.stack(project(*pair))
        best = ((candidates - pair[:, None]) / sizes[:, None]).square().sum(0).amin(0)
        mine = ((nearest - pair) / sizes).square().sum(0)
        assert (mine - best).abs().max() < 1e-2 * (1 + best.max())
        assert (((candidates - nearest[:, None]) / sizes[:, None]).square().sum(0).amin(0) < 1e-3).all()


def test_a_box_is_proven_only_if_its_image_is_inside(monkeypatch):
    """Breaking the comparison would prove a box around the center alone, which does not hold other equilibria."""
    torch.manual_seed(0)
    form = rotating(6, turn=1.0, bias=0.3)
    query, _, regions = posed(form, torch.rand(1, form.sizes[1], dtype=F64), 0.3)
    center = side_by_side(center_preactivations(query))
    n = form.sizes[0]
    known = Interval(torch.full((n,), -1e3, dtype=F64), torch.full((n,), 1e3, dtype=F64))
    looping = torch.ones(n, dtype=torch.bool)
    box = continued_box(regions.constraints, regions.inputs, known, center.at(0), looping, query)
    assert box is not None and (box.width < 100).all()
    _, z = values(form, query.set.sample(500)[:, 0])
    assert (z >= box.lower).all() and (z <= box.upper).all()
    assert (z.amax(0) - z.amin(0) > 10 * center.width[0]).all(), "the guess at the start would not have held them"
    monkeypatch.setattr(linear_programs, "GROWN", 1)
    assert continued_box(regions.constraints, regions.inputs, known, center.at(0), looping, query) is None


def test_triangle_programs_enclose_loops_that_crown_does_not():
    torch.manual_seed(0)
    form = rotating(16, turn=2.0, bias=0.0)
    u = torch.rand(1, form.sizes[1], dtype=F64)
    query = Query(form, Box.around(u, 0.1, None, None), torch.eye(form.sizes[2], dtype=F64)[None])
    crown = enclosed(query, 6, False)[0].enclosure.z(0)
    better = tightest_intervals(query, 6).z(0)
    _, z = values(form, query.set.sample(300)[:, 0])
    assert (z >= better.lower).all() and (z <= better.upper).all()
    assert better.width.sum() < 0.5 * crown.width.sum()
    assert Relaxation("triangle")(query).width.isfinite().all() and math.isfinite(float(better.width.sum()))
