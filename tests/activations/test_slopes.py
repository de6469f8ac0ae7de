"""Slopes on boxes hold every Jacobian and difference quotient, by automatic differentiation of torch's maps."""

import pytest
import torch
import torch.nn.functional as F

from wellposed.activations import get_activation, matrix_product, max_pool, multiply, normalise, rescaled, softmax
from wellposed.activations.slopes import slope_range, why_no_slopes
from wellposed.errors import InputError

F64 = torch.float64
COMPONENTWISE = {
    "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu6": F.relu6, "gelu": F.gelu,
    "silu": F.silu, "softplus": F.softplus, "hardtanh": F.hardtanh, "softsign": F.softsign, "sin": torch.sin,
    "leaky_relu(0.1)": lambda z: F.leaky_relu(z, 0.1), "hardsigmoid": F.hardsigmoid, "elu": F.elu,
    "tanhshrink": F.tanhshrink, "logsigmoid": F.logsigmoid, "softshrink(0.5)": F.softshrink,
}  # fmt: skip
BLOCKS = {
    "softmax": (softmax(4), lambda z: z.softmax(-1)),
    "normalise": (normalise(4, 1e-3), lambda z: F.layer_norm(z, (4,), eps=1e-3)),
    "multiply": (multiply(), lambda z: torch.stack([z[0] * z[1], 0 * z[0]])),
    "clipped": (multiply(1.0, 0.5), lambda z: torch.stack([z[0].clamp(-1, 1) * z[1].clamp(-0.5, 0.5), 0 * z[0]])),
    "matrix_product": (
        matrix_product(2, 2, 1),
        lambda z: F.pad((z[:4].view(2, 2) @ z[4:].view(2, 1)).flatten(), (0, 4)),
    ),
}


def boxes(size, count=40):
    generator = torch.Generator().manual_seed(0)
    for k in range(count):
        scale = 10.0 ** (-4 + k % 5)
        yield (2 * torch.randn(1, size, generator=generator, dtype=F64),
               scale * torch.rand(1, size, generator=generator, dtype=F64), generator)  # fmt: skip


@pytest.mark.parametrize("name", COMPONENTWISE)
def test_slopes_and_quotients_lie_within(name):
    phi, function, narrow = get_activation(name), COMPONENTWISE[name], 0
    for center, radius, generator in boxes(6):
        slopes, secants = slope_range(phi, center, radius), slope_range(phi, center, radius, secants=True)
        assert bool((secants.radius <= slopes.radius + 1e-12).all())
        narrow += int((slopes.radius < 0.1).sum())
        a, b = (center + radius * (2 * torch.rand(40, 6, generator=generator, dtype=F64) - 1) for _ in range(2))
        far = (a - b).abs() > 1e-6
        quotient = (function(a) - function(b)) / torch.where(far, a - b, 1.0)
        assert bool(((quotient - slopes.middle).abs() <= slopes.radius + 1e-8)[far].all())
        far = (a - center).abs() > 1e-6
        quotient = (function(a) - function(center)) / torch.where(far, a - center, 1.0)
        assert bool(((quotient - secants.middle).abs() <= secants.radius + 1e-8)[far].all())
    assert narrow > 20 or name == "elu"  # of which only the slopes everywhere are known


@pytest.mark.parametrize("name", BLOCKS)
def test_jacobians_lie_within(name):
    phi, function = BLOCKS[name]
    for center, radius, generator in boxes(phi.block * 2):
        slopes = slope_range(phi, center, radius)
        for _ in range(10):
            share = 2 * torch.rand(1, center.shape[1], generator=generator, dtype=F64) - 1
            point = (center + radius * (share.sign() if share[0, 0] > 0 else share))[0]
            parts = [torch.func.jacrev(function)(part) for part in point.split(phi.block)]
            assert bool(((torch.block_diag(*parts) - slopes.middle[0]).abs() <= slopes.radius[0] + 1e-12).all())
        clipped = name == "clipped"  # may have any slope at a bound, however small the box
        assert clipped or bool((slope_range(phi, center, 1e-9 * radius).radius < 1e-5).all())


def test_what_is_not_known_is_refused():
    assert "max_pool(2)" in why_no_slopes(max_pool(2))
    with pytest.raises(InputError, match="Jacobians of 'max_pool"):
        slope_range(max_pool(2), torch.zeros(1, 2), torch.zeros(1, 2))
    assert not why_no_slopes(rescaled(get_activation("relu"), 1.0))
