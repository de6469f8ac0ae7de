"""VNN-LIB properties: what files say against a second evaluator, and what is refused."""

import contextlib
import random
from fractions import Fraction

import pytest
import torch

from wellposed.data.vnnlib import read_property
from wellposed.errors import FileFormatError

HEAD = "(declare-const X_0 Real)\n(declare-const X_1 Real)\n(declare-const Y_0 Real)\n(declare-const Y_1 Real)\n"
BOX = "(assert (<= X_0 1))\n(assert (>= X_0 -1.5))\n(assert (<= X_1 2e-1))\n(assert (>= X_1 0.1))\n"


def read(tmp_path, text):
    path = tmp_path / "p.vnnlib"
    path.write_text(text)
    return read_property(path)


def holds(tree, values):
    """Evaluates a formula at a point, by recursion over nested lists."""
    match tree:
        case ["and", *parts]:
            return all(holds(part, values) for part in parts)
        case ["or", *parts]:
            return any(holds(part, values) for part in parts)
        case ["<=", left, right]:
            return number(left, values) <= number(right, values)
        case [">=", left, right]:
            return number(left, values) >= number(right, values)
    raise AssertionError(tree)


def number(tree, values):
    match tree:
        case str():
            return values[tree] if tree in values else Fraction(tree)
        case ["+", *parts]:
            return sum(number(part, values) for part in parts)
        case ["-", only]:
            return -number(only, values)
        case ["-", first, *rest]:
            return number(first, values) - sum(number(part, values) for part in rest)
        case ["*", left, right]:
            return number(left, values) * number(right, values)
    raise AssertionError(tree)


def text_of(tree):
    return tree if isinstance(tree, str) else f"({' '.join(map(text_of, tree))})"


def constant(draw):
    return draw.choice(["0", "1", "-2", "0.25", "-1.5", "5e-1", "+.75", "3."])


def term(draw, depth=2):
    kind = draw.randrange(6 if depth else 2)
    if kind < 2:
        return constant(draw) if kind else draw.choice(["Y_0", "Y_1"])
    if kind == 2:
        return ["*", constant(draw), term(draw, depth - 1)]
    if kind == 3:
        return ["-", term(draw, depth - 1)]
    return ["+-"[kind % 2], *(term(draw, depth - 1) for _ in range(draw.randrange(2, 4)))]


def formula(draw, depth=3):
    if depth and draw.random() < 0.6:
        return [draw.choice(["and", "or"]), *(formula(draw, depth - 1) for _ in range(draw.randrange(1, 4)))]
    if draw.random() < 0.2:
        return [draw.choice(["<=", ">="]), draw.choice(["X_0", "X_1"]), constant(draw)]
    return [draw.choice(["<=", ">="]), ["+", draw.choice(["Y_0", "Y_1"]), "0"], term(draw)]


def inside(one, x, y):
    low, high, rows, offset = (
        part.tolist() for part in (one.inputs.lower[0], one.inputs.upper[0], one.rows, one.offset)
    )
    if not all(Fraction(a) <= v <= Fraction(b) for a, v, b in zip(low, x, high, strict=True)):
        return False
    sums = (sum(Fraction(a) * v for a, v in zip(row, y, strict=True)) for row in rows)
    return all(total + Fraction(c) >= 0 for total, c in zip(sums, offset, strict=True))


def test_cases_are_what_the_formula_says(tmp_path):
    draw, compared, refused = random.Random(0), [0, 0], set()
    box = [["<=", "X_0", "2"], [">=", "X_0", "-2"], ["<=", "X_1", "2"], [">=", "X_1", "-2"]]
    for _ in range(150):
        trees = [*box, *(formula(draw) for _ in range(draw.randrange(1, 3)))]
        try:
            sets = read(tmp_path, HEAD + "\n".join(f"(assert {text_of(tree)})" for tree in trees)).forbidden()
        except FileFormatError as error:  # variables that cancel, or a case without outputs
            refused.add(str(error).partition(":")[2].strip().partition(",")[0])
            continue
        for _ in range(30):
            point = [Fraction(draw.randrange(-12, 13), 4) for _ in range(4)]
            values = dict(zip(["X_0", "X_1", "Y_0", "Y_1"], point, strict=True))
            expected = all(holds(tree, values) for tree in trees)
            assert any(inside(one, point[:2], point[2:]) for one in sets) == expected
            compared[expected] += 1
    assert min(compared) > 200
    assert refused <= {"an inequality needs a variable", "a case says nothing about outputs"}


def test_numbers_are_rounded_outward(tmp_path):
    text = HEAD + BOX + "(assert (<= (* 0.3 Y_0) 0.1))"
    for dtype in (torch.float64, torch.float32):
        (one,) = read(tmp_path, text).forbidden((1, 2), dtype)
        low, high = Fraction(float(one.inputs.lower[0, 1])), Fraction(float(one.inputs.upper[0, 1]))
        assert Fraction("0.1") - Fraction(1, 10**7) < low <= Fraction("0.1")
        assert Fraction("0.2") <= high < Fraction("0.2") + Fraction(1, 10**7)
        assert one.inputs.sample_shape == (1, 2) and one.inputs.dtype == dtype
    assert one.rows.tolist() == [[-3.0, 0.0]] and Fraction(float(one.offset[0])) >= 1  # 3 y <= 1


def test_boxes_are_shared_and_empty_ones_left_out(tmp_path):
    cases = "(assert (or (and (>= Y_0 1) (>= Y_1 1)) (<= Y_1 0) (and (<= X_0 -2) (<= Y_0 0))))"
    first, second = read(tmp_path, f"; a comment\n{HEAD}{BOX}{cases}").forbidden()
    assert first.inputs is second.inputs and first.rows.shape == (2, 2) and second.rows.shape == (1, 2)


WRONG = [
    ("(declare-const X_0 Int)", "line 1: X_0 must be Real"),
    ("(declare-const Z Real)", "line 1: variables are X_0"),
    ("(declare-const X_0 Real)\n(declare-const X_0 Real)", "line 2: X_0 is declared twice"),
    ("(declare-const X_1 Real)", "X_0 is not declared"),
    (HEAD + BOX + "(assert (>= Y_0 Y_2))", "line 9: 'Y_2' is not declared"),
    (HEAD + BOX + "(assert (>= Y_0 nan))", "line 9: 'nan' is neither a number"),
    (HEAD + BOX + "(assert (>= Y_0 1e31))", "line 9: 1e31 is larger than 1e30"),
    (HEAD + BOX + "(assert (>= (* Y_0 Y_1) 1))", "line 9: a product of variables"),
    (HEAD + BOX + "(assert (>= Y_0 Y_0))", "line 9: an inequality needs a variable"),
    (HEAD + BOX + "(assert\n(< Y_0 1))", "line 10: expected (and ...)"),
    (HEAD + BOX + "(assert (=> Y_0 1))", "received '(=> Y_0 1)'"),
    (HEAD + BOX + "(assert (and))", "line 9: expected (and ...)"),
    (HEAD + BOX + "(assert (>= Y_0 1)", "line 9: this '(' is never closed"),
    (HEAD + BOX + "(assert (>= Y_0 1)))", "line 9: ')' closes nothing"),
    (HEAD + BOX + "check-sat", "line 9: expected '('"),
    (HEAD + BOX + "(check-sat)", "line 9: expected (declare-const"),
    (HEAD + BOX + "(assert (>= X_0 Y_0))", "line 9: an inequality between inputs and outputs"),
    (HEAD + BOX + "(assert (>= (+ X_0 X_1) 0))\n(assert (>= Y_0 0))", "line 9: inputs must lie in a box"),
    (HEAD + "(assert (<= X_0 1))\n(assert (>= Y_0 1))", "X_0 has no lower bound"),
    (HEAD + BOX, "says nothing about outputs"),
    (HEAD + BOX + "(assert " + "(and " * 200 + "(>= Y_0 1)" + ")" * 201, "line 9: more than 100 parentheses"),
    (HEAD + BOX + "(assert (or (>= Y_0 1) (>= Y_1 1)))\n" * 20, "1048576 cases"),
    (HEAD + BOX + "(assert (>= (* 1.00000000000000000001 Y_0) 1))", "line 9: the coefficient of Y_0"),
    (HEAD + BOX + "(assert (>= (* 1e-320 Y_0) 1))", "line 9: the constant is too large for coefficients so small"),
    (HEAD + BOX + "(assert (>= (+ (* 1e-320 Y_0) Y_1) 1))", "line 9: the coefficient of Y_1"),
    (HEAD + BOX + "(assert (>= Y_0 1))\n" * 1500 + "(assert (or (>= Y_0 1) (>= Y_1 1)))\n" * 14, "in all"),
    ("", "X_0 is not declared"),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG, ids=range(len(WRONG)))
def test_malformed_files_are_refused_in_one_line(tmp_path, text, complaint):
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path, text).forbidden()
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("p.vnnlib")


def test_bytes_are_refused(tmp_path):
    (tmp_path / "p.vnnlib").write_bytes(b"\xff\xfe(")
    with pytest.raises(FileFormatError, match="not a text in UTF-8"):
        read_property(tmp_path / "p.vnnlib")


def test_damaged_files_lead_to_no_other_error(tmp_path):
    whole = HEAD + BOX + "(assert (or (and (>= Y_0 1) (<= Y_1 (+ Y_0 2.5))) (<= (- Y_1) 0)))"
    draw = random.Random(1)
    for _ in range(300):
        damaged = list(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(damaged))
            damaged[at] = draw.choice(["(", ")", " ", "-", "9", "e", "\n", "X_1", "or", "and", "*", ";", ""])
        with contextlib.suppress(FileFormatError):
            read(tmp_path, "".join(damaged)).forbidden()
