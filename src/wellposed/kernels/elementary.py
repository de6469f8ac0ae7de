"""Lanes of floating point numbers and the elementary functions on them, as LLVM instructions."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lanes:
    """Vectors of `count` floating point numbers with `bits` bits."""

    ir: Any
    bits: int
    count: int

    @property
    def align(self) -> int:
        """Bytes to which a vector is aligned."""
        return self.bits // 8 * self.count

    @property
    def scalar(self) -> Any:
        """The type of one number."""
        return self.ir.FloatType() if self.bits == 32 else self.ir.DoubleType()

    @property
    def vector(self) -> Any:
        """The type of a vector."""
        return self.ir.VectorType(self.scalar, self.count)

    @property
    def integers(self) -> Any:
        """The type of as many integers of the same size."""
        return self.ir.VectorType(self.ir.IntType(self.bits), self.count)

    @property
    def zero(self) -> Any:
        """A vector of zeros."""
        return self.full(0.0)

    @property
    def mantissa(self) -> int:
        """Bits after the binary point."""
        return 23 if self.bits == 32 else 52

    def full(self, value: float) -> Any:
        """Returns a constant vector."""
        return self.ir.Constant(self.vector, [value] * self.count)

    def whole(self, value: int) -> Any:
        """Returns a constant vector of integers."""
        return self.ir.Constant(self.integers, [value] * self.count)

    def splat(self, builder: Any, value: Any) -> Any:
        """Copies one number to all lanes."""
        nothing, index = self.ir.Constant(self.vector, self.ir.Undefined), self.ir.IntType(32)
        single = builder.insert_element(nothing, value, index(0))
        mask = self.ir.Constant(self.ir.VectorType(index, self.count), [0] * self.count)
        return builder.shuffle_vector(single, nothing, mask)

    def call(self, builder: Any, name: str, *arguments: Any) -> Any:
        """Calls one of LLVM's own functions on vectors."""
        module, full = builder.module, f"llvm.{name}.v{self.count}f{self.bits}"
        function = module.globals.get(full)
        if function is None:
            kind = self.ir.FunctionType(self.vector, [self.vector] * len(arguments))
            function = self.ir.Function(module, kind, full)
        return builder.call(function, arguments)

    def larger(self, builder: Any, a: Any, b: Any) -> Any:
        """Returns the larger numbers; where `b` is NaN, `a`."""
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    def smaller(self, builder: Any, a: Any, limit: float) -> Any:
        """Cuts at a limit; NaN stays."""
        return builder.select(builder.fcmp_ordered(">", a, self.full(limit)), self.full(limit), a)


def _power_and_rest(builder: Any, lanes: Lanes, y: Any) -> tuple[Any, Any]:
    """Returns 2^k and expm1(r) for y = k log 2 + r with \\|r\\| <= log(2) / 2."""
    split = 2.0 ** (12 if lanes.bits == 32 else 32)
    high = math.floor(math.log(2) * split) / split  # k times this is exact
    low = float(_LOG2_TAIL + (_LOG2_HEAD - high))
    k = lanes.call(builder, "rint", builder.fmul(y, lanes.full(1 / math.log(2))))
    r = lanes.call(builder, "fma", k, lanes.full(-high), y)
    r = lanes.call(builder, "fma", k, lanes.full(-low), r)
    degree = 8 if lanes.bits == 32 else 14
    series = lanes.full(1 / math.factorial(degree))
    for power in range(degree - 1, 1, -1):
        series = lanes.call(builder, "fma", series, r, lanes.full(1 / math.factorial(power)))
    rest = lanes.call(builder, "fma", builder.fmul(r, r), series, r)
    known = builder.select(builder.fcmp_ordered("==", k, k), k, lanes.zero)  # NaN has no integer
    bias = lanes.whole((1 << (lanes.bits - lanes.mantissa - 2)) - 1)
    exponent = builder.add(builder.fptosi(known, lanes.integers), bias)
    return builder.bitcast(builder.shl(exponent, lanes.whole(lanes.mantissa)), lanes.vector), rest


_LOG2_HEAD, _LOG2_TAIL = math.log(2), 2.3190468138462996e-17  # their sum is log 2 to 107 bits


def tanh(builder: Any, lanes: Lanes, z: Any) -> Any:
    """Returns tanh z = t / (t + 2) with t = exp(2 \\|z\\|) - 1, accurate relative to the result."""
    size = lanes.call(builder, "fabs", z)
    y = lanes.smaller(builder, builder.fadd(size, size), 20.0 if lanes.bits == 32 else 44.0)
    power, rest = _power_and_rest(builder, lanes, y)
    t = lanes.call(builder, "fma", power, rest, builder.fsub(power, lanes.full(1.0)))
    return lanes.call(builder, "copysign", builder.fdiv(t, builder.fadd(t, lanes.full(2.0))), z)


def sigmoid(builder: Any, lanes: Lanes, z: Any) -> Any:
    """Returns 1 / (1 + exp(-z))."""
    limit = 87.0 if lanes.bits == 32 else 708.0
    y = lanes.smaller(builder, builder.fsub(lanes.full(-0.0), z), limit)
    y = builder.select(builder.fcmp_ordered("<", y, lanes.full(-limit)), lanes.full(-limit), y)
    power, rest = _power_and_rest(builder, lanes, y)
    exponential = lanes.call(builder, "fma", power, rest, power)
    return builder.fdiv(lanes.full(1.0), builder.fadd(lanes.full(1.0), exponential))
