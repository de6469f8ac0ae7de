"""The Triton kernel under noise: on a GPU, and by Triton's interpreter on the CPU (`test_noisy_kernel`)."""

import os

import pytest
import torch

from wellposed.activations import get_activation
from wellposed.equilibrium import MeanRelative, Picard, Relative, RobbinsMonro, Steps
from wellposed.kernels import noisy
from wellposed.kernels.counter import SIGNAL, normals, philox

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
gpu_random = pytest.importorskip("wellposed.kernels.gpu_random")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SEED = 1 << 62 | 123_456_789_012_345
draw = gpu_random.draw


@triton.jit
def write_words(Y, seed, step, site):
    """Writes the words of 16 samples and four counters of each."""
    samples, quads = tl.arange(0, 16), tl.arange(0, 4)
    first = quads[None, :] + samples[:, None] * 0
    words = tl.philox(seed, first, first * 0 + step, first * 0 + samples[:, None], first * 0 + site)
    for j in tl.static_range(4):
        tl.store(Y + samples[:, None] * 16 + quads[None, :] * 4 + j, words[j].to(tl.int64))


@triton.jit
def write_normals(Y, seed, step, site, LIKE: tl.constexpr):
    """Writes 16 normal numbers of 16 samples."""
    samples = tl.arange(0, 16)
    found = draw(seed, tl.arange(0, 4), step, samples, site, LIKE)
    tl.store(Y + samples[:, None] * 16 + tl.arange(0, 16)[None, :], found)


def test_words_are_those_of_the_reference():
    found = torch.empty(16, 16, dtype=torch.int64, device=DEVICE)
    write_words[(1,)](found, SEED, 7, SIGNAL)
    number, samples = torch.arange(4), torch.arange(16)[:, None]
    words = philox((number, torch.full((4,), 7), samples, torch.full((4,), SIGNAL)), SEED)
    assert torch.equal(found.cpu() & 0xFFFFFFFF, torch.stack(words, dim=-1).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_those_of_the_reference(dtype):
    found = torch.empty(16, 16, dtype=dtype, device=DEVICE)
    write_normals[(1,)](found, SEED, 7, SIGNAL, tl.float32 if dtype == torch.float32 else tl.float64)
    expected = normals(SEED, torch.arange(16), 7, SIGNAL, 16)
    assert float((found.cpu().double() - expected).abs().max()) < 16 * torch.finfo(dtype).eps


CASES = {
    "signal": (0.1, -1.0, False, False, Picard(), Steps(3), "tanh", torch.float64),
    "mean": (0.05, 0.05, False, False, Picard(), MeanRelative(0.3, 3), "relu", torch.float32),
    "damped": (-1.0, 0.1, True, False, RobbinsMonro(0.5, 0.6), MeanRelative(0.1, 2), "sigmoid", torch.float64),
    "held": (0.1, 0.1, False, True, Picard(0.7), Relative(0.1), "identity", torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_that_of_the_cpu(name):
    pytest.importorskip("numba")
    state, signal, additive, held, solver, stop, activation, dtype = CASES[name]
    n, batch = (6, 5) if INTERPRETED else (29, 300)
    generator = torch.Generator().manual_seed(0)
    A = (0.4 * torch.randn(n, n, generator=generator, dtype=torch.float64) / n**0.5).to(dtype)
    v = torch.randn(batch, n, generator=generator, dtype=torch.float64).to(dtype)
    noise = noisy.Strength(SEED, state, signal, additive, held)
    recipe = noisy.noisy_recipe(get_activation(activation), solver, stop, 6, noise, dtype)
    expected = noisy.run_noisy_kernel(A, v, torch.zeros_like(v), recipe)
    parts = (part.to(DEVICE) for part in (A, v, torch.zeros_like(v)))
    found = noisy.run_noisy_on_device(*parts, recipe)
    same = (found.steps.cpu() == expected.steps) & (found.status.cpu() == expected.status)
    assert int((~same).sum()) <= (0 if INTERPRETED else 3)
    gap = (found.value.cpu() - expected.value)[same].abs().max()
    assert float(gap) < (30 if INTERPRETED else 200) * torch.finfo(dtype).eps
    torch.testing.assert_close(found.residuals.cpu()[same], expected.residuals[same], equal_nan=True,
                               rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-5)  # fmt: skip
