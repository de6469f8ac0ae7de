"""Equilibria on which solvers differ, with their exact solutions, and the network that convex fits start from."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.harness import relative_error
from wellposed import ImplicitModel, Relative
from wellposed.activations import get_activation
from wellposed.data.cache import MissingDataError
from wellposed.data.images import Images, load_images
from wellposed.equilibrium.maps import max_norm
from wellposed.kernels.cpu.newton import solve_active_set

FAMILIES = ("positive", "random", "ring", "shift")
SIZES = ((20, 128), (64, 512))  # states and batch
PHI = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}
SLOPE = {
    "relu": lambda z: (z > 0).to(z),
    "tanh": lambda z: 1 - torch.tanh(z) ** 2,
    "identity": torch.ones_like,
}


def state_matrix(family: str, n: int, norm: float, generator: torch.Generator) -> Tensor:
    """Draws a float32 A with every row sum of |A| equal to `norm`."""
    A = {
        "positive": lambda: torch.rand(n, n, generator=generator),
        "random": lambda: torch.randn(n, n, generator=generator),
        "ring": lambda: torch.eye(n).roll(1, 0) + torch.eye(n).roll(-1, 0),
        "shift": lambda: torch.eye(n).roll(1, 0),
    }[family]()
    return norm * A / A.abs().sum(1, keepdim=True)


@dataclass(frozen=True)
class Problem:
    """``x = phi(Ax + Bu)``, ``y = Cx`` and the loss ``sum(weights * y)``, in float32.

    With a cap the matrix of the equation is not A but A scaled down to ``|A|_inf = cap``, and the gradient in A
    goes through the scaling.
    """

    name: str
    A: Tensor  # (n, n)
    B: Tensor  # (n, n)
    C: Tensor  # (10, n)
    u: Tensor  # (batch, n)
    weights: Tensor  # (batch, 10)
    activation: str = "relu"
    cap: float | None = None

    @property
    def states(self) -> int:
        """The number of states of a sample."""
        return self.A.shape[0]

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.u.shape[0]

    def capped(self, A: Tensor) -> Tensor:
        """Returns the matrix of the equation, differentiably."""
        if self.cap is None:
            return A
        return A * (self.cap / torch.linalg.matrix_norm(A, torch.inf)).clamp_max(1)


def make_problem(
    name: str,
    A: Tensor,
    batch: int,
    generator: torch.Generator,
    activation: str = "relu",
    cap: float | None = None,
) -> Problem:
    """Adds B = I, an output of ten numbers and inputs, all of the order of one."""
    n = A.shape[0]
    C = torch.randn(10, n, generator=generator) / n**0.5
    u, weights = torch.randn(batch, n, generator=generator), torch.randn(batch, 10, generator=generator)
    return Problem(name, A, torch.eye(n), C, u, weights, activation, cap)


def problems(sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Problem]:
    """Yields the families at two norms, a tanh cell, an affine map and a matrix outside its ball."""
    for n, batch in sizes:
        for family in FAMILIES:
            for norm in (0.9, 0.99):
                generator = torch.Generator().manual_seed(0)
                A = state_matrix(family, n, norm, generator)
                yield make_problem(f"{family} {norm}", A, batch, generator)
        generator = torch.Generator().manual_seed(0)
        W = 0.9 * torch.randn(n, n, generator=generator) / n**0.5
        yield make_problem("tanh cell", W, batch, generator, "tanh")
        A = state_matrix("random", n, 0.95, generator)
        yield make_problem("affine", A, batch, generator, "identity")
        A = 3 * torch.rand(n, n, generator=generator) / n
        yield make_problem("capped", A, batch, generator, cap=0.9)


@dataclass(frozen=True)
class Exact:
    """Outputs and gradients of a problem."""

    output: Tensor  # (batch, 10)
    gradients: dict[str, Tensor]  # of A, B and C


def _state(A: Tensor, v: Tensor, activation: str) -> Tensor:
    """Iterates from zero to the neighbourhood of the equilibrium and polishes by Newton's method."""
    x, identity = torch.zeros_like(v), torch.eye(A.shape[0], dtype=A.dtype)
    for _ in range(3000):
        x = PHI[activation](x @ A.mT + v)
    for _ in range(3):
        z = x @ A.mT + v
        system = identity - SLOPE[activation](z)[:, :, None] * A
        x = x + torch.linalg.solve(system, PHI[activation](z) - x)
    return x


def exact(problem: Problem) -> Exact:
    """Solves the equation and its adjoint ``w = A' d w + C' weights`` for every sample."""
    leaf = problem.A.double().requires_grad_()
    capped = problem.capped(leaf)
    A, B, C = capped.detach(), problem.B.double(), problem.C.double()
    u, weights = problem.u.double(), problem.weights.double()
    x = _state(A, u @ B.mT, problem.activation)
    slope = SLOPE[problem.activation](x @ A.mT + u @ B.mT)
    system = torch.eye(problem.states, dtype=A.dtype) - slope[:, :, None] * A
    w = slope * torch.linalg.solve(system.mT, weights @ C)
    (by_matrix,) = torch.autograd.grad(capped, leaf, w.mT @ x)
    return Exact(x @ C.mT, {"A": by_matrix, "B": w.mT @ u, "C": weights.mT @ x})


@dataclass(frozen=True)
class SolvedProblem:
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
        return relative_error(y, self.exact)


def trained_matrices(n: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
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


def solved_problem(family: str, norm: float, n: int, batch: int) -> SolvedProblem:
    """Draws a problem and solves it in float64; the residual certifies the solution."""
    generator = torch.Generator().manual_seed(0)
    if family == "trained":
        A, B, u = trained_matrices(n, batch)
        A = norm * A
    else:
        A, B, u = (
            state_matrix(family, n, norm, generator),
            torch.eye(n),
            torch.randn(batch, n, generator=generator),
        )
    C, g = torch.randn(10, n, generator=generator) / n**0.5, torch.randn(batch, 10, generator=generator)
    v = u.double() @ B.double().mT
    solution = solve_active_set(A.double(), v, get_activation("relu"), stop=Relative(1e-14), max_steps=2000)
    bound = float((solution.residual / (1 - norm)).max() / max_norm(solution.value).max())
    if not bound <= 1e-9:
        raise RuntimeError(f"no exact solution of {family} {norm}: error up to {bound:.1e}")
    return SolvedProblem(family, norm, A, B, C, u, g, solution.value @ C.double().mT)


def images(split: str) -> tuple[Images, str]:
    """Loads FashionMNIST, or digits where it is missing."""
    try:
        return load_images("fashion-mnist", split), "fashion-mnist"
    except MissingDataError:
        return load_images("digits", split), "digits"


def trained_mlp(data: Images, seed: int = 0, *, bias: bool = True) -> nn.Sequential:
    """Trains the MLP of 002 section 5.2 for a few epochs, 784-64-32-16-10 on FashionMNIST."""
    torch.manual_seed(seed)
    u, y = data.flat(), data.labels
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([u.shape[1], 64, 32, 16, 10]):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(3 if len(u) > 10_000 else 60):
        for rows in torch.randperm(len(u)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(u[rows]), y[rows]).backward()
            optimiser.step()
    return network
