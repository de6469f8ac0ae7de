"""The picture of a block matrix: what is where, in which colour."""

import json
import re

import numpy as np
import pytest
import torch

from wellposed import ImplicitForm, ImplicitModel
from wellposed.errors import InputError, UnknownNameError
from wellposed.forms import Block, Convolution, Dense, Diagonal, Identity, LowRank, Product, Selection, Sparse, Sum
from wellposed.forms.draw.spy import density, raster, spy
from wellposed.forms.draw.summary import COLOURS, BlockEdge, BlockGraph, kind_of
from wellposed.forms.operators import entries as listing
from wellposed.forms.operators.entries import entries

CONVOLUTION = Convolution(torch.randn(4, 3, 3, 3), (3, 8, 8), (2, 1), (1, 1), (1, 1))
OPERATORS = [
    Dense(torch.randn(9, 7).relu()),
    LowRank(torch.randn(9, 2), torch.randn(7, 2)),
    CONVOLUTION,
    CONVOLUTION.T,
    Convolution(torch.randn(4, 1, 3), (2, 9), (1,), (1,), (1,), groups=2),
    Block(
        (3, 9), (7, 2), {(0, 1): Dense(torch.randn(3, 2)), (1, 0): Sparse(torch.randn(9, 7).relu().to_sparse())}
    ),
    Selection(torch.tensor([2, -1, 0, 0]), 3),
    Sum((Identity(3), Dense(torch.randn(3, 3)))),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=kind_of)
def test_entries_in_pieces_make_up_the_matrix(operator, monkeypatch):
    monkeypatch.setattr(listing, "PIECE", 20)
    found = torch.zeros(operator.shape)
    pieces = list(entries(operator))
    for rows, columns, values in pieces:
        assert (values != 0).all()
        found.index_put_((rows, columns), values, accumulate=True)
    torch.testing.assert_close(found, operator.to_dense())


def test_a_large_convolution_is_never_listed_at_once(monkeypatch):
    monkeypatch.setattr(listing, "PIECE", 1000)
    operator = Convolution(torch.randn(16, 2, 3, 3), (2, 8, 8), (1, 1), (1, 1), (1, 1))
    sizes = [len(values) for _, _, values in entries(operator)]
    assert len(sizes) == 16 and max(sizes) <= 64 * 18 and sum(sizes) == operator.nonzeros()


@pytest.mark.parametrize("side", ["none", "all", "lower", "upper"])
def test_density_agrees_with_the_dense_matrix(side):
    matrix = torch.randn(24, 24).double() * (torch.rand(24, 24) < 0.4)
    forward, feedback = density(BlockEdge("A", 0, 0, Sparse(matrix.to_sparse()), side), 6, 8)
    wrong = {"none": matrix * 0, "all": matrix, "lower": matrix.tril(), "upper": matrix.triu()}[side]
    for found, expected in ((forward, matrix - wrong), (feedback, wrong)):
        np.testing.assert_allclose(found, expected.abs().view(6, 4, 8, 3).sum((1, 3)).numpy(), atol=1e-12)


def test_an_entry_fills_its_spots():
    forward, _ = density(BlockEdge("A", 0, 0, Dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]]))), 4, 6)
    np.testing.assert_array_equal(forward, np.kron([[0, 2], [3, 0]], np.ones((2, 3))))


def test_thin_lines_are_drawn_wider():
    forward, _ = density(BlockEdge("A", 0, 0, Identity(4000)), 100, 100)
    assert np.count_nonzero(forward) == 100 + 2 * 99


def colours(form, **options):
    """Returns the names of the colours in the middle of every entry of [[A, B], [C, D]]."""
    picture = raster(BlockGraph(form), options.pop("pixels", 400), options.pop("scale", "linear"))
    n, p, q = form.sizes
    known = {name: np.array([int(code[k : k + 2], 16) for k in (1, 3, 5)]) for name, code in COLOURS.items()}

    def name(pixel):
        if (pixel == 255).all():
            return "-"
        away = 255.0 - pixel
        return max(known, key=lambda role: (away @ (255 - known[role])) / np.linalg.norm(255.0 - known[role]))

    def places(axis, count, others):
        (a, b), (c, d) = axis.sections
        return [
            *(a + (b - a) * (k + 0.5) / count for k in range(count)),
            *(c + (d - c) * (k + 0.5) / others for k in range(others)),
        ]

    rows, columns = places(picture.rows, n, q), places(picture.columns, n, p)
    return [[name(picture.pixels[int(y), int(x)].astype(float)) for x in columns] for y in rows]


def test_every_part_has_its_colour():
    A = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 0, 1]]) / 4
    form = ImplicitForm(A, torch.tensor([[0.0], [0], [1]]), torch.tensor([[1.0, 0, 0]]), torch.tensor([[1.0]]))
    w, f = "weights", "feedback"
    assert colours(form) == [
        ["-", w, "-", "-"],
        [f, "-", w, "-"],
        ["-", "-", f, "input"],
        ["output", "-", "-", "through"],
    ]


@pytest.mark.parametrize(
    ("A", "roles"),
    [
        (torch.ones(4, 4).triu(1), {"weights"}),
        (torch.ones(4, 4).tril(-1), {"weights"}),
        (torch.ones(4, 4).tril(), {"weights", "feedback"}),
        (torch.eye(4), {"feedback"}),
        (torch.ones(4, 4), {"weights", "feedback"}),
    ],
)
def test_feedback_is_what_closes_a_loop(A, roles):
    form = ImplicitForm(A / 8, torch.zeros(4, 1), torch.zeros(1, 4))
    assert set(raster(BlockGraph(form), 200, "linear").roles) == roles


def test_a_diagonal_feeds_back_in_a_form_written_first_layer_first():
    found = colours(ImplicitForm(torch.ones(3, 3).tril() / 8, torch.zeros(3, 1), torch.zeros(1, 3)))
    assert found[0][0] == found[2][2] == "feedback" and found[2][0] == "weights" and found[0][2] == "-"


def looped(order):
    """Three blocks one after the other and one arrow back, in the given order of blocks."""
    links = {(1, 0): 0.2, (2, 1): 0.2, (0, 2): 0.2}
    A = {(order.index(i), order.index(j)): Dense(torch.full((2, 2), v)) for (i, j), v in links.items()}
    return ImplicitForm(Block((2, 2, 2), (2, 2, 2), A), torch.ones(6, 1), torch.ones(1, 6))


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 1, 2]])
def test_blocks_of_a_loop_on_the_wrong_side_feed_back(order):
    sides = {
        (order[link.row], order[link.column]): link.feedback
        for link in BlockGraph(looped(order)).edges
        if link.name == "A"
    }
    assert sides == {(1, 0): "none", (2, 1): "none", (0, 2): "all"}


def test_zero_blocks_close_no_loop():
    A = Block((1, 1), (1, 1), {(0, 1): Dense(torch.ones(1, 1)), (1, 0): Dense(torch.zeros(1, 1))})
    links = BlockGraph(ImplicitForm(A, torch.ones(2, 1), torch.ones(1, 2))).edges
    assert [(link.row, link.column, link.feedback) for link in links if link.name == "A"] == [(0, 1, "none")]


def residual():
    """A convolution with a shortcut, and a small readout."""
    sizes = (10, 4096, 4096)
    kernel = Convolution(torch.randn(4, 4, 3, 3), (4, 32, 32), (1, 1), (1, 1), (1, 1))
    A = {(0, 1): Dense(torch.randn(10, 4096)), (1, 2): kernel, (0, 2): Dense(torch.randn(10, 4096))}
    B = Block(sizes, (1024,), {(2, 0): Convolution(torch.randn(4, 1, 3, 3), (1, 32, 32), (1, 1), (1, 1), (1, 1))})
    A[1, 2] = Sum((kernel, Identity(4096)))
    C = Block((10,), sizes, {(0, 0): Identity(10)})
    labels = ["readout", "second <i>", "first"]
    return ImplicitForm(Block(sizes, sizes, A), B, C, input_shape=(1, 32, 32), labels=labels)


def test_small_blocks_can_be_seen_beside_large_ones():
    wiring = BlockGraph(residual())
    sides = {}
    for scale in ("linear", "sqrt", "log", "auto"):
        rows = raster(wiring, 1000, scale).rows
        sides[scale] = [end - start for start, end in rows.edges]
        assert sum(sides[scale][:3]) == pytest.approx(1000, abs=3)
        assert min(sides[scale]) >= 10
    assert sides["auto"] == sides["sqrt"]
    assert sides["linear"][0] < sides["sqrt"][0] < sides["log"][0]
    even = BlockGraph(ImplicitForm(torch.ones(4, 4), torch.ones(4, 2), torch.ones(1, 4)))
    assert [b - a for a, b in raster(even, 1000, "auto").rows.edges] == [1000, 250]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_still_pictures(ending, tmp_path):
    spy(looped([2, 1, 0]), tmp_path / f"spy.{ending}", pixels=60)
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (tmp_path / f"spy.{ending}").read_bytes().startswith(begin)


def test_names_and_colours_are_explained():
    figure = spy(residual(), pixels=300)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["readout", "second <i>", "first", "y"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["readout", "second <i>", "first", "u"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["A: weights", "B: from the input", "C: to the output"]


def page_of(path):
    text = path.read_text(encoding="utf-8")
    return text, json.loads(
        re.search(r'<script id="figure" type="application/json">(.*?)</script>', text, re.S)[1]
    )


def test_a_page_needs_nothing_else_and_describes_every_block(tmp_path):
    form = residual()
    spy(form, tmp_path / "spy.html", pixels=300)
    text, figure = page_of(tmp_path / "spy.html")
    assert (
        "Plotly.newPlot" in text
        and len(text) < 3e6
        and "Where to go next" in text
        and not re.search(r'(src|href)="http', text.split("<script>")[0])
    )
    hover = [cell for row in figure["data"][0]["text"] for cell in row if cell]
    assert len(hover) == len(BlockGraph(form).edges) == 5
    block = next(cell for cell in hover if "reads first" in cell and "convolution" in cell)
    count = form.A.parts[1, 2].nonzeros()
    assert f"{count:,} non-zero entries" in block and "4,096 x 4,096" in block
    norm = float(form.A.parts[1, 2].to_dense().abs().sum(1).max())
    assert f"largest row sum {norm:.4g}" in block
    assert "second &lt;i&gt;" in block and figure["layout"]["images"][0]["source"].startswith("data:image/png")


def test_hover_cells_lie_where_their_blocks_are(tmp_path):
    form = residual()
    figure = spy(form, tmp_path / "spy.html", pixels=300)
    picture, cells = raster(BlockGraph(form), 300, "auto"), figure.data[0]
    for link in BlockGraph(form).edges:
        left, right, top, bottom = picture.box(link)
        i, j = list(cells.y).index(top), list(cells.x).index(left)
        assert (cells.y[i + 1], cells.x[j + 1]) == (bottom, right) and link.kind in cells.text[i][j]


def test_a_small_form_tells_every_value(tmp_path):
    A = torch.tensor([[0.0, 0.25], [0.5, 0.0]])
    spy(ImplicitForm(A, torch.eye(2), torch.ones(1, 2)), tmp_path / "spy.html", pixels=100)
    cells = page_of(tmp_path / "spy.html")[1]["data"][0]["text"]
    assert cells[0][1].startswith("<b>0.25</b> in row 0 and column 1") and cells[0][0] == ""
    assert cells[1][0].startswith("<b>0.5</b>") and "feeds back" in cells[1][0]


def test_forms_without_states_and_of_models(tmp_path):
    empty = ImplicitForm(torch.zeros(0, 0), torch.zeros(0, 3), torch.zeros(2, 0), torch.ones(2, 3))
    assert set(raster(BlockGraph(empty), 100, "auto").roles) == {"through"}
    spy(empty, tmp_path / "empty.html")
    assert set(raster(BlockGraph(ImplicitModel(3, 2, 5).form()), 100, "auto").roles) == set(COLOURS) - {
        "wiring",
        "through",
    }


def test_mistakes(tmp_path):
    form = looped([2, 1, 0])
    with pytest.raises(InputError, match=r"ends with \.html"):
        spy(form, tmp_path / "spy.jpeg")
    with pytest.raises(UnknownNameError, match="did you mean 'sqrt'"):
        spy(form, scale="sqr")


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (CONVOLUTION, "convolution 3x3 /1x2"),
        (CONVOLUTION.T, "transposed convolution 3x3 /1x2"),
        (Product((Diagonal(torch.ones(3)), Dense(torch.ones(3, 2)))), "diagonal * dense"),
        (Product((Identity(2),) * 5), "identity * identity * 3 more"),
        (LowRank(torch.ones(2, 1), torch.ones(2, 1)), "low rank"),
    ],
)
def test_names_of_operators(operator, name):
    assert kind_of(operator) == name
