"""The node diagram: layers, columns, arrows that feed back, single states."""

import json
import re
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from wellposed import ImplicitForm
from wellposed.errors import InputError
from wellposed.forms import Block, Dense, Identity
from wellposed.forms.draw.diagram import block_diagram, graph, state_diagram
from wellposed.forms.draw.layering import _at_least_apart, _crossings, columns_of, layered
from wellposed.forms.draw.summary import BlockGraph


def random_edges(seed, count=14):
    draw = np.random.default_rng(seed)
    return [(i, j) for i, j in combinations(range(count), 2) if draw.random() < 0.2]


@pytest.mark.parametrize("seed", range(5))
def test_every_node_is_below_what_it_reads_and_none_overlap(seed):
    edges, widths = random_edges(seed), np.random.default_rng(seed).uniform(0.5, 3, 14)
    placed = layered(list(widths), edges, gap=0.3)
    longest = dict.fromkeys(range(14), 0)
    for start, end in sorted(edges):
        longest[end] = max(longest[end], longest[start] + 1)
    read = {end for _, end in edges}
    assert all(placed.layer[k] == longest[k] for k in read)
    assert all(placed.layer[start] < placed.layer[end] for start, end in edges)
    for row in placed.rows:
        for a, b in pairwise(row):
            wide = [widths[spot[0]] if placed.layer[spot[0]] == spot[1] else 0.2 for spot in (a, b)]
            assert placed.x[b] - placed.x[a] >= sum(wide) / 2 + 0.3 - 1e-9


def test_a_route_passes_every_layer_between():
    placed = layered([1.0] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    way = placed.route(0, 3)
    assert [layer for _, layer in way] == [0, 1, 2, 3]
    for x, layer in way[1:-1]:
        node = placed.x[layer, layer]
        assert abs(x - node) >= 0.5 + 0.1 + 0.3 - 1e-9  # beside the node of that layer


def test_needless_crossings_are_undone():
    twisted = [(0, 5), (1, 4), (2, 3), (5, 6), (4, 7), (3, 8)]
    assert _crossings(layered([1.0] * 9, twisted)) == 0


def test_nodes_that_read_nothing_move_to_their_readers_unless_pinned():
    edges = [(0, 1), (1, 2), (3, 2)]
    assert layered([1.0] * 4, edges).layer[3] == 1
    assert layered([1.0] * 4, edges, pinned=[3]).layer[3] == 0


@pytest.mark.parametrize("seed", range(4))
def test_places_are_the_nearest_that_fit(seed):
    draw = np.random.default_rng(seed)
    wanted, apart = draw.normal(size=8), draw.uniform(0.1, 1, 7)
    offsets = np.concatenate([[0], apart.cumsum()])
    expected = IsotonicRegression().fit_transform(np.arange(8), wanted - offsets) + offsets
    np.testing.assert_allclose(_at_least_apart(list(wanted), list(apart)), expected, atol=1e-9)


def test_columns_break_where_one_line_passes():
    assert columns_of([1] * 15, 8) == [0] * 7 + [1] * 9 or columns_of([1] * 15, 8).count(0) in (7, 8)
    assert columns_of([1, 2, 2, 2, 1, 2, 2], 4) == [0, 0, 0, 0, 0, 1, 1, 1]
    assert columns_of([2] * 30, 8) == [0] * 31
    assert columns_of([], 8) == [0]


def deep(layers=20):
    """A residual network: every second block also reads the one before the last."""
    sizes = (3,) * layers
    A = {(k, k + 1): Dense(torch.randn(3, 3)) for k in range(layers - 1)}
    A |= {(k, k + 2): Identity(3) for k in range(0, layers - 2, 2)}
    B, C = (
        Block(sizes, (4,), {(layers - 1, 0): Dense(torch.randn(3, 4))}),
        Block((2,), sizes, {(0, 0): Dense(torch.randn(2, 3))}),
    )
    return ImplicitForm(Block(sizes, sizes, A), B, C, labels=[f"layer {layers - k}" for k in range(layers)])


def looped():
    sizes = (2, 3, 4)
    A = {(0, 1): torch.randn(2, 3), (1, 2): torch.randn(3, 4), (2, 0): torch.randn(4, 2), (1, 1): torch.eye(3)}
    parts = {key: Dense(value / 20) for key, value in A.items()}
    B, C = (
        Block(sizes, (5,), {(2, 0): Dense(torch.ones(4, 5))}),
        Block((1,), sizes, {(0, 0): Dense(torch.ones(1, 2))}),
    )
    return ImplicitForm(
        Block(sizes, sizes, parts), B, C, activation=["tanh", "relu", "tanh"], labels=["c", "b", "a <i>"]
    )


def border(node, point):
    """How far a point is from the outline of a box."""
    x, y = abs(point[0] - node.x) - node.width / 2, abs(point[1] - node.y) - node.height / 2
    return abs(max(x, y))


@pytest.mark.parametrize("form", [deep(), looped()], ids=["deep", "looped"])
def test_arrows_join_the_right_boxes(form):
    wiring = BlockGraph(form)
    diagram = block_diagram(wiring, "")
    boxes = {node.title: node for node in diagram.nodes}
    assert len(diagram.arrows) == len(wiring.edges)
    for arrow in diagram.arrows:
        reader, source = re.search(r"<b>(.*) reads (.*?)</b>", arrow.hover).groups()
        reader, source = (name.replace("&lt;", "<").replace("&gt;", ">") for name in (reader, source))
        assert border(boxes[source], arrow.points[0]) < 1e-9 and border(boxes[reader], arrow.points[-1]) < 1e-9


def test_arrows_that_feed_back_are_red_and_lead_up():
    diagram = block_diagram(BlockGraph(looped()), "")
    red = [arrow for arrow in diagram.arrows if arrow.role == "feedback"]
    assert sorted(re.search(r"<b>(.*?)</b>", arrow.hover)[1] for arrow in red) == [
        "a &lt;i&gt; reads c",
        "b reads b",
    ]
    assert all(arrow.points[-1][1] < arrow.points[0][1] for arrow in red)
    others = [arrow for arrow in diagram.arrows if arrow.role != "feedback"]
    assert all(arrow.points[-1][1] > arrow.points[0][1] for arrow in others)
    back = max(red, key=lambda arrow: np.ptp(arrow.points[:, 1]))
    right = max(node.x + node.width / 2 for node in diagram.nodes)
    assert back.points[:, 0].max() > right  # around the nodes between
    assert {node.title for node in diagram.nodes if node.loop} == {"a <i>", "b", "c"}


def test_a_deep_network_is_drawn_in_columns_without_overlap():
    diagram = block_diagram(BlockGraph(deep()), "")
    left, right, top, bottom = diagram.frame
    assert (bottom - top) < 1.6 * (right - left)
    for a, b in combinations(diagram.nodes, 2):
        apart = abs(a.x - b.x) >= (a.width + b.width) / 2 or abs(a.y - b.y) >= (a.height + b.height) / 2
        assert apart, (a.title, b.title)
    boxes = [(n.x - n.width / 2, n.x + n.width / 2, n.y - n.height / 2, n.y + n.height / 2) for n in diagram.nodes]
    for arrow in diagram.arrows:
        for x, y in arrow.points:
            inside = [w + 0.01 < x < e - 0.01 and n + 0.01 < y < s - 0.01 for w, e, n, s in boxes]
            assert not any(inside)


def test_lines_to_the_next_column_lie_side_by_side():
    arrows = block_diagram(BlockGraph(deep()), "").arrows
    across = [arrow for arrow in arrows if arrow.points[-1][1] < arrow.points[0][1]]  # the next column is higher
    rise = [int(np.diff(arrow.points[:, 1]).argmin()) for arrow in across]  # the long way up
    gutters = [round(float(arrow.points[k, 0]), 3) for arrow, k in zip(across, rise, strict=True)]
    assert len(across) == 4 and len(set(gutters)) == 4


def test_a_loop_is_not_broken_into_columns():
    form = deep()
    closing = {**form.A.parts, (19, 0): Dense(torch.eye(3) / 100)}
    diagram = block_diagram(BlockGraph(form.replaced(A=Block(form.A.heights, form.A.widths, closing))), "")
    assert len({node.y for node in diagram.nodes}) == len(diagram.nodes) == 22


def test_single_states_of_a_small_form():
    A = torch.tensor([[0.0, 0.5, 0.0], [0.25, 0.0, 0.125], [0.0, 0.0, -0.5]])
    form = ImplicitForm(A, torch.tensor([[0.0], [0], [1]]), torch.tensor([[1.0, 0, 0]]))
    diagram = state_diagram(BlockGraph(form), "")
    found = {re.sub(r"<.*?>", " ", arrow.hover).strip(): arrow.role for arrow in diagram.arrows}
    assert found == {
        "0.5  x0 reads x1": "weights",
        "0.25  x1 reads x0, feeds back": "feedback",
        "0.125  x1 reads x2": "weights",
        "-0.5  x2 reads x2, feeds back": "feedback",
        "1  x2 reads u": "input",
        "1  y reads x0": "output",
    }
    widths = {arrow.hover[3:7].strip("<"): arrow.width for arrow in diagram.arrows}
    assert widths["0.5"] > widths["0.25"] > widths["0.12"]


def test_states_of_a_feedforward_form_lie_in_layers():
    A = torch.zeros(5, 5)
    A[0, 1:3], A[1:3, 3:5] = 1.0, 1.0
    B = torch.zeros(5, 2)
    B[3:] = 1.0
    diagram = state_diagram(BlockGraph(ImplicitForm(A, B, torch.eye(5)[:1])), "")
    rows = {node.title: node.y for node in diagram.nodes}
    assert rows["u0"] < rows["x3"] == rows["x4"] < rows["x1"] == rows["x2"] < rows["x0"] < rows["y"]
    assert not any(arrow.role == "feedback" for arrow in diagram.arrows)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_still_pictures(ending, tmp_path):
    figure = graph(looped(), tmp_path / f"graph.{ending}")
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (tmp_path / f"graph.{ending}").read_bytes().startswith(begin)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert {"u", "y", "a <i>", "b", "c", "tanh of 4", "relu of 3", "dense"} <= set(shown)
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "A: feedback"


def test_a_page_has_every_node_and_arrow(tmp_path):
    graph(looped(), tmp_path / "graph.html")
    text = (tmp_path / "graph.html").read_text(encoding="utf-8")
    source = re.search(r'<script id="figure" type="application/json">(.*?)</script>', text, re.S)[1]
    figure = json.loads(source)
    assert "<" not in source  # nothing in it can end the script
    assert len(figure["data"]) == 6 + 1 and len(figure["layout"]["shapes"]) == 5
    assert figure["data"][-1]["text"][1:4] == [
        "<b>c</b><br>tanh of 2",
        "<b>b</b><br>relu of 3",
        "<b>a &lt;i&gt;</b><br>tanh of 4",
    ]
    assert "<i>" not in text.split("<script>")[0]
    with pytest.raises(InputError, match=r"ends with \.html"):
        graph(looped(), tmp_path / "graph.txt")


def test_size_decides_between_states_and_blocks():
    assert len(graph(ImplicitForm(torch.eye(30) / 2, torch.ones(30, 1), torch.ones(1, 30))).axes[0].texts) == 32
    large = graph(ImplicitForm(torch.eye(31) / 2, torch.ones(31, 1), torch.ones(1, 31)))
    assert "relu of 31" in [text.get_text() for text in large.axes[0].texts]


def test_a_form_without_states():
    empty = ImplicitForm(torch.zeros(0, 0), torch.zeros(0, 40), torch.zeros(2, 0), torch.ones(2, 40))
    diagram = block_diagram(BlockGraph(empty), "")
    assert [arrow.role for arrow in diagram.arrows] == ["through"] and len(diagram.nodes) == 3
