"""ImplicitRNN on a GPU: whole sequences in one launch each way, against torchidl's and against cuDNN's LSTM.

The two implicit networks evaluate the same matrices in float32 from the same inputs to the last hidden state, both
with residuals of 3e-6, forward and backward; the LSTM has as many inputs and hidden states and other weights. All
run in turns in one process; times are medians between two waits for the device. Errors are relative to the largest
entry, against our plain loop in float64.

The floor of a run is the larger of two times: of its floating-point operations at a third of the measured rate of
TF32 products (float32 takes three), and of its inputs, outputs and matrices at the measured rate of copies. What
holds a recurrent network back is neither: steps wait for each other. `chain` is the number of evaluations that do,
forward and backward together, and `link_us` the microseconds from one to the next, all else included.

Run: python -m benchmarks.gpu.sequences [--quick] where there are a CUDA device and torchidl.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels.sequences import Case, Rival
from wellposed import Absolute, Implicit, ImplicitRNN, watch
from wellposed.errors import MissingExtraError, require

RESULT = Path(__file__).parents[1] / "results" / "gpu" / "sequences.json"
COMMAND = "python -m benchmarks.gpu.sequences"
TOLERANCE, MAX_STEPS, INPUTS = 3e-6, 3000, 4
# Family, norm, states, hidden states, batch and length.
CASES = (
    ("positive", 0.9, 21, 22, 100, 10),
    ("positive", 0.9, 21, 22, 3000, 10),
    ("random", 0.9, 21, 22, 3000, 10),
    ("positive", 0.9, 64, 64, 512, 100),
    ("positive", 0.9, 128, 128, 512, 20),
)


def ours(case: Case, executor: str = "auto", tolerance: float = TOLERANCE) -> tuple[Rival, ImplicitRNN]:
    """Returns our model, which lies where the case does."""
    stop = Absolute(tolerance)
    rnn = ImplicitRNN.from_matrices(
        *case.matrices, executor=executor, stop=stop, gradient=Implicit(stop=stop), max_steps=MAX_STEPS
    )
    cell = rnn.cell(0)
    assert cell.D is not None
    return Rival(lambda s: rnn(s)[1][0], (cell.state.raw, cell.B, cell.C, cell.D)), rnn


def torchidl(case: Case) -> Rival:
    """Returns torchidl's model."""
    A, B, C, _ = case.matrices
    package = require("torchidl.implicit_rnn_model", extra="rivals")
    limits = {"mitr": MAX_STEPS, "grad_mitr": MAX_STEPS, "tol": TOLERANCE, "grad_tol": TOLERANCE, "kappa": 0.9999}
    cell = package.ImplicitRNNCell(B.shape[1] - C.shape[0], A.shape[0], C.shape[0], **limits).to(A.device)
    parameters = cell.layer.A, cell.layer.B, cell.layer.C, cell.layer.D
    with torch.no_grad():
        for parameter, value in zip(parameters, case.matrices, strict=True):
            parameter.copy_(value)
    return Rival(lambda s: cell(s)[1], parameters)


def lstm(case: Case) -> Rival:
    """Returns an LSTM of equal size."""
    net = nn.LSTM(INPUTS, case.weights.shape[1], batch_first=True).to(case.inputs.device)
    return Rival(lambda s: net(s)[1][0][0], tuple(net.parameters()))


def times(runs: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Returns the median milliseconds of every run, measured in turns for some seconds each."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        for _ in range(1 if name == "torchidl" else 3):
            run()
    while not all(len(list_) >= 3 and sum(list_) >= budget for list_ in found.values()):
        for name, run in runs.items():
            if len(found[name]) >= 3 and sum(found[name]) >= budget:
                continue
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(list_) for name, list_ in found.items()}


def ceilings() -> dict[str, float]:
    """Measures bytes copied and TF32 operations done in a second."""
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    large = torch.empty(1 << 28, device="cuda")
    other, before = torch.empty_like(large), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    found = times({"copy": lambda: other.copy_(large), "product": lambda: a @ b}, 0.05)
    torch.backends.cuda.matmul.allow_tf32 = before
    return {"bytes": 2 * large.nbytes / (1e-3 * found["copy"]), "tf32": 2 * 8192**3 / (1e-3 * found["product"])}


def floors(case: Case, rnn: ImplicitRNN, rates: dict[str, float]) -> dict[str, Any]:
    """Counts what must be done, forward and in both passes: milliseconds at the measured rates, and the chain."""
    n, p, h = case.matrices[0].shape[0], INPUTS, case.weights.shape[1]
    with watch() as log:
        rnn(case.inputs)[1].sum().backward()
    elements = case.inputs.shape[0] * case.inputs.shape[1]
    steps = [sum(int(steps.sum()) for _, steps in part) for part in (log.forward, log.adjoint)]
    chain = sum(int(steps.max()) for part in (log.forward, log.adjoint) for _, steps in part)
    matrices = sum(m.numel() for m in case.matrices)
    forward = 2 * (steps[0] * n * n + elements * (n * (p + h) + h * (n + p + h)))
    backward = 2 * (steps[1] * n * n + elements * (h * (2 * n + h) + (n + h) * (n + p + h)))
    size = 4 * (elements * (p + h) + matrices)
    found = {}
    for name, operations, bytes_ in (
        ("forward", forward, size),
        ("both", forward + backward, size + 4 * matrices),
    ):
        found[f"{name}_floor_ms"] = 1e3 * max(operations / (rates["tf32"] / 3), bytes_ / rates["bytes"])
    return {**found, "steps": steps[0] / elements, "adjoint_steps": steps[1] / elements, "chain": chain}


def error(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, relative to the largest entry."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def measure(problem: tuple[Any, ...], rates: dict[str, float], budget: float) -> list[dict[str, Any]]:
    """Returns a row per library."""
    drawn = Case.draw(*problem)
    double, case = drawn.to("cuda", torch.float64), drawn.to("cuda")
    exact = ours(double, "reference", 1e-12)[0]
    last, gradients = exact.forward(double), exact.step(double)
    mine, rnn = ours(case)
    models = {"wellposed": mine, "cuDNN LSTM": lstm(case)}
    try:
        models["torchidl"] = torchidl(case)
    except MissingExtraError as reason:
        print(reason)
    forward = times({name: lambda m=m: m.forward(case) for name, m in models.items()}, budget)
    both = times({name: lambda m=m: m.step(case) for name, m in models.items()}, budget)
    about = dict(zip(("family", "norm", "states", "hidden", "batch", "length"), problem, strict=True))
    rows = []
    for name, model in models.items():
        row = {**about, "library": name, "forward_ms": forward[name], "both_ms": both[name]}
        row |= {"forward_ratio": forward[name] / forward["wellposed"], "ratio": both[name] / both["wellposed"]}
        if name != "cuDNN LSTM":
            worst = max(error(a, b) for a, b in zip(model.step(case), gradients, strict=True))
            row |= {"value_error": error(model.forward(case), last), "gradient_error": worst}
        if name == "wellposed":
            counted = floors(case, rnn, rates)
            row |= counted | {"explained": rnn.explain(), "link_us": 1e3 * both[name] / counted["chain"]}
            row |= {"over_floor": both[name] / counted["both_floor_ms"]}
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases; a full run also writes the JSON file."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases, short timings, nothing written")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the results go")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rates = ceilings()
    print(f"copies {rates['bytes'] / 1e12:.2f} TB/s, TF32 products {rates['tf32'] / 1e12:.0f} TFLOP/s")
    rows = []
    for problem in CASES[:2] if options.quick else CASES:
        found = measure(problem, rates, 0.05 if options.quick else 0.2)
        for row in found:
            show(row)
        rows += found
    if options.quick:
        return
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    about = {
        "device": torch.cuda.get_device_name(),
        "tolerance": TOLERANCE,
        "ceilings": rates,
        "versions": versions,
    }
    options.output.write_text(json.dumps({"command": COMMAND, **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
