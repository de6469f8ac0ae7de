"""Edges of solvers, norms and projections: batches of matrices, tiny scales, ties, and what is refused."""

import math

import pytest
import torch

from wellposed.activations import get_activation, max_pool
from wellposed.conditions import Certificate
from wellposed.conditions.conditions import BlockNorm, Triangular, WeightedNorm
from wellposed.conditions.norms import induced_norm, split_blocks
from wellposed.conditions.projections import clip_singular_values, project_block_rows, project_rows
from wellposed.conditions.rounding import map_rounding, operand_roundoff
from wellposed.equilibrium import Anderson, Broyden, MeanRelative, Phantom, Picard, Status, Steps, fixed_point
from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.maps import piece_norms
from wellposed.equilibrium.solvers import Safeguard
from wellposed.equilibrium.stopping import Settled
from wellposed.errors import InputError

F64 = torch.float64


def test_safeguard_takes_back_what_has_grown_and_waits():
    guard = Safeguard(growth=2.0, pause=3)
    safe = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    best, pending = torch.ones(4), torch.tensor([True, True, False, True])
    x, fx = torch.zeros(4, 1), torch.tensor([[3.0], [2.0], [9.0], [torch.nan]])
    rejected, (image, known, still, wait) = guard.judge((safe, best, pending, torch.full((4,), 5.0)), fx - x, fx)
    assert rejected.tolist() == [True, False, False, True]  # the third was no trial
    assert image[:, 0].tolist() == [10.0, 2.0, 9.0, 40.0]
    assert known.tolist() == [1.0, 2.0, 9.0, 1.0]
    assert wait.tolist() == [3.0, 4.0, 4.0, 3.0]
    trial = torch.tensor([[7.0], [7.0], [torch.inf], [7.0]])
    ready = wait - torch.tensor([3.0, 4.0, 4.0, 3.0])
    chosen, (*_, taken, _) = guard.choose(trial, rejected, (image, known, still, ready))
    assert chosen[:, 0].tolist() == [10.0, 7.0, 9.0, 40.0] and taken.tolist() == [False, True, False, False]
    assert guard.choose(trial, torch.tensor([False] * 4), (image, known, still, wait))[0][1] == 2.0


@pytest.mark.parametrize("solver", [Broyden(), Anderson(), Picard()], ids=lambda solver: type(solver).__name__)
def test_steps_do_not_depend_on_the_scale(solver):
    generator = torch.Generator().manual_seed(0)
    M = 0.3 * torch.randn(5, 5, generator=generator, dtype=F64)
    b = torch.randn(2, 5, generator=generator, dtype=F64)

    def after(scale: float) -> torch.Tensor:
        found = fixed_point(lambda x: x @ M.mT + scale * b, torch.zeros_like(b), solver=solver, stop=Steps(9))
        return found.value

    assert torch.equal(after(2.0**-40), 2.0**-40 * after(1.0))


def test_anderson_uses_all_points_it_remembers():
    M = torch.tensor([[0.5, 0.3], [-0.2, 0.6]], dtype=F64)
    b = torch.tensor([[1.0, 2.0]], dtype=F64)
    found = fixed_point(lambda x: x @ M.mT + b, torch.zeros_like(b), solver=Anderson(memory=2), stop=Steps(4))
    exact = torch.linalg.solve(torch.eye(2, dtype=F64) - M, b[0])
    torch.testing.assert_close(found.value[0], exact, atol=1e-8, rtol=0)  # two differences span the plane


@pytest.mark.parametrize("solver", [Broyden(), Anderson()], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("step", [1e-9, 1.0, 1e9])
def test_no_equilibrium_is_found_near_infinity_at_any_scale(solver, step):
    start = torch.zeros(1, 3, dtype=F64)
    found = fixed_point(lambda x: x + step, start, solver=solver, max_steps=300, on_failure="ignore")
    assert not found.converged.any()


def test_rows_that_are_not_finite_end_at_once():
    def f(x, u):
        return torch.where(x > 2.5, torch.nan, 0.5 * x + u)

    u = torch.tensor([[1.0], [2.0]])
    found = fixed_point(f, torch.zeros_like(u), u, solver=Picard(), max_steps=500, on_failure="ignore")
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE] and found.steps[1] <= 5


def test_mean_has_its_own_tolerance_or_that_of_the_dtype():
    def steps(stop):
        u = torch.ones(1, 1, dtype=F64)
        return int(fixed_point(lambda x, u: 0.5 * x + u, torch.zeros_like(u), u, stop=stop, solver=Picard()).steps)

    assert steps(MeanRelative(rtol=0.1)) < steps(MeanRelative(rtol=1e-4)) < steps(MeanRelative())
    assert Settled(3).limit() == 4


def test_phantom_refuses_what_is_no_damping():
    for steps, damping in ((0, 1.0), (1, 0.0), (1, 1.5)):
        with pytest.raises(InputError):
            Phantom(steps, damping)
    assert Phantom(1, 1.0).steps == 1


def test_broyden_needs_a_memory():
    assert Broyden(1).memory == 1
    with pytest.raises(InputError):
        Broyden(0)


def test_diagonals_of_triangles_stay_below_one():
    raw, relu = torch.tensor([[5.0, 2.0], [3.0, -7.0]], dtype=F64), get_activation("relu")
    found = Triangular(diagonal=True).parametrise(raw, None, relu)
    assert found.tolist() == [[1 - 1e-3, 2.0], [0.0, -7.0]]
    assert Triangular(diagonal=True).certify(found, relu).holds
    assert Triangular(diagonal=True).parametrise(raw, 0.5, relu).diagonal().tolist() == [0.5, -7.0]


def test_norms_of_pieces_are_those_of_rows_on_a_cpu():
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(piece_norms(x), x.abs().amax(-1, keepdim=True))
    assert piece_norms(x[..., :0]).tolist() == [[[0.0]] * 3] * 2


def test_inputs_need_a_batch():
    for bad in (torch.tensor(1.0), torch.ones(3, 1)):
        with pytest.raises(InputError, match="batch-first"):
            fixed_point(lambda x, u: 0.5 * x + u, torch.zeros(2, 1), bad)


def test_errors_are_bounded_only_by_what_is_known():
    v, identity = torch.ones(1, 2), get_activation("relu")
    for bound, context, expected in (
        (None, v, None), (lambda x, context: context, None, None), (lambda x, context: context, v, v)
    ):  # fmt: skip
        f = AffineMap((torch.zeros(2, 2),), v, identity, 1.0, bound, context)
        assert f.error_bound(v, v) is expected


def test_gain_is_infinite_where_nothing_is_proven():
    assert Certificate.of("inf", 1.0, gain=3.0).gain == math.inf
    assert Certificate.of("inf", 1.5, gain=3.0).gain == math.inf
    assert Certificate.of("inf", 0.5, gain=3.0).gain == 3.0


def test_rounding_of_operands_follows_the_precision_of_products():
    one, settings = torch.ones(1, dtype=torch.float32), torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        for name, expected in (("tf32", 3 * 2.0**-11), ("bf16", 3 * 2.0**-8), ("ieee", 0.0)):
            settings.fp32_precision = name
            assert operand_roundoff(one) == expected
            assert operand_roundoff(one.double()) == 0.0
    finally:
        settings.fp32_precision = before


def test_rounding_of_a_row_does_not_depend_on_its_companions():
    generator = torch.Generator().manual_seed(0)
    A, x = torch.randn(6, 6, generator=generator), torch.randn(3, 6, generator=generator)
    for name in ("softmax", "tanh"):
        whole = map_rounding(A, x, x.abs(), get_activation(name), 9)
        for i in range(3):
            alone = map_rounding(A, x[i : i + 1], x[i : i + 1].abs(), get_activation(name), 9)
            assert torch.equal(whole[i : i + 1], alone)


@pytest.mark.parametrize(("p", "q"), [(p, q) for p in ("1", "2", "inf") for q in ("1", "2", "inf")])
def test_norms_of_a_batch_are_those_of_its_matrices(p, q):
    A = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    batch = induced_norm(A, p, q).value
    alone = torch.stack([induced_norm(matrix, p, q).value for matrix in A])
    torch.testing.assert_close(batch, alone, rtol=1e-14, atol=0)


def test_projections_of_a_batch_are_those_of_its_matrices():
    W = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    cases = {
        "rows": lambda part: project_rows(part, 0.9),
        "blocks": lambda part: project_block_rows(part, [1, 3], 0.9, "2"),
        "singular values": lambda part: clip_singular_values(part, 0.9),
        "split": lambda part: split_blocks(part, 2),
    }
    for project in cases.values():
        whole = project(W.requires_grad_())
        alone = [[project(matrix) for matrix in row] for row in W]
        torch.testing.assert_close(whole, torch.stack([torch.stack(row) for row in alone]), rtol=1e-13, atol=1e-14)
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        (slope,) = torch.autograd.grad((whole * weights).sum(), W)
        single = torch.stack([torch.stack(row) for row in alone])
        (expected,) = torch.autograd.grad((single * weights).sum(), W)
        torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-13)


def test_rows_that_fit_exactly_stay_as_they_are():
    raw = torch.tensor([[0.25, 0.25], [0.5, -1.0]])
    inside = WeightedNorm().parametrise(raw, 0.5, get_activation("relu"), weights=torch.zeros(2))
    assert torch.equal(inside[0], raw[0]) and inside[1].abs().sum() <= 0.5


def test_single_block_is_projected_in_its_own_norm():
    raw = torch.tensor([[0.2, 0.2], [0.5, -1.0]], dtype=F64)
    softmax, pool = get_activation("softmax"), max_pool(2)
    inside = BlockNorm().parametrise(raw, 0.5, softmax)
    assert torch.equal(inside[0], raw[0])
    torch.testing.assert_close(inside, project_rows(raw, 0.5), rtol=0, atol=1e-12)
    assert BlockNorm().certify(BlockNorm().parametrise(3 * raw, 0.5, pool), pool).value <= 0.5 + 1e-12
