import copy
import pickle

import pytest
import torch
from deq_cells import Cell, Pair
from torch import nn
from torch.nn.utils import parametrizations

from wellposed import DEQ, Implicit, Phantom, Picard, Relative, Status, Steps, Unrolled
from wellposed.equilibrium import SOLVERS
from wellposed.errors import ConvergenceWarning, InputError, MapError, UnknownNameError
from wellposed.models import Ensemble, VariationalDropout

TIGHT = {"stop": Relative(1e-13), "max_steps": 500}


def build(layer=None, **options):
    torch.manual_seed(5)
    return DEQ(Cell(layer).double(), **{"state_shape": 4, **TIGHT, **options})


def inputs(batch=6):
    return torch.randn(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def test_reaches_the_equilibrium_of_the_cell():
    deq, u = build(), inputs()
    found = deq.equilibrium(u)
    assert found.converged.all()
    torch.testing.assert_close(found.value, deq.cell(found.value, u), rtol=1e-11, atol=1e-11)
    assert torch.equal(deq(u), found.value)


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("solver", SOLVERS.factories)
@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(), Phantom(60)], ids=str)
def test_gradcheck(solver, gradient, fast_mode):
    deq, u = build(solver=solver, gradient=gradient), inputs(2).requires_grad_()
    names = [name for name, _ in deq.named_parameters()]

    def run(u, *values):
        return torch.func.functional_call(deq, dict(zip(names, values, strict=True)), (u,))

    assert torch.autograd.gradcheck(run, (u, *deq.parameters()), fast_mode=fast_mode)


def test_tuple_states_and_inputs():
    deq = DEQ(Pair().double(), **TIGHT)
    u = (torch.randn(5, 2, 3).double(), torch.randn(5).double())
    found = deq.equilibrium(u)
    assert [part.shape for part in found.value] == [(5, 2, 3), (5,)] and found.converged.all()
    for value, image in zip(found.value, deq.cell(found.value, u), strict=True):
        torch.testing.assert_close(value, image, rtol=1e-10, atol=1e-10)
    sum(part.sum() for part in found.value).backward()
    assert deq.cell.weight.grad.isfinite()


def test_shape_given_asked_for_or_that_of_the_input():
    square = Cell(inputs=4).double()
    assert DEQ(square)(torch.zeros(2, 4).double()).shape == (2, 4)
    cell = Cell().double()
    cell.state_shape = lambda u: (4,)
    assert DEQ(cell)(inputs()).shape == (6, 4)
    assert build(state_shape=(4,))(inputs()).shape == (6, 4)
    tokens = DEQ(_Tokens(), state_shape=[(3, 4)])
    assert tokens(torch.tensor([[1, 2, 3], [0, 0, 1]]))[0].shape == (2, 3, 4)


class _Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x, u):
        return (0.5 * torch.sin(x[0]) + self.table(u),)


def test_start_may_be_given():
    deq, u = build(), inputs()
    found = deq.equilibrium(u)
    assert (deq.equilibrium(u, found.value.detach()).steps == 1).all()
    with pytest.raises(InputError, match="x0 must be finite"):
        deq(u, torch.full((6, 4), torch.nan).double())
    with pytest.raises(InputError, match="batch size 5 of x0"):
        deq(u, torch.zeros(5, 4).double())


def test_settings_may_change_between_calls():
    deq, u = build(), inputs()
    deq.stop, deq.solver, deq.gradient = Steps(3), "picard", Unrolled()
    x = torch.zeros(6, 4).double()
    for _ in range(3):
        x = deq.cell(x, u)
    found = deq.equilibrium(u)
    torch.testing.assert_close(found.value, x)
    assert (found.status == Status.STEPS_DONE).all()


def test_variational_dropout_is_one_map_a_solve():
    deq, u = build(VariationalDropout(0.5)), inputs(40)
    u[:20] *= 1e-9  # these leave the batch early
    found = deq.equilibrium(u)
    assert found.converged.all() and found.steps.max() > found.steps.min()
    assert not torch.equal(deq(u), found.value)  # another solve, other masks
    found.value.sum().backward()
    implicit = [p.grad.clone() for p in deq.parameters()]
    for seeded in (Implicit(), Unrolled()):
        deq.gradient = seeded
        deq.zero_grad()
        torch.manual_seed(9)
        deq(u).sum().backward()
        implicit.append([p.grad.clone() for p in deq.parameters()])
    for a, b in zip(*implicit[-2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    deq.eval()
    assert torch.equal(deq(u), deq(u))


def test_variational_dropout_keeps_a_mask_with_its_sample():
    layer = VariationalDropout(0.5)
    seen = {}

    class Spy(Cell):
        def forward(self, x, u):
            masks = layer(torch.ones_like(x))
            for row, mask in zip(u[:, 0].tolist(), masks, strict=True):
                assert torch.equal(seen.setdefault(row, mask), mask)
            return super().forward(x * masks, u)

    u = inputs(40) * 10.0 ** torch.linspace(-9, 0, 40)[:, None]
    torch.manual_seed(0)
    cell = Spy().double()
    cell.mask = layer
    deq = DEQ(cell, state_shape=4, **TIGHT)
    assert deq.equilibrium(u).converged.all() and len(seen) == 40
    assert len({tuple(mask.tolist()) for mask in seen.values()}) > 5


def test_dropout_outside_of_a_solve():
    layer = VariationalDropout(0.25, shared=(-2, -1))
    y = layer(torch.ones(200, 3, 4, 4))
    assert ((y == 0) | (y - 4 / 3).abs().lt(1e-6)).all() and torch.equal(y, y[..., :1, :1].expand_as(y))
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.06
    with pytest.raises(InputError, match="batch dimension"):
        VariationalDropout(0.5, shared=(0,))(torch.ones(2, 3))
    with pytest.raises(InputError, match=r"\[0, 1\)"):
        VariationalDropout(1.0)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_parametrised_weights_are_computed_once_a_solve(norm):
    deq, u = build(), inputs()
    getattr(parametrizations, norm)(deq.cell.state)
    deq.train()
    before = deq.cell.state.weight.detach().clone()
    found = deq.equilibrium(u)
    assert found.converged.all()
    assert not torch.equal(before, deq.cell.state.weight.detach()) or norm == "weight_norm"
    found.value.square().sum().backward()
    implicit = {name: p.grad.clone() for name, p in deq.named_parameters()}
    assert any("parametrizations" in name and grad.any() for name, grad in implicit.items())
    deq.eval()
    grads = []
    for gradient in (Implicit(), Unrolled()):
        deq.zero_grad()
        deq.gradient = gradient
        deq(u).square().sum().backward()
        grads.append([p.grad.clone() for p in deq.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), r"BatchNorm1d at 'layer' that normalises.*nn.GroupNorm"),
        (nn.BatchNorm1d(4, track_running_stats=False), "statistics of the batch"),
        (nn.Sequential(nn.Dropout(0.1)), r"Dropout at 'layer.0'.*VariationalDropout"),
        (nn.RReLU(), "RReLU"),
    ],
)
def test_layers_that_have_no_equilibrium_are_explained(layer, message):
    with pytest.raises(InputError, match=message):
        build(layer.double())(inputs())


def test_frozen_batch_norm_and_dropout_are_fine():
    layer = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.RReLU()).double()
    assert build(layer).eval().equilibrium(inputs()).converged.all()


def test_hidden_coupling_of_samples_is_found():
    class Coupled(Cell):
        def forward(self, x, u):
            y = super().forward(x, u)
            return y - 0.5 * y.mean(0)

    deq = DEQ(Coupled().double(), state_shape=4)
    with pytest.raises(MapError, match=r"depend on its batch.*alone"):
        deq(inputs())


@pytest.mark.filterwarnings("ignore::wellposed.errors.ConvergenceWarning")
@pytest.mark.parametrize("solver", SOLVERS.factories)
def test_nan_at_a_later_step_is_a_status(solver):
    class Breaks(Cell):
        def forward(self, x, u):
            y = super().forward(x, u)
            return torch.where((u[:, :1] > 0) & (x.abs().amax(1, keepdim=True) > 0), torch.nan, y)

    deq, u = DEQ(Breaks().double(), state_shape=4, solver=solver), inputs()
    found = deq.equilibrium(u)
    bad = u[:, 0] > 0
    assert found.status[bad].eq(Status.NONFINITE).all() and found.converged[~bad].all()
    assert found.value.isfinite().all() and bad.any() and not bad.all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda x, u: x[:, :2], r"shape of its state, \[\(6, 4\)\]; received \[\(6, 2\)\]"),
        (lambda x, u: x.float(), "dtype of its state, torch.float64"),
        (lambda x, u: (x,), "shape of its state"),
        (lambda x, u: None, "received NoneType"),
    ],
)
def test_cells_that_break_the_contract(cell, message):
    deq = build()
    deq.cell.forward = cell
    with pytest.raises(MapError, match=message):
        deq(inputs())


def test_wrong_shapes_are_explained():
    with pytest.raises(MapError, match=r"given the shape of u, \(6, 3\).*state_shape=\.\.\."):
        build(state_shape=None)(inputs())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        build(state_shape=5)(inputs())
    for bad in ("four", -1, (2, -1), ((2,), "a"), 1.5):
        with pytest.raises(InputError, match="state_shape"):
            build(state_shape=bad)
    with pytest.raises(InputError, match=r"must be an nn\.Module; received function"):
        DEQ(lambda x, u: x)
    with pytest.raises(InputError, match="u must be a tensor; received dict"):
        build()({"u": inputs()})
    with pytest.raises(InputError, match="without dimensions"):
        build()(torch.tensor(1.0))
    with pytest.raises(InputError, match="input 0 must be finite"):
        build()(inputs() * torch.nan)
    with pytest.raises(UnknownNameError, match="did you mean 'anderson'"):
        build(solver="andersn")
    with pytest.raises(TypeError, match="sover"):
        build(sover="anderson")


def test_failures_follow_the_policy():
    deq, u = build(max_steps=2), inputs()
    with pytest.warns(ConvergenceWarning, match="6 of 6 samples"):
        deq(u)
    assert build(max_steps=2, on_failure="ignore").equilibrium(u).failed.all()


def test_module_hygiene():
    deq, u = build(VariationalDropout(0.3)).eval(), inputs()
    y = deq(u)
    fresh = build(VariationalDropout(0.3), solver=Picard()).eval()
    fresh.load_state_dict(deq.state_dict())
    torch.testing.assert_close(fresh(u), y, rtol=1e-10, atol=1e-10)
    ema = torch.optim.swa_utils.AveragedModel(deq)
    ema.update_parameters(deq)
    for twin in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq)), ema):
        assert torch.equal(twin(u), y)
    assert deq.float()(u.float()).dtype == torch.float32
    assert "solver=None" in repr(deq)


def test_compile_and_checkpoint():
    deq, u = build(), inputs()
    torch.testing.assert_close(torch.compile(deq, backend="eager")(u), deq(u))
    torch.utils.checkpoint.checkpoint(deq, u, use_reentrant=False).sum().backward()
    first = [p.grad.clone() for p in deq.parameters()]
    deq.zero_grad()
    deq(u).sum().backward()
    for a, b in zip(first, (p.grad for p in deq.parameters()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_cell_short_and_the_solver_long(dtype):
    deq, u = build(stop=None).float(), inputs().float()
    with torch.autocast("cpu", dtype):
        found = deq.equilibrium(u)
    assert found.value.dtype == torch.float32 and found.converged.all()
    torch.testing.assert_close(found.value, deq(u), rtol=0.1, atol=0.1)
    found.value.sum().backward()
    assert found.adjoint.converged.all()


@pytest.mark.parametrize("gradient", [Phantom(30), Implicit()])
def test_ensemble_runs_and_trains(gradient):
    ensemble = Ensemble.of(lambda: DEQ(Cell(), state_shape=4, gradient=gradient), seeds=[0, 1])
    u = inputs().float()
    y = ensemble(u)
    y.sum().backward()
    for k in range(2):
        alone = ensemble.member(k)
        torch.testing.assert_close(alone(u), y[k], rtol=1e-3, atol=1e-4)
        alone(u).sum().backward()
        for name, parameter in alone.named_parameters():
            mine = dict(ensemble.stacked.named_parameters())[name].grad[k]
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert ensemble(u).shape == (2, 6, 4)
