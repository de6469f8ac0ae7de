from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from wellposed.conditions.norms import block_norms
from wellposed.conditions.projections import (
    clip_singular_values,
    clip_symmetric_part,
    project_block_rows,
    project_rows,
    project_rows_one_sided,
)
from wellposed.errors import InputError, SecondDerivativeError
from wellposed.kernels.engine import NUMBA


class CompiledRows(torch.autograd.Function):
    """The projection and its derivative by the kernels of numba."""

    @staticmethod
    def forward(ctx, W, radius):
        A, levels = NUMBA.project_rows(W, radius)
        ctx.save_for_backward(W, levels)
        return A

    @staticmethod
    def backward(ctx, gradient):
        return NUMBA.project_rows_backward(*ctx.saved_tensors, gradient), None


def compiled_rows(W, radius):
    """Does what `project_rows` does, by the kernel of numba."""
    return CompiledRows.apply(W, radius)


ROW_MAPS = [project_rows, project_rows_one_sided]
CLIPS = [clip_singular_values, clip_symmetric_part]
ALL_MAPS = [*ROW_MAPS, *CLIPS]


def random_matrix(seed, n=6, m=None, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, m or n, generator=generator, dtype=torch.float64)).to(dtype)


def shrink_by_bisection(load, radius, pinned):
    """theta >= 0 with sum of (load - theta)_+ (pinned entries without clipping) = radius, in 200 halvings."""

    def excess(theta):
        left = load - theta
        return np.where(pinned, left, np.maximum(left, 0)).sum() - radius

    low, high = 0.0, np.abs(load).sum() + radius
    if excess(0.0) <= 0:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def oracle(W, radius, one_sided):
    result = np.array(W, dtype=np.float64)
    for i, row in enumerate(result):
        pinned = np.arange(len(row)) == (i if one_sided else -1)
        load = np.where(pinned, row, np.abs(row))
        theta = shrink_by_bisection(load, radius, pinned)
        shrunk = np.sign(row) * np.maximum(np.abs(row) - theta, 0)
        result[i] = np.where(pinned, row - theta, shrunk)
    return torch.from_numpy(result)


def exact_sums(W, one_sided):
    rows = [[Fraction(value) for value in row] for row in W.tolist()]
    return [
        sum(value if one_sided and i == j else abs(value) for j, value in enumerate(row))
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("project", [*ROW_MAPS, compiled_rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 2, 3, 7, 20]),
    scale=st.sampled_from([1e-30, 1e-3, 0.1, 1.0, 30.0, 1e6]),
    radius=st.sampled_from([0.3, 0.95, 1.0, 3.9]),
)
@settings(max_examples=60, deadline=None)
def test_rows_match_bisection_and_never_exceed_the_radius(project, dtype, seed, n, scale, radius):
    one_sided = project is project_rows_one_sided
    W = random_matrix(seed, n, dtype=dtype, scale=scale)
    P = project(W, radius)
    tolerance = 8 * (n + 4) * torch.finfo(dtype).eps * float(W.abs().sum(-1).max())
    assert torch.allclose(P.double(), oracle(W.double().numpy(), radius, one_sided), rtol=0, atol=tolerance)
    assert all(total <= Fraction(radius) for total in exact_sums(P, one_sided))
    assert torch.equal(project(P, radius), P)


@pytest.mark.parametrize("project", [project_rows, compiled_rows])
def test_a_long_row_whose_sum_rounds_down_does_not_pass_for_one_inside(project):
    W = torch.full((1, 8192), 2.0**-54, dtype=torch.float64)
    W[:, :64] = 1.0  # to which the small ones are added in vain
    radius = 64 * (1 + 2.0**-49)
    assert exact_sums(W, False)[0] > radius >= float(torch.linalg.vector_norm(W, 1))
    assert exact_sums(project(W, radius), False)[0] <= Fraction(radius)


@pytest.mark.parametrize("project", [*ROW_MAPS, compiled_rows])
def test_the_radius_is_used_up(project):
    W = random_matrix(0, 30, dtype=torch.float32)
    P = project(W, 0.95)
    totals = exact_sums(P, project is project_rows_one_sided)
    assert all(float(total) > 0.95 - 1e-5 for total in totals)


@pytest.mark.parametrize("project", ALL_MAPS)
def test_inside_is_the_identity_bit_for_bit(project):
    W = 0.01 * random_matrix(1, 20, dtype=torch.float32)
    W[0, :3] = torch.tensor([-0.0, 0.0, 0.01])
    assert torch.equal(project(W, 0.95).view(torch.int32), W.view(torch.int32))
    mixed = torch.cat([W, 100 * W]).reshape(2, 20, 20)
    assert torch.equal(project(mixed, 0.95)[0].view(torch.int32), W.view(torch.int32))


@pytest.mark.parametrize("project", [*ALL_MAPS, compiled_rows])
def test_projection_is_the_nearest_point_of_its_set(project):
    """<W - P(W), Q - P(W)> <= 0 for every Q in the convex set."""
    W = random_matrix(2, 8, scale=2.0)
    P = project(W, 0.9)
    for seed in range(50):
        Q = project(random_matrix(seed, 8, scale=3.0), 0.9)
        assert ((W - P) * (Q - P)).sum() <= 1e-9


@pytest.mark.parametrize("scale", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("project", [*ALL_MAPS, compiled_rows])
def test_gradient(project, scale):
    W = random_matrix(3, 5, scale=scale).requires_grad_()
    assert gradcheck(lambda W: project(W, 0.9), W)


@pytest.mark.parametrize("project", ROW_MAPS)
def test_second_derivative_of_row_maps(project):
    W = random_matrix(4, 4).requires_grad_()
    assert gradgradcheck(lambda W: project(W, 0.9) ** 3, W)


@pytest.mark.parametrize("project", [*ROW_MAPS, compiled_rows])
def test_zero_entries_inside_keep_their_gradient(project):
    W = torch.zeros(4, 4, requires_grad=True)
    with torch.no_grad():
        W[1] = 5.0
    project(W, 0.9).sum().backward()
    assert torch.equal(W.grad[0], torch.ones(4))


@pytest.mark.parametrize("project", CLIPS)
def test_second_derivative_of_clips_is_refused(project):
    W = random_matrix(5).requires_grad_()
    (gradient,) = torch.autograd.grad(project(W, 0.5).square().sum(), W, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="differentiable once"):
        torch.autograd.grad(gradient.sum(), W)


@pytest.mark.parametrize("project", CLIPS)
def test_matrices_within_the_cap_are_not_decomposed(project, monkeypatch):
    W = 0.1 * random_matrix(5)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    monkeypatch.setattr(torch.linalg, "svd", None)
    assert project(W, 5.0) is W
    with pytest.raises(TypeError):
        project(W, 1e-3)


@pytest.mark.parametrize("project", ALL_MAPS)
@pytest.mark.parametrize("n", [5, 70])
def test_vmap_and_batches_equal_the_loop(project, n):
    stack = torch.stack([random_matrix(seed, n, scale=1.0) for seed in range(3)])
    expected = torch.stack([project(W, 0.9) for W in stack])
    assert torch.allclose(project(stack, 0.9), expected, rtol=0, atol=1e-12)
    assert torch.allclose(torch.func.vmap(lambda W: project(W, 0.9))(stack), expected, rtol=0, atol=1e-12)
    inner = torch.func.vmap(lambda W: project(W, 0.9), in_dims=2)(stack.permute(1, 2, 0))
    assert torch.allclose(inner, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("project", ALL_MAPS)
def test_vmap_of_the_gradient(project):
    stack = torch.stack([random_matrix(seed, 5) for seed in range(3)])

    def loss(W):
        return (project(W, 0.9) ** 2).sum()

    expected = []
    for W in stack:
        leaf = W.clone().requires_grad_()
        expected.append(torch.autograd.grad(loss(leaf), leaf)[0])
    found = torch.func.vmap(torch.func.grad(loss))(stack)
    assert torch.allclose(found, torch.stack(expected), atol=1e-10)


@pytest.mark.parametrize("project", ALL_MAPS)
def test_compiles_without_graph_break(project):
    compiled = torch.compile(project, backend="aot_eager", fullgraph=True)
    W, V = (random_matrix(6, 5).requires_grad_() for _ in range(2))
    found, expected = compiled(W, 0.9), project(V, 0.9)
    assert torch.allclose(found, expected)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    assert torch.allclose(W.grad, V.grad)


def test_singular_values_against_numpy():
    W = random_matrix(7, 9, scale=2.0)
    U, s, Vh = np.linalg.svd(W.numpy())
    assert np.allclose(clip_singular_values(W, 1.3).numpy(), U @ np.diag(np.minimum(s, 1.3)) @ Vh)


def test_symmetric_part_against_numpy():
    W = random_matrix(8, 9, scale=2.0)
    values, Q = np.linalg.eigh((W + W.T).numpy() / 2)
    expected = Q @ np.diag(np.minimum(values, 0.7)) @ Q.T + (W - W.T).numpy() / 2
    assert np.allclose(clip_symmetric_part(W, 0.7).numpy(), expected)


def orthogonal(seed, n):
    return torch.linalg.qr(random_matrix(seed, n))[0]


@pytest.mark.parametrize("project", CLIPS)
@pytest.mark.parametrize(
    "spectrum",
    [[2.0, 2.0, 2.0, 0.5, 0.5], [3.0, 2.0, 2.0, 0.0, 0.0], [0.4] * 5, [1.5] * 5, [2.0, 1.5, 0.3, 0.0, 0.0]],
)
def test_gradient_at_repeated_values(project, spectrum):
    """Against central differences of the clip itself, which is smooth there."""
    right = orthogonal(10, 5) if project is clip_singular_values else orthogonal(9, 5)
    W = (orthogonal(9, 5) @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ right.T).requires_grad_()
    assert gradcheck(lambda W: project(W, 1.0), W, atol=1e-6)


def test_clip_of_a_multiple_of_the_identity_has_the_scalar_gradient():
    W = (3.0 * torch.eye(4, dtype=torch.float64)).requires_grad_()
    clip_singular_values(W, 1.0).trace().backward()
    assert torch.allclose(W.grad, torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("norm", ["1", "2", "inf"])
@pytest.mark.parametrize("blocks", [2, 0, [1, 3, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_block_rows(norm, blocks, dtype):
    W = random_matrix(11, 6, dtype=dtype)
    P = project_block_rows(W, blocks, 0.9, norm)
    sizes = [2, 2, 2] if blocks == 2 else [6] if blocks == 0 else blocks
    sums = block_norms(P.double(), sizes, norm).sum(-1)
    assert (sums <= 0.9).all()
    assert sums.max() > 0.9 - 1e-4
    assert torch.allclose(project_block_rows(P, blocks, 0.9, norm), P, atol=1e-6)
    small = 0.01 * W
    assert torch.equal(project_block_rows(small, blocks, 0.9, norm), small)


def test_block_rows_gradient_and_zero_blocks():
    small = 0.05 * random_matrix(12, 4)
    small[:2, 2:] = 0
    small.requires_grad_()
    assert gradcheck(lambda W: project_block_rows(W, 2, 0.9, "2"), random_matrix(13, 4).requires_grad_())
    (gradient,) = torch.autograd.grad(project_block_rows(small, 2, 0.9, "inf").sum(), small)
    assert torch.allclose(gradient, torch.ones_like(gradient))


def test_shapes_are_refused_in_words():
    with pytest.raises(InputError, match="square"):
        clip_singular_values(torch.zeros(2, 3), 1.0)
    with pytest.raises(InputError, match="partition 5 states"):
        project_block_rows(torch.zeros(5, 5), 2, 1.0, "inf")


def nearest_row(w: list[Fraction], radius: Fraction) -> list[Fraction]:
    """The projection on the l1 ball in fractions."""
    sizes, total, theta = sorted(map(abs, w), reverse=True), Fraction(0), Fraction(0)
    for count, size in enumerate(sizes, 1):
        total += size
        theta = max(theta, (total - radius) / count)
    return [(1 if entry > 0 else -1) * max(abs(entry) - theta, Fraction(0)) for entry in w]


FAR = {
    torch.float32: [1e-30, 1e-3, 1.0, 1.9, 2.1, 1e3, 1e8, 1e20, 1e37],
    torch.float64: [1e-300, 1e-3, 1.0, 1.9, 2.1, 1e8, 1e16, 1e100, 1e300],
}


@pytest.mark.parametrize("project", [project_rows, compiled_rows])
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in FAR.items() for size in sizes])
def test_rows_far_outside_are_projected_to_a_few_units_of_the_radius(project, dtype, size):
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    few = signs.sign() * size + 0.2 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    W = torch.cat([signs * size, few, signs.sign() * size * (1 + 1e-9 * signs)]).to(dtype)
    for radius in (0.95, 1.0, 1e-3):
        P = project(W, radius)
        for row, found in zip(W.tolist(), P.tolist(), strict=True):
            best = nearest_row([Fraction(entry) for entry in row], Fraction(radius))
            assert sum(map(abs, map(Fraction, found))) <= Fraction(radius)
            off = max(abs(Fraction(a) - b) for a, b in zip(found, best, strict=True))
            assert off <= Fraction(radius) * Fraction(300 * torch.finfo(dtype).eps)


def test_derivatives_of_rows_far_outside_are_those_of_near_ones():
    near = torch.tensor([[3.0, 2.9, -2.95, 0.1], [0.2, 0.1, 0.0, 0.1]], dtype=torch.float64)
    far = near + near.sign() * torch.tensor([[2.0**30], [0.0]], dtype=torch.float64)
    found = [torch.func.jacrev(lambda W: project_rows(W, 1.0))(W) for W in (near, far)]
    assert torch.allclose(found[0][:, :3], found[1][:, :3], atol=1e-12)
    assert torch.equal(found[1][1, :, 1], torch.eye(4, dtype=torch.float64))
