"""What the compiled loop can do, and a sentence about everything that it cannot."""

import functools
import importlib.util

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.anderson import Anderson
from wellposed.equilibrium.map import Map
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.solver import Solver
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Steps, Stopping
from wellposed.equilibrium.transform import under_transform
from wellposed.kernels.recipe import kind_of

DTYPES = (torch.float32, torch.float64)


@functools.cache
def installation_problem() -> str:
    """Says what is missing to run the kernels at all; nothing if they can run."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install 'wellposed[fast]'"
    return ""


def solver_problem(solver: Solver) -> str:
    """Says why a solver has no kernel; nothing if it has one.

    Example:
        >>> solver_problem(Picard()), solver_problem(Picard(0.5))
        ('', 'damped steps have no kernel')
    """
    if type(solver) not in (Picard, Anderson):
        return f"solver {type(solver).__name__} has no kernel"
    if isinstance(solver, Picard | Anderson) and solver.damping != 1:
        return "damped steps have no kernel"
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
    return tensor_problem(x) or installation_problem()


def tensor_problem(x: Tensor) -> str:
    """Says why tensors of this device and dtype have no kernel; nothing if they have one.

    Example:
        >>> tensor_problem(torch.zeros(2, 3, dtype=torch.float16))
        'float16 has no kernel'
    """
    if x.device.type != "cpu":
        return f"device {x.device.type} has no kernel"
    return "" if x.dtype in DTYPES else f"{str(x.dtype).removeprefix('torch.')} has no kernel"
