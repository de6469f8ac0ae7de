"""Pictures of sensitivity and of bounds: what is drawn is what was computed."""

import pytest
import torch
from torch import nn
from wellposed_lab.experiments.robust.bounds import random_loops

from wellposed.errors import InputError
from wellposed.robust import Box, MethodError, sensitivity, state_bounds
from wellposed.robust.draw import bound_projection, caveat, class_maps, gallery, row_correlation, sensitivity_map


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 5))


def test_rows_of_layers_are_nearly_collinear_and_the_picture_says_so(network):
    S = sensitivity(network, (16,))
    wanted = torch.corrcoef(S)
    off = wanted[~torch.eye(5, dtype=torch.bool)]
    assert row_correlation(S) == pytest.approx(float(off.mean())) and float(off.mean()) > 0.9
    for drawn in (sensitivity_map(S), class_maps(S, shape=(4, 4))):
        (note,) = (text.get_text() for text in drawn.texts)
        assert note == caveat(S) and f"{row_correlation(S):.4f}" in note and "nearly one picture" in note
    assert "differ" in caveat(torch.eye(4))


def test_the_matrix_is_drawn_entry_by_entry(tmp_path):
    S = torch.rand(3, 12)
    drawn = sensitivity_map(S, tmp_path / "s.png", classes=("a", "b", "c"))
    axes = drawn.axes[0]
    assert torch.allclose(torch.as_tensor(axes.images[0].get_array()), S.double())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    maps = class_maps(S, shape=(3, 2, 2), count=2)
    assert len(maps.axes) == 2
    assert torch.allclose(torch.as_tensor(maps.axes[1].images[0].get_array()), S[1].view(3, 2, 2).sum(0).double())


def test_rectangles_are_the_bounds_and_hold_all_dots():
    form = random_loops(12, 6, 0.8, 0)
    box = Box.around(torch.full((1, 6), 0.5, dtype=torch.float64), 0.2)
    methods = ("norm", "box", "interval", "l2", "crown", "lp", "triangle")
    drawn = bound_projection(form, box, states=(3, 7), methods=methods, samples=500)
    axes = drawn.axes[0]
    sampled, edge = (torch.as_tensor(line.get_xydata()) for line in axes.lines)
    dots = torch.cat([sampled, edge])
    near = 1e-6
    assert bool((edge.amax(0) >= sampled.amax(0) - near).all()) and bool(
        (edge.amin(0) <= sampled.amin(0) + near).all()
    )
    assert sampled.shape == (500, 2) and (axes.get_xlabel(), axes.get_ylabel()) == ("state 3", "state 7")
    for method, patch in zip(methods, axes.patches, strict=True):
        bounds = state_bounds(form, box, method)
        (x0, y0), (x1, y1) = patch.get_bbox().min, patch.get_bbox().max
        assert (x0, y0) == pytest.approx(bounds.lower[0, [3, 7]].tolist())
        assert (x1, y1) == pytest.approx(bounds.upper[0, [3, 7]].tolist())
        assert bool(((dots >= torch.tensor([x0, y0])) & (dots <= torch.tensor([x1, y1]))).all())


def test_methods_that_do_not_apply_are_named(network):
    drawn = bound_projection(network, Box.around(torch.full((1, 16), 0.5), 0.1), methods=("norm", "crown"))
    assert "Not applicable: norm" in drawn.texts[0].get_text() and len(drawn.axes[0].patches) == 1
    with pytest.raises(MethodError, match="no method applies"):
        bound_projection(network, Box.around(torch.full((1, 16), 0.5), 0.1), methods=("norm",))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda net, box: sensitivity_map(-torch.ones(2, 2)),
        lambda net, box: sensitivity_map(torch.full((2, 2), torch.nan)),
        lambda net, box: class_maps(torch.ones(2, 6), shape=(2, 2)),
        lambda net, box: class_maps(torch.ones(6)),
        lambda net, box: bound_projection(net, box, states=(0, 99)),
        lambda net, box: bound_projection(net, box, states=(1, 1)),
        lambda net, box: bound_projection(net, box, methods=("crwon",)),
        lambda net, box: bound_projection(net, box, samples=1),
    ],
)
def test_wrong_input(network, wrong):
    with pytest.raises(ValueError, match=r"received|did you mean"):
        wrong(network, Box.around(torch.full((1, 16), 0.5), 0.1))


def test_the_gallery_needs_the_attacked_inputs(network):
    attack = type("Found", (), {"inputs": torch.zeros(2, 16)})()
    with pytest.raises(InputError, match="inputs that were attacked"):
        gallery(network, torch.zeros(3, 16), attack, torch.zeros(3, dtype=torch.int64))
