"""Small files that ask the checker for much: refused, before memory is taken and time is spent."""

import json
import tracemalloc

import numpy as np
import pytest

import wellposed as wp
from tests.checker.forged_files import write_claims, write_tensors
from wellposed.checker import RefusedError, check
from wellposed.checker.model import acyclic
from wellposed.checker.tensors import STEPS_FREE, STEPS_PER_BYTE, Budget
from wellposed.errors import FileFormatError

LARGE = 16384
PLACE = {"kind": {"dtype": "float64"}, "place": "cpu"}


def zero(rows: int, columns: int) -> dict:
    return {"operator": "Zero", "size": {"tuple": [rows, columns]}, **PLACE}


def identity(size: int) -> dict:
    return {"operator": "Identity", "size": size, **PLACE}


def dense(name: str) -> dict:
    return {"operator": "Dense", "matrix": {"tensor": name}}


def block(sizes: list[int], parts: list[tuple[int, int, dict]]) -> dict:
    pairs = [[{"tuple": [i, j]}, part] for i, j, part in parts]
    size = {"tuple": sizes}
    return {"operator": "Block", "heights": size, "widths": size, "parts": {"dict": pairs}, **PLACE}


def nested(depth: int, size: int) -> dict:
    return block([size], [(0, 0, nested(depth - 1, size))]) if depth else zero(size, size)


def write_form(
    path, operator: dict, states: int, claims: list[dict], activation="relu", proof=None, text=None, **tensors
):
    header = {
        **{"A": operator, "B": zero(states, 1), "C": zero(1, states), "D": dense("D"), "bias": None},
        **{"output_bias": None, "activation": activation, "input_shape": [1], "labels": [], "dtype": "float64"},
    }
    form = json.dumps(header | {"A": "HERE"}).replace('"HERE"', text or json.dumps(operator))
    metadata = {"format": "wellposed-form-1", "form": form}
    write_tensors(path, {"D": np.ones((1, 1)), **tensors}, metadata)
    write_claims(path, claims, proof)
    return path


def well_posed(condition: str = "inf") -> dict:
    return {"kind": "well-posed", "condition": condition, "value": 0.5}


def gaps(count: int, states: int) -> dict:
    """Claims the gaps of one row, many times, for data of no samples."""
    group = {
        **{"rows": [0] * count, "states": [*range(states)], "inputs": [], "kappa": 1.0, "support": "all"},
        **{"capped": 0, "design": "M", "targets": "Z", "dual": "N", "ridge": "r", "gaps": "g"},
    }
    return {"kind": "row-gaps", "largest": 1.0, "groups": [group]}


def factors(states: int) -> dict:
    return {"operator": "LowRank", "left": {"tensor": "L"}, "right": {"tensor": "R"}}


def of_all_lengths(*shape: int) -> np.ndarray:
    """Numbers that are 2,000 bits long once they are whole."""
    draw = np.random.default_rng(0)
    return np.ldexp(draw.random(shape) + 0.5, draw.integers(-1060, -20, shape))


BOX = {"kind": "enclosure", "inputs": ["u", "u"], "states": ["low", "high"], "outputs": ["least", "most"]}
NOTHING = {"M": np.zeros((0, 1000)), "Z": np.zeros((20000, 0)), "N": np.zeros((20000, 0)), "r": np.zeros(1000)}
ASKING = {
    "one block of zeros": lambda p: write_form(p, zero(LARGE, LARGE), LARGE, [well_posed()]),
    "blocks of zeros": lambda p: write_form(
        p, block([LARGE] * 8, [(i, i, zero(LARGE, LARGE)) for i in range(8)]), LARGE * 8, [well_posed()],
        ["relu"] * 8,
    ),
    "states alone": lambda p: write_form(
        p, block([LARGE] * 500, []), LARGE * 500, [well_posed("acyclic")], ["relu"] * 500
    ),
    "an identity": lambda p: write_form(p, identity(LARGE), LARGE, [well_posed()]),
    "blocks in blocks": lambda p: write_form(p, nested(40, 1000), 1000, [well_posed()]),
    "blocks without width": lambda p: write_form(
        p, block([1000] + [0] * 20000, [(0, 0, zero(1000, 1000))]), 1000, [well_posed()], ["relu"] * 20001
    ),
    "rows without entries": lambda p: write_form(
        p, dense("A"), 1, [well_posed()], A=np.zeros((5 * 10**6, 0))
    ),
    "factors without entries": lambda p: write_form(
        p, factors(8000), 8000, [well_posed()], L=np.zeros((8000, 0)), R=np.zeros((8000, 0))
    ),
    "a spectral norm": lambda p: write_form(p, identity(1400), 1400, [well_posed("spectral")]),
    "a largest eigenvalue": lambda p: write_form(p, zero(1400, 1400), 1400, [well_posed("monotone")]),
    "claims again and again": lambda p: write_form(
        p, dense("A"), 100, [well_posed("spectral")] * 2000, A=np.full((100, 100), 1e-3)
    ),
    "gaps of no samples": lambda p: write_form(
        p, zero(1000, 1000), 1000, [well_posed(), gaps(20000, 1000)], proof={**NOTHING, "g": np.zeros(20000)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_small_files_that_ask_for_much_are_refused(name, tmp_path):
    path = ASKING[name](tmp_path / "m.safetensors")
    size = path.stat().st_size + path.with_suffix(".cert").stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError):
            check(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * size + 10 * 8 * STEPS_FREE
    finally:
        tracemalloc.stop()


HUGE, SMALL = 1.7e308, 1e-300
ENDS = {
    "low": -HUGE * np.ones(1),
    "high": HUGE * np.ones(1),
    "least": -HUGE * np.ones(1),
    "most": HUGE * np.ones(1),
}


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**4000, HUGE, -HUGE, True, "0.5", None, [0.5]], ids=lambda v: repr(v)[:6]
)
def test_values_beyond_the_range_of_floats_are_refused(value, tmp_path):
    with pytest.raises(RefusedError):
        check(
            write_form(tmp_path / "m.safetensors", dense("A"), 1, [well_posed() | {"value": value}], A=np.eye(1))
        )


@pytest.mark.parametrize("condition", ["spectral", "monotone", "inf", "mu"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_matrices_at_the_ends_of_the_range_are_refused(condition, sign, tmp_path):
    A = np.array([[sign * SMALL, HUGE], [HUGE, sign * SMALL]])
    with pytest.raises(RefusedError, match=r"not proven|fails at state 0"):
        check(write_form(tmp_path / "m.safetensors", dense("A"), 2, [well_posed(condition)], A=A))


def test_boxes_and_gaps_at_the_ends_of_the_range_are_told_in_words(tmp_path):
    path, A = tmp_path / "m.safetensors", np.full((1, 1), 0.1)
    write_form(path, dense("A"), 1, [well_posed(), BOX], A=A, proof={"u": np.ones(1), **ENDS})
    assert check(path)[1].stated == "1 outputs within inf"  # which is 3.4e308
    data = {name: np.full((1, 1), HUGE) for name in "MZN"} | {"r": np.ones(1), "g": np.full(1, HUGE)}
    write_form(path, dense("A"), 1, [well_posed(), gaps(1, 1)], A=A, proof=data)
    with pytest.raises(RefusedError, match="the gap of row 0 is inf"):
        check(path)


def nested_text(depth: int) -> str:
    start, end = json.dumps(block([1], [(0, 0, "HERE")])).split('"HERE"')
    return start * depth + json.dumps(zero(1, 1)) + end * depth


def test_forms_that_are_nested_too_deeply_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    assert check(write_form(path, zero(1, 1), 1, [well_posed()], text=nested_text(50)))
    refused = 0
    for depth in (*range(100, 400, 10), 2000):  # the stack ends in the reader of JSON, or later
        try:
            check(write_form(path, zero(1, 1), 1, [well_posed()], text=nested_text(depth)))
        except RefusedError:
            refused += 1
    assert 0 < refused < 30


def ends(states: int, long: bool) -> dict[str, np.ndarray]:
    reach = 1 + of_all_lengths(states) if long else np.ones(states)
    tiny = of_all_lengths(states) if long else np.zeros(states)
    return {"u": np.ones(1), "low": -tiny, "high": reach, "least": -np.ones(1), "most": np.ones(1)}


LONG = {
    "factors": lambda p, long: write_form(
        p, factors(30), 30, [well_posed()],
        **{name: of_all_lengths(30, 1) if long else np.full((30, 1), 0.01) for name in "LR"},
    ),
    "an eigenvalue": lambda p, long: write_form(
        p, dense("A"), 20, [well_posed("monotone")], A=of_all_lengths(20, 20) if long else np.full((20, 20), 0.01)
    ),
    "a spectral norm": lambda p, long: write_form(
        p, dense("A"), 20, [well_posed("spectral")], A=of_all_lengths(20, 20) if long else np.full((20, 20), 0.01)
    ),
    "blocks": lambda p, long: write_form(
        p, block([30, 1], [(0, 0, factors(30)), (1, 1, dense("a"))]), 31, [well_posed()], ["relu"] * 2,
        L=np.full((30, 1), 2.0**-5), R=np.full((30, 1), 2.0**-5), a=np.full((1, 1), 5e-324 if long else 0.5),
    ),
    "a box": lambda p, long: write_form(
        p, factors(30), 30, [well_posed(), BOX], L=np.full((30, 1), 2.0**-5), R=np.full((30, 1), 2.0**-5),
        proof=ends(30, long),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_long_numbers_cost_more(name, tmp_path, monkeypatch):
    """Whole numbers of 2,000 bits take twenty times the memory, and hundreds of times the time of a product."""
    budgets = []
    monkeypatch.setattr(Budget, "__init__", lambda self, size: (budgets.append(self), vars(self).update(
        size=size, left=10**12))[1])  # fmt: skip
    for long in (False, True):
        assert check(LONG[name](tmp_path / "m.safetensors", long))
    plain, costly = (10**12 - budgets[k].left for k in (len(budgets) // 2 - 1, -1))
    assert costly > 3 * plain


def convolution(side: int, padding: int = 0, stride: int = 1) -> dict:
    pair = {name: {"tuple": [value, value]} for name, value in (("stride", stride), ("padding", padding))}
    more = {"dilation": {"tuple": [1, 1]}, "groups": 1, "transposed": False}
    return {
        "operator": "Convolution",
        "weight": {"tensor": "w"},
        "input_shape": {"tuple": [1, side, side]},
        **pair,
    } | more


def product(*factors: dict) -> dict:
    return {"operator": "Product", "factors": {"tuple": [*factors]}}


MANY, ROW = 1 << 30, np.full((1, 1, 1, 1), 0.5)
VAST = {
    "an identity": (identity(MANY), MANY, {}),
    "zeros": (zero(MANY, MANY), MANY, {}),
    "copies": ({"operator": "Repeated", "inner": dense("w"), "count": MANY}, MANY, {"w": ROW[0, 0]}),
    "a convolution": (convolution(1 << 15), MANY, {"w": ROW}),
    "a padded convolution": (convolution(1, padding=(1 << 20), stride=1 << 21), 4, {"w": ROW}),
    "within a product": (product(zero(1, MANY), zero(MANY, 1)), 1, {}),
    "blocks": (block([MANY // 4] * 4, []), MANY, {}),
}


@pytest.mark.parametrize("name", VAST)
def test_the_library_reads_no_vast_forms_from_small_files(name, tmp_path):
    operator, states, tensors = VAST[name]
    activation = ["relu"] * 4 if name == "blocks" else "relu"
    path = write_form(tmp_path / "m.safetensors", operator, states, [well_posed()], activation, **tensors)
    with pytest.raises(FileFormatError, match=r"far more than the \d+ bytes"):
        wp.load(path)


def test_a_budget_is_spent_once():
    budget = Budget(1000)
    budget.spend(STEPS_FREE)
    budget.spend(STEPS_PER_BYTE * 1000)
    with pytest.raises(RefusedError, match="files of 1000 bytes ask for more than"):
        budget.spend(1)


@pytest.mark.parametrize(
    "make", [lambda: wp.ImplicitModel(3, 2, 1200, rank=1), lambda: wp.ImplicitModel(50, 9, 200)]
)
def test_honest_models_are_within_the_budget(make, tmp_path):
    wp.save(make(), tmp_path / "m.safetensors", certificate=True)
    assert check(tmp_path / "m.safetensors")[0].claim == "well-posed"


def test_loops_among_blocks_are_found():
    """Against powers of the matrix of edges, which vanish if and only if there is no loop."""
    draw, seen = np.random.default_rng(0), set()
    for _ in range(300):
        count = int(draw.integers(1, 7))
        edges = draw.random((count, count)) < draw.choice((0.05, 0.2, 0.4))
        if draw.random() < 0.3:
            edges = np.tril(edges, -1)
        free = not np.linalg.matrix_power(edges.astype(int), count).any()
        seen.add(free)
        assert acyclic(count, [(int(i), int(j)) for i, j in np.argwhere(edges)]) == free
    assert seen == {True, False}
    assert acyclic(10**5, [(i, i - 1) for i in range(1, 10**5)])
