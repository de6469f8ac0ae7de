"""Noise in the compiled loop: like the plain loop in every sample, and like torch's draws in distribution."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wellposed import ImplicitModel, MeanRelative, Noise, Noisy, Relative, Steps
from wellposed.activations import get_activation
from wellposed.equilibrium import Absolute, Picard, RobbinsMonro, Status
from wellposed.errors import InputError
from wellposed.kernels import executor as executors
from wellposed.kernels import explain
from wellposed.kernels.noisy import Strength, noisy_recipe, run_noisy_kernel

pytest.importorskip("numba")
HERE = Path(__file__).parent
NOISES = {
    "signal": {"signal": 10.0},
    "state": {"state": 5.0},
    "all": {"signal": 20.0, "state": 10.0, "input": 10.0},
    "held": {"signal": 10.0, "state": 20.0, "redraw": False},
    "additive": {"signal": 15.0, "state": 10.0, "kind": "additive"},
    "literal": {"signal": 30.0, "literal": True},
}
RULES = {
    "steps": (Picard(), Steps(9), "tanh"),
    "mean": (Picard(), MeanRelative(0.1, 6), "relu"),
    "falling": (RobbinsMonro(0.5, 0.6), MeanRelative(0.05, 7), "sigmoid"),
    "damped": (Picard(0.7), Relative(1e-3), "relu"),
    "absolute": (Picard(), Absolute(0.01), "identity"),
}


def solve(noise, rule, *, executor, dtype=torch.float64, batch=70, n=37, seed=3, counter=None):
    solver, stop, activation = rule
    torch.manual_seed(1)
    options = {"solver": solver, "stop": stop, "activation": activation, "executor": executor}
    model = ImplicitModel(3, 2, n, max_steps=23, on_failure="ignore", **options).to(dtype)
    u = torch.randn(batch, 3, dtype=dtype)
    noise = Noise(**noise, generator=torch.Generator().manual_seed(seed), counter=counter)
    with torch.no_grad():
        return Noisy(model, noise).equilibrium(u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("noise", NOISES)
def test_kernel_is_the_loop_sample_by_sample(noise, rule, dtype):
    found, plain = (
        solve(NOISES[noise], RULES[rule], executor=name, dtype=dtype) for name in ("numba", "reference")
    )
    # Rules compare numbers, and rounding may tip one: in float32 a few samples may end a step apart.
    same = (found.steps == plain.steps) & (found.status == plain.status)
    assert int((~same).sum()) <= (2 if dtype == torch.float32 else 0)
    assert float((found.value - plain.value)[same].abs().max()) < 30 * torch.finfo(dtype).eps
    last = min(found.residuals.shape[1], plain.residuals.shape[1])
    gaps = (found.residuals[same, :last] - plain.residuals[same, :last]).nan_to_num()
    assert float(gaps.abs().max()) < 60 * torch.finfo(dtype).eps
    if noise != "held" and rule == "damped":
        assert bool((found.status == Status.MAX_STEPS).all())


def test_draws_are_one_seed_of_the_generator():
    first, again, other = (solve(NOISES["all"], RULES["mean"], executor="numba", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.value, again.value) and torch.equal(first.steps, again.steps)
    assert not torch.allclose(first.value, other.value, atol=1e-3)
    torch.manual_seed(0)
    model, generator = ImplicitModel(3, 2, 5, solver="picard", stop=Steps(2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        noisy = Noisy(model, Noise(signal=0.0, generator=generator))
        assert not torch.equal(noisy(torch.ones(2, 3)), noisy(torch.ones(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_depend_neither_on_companions_nor_on_threads(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    A = (torch.randn(37, 37, generator=generator, dtype=torch.float64) / 20).to(dtype)
    v = torch.randn(70, 37, generator=generator, dtype=torch.float64).to(dtype)
    strength = Strength(1 << 62 | 5, 0.03, 0.03, False, False)
    recipe = noisy_recipe(get_activation("relu"), *RULES["mean"][:2], 40, strength, dtype)
    whole = run_noisy_kernel(A, v, torch.zeros_like(v), recipe)
    assert len(whole.steps.unique()) > 1
    for count in (1, 5, 33):
        part = run_noisy_kernel(A, v[:count], torch.zeros_like(v[:count]), recipe)
        assert torch.equal(part.value, whole.value[:count]) and torch.equal(part.steps, whole.steps[:count])
    monkeypatch.setattr(executors, "SPLIT", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = run_noisy_kernel(A, v, torch.zeros_like(v), recipe)
    assert torch.equal(shared.value, whole.value) and torch.equal(shared.steps, whole.steps)


@pytest.mark.parametrize("noise", ["signal", "state", "additive", "held"])
def test_kernel_and_torch_draws_agree_in_distribution(noise):
    """Compares final states and numbers of steps of 8000 samples of one input; all seeds are fixed."""
    rule = RULES["mean"] if noise != "held" else RULES["steps"]
    count = 8000
    kinds = {"numba": None, "reference": False}
    found = {}
    for seed, (name, counter) in enumerate(kinds.items()):
        torch.manual_seed(2)
        model = ImplicitModel(3, 2, 12, solver=rule[0], stop=rule[1], activation=rule[2], max_steps=60,
                              on_failure="ignore", executor=name).double()  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            u = torch.ones(1, 3, dtype=torch.float64).expand(count, 3)
            found[name] = Noisy(model, Noise(**NOISES[noise], generator=generator, counter=counter)).equilibrium(u)
    kernel, plain = found.values()
    error = (kernel.value.var(0) + plain.value.var(0)).clamp_min(1e-20).div(count).sqrt()
    assert bool(((kernel.value.mean(0) - plain.value.mean(0)).abs() < 4 * error).all())
    both = [part.value - part.value.mean(0) for part in (kernel, plain)]
    spread = sum(part.square().var(0) for part in both).clamp_min(1e-20).div(count).sqrt()
    assert bool(((both[0].square().mean(0) - both[1].square().mean(0)).abs() < 4 * spread).all())
    samples = [*zip(kernel.value.T, plain.value.T, strict=True), (kernel.steps.double(), plain.steps.double())]
    assert max(distance(*pair) for pair in samples) < 1.95 * (2 / count) ** 0.5  # a level of 0.001 each


def distance(a, b):
    """Returns the distance of Kolmogorov and Smirnov between two samples."""
    grid = torch.cat([a, b]).sort().values
    ranks = [torch.searchsorted(part.sort().values, grid, right=True) / len(part) for part in (a, b)]
    return float((ranks[0] - ranks[1]).abs().max())


def test_another_ratio_is_told_apart():
    # What compares distributions must be able to fail: one decibel is seen.
    levels = (10.0, 10.0, 11.0, 300.0)
    values = [
        solve({"signal": level}, RULES["steps"], executor="numba", batch=4000, n=12, seed=seed).value[:, 0]
        for seed, level in enumerate(levels)
    ]
    first, again, weaker = (float((part - values[3]).std()) for part in values[:3])
    assert again / first == pytest.approx(1, rel=0.05)
    assert weaker / first == pytest.approx(10**-0.05, rel=0.05)


def test_gradients_do_not_depend_on_the_executor():
    gradients = []
    for name in ("numba", "reference"):
        torch.manual_seed(0)
        model = ImplicitModel(3, 2, 9, solver="picard", stop=MeanRelative(0.02, 8), max_steps=80, executor=name,
                              on_failure="ignore").double()  # fmt: skip
        u = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
        Noisy(model, Noise(signal=20.0, state=20.0, generator=torch.Generator().manual_seed(1)))(
            u
        ).sum().backward()
        gradients += [u.grad, model.B.grad]
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradients[1], gradients[3], rtol=1e-6, atol=1e-9)


def test_explanations_and_refusals():
    u, noise = torch.zeros(5, 3), Noise(signal=0.0)
    fast = {"solver": "picard", "stop": MeanRelative(0.1)}
    text = explain(Noisy(ImplicitModel(3, 2, 8, **fast), noise), u)
    assert text == "numba: relu, float32, 8 states, batch 5, Picard, noise by counters"
    text = Noisy(ImplicitModel(3, 2, 8), noise).explain(u)
    assert text == "reference: under noise solver Anderson has no kernel; 'picard' and RobbinsMonro have"
    torch_draws = Noise(signal=0.0, counter=False)
    assert "torch's generators" in Noisy(ImplicitModel(3, 2, 8, **fast), torch_draws).explain(u)
    with pytest.raises(InputError, match="solver Anderson has no kernel"), torch.no_grad():
        Noisy(ImplicitModel(3, 2, 8, executor="numba"), noise)(u)
    with torch.no_grad():
        Noisy(ImplicitModel(3, 2, 8, on_failure="ignore", max_steps=5), noise)(u)
    silent = Noisy(ImplicitModel(3, 2, 8, **fast), Noise())
    assert silent.explain(u) == explain(silent.model, u)


def test_failures_keep_their_statuses():
    loud = {"signal": -40.0}
    found, plain = (solve(loud, (Picard(), MeanRelative(1e-3, 50), "relu"), executor=name, n=9, batch=40)
                    for name in ("numba", "reference"))  # fmt: skip
    assert torch.equal(found.status, plain.status) and bool((found.status == Status.DIVERGED).any())
    torch.testing.assert_close(found.value, plain.value, rtol=1e-9, atol=0)


def test_triton_kernel_in_the_interpreter():
    # Triton looks at the variable when it is imported, and other tests may have done that.
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "ignore"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(HERE / "test_gpu_noisy_kernel.py")],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert passed is not None and int(passed[1]) >= 6 and "skipped" not in run.stdout
