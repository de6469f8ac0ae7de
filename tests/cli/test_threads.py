"""Small models are worked on in one thread, large ones in as many as torch has, unless the user says otherwise."""

import pytest
import torch
from torch import nn

from tests.cli.test_certify_command import folder, invoke  # noqa: F401
from wellposed import ImplicitModel
from wellposed.cli import attack, certify, sparsify
from wellposed.cli.inputs import widest_layer
from wellposed.workers import SMALL, THREAD_VARIABLES, one_thread, threads_for


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Torch with three threads, of which the user has said nothing."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "expected"), [(1, 1), (SMALL, 1), (SMALL + 1, 3)])
def test_width_decides(width, expected):
    with threads_for(width):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_the_user_decides(name, monkeypatch):
    monkeypatch.setenv(name, "3")
    with threads_for(1):
        assert torch.get_num_threads() == 3
    monkeypatch.setenv(name, "")
    with threads_for(1):
        assert torch.get_num_threads() == 1


def test_an_error_gives_the_threads_back():
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))
LOOP = ImplicitModel(6, 2, 30)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)), (6,), 20),
        (nn.Linear(6, 3), (6,), 6),
        (CONVOLUTION, (1, 8, 8), 256),
        (LOOP, (6,), 30),
        (LOOP.form(), (6,), 30),
        (nn.Sequential(LOOP, nn.Linear(2, 40)), (6,), 40),
        (nn.Sequential(nn.Linear(9, 6), LOOP), (9,), 30),
    ],
)
def test_width_of_a_model(model, shape, expected):
    for batch in (1, 5):
        assert widest_layer(model, torch.zeros(batch, *shape)) == expected
    assert not isinstance(model, nn.Module) or not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize(("small", "expected"), [(SMALL, 1), (0, 3)])
def test_commands_keep_to_the_rule(folder, monkeypatch, small, expected):  # noqa: F811
    seen = {}

    def noting(name, function):
        def noted(*arguments, **options):
            seen[name] = torch.get_num_threads()
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr("wellposed.workers.SMALL", small)
    monkeypatch.setattr(certify, "examine_radii", noting("certify", certify.examine_radii))
    monkeypatch.setitem(attack.ATTACKS, "fgsm", noting("attack", attack.ATTACKS["fgsm"]))
    monkeypatch.setattr(sparsify, "fit_states", noting("sparsify", sparsify.fit_states))
    asked = ("--model", "certify_networks:network", "--data", "data.npz", "--samples", 4, "--epsilon", 0.1)
    written = ("--network", "certify_networks:network", "--data", "data.npz", "-o", "model.safetensors")
    done = [
        invoke(*asked, "--no-widths", command="certify"),
        invoke(*asked, "--attack", "fgsm", command="attack"),
        invoke(*written, command="sparsify"),
    ]
    assert [result.exit_code for result in done] == [0, 0, 0], [result.output for result in done]
    assert seen == dict.fromkeys(("certify", "attack", "sparsify"), expected)
    assert torch.get_num_threads() == 3
