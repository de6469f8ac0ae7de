"""Bounds at the ends of the number range: weights, offsets, inputs and radii of any size, evaluated in 60 digits.

A comparison is one bound with a finite end against one point of the set. A trial has a form of two layers, a loop
or a network that conversion would multiply out, one kind of set, and scales of its own for every part.
"""

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import mpmath
import numpy as np
import torch
from mpmath import mpf
from torch import Tensor, nn

from tests.campaigns.sixty_digits import (
    PHI,
    Array,
    FunctionalNorm,
    Layers,
    Loop,
    Pooled,
    Residual,
    Scaled,
    network,
    numbers,
    set_digits,
)
from tests.campaigns.soundness_bounds import Tally
from wellposed.errors import WellposedError
from wellposed.forms import Block, Dense, ImplicitForm
from wellposed.robust import (
    METHODS,
    Ball,
    Bounds,
    Box,
    SparseBox,
    Uncertainty,
    certified,
    lipschitz,
    margin_bounds,
    output_bounds,
    sensitivity,
    state_bounds,
)

REACH = {torch.float32: 38.0, torch.float64: 300.0}  # powers of ten
UNIT_VECTORS = [
    (1, 0, 0),
    (0, -1, 0),
    (0, 0, 1),
    (3, 4, 0),
    (-4, 0, 3),
    (1, 2, 2),
    (-2, 1, 2),
    (2, -2, -1),
    (2, 3, 6),
]
BATCH = 8
SLOW, DECIDING = ("lp", "triangle", "best", "optimised"), ("crown", "interval")
_ROOT = np.frompyfunc(mpmath.sqrt, 1, 1)


class Draw:
    """Random numbers of any size, of one type."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def uniform(self, low: float, high: float) -> float:
        """Draws one number."""
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def choice(self, options: Any) -> Any:
        """Picks one of a few."""
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def powers(self, count: int) -> list[float]:
        """Draws powers of ten, mild ones, extreme ones or such that multiply to something mild."""
        reach = self.choice([1.0, REACH[self.dtype] / count, 0.9 * REACH[self.dtype], REACH[self.dtype]])
        drawn = [self.uniform(-reach, reach) for _ in range(count)]
        if self.uniform(0, 1) < 0.6:
            rest = self.choice([0.0, REACH[self.dtype], -REACH[self.dtype]]) * self.uniform(0, 1)
            drawn[-1] = min(max(rest - sum(drawn[:-1]), -REACH[self.dtype]), REACH[self.dtype])
        return drawn

    def tensor(self, shape: tuple[int, ...], power: float) -> Tensor:
        """Draws numbers of a size; some are zero, and a few a little larger or smaller than the rest."""
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        value = value * 10.0 ** (2 * torch.randn(shape, generator=self.generator, dtype=torch.float64)).clamp(
            -3, 1
        )
        value = torch.where(torch.rand(shape, generator=self.generator) < 0.1, 0.0, value)
        limit = float(torch.finfo(self.dtype).max)
        return (value * 10.0 ** min(power, 307.0)).clamp(-limit, limit).to(self.dtype)


def layers(draw: Draw, p: int) -> tuple[ImplicitForm, Layers]:
    """Two layers that read the input, each with its own activation."""
    first, second, q = 2, 2, 2
    w1, w2, w3, b1, b2 = draw.powers(5)
    phi = [draw.choice(list(PHI)), draw.choice(list(PHI))]
    B = torch.cat(
        [draw.tensor((first, p), w1), draw.tensor((second, p), w1 if draw.uniform(0, 1) < 0.3 else -400)]
    )
    A, C, D = (
        draw.tensor((second, first), w2),
        draw.tensor((q, 4), w3),
        draw.tensor((q, p), draw.choice([w1, -400])),
    )
    offsets = draw.choice([-400.0, 0.0, None])
    b = torch.cat(
        [draw.tensor((2,), b1 if offsets is None else offsets), draw.tensor((2,), b2 if offsets is None else -400)]
    )
    c = draw.tensor((q,), w3 if offsets is None else -400)
    form = ImplicitForm(Block((2, 2), (2, 2), {(1, 0): Dense(A)}, draw.dtype), B, C, D, b, phi, output_bias=c)
    return form, Layers(A, B, C, D, b, c, phi)


def loop(draw: Draw, p: int) -> tuple[ImplicitForm, Loop]:
    """A ring of two ReLU states in units of their own, with a gain below one."""
    w1, w2, w3 = draw.powers(3)
    units = torch.tensor([0.0, draw.uniform(-0.4, 0.4) * REACH[draw.dtype]], dtype=torch.float64)
    A = draw.tensor((2, 2), 0.0).double()
    A = A / A.abs().sum(1, keepdim=True).clamp(min=1e-6) * draw.choice([0.3, 0.9])
    A = (A * 10.0 ** (units[:, None] - units[None, :])).to(draw.dtype)
    B, C, D = draw.tensor((2, p), w1), draw.tensor((2, 2), w3), draw.tensor((2, p), draw.choice([w2, -400]))
    b, c = draw.tensor((2,), draw.choice([w2, -400])), draw.tensor((2,), -400)
    return ImplicitForm(A, B, C, D, b, output_bias=c), Loop(A, B, C, D, b, c)


def folding(draw: Draw, p: int) -> nn.Sequential:
    """A network whose layers conversion multiplies out, in evaluation mode."""
    scales = draw.powers(4) if draw.uniform(0, 1) < 0.5 else [0.0] * 4

    def linear(m: int, n: int, power: float) -> nn.Linear:
        part = nn.Linear(m, n, dtype=draw.dtype)
        part.weight.data, part.bias.data = draw.tensor((n, m), power), draw.tensor((n,), draw.choice([power, 0.0]))
        return part

    def norm(n: int) -> nn.Module:
        part = nn.BatchNorm1d(n, dtype=draw.dtype)
        part.weight.data, part.bias.data = draw.tensor((n,), scales[1]), draw.tensor((n,), draw.choice(scales))
        part.running_mean = draw.tensor((n,), draw.choice(scales))
        part.running_var = draw.tensor((n,), draw.choice([0.0, min(scales[2], 30.0)])).abs()
        return part if draw.uniform(0, 1) < 0.5 else FunctionalNorm(part)

    def pool() -> list[nn.Module]:
        part = Pooled(*draw.choice([(2, 1, True), (3, 1, False)]))
        return [part, linear(part(torch.zeros(1, 4, dtype=draw.dtype)).shape[1], 4, 0.0)]

    kinds: list[Callable[[], list[nn.Module]]] = [
        lambda: [norm(4)],
        lambda: [linear(4, 4, scales[1])],
        lambda: [Residual(linear(4, 4, scales[2]))],
        lambda: [Scaled()],
        lambda: cancelling(linear(4, 4, 0.0)),
        pool,
    ]
    middle = [part for _ in range(draw.choice([1, 2, 3])) for part in draw.choice(kinds)()]
    phi = draw.choice([nn.ReLU, nn.Tanh, nn.Sigmoid])()
    return nn.Sequential(linear(p, 4, scales[0]), *middle, phi, linear(4, 2, scales[3])).eval()


def cancelling(part: nn.Linear) -> list[nn.Module]:
    """Adds an image of offsets and takes it away again: what is left is what folding rounds."""
    other = nn.Linear(4, 4, dtype=part.weight.dtype)
    other.weight.data = -torch.eye(4, dtype=part.weight.dtype)
    other.bias.data = (part.weight.data.double() @ part.bias.data.double()).to(part.weight.dtype)
    again = nn.Linear(4, 4, dtype=part.weight.dtype)
    again.weight.data, again.bias.data = part.weight.data.clone(), torch.zeros_like(part.bias.data)
    return [Residual(nn.Identity()), part, again, other]


class Trial:
    """One model, one set and its points."""

    def __init__(self, seed: int, number: int, dtype: torch.dtype) -> None:
        set_digits(dtype)
        draw = self.draw = Draw(1_000_003 * seed + number, dtype)
        self.tally, p = Tally(), 3
        kind = ("layers", "layers", "loop", "network")[number % 4]
        self.model: Any
        if kind == "network":
            self.model, self.oracle = folding(draw, p), None
        else:
            self.model, self.oracle = (layers if kind == "layers" else loop)(draw, p)
        sizes = [draw.choice([0.0, draw.uniform(-1, 1) * REACH[dtype]]) for _ in range(BATCH)]
        limit = float(torch.finfo(dtype).max) / 4  # ends of a set that overflow are refused
        self.center = torch.cat([draw.tensor((1, p), size) for size in sizes]).clamp(-limit, limit)
        radii = [draw.tensor((1,), draw.choice([size, size - 3, size - 20, -400.0])).abs() for size in sizes]
        self.set, self.points = self._around(torch.cat(radii).clamp(max=limit))
        self.about = {"model": kind, "trial": number, "dtype": str(dtype)[6:], "set": type(self.set).__name__}
        flat = self.points.reshape(-1, p)
        x = None if self.oracle is None else self.oracle.states(flat)
        y = network(self.model, flat) if self.oracle is None else self.oracle.outputs(flat, x)
        self.x, self.y = (None if part is None else part.reshape(BATCH, -1, part.shape[1]) for part in (x, y))
        self.tally.points[type(self.set).__name__] += len(flat)
        self.tally.models[f"{kind}, {self.about['dtype']}"] += len(flat)

    def _around(self, radius: Tensor) -> tuple[Uncertainty, Array]:
        """Sets, and points of them, (B, N, p), as exact numbers."""
        kind, c, r = self.draw.choice([Box, Box, SparseBox, Ball]), numbers(self.center), numbers(radius)
        if kind is Box:
            moves = numbers(np.array([*product((-1, 1), repeat=3), (0, 0.5, 0)], dtype=float))
            points: Uncertainty = Box.around(self.center, radius[:, None].expand(-1, 3), None, None)
        elif kind is SparseBox:
            ways = [[s if k == j else 0 for k in range(3)] for j in range(3) for s in (-1, 1)]
            moves = numbers(np.array([[0, 0, 0], *ways], dtype=float))
            points = SparseBox(self.center, radius[:, None].expand(-1, 3), 1)
        else:
            lengths = [mpf(sum(e * e for e in way)) ** 0.5 * (1 + mpf(10) ** -70) for way in UNIT_VECTORS]
            moves = numbers(np.array(UNIT_VECTORS, dtype=float)) / np.array(lengths, dtype=object)[:, None]
            points = Ball(self.center, radius)
        return points, c[:, None, :] + r[:, None, None] * moves[None]

    def compare(self, kind: str, bounds: Bounds, value: Array) -> None:
        """Counts what has a finite end, and notes what lies outside."""
        lower, upper = (end.double().numpy()[:, None, :] for end in (bounds.lower, bounds.upper))
        finite, broken = np.isfinite(lower) | np.isfinite(upper), np.isnan(lower) | np.isnan(upper)
        self.tally.kinds[kind] += int((finite | broken).sum()) * value.shape[1]
        outside = (numbers(lower) > value) | (numbers(upper) < value) | broken
        for index in list(zip(*outside.nonzero(), strict=True))[:1]:
            b, _, k = index
            note = {"kind": kind, "points": int(outside.sum()), "lower": lower[b, 0, k], "upper": upper[b, 0, k]}
            self.tally.wrong.append(
                {**note, "value": mpmath.nstr(value[index], 20), "sample": int(b), "row": int(k), **self.about}
            )

    def values(self) -> None:
        """Every method for outputs and margins, and for states where their equation is known."""
        target = torch.zeros(BATCH, dtype=torch.long)
        rare = self.about["trial"] % 16 < 4
        for method in METHODS if rare else [name for name in METHODS if name not in SLOW]:
            outputs = tried(output_bounds, self.model, self.set, method)
            if outputs is None:
                continue
            self.compare(f"outputs, {method}", outputs, self.y)
            if self.x is not None and (states := tried(state_bounds, self.model, self.set, method)) is not None:
                self.compare(f"states, {method}", states, self.x)
            if method in DECIDING or rare:
                margins = tried(margin_bounds, self.model, self.set, target, method)
                if margins is not None:
                    self.compare(f"margins, {method}", margins, self.y - self.y[:, :, :1])
                self.classes(method)

    def classes(self, method: str) -> None:
        """A class is certified only if every point has it."""
        for target in (0, 1):
            proven = tried(certified, self.model, self.set, torch.full((BATCH,), target), method)
            if proven is None:
                continue
            lost = (self.y[:, :, target] <= self.y[:, :, 1 - target]) & proven.numpy()[:, None]
            self.tally.kinds[f"class, {method}"] += int(proven.sum()) * lost.shape[1]
            if lost.any():
                self.tally.wrong.append({"kind": f"class, {method}", "target": target, **self.about})

    def changes(self) -> None:
        """Pairs of points against the sensitivity matrix and Lipschitz constants."""
        count = len(self.y[0])
        pairs = np.array([(i, j) for i, j in combinations(range(count), 2) if (i + j) % 3 == 0])
        u, y = (np.abs(part[:, pairs[:, 0]] - part[:, pairs[:, 1]]).reshape(-1, part.shape[2])
                for part in (self.points, self.y))  # fmt: skip
        S = tried(sensitivity, self.model, (3,))
        if S is not None:
            top = u @ np.where(np.isfinite(S.numpy()), numbers(S), mpf("1e100000")).T
            self._above("sensitivity", top, y)
        sizes = {"1": lambda z: z.sum(1), "inf": lambda z: z.max(1), "2": lambda z: _ROOT((z * z).sum(1))}
        for norm, size in sizes.items():
            constant = tried(lipschitz, self.model, norm, (3,))
            if constant is not None and constant < float("inf"):
                before, after = (np.asarray(size(part), dtype=object)[:, None] for part in (u, y))
                self._above(f"Lipschitz constant, {norm}", before * mpf(constant) * (1 + mpf(10) ** -70), after)

    def _above(self, kind: str, bound: Array, value: Array) -> None:
        self.tally.kinds[kind] += value.size
        if (bad := value > bound).any():
            self.tally.wrong.append({"kind": kind, "points": int(bad.sum()), **self.about})


def tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """Asks for a bound; None where the library says why there is none."""
    try:
        return function(*arguments)
    except WellposedError:
        return None


def trial(seed: int, number: int, dtype: torch.dtype) -> Tally:
    """Compares everything that is said of one model."""
    one = Trial(seed, number, dtype)
    one.values()
    one.changes()
    return one.tally
