"""Properties of networks from VNN-LIB files, as the verification competitions (VNN-COMP) write them.

A file declares inputs ``X_i`` and outputs ``Y_j`` and asserts what a counter-example fulfils: linear inequalities,
joined by ``and`` and ``or``. Those of inputs must be the ends of boxes. Numbers are read exactly; the ends of
boxes and the constants of inequalities are rounded so that the set of counter-examples never shrinks.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from wellposed.errors import FileFormatError
from wellposed.robust.certification import Forbidden
from wellposed.robust.sets import Box

_TOKEN = re.compile(r"[()]|;[^\n]*|[^\s();]+|\n")
_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][+-]?\d{1,3})?", re.ASCII)
_VARIABLE = re.compile(r"([XY])_(0|[1-9]\d{0,7})", re.ASCII)
MOST_CASES = 100_000  # conjunctions that a property may be written out as
MOST_TERMS = 20_000_000  # inequalities in all of them together, counted by the first cases
LARGEST = 10**30  # number
DEEPEST = 100  # parentheses within each other


class _Node(NamedTuple):
    """A word, or a list in parentheses, with the line on which it begins."""

    value: "str | tuple[_Node, ...]"
    line: int


class Inequality(NamedTuple):
    """``sum of coefficients times variables <= constant``."""

    coefficients: Mapping[str, Fraction]
    constant: Fraction
    line: int


Cases = tuple[tuple[Inequality, ...], ...]  # an "or" of "and"s


@dataclass(frozen=True, eq=False)
class Property:
    """What a file says.

    Args:
        inputs, outputs: how many variables X and Y it declares.
        cases: a counter-example fulfils all inequalities of one of them.
        name: of the file, for messages.
    """

    inputs: int
    outputs: int
    cases: Cases
    name: str = "property"

    def forbidden(self, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float64) -> list[Forbidden]:
        """Returns the sets that the outputs must avoid; cases whose box is empty are left out.

        Args:
            shape: of an input; flat if None.
            dtype: of the boxes, which are rounded outward.
        """
        boxes: dict[tuple[tuple[Fraction, Fraction], ...], Box] = {}
        sets = []
        for case in self.cases:
            ends = self._ends(case)
            if any(low > high for low, high in ends):
                continue
            if ends not in boxes:
                lower, upper = (_outward([end[side] for end in ends], side, dtype) for side in (0, 1))
                size = tuple(shape or (self.inputs,))
                boxes[ends] = Box(lower.reshape(1, *size), upper.reshape(1, *size))
            rows = [self._row(one) for one in case if any(name[0] == "Y" for name in one.coefficients)]
            if not rows:
                raise FileFormatError(f"{self.name}: a case says nothing about outputs, so any input fulfils it")
            table = torch.tensor([row for row, _ in rows], dtype=torch.float64)
            sets.append(Forbidden(boxes[ends], table, torch.tensor([c for _, c in rows], dtype=torch.float64)))
        return sets

    def _ends(self, case: tuple[Inequality, ...]) -> tuple[tuple[Fraction, Fraction], ...]:
        """Intersects the bounds of every input."""
        lower: dict[str, Fraction] = {}
        upper: dict[str, Fraction] = {}
        for one in case:
            kinds = {name[0] for name in one.coefficients}
            if kinds == {"X", "Y"}:
                self._fail(one.line, "an inequality between inputs and outputs is not supported")
            if kinds == {"X"}:
                if len(one.coefficients) > 1:
                    self._fail(one.line, "inputs must lie in a box, so an inequality names one of them only")
                ((name, factor),) = one.coefficients.items()
                end = one.constant / factor
                if factor > 0:
                    upper[name] = min(end, upper.get(name, end))
                else:
                    lower[name] = max(end, lower.get(name, end))
        names = [f"X_{k}" for k in range(self.inputs)]
        for name in names:
            if name not in lower or name not in upper:
                side = "lower" if name not in lower else "upper"
                raise FileFormatError(f"{self.name}: {name} has no {side} bound in every case; assert one")
        return tuple((lower[name], upper[name]) for name in names)

    def _row(self, one: Inequality) -> tuple[list[float], float]:
        """Writes ``constant - coefficients y >= 0`` in whole numbers, which are floating-point numbers too."""
        scale = math.lcm(*(factor.denominator for factor in one.coefficients.values()))
        row = [0.0] * self.outputs
        for name, factor in one.coefficients.items():
            whole = -scale * factor
            if abs(whole) >= 2**53:
                self._fail(one.line, f"the coefficient of {name} has more than 15 digits")
            row[int(name[2:])] = float(whole)
        if abs(scale * one.constant) > LARGEST**2:
            self._fail(one.line, "the constant is too large for coefficients so small")
        return row, _rounded(scale * one.constant, 1)

    def _fail(self, line: int, message: str) -> NoReturn:
        raise FileFormatError(f"{self.name}, line {line}: {message}")


def read_property(path: str | os.PathLike[str]) -> Property:
    """Reads a VNN-LIB file.

    Raises:
        FileFormatError: it is malformed, with the line; or it says more than boxes and linear inequalities can.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "small.vnnlib"
        >>> _ = path.write_text('''(declare-const X_0 Real) (declare-const Y_0 Real)
        ... (assert (<= X_0 0.5)) (assert (>= X_0 0)) (assert (>= Y_0 1))''')
        >>> [(one.inputs.upper.tolist(), one.rows.tolist()) for one in read_property(path).forbidden()]
        [([[0.5]], [[1.0]])]
    """
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{os.fspath(path)} is not a text in UTF-8: {error.reason}") from error
    return _Reader(os.path.basename(path)).read(text)


class _Reader:
    """Reads the text of one file."""

    def __init__(self, name: str) -> None:
        self.name, self.declared = name, set[str]()

    def read(self, text: str) -> Property:
        """Reads declarations and assertions."""
        asserted: list[Cases] = []
        for node in self._nodes(text):
            match node.value:
                case (_Node("declare-const"), _Node(str(variable)), _Node(kind)):
                    self._declare(variable, kind, node.line)
                case (_Node("assert"), formula):
                    asserted.append(self._cases(formula))
                case _:
                    self._fail(node.line, "expected (declare-const NAME Real) or (assert ...)", node)
        inputs, outputs = (self._count(kind) for kind in "XY")
        return Property(inputs, outputs, self._all_of(asserted, 1), self.name)

    def _count(self, kind: str) -> int:
        """Counts the variables of a kind, which are numbered from 0."""
        size = sum(name[0] == kind for name in self.declared)
        for name in (f"{kind}_{k}" for k in range(max(size, 1))):
            if name not in self.declared:
                raise FileFormatError(f"{self.name}: {name} is not declared; variables are numbered from 0")
        return size

    def _nodes(self, text: str) -> Iterator[_Node]:
        """Yields the lists of the file, one after the other."""
        line, stack = 1, list[tuple[int, list[_Node]]]()
        for token in _TOKEN.findall(text):
            if token == "\n":
                line += 1
            elif token == "(":
                stack.append((line, []))
                if len(stack) > DEEPEST:
                    self._fail(line, f"more than {DEEPEST} parentheses within each other")
            elif token == ")":
                if not stack:
                    self._fail(line, "')' closes nothing")
                began, content = stack.pop()
                node = _Node(tuple(content), began)
                if stack:
                    stack[-1][1].append(node)
                else:
                    yield node
            elif token[0] != ";":
                if not stack:
                    self._fail(line, f"expected '(' and received {token[:40]!r}")
                stack[-1][1].append(_Node(token, line))
        if stack:
            self._fail(stack[-1][0], "this '(' is never closed")

    def _declare(self, variable: str, kind: Any, line: int) -> None:
        if not _VARIABLE.fullmatch(variable):
            self._fail(line, f"variables are X_0, X_1, ... and Y_0, Y_1, ...; received {variable[:40]!r}")
        if variable in self.declared:
            self._fail(line, f"{variable} is declared twice")
        if kind != "Real":
            self._fail(line, f"{variable} must be Real")
        self.declared.add(variable)

    def _cases(self, node: _Node) -> Cases:
        """Writes a formula as an "or" of "and"s."""
        match node.value:
            case (_Node("and"), first, *rest):
                return self._all_of([self._cases(part) for part in (first, *rest)], node.line)
            case (_Node("or"), first, *rest):
                cases = tuple(itertools.chain.from_iterable(self._cases(part) for part in (first, *rest)))
                return self._few(cases, len(cases), node.line)
            case (_Node("<=" | ">=" as sign), left, right):
                return ((self._inequality(left, right, sign, node.line),),)
        self._fail(node.line, "expected (and ...), (or ...), (<= a b) or (>= a b)", node)

    def _all_of(self, several: list[Cases], line: int) -> Cases:
        """Multiplies out."""
        count = math.prod(map(len, several))
        self._few((), count, line)
        if count * sum(len(cases[0]) for cases in several) > MOST_TERMS:
            self._fail(line, f"{count} cases of so many inequalities are more than {MOST_TERMS:,} in all")
        return tuple(tuple(itertools.chain.from_iterable(choice)) for choice in itertools.product(*several))

    def _few(self, cases: Cases, count: int, line: int) -> Cases:
        if count > MOST_CASES:
            self._fail(line, f"the property has {count} cases; at most {MOST_CASES} are read")
        return cases

    def _inequality(self, left: _Node, right: _Node, sign: str, line: int) -> Inequality:
        (one, constant), (other, more) = (self._linear(part) for part in (left, right))
        flip = 1 if sign == "<=" else -1
        zero = Fraction(0)
        both = {name: flip * (one.get(name, zero) - other.get(name, zero)) for name in {**one, **other}}
        coefficients = {name: factor for name, factor in both.items() if factor}
        if not coefficients:
            self._fail(line, "an inequality needs a variable")
        return Inequality(coefficients, flip * (more - constant), line)

    def _linear(self, node: _Node) -> tuple[dict[str, Fraction], Fraction]:
        """Reads a sum: coefficients of the variables, and what has none."""
        if isinstance(node.value, str):
            if _NUMBER.fullmatch(node.value):
                number = Fraction(node.value)
                if abs(number) > LARGEST:
                    self._fail(node.line, f"{node.value[:40]} is larger than 1e30")
                return {}, number
            if node.value in self.declared:
                return {node.value: Fraction(1)}, Fraction(0)
            fault = "is not declared" if _VARIABLE.fullmatch(node.value) else "is neither a number nor a variable"
            self._fail(node.line, f"{node.value[:40]!r} {fault}")
        match node.value:
            case (_Node("+"), first, *rest):
                return self._sum([(1, part) for part in (first, *rest)])
            case (_Node("-"), only):
                return self._sum([(-1, only)])
            case (_Node("-"), first, *rest):
                return self._sum([(1, first), *((-1, part) for part in rest)])
            case (_Node("*"), left, right):
                (one, constant), (other, factor) = self._linear(left), self._linear(right)
                if one and other:
                    self._fail(node.line, "a product of variables is not linear")
                scale = constant if other else factor
                product = {name: scale * value for name, value in {**one, **other}.items()}
                return product, constant * factor
        self._fail(node.line, "expected a number, a variable, (+ ...), (- ...) or (* a b)", node)

    def _sum(self, terms: list[tuple[int, _Node]]) -> tuple[dict[str, Fraction], Fraction]:
        total: dict[str, Fraction] = {}
        constant = Fraction(0)
        for sign, node in terms:
            coefficients, more = self._linear(node)
            constant += sign * more
            for name, factor in coefficients.items():
                total[name] = total.get(name, Fraction(0)) + sign * factor
        return total, constant

    def _fail(self, line: int, message: str, node: _Node | None = None) -> NoReturn:
        received = "" if node is None else f"; received {_text(node)[:60]!r}"
        raise FileFormatError(f"{self.name}, line {line}: {message}{received}")


def _text(node: _Node) -> str:
    return node.value if isinstance(node.value, str) else f"({' '.join(map(_text, node.value))})"


def _rounded(value: Fraction, direction: int) -> float:
    """Rounds to float64, up for a direction of 1 and down for -1."""
    near = float(value)
    if (Fraction(near) - value) * direction < 0:
        return math.nextafter(near, direction * math.inf)
    return near


def _outward(ends: list[Fraction], side: int, dtype: torch.dtype) -> Tensor:
    """Rounds lower ends (side 0) down and upper ones (side 1) up."""
    exact = torch.tensor([_rounded(end, 2 * side - 1) for end in ends], dtype=torch.float64)
    near = exact.to(dtype)
    beyond = torch.nextafter(near, torch.full_like(near, math.inf if side else -math.inf))
    inward = near.double() < exact if side else near.double() > exact
    return torch.where(inward, beyond, near)
