"""Checks of the options and matrices of a model."""

from torch import Tensor

from wellposed.conditions.conditions import Condition, Triangular, get_condition
from wellposed.equilibrium.fixed_point import require_finite
from wellposed.errors import InputError


def choose_condition(condition: str | Condition, kappa: float | None, triangular: bool) -> Condition:
    """Returns the condition behind the options of a model; raises where they contradict each other."""
    rule = get_condition(condition)
    if triangular:
        if rule.name not in ("inf", "triangular"):
            raise InputError(
                f"triangular=True caps rows of A and cannot be combined with condition={rule.name!r}; drop one"
            )
        return Triangular()
    if kappa is None:
        raise InputError("kappa=None (no cap on A) is possible only with triangular=True; give kappa below one")
    return rule


def check_matrices(A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None) -> None:
    """Raises unless matrices fit together, share a dtype and are finite."""
    if A.dim() != 2 or B.dim() != 2 or C.dim() != 2 or A.shape[0] != A.shape[1]:
        raise InputError(
            f"A is (n, n), B (n, p) and C (q, n); received {tuple(A.shape)}, {tuple(B.shape)}, {tuple(C.shape)}"
        )
    n, p, q = A.shape[0], B.shape[1], C.shape[0]
    expected = {"B": (B, (n, p)), "C": (C, (q, n)), "D": (D, (q, p)), "bias": (bias, (n,))}
    for name, (value, shape) in expected.items():
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise InputError(f"{name} must have the shape {shape} to fit A; received {tuple(value.shape)}")
        if value.dtype != A.dtype:
            raise InputError(f"all matrices share one dtype; A is {A.dtype} and {name} {value.dtype}")
        require_finite(name, value)
