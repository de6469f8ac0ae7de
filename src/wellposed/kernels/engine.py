"""The engines that solve ``x = phi(Ax + v)``, and which of them solves an equation.

`Triton` is for CUDA devices, `Numba` for the CPU, and `Reference`, the plain loop, for everything. Each says in
`why_not` what it cannot do; `choose` takes the first that can, and `explain` does the same and lists the reasons.
"""

from wellposed.equilibrium.affine import REFERENCE, AffineSpec, Engine, Factors
from wellposed.errors import InputError, require, unknown_name
from wellposed.kernels.cpu.engine import Numba, installation_why_not, kernels
from wellposed.kernels.gpu.engine import Triton

Compiled = Triton | Numba
TRITON, NUMBA = Triton(), Numba()
COMPILED = TRITON, NUMBA
ENGINES: tuple[Engine, ...] = (*COMPILED, REFERENCE)
EXECUTORS = ("auto", *(engine.name for engine in ENGINES))


def check_executor(executor: str) -> None:
    """Raises unless an executor of this name exists and can run here.

    Example:
        >>> check_executor("reference")
    """
    if executor not in EXECUTORS:
        raise unknown_name("executor", executor, EXECUTORS)
    if executor == "numba" and installation_why_not():
        kernels()
    if executor == "triton":
        require("triton")


def compiled_engine(spec: AffineSpec, factors: Factors) -> Compiled | None:
    """Returns the first engine with a kernel for an equation with matrices like these; None if none has."""
    asked = (engine for engine in COMPILED if spec.executor in ("auto", engine.name))
    return next((engine for engine in asked if not engine.why_not(spec, factors)), None)


def choose(spec: AffineSpec, factors: Factors) -> Engine:
    """Returns the first engine that can solve an equation with matrices like these.

    Raises:
        InputError: an engine was asked for by name, and cannot.
    """
    engine = compiled_engine(spec, factors)
    if engine is not None or spec.executor in ("auto", REFERENCE.name):
        return engine or REFERENCE
    reason = next(engine for engine in COMPILED if engine.name == spec.executor).why_not(spec, factors)
    raise InputError(f'executor="{spec.executor}" cannot compute this: {reason}; use executor="auto"')


def explain(spec: AffineSpec, factors: Factors, batch: int, more: str = "") -> str:
    """Says which engine solves an equation, and why those before it do not, a line an engine.

    Args:
        spec, factors: the equation, of whose matrices only shape, dtype and device count.
        batch: the number of samples.
        more: appended to the line of the engine with a kernel.
    """
    A, lines = factors[0], list[str]()
    for engine in COMPILED:
        if spec.executor not in ("auto", engine.name):
            continue
        reason = engine.why_not(spec, factors)
        if not reason:
            dtype = str(A.dtype).removeprefix("torch.")
            size = f"{A.shape[0]} states, batch {batch}, {engine.describe(spec, factors)}"
            lines.insert(0, f"{engine.name}: {spec.activation.name}, {dtype}, {size}{more and f', {more}'}")
            return "\n".join(lines)
        lines.append(f"not {engine.name}: {reason}")
    if spec.executor == "auto":
        return "\n".join(["reference: the plain loop", *lines])
    return "\n".join([f'{"none" if lines else "reference"}: executor="{spec.executor}" was asked for', *lines])
