"""Equations with their solutions, and the same model in each library at any tolerance."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem, state_matrix
from benchmarks.rivals.libraries import _TorchdeqModel, torchidl_model
from wellposed import Absolute, ImplicitModel, Relative
from wellposed.activations import get_activation
from wellposed.equilibrium.map import max_norm
from wellposed.kernels.active_set import solve_active_set

FAMILIES = ("positive", "ring", "shift", "trained")
TOLERANCES = tuple(3.0 ** -(k % 2) * 10.0 ** -(k // 2) for k in range(4, 15))  # 1e-2, 3e-3, ..., 1e-7
MAX_STEPS = 20_000


@dataclass(frozen=True)
class Case:
    """``x = relu(Ax + Bu)``, ``y = Cx``, a gradient g of y, and the true y."""

    family: str
    norm: float
    A: Tensor  # (n, n)
    B: Tensor  # (n, p)
    C: Tensor  # (q, n)
    u: Tensor  # (batch, p)
    g: Tensor  # (batch, q)
    exact: Tensor  # (batch, q) float64

    @property
    def size(self) -> tuple[int, int]:
        """States and batch."""
        return self.A.shape[0], self.u.shape[0]

    def error(self, y: Tensor) -> float:
        """Returns the largest error of an output relative to the largest output."""
        return float((y.double() - self.exact).abs().max() / self.exact.abs().max())


def trained(n: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Trains a model on products of sums for sixty steps; returns A with norm one, B and inputs."""
    torch.manual_seed(n)
    model = ImplicitModel(16, 4, n, kappa=0.99)
    u = torch.randn(max(batch, 64), 16)
    target = (u[:, :4] * u[:, 4:8]).cumsum(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        rows = torch.randint(len(u), (64,))
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(u[rows]), target[rows]).backward()
        optimiser.step()
    A = model.A.detach()
    return A / torch.linalg.matrix_norm(A, torch.inf), model.B.detach().clone(), u[:batch]


def make_case(family: str, norm: float, n: int, batch: int) -> Case:
    """Draws a problem and solves it in float64; the residual certifies the solution."""
    generator = torch.Generator().manual_seed(0)
    if family == "trained":
        A, B, u = trained(n, batch)
        A = norm * A
    else:
        A, B, u = (
            state_matrix(family, n, norm, generator),
            torch.eye(n),
            torch.randn(batch, n, generator=generator),
        )
    C, g = torch.randn(10, n, generator=generator) / n**0.5, torch.randn(batch, 10, generator=generator)
    v = u.double() @ B.double().mT
    found = solve_active_set(A.double(), v, get_activation("relu"), stop=Relative(1e-14), max_steps=2000)
    bound = float((found.residual / (1 - norm)).max() / max_norm(found.value).max())
    if not bound <= 1e-9:
        raise RuntimeError(f"no exact solution of {family} {norm}: error up to {bound:.1e}")
    return Case(family, norm, A, B, C, u, g, found.value @ C.double().mT)


def torchidl(case: Case, tolerance: float) -> nn.Module:
    """Returns torchidl's model; its settings are attributes of a class, so every model gets a class of its own."""
    base = import_module("torchidl.implicit_function").ImplicitFunctionInf
    model: Any = torchidl_model(case.A, case.B, case.C, function=type("Own", (base,), {}))
    model.f.set_parameters(tol=tolerance, grad_tol=tolerance, mitr=MAX_STEPS, grad_mitr=MAX_STEPS)
    return model


def _torchdeq(case: Case, solver: str, tolerance: float, max_steps: int) -> nn.Module:
    unit = tolerance * case.A.shape[0] ** 0.5  # it measures 2-norms
    problem = Problem("", case.A, case.B, case.C, case.u, case.g)
    return _TorchdeqModel(problem, solver, unit, max_steps)


def ours(case: Case, tolerance: float, **options: Any) -> ImplicitModel:
    """Returns our model as it comes, but for the tolerance."""
    chosen: dict[str, Any] = {
        "stop": Absolute(tolerance),
        "max_steps": MAX_STEPS,
        "on_failure": "ignore",
    } | options
    return ImplicitModel.from_matrices(case.A, case.B, case.C, **chosen)


LIBRARIES: dict[str, Callable[[Case, float], nn.Module]] = {
    "wellposed": ours,
    "torchidl": torchidl,
    "torchdeq": lambda case, tolerance: _torchdeq(case, "anderson", tolerance, 200),
}


def available() -> list[str]:
    """Lists the libraries that can be imported, ours first.

    The package torchidl imports plotting and convex solvers that its model does not need; without them the model
    is loaded alone.
    """
    found = {name: find_spec(name) for name in LIBRARIES}
    package = found["torchidl"]
    if package is not None and package.origin is not None:
        try:
            import_module("torchidl")
        except ImportError:
            bare: Any = types.ModuleType("torchidl")
            bare.__path__, bare.__spec__ = [str(Path(package.origin).parent)], package
            sys.modules["torchidl"] = bare
            bare.ImplicitModel = import_module("torchidl.implicit_base_model").ImplicitModel
    return [name for name, spec in found.items() if spec is not None]
