"""DEQ cells on one CPU thread at equal true error: our plain and compiled loops, and torchdeq, eager and compiled.

Every run takes the loosest tolerance of a ladder at which the state is right to 1e-4 of its largest entry, by a
float64 solve to 1e-12; gradients are compared with that solve's. torchdeq is given all of its solvers, and its
compiled runs the cell under torch.compile. Our compiled runs are `DEQ(cell, compile=True)`. With --small it is
the problems of `make rivals` with 20 states, to their tolerance of 3e-6, and jaxopt and optimistix take part. The
share of the input in a cell is computed once by all. Times are CPU times of the process, the best of several
rounds in turns; the first call, which compiles, is told apart.

Run: python -m benchmarks.solve.cells [--quick | --small] [--only NAME]
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    best_times,
    load,
    make_parser,
    one_thread,
    print_table,
    relative_error,
    save,
    versions,
)
from benchmarks.problems import Problem, exact, problems
from benchmarks.rivals import libraries
from wellposed import DEQ, Anderson, Broyden, Picard, Relative
from wellposed.equilibrium.maps import Packing
from wellposed.models import ConvCell, DenseCell, PlainConvCell, TransformerCell
from wellposed.models.cells import Cell, MultiscaleCell

ERROR = 1e-4  # of the largest entry of the state
LADDER = tuple(10 ** (-2 - k / 6) for k in range(25))  # down to 1e-6
MAX_STEPS = 400
OURS = {"default": None, "picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
COMPILED = ("default", "picard")  # of ours, those that are timed compiled as well
THEIRS = ("fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden")
FAST = ("fixed_point_iter", "anderson")  # of theirs, those that are timed compiled as well


def _slow(cell: DenseCell) -> DenseCell:
    """Scales the weights of a dense cell so that plain steps need hundreds of evaluations."""
    with torch.no_grad():
        weight = torch.rand_like(cell.layers[0].weight)  # type: ignore[arg-type]
        cell.layers[0].weight.copy_(0.99 * weight / weight.sum(1, keepdim=True))  # type: ignore[union-attr, operator]
        cell.layers[0].bias.zero_()  # type: ignore[union-attr, operator]
        cell.input.weight.mul_(1e-3)  # so that tanh is nearly the identity
        cell.input.bias.zero_()
    return cell


def cells() -> dict[str, tuple[Callable[[], Cell], tuple[int, ...]]]:
    """Returns cells and shapes of their inputs."""
    return {
        "dense 64, batch 128": (lambda: DenseCell(32, 64), (128, 32)),
        "dense 512, batch 128": (lambda: DenseCell(64, 512), (128, 64)),
        "dense 64, slow, batch 128": (lambda: _slow(DenseCell(32, 64)), (128, 32)),
        "conv 16 channels, 16 x 16, batch 16": (lambda: PlainConvCell(3, 16, dims=2), (16, 3, 16, 16)),
        "conv 48 channels, 16 x 16, batch 16": (lambda: PlainConvCell(3, 48, dims=2), (16, 3, 16, 16)),
        "residual block 16 channels, 16 x 16, batch 8": (lambda: ConvCell(3, 16), (8, 3, 16, 16)),
        "transformer width 64, 16 tokens, batch 8": (lambda: TransformerCell(64, 4, 128), (8, 16, 64)),
        "multiscale 8 and 16 channels, 16 x 16, batch 4": (lambda: MultiscaleCell((8, 16)), (4, 8, 16, 16)),
    }


@dataclass
class Target:
    """A cell with an input, the true equilibrium and the true gradients of a weighted sum of it."""

    cell: Cell
    u: Tensor
    value: Tensor  # (B, n) float64
    gradient: Tensor  # of all parameters of the step, in one vector
    weights: Tensor  # (B, n)


def flat(state: Any) -> Tensor:  # (B, n)
    """Flattens a state."""
    tensors = (state,) if isinstance(state, Tensor) else state
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


def gradient_of(module: nn.Module) -> Tensor:
    """Returns the gradients of all parameters as one vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def target(cell: Cell, u: Tensor) -> Target:
    """Solves in float64 to 1e-12."""
    exact_cell = copy.deepcopy(cell).double()
    model = DEQ(exact_cell, stop=Relative(1e-12), max_steps=4000, executor="reference")
    value = flat(model(u.double()))
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    (value * weights).sum().backward()
    return Target(cell, u, value.detach(), gradient_of(exact_cell), weights)


class Torchdeq(nn.Module):
    """The cell under torchdeq."""

    def __init__(self, cell: Cell, solver: str, tolerance: float, compiled: bool) -> None:
        super().__init__()
        self.cell, self.evaluate = cell, torch.compile(cell.step) if compiled else cell.step
        backward = "fixed_point_iter" if solver.startswith("simple") else solver  # which cannot run backward
        self.deq = libraries.rival("torchdeq").get_deq(
            f_solver=solver, b_solver=backward, f_max_iter=MAX_STEPS, b_max_iter=MAX_STEPS, f_tol=tolerance,
            b_tol=tolerance, f_stop_mode="rel", b_stop_mode="rel", ift=True,
        )  # fmt: skip

    def forward(self, u: Tensor) -> Any:
        injection, shape = self.cell.inject(u), self.cell.state_shape(u)
        single = isinstance(shape[0], int)
        start = tuple(torch.zeros(u.shape[0], *one) for one in ((shape,) if single else shape))
        packing = Packing.of(start[0] if single else start)
        # Packed into one tensor: without gradients torchdeq fails on states of several.
        value, self.report = self.deq(
            lambda x: packing.pack(self.evaluate(packing.unpack(x), injection)), packing.pack(start)
        )
        return packing.unpack(value[-1])


def makers(cell: Cell, quick: bool) -> dict[str, Callable[[float], nn.Module]]:
    """Returns, by name, what makes a model of a tolerance."""
    made: dict[str, Callable[[float], nn.Module]] = {}
    for name, solver in OURS.items():
        options: dict[str, Any] = {"solver": solver, "max_steps": MAX_STEPS, "on_failure": "ignore"}
        made[f"ours {name}"] = lambda tol, options=options: DEQ(cell, stop=Relative(tol), **options)
        if name in COMPILED and not quick:
            made[f"ours {name} compiled"] = lambda tol, options=options: DEQ(
                cell, stop=Relative(tol), compile=True, **options
            )
    for name in THEIRS:
        made[f"torchdeq {name}"] = lambda tol, name=name: Torchdeq(cell, name, tol, False)
        if name in FAST and not quick:
            made[f"torchdeq {name} compiled"] = lambda tol, name=name: Torchdeq(cell, name, tol, True)
    return made


def training_step(model: nn.Module, problem: Target) -> Callable[[], Tensor]:
    """Returns a run that computes the state and all gradients."""

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        value = flat(model(problem.u))
        (value * problem.weights).sum().backward()
        return value.detach()

    return run


def accurate(make: Callable[[float], nn.Module], problem: Target) -> tuple[float, float] | None:
    """Returns the loosest tolerance of the ladder that is accurate enough, and its error."""
    for tolerance in LADDER:
        with torch.no_grad():
            error = relative_error(flat(make(tolerance)(problem.u)), problem.value)
        if error <= ERROR:
            return tolerance, error
    return None


def steps_of(model: nn.Module, u: Tensor) -> int:
    """Returns the evaluations of a forward solve; for torchdeq what it reports."""
    with torch.no_grad():
        if isinstance(model, DEQ):
            return int(model.equilibrium(u).steps.max())
        model(u)
        return int(model.report["nstep"].max())  # type: ignore[union-attr, operator]


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """Times everything on one cell."""
    make_cell, shape = cells()[name]
    torch.manual_seed(0)
    cell, u = make_cell(), torch.randn(shape)
    problem, runs, rows = target(cell, u), {}, []
    chosen: dict[str, tuple[float, float] | None] = {}
    for label, make in makers(cell, quick).items():
        plain = label.removesuffix(" compiled")  # compiling changes rounding only
        if plain not in chosen:
            chosen[plain] = accurate(make, problem)
        row: dict[str, Any] = {"cell": name, "run": label}
        rows.append(row)
        if chosen[plain] is None:
            row["note"] = f"not right to {ERROR:.0e} at any tolerance"
            continue
        tolerance = chosen[plain][0]  # type: ignore[index]
        model, begin = make(tolerance), time.perf_counter()
        runs[label] = training_step(model, problem)
        value = runs[label]()
        row |= {
            "tolerance": tolerance,
            "first_s": time.perf_counter() - begin,
            "error": relative_error(value, problem.value),
        }
        row["gradient_error"] = relative_error(gradient_of(cell), problem.gradient)
        row["steps"] = steps_of(model, u)
        row["note"] = (
            model.explain(u).replace("\n", "; ") if isinstance(model, DEQ) and "compiled" in label else ""
        )
    seconds = best_times(runs, *(2, 0.05) if quick else (5, 0.3))
    for row in rows:
        row["both_ms"] = 1e3 * seconds[row["run"]] if row["run"] in seconds else None
    return rows


SMALL: dict[str, Callable[[Problem], libraries.Run]] = {
    "ours default": libraries.wellposed_fixed_point,
    "ours picard compiled": partial(libraries.wellposed_fixed_point, solver="picard", compile=True),
    "ours default compiled": partial(libraries.wellposed_fixed_point, compile=True),
    "torchdeq fixed_point_iter": libraries.torchdeq_plain,
    "torchdeq anderson": libraries.torchdeq_anderson,
    "jaxopt plain": libraries.jaxopt_plain,
    "optimistix plain": libraries.optimistix_plain,
}


def measure_small(problem: Problem) -> list[dict[str, Any]]:
    """Times everything on one problem of `make rivals`."""
    wanted, runs, rows = exact(problem), {}, []
    for label, prepare in SMALL.items():
        row: dict[str, Any] = {
            "cell": f"{problem.name}, n = {problem.states}, batch {problem.batch}",
            "run": label,
        }
        rows.append(row)
        try:
            run = prepare(problem)
        except libraries.NotRunError as reason:
            row["note"] = str(reason)
            continue
        begin = time.perf_counter()
        gradients = run.gradients()
        row["first_s"] = time.perf_counter() - begin
        row["error"] = relative_error(run.output(), wanted.output)
        row["gradient_error"] = max(relative_error(gradients[k], g) for k, g in wanted.gradients.items())
        row["steps"], row["note"], runs[label] = int(run.steps().max()), run.complaint(), run.step
    seconds = best_times(runs, 5, 0.1)
    for row in rows:
        row["both_ms"] = 1e3 * seconds[row["run"]] if row["run"] in seconds else None
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table of one cell."""
    header = ("run", "ms", "error", "gradient error", "steps", "tolerance", "first call s", "note")
    lines = []
    for row in rows:
        if row.get("both_ms") is None:
            lines.append((row["run"], *["-"] * 6, row["note"]))
            continue
        numbers = (f"{row['both_ms']:.2f}", f"{row['error']:.0e}", f"{row['gradient_error']:.0e}", row["steps"])
        lines.append(
            (
                row["run"],
                *numbers,
                f"{row['tolerance']:.1e}" if "tolerance" in row else "",
                f"{row['first_s']:.1f}",
                row["note"],
            )
        )
    print_table(rows[0]["cell"], header, lines, left=("run", "note"))


def solved(row: dict[str, Any]) -> bool:
    """Tells whether a run was timed and is right to 1e-4: one that gave up early is no rival."""
    return row.get("both_ms") is not None and row["error"] <= ERROR


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compares our default with the fastest of others that is right to 1e-4: above one we are faster."""
    result: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["cell"] for row in rows):
        times = {row["run"]: row["both_ms"] for row in rows if row["cell"] == name and solved(row)}
        groups = {
            "torchdeq eager": [k for k in times if k.startswith("torchdeq") and "compiled" not in k],
            "torchdeq compiled": [k for k in times if k.startswith("torchdeq") and "compiled" in k],
            "jaxopt": [k for k in times if k.startswith("jaxopt")],
            "optimistix": [k for k in times if k.startswith("optimistix")],
        }
        ours = {"plain": times.get("ours default"), "compiled": times.get("ours default compiled")}
        result[name] = {
            f"{group} / ours {kind}": min(times[k] for k in members) / mine
            for group, members in groups.items()
            if members
            for kind, mine in ours.items()
            if mine
        }
    return result


def main() -> None:
    """Measures, prints the tables and writes the result; cells of an earlier run that are not measured stay."""
    parser = make_parser(__doc__, __file__, quick="two cells, nothing compiled", table="print the tables")
    parser.add_argument("--small", action="store_true", help="the small problems of make rivals in place of cells")
    parser.add_argument("--only", default="", help="cells or problems whose name contains this")
    options = parser.parse_args()
    if options.table:
        rows = load(options)["rows"]
        for name in dict.fromkeys(row["cell"] for row in rows):
            show([row for row in rows if row["cell"] == name])
        return
    one_thread()
    warnings.simplefilter("ignore")
    rows = []
    if options.small:
        for problem in problems(((20, 128),)):
            if options.only in problem.name:
                rows += measure_small(problem)
                show([row for row in rows if row["cell"].startswith(f"{problem.name}, n")])
    else:
        for name in list(cells())[: 2 if options.quick else None]:
            if options.only in name:
                rows += (measured := measure(name, options.quick))
                show(measured)
    path = options.out or options.result
    earlier = load(options)["rows"] if path.exists() and not options.quick else []
    new = {row["cell"] for row in rows}
    rows = [row for row in earlier if row["cell"] not in new] + rows
    compared = ratios(rows)
    for name, pairs in compared.items():
        print(name, {pair: round(ratio, 2) for pair, ratio in pairs.items()})
    for pair in dict.fromkeys(pair for pairs in compared.values() for pair in pairs):
        values = [pairs[pair] for pairs in compared.values() if pair in pairs]
        print(f"geometric mean, {pair}: {math.exp(sum(map(math.log, values)) / len(values)):.2f}")
    about = versions("wellposed", "torch", "torchdeq", "jax", "jaxopt", "optimistix")
    save(options, versions=about, error=ERROR, ratios=compared, rows=rows)


if __name__ == "__main__":
    main()
