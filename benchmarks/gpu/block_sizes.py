"""Block sizes of the Triton kernels: times of all candidates, from which the table of `gpu.launch` is made.

Run: python -m benchmarks.gpu.block_sizes [--quick | --only 64,4096 128,4096] [--adjoint]
"""

import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import make_parser, need_cuda, relative_error, save
from wellposed.activations import get_activation
from wellposed.equilibrium import Absolute, Anderson
from wellposed.equilibrium.method import SolveOptions
from wellposed.kernels.gpu.launch import Shape, launch
from wellposed.kernels.spec import LINEAR, KernelSpec, kernel_spec, kind_of

SIZES = ((20, 128), (20, 10_000), (64, 4096), (128, 4096), (190, 4096), (512, 4096), (1024, 4096), (2048, 4096))


def candidates(n: int) -> list[Shape]:
    """Lists what is worth trying."""
    if n <= 32:
        return [Shape(b, 0, 0, 32, w, 1) for b, w in ((16, 1), (16, 2), (16, 4), (32, 4))]
    if n <= 64:
        small = (16, 2, 32), (16, 4, 32), (16, 4, 64), (16, 8, 32), (32, 4, 32), (32, 8, 32), (64, 4, 32)
        return [Shape(b, 0, 0, c, w, 1) for b, w, c in small]
    if n <= 128:
        large = (16, 4, 32), (16, 8, 32), (32, 8, 32), (64, 8, 32)
        return [*(Shape(b, 0, 0, c, w, 1) for b, w, c in large), Shape(16, 64, 64, 32, 4, 3)]
    tiles: tuple[tuple[int, ...], ...] = ((16, 64, 64, 4, 3), (16, 128, 64, 4, 3), (32, 64, 64, 4, 3))
    tiles = (*tiles, (32, 128, 64, 8, 3), (32, 128, 32, 8, 4), (32, 256, 32, 8, 3)) if n <= 1024 else ()
    wide: tuple[tuple[int, ...], ...] = ((128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (128, 128, 32, 8, 4))
    wide = (*wide, (128, 128, 32, 4, 4), (128, 256, 32, 8, 3)) if n > 1024 else wide if n > 256 else ()
    streamed = [Shape(b, t, d, 32, w, s) for b, t, d, w, s in tiles if t <= n]
    return streamed + [Shape(b, t, d, 256, w, s, wide=True) for b, t, d, w, s in wide]


def problem(n: int, batch: int) -> tuple[Tensor, Tensor]:
    """Draws A, positive with row sums 0.9, and v."""
    generator = torch.Generator().manual_seed(n)
    A = torch.rand(n, n, generator=generator)
    return (0.9 * A / A.sum(1, keepdim=True)).cuda(), torch.randn(batch, n, generator=generator).cuda()


@cache
def kernel_specs() -> tuple[KernelSpec, KernelSpec]:
    """Returns the forward and the backward solve."""
    relu = kind_of(get_activation("relu"))
    assert relu is not None
    options = SolveOptions(Anderson(), Absolute(3e-6), 200)
    return kernel_spec(relu, options, torch.float32), kernel_spec((LINEAR, 0.0), options, torch.float32)


def solve(A: Tensor, v: Tensor, shape: Shape, flag: Tensor, *, adjoint: bool) -> Any:
    """Launches one of the two solves."""
    forward, backward = kernel_specs()
    if adjoint:
        return launch(A.mT, v, (v > 0).float(), None, backward, flag, scaled=True, shape=shape)
    return launch(A, v, None, None, forward, flag, saves=True, shape=shape)


def compile_one(task: tuple[int, int, Shape], adjoint: bool) -> str:
    """Fills the compiler's cache."""
    n, batch, shape = task
    try:
        A, v = problem(n, min(batch, 64))
        for both in {False, adjoint}:
            solve(A, v, shape, torch.zeros(1, dtype=torch.int32, device="cuda"), adjoint=both)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def seconds(run: Any, repeats: int = 10) -> float:
    """Returns the median time of a replayed graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def host_seconds(run: Any, repeats: int = 50) -> float:
    """Returns the time of a launch on the host."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return seconds


def measure(n: int, batch: int, shape: Shape, adjoint: bool) -> dict[str, Any]:
    """Times both solves and compares the forward one with float64."""
    A, v = problem(n, batch)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    solution = solve(A, v, shape, flag, adjoint=False)
    exact = torch.zeros_like(v, dtype=torch.float64)
    for _ in range(400):
        exact = torch.relu(torch.addmm(v.double(), exact, A.double().mT))
    error = relative_error(solution.value, exact)
    row = {"n": n, "batch": batch, "shape": str(shape), "error": error, "steps": int(solution.steps.max())}
    row["forward"] = 1e3 * seconds(lambda: solve(A, v, shape, flag, adjoint=False))
    row["host"] = 1e3 * host_seconds(lambda: solve(A, v, shape, flag, adjoint=False))
    if adjoint:
        row["backward"] = 1e3 * seconds(lambda: solve(A, v, shape, flag, adjoint=True))
    return row | {"failed": int(flag)}


def main() -> None:
    """Compiles all candidates in parallel, then times them one by one."""
    parser = make_parser(__doc__, __file__, quick="the smallest size")
    parser.add_argument("--only", nargs="*", metavar="N,BATCH", help="states and batch of the sizes to measure")
    parser.add_argument("--adjoint", action="store_true", help="time the backward solve too")
    options = parser.parse_args()
    need_cuda()
    sizes = SIZES[:1] if options.quick else SIZES
    sizes = [tuple(map(int, text.split(","))) for text in options.only] if options.only else sizes
    tasks = [(n, batch, shape) for n, batch in sizes for shape in candidates(n)]
    start = time.perf_counter()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        compiled = pool.map(partial(compile_one, adjoint=options.adjoint), tasks)
        problems = dict(zip(tasks, compiled, strict=True))
    print(f"compiled {len(tasks)} in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for task in tasks:
        if problems[task]:
            print(*task, problems[task], flush=True)
            continue
        rows.append(measure(*task, options.adjoint))
        print(*(f"{value:.3g}" if isinstance(value, float) else value for value in rows[-1].values()), flush=True)
    if options.out or not options.only:
        save(options, rows=rows)


if __name__ == "__main__":
    main()
