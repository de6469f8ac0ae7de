"""Sparse products against the reference loop, and when a model takes them."""

import copy
import pickle
import threading
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from problems import compiled_loop, state_matrix

import wellposed.kernels.cpu.engine as cpu_engine
from wellposed import ImplicitModel
from wellposed.activations import get_activation, leaky_relu
from wellposed.equilibrium import Absolute, Anderson, Picard, Relative, Status, Steps
from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.stopping import Settled
from wellposed.kernels.cpu.engine import multiply_sparse
from wellposed.kernels.sparse import ALONE, NEAR, Cache, SparseRows, compress
from wellposed.models import Ensemble

ACTIVATIONS = ["relu", leaky_relu(0.2), "tanh", "sigmoid", "identity"]
DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (1, 64), (17, 3), (17, 64), (190, 1), (190, 3), (257, 1), (257, 64)]  # states, batch


def name_of(activation):
    return get_activation(activation).name


def sparse_matrix(n, share, generator, norm=0.7):
    """Draws A with about this share of entries and row sums of |A| equal to `norm`, or to zero."""
    A = torch.randn(n, n, dtype=torch.float64, generator=generator)
    A = A * (torch.rand(n, n, generator=generator) < share)
    return norm * A / A.abs().sum(1, keepdim=True).clamp_min(1e-9)


def problem(A, batch, activation="relu", dtype=torch.float64, seed=1):
    v = torch.randn(batch, len(A), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return AffineMap((A.to(dtype),), v.to(dtype), get_activation(activation))


def sparse_loop(f, **options):
    return partial(compiled_loop, sparse=compress(f.factors[0], square=True), **options)


def solve_both(f, solver=None, stop=None, max_steps=200, x0=None):
    solver, stop, x0 = solver or Anderson(), stop or Relative(), torch.zeros_like(f.v) if x0 is None else x0
    return [loop(f, x0, solver, stop, max_steps) for loop in (sparse_loop(f), iterate)]


def assert_agree(f, norm, **options):
    found, plain = solve_both(f, **options)
    assert torch.equal(found.status, plain.status)
    assert int((found.steps - plain.steps).abs().max()) <= (f.v.dtype == torch.float32)
    same = found.steps == plain.steps  # a step more is a step closer, not rounding
    assert same.double().mean() > 0.9
    limit = 10 * f.rounding(plain.value, f(plain.value))
    if not isinstance(options.get("solver"), Picard):  # jumps magnify rounding; what they reach is as close
        limit = limit + found.last_residual + plain.last_residual
    assert ((found.value - plain.value).abs().amax(1) <= limit / (1 - norm))[same].all()
    columns = found.residuals.shape[1]
    assert torch.equal(found.residuals.isfinite()[same], plain.residuals.isfinite()[same][:, :columns])


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
@pytest.mark.parametrize(("n", "batch"), SHAPES)
def test_agrees_with_the_reference(n, batch, activation, dtype):
    generator = torch.Generator().manual_seed(n + batch)
    for share, solver in ((0.03, Anderson()), (0.3, Picard())):
        f = problem(sparse_matrix(n, share, generator), batch, activation, dtype)
        assert_agree(f, 0.7, solver=solver)
        assert_agree(
            f, 0.7, solver=solver, stop=Absolute(1e-4), x0=torch.randn(batch, n, generator=generator).to(dtype)
        )


@pytest.mark.parametrize("family", ["positive", "ring", "shift", "sparse"])
def test_slow_problems(family):
    # Many jumps, accepted and rejected, and lanes that take new samples.
    A = state_matrix(family, 24, 0.95, torch.Generator().manual_seed(0))
    assert_agree(problem(A, 100), 0.95, stop=Absolute(3e-6), max_steps=2000)
    tight = [found.value for found in solve_both(problem(A, 100), stop=Absolute(1e-15), max_steps=2000)]
    torch.testing.assert_close(*tight, rtol=1e-13, atol=1e-13)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_dense_matrices_are_sparse_matrices(batch, dtype):
    A = state_matrix("random", 37, 0.7, torch.Generator().manual_seed(0))
    assert compress(A).entries == 37 * 37
    assert_agree(problem(A, batch, dtype=dtype), 0.7)


@pytest.mark.parametrize("batch", [1, 40])
def test_rows_without_entries(batch):
    A = sparse_matrix(50, 0.2, torch.Generator().manual_seed(0))
    A[::3] = 0
    assert_agree(problem(A, batch), 0.7)
    nothing = problem(torch.zeros_like(A), batch, "tanh")
    found = solve_both(nothing)[0]
    assert (found.steps == 2).all() and (found.status == Status.CONVERGED).all()
    torch.testing.assert_close(found.value, nothing.v.tanh(), rtol=1e-14, atol=0)


def test_layout_is_the_matrix():
    A = sparse_matrix(33, 0.1, torch.Generator().manual_seed(3))[:, :20]
    rows = compress(A)
    values, columns, starts, runs = rows.arrays
    again = torch.zeros_like(A)
    for row in range(33):
        for at in range(starts[row], starts[row + 1]):
            again[row, columns[at]] += values[at]
    assert torch.equal(again, A) and rows.entries == int(A.count_nonzero()) and len(runs) == 0
    assert rows.stored == len(values) >= rows.entries and (starts % 4 == 0).all()
    assert rows.nbytes == rows.stored * (8 + 4) + 34 * 8


@pytest.mark.parametrize("solver", [Anderson(), Picard()], ids=str)
def test_every_status(solver):
    A = torch.eye(5, dtype=torch.float64)
    A[0, 0], A[1, 1] = 0.5, 3.0
    v = torch.zeros(5, 5, dtype=torch.float64)
    v[0, 0] = v[3, 0] = v[1, 1] = v[2, 2] = 1.0
    v[4, 3] = torch.nan
    found, plain = solve_both(AffineMap((A,), v, get_activation("relu")), solver, Absolute(1e-12), 90)
    assert torch.equal(found.status, plain.status) and torch.equal(found.steps, plain.steps)
    assert found.status[4] == Status.NONFINITE and found.value.isfinite().all()
    assert len({int(code) for code in found.status}) >= 3


@pytest.mark.parametrize("triangular", [False, True])
def test_nan_and_overflow_are_statuses_of_their_samples(triangular):
    A = sparse_matrix(70, 0.2, torch.Generator().manual_seed(0))
    A = A.tril(-1) if triangular else A
    f = problem(A, 6)
    f.v[1, 69], f.v[2, 0], f.v[4, 3] = torch.nan, torch.inf, -torch.inf
    found = sparse_loop(f, automatic=True)(f, torch.zeros_like(f.v), Anderson(), Relative(), 90)
    plain = iterate(f, torch.zeros_like(f.v), Anderson(), Relative(), 90)
    assert torch.equal(found.status, plain.status) and found.value.isfinite().all()
    assert [int(code) for code in found.status[:3]] == [Status.CONVERGED, Status.NONFINITE, Status.NONFINITE]
    torch.testing.assert_close(found.value, plain.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_does_not_depend_on_its_companions(dtype):
    A = sparse_matrix(83, 0.1, torch.Generator().manual_seed(0), norm=0.95)
    f = problem(A, 90, dtype=dtype)
    f = AffineMap(f.factors, f.v * 10.0 ** torch.randint(-3, 4, (90, 1)).to(dtype), f.activation)
    together = sparse_loop(f)(f, torch.zeros_like(f.v), Anderson(), Relative(), 500)
    for rows in (slice(0, 1), slice(5, 8), slice(30, 71), slice(89, 90)):
        part = AffineMap(f.factors, f.v[rows], f.activation)
        alone = sparse_loop(part)(part, torch.zeros_like(part.v), Anderson(), Relative(), 500)
        assert torch.equal(alone.value, together.value[rows]) and torch.equal(alone.steps, together.steps[rows])


def test_threads_change_nothing():
    f = problem(sparse_matrix(600, 0.1, torch.Generator().manual_seed(0)), 200, dtype=torch.float32)
    u, before = torch.randn(200, 600), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found = sparse_loop(f)(f, torch.zeros_like(f.v), Anderson(), Relative(), 200)
            results.append((found.value, found.steps, multiply_sparse(u, compress(f.factors[0]), None)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 32, 65])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 40), (65, 3), (40, 130)])
def test_products(rows, columns, batch, dtype):
    generator = torch.Generator().manual_seed(rows)
    W = torch.randn(rows, columns, generator=generator) * (torch.rand(rows, columns, generator=generator) < 0.3)
    W, u, b = W.to(dtype), torch.randn(batch, columns).to(dtype), torch.randn(rows).to(dtype)
    for bias in (None, b):
        torch.testing.assert_close(multiply_sparse(u, compress(W), bias), F.linear(u, W, bias))
    turned = u.mT.contiguous().mT
    assert torch.equal(
        multiply_sparse(turned, compress(W.mT.contiguous().mT), b), multiply_sparse(u, compress(W), b)
    )


def layered(sizes, generator, order=None):
    """Draws the A of a network: every state depends on some of the layer before."""
    n, A, start = sum(sizes), torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64), 0
    for width, following in pairwise(sizes):
        middle, end = start + width, start + width + following
        A[middle:end, start:middle] = torch.randn(following, width, dtype=torch.float64, generator=generator)
        start = middle
    A = 0.9 * A / A.abs().sum(1, keepdim=True).clamp_min(1e-9)
    order = torch.arange(n) if order is None else order(n)
    return A[order][:, order]


ORDERS = {
    "lower": torch.arange,
    "upper": lambda n: torch.arange(n).flip(0),
    "shuffled": lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("batch", [1, 5, 70])
@pytest.mark.parametrize("order", ORDERS)
def test_substitution_is_exact_in_one_checked_step(order, batch, activation, dtype):
    A = layered((30, 20, 25, 9), torch.Generator().manual_seed(0), ORDERS[order])
    f, rows = problem(A, batch, activation, dtype), compress(A.to(dtype), square=True)
    assert rows.levels == 4
    found = sparse_loop(f, automatic=True)(f, torch.zeros_like(f.v), Anderson(), Relative(), 90)
    assert (found.status == Status.CONVERGED).all() and (found.steps == 1).all()
    assert torch.equal(found.residuals, torch.zeros(batch, 1, dtype=dtype))
    x = torch.zeros_like(f.v)
    for _ in range(4):  # as many as there are layers: exact
        x = f(x)
    assert ((found.value - x).abs().amax(1) <= 10 * f.rounding(x, x)).all()


def test_substitution_only_where_it_may():
    f = problem(layered((30, 20, 25, 9), torch.Generator().manual_seed(0)), 5)
    zeros = torch.zeros_like(f.v)
    counted = sparse_loop(f, automatic=True)(f, zeros, Picard(), Steps(7), Steps(7).limit())
    assert (counted.status == Status.STEPS_DONE).all()
    assert torch.equal(counted.steps, iterate(f, zeros, Picard(), Steps(7), Steps(7).limit()).steps)
    asked = sparse_loop(f)(f, zeros, Picard(), Relative(), 90)  # somebody has chosen the solver
    assert (asked.steps == 5).all()
    settled = sparse_loop(f, automatic=True)(f, zeros, Picard(), Settled(84), 85)
    assert (settled.steps == 1).all() and (settled.status == Status.CONVERGED).all()


def test_levels():
    cycle = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    loop = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    for A, levels, runs in [
        (cycle, 0, []),
        (loop, 0, []),
        (torch.zeros(3, 3), 1, []),
        (cycle.triu(), 3, [2, 3, 1, 2, 0, 1]),
        (torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), 2, [0, 2, 2, 3]),
    ]:
        rows = compress(A, square=True)
        assert (rows.levels, rows.arrays[3].tolist()) == (levels, runs)


# Models.


def model(share=0.08, n=80, dtype=torch.float64, executor="auto", **options):
    generator = torch.Generator().manual_seed(0)
    A = sparse_matrix(n, share, generator).to(dtype)
    B, C, D = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n, 3), (2, n), (2, 3)))
    bias = torch.randn(n, generator=generator).to(dtype)
    return ImplicitModel.from_matrices(A, B, C, D, bias=bias, executor=executor, **options)


def inputs(batch=5, dtype=torch.float64, columns=3):
    return torch.randn(batch, columns, dtype=dtype, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def kinds(monkeypatch):
    """The kinds of matrices that kernels meet."""
    met, run = [], cpu_engine.run_kernel
    monkeypatch.setattr(
        cpu_engine, "run_kernel", lambda A, *args, **kw: met.append(type(A)) or run(A, *args, **kw)
    )
    fused = cpu_engine.run_fused
    monkeypatch.setattr(cpu_engine, "run_fused", lambda *args: met.append(torch.Tensor) or fused(*args))
    return met


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_a_sparse_model_is_a_faster_way_to_the_same_outputs(batch, dtype, kinds):
    sparse, reference, u = model(dtype=dtype), model(dtype=dtype, executor="reference"), inputs(batch, dtype)
    with torch.no_grad():
        y = sparse(u)
        assert kinds == [SparseRows]
        solution, plain = sparse.equilibrium(u), reference.equilibrium(u)
        assert kinds == [SparseRows] * 2
        torch.testing.assert_close(y, reference(u), rtol=1e-5, atol=4e-5)
        assert sparse(u[None]).shape == (1, batch, 2)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-5, atol=4e-5)
    assert torch.equal(solution.status, plain.status) and (solution.error_bound < 1e-2).all()
    assert int((solution.steps - plain.steps).abs().max()) <= 1


def test_derivatives_take_dense_products(kinds):
    sparse, u = model(), inputs()
    dense = model(executor="reference")
    sparse(u).sum().backward()
    dense(u).sum().backward()
    assert len(kinds) == 2 and SparseRows not in kinds
    for mine, theirs in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    kinds.clear()
    sparse.requires_grad_(False)(u)  # nothing to differentiate
    sparse(u.requires_grad_())
    assert kinds[0] is SparseRows and kinds[1] is not SparseRows


def test_wide_inputs_and_outputs_are_sparse_products():
    generator, n, p, q = torch.Generator().manual_seed(0), 400, 420, 410
    draw = lambda *shape: torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.01)  # noqa: E731
    A, B, C, D = 0.1 * sparse_matrix(n, 0.02, generator).float(), draw(n, p), draw(q, n), draw(q, p)
    found = ImplicitModel.from_matrices(A, B, C, D, bias=torch.ones(n))
    reference = ImplicitModel.from_matrices(A, B, C, D, bias=torch.ones(n), executor="reference")
    u = inputs(40, torch.float32, p)
    with torch.no_grad():
        assert "sparse A and B and C and D (" in found.explain(u)
        torch.testing.assert_close(found(u), reference(u), rtol=1e-5, atol=4e-5)


def test_dense_state_matrix_with_sparse_inputs():
    generator, n, p = torch.Generator().manual_seed(0), 400, 500
    A = state_matrix("random", n, 0.7, generator).float()
    B = torch.randn(n, p, generator=generator) * (torch.rand(n, p, generator=generator) < 0.01)
    C, u = torch.randn(2, n, generator=generator), inputs(40, torch.float32, p)
    found, reference = (ImplicitModel.from_matrices(A, B, C, executor=e) for e in ("auto", "reference"))
    with torch.no_grad():
        text = found.explain(u)
        assert text.splitlines()[0].endswith(
            "sparse B, dense A (100.0% of its entries; sparse up to 40% at batch 40)"
        )
        torch.testing.assert_close(found(u), reference(u), rtol=1e-5, atol=4e-5)


def change_by_optimiser(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(inputs()).square().sum().backward()
    optimiser.step()


def change_by_fused_optimiser(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    model(inputs()).square().sum().backward()
    optimiser.step()


def change_unseen(model):
    model.state.raw.data.mul_(0.5)


def change_by_copy(model):
    with torch.no_grad():
        model.state.raw.mul_(0.5)


def change_by_loading(model):
    model.load_state_dict({name: 0.7 * value for name, value in model.state_dict().items()})


def change_the_cap(model):
    model.state.kappa = 0.3


def change_the_tensor(model):
    model.state.raw.data = 0.5 * model.state.raw.data


def change_the_output(model):
    with torch.no_grad():
        model.C[0, 0] += 5


CHANGES = [
    change_by_optimiser,
    change_by_fused_optimiser,
    change_unseen,
    change_by_copy,
    change_by_loading,
    change_the_cap,
    change_the_tensor,
    change_the_output,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_parameters_are_noticed(change):
    sparse, u = model(), inputs(40)
    with torch.no_grad():
        before = sparse(u)
    change(sparse)
    sparse.executor = "reference"
    with torch.no_grad():
        truth = sparse(u)
        sparse.executor = "auto"
        after = sparse(u)
    torch.testing.assert_close(after, truth)
    assert (before - after).abs().max() > 1e-4


def test_the_layout_is_made_once():
    sparse, u, made = model(), inputs(40), []
    get = sparse._sparse.get
    sparse._sparse.get = lambda tensors, settings, make: get(tensors, settings, lambda: made.append(1) or make())
    with torch.no_grad():
        for _ in range(3):
            sparse(u)
        sparse.equilibrium(u)
    assert len(made) == 1


def test_copies_begin_without_a_layout():
    sparse, u = model(), inputs(40)
    with torch.no_grad():
        y = sparse(u)
        for copied in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
            assert copied._sparse.entry is None
            assert torch.equal(copied(u), y)
            copied.state.raw.mul_(0.5)
            assert not torch.allclose(copied(u), y) and torch.equal(sparse(u), y)
        assert Ensemble([sparse, model()])(u).shape == (2, 40, 2)  # one has a layout, the other none


def test_inference_mode():
    u = inputs(40)
    with torch.inference_mode():
        expected = model(executor="reference")(u)
        torch.testing.assert_close(model()(u), expected)  # parameters that do not tell when they change
        made = model()
        made.state.raw.mul_(0.5)
        assert not torch.allclose(made(u), expected)
    outside = model()
    with torch.inference_mode():
        torch.testing.assert_close(outside(u), expected)


def test_many_threads_may_share_a_model():
    u, results, gate = inputs(40), [], threading.Barrier(6)
    shared, expected = model(), model(executor="reference")

    def work():
        gate.wait()
        with torch.no_grad():
            results.extend(shared(u) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert len(results) == 30 and all(torch.allclose(y, expected(u)) for y in results)


def test_a_cache_never_answers_with_what_belongs_to_others():
    cache, tensors, wrong = Cache(), [torch.full((2,), float(k)) for k in range(3)], []

    def work(k):
        def make():
            time.sleep(1e-3)
            return k

        wrong.extend(1 for _ in range(30) if cache.get((tensors[k], None), (), make) != k)

    threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1, 2) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_not_mistaken_for_another_tensor():
    cache, answers = Cache(), []
    for k in range(20):  # each would come to lie where the last one was
        answers.append(cache.get((torch.full((1000,), float(k)),), (), lambda k=k: k))
    assert answers == list(range(20))


@pytest.mark.parametrize(
    ("share", "batch", "words"),
    [
        (0.05, 40, "sparse A (A: "),
        (0.05, 1, f"; sparse up to {ALONE:.0%} at batch 1)"),
        (0.05, 4, f"; sparse up to {NEAR:.0%} at batch 4)"),
        (1.0, 40, f"dense A (100.0% of its entries; sparse up to {NEAR:.0%} at batch 40)"),
        (0.44, 40, "dense A (4"),
    ],
)
def test_reasons(share, batch, words, kinds):
    chosen, u = model(share), inputs(batch)
    with torch.no_grad():
        text = chosen.explain(u)
        chosen(u)
    assert text.startswith("numba: relu, float64, 80 states") and words in text
    assert (kinds == [SparseRows]) == (" sparse A" in text)


def test_reasons_against():
    u = inputs(40)
    assert "; sparse products are for inference, under torch.no_grad())" in model().explain(u)
    with torch.no_grad():
        assert model(executor="reference").explain(u) == 'reference: executor="reference" was asked for'
        assert "sparse" not in model(n=40).explain(u)  # too small to ask
        A = layered((40, 40), torch.Generator().manual_seed(0))
        feedforward = ImplicitModel.from_matrices(A, torch.ones(80, 3).double(), torch.ones(1, 80).double())
        assert feedforward.explain(u).splitlines()[0].endswith("at batch 40), substitution in 2 levels")
        assert (feedforward.equilibrium(u).steps == 1).all()


@pytest.mark.parametrize("options", [{"condition": "mu"}, {"condition": "monotone"}, {"activation": "gelu"}])
def test_other_iterations_stay_dense(options, kinds):
    torch.manual_seed(0)
    with torch.no_grad():
        other, u = ImplicitModel(3, 2, 80, kappa=0.5, **options).double(), inputs(40)
        other.state.raw.mul_(torch.rand(80, 80) < 0.05)
        expected = ImplicitModel(3, 2, 80, kappa=0.5, executor="reference", **options).double()
        expected.load_state_dict(other.state_dict())
        torch.testing.assert_close(other(u), expected(u), rtol=1e-4, atol=1e-6)
        assert SparseRows not in kinds


def test_a_matrix_that_is_not_iterated_with_stays_dense(kinds):
    A = sparse_matrix(80, 0.05, torch.Generator().manual_seed(0)).triu(1) - 2 * torch.eye(80)
    B, C, u = torch.ones(80, 3).double(), torch.ones(1, 80).double(), inputs(40)
    found, reference = (
        ImplicitModel.from_matrices(A, B, C, triangular=True, executor=e) for e in ("auto", "reference")
    )
    with torch.no_grad():
        torch.testing.assert_close(found(u), reference(u), rtol=1e-6, atol=1e-8)
    assert kinds and SparseRows not in kinds  # an equivalent system without a diagonal is solved


def test_slow_samples_go_to_newton(kinds):
    A = state_matrix("ring", 70, 0.9999, torch.Generator().manual_seed(0))
    B, C, u = torch.rand(70, 3).double(), torch.ones(1, 70).double(), inputs(40).abs()
    slow = ImplicitModel.from_matrices(A, B, C)
    exact = torch.linalg.solve(torch.eye(70) - A, B @ u.mT).mT  # nothing is negative
    with torch.no_grad():
        torch.testing.assert_close(slow(u), exact @ C.mT, rtol=1e-6, atol=0)
        solution = slow.equilibrium(u)
    assert kinds == [SparseRows] * 2 and (solution.status == Status.CONVERGED).all()
    assert (solution.steps > 100).all()
