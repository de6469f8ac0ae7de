"""Forged and genuine certificates without end: ``python -m tests.checker.campaign --cases 10000 --seed 0``.

A forger writes random matrices, weights and values; whether they prove anything is decided by floating point with
a margin, so that only clear cases count. Genuine certificates are those of random models of every condition; each
is then changed in one place and must be refused.
"""

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import wellposed as wp
from tests.checker.forged_files import change_claims, write_claims, write_model
from wellposed.activations import get_activation
from wellposed.checker import RefusedError, check

MARGIN = 1e-9
CONDITIONS = ("inf", "weighted", "mu", "spectral", "monotone", "triangular")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu", "selu", "mish", "hardtanh", "leaky_relu(0.2)")


def accepted(model: Path) -> bool:
    try:
        check(model)
    except RefusedError:
        return False
    return True


def truth(A: np.ndarray, v: np.ndarray, condition: str) -> float:
    """The smallest value that could be stated, in floating point; infinite where there is none."""
    size, loop = np.abs(A), A.diagonal()
    if condition == "weighted":
        return float((size @ v / v).max()) if (v > 0).all() and np.isfinite(v).all() else np.inf
    if condition == "inf":
        return float(size.sum(1).max())
    if condition == "mu":
        return float((size.sum(1) - np.abs(loop) + loop).max())
    if condition == "spectral":
        return float(np.linalg.norm(A, 2))
    if condition == "monotone":
        return float(np.linalg.eigvalsh((A + A.T) / 2)[-1])
    one_sided = not np.tril(A, -1).any() or not np.triu(A, 1).any()
    return max(0.0, float(loop.max())) if one_sided else np.inf


def forged(draw: np.random.Generator, folder: Path) -> tuple[str, bool]:
    """Returns what came of one forged certificate, and whether that is right."""
    n, condition = int(draw.integers(1, 9)), str(draw.choice(CONDITIONS))
    A = draw.normal(size=(n, n)) * 10.0 ** draw.uniform(-2, 0.3) / n
    A = np.triu(A) if condition == "triangular" and draw.random() < 0.7 else A
    v = draw.uniform(0.1, 2, n)
    if draw.random() < 0.2:
        v[draw.integers(n)] = draw.choice([0.0, -1.0, np.nan, np.inf])
    least = truth(A, v, condition)
    value = float(
        draw.choice([draw.uniform(0, 1.2), least * draw.uniform(0.9, 1.1) if np.isfinite(least) else 0.5])
    )
    model = write_model(folder / "m.safetensors", A)
    facts = {"kind": "well-posed", "condition": condition, "value": value, "weights": "v"}
    write_claims(model, [facts], {"v": v})
    got = accepted(model)
    if value >= 1 or least > value + MARGIN:
        return "forged, false", not got
    if least < value - MARGIN:
        return "forged, true", got
    return "forged, too close to tell", True


def genuine(draw: np.random.Generator, folder: Path) -> list[tuple[str, bool]]:
    """Saves a random model with its certificate, then lowers its value and changes a weight of the file."""
    name, condition = str(draw.choice(ACTIVATIONS)), str(draw.choice(CONDITIONS[:5]))
    phi = get_activation(name)
    if (condition == "mu" and phi.slope[0] < 0) or (condition == "monotone" and not phi.projection):
        condition = "inf"
    torch.manual_seed(int(draw.integers(2**31)))
    kappa = float(draw.choice([0.1, 0.5, 0.9, 0.999])) / max(1.0, phi.lipschitz())
    model = wp.ImplicitModel(2, 2, int(draw.integers(1, 12)), activation=name, condition=condition, kappa=kappa)
    model = model.to(torch.float64 if draw.random() < 0.5 else torch.float32)
    with torch.no_grad():
        model.state.raw.mul_(float(draw.choice([0.1, 1.0, 30.0, 1e3])))
    path = folder / "g.safetensors"
    wp.save(model, path, certificate=True)
    outcomes = [("genuine", accepted(path))]
    value = float(model.certificate().value)
    change_claims(
        path.with_suffix(".cert"), lambda said: said["claims"][0].update(value=value - 1e-3 - 0.01 * abs(value))
    )
    if condition != "weighted":  # where other weights could have proven less
        outcomes.append(("genuine, kappa lowered", not accepted(path)))
    wp.save(model, path, certificate=True)
    data = bytearray(path.read_bytes())
    data[int(draw.integers(len(data)))] ^= 1 << int(draw.integers(8))
    path.write_bytes(bytes(data))
    return [*outcomes, ("genuine, one bit of the model flipped", not accepted(path))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="forged ones, and a tenth as many genuine ones")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    draw, counts, start = np.random.default_rng(given.seed), collections.Counter(), time.monotonic()
    wrong: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.cases):
            kind, right = forged(draw, Path(folder))
            counts[kind], wrong[kind] = counts[kind] + 1, wrong[kind] + (not right)
        for _ in range(given.cases // 10):
            for kind, right in genuine(draw, Path(folder)):
                counts[kind], wrong[kind] = counts[kind] + 1, wrong[kind] + (not right)
    for kind in sorted(counts):
        print(f"{kind:40s} {counts[kind]:8d} cases {wrong[kind]:4d} wrong")
    print(f"seed {given.seed}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return int(sum(wrong.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
