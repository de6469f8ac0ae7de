"""How graphs are found: control flow, exported programs, hooks, rules of one's own and errors."""

import io

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, randomised
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from wellposed.convert import Signal, UnsupportedError, to_implicit
from wellposed.convert.signal import RULES
from wellposed.errors import InputError
from wellposed.forms.compose import series
from wellposed.models import ImplicitModel


def assert_same(form, network, *shape, tolerance=1e-5):
    u = torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = network.eval()(u).reshape(4, -1)
    torch.testing.assert_close(form(u), expected, rtol=tolerance, atol=tolerance)


class DataDependent(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Unrolled(nn.Module):
    """Its own code can be traced, that of its part cannot."""

    def __init__(self):
        super().__init__()
        self.part, self.implicit = Counting(), ImplicitModel(4, 3, 5)

    def forward(self, x):
        return self.implicit(self.part(x)) + 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(x.shape[-1] - 2):
            x = torch.tanh(self.linear(x))
        return x


class WithConstants(nn.Module):
    def forward(self, x):
        return x * torch.arange(1.0, 5.0) + torch.ones(4)


def test_control_flow_on_data_is_refused():
    network = nn.Sequential(nn.Linear(4, 4), DataDependent())
    with pytest.raises(
        UnsupportedError, match=r"DataDependent at '1' .*control flow may depend on data.*register"
    ):
        to_implicit(network, (4,))


def test_parts_that_cannot_be_traced_are_exported_alone():
    torch.manual_seed(0)
    network = Unrolled()
    form = to_implicit(network, (4,))
    assert_same(form, network, 4)
    assert form.labels == ("implicit", "part (2)", "part (1)")


def test_constants_of_the_code_do_not_stay_on_the_module():
    network = WithConstants()
    before = set(vars(network))
    assert_same(to_implicit(network, (4,)), network, 4)
    assert set(vars(network)) == before


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_exported_program_from_a_file(dynamic, batch):
    network = randomised(ARCHITECTURES["ResNet-8 of one channel"][0]()).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    if dynamic and batch == 1:
        pytest.skip("torch.export makes a batch of one a constant")
    program = torch.export.export(network, (torch.randn(batch, 1, 12, 12),), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    form = to_implicit(torch.export.load(file), (1, 12, 12))
    assert_same(form, network, 1, 12, 12)
    assert form.labels[0].startswith("blocks.2") and form.labels[-1].startswith("stem")


@pytest.mark.parametrize(
    "name", ["ShuffleNet", "MLP-Mixer", "squeeze and excitation", "time-distributed", "LeNet"]
)
def test_programs_exported_for_a_fixed_batch(name):
    build, shape = ARCHITECTURES[name]
    network = randomised(build()).eval()
    program = torch.export.export(network, (torch.randn(4, *shape),))
    form = to_implicit(program, shape)
    assert_same(form, network, *shape)
    assert form.partition == to_implicit(network, shape).partition


def test_program_of_another_shape_is_refused():
    program = torch.export.export(nn.Linear(4, 3), (torch.zeros(2, 4),))
    with pytest.raises(InputError, match=r"takes inputs \(2, 4\)"):
        to_implicit(program, (5,))


def test_program_in_training_mode_is_refused():
    program = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.Dropout()).train(), (torch.zeros(2, 4),))
    with pytest.raises(UnsupportedError, match=r"at '1': dropout.*after eval\(\)"):
        to_implicit(program, (4,))


def test_rules_of_ones_own():
    class Cube(nn.Module):
        def forward(self, x):
            return x.exp()

    network = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Cube()))
    with pytest.raises(UnsupportedError, match=r"the method exp at '1\.1' .*register_function\('exp'\)"):
        to_implicit(network, (3,))
    try:

        @to_implicit.register(Cube)
        def rule(module: Cube, signal: Signal) -> Signal:
            return signal.activate("tanh").scaled(3.0)

        form = to_implicit(network, (3,))
        assert form.labels == ("1.1", "1.0") and form.activations[0].name == "tanh"
    finally:
        del RULES.modules[Cube]


def test_rules_of_functions_of_ones_own():
    class Root(nn.Module):
        def forward(self, x):
            return torch.erf(x)

    with pytest.raises(UnsupportedError, match=r"erf has no implicit form yet.*register_function\(torch"):
        to_implicit(Root(), (3,))
    try:
        to_implicit.register_function(torch.erf, torch.ops.aten.erf)(lambda signal: signal.activate("tanh"))
        assert to_implicit(Root(), (3,)).activations[0].name == "tanh"
    finally:
        del RULES.functions[torch.erf], RULES.functions[torch.ops.aten.erf]


def test_subclasses_have_the_rule_of_their_base():
    class Own(nn.Linear):
        pass

    network = Own(3, 2)
    assert_same(to_implicit(network, (3,)), network, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("change", [weight_norm, spectral_norm])
def test_weights_that_hooks_compute_are_those_of_now(change):
    layer = change(nn.Linear(4, 3))
    network = nn.Sequential(layer, nn.ReLU()).eval()
    network(torch.zeros(1, 4))
    with torch.no_grad():
        next(p for name, p in layer.named_parameters() if "_" in name).mul_(3.0)
        layer.bias.add_(1)
    assert_same(to_implicit(network, (4,)), network, 4)


def test_pruned_weights_stay_pruned():
    network = nn.Sequential(prune.l1_unstructured(nn.Linear(4, 3), "weight", amount=0.5), nn.ReLU())
    form = to_implicit(network, (4,))
    assert_same(form, network, 4)
    assert form.B.nonzeros() == 6


def test_hooks_that_change_outputs_are_followed():
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    network[0].register_forward_hook(lambda module, args, output: 2 * output)
    network[1].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    assert_same(to_implicit(network, (4,)), network, 4)
    alone = nn.Linear(4, 3)
    alone.register_forward_hook(lambda module, args, output: 2 * output)
    assert_same(to_implicit(alone, (4,)), alone, 4)


def test_in_place_changes_that_matter():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            z = self.linear(x)
            return z + self.relu(z.view(-1, 2, 2)).flatten(1)  # z has changed by then

    network = Residual()
    assert_same(to_implicit(network, (4,)), network, 4)


def test_tuples_give_their_first_entry_and_other_outputs_are_refused():
    class Several(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, x):
            return self.output(x)

    u = torch.randn(2, 3)
    assert torch.equal(to_implicit(Several(lambda x: (x + 1, x)), (3,))(u), u + 1)
    with pytest.raises(UnsupportedError, match="must return a tensor"):
        to_implicit(Several(lambda x: {"y": x}), (3,))
    constant = to_implicit(Several(lambda x: torch.arange(4.0)[None]), (3,))
    assert torch.equal(constant(u), torch.arange(4.0).expand(2, 4))


def test_network_without_states():
    form = to_implicit(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)), (3,))
    assert form.sizes == (0, 3, 4)
    assert form(torch.zeros(2, 3)).shape == (2, 4)


def test_mixed_types_and_wrong_arguments_are_refused():
    with pytest.raises(InputError, match=r"mixes torch.float32, torch.float64"):
        to_implicit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), (2,))
    with pytest.raises(InputError, match="takes a module or exported program"):
        to_implicit(torch.relu, (2,))
    with pytest.raises(UnsupportedError, match="no implicit form"):
        to_implicit(torch.jit.script(nn.Linear(2, 2)), (2,))


def test_labels_are_paths():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.tanh(F.relu(self.linear(x)))

    network = nn.Sequential(Block(), nn.Sequential(Block(), nn.Sigmoid()))
    assert to_implicit(network, (3,)).labels == ("1.1", "1.0 (2)", "1.0 (1)", "0 (2)", "0 (1)")


@pytest.mark.parametrize(
    "pair", [("autoencoder", "U-Net"), ("feed-forward twin", "SIREN"), ("LeNet", "MLP of 13 layers")]
)
def test_conversion_of_a_composition_is_the_series_of_conversions(pair):
    (f, shape), (g, then) = (ARCHITECTURES[name] for name in pair)
    torch.manual_seed(0)
    first, second = randomised(f()).double().eval(), randomised(g()).double().eval()
    size = torch.Size(then).numel()
    between = nn.Sequential(nn.Flatten(), nn.Linear(first(torch.zeros(1, *shape).double()).numel(), size))
    between = nn.Sequential(*between, nn.Tanh(), nn.Unflatten(1, then)).double()
    u = torch.randn(3, *shape, dtype=torch.float64)
    whole = to_implicit(nn.Sequential(first, between, second), shape)
    f, g = to_implicit(nn.Sequential(first, between), shape), to_implicit(second, then)
    parts = series(f, g)
    assert whole.partition == parts.partition
    torch.testing.assert_close(whole(u), parts(u), rtol=1e-12, atol=1e-12)
    for key in set(whole.A.parts) | set(parts.A.parts):
        a, b = whole.A.part(*key), parts.A.part(*key)
        x = torch.randn(1, a.shape[1], dtype=torch.float64)
        torch.testing.assert_close(a @ x, b @ x, rtol=1e-10, atol=1e-10)
