import copy
import warnings

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from wellposed import Absolute, ErrorBound, Implicit, ImplicitRNN, Phantom, Relative, Status, Unrolled
from wellposed.activations import leaky_relu
from wellposed.equilibrium import watch
from wellposed.equilibrium.method import WarnOnce
from wellposed.errors import ConvergenceError, ConvergenceWarning
from wellposed.models.recurrent import _Pass

pytest.importorskip("numba")

TIGHT = {"stop": Relative(2e-13), "max_steps": 3000}
ACTIVATIONS = {"relu": "relu", "leaky": leaky_relu(0.2), "tanh": "tanh", "sigmoid": "sigmoid", "id": "identity"}
LAYOUTS = {
    "plain": {},
    "bias": {"bias": True},
    "no feedthrough": {"feedthrough": False},
    "cold start": {"warm_start": False},
    "stacked": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "triangular": {"triangular": True},
    "factorised": {"condition": "spectral"},
}


def build(states=5, hidden=4, dtype=torch.float64, **options):
    """Returns the same network twice: whole sequences in one call, and the plain loop."""
    torch.manual_seed(3)
    mine = ImplicitRNN(2, hidden, states, **{"batch_first": True, **options}).to(dtype)
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            if name.endswith(("raw", "D", "bias")):
                parameter.normal_(std=0.4)
    plain = copy.deepcopy(mine)
    for cell in plain.cells:
        cell.executor = "reference"
    return mine, plain


def sequences(batch=5, length=6, dtype=torch.float64):
    return torch.randn(batch, length, 2, dtype=dtype, generator=torch.Generator().manual_seed(4))


def gradients(rnn, s, h0=None, lengths=None):
    """Returns the gradients of a loss that looks at outputs, last hidden states and states."""
    s = s.clone().requires_grad_()
    h0 = None if h0 is None else h0.clone().requires_grad_()
    found = rnn.equilibria(s, h0, lengths)
    loss = found.output.sin().sum() + found.h_n.square().sum() + sum(x.cos().sum() for x in found.states)
    wanted = [s, *([] if h0 is None else [h0]), *rnn.parameters()]
    return torch.autograd.grad(loss, wanted)


def taken(rnn, s):
    """Tells whether sequences go through the kernel, by the nodes of the graph."""
    nodes, seen = [rnn(s)[0].grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    return any(node.name() == "_SequenceBackward" for node in seen)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("states", "batch"), [(1, 1), (17, 40), (30, 3)])
def test_agrees_with_the_plain_loop(activation, dtype, states, batch):
    rule = Relative(2e-4 if dtype == torch.float32 else None)  # far enough from rounding to compare steps
    mine, plain = build(states, 4, dtype, activation=ACTIVATIONS[activation], stop=rule)
    s = sequences(batch, 7, dtype)
    assert taken(mine, s)
    ours, theirs = mine.equilibria(s), plain.equilibria(s)
    assert torch.equal(ours.status, theirs.status)
    assert int((ours.steps - theirs.steps).abs().max()) <= 1
    same = (ours.steps == theirs.steps).all(1)[:, 0]  # a step more or less moves a state by the tolerance
    assert same.float().mean() > 0.8
    rounding = 10 * torch.finfo(dtype).eps
    size = theirs.states[0].abs().max()
    assert (ours.states[0] - theirs.states[0])[same].abs().max() <= rounding * max(size, 1) * (4 + states**0.5)
    tolerance = 1e-8 if dtype == torch.float64 else 2e-3
    for a, b in zip(gradients(mine, s), gradients(plain, s), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_residuals_are_those_of_the_last_points():
    mine, plain = build(dtype=torch.float32, stop=Relative(1e-3), on_failure="ignore")
    s = sequences(dtype=torch.float32).transpose(0, 1).flatten(0, 1)
    s[3, 0] = torch.nan
    residuals = []
    for rnn in (mine, plain):
        task = _Pass(rnn.cell(0), True, True, "", WarnOnce())
        task.run(s, [5] * 6, torch.zeros(5, 4), backwards=False)
        residuals.append(task.packed("residual"))
    assert residuals[0].isnan().nonzero()[:, 0].tolist() == list(range(3, 30, 5))
    torch.testing.assert_close(*residuals, rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("solver", ["anderson", "picard"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_lengths_and_first_hidden_states(layout, solver):
    mine, plain = build(**LAYOUTS[layout], **({} if layout == "triangular" else {**TIGHT, "solver": solver}))
    s, lengths = sequences(), torch.tensor([3, 6, 1, 5, 6])
    h0 = torch.randn(len(mine.cells), 5, 4, dtype=torch.float64)
    assert mine.explain(s).startswith("numba: whole sequences")
    ours, theirs = (rnn.equilibria(s, h0, lengths) for rnn in (mine, plain))
    for a, b in zip(
        (ours.output, ours.h_n, *ours.states), (theirs.output, theirs.h_n, *theirs.states), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert torch.equal(ours.status, theirs.status) and not ours.failed.any()
    assert int((ours.steps - theirs.steps).abs().max()) <= 1
    for a, b in zip(gradients(mine, s, h0, lengths), gradients(plain, s, h0, lengths), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    packed = pack_padded_sequence(s, lengths, batch_first=True, enforce_sorted=False)
    assert torch.equal(mine(packed, h0)[1], ours.h_n)


@pytest.mark.parametrize("backwards", [False, True])
def test_derivatives_of_first_and_second_order(backwards):
    rnn, _ = build(3, 2, bidirectional=backwards, bias=True, activation="tanh", **TIGHT)
    names = [name for name, _ in rnn.named_parameters()]
    s = sequences(3, 3).requires_grad_()
    h0 = torch.randn(len(rnn.cells), 3, 2, dtype=torch.float64, requires_grad=True)

    def run(s, h0, *values):
        found = dict(zip(names, values, strict=True))
        return torch.func.functional_call(rnn, found, (s, h0, torch.tensor([2, 3, 1])))

    assert torch.autograd.gradcheck(run, (s, h0, *rnn.parameters()))
    if not backwards:
        assert torch.autograd.gradgradcheck(run, (s, h0, *rnn.parameters()))


def test_second_derivatives_go_through_the_states():
    mine, plain = build(activation="tanh", bidirectional=True, **TIGHT)
    results = []
    for rnn in (mine, plain):
        s = sequences().requires_grad_()
        h0 = torch.full((2, 5, 4), 0.3, dtype=torch.float64, requires_grad=True)
        found = rnn.equilibria(s, h0, torch.tensor([3, 6, 1, 5, 6]))
        loss = found.states[1].square().sum() + found.h_n.sum()
        first = torch.autograd.grad(loss, [s, h0], create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), [s, h0, *rnn.parameters()]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("states", [6, 40])
def test_slow_adjoints(states):
    A = 0.999 * torch.ones(states, states, dtype=torch.float64) / states
    B, C = torch.rand(states, 3, dtype=torch.float64), torch.rand(1, states, dtype=torch.float64) * 1e-4
    rnn = ImplicitRNN.from_matrices(
        A, B, C, solver="picard", stop=Absolute(1e-9), max_steps=50_000, batch_first=True
    )
    s = torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True)
    with watch() as log:
        (found,) = torch.autograd.grad(rnn(s)[1].sum(), s)
    # All states are positive: the network is linear, h = C (I - A)^-1 B (s, h).
    gain = C @ torch.linalg.solve(torch.eye(states, dtype=torch.float64) - A, B)
    last = gain[:, :2].expand(3, 2)
    torch.testing.assert_close(found[:, 1], last, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[:, 0], gain[0, 2] * last, rtol=1e-5, atol=0)
    steps = max(int(steps.max()) for _, steps in log.adjoint)
    assert steps == 64 if states == 6 else steps > 1000  # small systems are factorised
    assert log.failed_share == 0 and len(log.forward) == len(log.adjoint) == 2


def test_nobody_depends_on_companions_or_threads():
    rnn, _ = build(70, 9)
    s = sequences(70, 16)
    output, before = rnn(s)[0], torch.get_num_threads()
    torch.testing.assert_close(rnn(s[40:41])[0], output[40:41], rtol=1e-12, atol=1e-12)
    try:
        torch.set_num_threads(3)
        threaded, several = rnn(s)[0], gradients(rnn, s)
        torch.set_num_threads(1)
        alone = gradients(rnn, s)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(threaded, output, rtol=1e-13, atol=1e-13)
    for a, b in zip(several, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_failures_are_reported_once_and_kept():
    mine, plain = build(max_steps=3, stop=Relative(1e-12))
    s = sequences()
    messages = []
    for rnn in (mine, plain):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = rnn.equilibria(s)
            found.output.sum().backward()
        messages.append([str(w.message) for w in caught if w.category is ConvergenceWarning])
        assert (found.status == Status.MAX_STEPS).all()
    assert messages[0] == messages[1] and len(messages[0]) == 1
    both, _ = build(max_steps=3, num_layers=2, bidirectional=True, on_failure="raise")
    both.cells[0].max_steps = 500
    with pytest.raises(ConvergenceError, match="equilibrium at time step 5 of layer 0 backwards"):
        both(s)


def test_adjoint_failures_say_at_which_time():
    options = {"gradient": Implicit(solver=None, max_steps=2), "stop": Absolute(1e-12), "max_steps": 900}
    mine, plain = build(30, **options)
    for rnn in (mine, plain):
        with pytest.warns(ConvergenceWarning, match="adjoint solve at time step 5: 5 of 5") as record:
            rnn(sequences())[0].sum().backward()
        assert len(record) == 1


def test_values_that_are_not_finite_are_statuses():
    one = torch.ones(1, 1)
    rnn = ImplicitRNN.from_matrices(
        torch.zeros(1, 1), torch.tensor([[1.0, 1e20]]), one, on_failure="ignore", batch_first=True
    )
    found = rnn.equilibria(torch.ones(2, 4, 1))
    assert found.status[..., 0].tolist() == [[1, 1, 6, 6]] * 2 and found.output.isfinite().all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"executor": "reference"}, 'executor="reference" was asked for'),
        ({"gradient": Phantom(3)}, "gradient Phantom has no kernel"),
        ({"gradient": Unrolled()}, "gradient Unrolled has no kernel"),
        ({"stop": ErrorBound(1e-7)}, "stopping rule ErrorBound has no kernel"),
        ({"solver": "newton"}, "solver Newton has no kernel"),
        ({"gradient": Implicit(solver=None, stop=Relative(norm="2"))}, "stopping rule Relative in the norm '2'"),
        ({"condition": "monotone"}, "operator splitting (condition 'monotone') has no kernel"),
        ({"activation": "gelu", "kappa": 0.5}, "activation gelu has no kernel"),
        ({"rank": 2}, "low-rank matrices have no kernel"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_everything_else_goes_time_by_time_and_says_why(options, reason):
    rnn, plain = build(**options)
    s = sequences()
    asked, text = "was asked for" in reason, rnn.explain(s)
    assert text.startswith("time by time") and (asked or f"not numba for whole sequences: {reason}" in text)
    assert not taken(rnn, s)
    torch.testing.assert_close(rnn(s)[0], plain(s)[0], rtol=1e-4, atol=1e-5)


def test_transforms_and_other_dtypes_go_time_by_time():
    rnn, plain = build(**TIGHT)
    s = sequences(2, 3)
    ours = torch.func.jacrev(lambda s: rnn(s)[0])(s)
    theirs = torch.autograd.functional.jacobian(lambda s: plain(s)[0], s)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    short, _ = build(dtype=torch.bfloat16)
    assert short.explain(s.bfloat16()).endswith("not numba for whole sequences: bfloat16 has no kernel")
    assert rnn(s[:0])[0].shape == (0, 3, 4)


def test_without_gradients_nothing_is_kept():
    rnn, _ = build()
    with torch.no_grad():
        output, h_n = rnn(sequences())
    assert (
        output.grad_fn is None and torch.equal(output, rnn(sequences())[0]) and torch.equal(h_n[0], output[:, -1])
    )


def test_explain_names_the_engine_and_those_before_it():
    rnn = ImplicitRNN(3, 4, 5, batch_first=True)
    assert rnn.explain(torch.zeros(2, 6, 3)).splitlines() == [
        "numba: whole sequences in one call, relu, float32, 5 states, Anderson",
        "not triton for whole sequences: device cpu has no kernel of triton",
    ]
