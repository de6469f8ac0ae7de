"""Fits implicit models to the MLP of 002 section 5.2: accuracy under a cap, and against pruning by magnitude.

The MLP (784-64-32-16-10 on FashionMNIST where WELLPOSED_DATA has it, else 64-64-32-16-10 on digits) is trained for
a few epochs; its states on some training images are fitted, and everything is scored on the test images at the
equilibrium of the fitted model itself. Sparsity counts the weights of the three hidden layers; the output is
fitted on the model's own states, and for the pruned network too ("refitted"); "all fitted" fits all entries that
pruning by magnitude keeps. Nothing is trained by gradients after pruning.

Run: python -m benchmarks.convex.fit [--quick]
"""

import time
from typing import Any, Literal

import torch
from torch import Tensor, nn
from wellposed_lab.networks.pruning import linear_layers, prune_by_magnitude

from benchmarks.harness import make_parser, one_thread, save
from benchmarks.problems import images, trained_mlp
from wellposed.convex import FitReport, States, eliminate_features, fit_states, record_states, support_mask
from wellposed.convex.problem import Bound
from wellposed.data.images import Images

KAPPAS, SEEDS, SAMPLES = (0.3, 0.99), (0, 1), 5000
SPARSITIES, LASSO, KEEP = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98), (0.7, 0.9), (0.5, 0.25, 0.1, 0.05)
METHODS: tuple[Literal["certified", "ranked"], ...] = ("certified", "ranked")
CASES: tuple[tuple[Bound, bool, str], ...] = (
    ("state", True, "layered"),
    ("state", True, "full"),
    ("state", False, "full"),
    ("row", False, "full"),
    ("row", True, "layered"),
)


def accuracy(model: nn.Module, data: Images) -> float:
    """Returns the percentage of images that are classified as they should be."""
    with torch.no_grad():
        guesses = torch.cat([model(u).argmax(1) for u in data.flat().split(2000)])
    return round(100 * float((guesses == data.labels).double().mean()), 2)


def row(method: str, model: nn.Module, test: Images, baseline: float, **facts: Any) -> dict[str, Any]:
    """Writes one line of the result."""
    score = accuracy(model, test)
    line = {"method": method, **facts, "accuracy": score, "change": round(score - baseline, 2)}
    print(line, flush=True)
    return line


def facts(report: FitReport, start: float) -> dict[str, Any]:
    """Returns what the report says, and the seconds since `start`."""
    return {
        "sparsity": round(report.sparsity, 4),
        "largest_norm": float(report.norm.max()),
        "largest_relative_gap": float(report.relative_gap.max()),
        "state_error": [round(float(error), 5) for error in report.state_error],
        "certificate": str(report.certificate),
        "seconds": round(time.process_time() - start, 2),
    }


def capped(states: States, test: Images, baseline: float, kappas: tuple[float, ...]) -> list[dict[str, Any]]:
    """Fits without an objective: both bounds, with and without rescaling."""
    rows = []
    for kappa in kappas:
        for bound, rescale, support in CASES:
            start = time.process_time()
            model, report = fit_states(states, kappa=kappa, bound=bound, rescale=rescale, support=support)
            given = {"kappa": kappa, "bound": bound, "rescale": rescale, "support": support}
            rows.append(row("fit", model, test, baseline, **given, **facts(report, start)))
    return rows


def pruned(
    network: nn.Sequential, sparsity: float, states: States, *, refit: bool, layerwise: bool
) -> nn.Sequential:
    """Sets the smallest weights of the hidden layers to zero; the output is fitted again if asked."""
    twin = prune_by_magnitude(network, sparsity, layerwise=layerwise)
    if not refit:
        return twin
    output = linear_layers(twin)[-1]
    with torch.no_grad():
        x = twin[:-1](states.U)
        M = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
        weights = torch.linalg.lstsq(M, states.Y.double(), driver="gelsd").solution.float()
        output.weight.copy_(weights[:-1].T)
        output.bias.copy_(weights[-1])
    return twin


def largest(states: States, sparsity: float) -> Tensor:
    """Marks the largest weights of the hidden layers."""
    assert states.form is not None
    size = torch.cat([states.form.A.to_dense(), states.form.B.to_dense()], dim=1).abs()
    weights = size[support_mask(states, "layered")]
    return size > weights.kthvalue(max(1, int(sparsity * len(weights)))).values


def frontier(
    network: nn.Sequential, states: States, test: Images, baseline: float, sparsities: tuple[float, ...]
) -> list[dict[str, Any]]:
    """Compares fits of given sparsity with pruning by magnitude."""
    rows = []
    for sparsity in sparsities:
        for objective in ("none", "lasso") if sparsity in LASSO else ("none",):
            start = time.process_time()
            model, report = fit_states(states, kappa=0.99, objective=objective, target_sparsity=sparsity)
            name = "lasso" if objective == "lasso" else "least rise of the misfit"
            rows.append(row(name, model, test, baseline, target=sparsity, **facts(report, start)))
        start = time.process_time()
        model, report = fit_states(states, kappa=0.99, support=largest(states, sparsity), sequential=True)
        rows.append(row("magnitude, all fitted", model, test, baseline, target=sparsity, **facts(report, start)))
        for layerwise in (False, True):
            for refit in (False, True):
                twin = pruned(network, sparsity, states, refit=refit, layerwise=layerwise)
                name = f"magnitude{', by layer' if layerwise else ''}{', refitted' if refit else ''}"
                rows.append(row(name, twin, test, baseline, target=sparsity))
    return rows


def eliminated(states: States, test: Images, baseline: float) -> list[dict[str, Any]]:
    """Removes features: those that are certified, and then by rank (002 Figure 9)."""
    rows = []
    for method in METHODS:
        start = time.process_time()
        keep = KEEP if method == "ranked" else None
        path = eliminate_features(
            states, kappa=0.99, method=method, keep=keep, evaluate=lambda model: accuracy(model, test)
        )
        curve = [{"removed": round(part, 4), "change": round(score - baseline, 2)} for part, score in path.curve()]
        seconds = round(time.process_time() - start, 2)
        certified = {"features": int(path.features.sum()), "certified": int(path.certified.sum())}
        rows.append({"method": method, **certified, "curve": curve, "seconds": seconds})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Runs everything and writes the result."""
    quick = "one seed, cap and sparsity, 500 images, no elimination of features"
    options = make_parser(__doc__, __file__, quick=quick).parse_args()
    one_thread()
    (train, name), (test, _) = images("train"), images("test")
    seeds, samples = (SEEDS[:1], 500) if options.quick else (SEEDS, SAMPLES)
    kappas, sparsities = (KAPPAS[:1], (0.9,)) if options.quick else (KAPPAS, SPARSITIES)
    results = []
    for seed in seeds:
        network = trained_mlp(train, seed)
        baseline = accuracy(network, test)
        print({"seed": seed, "baseline": baseline}, flush=True)
        states = record_states(network, train.flat()[:samples].split(1000))
        some = states.subset(slice(0, 2000))
        rows = capped(some, test, baseline, kappas) + frontier(network, states, test, baseline, sparsities)
        features = [] if options.quick else eliminated(some, test, baseline)
        results.append({"seed": seed, "baseline": baseline, "rows": rows, "elimination": features})
    save(options, data=name, seeds=results)


if __name__ == "__main__":
    main()
