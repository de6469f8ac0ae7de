import pytest
import torch
from deq_cells import Cell, Pair
from torch import nn
from torch.nn.utils import parametrizations

from wellposed import DEQ, ImplicitModel, ImplicitRNN, MultiscaleDEQ, Relative
from wellposed.errors import InputError
from wellposed.models import TransformerCell, VariationalDropout, fixed_steps

TIGHT = {"stop": Relative(1e-13), "max_steps": 2000}


class _Half(nn.Module):
    def forward(self, weight):
        return 0.3 * weight


def _spectral():
    deq = DEQ(Cell(VariationalDropout(0.5)), state_shape=4, **TIGHT)
    parametrizations.spectral_norm(deq.cell.state)
    nn.utils.parametrize.register_parametrization(deq.cell.state, "weight", _Half())
    parametrizations.weight_norm(deq.cell.input)
    return deq.eval()


MODELS = {
    "implicit": (lambda: ImplicitModel(3, 2, 6, bias=True, kappa=0.3, **TIGHT), (5, 3)),
    "low rank": (lambda: ImplicitModel(3, 2, 6, rank=2, kappa=0.3, feedthrough=False, **TIGHT), (5, 3)),
    "mu": (lambda: ImplicitModel(3, 2, 6, condition="mu", bias=True, kappa=0.3, **TIGHT), (5, 3)),
    "triangular": (lambda: ImplicitModel(3, 2, 6, triangular=True), (5, 3)),
    "recurrent": (lambda: ImplicitRNN(3, 4, 5, kappa=0.3, batch_first=True, **TIGHT), (2, 4, 3)),
    "recurrent, all": (
        lambda: ImplicitRNN(
            3, 4, 5, num_layers=2, bidirectional=True, out_features=2, kappa=0.3, batch_first=True, **TIGHT
        ),
        (2, 4, 3),
    ),
    "time first": (
        lambda: ImplicitRNN(3, 4, 5, batch_first=False, warm_start=False, kappa=0.3, **TIGHT),
        (4, 2, 3),
    ),
    "deq": (lambda: DEQ(Cell(scale=0.3), state_shape=4, **TIGHT), (5, 3)),
    "deq with norms": (_spectral, (5, 3)),
    "transformer": (lambda: DEQ(TransformerCell(8, 2, 16), **TIGHT), (2, 5, 8)),
    "multiscale": (
        lambda: MultiscaleDEQ(1, 3, channels=(4, 8), head_channels=(4, 8), final_channels=8, groups=2, **TIGHT),
        (3, 1, 8, 8),
    ),
    "nested": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(ImplicitModel(3, 2, 6, kappa=0.3, **TIGHT))),
        (5, 3),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "recurrent, all" else ()) for name in MODELS]
)
def test_exported_program_equals_the_model(name):
    build, shape = MODELS[name]
    model, u = build().double(), torch.randn(shape).double()
    if name == "multiscale":
        model(u)  # its batch norms must have seen data
    model.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    form = fixed_steps(model, 60 if name in ("transformer", "multiscale") else 30)
    program = torch.export.export(form, (u,))
    expected = model(u)
    pairs = (
        zip(expected, program.module()(u), strict=True)
        if isinstance(expected, tuple)
        else [(expected, program.module()(u))]
    )
    for mine, exported in pairs:
        torch.testing.assert_close(exported, mine, rtol=1e-8, atol=1e-8)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    model(u)  # still works after parametrisations were settled in the copy
    assert not any(p.requires_grad for p in form.parameters())


def test_exported_batch_size_may_vary():
    model = ImplicitModel(3, 2, 6, kappa=0.3, **TIGHT).double()
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        fixed_steps(model, 30), (torch.zeros(4, 3).double(),), dynamic_shapes=({0: batch},)
    )
    u = torch.randn(9, 3).double()
    torch.testing.assert_close(program.module()(u), model(u), rtol=1e-8, atol=1e-8)


def test_the_graph_is_plain():
    program = torch.export.export(fixed_steps(DEQ(Cell(), state_shape=4), 7), (torch.zeros(5, 3),))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("aten.tanh.default") == 7
    assert not [name for name in names if "where" in name or "amax" in name or "isfinite" in name]


def test_tuple_states():
    deq = DEQ(Pair().double(), **TIGHT)
    u = (torch.randn(5, 2, 3).double(), torch.randn(5).double())
    for mine, other in zip(fixed_steps(deq, 60)(u), deq(u), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


def test_models_themselves_can_be_exported_with_a_step_count():
    from wellposed import Steps

    deq, u = DEQ(Cell(), state_shape=4, stop=Steps(6), solver="picard").eval(), torch.randn(5, 3)
    with torch.no_grad():
        program = torch.export.export(deq, (u,))
        torch.testing.assert_close(program.module()(u), deq(u))


def test_bad_arguments():
    with pytest.raises(InputError, match="positive integer"):
        fixed_steps(ImplicitModel(3, 2, 6), 0)
    with pytest.raises(InputError, match="Linear contains no ImplicitModel"):
        fixed_steps(nn.Linear(2, 2), 5)
    with pytest.raises(InputError, match="operator splitting"):
        fixed_steps(ImplicitModel(3, 2, 6, condition="monotone"), 5)


@pytest.mark.parametrize("name", ["implicit", "mu", "recurrent", "deq"])
@pytest.mark.parametrize("tracer", [lambda m, u: torch.export.export(m, (u,)), torch.jit.trace])
def test_a_solve_is_not_written_down_as_a_program_in_silence(name, tracer):
    build, shape = MODELS.get(name, (lambda: DEQ(Cell(), state_shape=4), (5, 3)))
    with pytest.raises(
        InputError, match=r"depends on values; give it wellposed\.models\.fixed_steps\(model, steps\)"
    ):
        tracer(build(), torch.zeros(shape))
