"""Fixed-point problems that know their exact solution, and families of state matrices."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, AffineSpec
from wellposed.equilibrium.method import SolveOptions
from wellposed.kernels.cpu.engine import Numba, handover_step, newton_handover, run_kernel
from wellposed.kernels.spec import LINEAR, kernel_spec


@dataclass(frozen=True)
class Problem:
    """A map with a start, inputs and the solution."""

    name: str
    f: Callable[..., Tensor]
    x0: Tensor
    inputs: tuple[Tensor, ...]
    solution: Tensor

    def __str__(self) -> str:
        return self.name


def _affine(n: int, radius: float, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    M = torch.randn(n, n, dtype=torch.float64, generator=generator)
    M = radius * M / torch.linalg.eigvals(M).abs().max()
    u = torch.randn(3, n, dtype=torch.float64, generator=generator)
    solution = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - M, u.mT).mT
    return Problem(f"affine{n}", lambda x, u: x @ M.mT + u, torch.zeros_like(u), (u,), solution)


def _rotation() -> Problem:
    angle = torch.tensor(1.0, dtype=torch.float64)
    M = 0.9 * torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    u = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    solution = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - M, u.mT).mT
    return Problem("rotation", lambda x, u: x @ M.mT + u, torch.zeros_like(u), (u,), solution)


def _cosine() -> Problem:
    x0 = torch.tensor([[0.0], [1.5]], dtype=torch.float64)
    return Problem("cosine", torch.cos, x0, (), torch.full_like(x0, 0.7390851332151607))


def _flat() -> Problem:
    u = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)
    return Problem("flat", lambda x, u: u.clone(), torch.zeros_like(u), (u,), u)


def _quadratic() -> Problem:
    """x = (x^2 + u) / 4 with the solution 2 - sqrt(4 - u)."""
    u = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    return Problem("quadratic", lambda x, u: (x * x + u) / 4, torch.zeros_like(u), (u,), 2 - (4 - u).sqrt())


PROBLEMS = [_affine(200, 0.8, 0), _affine(5, 0.5, 1), _rotation(), _cosine(), _flat(), _quadratic()]


def state_matrix(
    family: str, n: int, norm: float, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draws A with every row sum of |A| equal to `norm`."""
    draw = torch.randn(n, n, dtype=torch.float64, generator=generator)
    matrices = {
        "positive": lambda: torch.rand(n, n, dtype=torch.float64, generator=generator),
        "random": lambda: draw,
        "ring": lambda: torch.eye(n).roll(1, 0).double() + torch.eye(n).roll(-1, 0).double(),
        "shift": lambda: torch.eye(n, dtype=torch.float64).roll(1, 0),
        "sparse": lambda: draw * (torch.rand(n, n, generator=generator) < 0.1) + 0.3 * torch.eye(n),
        "negative": lambda: -torch.rand(n, n, dtype=torch.float64, generator=generator),
        "skew": lambda: draw - draw.mT,
        "nilpotent": lambda: draw.triu(1),
    }
    A = matrices[family]()
    return (norm * A / A.abs().sum(1, keepdim=True).clamp_min(1e-9)).to(dtype)


FAMILIES = ["positive", "random", "ring", "shift", "sparse", "negative", "skew", "nilpotent"]


def compiled_loop(f, x0, solver, stop, max_steps, *, trace=True, automatic=False, sparse=None):
    """Solves what `iterate` solves, by the kernels of numba; `automatic` hands slow samples over to Newton."""
    engine, options = Numba(sparse), SolveOptions(solver, stop, max_steps)
    if isinstance(f, AffineMap):
        spec = AffineSpec(f.activation, options, automatic=automatic)
        assert not engine.why_not(spec, f.factors)
        return engine.solve(spec, f.factors, f.v, x0, trace=trace)
    limit = handover_step(f.offset.shape[1], options) if automatic else max_steps
    kernel = kernel_spec((LINEAR, 0.0), options, x0.dtype, limit)
    iterates = run_kernel(f.factors[0], f.offset, f.slope, x0, kernel, trace=trace)
    return newton_handover(f, iterates, stop, limit, max_steps) if automatic else iterates
