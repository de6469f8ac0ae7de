"""ImplicitRNN on a GPU: whole sequences in one launch each way, against torchidl's and against cuDNN's LSTM.

The two implicit networks evaluate the same matrices in float32 from the same inputs to the last hidden state, both
with residuals of 3e-6, forward and backward; the LSTM has as many inputs and hidden states and other weights. All
run in turns in one process; times are medians between two waits for the device. Errors are relative to the largest
entry, against our plain loop in float64. A gradient may be off by a hundredth where one state of one sample lies
within the tolerance of the corner of ReLU: with 128 states that is the whole error.

The floor of a run is the larger of two times: of its floating-point operations at a third of the measured rate of
TF32 products (float32 takes three), and of its inputs, outputs and matrices at the measured rate of copies. What
holds a recurrent network back is neither: steps wait for each other. `chain` is the number of evaluations that do,
forward and backward together, and `link_us` the microseconds from one to the next, all else included.

Run: python -m benchmarks.gpu.sequences [--quick]
"""

import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.layer import ceilings
from benchmarks.harness import device_times, make_parser, need_cuda, relative_error, save, versions
from benchmarks.kernels.sequences import Case, Rival, last_hidden, network, ours, torchidl
from benchmarks.rivals.libraries import TOLERANCE, NotRunError
from wellposed import ImplicitRNN
from wellposed.equilibrium import watch

INPUTS = 4
# Family, norm, states, hidden states, batch and length.
CASES = (
    ("positive", 0.9, 21, 22, 100, 10),
    ("positive", 0.9, 21, 22, 3000, 10),
    ("random", 0.9, 21, 22, 3000, 10),
    ("positive", 0.9, 64, 64, 512, 100),
    ("positive", 0.9, 128, 128, 512, 20),
)


def lstm(case: Case) -> Rival:
    """Returns an LSTM of equal size."""
    net = nn.LSTM(INPUTS, case.weights.shape[1], batch_first=True).to(case.inputs.device)
    return Rival(lambda s: net(s)[1][0][0], tuple(net.parameters()))


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
    times = {}
    for name, operations, bytes_ in (
        ("forward", forward, size),
        ("both", forward + backward, size + 4 * matrices),
    ):
        times[f"{name}_floor_ms"] = 1e3 * max(operations / (rates["flops"] / 3), bytes_ / rates["bytes"])
    return {**times, "steps": steps[0] / elements, "adjoint_steps": steps[1] / elements, "chain": chain}


def measure(problem: tuple[Any, ...], rates: dict[str, float], budget: float) -> list[dict[str, Any]]:
    """Returns a row per library."""
    drawn = Case.draw(*problem)
    double, case = drawn.to("cuda", torch.float64), drawn.to("cuda")
    exact = ours(double, "reference", 1e-12, 1e-12)
    last, gradients = exact.forward(double), exact.step(double)
    rnn = network(case, "auto", TOLERANCE, TOLERANCE)
    models = {"wellposed": last_hidden(rnn), "cuDNN LSTM": lstm(case)}
    try:
        models["torchidl"] = torchidl(case)
    except NotRunError as reason:
        print(reason)
    passes = [
        {name: lambda m=model: m.forward(case) for name, model in models.items()},
        {name: lambda m=model: m.step(case) for name, model in models.items()},
    ]
    forward, both = (
        {name: 1e3 * seconds for name, seconds in device_times(runs, budget, warm_up=2).items()} for runs in passes
    )
    about = dict(zip(("family", "norm", "states", "hidden", "batch", "length"), problem, strict=True))
    rows = []
    for name, model in models.items():
        row = {**about, "library": name, "forward_ms": forward[name], "both_ms": both[name]}
        row |= {"forward_ratio": forward[name] / forward["wellposed"], "ratio": both[name] / both["wellposed"]}
        if name != "cuDNN LSTM":
            worst = max(map(relative_error, model.step(case), gradients))
            row |= {"value_error": relative_error(model.forward(case), last), "gradient_error": worst}
        if name == "wellposed":
            counted = floors(case, rnn, rates)
            row |= counted | {"explained": rnn.explain(case.inputs)}
            row |= {"link_us": 1e3 * both[name] / counted["chain"]}
            row |= {"over_floor": both[name] / counted["both_floor_ms"]}
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main() -> None:
    """Measures all cases; a full run also writes the result."""
    options = make_parser(__doc__, __file__, quick="two cases and short timings").parse_args()
    need_cuda()
    warnings.simplefilter("ignore")
    rates = ceilings()
    print(f"copies {rates['bytes'] / 1e12:.2f} TB/s, TF32 products {rates['flops'] / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for problem in CASES[:2] if options.quick else CASES:
        measured = measure(problem, rates, 0.05 if options.quick else 0.2)
        for row in measured:
            show(row)
        rows += measured
    known = versions("wellposed", "torch", "torchidl", "triton") | {"cudnn": torch.backends.cudnn.version()}
    save(options, tolerance=TOLERANCE, ceilings=rates, versions=known, rows=rows)


if __name__ == "__main__":
    main()
