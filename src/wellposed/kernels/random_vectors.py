"""The normal numbers of `kernels.counter` in the vectors of the CPU kernels, as LLVM instructions.

Every lane has a sample and a step of its own; one counter gives four states of it. Logarithm, sine and cosine are
series: what is taken of them is known to lie in small intervals, and no library is called.
"""

import math
from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.counter import MASK, MULTIPLIERS, ROUNDS, WEYL
from wellposed.kernels.elementary import Lanes
from wellposed.kernels.stamp import stamp
from wellposed.kernels.vectors import INDEX, VECTORS, Memory, lanes_of, pointer_of, shifted

numba = require("numba", extra="fast")
_ir = require("llvmlite.ir", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
kept = numba.njit(cache=True, nogil=True, error_model="numpy")
WORD = _ir.IntType(32)
NEAR = 3_037_000_500  # words from here on are uniform numbers above 1 / sqrt(2)


class Words:
    """Vectors of 32-bit words beside the vectors of floating point numbers."""

    def __init__(self, builder: Any, lanes: Lanes) -> None:
        self.builder, self.lanes = builder, lanes
        self.kind, self.wide = _ir.VectorType(WORD, lanes.count), _ir.VectorType(INDEX, lanes.count)
        self.sized = Lanes(_ir, lanes.bits, lanes.count).integers

    def full(self, value: int) -> Any:
        """Returns a constant vector of words."""
        return _ir.Constant(self.kind, [value & MASK] * self.lanes.count)

    def splat(self, value: Any) -> Any:
        """Copies the low word of an integer to all lanes."""
        nothing = _ir.Constant(self.kind, _ir.Undefined)
        single = self.builder.insert_element(nothing, self.builder.trunc(value, WORD), WORD(0))
        mask = _ir.Constant(_ir.VectorType(WORD, self.lanes.count), [0] * self.lanes.count)
        return self.builder.shuffle_vector(single, nothing, mask)

    def load(self, pointer: Any, index: Any) -> Any:
        """Loads integers and keeps their low words."""
        at = self.builder.bitcast(self.builder.gep(pointer, [index]), self.wide.as_pointer())
        return self.builder.trunc(self.builder.load(at, align=8), self.kind)

    def product(self, words: Any, factor: int) -> tuple[Any, Any]:
        """Returns the high and the low words of products with a constant."""
        builder, many = self.builder, self.lanes.count
        long = builder.mul(builder.zext(words, self.wide), _ir.Constant(self.wide, [factor] * many))
        high = builder.lshr(long, _ir.Constant(self.wide, [32] * many))
        return builder.trunc(high, self.kind), builder.trunc(long, self.kind)

    def philox(self, counter: tuple[Any, Any, Any, Any], low: Any, high: Any) -> tuple[Any, Any, Any, Any]:
        """Applies Philox-4x32-10 to counters, with the two words of a key."""
        builder, (a, b, c, d) = self.builder, counter
        for turn in range(ROUNDS):
            key = [builder.add(word, self.full(turn * step)) for word, step in zip((low, high), WEYL, strict=True)]
            (first, new_d), (second, new_b) = self.product(a, MULTIPLIERS[0]), self.product(c, MULTIPLIERS[1])
            a = builder.xor(builder.xor(second, b), key[0])
            c = builder.xor(builder.xor(first, d), key[1])
            b, d = new_b, new_d
        return a, b, c, d

    def number(self, words: Any, signed: bool = False) -> Any:
        """Turns words into floating point numbers."""
        return (self.builder.sitofp if signed else self.builder.uitofp)(words, self.lanes.vector)

    def series(self, s: Any, coefficients: list[float]) -> Any:
        """Evaluates a polynomial, its highest coefficient first."""
        total = self.lanes.full(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.lanes.call(self.builder, "fma", total, s, self.lanes.full(coefficient))
        return total

    def radius(self, words: Any) -> Any:
        """Returns ``sqrt(-2 log u)`` for ``u = (w + 1/2) / 2^32``, accurate also where u is almost one."""
        builder, lanes = self.builder, self.lanes
        half, unit = lanes.full(0.5), lanes.full(2.0**-32)
        u = builder.fadd(self.number(words), half)  # times 2^32
        bits, shift = builder.bitcast(u, self.sized), lanes.whole(lanes.mantissa)
        size = lanes.bits // 8
        root = int(np.array(math.sqrt(0.5), f"f{size}").view(f"i{size}"))
        power = builder.ashr(builder.sub(bits, lanes.whole(root)), shift)  # u = 2^power m, m in [0.7, 1.4)
        m = builder.bitcast(builder.sub(bits, builder.shl(power, shift)), lanes.vector)
        k = builder.fsub(builder.sitofp(power, lanes.vector), lanes.full(32.0))
        near = builder.icmp_unsigned(">=", words, self.full(NEAR))
        below = builder.fmul(builder.fadd(self.number(builder.not_(words)), half), unit)  # 1 - u
        f = builder.select(near, builder.fsub(lanes.zero, below), builder.fsub(m, lanes.full(1.0)))
        k = builder.select(near, lanes.zero, k)
        s = builder.fdiv(f, builder.fadd(lanes.full(2.0), f))
        square, terms = builder.fmul(s, s), 5 if lanes.bits == 32 else 11
        log = builder.fmul(s, self.series(square, [2 / (2 * j + 1) for j in reversed(range(terms))]))
        log = lanes.call(builder, "fma", k, lanes.full(math.log(2)), log)
        return lanes.call(builder, "sqrt", builder.fmul(log, lanes.full(-2.0)))

    def turn(self, words: Any) -> tuple[Any, Any]:
        """Returns the cosine and sine of ``2 pi w / 2^32``."""
        builder, lanes = self.builder, self.lanes
        quarter = builder.lshr(builder.add(words, self.full(1 << 29)), self.full(30))
        rest = builder.sub(words, builder.shl(quarter, self.full(30)))  # within an eighth of a turn
        angle = builder.fmul(self.number(rest, signed=True), lanes.full(2 * math.pi / 2**32))
        square, terms = builder.fmul(angle, angle), 6 if lanes.bits == 32 else 9
        even = [(-1) ** j / math.factorial(2 * j) for j in reversed(range(terms))]
        odd = [(-1) ** j / math.factorial(2 * j + 1) for j in reversed(range(terms))]
        cosine, sine = self.series(square, even), builder.fmul(angle, self.series(square, odd))
        crossed = builder.icmp_unsigned("!=", builder.and_(quarter, self.full(1)), self.full(0))
        across, up = builder.select(crossed, sine, cosine), builder.select(crossed, cosine, sine)
        left = builder.and_(builder.add(quarter, self.full(1)), self.full(2))  # quarters 1 and 2
        return self._signed(across, left), self._signed(up, builder.and_(quarter, self.full(2)))

    def _signed(self, value: Any, flag: Any) -> Any:
        negative = self.builder.icmp_unsigned("!=", flag, self.full(0))
        return self.builder.select(negative, self.builder.fsub(self.lanes.full(-0.0), value), value)

    def normals(self, words: tuple[Any, Any, Any, Any]) -> list[Any]:
        """Applies the Box-Muller transform to four words."""
        found = []
        for first, second in (words[:2], words[2:]):
            size, parts = self.radius(first), self.turn(second)
            found += [self.builder.fmul(size, part) for part in parts]
        return found


@_extending.intrinsic
def draw(
    typing: Any, array: Any, whole: Any, samples: Any, births: Any, now: Any, held: Any, site: Any, low: Any,
    high: Any, out: Any, quads: Any, vectors: Any, raw: Any,
) -> Any:  # fmt: skip
    """Writes normal numbers of every lane to four times `quads` rows of `array` from `out` on.

    Args:
        array: floating point memory of a group.
        whole: int64; has the samples of the lanes at `samples` and when they began at `births`.
        now: the present step; a lane's own is its distance to the beginning, zero if `held`.
        site, low, high: the place, and the words of the seed.
        out, quads, vectors: where to, how many, and vectors at work.
        raw: whether to write words, as floating point numbers, in place of normal numbers.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, whole, samples, births, now, held, site, low, high, out, quads, vectors, raw = arguments
        lanes = lanes_of(signature.args[0])
        words, width = Words(builder, lanes), VECTORS * lanes.count
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        integers = pointer_of(context, builder, signature.args[1], whole)
        keys, place, here = [words.splat(key) for key in (low, high)], words.splat(site), words.splat(now)
        fixed = words.splat(builder.sub(INDEX(0), held))  # all ones if held
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                sample = words.load(integers, shifted(builder, samples, vector * lanes.count))
                begun = words.load(integers, shifted(builder, births, vector * lanes.count))
                step = builder.and_(builder.sub(here, begun), builder.not_(fixed))
                with _cgutils.for_range(builder, quads) as loop:
                    found = words.philox((words.splat(loop.index), step, sample, place), *keys)
                    row = builder.add(out, builder.mul(loop.index, INDEX(4 * width)))
                    plain = builder.icmp_signed("!=", raw, INDEX(0))
                    with builder.if_else(plain) as (then, otherwise):
                        for branch, wanted in ((then, True), (otherwise, False)):
                            with branch:
                                values = [words.number(w) for w in found] if wanted else words.normals(found)
                                for j, value in enumerate(values):
                                    memory.store(value, shifted(builder, row, j * width + vector * lanes.count))
        return context.get_dummy_value()

    return _types.void(array, whole, *(_types.int64,) * 11), code


def _make_fill(stamp: int) -> Any:
    """Returns a kernel that draws outside of a solve."""

    @kept
    def fill(
        y: Any, samples: Any, step: int, site: int, low: int, high: int, work: Any, lanes: Any, raw: int
    ) -> None:
        """Writes the normal numbers of some samples ``(B,)`` at one site of one step to `y` ``(B, n)``."""
        n, width, quads = y.shape[1], len(lanes) // 2 if stamp else 0, (y.shape[1] + 3) // 4
        lanes[:] = 0
        for first in range(0, y.shape[0], width):
            size = min(width, y.shape[0] - first)
            for i in range(size):
                lanes[i] = samples[first + i]
            vectors = 1 if 2 * size <= width else VECTORS
            draw(work, lanes, 0, width, step, 0, site, low, high, 0, quads, vectors, raw)
            for i in range(size):
                for k in range(n):
                    y[first + i, k] = work[k * width + i]

    return fill


fill = _make_fill(stamp("counter", "elementary", "random_vectors", "vectors"))
