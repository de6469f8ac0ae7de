import math

import pytest
import torch
from comparison import Using, equal_form
from torch import nn
from wellposed_lab.networks.recurrent import LSTM, ReLURNN

from wellposed import ImplicitRNN
from wellposed.activations import get_activation
from wellposed.convert import UnsupportedError, to_implicit
from wellposed.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:The tensor attributes"),  # torch.export of recurrent layers
]

LAYERS = {
    "tanh": lambda *args, **options: nn.RNN(*args, nonlinearity="tanh", **options),
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "projected": lambda *args, **options: nn.LSTM(*args, proj_size=3, **options),
    "gru": nn.GRU,
}


def sequences(length, width, count=4, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    return scale * torch.randn(count, length, width, generator=generator, dtype=torch.float64).to(dtype)


def looping(form):
    """Blocks on or below the diagonal of A."""
    return [(i, j) for i, j in form.blocks[0].parts if j <= i]


@pytest.mark.covering
@pytest.mark.parametrize(("length", "bias"), [(1, True), (2, True), (2, False), (7, True)])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_equal_torch(kind, layers, bidirectional, length, bias):
    torch.manual_seed(0)
    u, options = sequences(length, 2), {"bidirectional": bidirectional, "bias": bias}
    form = equal_form(LAYERS[kind](2, 4, layers, batch_first=True, **options), u)
    assert not looping(form) and form.certificate().value == 0.0
    if length == 2:
        layer = LAYERS[kind](2, 4, layers, **options)
        equal_form(layer, u, lambda u: layer(u.transpose(0, 1))[0].transpose(0, 1))


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_in_float32(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 8, 2, bidirectional=True, batch_first=True, dropout=0.5)
    equal_form(layer, sequences(12, 3, dtype=torch.float32), tolerance=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_last_states_are_those_of_torch(kind):
    layer = LAYERS[kind](2, 4, 2, bidirectional=True)

    def last(network, x):  # time first inside, all final states side by side
        states = network.layer(x.transpose(0, 1))[1]
        parts = [states[0], states[1]] if isinstance(layer, nn.LSTM) else [states]
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)

    equal_form(Using(last, layer=layer), sequences(5, 2))
    equal_form(
        Using(lambda network, x: network.layer(x)[0][:, -1], layer=LAYERS[kind](2, 4, batch_first=True)),
        sequences(5, 2),
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_initial_states_that_are_constants_or_depend_on_the_input(kind):
    layer = LAYERS[kind](2, 4, 2, batch_first=True)
    hidden = 3 if kind == "projected" else 4
    torch.manual_seed(0)
    h, c = torch.randn(2, 1, hidden).double(), 3 * torch.randn(2, 1, 4).double()

    def constant(network, x):
        start = h.expand(2, len(x), hidden).contiguous(), c.expand(2, len(x), 4).contiguous()
        return network.layer(x, start if isinstance(layer, nn.LSTM) else start[0])[0]

    def dependent(network, x):
        flat = network.first(x[:, 0])
        start = flat[None, :, :hidden].expand(2, -1, -1), flat[None].expand(2, -1, -1) ** 3
        start = start[0].contiguous(), start[1].contiguous()
        return network.layer(x, start if isinstance(layer, nn.LSTM) else start[0])[0]

    u = sequences(3, 2)
    form = equal_form(Using(constant, layer=layer), u)
    constants = [a.lipschitz("1") for a in form.activations]
    assert max(constants) < math.inf
    form = equal_form(Using(dependent, layer=layer, first=nn.Linear(2, 4)), u)
    if isinstance(layer, nn.LSTM):
        assert max(a.lipschitz("1") for a in form.activations) == math.inf


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["tanh", "relu", "lstm", "gru"])
def test_cells_in_a_loop_of_ones_own(kind, bias):
    cell = {
        "tanh": lambda: nn.RNNCell(2, 4, bias),
        "relu": lambda: nn.RNNCell(2, 4, bias, nonlinearity="relu"),
        "lstm": lambda: nn.LSTMCell(2, 4, bias),
        "gru": lambda: nn.GRUCell(2, 4, bias),
    }[kind]()

    def run(network, x):
        state = None
        for t in range(4):
            state = network.cell(x[:, t], state)
        return state[0] if kind == "lstm" else state

    form = equal_form(Using(run, cell=cell), sequences(4, 2))
    assert not looping(form) and all("cell" in label for label in form.labels)


def test_several_sequences_of_one_sample():
    def rows(network, x):  # (B, 6, 2) -> three sequences of two steps
        return network.layer(x.reshape(-1, 2, 2))[0].reshape(-1, 3, 4)

    def columns(network, x):  # (B, 6, 2): two steps of three sequences, time first
        steps = x.reshape(-1, 2, 3, 2).transpose(0, 1).flatten(1, 2)
        output, last = network.layer(steps)
        outputs = output.reshape(2, -1, 12).transpose(0, 1).flatten(1)
        return torch.cat([outputs, last.reshape(-1, 12)], 1)

    for kind in ("lstm", "gru", "relu"):
        equal_form(
            Using(lambda n, x: rows(n, x).flatten(1), layer=LAYERS[kind](2, 2, batch_first=True)), sequences(6, 2)
        )
    equal_form(Using(columns, layer=nn.GRU(2, 4)), sequences(6, 2))


def test_a_layer_in_a_network_and_two_in_a_row():
    network = Using(
        lambda n, x: n.out(n.second(n.first(n.embed(x))[0])[0][:, -1]),
        embed=nn.Linear(2, 3),
        first=nn.LSTM(3, 4, batch_first=True, bidirectional=True),
        second=nn.GRU(8, 5, batch_first=True),
        out=nn.Linear(5, 2),
    )
    form = equal_form(network, sequences(6, 2))
    assert not looping(form)
    blocks = form.blocks[0].parts
    place = {label: index for index, label in enumerate(form.labels)}
    readers = {form.labels[i] for i, j in blocks if j == place["first step 2 output"]}
    assert readers == {
        "first step 3 gates",
        "first step 3 candidate",
        "second step 2 gates",
        "second step 2 candidate",
    }


def test_labels_name_layer_direction_and_time():
    form = to_implicit(nn.LSTM(2, 3, 2, bidirectional=True, batch_first=True), (2, 2))
    assert form.labels[-1] == "lstm layer 0 step 0 gates"
    assert "lstm layer 1 backwards step 1 tanh(cell)" in form.labels
    assert len(set(form.labels)) == len(form.labels) == 2 * 2 * 2 * 5
    assert to_implicit(nn.RNN(2, 3, batch_first=True), (2, 2)).labels == ("rnn step 1", "rnn step 0")


def test_products_of_gates_have_the_constants_of_bounded_factors():
    form = to_implicit(nn.LSTM(2, 3, batch_first=True), (4, 2))
    constants = {label: a.lipschitz("1") for label, a in zip(form.labels, form.activations, strict=True)}
    assert [constants[f"lstm step {t} cell"] for t in range(4)] == [1.0, 1.0, 2.0, 3.0]  # |c| grows by one a step
    assert all(constants[f"lstm step {t} output"] == 1.0 for t in range(4))
    form = to_implicit(nn.GRU(2, 3, batch_first=True), (4, 2))
    constants = {label: a.lipschitz("1") for label, a in zip(form.labels, form.activations, strict=True)}
    assert all(constants[f"gru step {t} update"] == pytest.approx(2, rel=0.01) for t in range(1, 4))
    assert all(constants[f"gru step {t} reset"] < 3 * 0.578 + 0.578 + 0.1 for t in range(1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_clipping_never_changes_a_recurrent_network(kind, dtype):
    """Weights so large that gates saturate and the cell state reaches its bound at every step."""
    layer = LAYERS[kind](2, 4, batch_first=True)
    u = torch.cat([sequences(9, 2, scale=s) for s in (1.0, 1e3)]).to(dtype)
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(50 * p.abs() * sign if p.dim() == 1 else 50 * p)
        form = equal_form(layer, u, tolerance=1e-10 if dtype == torch.float64 else 1e-5)
        free = [get_activation("multiply()") if a.name.startswith("multiply") else a for a in form.activations]
        assert torch.equal(form(u), form.replaced(activation=free)(u))


@pytest.mark.parametrize("kind", LAYERS)
def test_exported_layers(kind):
    layer = LAYERS[kind](2, 4, 2, bidirectional=True, batch_first=True).double().eval()
    network = Using(lambda n, x: n.layer(x)[0], layer=layer)
    u = sequences(3, 2, count=1)
    program = torch.export.export(network, (u,), strict=False)
    assert any("aten" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(to_implicit(program, (3, 2))(u), network(u).flatten(1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cell", [nn.RNNCell(2, 4), nn.LSTMCell(2, 4), nn.GRUCell(2, 4)])
def test_exported_cells(cell):
    def twice(network, x):
        state = network.cell(x[:, 1], network.cell(x[:, 0]))
        return state[0] if isinstance(state, tuple) else state

    network, u = Using(twice, cell=cell).double().eval(), sequences(2, 2, count=1)
    form = to_implicit(torch.export.export(network, (u,), strict=False), (2, 2))
    with torch.no_grad():
        torch.testing.assert_close(form(u), network(u), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("baseline", "shape"),
    [
        (LSTM(1, 5, 3), (6,)),
        (LSTM(2, 5, 3, output="sequence"), (6, 2)),
        (LSTM(1, 5, 1, normalise="first"), (6,)),
        (ReLURNN(1, 4, 3), (6,)),
        (ReLURNN(2, 4, 3, output="sequence", bias=True), (6, 2)),
    ],
)
def test_recurrent_baselines(baseline, shape):
    u = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not looping(equal_form(baseline, u))


def test_shapes_that_would_mix_samples_or_miss_time():
    with pytest.raises(InputError, match=r"input_shape \(T, features\)"):
        to_implicit(nn.LSTM(4, 3), (4,))
    network = Using(lambda n, x: n.layer(n.embed(x))[0], embed=nn.Linear(2, 2), layer=nn.LSTM(2, 3))
    with pytest.raises(InputError, match=r"transpose\(0, 1\)"):
        to_implicit(network, (5, 2))
    different = Using(lambda n, x: n.layer(x, torch.randn(1, 2, 3))[0], layer=nn.GRU(2, 3, batch_first=True))
    with pytest.raises(InputError, match="sample to sample"):
        to_implicit(different, (5, 2))


IMPLICIT = {
    "plain": {},
    "bias": {"bias": True, "out_features": 2},
    "no feedthrough": {"feedthrough": False},
    "low rank": {"rank": 2},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True, "out_features": 1},
    "time first": {"batch_first": False, "activation": "tanh"},
    "triangular": {"triangular": True},
    "mu": {"condition": "mu"},
}


@pytest.mark.parametrize("case", IMPLICIT)
def test_implicit_rnn_is_unrolled_with_one_loop_a_step(case):
    torch.manual_seed(0)
    options = IMPLICIT[case]
    rnn = ImplicitRNN(2, 3, 5, stop="relative", **{"batch_first": True, **options}).double()
    with torch.no_grad():
        for cell in rnn.cells:
            if cell.D is not None:
                cell.D.copy_(0.3 * torch.randn_like(cell.D))
    u = sequences(4, 2)
    timewise = None if rnn.batch_first else lambda u: rnn(u.transpose(0, 1))[0].transpose(0, 1)
    form = equal_form(rnn, u, timewise, tolerance=1e-5)
    certificate = form.certificate()
    assert certificate.holds
    count = 4 * len(rnn.cells)
    # no block feeds an earlier one, and every equilibrium feeds itself
    assert len(looping(form)) == count and all(i == j for i, j in looping(form))
    if case == "plain":
        assert form.labels[-1] == "rnn step 0" and "rnn step 3 hidden" in form.labels


def test_implicit_rnn_in_a_network():
    network = Using(
        lambda n, x: n.rnn(n.embed(x))[1][0], embed=nn.Linear(3, 2), rnn=ImplicitRNN(2, 3, 5, batch_first=True)
    )
    equal_form(network, sequences(4, 3), tolerance=1e-5)
    lengths = Using(lambda n, x: n.rnn(x, None, torch.tensor([2]))[0], rnn=ImplicitRNN(2, 3, 5, batch_first=True))
    with pytest.raises(UnsupportedError, match="lengths"):
        to_implicit(lengths, (4, 2))


def test_long_lstm_keeps_its_weights_once():
    layer = nn.LSTM(16, 32, batch_first=True)
    form = to_implicit(layer, (20, 16))
    kept = {t.data_ptr() for part in (form.A, form.B) for t in weights_of(part)}
    assert len(kept) == 4  # gates and candidates, of input and hidden state
    equal_form(layer, sequences(20, 16, dtype=torch.float32), tolerance=1e-5)


def weights_of(operator):
    if hasattr(operator, "matrix"):
        return [operator.matrix]
    parts = getattr(operator, "parts", {})
    inner = [*parts.values(), *getattr(operator, "factors", ()), *getattr(operator, "terms", ())]
    return [tensor for part in inner for tensor in weights_of(part)]
