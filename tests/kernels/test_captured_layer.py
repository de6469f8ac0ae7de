"""Passes of models captured as CUDA graphs once a batch size returns: the same numbers, leases and reports."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wellposed import Absolute, ImplicitModel
from wellposed.equilibrium.affine import AffineSpec
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError
from wellposed.kernels import layer

pytest.importorskip("triton")


def on_device(test):
    """Marks a test that needs a CUDA device."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(absent(test))


CALLS = layer.EAGER + layer.LAYERS + 2


class Buffers:
    """Stands in for a captured layer where there is no device."""

    made = 0

    def __init__(self, how, tensors, needs):
        type(self).made += 1
        self.lease = lambda: None


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(layer, "CapturedLayer", Buffers)
    monkeypatch.setattr(Buffers, "made", 0)
    return layer._Captures()


def test_layers_are_leased_to_one_node_at_a_time(captures):
    new = [captures.lease("kind", (), (), ()) for _ in range(layer.EAGER)]
    assert new == [None] * layer.EAGER
    leases = [captures.lease("kind", (), (), ()) for _ in range(layer.LAYERS)]
    assert len({id(lease.layer) for lease in leases}) == layer.LAYERS == Buffers.made
    assert captures.lease("kind", (), (), ()) is None
    freed = leases.pop(1).layer
    assert captures.lease("kind", (), (), ()).layer is freed and Buffers.made == layer.LAYERS


def test_the_kinds_used_last_keep_their_graphs(captures):
    for kind in range(layer.KINDS + 1):
        for _ in range(CALLS):
            captures.lease(kind, (), (), ())
    assert list(captures.layers) == list(range(1, layer.KINDS + 1))
    assert captures.lease(0, (), (), ()) is None  # is counted from the beginning
    for kind in range(1000):
        captures.lease(("once", kind), (), (), ())
    assert len(captures.counts) <= 16 * layer.KINDS


def test_a_capture_that_failed_is_not_tried_at_every_call(captures, monkeypatch):
    tried = []

    def fails(*_):
        tried.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(layer, "CapturedLayer", fails)
    assert {captures.lease("kind", (), (), ()) for _ in range(100)} == {None} and tried == [1]


def test_a_failed_sample_is_told_by_a_capture_too(captures, monkeypatch):
    def fails(*_):
        raise ConvergenceError("one sample has failed")

    monkeypatch.setattr(layer, "CapturedLayer", fails)
    assert {captures.lease("kind", (), (), ()) for _ in range(layer.EAGER)} == {None}
    with pytest.raises(ConvergenceError):
        captures.lease("kind", (), (), ())
    assert captures.counts["kind"] > 0  # the next batch may be captured


def test_copies_have_no_graphs(captures):
    captures.lease("kind", (), (), ())
    assert not copy.deepcopy(captures).counts


def model(dtype=torch.float32, states=20, **options):
    torch.manual_seed(3)
    made = ImplicitModel(5, 4, states, **{"kappa": 0.9, "bias": True, "stop": Absolute(1e-6)} | options)
    with torch.no_grad():
        made.state.raw.abs_().mul_(3)
    return made.to("cuda", dtype)


def batches(count=CALLS, dtype=torch.float32):
    return torch.randn(count, 70, 5, generator=torch.Generator().manual_seed(2)).to("cuda", dtype)


def captured(made):
    return [one for layers in made.spec().prepared["captures"].layers.values() for one in layers]


@pytest.fixture
def eager(monkeypatch):
    """Computes a call without graphs."""

    def compute(run):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_lease", lambda *_: None)
            return run()

    return compute


def step(made, u):
    """Outputs and the gradients of inputs and parameters."""
    u = u.detach().clone().requires_grad_()
    y = made(u)
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, 4).to(y)).sum(), [u, *made.parameters()])
    return [y.detach(), *gradients]


@on_device
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"on_failure": "ignore", "states": 128, "activation": "tanh"}),
        (torch.float32, {"bias": False, "feedthrough": False, "states": 3}),
        (torch.float64, {"states": 32, "stop": Absolute(1e-12)}),
    ],
    ids=["plain", "ignore", "bare", "float64"],
)
def test_replays_give_the_numbers_of_single_launches(dtype, options, eager):
    made, spec = model(dtype, **options), None
    for index, u in enumerate(batches(dtype=dtype)):
        answers = step(made, u)
        for mine, plain in zip(answers, eager(lambda: step(made, u)), strict=True):  # noqa: B023
            assert torch.equal(mine, plain), index
        with torch.no_grad():  # in place, as optimisers do
            for parameter in made.parameters():
                parameter.mul_(0.9)
        spec = made.spec() if spec is None else spec
        assert made.spec() is spec
    assert len(captured(made)) == 1


@on_device
def test_nodes_that_live_at_once_have_buffers_of_their_own(eager):
    made, inputs = model(), batches(layer.LAYERS + 2)
    for _ in range(layer.EAGER):
        step(made, inputs[0])
    outputs = [made(u) for u in inputs]  # the last ones find no free buffers
    assert len(captured(made)) == layer.LAYERS
    weight = torch.linspace(-1, 1, 4, device="cuda")
    for y, u in zip(outputs, inputs, strict=True):
        expected = eager(lambda: step(made, u))  # noqa: B023
        assert torch.equal(y, expected[0])
        for _ in range(2):  # the graph is retained
            gradients = torch.autograd.grad((y * weight).sum(), list(made.parameters()), retain_graph=True)
            assert all(map(torch.equal, gradients, expected[2:]))


@on_device
def test_training_is_the_same():
    losses = []
    for size in (layer.SMALL, 0):  # with and without graphs
        made, target = model(), torch.ones(70, 4, device="cuda")
        optimiser = torch.optim.Adam(made.parameters(), lr=1e-2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "SMALL", size)
            for u in batches(20):
                optimiser.zero_grad()
                loss = (made(u) - target).square().mean()
                loss.backward()
                optimiser.step()
            losses.append(float(loss))
    assert losses[0] == losses[1]


@on_device
def test_failures_are_told_by_replays_too():
    made, inputs = model(), batches()
    for u in inputs:
        step(made, u)
    assert captured(made)
    bad = inputs[0].clone()
    bad[3, 1] = torch.nan
    with pytest.raises(InputError, match="u"):
        made(bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(made, inputs[0])
    for policy, told in (("warn", pytest.warns(ConvergenceWarning)), ("raise", pytest.raises(ConvergenceError))):
        hard = model(on_failure=policy, max_steps=12, kappa=0.99)
        easy = torch.zeros_like(inputs[0])
        for _ in range(CALLS):
            step(hard, easy)
        assert captured(hard)
        with told:
            hard(inputs[0] * 1e6)
        step(hard, easy)


@on_device
def test_gradients_belong_to_the_caller():
    made, inputs = model(), batches()
    for u in inputs:
        step(made, u)
    first, second = step(made, inputs[0]), step(made, inputs[1])
    kept = [one.clone() for one in first]
    step(made, inputs[2])
    assert all(map(torch.equal, first, kept))
    assert len({one.untyped_storage().data_ptr() for one in (*first, *second)}) == len(first) + len(second)


@on_device
def test_threads_with_one_model():
    made, inputs = model(), batches(40)
    expected = [step(made, u) for u in inputs]
    with ThreadPoolExecutor(4) as pool:
        for mine, plain in zip(pool.map(lambda u: step(made, u), inputs), expected, strict=True):
            assert all(map(torch.equal, mine, plain))


def test_the_cpu_has_no_leases():
    how = None, AffineSpec.__new__(AffineSpec), None
    assert layer._lease(how, (torch.zeros(2, 2), None, torch.zeros(2, 2)), (True,)) is None
