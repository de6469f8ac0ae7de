"""Recorded states equal what hooks written by hand see."""

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed import DEQ, ImplicitModel
from wellposed.convex import States, record_states
from wellposed.convex.states import Recorder
from wellposed.errors import InputError


def by_hand(network: nn.Module, u: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activations and states of module activations, last first; in-place ones are seen before they act."""
    seen: list[tuple[Tensor, Tensor]] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append((inputs[0].clone(), torch.empty(0)))

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[-1] = (seen[-1][0], output.clone())

    layers = [part for part in network.modules() if isinstance(part, nn.ReLU | nn.Tanh)]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    with torch.no_grad():
        network(u)
    for hook in hooks:
        hook.remove()
    Z, X = (torch.cat([pair[k].flatten(1) for pair in reversed(seen)], dim=1) for k in (0, 1))
    return Z, X


class Residual(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.relu, self.head = nn.ReLU(inplace=inplace), nn.Linear(3 * 16, 4)

    def forward(self, u: Tensor) -> Tensor:
        h = self.relu(self.first(u))
        return self.head(self.relu(self.norm(self.second(h)) + h).flatten(1))


def mlp(inplace: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=inplace), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class Looped(nn.Module):
    """Whose path torch cannot trace, since it depends on the values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.act, self.kind = nn.Linear(5, 5), nn.ReLU(inplace=True), kind

    def forward(self, u: Tensor) -> Tensor:
        for _ in range(2 if bool(u.abs().sum() >= 0) else 3):
            z = self.layer(u)
            u = (
                self.act(z)
                if self.kind == "module"
                else F.relu(z, inplace=True)
                if self.kind == "F"
                else z.relu_()
            )
        return u


IMAGES, VECTORS = torch.randn(6, 2, 6, 6), torch.randn(6, 5)


@pytest.mark.parametrize(
    ("network", "u"),
    [
        (mlp(), VECTORS),
        (mlp(inplace=True), VECTORS),
        (Residual(inplace=False), IMAGES),
        (Residual(inplace=True), IMAGES),
        (Looped("module"), VECTORS),
    ],
    ids=["mlp", "mlp in place", "residual", "residual in place", "re-used"],
)
def test_states_equal_hooks_by_hand(network, u):
    states = record_states(network, [(u[:4], "label"), (u[4:], "label")])
    network.eval()
    Z, X = by_hand(network, u)
    assert torch.allclose(states.Z, Z, atol=1e-5) and torch.allclose(states.X, X, atol=1e-5)
    assert torch.equal(states.U, u.flatten(1))
    assert torch.allclose(states.Y, network(u), atol=1e-6)


@pytest.mark.parametrize("kind", ["F", "method"])
def test_functional_activations_and_methods_are_seen(kind):
    network = Looped(kind)
    states = record_states(network, [VECTORS])
    first = network.layer(VECTORS)
    second = network.layer(first.relu())
    assert states.form is None and states.blocks == (5, 5)
    assert torch.allclose(states.Z, torch.cat([second, first], 1), atol=1e-6)
    assert torch.allclose(states.X, states.Z.relu(), atol=1e-6)


def test_states_solve_the_equations_of_the_form():
    for network, u in ((mlp(), VECTORS), (Residual(inplace=True), IMAGES)):
        states = record_states(network, [u])
        form = states.form
        Z = (form.A @ states.X) + (form.B @ states.U) + form.bias
        assert torch.allclose(Z, states.Z, atol=1e-5)
        assert torch.allclose((form.C @ states.X) + (form.D @ states.U) + form.output_bias, states.Y, atol=1e-5)


def test_implicit_model_gives_its_equilibrium():
    model = ImplicitModel(5, 2, 8, bias=True).double()
    u = VECTORS.double()
    states = record_states(model, u.split(2))
    assert torch.allclose(states.X, states.Z.relu(), atol=1e-8)
    assert torch.allclose(states.Z, states.X @ model.A.mT + u @ model.B.mT + model.bias)
    assert torch.allclose(states.Y, model(u))
    same = record_states(model.form(), [u])
    assert torch.allclose(same.X, states.X, atol=1e-8)


def test_equilibrium_model_is_recorded_at_its_equilibrium():
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.input = nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor, u: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.state(x) + self.input(u))

    model = DEQ(Cell(), state_shape=(4,)).double()
    states = record_states(model, [VECTORS.double()])
    assert states.blocks == (4,)
    assert torch.allclose(states.X, model(VECTORS.double()), atol=1e-8)
    assert torch.allclose(states.X, states.Z.tanh())


def test_network_keeps_its_mode_and_is_recorded_in_evaluation():
    network = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.ReLU(), nn.Linear(40, 1)).train()
    states = record_states(network, [VECTORS])
    assert network.training and network[1].training
    assert torch.allclose(states.Z, network[0](VECTORS), atol=1e-6)


def test_large_states_go_to_mapped_files_that_live_as_long_as_they(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    network = mlp()
    small, large = (record_states(network, VECTORS.split(2), limit=limit) for limit in (1 << 20, 300))
    files = list(Path(tmp_path).rglob("*.bin"))
    assert sorted(path.stem for path in files) == ["U", "X", "Y", "Z"]
    for name in ("U", "X", "Y", "Z"):
        assert torch.equal(getattr(small, name), getattr(large, name))
    view = large.X[1:]
    del large
    gc.collect()
    assert view.isfinite().all() and (Path(files[0]).parent / "X.bin").exists()
    del view
    gc.collect()
    assert not list(Path(tmp_path).rglob("*.bin"))
    kept = record_states(network, VECTORS.split(2), limit=0, folder=tmp_path / "mine")
    del kept
    gc.collect()
    assert len(list((tmp_path / "mine").iterdir())) == 4


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda z: F.leaky_relu(z, 0.2), "leaky_relu(0.2)"),
        (lambda z: F.elu(z, alpha=0.5), "elu(0.5)"),
        (lambda z: F.gelu(z, approximate="tanh"), "gelu_tanh"),
        (lambda z: z.sigmoid(), "sigmoid"),
        (lambda z: torch.clamp(z, 0.0, 2.0), "hardtanh(0.0, 2.0)"),
        (lambda z: z.clamp_min(0), "relu"),
        (lambda z: F.hardtanh(z, -2.0, 3.0), "hardtanh(-2.0, 3.0)"),
        (lambda z: z.softmax(-1), "softmax(5)"),
        (lambda z: F.prelu(z, torch.tensor([0.3])), "leaky_relu(0.30000001192092896)"),
        (lambda z: F.softplus(z, 2.0), "softplus(2.0)"),
    ],
)
def test_recorder_knows_the_map_and_its_parameters(function, name):
    with Recorder() as recorder:
        result = function(VECTORS.clone())
    ((z, x, phi),) = recorder.entries
    assert phi.name == name
    assert torch.equal(z, VECTORS) and torch.equal(x, result)
    assert torch.allclose(phi(z), x, atol=1e-6)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="yields nothing"):
        record_states(mlp(), [])
    with pytest.raises(InputError, match="received"):
        record_states(mlp(), [("text", 1)])
    with pytest.raises(InputError, match="activation"):
        record_states(nn.Linear(5, 2), [VECTORS])
    with pytest.raises(InputError, match="hardshrink"):
        record_states(nn.Sequential(nn.Linear(5, 2), nn.Hardshrink()), [VECTORS])
    one = torch.ones(3, 2)
    with pytest.raises(InputError, match="blocks"):
        States(one, one, one, one, (1,), ())
    with pytest.raises(InputError, match="samples"):
        States(one, one[:2], one, one, (2,), ())
