"""Many random cases: sampled, extreme and attacking points against every bound."""

import pytest
import torch
from robust_cases import F64, FORMS, exact, looped, points, triangular

from wellposed.robust import Ball, Box, Crown, MethodError, SparseBox, output_bounds

CASES = 100_000
KINDS = {
    **FORMS,
    "wide loop": lambda: looped(40, kappa=0.99),
    "deep": lambda: triangular(sizes=(4, 9, 9, 9, 9, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_no_point_of_many_leaves_a_bound(dtype):
    """A case is one attacked input against one method's bounds of all outputs."""
    cases, seed = 0, 0
    while cases < CASES / 2:
        torch.manual_seed(seed)
        form = list(KINDS.values())[seed % len(KINDS)]().to(dtype)
        u = torch.rand(4, form.sizes[1], dtype=dtype)
        eps = 10.0 ** -float(3 * torch.rand(()))
        inputs = (Box.around(u, eps), SparseBox(u, eps, 2, 0.0, 1.0), Ball(u, eps))[seed % 3]
        tried = points(form, inputs, 40)
        _, y = exact(form, tried.flatten(0, 1))
        y = y.view(*tried.shape[:2], -1)
        for method in ("norm", "box", "interval", "l2", Crown(seed % 4), "best"):
            try:
                found = output_bounds(form, inputs, method)
            except MethodError:
                continue
            assert found.contains(y, 1e-7).all(), (seed, method)
            cases += y.shape[0] * y.shape[1]
        seed += 1
