"""Warm starts: the same answers in fewer steps, nothing bad kept, and a run that goes on as if never stopped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_problems import QUIET, implicit, problem, seeded

from wellposed import DEQ, ImplicitModel, ImplicitRNN, MultiscaleDEQ, Phantom, Steps
from wellposed.equilibrium import watch
from wellposed.errors import ConvergenceWarning, FileFormatError, InputError
from wellposed.models import Ensemble
from wellposed.models.cells import DenseCell
from wellposed.models.warm_start import WarmStart
from wellposed.training import Interrupted, fit
from wellposed.training.batches import Batch, Batches

EXECUTORS = ["reference", "auto"]


class TupleCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x, u):
        p, q = x
        joined = torch.cat([p, q.flatten(1)], 1)
        return torch.tanh(0.3 * self.a(joined) + u), 0.3 * self.b(p).reshape(-1, 2, 1)


def slow(executor="reference", **options):
    """A model whose solves take dozens of steps."""
    torch.manual_seed(3)
    A = torch.rand(30, 30, dtype=torch.float64)
    A = 0.95 * A / A.sum(1, keepdim=True)
    B, C = torch.rand(30, 4, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    return ImplicitModel.from_matrices(A, B, C, C[:, :4], executor=executor, **options)


def steps_of(model, u, starts=None, rows=None, backward=False):
    """The output and the mean forward and adjoint steps."""
    with watch() as log:
        if starts is None:
            y = model(u)
        else:
            with starts.of(rows):
                y = model(u)
        if backward:
            y.sin().sum().backward()
    adjoint = torch.cat([s for _, s in log.adjoint]).double().mean() if log.adjoint else torch.tensor(torch.nan)
    return y, log.mean_steps, float(adjoint)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("adjoint", [False, True])
def test_a_second_pass_takes_a_step_and_gives_the_same(executor, adjoint):
    model, u, rows = slow(executor, solver="picard", max_steps=3000), problem(40)[0], torch.randperm(40)
    cold, cold_steps, cold_adjoint = steps_of(model, u[rows], backward=True)
    gradients = [p.grad.clone() for p in model.parameters()]
    starts = WarmStart(adjoint=adjoint)
    starts.prepare(model, 40)
    for expected in (cold_steps, 1.0):
        model.zero_grad()
        warm, warm_steps, warm_adjoint = steps_of(model, u[rows], starts, rows, backward=True)
        assert torch.allclose(warm, cold, atol=1e-7)
        assert warm_steps == expected
    assert cold_steps > 20
    assert (warm_adjoint == 1.0) if adjoint else (warm_adjoint == cold_adjoint > 20)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, gradient, atol=1e-6)
    assert starts.nbytes == 40 * 30 * 8 * (2 if adjoint else 1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_is_enough_where_the_map_contracts_in_another_norm(executor):
    torch.manual_seed(1)
    options = {"condition": "spectral", "kappa": 0.95, "solver": "picard", "max_steps": 3000}
    model = ImplicitModel(4, 2, 30, executor=executor, **options).double()
    with torch.no_grad():
        model.state.raw.copy_(0.95 * torch.linalg.qr(torch.randn(30, 30).double())[0])
    u, rows, starts = torch.randn(40, 4).double(), torch.arange(40), WarmStart()
    starts.prepare(model, 40)
    assert steps_of(model, u, starts, rows)[1] > 50
    assert steps_of(model, u, starts, rows)[1] == 1  # images of accepted points may have larger residuals


@pytest.mark.parametrize("executor", EXECUTORS)
def test_samples_are_kept_by_their_place(executor):
    model, u = slow(executor), problem(12)[0]
    model(u)
    starts = WarmStart()
    starts.prepare(model, 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for rows in order.split(5):
        with starts.of(rows):
            model(u[rows])
    (kept,) = starts.states.values()
    exact = torch.stack([model.equilibrium(row[None]).value[0] for row in u]).detach()
    assert torch.allclose(kept, exact, atol=1e-7)
    assert steps_of(model, u, starts, torch.arange(12))[1] <= 2


def test_outside_the_block_nothing_is_changed():
    model, u = slow(), problem(6)[0]
    model(u)
    before = dict(vars(model))
    starts = WarmStart(adjoint=True)
    starts.prepare(model, 6)

    def fail():
        with starts.of(torch.arange(6)):
            model(u)
            assert model.hooks is not None
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert {name: id(value) for name, value in vars(model).items()} == {
        name: id(value) for name, value in before.items()
    }
    assert steps_of(model, u)[1] > 5


def test_failed_and_nonfinite_samples_are_not_kept():
    model, u = slow(solver="picard", max_steps=10, on_failure="ignore"), problem(8)[0]
    u[:4] = 0
    starts = WarmStart(adjoint=True)
    starts.prepare(model, 8)
    starts.states["#0"] = torch.full((8, 30), 1e-3, dtype=torch.float64)  # what they had before
    rows = torch.arange(8)
    with starts.of(rows):
        found = model.equilibrium(u)
    assert found.failed.any()
    assert not found.failed.all()
    assert not starts.states["#0"][found.failed].any()
    assert torch.equal(starts.states["#0"][~found.failed], found.value[~found.failed])
    status = torch.ones(3, dtype=torch.int8)
    value = torch.tensor([[1.0, torch.nan], [torch.inf, -torch.inf], [2.0, 3.0]]).double()
    starts.write("other", torch.tensor([5, 0, 2]), value, status)
    assert starts.states["other"].sum(1).tolist() == [0, 0, 5, 0, 0, 0, 0, 0]


def test_short_dtypes_keep_what_fits():
    starts = WarmStart(dtype=torch.float16)
    starts.prepare(slow(), 3)
    value = torch.tensor([[1e5, 1.0], [6e4, 6e4], [0.1, 0.2]])
    starts.write("x", torch.arange(3), value, torch.ones(3))
    assert starts.states["x"].dtype == torch.float16
    assert starts.nbytes == 3 * 2 * 2
    assert torch.allclose(starts.read("x", torch.arange(3), value)[1:], value[1:], rtol=1e-3)
    assert not starts.read("x", torch.arange(3), value)[0].any()


def test_short_starts_still_save_steps():
    model, u, rows = slow(solver="picard", max_steps=3000), problem(40)[0], torch.arange(40)
    cold, counts = steps_of(model, u), {}
    for dtype in (torch.float32, torch.bfloat16):
        starts = WarmStart(dtype=dtype)
        starts.prepare(model, 40)
        steps_of(model, u, starts, rows)
        warm, counts[dtype], _ = steps_of(model, u, starts, rows)
        assert torch.allclose(warm, cold[0], atol=1e-7)
    assert 1 < counts[torch.float32] < counts[torch.bfloat16] < cold[1]


@pytest.mark.parametrize("state", ["vector", "tuple"])
def test_deq_starts_warm(state):
    torch.manual_seed(0)
    deq = DEQ(DenseCell(3, 6)) if state == "vector" else DEQ(TupleCell(), state_shape=((3,), (2, 1)))
    deq = deq.double()
    u, rows, starts = problem(10)[0][:, :3], torch.randperm(10), WarmStart(adjoint=True)
    width = 6 if state == "vector" else 5
    starts.prepare(nn.Sequential(deq), 10)
    for _ in range(2):
        with watch() as log, starts.of(rows):
            x = deq(u[rows])
        parts = (x,) if isinstance(x, torch.Tensor) else x
        sum(part.square().sum() for part in parts).backward()
        assert {name: tuple(kept.shape) for name, kept in starts.states.items()} == {
            "0#0": (10, width),
            "0#0#adjoint": (10, width),
        }
    assert log.mean_steps == 1
    assert float(torch.cat([s for _, s in log.adjoint]).double().mean()) == 1
    alone = deq(u[rows])
    alone = (alone,) if isinstance(alone, torch.Tensor) else alone
    assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(parts, alone, strict=True))


def test_a_module_that_is_called_twice_and_on_several_positions():
    model = implicit().double()
    u, rows, starts = torch.randn(7, 3, 4, dtype=torch.float64), torch.arange(7), WarmStart()
    starts.prepare(model, 7)
    for _ in range(2):
        with watch() as log, starts.of(rows):
            first, second = model(u), model(-u)
    assert log.mean_steps == 1
    assert {name: tuple(kept.shape) for name, kept in starts.states.items()} == {"#0": (7, 18), "#1": (7, 18)}
    assert torch.allclose(first, model(u)) and torch.allclose(second, model(-u))


def test_a_given_start_wins():
    model, u, rows, starts = slow(), problem(5)[0], torch.arange(5), WarmStart()
    starts.prepare(model, 5)
    exact = model.equilibrium(u).value.detach()
    with starts.of(rows):
        assert (model.equilibrium(u, x0=exact).steps == 1).all()
    assert not starts.states


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kept", [True, WarmStart(adjoint=True)], ids=["forward", "both"])
def test_training_has_the_same_losses_in_fewer_steps(executor, kept):
    options = {"epochs": 12, "batch_size": 16, "optimizer": lambda p: torch.optim.Adam(p, lr=1e-3), **QUIET}
    data = problem(48)[0], torch.randn(48, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    models = [slow(executor, solver="picard", max_steps=3000) for _ in range(2)]
    cold = fit(models[0], data, F.mse_loss, **options)
    if kept is not True:
        kept = WarmStart(adjoint=True)
    warm = fit(models[1], data, F.mse_loss, warm_start=kept, **options)
    assert torch.allclose(cold.train_loss, warm.train_loss, rtol=1e-6)
    assert cold.steps[0] == warm.steps[0]
    assert (warm.steps[1:] < cold.steps[1:]).all()
    assert warm.steps[-1] < 0.85 * cold.steps[-1]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    if kept is not True:
        assert kept.nbytes == 2 * 48 * 30 * 8


def test_validation_is_cold_and_leaves_no_trace():
    starts, data, other = WarmStart(), problem(20), problem(20, 1)
    plain, warm = seeded(implicit, 0), seeded(implicit, 0)
    options = {"epochs": 1, "batch_size": 20, "optimizer": lambda p: torch.optim.SGD(p, lr=0.0), **QUIET}
    expected = fit(plain, data, F.mse_loss, validation=other, **options)
    found = fit(warm, data, F.mse_loss, validation=other, warm_start=starts, **options)
    assert torch.equal(found.validation_loss, expected.validation_loss)
    (kept,) = starts.states.values()
    assert torch.allclose(kept, warm.equilibrium(data[0]).value, atol=1e-8)


def test_a_stopped_run_goes_on_with_its_starts(tmp_path):
    options = {"epochs": 6, "batch_size": 10, **QUIET}
    whole, model = seeded(implicit, 0), seeded(implicit, 0)
    expected = fit(whole, problem(), F.mse_loss, warm_start=WarmStart(adjoint=True), **options)
    file = tmp_path / "run.ckpt"
    fit(
        model,
        problem(),
        F.mse_loss,
        checkpoint=file,
        warm_start=WarmStart(adjoint=True),
        **{**options, "epochs": 3},
    )
    again, starts = seeded(implicit, 0), WarmStart(adjoint=True)
    found = fit(again, problem(), F.mse_loss, checkpoint=file, warm_start=starts, **options)
    assert torch.equal(found.train_loss, expected.train_loss)
    assert torch.equal(found.steps, expected.steps)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_checkpoints_without_starts_begin_cold_and_foreign_ones_are_refused(tmp_path):
    file, options = tmp_path / "run.ckpt", {"batch_size": 53, **QUIET}
    fit(seeded(implicit, 0), problem(), F.mse_loss, checkpoint=file, epochs=2, **options)
    found = fit(seeded(implicit, 0), problem(), F.mse_loss, checkpoint=file, epochs=4, warm_start=True, **options)
    assert found.steps[3] < found.steps[2]
    with pytest.raises(FileFormatError, match="starts of 53 samples, expected 20"):
        fit(seeded(implicit, 0), problem(20), F.mse_loss, checkpoint=file, epochs=5, warm_start=True, **options)


def test_an_interrupted_epoch_leaves_the_model_as_it_was():
    model = seeded(implicit, 0)

    def stop(y, target):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fit(model, problem(), stop, epochs=1, warm_start=True, **QUIET)
    assert "solve" not in vars(model)


def test_rows_reach_every_kind_of_batch():
    u, y = problem(9)
    for data in ((u, y), torch.utils.data.StackDataset(u, y)):
        for batch in Batches(data, 4, [5]):
            assert torch.equal(u[batch.rows], batch.u)
            part = batch.shard(1, 3)
            assert torch.equal(u[part.rows], part.u)
    per_member = Batches((u.expand(2, 9, 4), y.expand(2, 9, 1)), 4, [5, 6], per_member=True)
    batch = next(iter(per_member)).shard(1, 2)
    assert torch.equal(u[batch.rows], batch.u)
    assert next(iter(Batches([(u, y)], 4))).rows is None
    assert Batch(u, y, True, 9).shard(0, 2).rows is None


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.rnn = ImplicitRNN(4, 3, 5, **{"batch_first": True, **options})


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda: Ensemble.of(implicit, [0, 1]), "train its members apart"),
        (lambda: torch.compile(implicit()), "pass the module itself"),
        (lambda: nn.Linear(4, 1), "Linear has no ImplicitModel or DEQ whose solves could be warm$"),
        (Recurrent, "an ImplicitRNN begins every step at the one before"),
        (lambda: ImplicitModel(4, 1, 6, stop=Steps(5)), "ImplicitModel, which counts steps"),
        (lambda: nn.Sequential(DEQ(DenseCell(4, 3), gradient="unrolled")), "gradient of DEQ '0' short"),
    ],
)
def test_what_cannot_start_warm_is_refused(model, complaint):
    with pytest.raises(InputError, match=complaint):
        fit(model(), problem(), F.mse_loss, epochs=1, warm_start=True, **QUIET)


def test_a_state_goes_where_it_is_wanted():
    starts, other = WarmStart(), WarmStart(dtype=torch.bfloat16)
    for each in (starts, other):
        each.prepare(slow(), 3)
    starts.write("#0", torch.arange(3), torch.rand(3, 30), torch.ones(3))
    other.load_state_dict(starts.state_dict())
    assert other.states["#0"].dtype == torch.bfloat16
    assert torch.allclose(other.states["#0"].float(), starts.states["#0"], rtol=1e-2)
    meta = WarmStart(device="meta")
    meta.prepare(slow(), 3)
    meta.load_state_dict(starts.state_dict())
    assert meta.states["#0"].device.type == "meta"
    moved = WarmStart()
    moved.prepare(slow().to("meta"), 3)
    moved.load_state_dict(starts.state_dict())
    assert moved.states["#0"].device.type == "meta"


def test_arguments_are_checked():
    with pytest.raises(InputError, match="samples that can be told apart"):
        fit(implicit(), [problem()], F.mse_loss, epochs=1, warm_start=True, **QUIET)
    with pytest.raises(InputError, match="must be True, False or a WarmStart; received 'yes'"):
        fit(implicit(), problem(), F.mse_loss, epochs=1, warm_start="yes", **QUIET)
    with pytest.raises(InputError, match=r"received torch\.int32"):
        WarmStart(dtype=torch.int32)
    starts = WarmStart()
    starts.prepare(implicit(), 5)
    with pytest.raises(InputError, match="keeps 5 samples; received 6"):
        starts.prepare(implicit(), 6)
    with pytest.raises(InputError, match=r"states of one shape.*\(4, 6\) for 3 samples"):
        starts.write("#0", torch.arange(3), torch.zeros(4, 6), torch.ones(4))


def test_a_block_without_a_solve_is_an_error():
    starts = WarmStart()
    starts.prepare(implicit(), 5)
    with pytest.raises(InputError, match="no solve was seen"), starts.of(torch.arange(5)):
        implicit()(torch.zeros(5, 4))


def test_phantom_gradients_and_images_start_warm():
    torch.manual_seed(0)
    model = MultiscaleDEQ(
        1, 3, channels=(4, 8), head_channels=(4, 8), final_channels=8, groups=2, gradient=Phantom(2)
    )
    data = torch.randn(6, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    options = {"epochs": 3, "batch_size": 6, "optimizer": lambda p: torch.optim.SGD(p, lr=1e-4), **QUIET}
    history = fit(model, data, F.cross_entropy, warm_start=WarmStart(adjoint=True), **options)
    assert history.steps[-1] < 0.7 * history.steps[0]


def test_second_derivatives_are_those_of_a_cold_model():
    model, u, rows = slow(), problem(3)[0].requires_grad_(), torch.arange(3)
    starts = WarmStart(adjoint=True)
    starts.prepare(model, 3)

    def second():
        (first,) = torch.autograd.grad(model(u).sin().sum(), u, create_graph=True)
        return torch.autograd.grad(first.square().sum(), u)[0]

    cold = second()
    for _ in range(2):
        with starts.of(rows):
            assert torch.allclose(second(), cold, atol=1e-6)
        kept = starts.states["#0#adjoint"].clone()
    (first,) = torch.autograd.grad(model(u).sin().sum(), u)
    A, B = model.A.detach(), model.B.detach()
    found = model.equilibrium(u)
    slope = (found.value @ A.mT + u @ B.mT > 0).double()
    g = model(u).cos() @ model.C
    exact = torch.linalg.solve(torch.eye(30).double() - slope[:, :, None] * A.mT, (slope * g)[..., None])[..., 0]
    assert torch.allclose(exact @ B + model(u).cos() @ model.D, first, atol=1e-7)
    assert torch.allclose(kept, exact, atol=1e-6)  # not that of another equation


def test_starts_reach_a_model_that_processes_share(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        models, options = [seeded(implicit, 0) for _ in range(2)], {"epochs": 4, "batch_size": 8, **QUIET}
        shared = nn.parallel.DistributedDataParallel(models[0])
        found = fit(shared, problem(), F.mse_loss, warm_start=True, **options)
        alone = fit(models[1], problem(), F.mse_loss, warm_start=True, **options)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.allclose(found.train_loss, alone.train_loss, rtol=1e-9)
    assert torch.equal(found.steps, alone.steps)
    assert found.steps[-1] < found.steps[0]


def test_weights_that_are_not_finite_are_told_of_once():
    model, u = slow(), problem(6)[0]
    starts = WarmStart()
    starts.prepare(model, 6)
    with torch.no_grad():
        model.B[0, 0] = torch.nan
    with starts.of(torch.arange(6)), pytest.warns(ConvergenceWarning, match="'B' holds 1 of"):
        assert model(u).isnan().all()


def test_states_are_kept_in_the_dtype_of_the_model():
    model, starts = ImplicitModel(3, 2, 8, kappa=0.99), WarmStart(adjoint=True)  # solved in float64
    starts.prepare(model, 10)
    with starts.of(torch.arange(10)):
        model(torch.randn(10, 3)).sum().backward()
    assert starts.nbytes == 2 * 10 * 8 * 4
