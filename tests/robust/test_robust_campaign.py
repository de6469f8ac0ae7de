"""Many random cases: sampled, extreme and attacking points against every bound of every kind of model."""

from collections import Counter

import pytest
import torch
from robust_cases import F64, MODELS, answers, model_of, tried

from wellposed.errors import IllPosedError
from wellposed.robust import METHODS, Ball, Box, MethodError, SparseBox, crown, intervals, output_bounds

CASES = 100_000
CUTS = ((300, 60), (300, 60), (4, 3), (1, 1), (1, 0))  # sweeps of intervals and steps of multipliers
SOLVED = 1e-10  # relative error of the outputs that are compared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::wellposed.errors.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_no_point_of_many_leaves_a_bound(dtype, monkeypatch, capsys):
    """A case is one point of a set against one method's bounds of all outputs."""
    counts = {what: Counter() for what in ("model", "point", "method", "cut short")}
    number, total = 0, 0
    while total < CASES / 2 or number < 3 * len(MODELS):
        name = list(MODELS)[number % len(MODELS)]
        form = model_of(name, number // len(MODELS) % 3).to(dtype)
        torch.manual_seed(number)
        u = torch.rand(4, form.sizes[1], dtype=dtype)
        eps = 10.0 ** -float(3 * torch.rand(()))
        kind = number // len(MODELS) % 3
        inputs = (Box.around(u, eps), SparseBox(u, eps, 2, 0.0, 1.0), Ball(u, eps))[kind]
        points = tried(form, inputs, u, eps, number)
        outputs = {one: answers(form, part) for one, part in points.items()}
        cut = CUTS[number % len(CUTS)]
        monkeypatch.setattr(intervals, "MAX_SWEEPS", cut[0])
        monkeypatch.setattr(crown, "MAX_STEPS", cut[1])
        for method in METHODS:
            try:
                found = output_bounds(form, inputs, method)
            except (MethodError, IllPosedError):
                continue
            for one, y in outputs.items():
                inside = found.contains(y, SOLVED * (1 + float(y.abs().max())))
                assert inside.all(), f"{name}, trial {number}, {dtype}, {method}, {one}, eps {eps}, cut at {cut}"
                for what, key in zip(counts, (name, one, method, cut != CUTS[0]), strict=True):
                    counts[what][key] += inside.numel()
                total += inside.numel()
        number += 1
    with capsys.disabled():
        print(f"\n{dtype}: {total:,} cases in {number} trials, none outside")
        for what, counted in counts.items():
            print(f"  by {what}: " + ", ".join(f"{key} {count:,}" for key, count in counted.items()))
    assert set(counts["method"]) == set(METHODS) and set(counts["model"]) == set(MODELS)
