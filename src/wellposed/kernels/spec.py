"""What the compiled kernels compute: a solve as plain numbers, and reasons for all that has no kernel.

A `Recipe` holds a solve in the way compiled kernels and custom operators take it. `installation_problem`,
`solver_problem`, `stop_problem`, `map_problem`, `device_problem` and `tensor_problem` each return a sentence about
what the kernels cannot do, and nothing where they can.
"""

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.solvers import Anderson, Picard, Solver, default_ridge
from wellposed.equilibrium.stopping import (
    Absolute,
    Relative,
    Settled,
    Steps,
    Stopping,
    default_tolerance,
    smallest_tolerance,
)
from wellposed.equilibrium.tracing import under_transform

RELU, SLOPED, LINEAR, TANH, SIGMOID = range(5)  # kinds of maps; LINEAR is the adjoint
TOLERANCE, SETTLED, COUNTED = range(3)  # stopping rules
KINDS = {"relu": RELU, "sloped": SLOPED, "tanh": TANH, "sigmoid": SIGMOID}  # by the names in `Traits.kernel`


@dataclass(frozen=True)
class Recipe:
    """What a kernel must know besides matrices and vectors.

    Attributes:
        kind, slope: the activation; the slope is that of leaky ReLU below zero.
        memory: of Anderson's extrapolation, 0 for plain steps; `worth`, `patience` and `ridge` as there.
        rule: accept a residual below ``max(atol, rtol |f(x)|)``, when nothing changes any more or after `limit`
            steps, or exactly after `limit` steps.
    """

    kind: int
    slope: float
    memory: int
    worth: float
    patience: float
    ridge: float
    rule: int
    atol: float
    rtol: float
    limit: int
    max_steps: int


def kind_of(activation: Activation) -> tuple[int, float] | None:
    """Returns the kind and slope of an activation; None if no kernel knows it.

    Example:
        >>> from wellposed.activations import get_activation
        >>> kind_of(get_activation("relu")), kind_of(get_activation("gelu"))
        ((0, 0.0), None)
    """
    kernel, slope = activation.traits.kernel or ("", 0.0)
    return (KINDS[kernel], slope) if kernel in KINDS else None


def make_recipe(
    kind: int, slope: float, solver: Solver, stop: Stopping, max_steps: int, dtype: torch.dtype
) -> Recipe:
    """Writes a solve down in numbers; the solver and the rule must have kernels."""
    eps = torch.finfo(dtype).eps
    atol = rtol = 0.0
    rule = limit = 0
    if isinstance(stop, Absolute):
        atol = stop.atol
    elif isinstance(stop, Relative):
        rtol = max(default_tolerance(dtype) if stop.rtol is None else stop.rtol, 8 * eps)
        atol = smallest_tolerance(dtype) if stop.atol is None else stop.atol
    elif isinstance(stop, Settled):
        rule, limit = SETTLED, stop.depth
    elif isinstance(stop, Steps):
        rule, limit = COUNTED, stop.n
    if not isinstance(solver, Anderson):
        return Recipe(kind, slope, 0, 0.0, 0.0, 0.0, rule, atol, rtol, limit, max_steps)
    ridge = default_ridge(dtype) if solver.ridge is None else solver.ridge
    parts = solver.memory, solver.worth, solver.patience, ridge
    return Recipe(kind, slope, *parts, rule, atol, rtol, limit, max_steps)


DTYPES = (torch.float32, torch.float64)
DEVICE_DTYPES = (*DTYPES, torch.bfloat16, torch.float16)
DEVICE_STATES = 1024  # beyond it one product of a library fills the device
DEVICE_MEMORY = 6  # of Anderson's method; its least squares problem lies in registers


@functools.cache
def installation_problem() -> str:
    """Says what is missing to run the kernels at all; nothing if they can run."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install 'wellposed[fast]'"
    return ""


def solver_problem(solver: Solver, device: str = "cpu") -> str:
    """Says why a solver has no kernel on a device; nothing if it has one.

    Example:
        >>> solver_problem(Picard()), solver_problem(Picard(0.5))
        ('', 'damped steps have no kernel')
    """
    if type(solver) not in (Picard, Anderson):
        return f"solver {type(solver).__name__} has no kernel"
    if isinstance(solver, Picard | Anderson) and solver.damping != 1:
        return "damped steps have no kernel"
    if device == "cuda" and isinstance(solver, Anderson) and solver.memory > DEVICE_MEMORY:
        return f"Anderson with a memory beyond {DEVICE_MEMORY} has no kernel on the GPU"
    return ""


def stop_problem(stop: Stopping) -> str:
    """Says why a stopping rule has no kernel; nothing if it has one.

    Example:
        >>> stop_problem(Relative()), stop_problem(Relative(norm="2"))
        ('', "stopping rule Relative in the norm '2' has no kernel")
    """
    if type(stop) not in (Absolute, Relative, Settled, Steps):
        return f"stopping rule {type(stop).__name__} has no kernel"
    if isinstance(stop, Relative) and stop.norm != "inf":
        return f"stopping rule Relative in the norm {stop.norm!r} has no kernel"
    return ""


def map_problem(f: Map, x: Tensor) -> str:
    """Says why a map has no kernel; nothing if it has one."""
    if under_transform():
        return "values cannot be looked at under vmap, torch.func and torch.compile"
    if not isinstance(f, AffineMap | TransposedMap):
        return f"{type(f).__name__} has no kernel"
    if f.damping != 1:
        return "damped maps have no kernel"
    if len(f.factors) != 1:
        return "low-rank matrices have no kernel"
    if f.factors[0].dim() != 2:
        return "ensembles have no kernel"
    if isinstance(f, AffineMap) and kind_of(f.activation) is None:
        return f"activation {f.activation.name} has no kernel"
    return engine_problem(x, *((kind_of(f.activation) or ()) if isinstance(f, AffineMap) else ()))


def engine_of(x: Tensor) -> str:
    """Names what would compute a solve on the device of `x`."""
    return "triton" if x.device.type == "cuda" else "numba"


def engine_problem(x: Tensor, kind: int = 0, slope: float = 0.0) -> str:
    """Says why states like `x` ``(B, n)`` under an activation have no kernel; nothing if they have one.

    Example:
        >>> engine_problem(torch.zeros(2, 3, dtype=torch.float16))
        'float16 has no kernel'
    """
    if engine_of(x) == "numba":
        return tensor_problem(x) or installation_problem()
    if x.dtype not in DEVICE_DTYPES:
        return f"{str(x.dtype).removeprefix('torch.')} has no kernel"
    if x.shape[-1] > DEVICE_STATES:
        return f"more than {DEVICE_STATES} states have no kernel on the GPU"
    if kind == SLOPED and slope < 0:
        return "leaky_relu with a negative slope has no kernel on the GPU"
    return device_problem(x.device)


@functools.cache
def device_problem(device: torch.device) -> str:
    """Says why a device has no kernels; nothing if it has."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need an NVIDIA GPU of compute capability 8.0 or more"
    return ""


def tensor_problem(x: Tensor) -> str:
    """Says why tensors of this device and dtype have no kernel on the CPU; nothing if they have one.

    Example:
        >>> tensor_problem(torch.zeros(2, 3, dtype=torch.float16))
        'float16 has no kernel'
    """
    if x.device.type != "cpu":
        return f"device {x.device.type} has no kernel"
    return "" if x.dtype in DTYPES else f"{str(x.dtype).removeprefix('torch.')} has no kernel"
