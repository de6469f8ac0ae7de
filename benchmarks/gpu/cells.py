"""Equilibria of cells on a GPU: steps captured as CUDA graphs, the same steps one by one, and torchdeq.

All three evaluate the same cell with the same weights and the input half computed once; they run in turns in one
process. Ours stops by its own rule; torchdeq is then given exactly as many evaluations, forward and backward, and
no tolerance, so that the work is equal. Errors are those of the state against a float64 solve to 1e-10, relative
to its largest entry. Twice: as torch comes, with convolutions in TF32 (to 1e-4 of the state), and all in float32
(to 1e-5). cuDNN chooses its algorithms by trying them (benchmark mode), for all.

Run: python -m benchmarks.gpu.cells [--quick]
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import device_times, make_parser, need_cuda, relative_error, save, versions
from benchmarks.rivals.libraries import rival
from wellposed import DEQ, Relative
from wellposed.equilibrium import Anderson, Picard
from wellposed.models import ConvCell, PlainConvCell, TransformerCell
from wellposed.models.cells import Cell

SOLVERS = {"anderson": (Anderson, "anderson"), "picard": (Picard, "fixed_point_iter")}
TOLERANCES = {"tf32": 1e-4, "float32": 1e-5}


def problems() -> dict[str, tuple[Callable[[], Cell], tuple[int, ...]]]:
    """Returns cells and shapes of their inputs."""
    return {
        "conv 16 channels, 16 x 16, batch 16": (lambda: PlainConvCell(3, 16, dims=2), (16, 3, 16, 16)),
        "conv 64 channels, 32 x 32, batch 64": (lambda: PlainConvCell(3, 64, dims=2), (64, 3, 32, 32)),
        "residual block 16 channels, 16 x 16, batch 16": (lambda: ConvCell(3, 16), (16, 3, 16, 16)),
        "residual block 64 channels, 32 x 32, batch 64": (lambda: ConvCell(3, 64), (64, 3, 32, 32)),
        "transformer width 128, 32 tokens, batch 32": (lambda: TransformerCell(128, 4, 256), (32, 32, 128)),
    }


class Rival(nn.Module):
    """The cell under torchdeq, with numbers of evaluations and no tolerance."""

    def __init__(self, cell: Cell, solver: str, forward_steps: int, backward_steps: int) -> None:
        super().__init__()
        self.cell = cell
        self.deq = rival("torchdeq").get_deq(
            f_solver=solver,
            b_solver=solver,
            f_max_iter=forward_steps,
            b_max_iter=backward_steps,
            f_tol=0.0,
            b_tol=0.0,
            ift=True,
        )

    def forward(self, u: Tensor) -> Tensor:
        injection = self.cell.inject(u)
        start = torch.zeros(u.shape[0], *self.cell.state_shape(u), device=u.device)
        return self.deq(lambda x: self.cell.step(x, injection), start)[0][-1]


def milliseconds(runs: dict[str, Callable[[], Tensor]], budget: float) -> dict[str, float]:
    """Returns the median time of every run, after the calls in which graphs are captured."""
    return {name: 1e3 * seconds for name, seconds in device_times(runs, budget, warm_up=4).items()}


def exact(cell: Cell, u: Tensor) -> Tensor:
    """Returns the equilibrium in float64."""
    model = DEQ(copy.deepcopy(cell).double(), stop=Relative(1e-10), executor="reference", max_steps=500)
    with torch.no_grad():
        return model(u.double())


def training_step(model: nn.Module, u: Tensor) -> Callable[[], Tensor]:
    """Returns a run that computes all gradients."""
    with torch.no_grad():
        weights = torch.randn(model(u).shape, device=u.device, generator=torch.Generator(u.device).manual_seed(1))

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        value = model(u)
        (value * weights).sum().backward()
        return value

    return run


def measure(cell: Cell, u: Tensor, solver: str, tolerance: float, budget: float) -> dict[str, Any]:
    """Times one cell under one solver."""
    ours, theirs = SOLVERS[solver]
    options: dict[str, Any] = {"solver": ours(), "stop": Relative(tolerance), "max_steps": 100}
    models: dict[str, nn.Module] = {kind: DEQ(cell, executor=kind, **options) for kind in ("graph", "reference")}
    solution = models["reference"].equilibrium(u)  # type: ignore[operator]
    (solution.value * torch.randn_like(solution.value)).sum().backward()
    steps = int(solution.steps.max()), int(solution.adjoint.steps.max())
    models["torchdeq"] = Rival(cell, theirs, *steps)
    truth, errors = exact(cell, u), {}
    for kind, model in models.items():
        with torch.no_grad():
            errors[kind] = relative_error(model(u), truth)
    with torch.no_grad():
        forward = milliseconds({kind: partial(model, u) for kind, model in models.items()}, budget)
    both = milliseconds({kind: training_step(model, u) for kind, model in models.items()}, budget)
    return {
        "solver": solver,
        "steps": steps,
        "forward_ms": forward,
        "both_ms": both,
        "forward_ratio": forward["torchdeq"] / forward["graph"],
        "both_ratio": both["torchdeq"] / both["graph"],
        "errors": errors,
        "explained": models["graph"].explain(u),  # type: ignore[operator]
    }


def show(row: dict[str, Any]) -> None:
    """Prints one line."""
    columns = []
    for part in ("forward", "both"):
        times = row[f"{part}_ms"]
        columns.append(" / ".join(f"{times[kind]:.3f}" for kind in ("graph", "reference", "torchdeq")))
        columns.append(f"{row[f'{part}_ratio']:.1f}x")
    errors = " ".join(f"{error:.0e}" for error in row["errors"].values())
    what = f"{row['problem']:46s} {row['precision']:8s} {row['solver']:9s} {row['steps']!s:9s}"
    print(f"{what} {'  '.join(columns)}  errors {errors}")


def main() -> None:
    """Runs all problems, prints a table and writes the result."""
    parser = make_parser(__doc__, __file__, quick="two small convolutions in float32")
    parser.add_argument("--budget", type=float, default=0.12, help="seconds of calls of each run")
    options = parser.parse_args()
    need_cuda()
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    print("milliseconds: graph / reference / torchdeq, and torchdeq over graph; forward, then forward + backward")
    cases = product(TOLERANCES, problems().items(), SOLVERS)
    if options.quick:
        cases = product(["float32"], list(problems().items())[:2], SOLVERS)
    rows = []
    for precision, (name, (make, shape)), solver in cases:
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.manual_seed(0)
        cell, u = make().cuda(), torch.randn(shape, device="cuda")
        measured = measure(cell, u, solver, TOLERANCES[precision], options.budget)
        rows.append({"problem": name, "precision": precision, **measured})
        show(rows[-1])
    save(options, versions=versions("wellposed", "torch", "torchdeq"), rows=rows)


if __name__ == "__main__":
    main()
