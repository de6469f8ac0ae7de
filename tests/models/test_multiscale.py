import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from wellposed import Anderson, Relative, Unrolled
from wellposed.errors import InputError
from wellposed.models.cells import MultiscaleCell
from wellposed.models.deq import DEQ
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.norms import jacobian_penalty

SMALL = {"channels": (8, 16), "head_channels": (8, 12), "final_channels": 20, "groups": 4}
TIGHT = {"solver": "anderson", "stop": Relative(1e-11), "max_steps": 300}


def small(**options):
    return MultiscaleDEQ(2, 5, **{**SMALL, **options})


def images(batch, size=9, seed=1, dtype=torch.float64):
    return torch.rand(batch, 2, size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def settled(model, size=9):
    """Puts a model in evaluation mode after its batch norms have seen some images."""
    with torch.no_grad():
        for _ in range(30):
            model.train().stem(images(16, size, dtype=next(model.parameters()).dtype))
    return model.eval()


def test_sizes_of_the_paper():
    model = MultiscaleDEQ(3, 10)
    assert sum(p.numel() for p in model.parameters()) == 1_860_874
    shapes = model.deq.cell.state_shape(model.stem(torch.rand(2, 3, 32, 32)))
    assert shapes == ((32, 32, 32), (64, 16, 16), (128, 8, 8), (128, 4, 4))
    momenta = {layer.momentum for layer in model.modules() if isinstance(layer, _BatchNorm)}
    assert momenta == {0.1} and model.classifier.in_features == 400
    assert not any(isinstance(layer, _BatchNorm) for layer in model.deq.modules())
    assert model.deq.max_steps == 40 and model.deq.stop == Relative(1e-4, norm="2")


def test_weight_norm_is_in_the_cell_only():
    for wanted in (True, False):
        model = small(weight_norm=wanted)
        layers = [layer for layer in model.deq.modules() if isinstance(layer, nn.Conv2d)]
        assert all(parametrize.is_parametrized(layer, "weight") == wanted for layer in layers)
        assert not any(parametrize.is_parametrized(layer) for layer in model.head.modules())


@pytest.mark.parametrize(
    ("size", "channels", "expected"),
    [
        ((8, 8), (8, 8, 8), [(8, 8), (4, 4), (2, 2)]),
        ((28, 28), (8, 8, 8, 8), [(28, 28), (14, 14), (7, 7), (4, 4)]),
        ((11, 7), (8, 8, 8), [(11, 7), (6, 4), (3, 2)]),
        ((5, 5), (8,), [(5, 5)]),
    ],
)
def test_states_of_odd_and_even_images(size, channels, expected):
    model = MultiscaleDEQ(1, 3, channels=channels, head_channels=channels, final_channels=6, groups=2)
    solution = model.equilibrium(torch.rand(2, 1, *size))
    assert [tuple(x.shape) for x in solution.value] == [(2, 8, *part) for part in expected]
    assert solution.converged.all()
    assert model(torch.rand(2, 1, *size)).shape == (2, 3) and model.features(torch.rand(2, 1, *size)).shape == (
        2,
        6,
    )


def test_stem_can_halve_the_images():
    model = small(stem_downsample=2)
    assert [tuple(x.shape[2:]) for x in model.equilibrium(images(2, 18).float()).value] == [(5, 5), (3, 3)]


def test_step_is_the_formula():
    cell = MultiscaleCell((4, 6), groups=2).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, u = (torch.randn(2, 4, 5, 5).double(), torch.randn(2, 6, 3, 3).double()), torch.randn(2, 4, 5, 5).double()
    fine, coarse = (block(part, v) for block, part, v in zip(cell.blocks, x, (u, None), strict=True))
    to_fine, to_coarse = cell.fusions
    up = to_fine.up[0][1](F.conv2d(coarse, to_fine.up[0][0].weight))
    rows = torch.tensor([0, 0, 1, 1, 2])  # of the coarse grid, for every row of the fine one
    expected_fine = F.conv2d((fine + up[:, :, rows][..., rows]).clamp_min(0), to_fine.mix.weight)
    down = F.conv2d(fine, to_coarse.down[0][0].weight, padding=1)[:, :, ::2, ::2]
    expected_coarse = F.conv2d((coarse + to_coarse.down[0][1](down)).clamp_min(0), to_coarse.mix.weight)
    found = cell(x, u)
    torch.testing.assert_close(found[0], to_fine.norm(expected_fine))
    torch.testing.assert_close(found[1], to_coarse.norm(expected_coarse))


def test_every_scale_hears_every_scale_and_the_finest_the_input():
    cell, u = MultiscaleCell((8, 8, 8), groups=2), torch.randn(1, 8, 8, 8)
    x = tuple(torch.randn(1, *shape) for shape in cell.state_shape(u))
    base = cell(x, u)
    for source in range(3):
        moved = cell(
            tuple(part + (1.0 * torch.randn_like(part) if i == source else 0) for i, part in enumerate(x)), u
        )
        assert all(not torch.allclose(old, new, atol=1e-3) for old, new in zip(base, moved, strict=True))
    assert not torch.allclose(base[0], cell(x, u + torch.randn_like(u))[0], atol=1e-3)
    blocks = []
    for block in cell.blocks:
        block.register_forward_pre_hook(lambda module, arguments: blocks.append(arguments[1]))
    cell(x, u)
    assert blocks[0] is u and blocks[1] is None and blocks[2] is None


def test_head_uses_all_scales():
    model = settled(small().double())
    state = tuple(part.clone() for part in model.equilibrium(images(1)).value)
    base = model.head(state)
    for scale in range(2):
        moved = tuple(part + (1.0 if i == scale else 0.0) for i, part in enumerate(state))
        assert not torch.allclose(model.head(moved), base, atol=1e-4)


def test_logits_are_those_of_the_parts():
    model, u = settled(small().double()), images(3)
    x = model.equilibrium(u).value
    torch.testing.assert_close(model(u), model.classifier(model.head(x)))
    torch.testing.assert_close(model.features(u), model.head(x))


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_untrained_model_converges_to_the_same_point(solver):
    for seed in range(3):
        torch.manual_seed(seed)
        model, u = small(stop=Relative(1e-6), max_steps=60).double(), images(6)
        model.deq.solver = solver
        found = model.equilibrium(u)
        assert found.converged.all()
        again = model.deq.cell(found.value, model.stem(u))
        for part, image in zip(found.value, again, strict=True):
            torch.testing.assert_close(part, image, rtol=0, atol=1e-5)


def test_sample_does_not_depend_on_its_batch():
    model, u = settled(small(**TIGHT).double()), images(6)
    together = model(u)
    torch.testing.assert_close(torch.cat([model(sample[None]) for sample in u]), together, rtol=1e-8, atol=1e-8)


def test_implicit_gradient_is_that_of_unrolling():
    model, u = small(**TIGHT).double(), images(3)
    other = copy.deepcopy(model)
    other.deq.gradient = Unrolled()
    for each in (model, other):
        each(u).square().mean().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-8, msg=name)
    assert all(p.grad.ne(0).any() for p in model.deq.parameters())


def test_warm_start_from_a_near_state_saves_steps():
    model, u = settled(small(solver="picard", max_steps=200, stop=Relative(1e-8)).double()), images(3)
    cold = model.equilibrium(u)
    warm = model.equilibrium(u + 1e-4, tuple(part.detach() for part in cold.value))
    assert warm.converged.all() and warm.steps.max() < cold.steps.min()


def test_jacobian_penalty_joins_the_loss():
    model, u = small(), images(4, dtype=torch.float32)
    injection = model.stem(u)
    solution = model.deq.equilibrium(injection)
    logits = model.classifier(model.head(solution.value))
    loss = (
        F.cross_entropy(logits, torch.arange(4))
        + 0.4 * jacobian_penalty(model.deq.cell, solution.value, injection).mean()
    )
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_training_lowers_the_loss():
    model, u = small(), images(16, size=6, dtype=torch.float32)
    labels = (u[:, 0].mean((1, 2)) > u[:, 1].mean((1, 2))).long()
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(25):
        loss = F.cross_entropy(model(u), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_dropout_is_held_over_a_solve():
    model, u = small(dropout=0.3, **TIGHT).double(), images(8)
    model.stem.eval()
    found = model.equilibrium(u)
    assert found.converged.all()
    assert not torch.allclose(found.value[0], model.equilibrium(u).value[0], atol=1e-3)
    model.eval()
    torch.testing.assert_close(model.equilibrium(u).value, model.equilibrium(u).value)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: small(channels=(8, 8, 8, 8, 8)), "1 to 4 scales"),
        (lambda: small(channels=()), "1 to 4 scales"),
        (lambda: small(head_channels=(8,)), "belong together"),
        (lambda: small(channels=(8, 0)), "positive integer"),
        (lambda: small(channels=(8, 10)), "groups must divide"),
        (lambda: small(kernel_size=2), "odd"),
        (lambda: small(stem_downsample=-1), "stem_downsample"),
        (lambda: MultiscaleDEQ(2, 0), "classes"),
        (lambda: small()(torch.zeros(2, 3, 8, 8)), r"images must have the shape \(batch, 2, height, width\)"),
        (lambda: small()(torch.zeros(2, 2, 1, 8)), "at least 2 x 2 pixels"),
        (lambda: small(channels=(4, 4))(torch.zeros(2, 2, 2, 2)), "single number"),
        (lambda: small().equilibrium(torch.rand(2, 2, 8, 8), (torch.zeros(2, 8, 8, 8),)), "x0 must be a tuple"),
        (
            lambda: DEQ(MultiscaleCell((8, 8))).equilibrium(torch.rand(2, 8, 8, 8), (torch.zeros(2, 8, 8, 8),)),
            "2 scales",
        ),
    ],
)
def test_misuse_is_named(action, message):
    with pytest.raises(InputError, match=message):
        action()


def test_solver_options_are_checked_at_once():
    with pytest.raises(ValueError, match="broyden"):
        small(solver="broydn")
    assert small(solver=Anderson(memory=3)).deq.solver == Anderson(memory=3)
