"""Captured steps on a CUDA device against the reference loop there; run with -m gpu."""

import copy
import gc

import pytest
import torch
from deq_cells import Cell, Pair
from torch import nn

from wellposed import DEQ, MultiscaleDEQ
from wellposed.equilibrium import Implicit, MeanRelative, Phantom, RandomSteps, Relative, Status, Steps, Unrolled
from wellposed.errors import InputError
from wellposed.kernels.graphs import GraphLoop
from wellposed.models import ConvCell, PlainConvCell, TransformerCell, VariationalDropout, spectral_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def pair_of_models(cell, **options):
    """The same cell solved by graphs and by the reference loop."""
    cell = cell.cuda()
    return tuple(DEQ(cell, executor=executor, **options) for executor in ("graph", "reference"))


def flat(state):
    return torch.cat(
        [part.reshape(len(part), -1) for part in (state if isinstance(state, tuple) else (state,))], 1
    )


def agree(model, reference, u, tolerance=2e-4, within=1):
    mine, theirs = model.equilibrium(u), reference.equilibrium(u)
    assert mine.status.equal(theirs.status)
    assert (mine.steps - theirs.steps).abs().max() <= within
    torch.testing.assert_close(
        flat(mine.value), flat(theirs.value), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    return mine


def same_gradients(model, reference, u, tolerance=2e-3):
    gradients = []
    for module in (model, reference):
        module.zero_grad()
        given = u.clone().requires_grad_()
        value = flat(module(given))
        (value * torch.linspace(-1, 1, value.shape[1], device="cuda")).sum().backward()
        gradients.append([given.grad] + [p.grad.clone() for p in module.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        size = theirs.abs().max()
        assert (mine - theirs).abs().max() <= tolerance * size + 1e-6


CELLS = {
    "plain": lambda: (PlainConvCell(3, 8, dims=2), lambda: torch.randn(6, 3, 9, 9, device="cuda")),
    "residual": lambda: (ConvCell(3, 16), lambda: torch.randn(6, 3, 8, 8, device="cuda")),
    "attention": lambda: (TransformerCell(16, 4, 32), lambda: torch.randn(5, 7, 16, device="cuda")),
    "weight under a norm": lambda: (spectral_norm(Cell(width=4), 0.9), lambda: torch.randn(20, 3, device="cuda")),
}


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_agree(name, solver):
    cell, draw = CELLS[name]()
    shape = 4 if name == "weight under a norm" else None
    model, reference = pair_of_models(cell, solver=solver, state_shape=shape, on_failure="ignore")
    for _ in range(4):
        found = agree(model, reference, draw())
        same_gradients(model, reference, draw())
    assert found.converged.all()
    text = model.explain(draw())
    assert "forward graph" in text and "backward graph" in text and "captured" in text
    assert len(model._graphs.captured) == 2


def test_optimiser_steps_need_no_capture_and_moved_weights_do():
    cell, draw = CELLS["plain"]()
    model, reference = pair_of_models(cell)
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(5):
        optimiser.zero_grad(set_to_none=True)
        model(draw()).square().mean().backward()
        optimiser.step()
    assert len(model._graphs.captured) == 2
    agree(model, reference, draw())
    cell.state.weight = nn.Parameter(0.5 * cell.state.weight.detach())
    with torch.no_grad():
        for _ in range(3):
            agree(model, reference, draw())
    assert len(model._graphs.captured) == 3


def test_settings_of_the_cell_are_part_of_the_kind():
    class Scaled(Cell):
        scale = 1.0

        def forward(self, x, u):
            return self.scale * super().forward(x, u)

    model, reference = pair_of_models(Scaled(), state_shape=4)
    u = torch.randn(9, 3, device="cuda")
    for scale in (1.0, 0.5):
        model.cell.scale = scale
        for _ in range(3):
            agree(model, reference, u)


def test_shapes_make_kinds_and_only_some_are_kept():
    cell, _ = CELLS["plain"]()
    model, reference = pair_of_models(cell)
    model._graphs = GraphLoop(keep=2)
    with torch.no_grad():
        for size in (4, 6, 8, 4):
            for _ in range(3):
                agree(model, reference, torch.randn(3, 3, size, size, device="cuda"))
    assert len(model._graphs.captured) == 2


@pytest.mark.parametrize(
    "rule", [MeanRelative(1e-4, 3), Steps(0), Steps(9), Steps(13), Relative(1e-3, norm="2")], ids=str
)
def test_every_stopping_rule(rule):
    cell, draw = CELLS["plain"]()
    model, reference = pair_of_models(cell, stop=rule)
    with torch.no_grad():
        for _ in range(4):
            agree(model, reference, draw())


def test_random_numbers_of_steps_are_drawn_anew():
    model = pair_of_models(Cell(), state_shape=4, stop=RandomSteps(1, 30))[0]
    u, seen = torch.randn(50, 3, device="cuda"), set()
    with torch.no_grad():
        for _ in range(6):
            found = model.equilibrium(u)
            assert (found.status == Status.STEPS_DONE).all() and found.steps.min() >= 2
            seen.add(tuple(found.steps.tolist()))
    assert len(seen) == 6


def test_tuple_states_and_several_scales():
    u = torch.randn(9, 2, 3, device="cuda"), torch.randn(9, device="cuda")
    model, reference = pair_of_models(Pair())
    with torch.no_grad():
        for _ in range(3):
            agree(model, reference, u)
    torch.manual_seed(0)
    multi = MultiscaleDEQ(
        3, 10, channels=(8, 16), head_channels=(8, 16), final_channels=32, on_failure="ignore"
    ).cuda()
    images = torch.randn(4, 3, 16, 16, device="cuda")
    outcomes = []
    for executor in ("reference", "graph"):
        multi.deq.executor = executor
        for _ in range(3):
            multi.zero_grad()
            logits = multi(images)
            logits.square().sum().backward()
        outcomes.append([logits] + [p.grad.clone() for p in multi.parameters()])
    assert "captured" in multi.deq.explain(images)
    for mine, theirs in zip(*outcomes, strict=True):
        assert (mine - theirs).abs().max() <= 5e-3 * theirs.abs().max() + 1e-5


class Failing(nn.Module):
    """Rows that converge, creep, diverge and turn NaN, by the size of their input."""

    def state_shape(self, u):
        return tuple(u.shape[1:])

    def forward(self, x, u):
        rate = u[:, :1]
        y = rate * x + 1
        return torch.where((rate > 2) & (y > 100), y * torch.inf * 0, y)


def test_failures_have_the_statuses_of_the_reference_loop():
    model, reference = pair_of_models(Failing(), on_failure="ignore", solver="picard", max_steps=50)
    u = torch.tensor([0.0, 0.3, 0.9, 0.99, 1.5, 3.0], device="cuda")[:, None].expand(6, 2).contiguous()
    with torch.no_grad():
        for _ in range(3):
            found = agree(model, reference, u)
    kinds = {Status(int(code)) for code in found.status}
    assert kinds == {Status.CONVERGED, Status.MAX_STEPS, Status.DIVERGED, Status.NONFINITE}
    assert found.residuals.shape[1] == 50


class Looking(Cell):
    def forward(self, x, u):
        return super().forward(x, u) if float(x.sum()) < 1e9 else x


class Waiting(Cell):
    """Waits in a way that only a capture notices."""

    def forward(self, x, u):
        torch.cuda.synchronize()
        return super().forward(x, u)


class Drawing(Cell):
    def forward(self, x, u):
        return super().forward(x, u) + 0 * torch.rand_like(x)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (Looking, "synchronizing"),
        (Drawing, "random numbers"),
        (Waiting, "captur"),
        (lambda: Cell(VariationalDropout(0.1)), "VariationalDropout"),
    ],
)
def test_what_cannot_be_captured_is_solved_plainly_and_explained(cell, reason):
    model = DEQ(cell().cuda(), state_shape=4, on_failure="ignore")
    u = torch.randn(9, 3, device="cuda")
    for _ in range(3):
        model(u).sum().backward()
    assert reason in model.explain(u) and not model._graphs.captured
    model.executor = "graph"
    with pytest.raises(InputError, match=reason):
        model(u)
    torch.randn(3, device="cuda")
    assert DEQ(Cell().cuda(), state_shape=4)(u).isfinite().all()  # the device is as it was


def test_gradients_other_than_the_implicit_one():
    u = torch.randn(9, 3, device="cuda")
    for gradient in (Phantom(), Unrolled(), Implicit(solver=None, max_steps=60)):
        cell = Cell().cuda()
        models = [DEQ(cell, state_shape=4, gradient=gradient, executor=name) for name in ("auto", "reference")]
        for _ in range(3):
            same_gradients(*models, u)
    assert "differentiated" not in models[0].explain(u)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_autocast(precision):
    cell, draw = CELLS["residual"]()
    model, reference = pair_of_models(cell)
    u = draw()
    with torch.autocast("cuda", precision):
        for _ in range(3):
            agree(model, reference, u, tolerance=0.05, within=3)
    with torch.no_grad():
        cell.block.first.weight.mul_(0.5)
    with torch.autocast("cuda", precision):
        agree(model, reference, u, tolerance=0.05, within=3)


def test_nothing_waits_for_the_device_but_reads_of_the_record():
    cell, draw = CELLS["residual"]()
    model, u = pair_of_models(cell)[0], draw()
    with torch.no_grad():
        for _ in range(3):
            found = model.equilibrium(u)
    (captured,) = model._graphs.captured.values()
    reads = []
    captured._synchronise, read = lambda: reads.append(1) or read(), captured._synchronise
    inputs = captured.buffers[:]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch._foreach_copy_(captured.buffers, inputs)
        for graph in captured.graphs:
            graph.replay()
        read()
        captured.program.result(int(captured.host_record[1]), int(captured.host_record[2]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        model(u)
    assert len(reads) <= 2 < int(found.steps.max())


def test_graphs_go_with_the_model_and_not_with_a_copy():
    cell, draw = CELLS["plain"]()
    model, u = pair_of_models(cell)[0], draw()
    for _ in range(3):
        model(u).sum().backward()
    assert len(model._graphs.captured) == 2
    twin = copy.deepcopy(model)
    assert not twin._graphs.captured and torch.allclose(twin(u), model(u), atol=1e-4)
    del twin
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() < before


def test_inference_mode_and_training_in_turn():
    cell, draw = CELLS["plain"]()
    model, reference = pair_of_models(cell)
    for _ in range(3):
        with torch.inference_mode():
            agree(model, reference, draw())
        same_gradients(model, reference, draw())
    assert "captured" in model.explain(draw())


def test_streams_do_not_share_buffers():
    cell, draw = CELLS["plain"]()
    model, reference = pair_of_models(cell)
    inputs = [draw() for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(3):
            values = []
            for stream, u in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    values.append(model(u))
    torch.cuda.synchronize()
    for value, u in zip(values, inputs, strict=True):
        torch.testing.assert_close(value, reference(u), rtol=2e-4, atol=2e-4)
