"""Our Triton kernels against torchidl and torchdeq on a GPU, forward and backward, at one tolerance.

All libraries stop when a residual is below 3e-6; the errors of their outputs, against float64, stand beside the
times. So do those of the gradient by A: one state of one sample within 3e-6 of the corner of ReLU may turn out on
either side of it, which changes the largest entries by a hundredth. A time is the median of calls with a wait
after each, so that launches and waits inside a library count. Beside our times stands the floor: the larger of the
arithmetic of the solves that were done (three TF32 products for one in float32) at the measured rate of such
products, and of the bytes that must be read or written once at the measured bandwidth. Small problems are bound by
neither: one launch with a wait is measured too.

Steps with gradients are measured twice, as they come and with the backward pass in the calling thread
(`torch.autograd.set_multithreading_enabled`): in a virtual machine waking the engine's thread and being woken by
it may take half a millisecond, whatever the library.

Run: python -m benchmarks.gpu.layer [--quick | --small]
"""

import json
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import device_times, make_parser, need_cuda, peak_bytes, relative_error, save, versions
from benchmarks.problems import state_matrix
from benchmarks.rivals.libraries import MAX_STEPS, TOLERANCE, torchdeq_model, torchidl_model
from wellposed import Absolute, ImplicitModel

SIZES = ((20, 128), (20, 10_000), (64, 4096), (128, 4096), (190, 4096), (512, 4096), (1024, 4096))
WIDE_SIZES = ((2048, 4096), (4096, 4096), (8192, 4096))  # without torchdeq, which takes seconds a step
OTHERS = ("ring", "sparse", "random")
OTHER_SIZES = ((64, 4096), (190, 4096))
LIBRARIES = ("wellposed", "torchidl", "torchdeq")


@dataclass(frozen=True)
class Case:
    """``x = relu(Ax + u)``, ``y = Cx``, and a gradient of y."""

    family: str
    A: Tensor  # (n, n)
    C: Tensor  # (10, n)
    u: Tensor  # (batch, n)
    g: Tensor  # (batch, 10)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Returns outputs and the gradient by A, in float64, by many plain steps."""
        A, C, u, g = (part.double() for part in (self.A, self.C, self.u, self.g))
        x = torch.zeros_like(u)
        for _ in range(400):
            x = torch.relu(torch.addmm(u, x, A.mT))
        slope, y = (torch.addmm(u, x, A.mT) > 0).double(), torch.zeros_like(u)
        for _ in range(400):
            y = slope * torch.addmm(g @ C, y, A)
        return x @ C.mT, y.mT @ x


def make_case(family: str, n: int, batch: int, norm: float = 0.9) -> Case:
    """Draws a problem; "sparse" has a tenth of the entries and the diagonal."""
    generator = torch.Generator().manual_seed(0)
    if family == "sparse":
        A = torch.rand(n, n, generator=generator) * (torch.rand(n, n, generator=generator) < 0.1) + torch.eye(n)
        A = norm * A / A.sum(1, keepdim=True)
    else:
        A = state_matrix(family, n, norm, generator)
    rest = torch.randn(10, n, generator=generator) / n**0.5, torch.randn(batch, n, generator=generator)
    return Case(family, *(part.cuda() for part in (A, *rest, torch.randn(batch, 10, generator=generator))))


def make_model(library: str, case: Case) -> nn.Module:
    """Returns the model in one of the libraries."""
    A, B, C = (part.cpu() for part in (case.A, torch.eye(case.A.shape[0]), case.C))
    if library == "torchidl":
        rival = torchidl_model(A, B, C).cuda()
        rival.D = rival.D.cuda()  # a D that is not there is no parameter, and stays behind
        return rival
    if library == "torchdeq":
        return torchdeq_model(A, B, C).cuda()
    model = ImplicitModel.from_matrices(A, B, C, stop=Absolute(TOLERANCE), max_steps=MAX_STEPS)
    return model.cuda()


def matrix_of(model: Any) -> Any:
    """Returns the parameter behind A."""
    return model.state.raw if isinstance(model, ImplicitModel) else model.A


def forward(model: nn.Module, case: Case) -> Tensor:
    """Computes the outputs and nothing else."""
    with torch.no_grad():
        return model(case.u)


def step(model: nn.Module, case: Case) -> Tensor:
    """Computes outputs and the gradients of all parameters."""
    for parameter in model.parameters():
        parameter.grad = None
    y = model(case.u)
    y.backward(case.g)
    return y.detach()


def step_alone(model: nn.Module, case: Case) -> Tensor:
    """Does the same without the thread of the autograd engine, whose wake-up may cost more than a small step."""
    with torch.autograd.set_multithreading_enabled(False):
        return step(model, case)


def seconds(run: Callable[[], object], budget: float = 0.1) -> float:
    """Returns the median time of a call with a wait after it."""
    return device_times({"run": run}, budget, least=2)["run"]


def busy_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Returns the time of a call when the host does not wait in between: what the device or the host needs."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def ceilings() -> dict[str, float]:
    """Measures TF32 products, copies, and one launch with a wait."""
    a = torch.randn(8192, 8192, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    product = busy_seconds(lambda: a @ a, 5)
    torch.backends.cuda.matmul.allow_tf32 = False
    big = torch.randn(1 << 29, device="cuda")
    copy, one = torch.empty_like(big), torch.zeros(1, device="cuda")
    moved = busy_seconds(lambda: copy.copy_(big), 5)
    return {
        "flops": 2 * 8192**3 / product,
        "bytes": 2 * big.nbytes / moved,
        "launch": seconds(lambda: one.add_(1), 0.05),
    }


def floor(case: Case, steps: int, limits: dict[str, float], passes: int) -> float:
    """Returns the least time of one or two solves with so many steps of all samples together."""
    n, batch = case.A.shape[0], case.u.shape[0]
    arithmetic = 3 * 2 * n * n * steps / limits["flops"]
    moved = 4 * (passes * n * n + (1 + passes) * batch * n + 20 * batch) / limits["bytes"]
    return max(arithmetic, moved, limits["launch"])


def errors(model: Any, case: Case, exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Returns the largest errors of outputs and of the gradient by A, relative to their largest entries."""
    y, gradient = step(model, case), matrix_of(model).grad
    assert gradient is not None
    return {"output": relative_error(y, exact[0]), "gradient": relative_error(gradient, exact[1])}


KINDS = {"forward": forward, "both": step, "alone": step_alone}


def measure(case: Case, names: list[str], limits: dict[str, float]) -> dict[str, Any]:
    """Measures all libraries on one problem."""
    row: dict[str, Any] = {"family": case.family, "n": case.A.shape[0], "batch": case.u.shape[0]}
    exact = case.exact()
    for name in names:
        model = make_model(name, case)
        runs = {kind: partial(run, model, case) for kind, run in KINDS.items()}
        row[name] = {"error": errors(model, case, exact)}
        row[name] |= {kind: 1e3 * seconds(run) for kind, run in runs.items()}
        if isinstance(model, ImplicitModel):
            row |= details(model, case, limits)
            row["busy"] = {kind: 1e3 * busy_seconds(run) for kind, run in runs.items()}
    return row


def details(model: ImplicitModel, case: Case, limits: dict[str, float]) -> dict[str, Any]:
    """Returns the steps of both solves, the floors of their times, and what computes them."""
    solution: Any = model.equilibrium(case.u)
    solution.value.backward(case.g @ case.C)
    forth, back = solution.steps, solution.adjoint.steps
    steps = {"mean": float(forth.double().mean()), "most": int(forth.max()), "back": int(back.max())}
    floors = {
        "forward": floor(case, int(forth.sum()), limits, 1),
        "both": floor(case, int((forth + back).sum()), limits, 2),
    }
    floors["alone"] = floors["both"]
    return {
        "steps": steps,
        "floor": {kind: 1e3 * least for kind, least in floors.items()},
        "ours": model.explain(case.u),
    }


def line(row: dict[str, Any]) -> str:
    """Writes a row of the table."""
    cells = [f"{row['family']} {row['n']}, {row['batch']}", f"{row['steps']['mean']:.0f} ({row['steps']['most']})"]
    for kind in KINDS:
        mine = row["wellposed"][kind]
        cells += [f"{row[name][kind]:.2f}" if name in row else "" for name in LIBRARIES]
        cells += [f"{row[name][kind] / mine:.0f}x" if name in row else "" for name in LIBRARIES[1:]]
        cells += [f"{row['floor'][kind]:.3f} ({mine / row['floor'][kind]:.1f})", f"{row['busy'][kind]:.2f}"]
    cells += ["/".join(f"{row[name]['error']['output']:.0e}" for name in LIBRARIES if name in row)]
    return "| " + " | ".join(cells) + " |"


CELLS = "wellposed, ms | torchidl | torchdeq | ratio | ratio | floor (times) | back to back"
HEADER = f"""
| problem | steps | forward: {CELLS} | with gradients: {CELLS} | in one thread: {CELLS} | errors |
{"|---" * 24}|"""


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least ratio to every rival, of every kind of run, in groups of problems."""
    positive = [row for row in rows if row["family"] == "positive"]
    groups = {"positive, n <= 128": [row for row in positive if row["n"] <= 128]}
    groups |= {
        f"positive, n = {n}": [row for row in positive if row["n"] == n]
        for n in (190, 512, 1024, 2048, 4096, 8192)
    }
    groups["other families"] = [row for row in rows if row["family"] != "positive"]
    least: dict[str, Any] = {}
    for group, members in groups.items():
        for name, kind in product(LIBRARIES[1:], KINDS):
            ratios = [row[name][kind] / row["wellposed"][kind] for row in members if name in row]
            if ratios:
                least[f"{name}, {kind}, {group}"] = min(ratios)
    return least


def memory() -> list[dict[str, Any]]:
    """Measures the peak of a training step, beyond parameters and inputs, at several contraction factors."""
    peaks = []
    for norm in (0.5, 0.9, 0.99):
        case = make_case("positive", 190, 4096, norm)
        model: Any = make_model("wellposed", case)
        step(model, case)
        steps = int(model.equilibrium(case.u).steps.max())
        for parameter in model.parameters():
            parameter.grad = None
        peak = peak_bytes(partial(step, model, case), "cuda")
        peaks.append({"norm": norm, "steps": steps, "bytes": peak})
        print(f"peak of a training step, n = 190, batch 4096, contraction {norm}: {peaks[-1]}", flush=True)
    return peaks


def training_step(n: int, batch: int) -> dict[str, float]:
    """Times a whole training step, forward, backward and optimiser, by itself and captured in one CUDA graph."""
    case = make_case("positive", n, batch)
    model = ImplicitModel.from_matrices(
        case.A, torch.eye(n), case.C, stop=Absolute(TOLERANCE), on_failure="ignore"
    ).cuda()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=True)

    def train() -> None:
        optimiser.zero_grad(set_to_none=True)
        (model(case.u) - case.g).square().mean().backward()
        optimiser.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    row = {"n": n, "batch": batch, "by itself": seconds(train), "captured": seconds(graph.replay)}
    print(f"training step, n = {n}, batch {batch}: {row}", flush=True)
    return row


def compile_one(case: tuple[str, int, int]) -> None:
    """Fills the compiler's cache, in a process of its own."""
    warnings.simplefilter("ignore")
    problem = make_case(case[0], case[1], min(case[2], 4096))
    model: Any = make_model("wellposed", problem)
    step(model, problem)
    forward(model, problem)
    details(model, problem, {"flops": 1.0, "bytes": 1.0, "launch": 1.0})


def available() -> list[str]:
    """Lists the libraries that run here, ours first; says why others do not."""
    names, case = [], make_case("positive", 4, 3)
    for name in LIBRARIES:
        try:
            step(make_model(name, case), case)
            names.append(name)
        except Exception as error:
            print(f"{name} does not run here: {type(error).__name__}: {error}")
    return names


def main() -> None:
    """Runs all problems, prints the table and writes the result."""
    parser = make_parser(__doc__, __file__, quick="two sizes")
    parser.add_argument("--small", action="store_true", help="models that are captured; writes layer-small.json")
    options = parser.parse_args()
    if options.small:
        options.result = options.result.with_stem("layer-small")
    need_cuda()
    warnings.simplefilter("ignore")
    sizes = SIZES[:4] if options.small else SIZES[2:4] if options.quick else SIZES
    chosen, whole = [("positive", *size) for size in sizes], not (options.small or options.quick)
    start, rows = time.perf_counter(), []
    with ProcessPoolExecutor(len(chosen), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, chosen))
    if whole:
        chosen += [("positive", *size) for size in WIDE_SIZES]
        chosen += [(family, *size) for size in OTHER_SIZES for family in OTHERS]
    limits, names = ceilings(), available()
    print(f"compiled in {time.perf_counter() - start:.0f} s; {limits}\n{HEADER}", flush=True)
    captured = [training_step(n, batch) for _, n, batch in chosen[:4]]
    peaks = memory() if whole else []
    for family, n, batch in chosen:
        rivals = [name for name in names if name != "torchdeq" or (n <= 1024 and not options.small)]
        rows.append(measure(make_case(family, n, batch), rivals, limits))
        print(line(rows[-1]), flush=True)
        about = {"versions": versions(*LIBRARIES, "triton"), "ceilings": limits, "summary": summary(rows)}
        about |= {"memory": peaks, "captured": captured, "seconds": time.perf_counter() - start}
        save(options, **about, rows=rows)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
