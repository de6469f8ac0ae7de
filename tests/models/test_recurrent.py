import copy
import pickle

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from wellposed import ErrorBound, Implicit, ImplicitRNN, Phantom, Relative, Status, Unrolled, load, save
from wellposed.equilibrium import SOLVERS, watch
from wellposed.errors import ConvergenceError, ConvergenceWarning, FileFormatError, InputError
from wellposed.models import Ensemble

TIGHT = {"stop": Relative(1e-14), "max_steps": 3000}
LAYOUTS = {
    "plain": {},
    "readout": {"out_features": 3, "bias": True},
    "readout with a bias": {"out_features": 3, "readout_bias": True},
    "stacked": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "out_features": 3, "bias": True},
    "time first": {"batch_first": False},
    "no feedthrough": {"feedthrough": False, "activation": "tanh"},
    "cold start": {"warm_start": False},
    "triangular": {"triangular": True},
    "monotone": {"condition": "monotone"},
}
LENGTHS = torch.tensor([3, 6, 1, 5, 6])


def build(layout="plain", **options):
    torch.manual_seed(3)
    rnn = ImplicitRNN(2, 4, 5, **{"batch_first": True, **{**LAYOUTS[layout], **TIGHT, **options}}).double()
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            if name.endswith(("raw", "D", "bias")):
                parameter.normal_(std=0.4)
    return rnn


def sequences(batch=5, length=6, batch_first=True):
    s = torch.randn(batch, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return s if batch_first else s.transpose(0, 1)


def oracle(rnn, s):
    """Runs one layer in one direction by its definition, cell by cell."""
    cell, outputs = rnn.cell(0), []
    h = s.new_zeros(s.shape[0], rnn.hidden_size)
    for t in range(s.shape[1]):
        h = cell(torch.cat([s[:, t], h], -1))
        outputs.append(h)
    return torch.stack(outputs, 1)


def test_equals_its_definition():
    rnn, s = build(), sequences()
    output, h_n = rnn(s)
    torch.testing.assert_close(output, oracle(rnn, s), rtol=1e-11, atol=1e-11)
    assert torch.equal(h_n[0], output[:, -1])


def test_stacked_bidirectional_is_made_of_single_ones():
    rnn, s = build("all"), sequences()
    data, last = s, []
    for layer in range(2):
        outputs = []
        for direction in range(2):
            cell = rnn.cell(2 * layer + direction)
            single = ImplicitRNN(data.shape[2], 4, 5, bias=True, batch_first=True, **TIGHT).double()
            single.cells[0] = cell
            out, h = single(data.flip(1) if direction else data)
            outputs.append(out.flip(1) if direction else out)
            last.append(h[0])
        data = torch.cat(outputs, -1)
    output, h_n = rnn(s)
    torch.testing.assert_close(output, rnn.readout(data))
    torch.testing.assert_close(h_n, torch.stack(last))


def test_same_shapes_as_torch_rnn():
    s = sequences()
    for first in (True, False):
        for layers in (1, 2):
            for both in (True, False):
                theirs = torch.nn.RNN(2, 4, layers, batch_first=first, bidirectional=both).double()
                mine = build(batch_first=first, num_layers=layers, bidirectional=both)
                for given in (s, s[0]):
                    for a, b in zip(mine(given), theirs(given), strict=True):
                        assert a.shape == b.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_padded_and_single_runs_agree(layout):
    rnn = build(layout)
    first = rnn.batch_first
    s = sequences(batch_first=first)
    h0 = torch.randn(len(rnn.cells), 5, 4, dtype=torch.float64)
    output, h_n = rnn(s, h0, lengths=LENGTHS)
    packed = pack_padded_sequence(s, LENGTHS, batch_first=first, enforce_sorted=False)
    packed_output, packed_h = rnn(packed, h0)
    assert torch.equal(pad_packed_sequence(packed_output, batch_first=first)[0], output)
    assert torch.equal(packed_h, h_n)
    for i, length in enumerate(LENGTHS):
        one = s[i, :length] if first else s[:length, i]
        alone, alone_h = rnn(one, h0[:, i])
        together = output[i] if first else output[:, i]
        torch.testing.assert_close(together[:length], alone, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(h_n[:, i], alone_h, rtol=1e-10, atol=1e-11)
        assert not together[length:].any()


def test_a_sequence_goes_on_from_its_last_state():
    rnn, s = build("stacked"), sequences()
    whole, last = rnn(s)
    start, h = rnn(s[:, :2])
    rest, h_n = rnn(s[:, 2:], h)
    torch.testing.assert_close(torch.cat([start, rest], 1), whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(h_n, last, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("solver", SOLVERS.factories)
@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(), Phantom(50)], ids=str)
def test_gradcheck(solver, gradient, fast_mode):
    rnn = build(solver=solver, gradient=gradient, kappa=0.5)
    names = [name for name, _ in rnn.named_parameters()]
    s, h0 = sequences(2, 2).requires_grad_(), torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(s, h0, *values):
        return torch.func.functional_call(rnn, dict(zip(names, values, strict=True)), (s, h0))

    assert torch.autograd.gradcheck(run, (s, h0, *rnn.parameters()), fast_mode=fast_mode)


@pytest.mark.parametrize("layout", ["all", "triangular", "monotone"])
def test_gradcheck_of_packed_sequences(layout):
    rnn = build(layout)
    s = sequences(3, 3).requires_grad_()

    def run(s):
        output, h_n = rnn(s, lengths=torch.tensor([2, 3, 1]))
        return output, h_n

    assert torch.autograd.gradcheck(run, (s,))


def test_warm_start_changes_steps_not_answers():
    s = torch.cumsum(0.01 * sequences(8, 30), 1) + 1  # slowly moving inputs
    options = {"stop": Relative(1e-8), "solver": "picard"}
    warm, cold = build(**options), build("cold start", **options)
    torch.testing.assert_close(warm(s)[0], cold(s)[0], rtol=1e-5, atol=1e-6)
    assert warm.equilibria(s).steps[:, 5:].sum() < cold.equilibria(s).steps[:, 5:].sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_time_step_reports(layout):
    rnn = build(layout)
    s = sequences(batch_first=rnn.batch_first)
    found = rnn.equilibria(s, lengths=LENGTHS)
    output, h_n = rnn(s, lengths=LENGTHS)
    count = rnn.num_layers * rnn.directions
    assert torch.equal(found.output, output) and torch.equal(found.h_n, h_n)
    assert found.status.shape == found.steps.shape == found.residual.shape == (5, 6, count)
    assert torch.equal(found.present.sum(1), LENGTHS)
    assert not found.failed.any() and (found.steps[found.present] > 0).all()
    assert not found.steps[~found.present].any()
    assert [state.shape for state in found.states] == [(5, 6, 5)] * count
    assert "0 failed" in str(found)


def test_states_are_equilibria():
    rnn, s = build(), sequences()
    found = rnn.equilibria(s)
    cell, x = rnn.cell(0), found.states[0]
    before = torch.cat([torch.zeros_like(found.output[:, :1]), found.output[:, :-1]], 1)
    u = torch.cat([s, before], -1)
    torch.testing.assert_close(x, torch.relu(x @ cell.A.mT + u @ cell.B.mT), rtol=1e-11, atol=1e-11)


def test_first_failure_is_reported_and_later_steps_keep_their_status():
    rnn, s = build(max_steps=3, stop=Relative(1e-12)), sequences()
    with pytest.warns(ConvergenceWarning, match="equilibrium at time step 0: 5 of 5 samples") as record:
        found = rnn.equilibria(s)
    assert len(record) == 1
    assert (found.status == Status.MAX_STEPS).all() and found.failed.all() and found.output.isfinite().all()
    with pytest.raises(ConvergenceError, match="at time step 0 of layer 0"):
        build(max_steps=3, num_layers=2, on_failure="raise")(s)
    quiet = build(max_steps=3, on_failure="ignore")
    assert quiet(s)[0].isfinite().all()


def test_hidden_state_that_overflows_is_a_status_not_a_nan():
    A, one = torch.zeros(1, 1), torch.ones(1, 1)
    rnn = ImplicitRNN.from_matrices(A, torch.tensor([[1.0, 1e20]]), one, on_failure="ignore", batch_first=True)
    found = rnn.equilibria(torch.ones(2, 4, 1))
    assert found.status[:, :2, 0].eq(Status.CONVERGED).all()
    assert found.status[:, 2:, 0].eq(Status.NONFINITE).all()
    assert found.output.isfinite().all()


def test_watch_sees_every_time_step():
    with watch() as log:
        build("stacked")(sequences())
    assert len(log.forward) == 3 * 6 and log.failed_share == 0


def test_from_matrices_counts():
    rnn = ImplicitRNN.from_matrices(torch.zeros(1, 1), torch.ones(1, 2), torch.ones(1, 1), batch_first=False)
    output, h_n = rnn(torch.ones(4, 2, 1))
    assert output[:, 0, 0].tolist() == [1, 2, 3, 4] and h_n.shape == (1, 2, 1)
    D = torch.tensor([[0.0, 1.0]])
    rnn = ImplicitRNN.from_matrices(
        torch.zeros(1, 1), torch.tensor([[1.0, 0.0]]), torch.ones(1, 1), D, batch_first=True
    )
    assert rnn(torch.ones(1, 4, 1))[0].flatten().tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="more columns than the hidden state"):
        ImplicitRNN.from_matrices(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), batch_first=True)


def test_positive_homogeneity_without_bias():
    rnn, s = build("stacked", out_features=2), sequences()
    torch.testing.assert_close(rnn(1e4 * s)[0], 1e4 * rnn(s)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_module_hygiene(layout, tmp_path):
    rnn = build(layout)
    s = sequences(batch_first=rnn.batch_first)
    y = rnn(s)[0]
    save(rnn, tmp_path / "rnn.safetensors")
    loaded = load(tmp_path / "rnn.safetensors")
    assert repr(loaded) == repr(rnn)
    fresh = ImplicitRNN(2, 4, 5, **{"batch_first": True, **LAYOUTS[layout]}, **TIGHT).double()
    fresh.load_state_dict(rnn.state_dict())
    ema = torch.optim.swa_utils.AveragedModel(rnn)
    ema.update_parameters(rnn)
    for twin in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), fresh, loaded, ema):
        assert torch.equal(twin(s)[0], y)


def test_from_matrices_survives_a_file(tmp_path):
    A = torch.diag(torch.tensor([-3.0, 0.5])) + torch.tensor([[0.0, 7.0], [0.0, 0.0]])
    rnn = ImplicitRNN.from_matrices(A, torch.ones(2, 3), torch.ones(2, 2), batch_first=True)
    save(rnn, tmp_path / "rnn.safetensors")
    loaded = load(tmp_path / "rnn.safetensors")
    assert torch.equal(loaded.cell(0).A, A)
    data = (tmp_path / "rnn.safetensors").read_bytes()
    (tmp_path / "rnn.safetensors").write_bytes(
        data.replace(b'\\"kind\\": \\"ImplicitRNN\\"', b'\\"kind\\": \\"ImplicitRMM\\"')
    )
    with pytest.raises((FileFormatError, ValueError), match="damaged"):
        load(tmp_path / "rnn.safetensors")


def test_compile_autocast_checkpoint_and_short_dtypes():
    rnn, s = build("all"), sequences()
    torch.testing.assert_close(torch.compile(rnn, backend="eager")(s)[0], rnn(s)[0])
    again = torch.utils.checkpoint.checkpoint(lambda s: rnn(s)[0], s, use_reentrant=False)
    again.sum().backward()
    first = [p.grad.clone() for p in rnn.parameters()]
    rnn.zero_grad()
    rnn(s)[0].sum().backward()
    for a, b in zip(first, (p.grad for p in rnn.parameters()), strict=True):
        torch.testing.assert_close(a, b)
    short, s32 = build("readout", stop=None).float(), s.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = short(s32)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), short(s32)[0], rtol=0.05, atol=0.05)
    half = build(stop=None).to(torch.bfloat16)
    assert half(s.to(torch.bfloat16))[0].dtype == torch.bfloat16


def test_ensemble_members_equal_models_alone():
    ensemble = Ensemble.of(
        lambda: ImplicitRNN(2, 4, 5, out_features=1, batch_first=True, **TIGHT).double(), seeds=[1, 2, 3]
    )
    s = sequences()
    output, h_n = ensemble(s, shared=True)
    output.sum().backward()
    for k in range(3):
        mine = ensemble.member(k)
        y, h = mine(s)
        torch.testing.assert_close(output[k], y)
        torch.testing.assert_close(h_n[k], h)
        y.sum().backward()
        grads = dict(ensemble.stacked.named_parameters())
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[name].grad[k], parameter.grad)


def test_stop_by_error_bound_and_empty_batch():
    rnn, s = build(stop=ErrorBound(1e-7)), sequences()
    torch.testing.assert_close(rnn(s)[0], build()(s)[0], rtol=1e-4, atol=1e-4)
    output, h_n = rnn(s[:0])
    assert output.shape == (0, 6, 4) and h_n.shape == (1, 0, 4)


def test_dropout_between_layers_only_in_training():
    rnn, s = build("stacked", dropout=0.5), sequences()
    assert not torch.equal(rnn(s)[0], rnn(s)[0])
    rnn.eval()
    assert torch.equal(rnn(s)[0], rnn(s)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, s: r(s[..., :1]), "input_size=2; received"),
        (lambda r, s: r(s[None]), "input must have the shape"),
        (lambda r, s: r([1, 2]), "received list"),
        (lambda r, s: r(s[:, :0]), "at least one element"),
        (lambda r, s: r(s.float()), "float32 and the model"),
        (lambda r, s: r(s * torch.nan), "input must be finite"),
        (lambda r, s: r(s, torch.zeros(1, 4, 4).double()), r"h0 must have the shape \(1, 5, 4\)"),
        (lambda r, s: r(s[0], torch.zeros(1, 1, 4).double()), r"h0 must have the shape \(1, 4\)"),
        (lambda r, s: r(s, torch.full((1, 5, 4), torch.inf).double()), "h0 must be finite"),
        (lambda r, s: r(s, lengths=torch.tensor([1, 2])), "5 integers"),
        (lambda r, s: r(s, lengths=torch.tensor([1, 2, 3, 4, 7])), "between 1 and the padded length 6"),
        (lambda r, s: r(s, lengths=torch.tensor([1, 2, 3, 4, 0])), "values from 0 to 4"),
        (lambda r, s: r(s[0], lengths=torch.tensor([1])), "a batch of sequences"),
        (lambda r, s: r(pack_padded_sequence(s, LENGTHS, True, False), lengths=LENGTHS), "knows its lengths"),
        (lambda r, s: r(pack_padded_sequence(s[..., :1], LENGTHS, True, False)), "packed data"),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(InputError, match=message):
        call(build(), sequences())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_layers": 0}, "num_layers"), ({"out_features": 0}, "out_features"), ({"dropout": 1.0}, "dropout")],
)
def test_bad_settings(options, message):
    with pytest.raises(InputError, match=message):
        ImplicitRNN(2, 4, 5, **{"batch_first": True, **options})


def test_unknown_keyword():
    with pytest.raises(TypeError, match="kapa"):
        ImplicitRNN(2, 4, 5, kapa=0.5, batch_first=True)


def test_time_comes_first_as_in_torch():
    rnn, ported = torch.nn.RNN(3, 5), ImplicitRNN(3, 5, 8)
    u = torch.randn(7, 2, 3)
    for mine, other in zip(ported(u), rnn(u), strict=True):
        assert mine.shape == other.shape
    twin = ImplicitRNN(3, 5, 8, batch_first=True)
    twin.load_state_dict(ported.state_dict())
    torch.testing.assert_close(twin(u.transpose(0, 1))[0].transpose(0, 1), ported(u)[0])
