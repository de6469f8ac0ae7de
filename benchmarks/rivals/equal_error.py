"""All rivals at equal true error, forward and backward, one thread each; JAX compiled and warm.

Each library gets the loosest tolerance at which its outputs are within a common target of the exact ones, as in
benchmarks.kernels.layer, here with the libraries for JAX beside those for torch. `make readme` draws the result.

Run: python -m benchmarks.rivals.equal_error [--quick], in the environment of `make rivals`
"""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import best_times, make_parser, one_thread, save, versions
from benchmarks.kernels.layer import MAX_STEPS, MODELS, TARGETS, choose_tolerance, step
from benchmarks.problems import SolvedProblem, solved_problem
from benchmarks.rivals.libraries import installed, rival

FAMILIES = ("positive", "ring", "shift", "trained")
SIZES = ((20, 128), (64, 512))


class JaxModel:
    """A solve in JAX by the interface of the torch models: outputs for inputs, and a step with all gradients."""

    def __init__(self, case: SolvedProblem, solve: Callable[[Any, Any], Any]) -> None:
        jax = rival("jax")
        self.data = tuple(jax.numpy.asarray(value.numpy()) for value in (case.A, case.B, case.C, case.u))
        weights = jax.numpy.asarray(case.g.numpy())

        def output(A: Any, B: Any, C: Any, u: Any) -> Any:
            return solve(A, u @ B.T) @ C.T

        self.value = jax.jit(output)
        self.gradient = jax.jit(
            jax.value_and_grad(lambda *data: (output(*data) * weights).sum(), argnums=(0, 1, 2))
        )
        self.wait = jax.block_until_ready

    def __call__(self, u: Tensor) -> Tensor:
        """Returns the outputs."""
        return torch.tensor(self.value(*self.data).tolist())

    def step(self) -> None:
        """Computes outputs and the gradients of all parameters."""
        self.wait(self.gradient(*self.data))


def jaxopt_plain(case: SolvedProblem, tolerance: float) -> JaxModel:
    """Runs jaxopt's FixedPointIteration, each sample by itself."""
    jax, length = rival("jax"), tolerance * case.size[0] ** 0.5  # its residual is a 2-norm
    solver = rival("jaxopt").FixedPointIteration(lambda x, A, v: jax.nn.relu(A @ x + v), MAX_STEPS, length)
    return JaxModel(
        case, lambda A, v: jax.vmap(lambda row: solver.run(jax.numpy.zeros_like(row), A, row).params)(v)
    )


def jaxopt_anderson(case: SolvedProblem, tolerance: float) -> JaxModel:
    """Runs jaxopt's AndersonAcceleration on the batch as one state."""
    jax, (n, batch) = rival("jax"), case.size
    solver = rival("jaxopt").AndersonAcceleration(
        lambda x, A, v: jax.nn.relu(x @ A.T + v), maxiter=MAX_STEPS, tol=tolerance * (n * batch) ** 0.5
    )
    return JaxModel(case, lambda A, v: solver.run(jax.numpy.zeros_like(v), A, v).params)


def optimistix_plain(case: SolvedProblem, tolerance: float) -> JaxModel:
    """Runs optimistix' FixedPointIteration, each sample by itself."""
    jax, optimistix = rival("jax"), rival("optimistix")
    solver = optimistix.FixedPointIteration(rtol=0.0, atol=tolerance)

    def one(A: Any, row: Any) -> Any:
        def f(x: Any, given: Any) -> Any:
            return jax.nn.relu(given[0] @ x + given[1])

        start = jax.numpy.zeros_like(row)
        return optimistix.fixed_point(f, solver, start, (A, row), max_steps=MAX_STEPS, throw=False).value

    return JaxModel(case, jax.vmap(one, in_axes=(None, 0)))


LIBRARIES: dict[str, Callable[[SolvedProblem, float], Any]] = {
    **MODELS,
    "jaxopt plain": jaxopt_plain,
    "jaxopt anderson": jaxopt_anderson,
    "optimistix plain": optimistix_plain,
}


def measure(case: SolvedProblem, names: list[str]) -> dict[str, Any]:
    """Measures all libraries on one problem."""
    target, (n, batch) = TARGETS[case.norm], case.size
    chosen = {name: choose_tolerance(case, LIBRARIES[name], target) for name in names}
    models = {name: LIBRARIES[name](case, tolerance) for name, (tolerance, _) in chosen.items()}
    steps = {
        name: model.step if isinstance(model, JaxModel) else partial(step, model, case)
        for name, model in models.items()
    }
    seconds = best_times(steps, budget=0.04, slow=0.3)
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": n, "batch": batch, "target": target}
    row["libraries"] = {
        name: {"tolerance": chosen[name][0], "error": chosen[name][1], "ms": 1e3 * seconds[name]} for name in names
    }
    return row


def main() -> None:
    """Measures all problems and writes the result."""
    options = make_parser(__doc__, __file__, quick="the small size at contraction 0.9").parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    present = installed({name.split()[0]: None for name in LIBRARIES})
    names, rows, start = [name for name in LIBRARIES if name.split()[0] in present], [], time.perf_counter()
    for n, batch in SIZES[:1] if options.quick else SIZES:
        for norm in (0.9,) if options.quick else TARGETS:
            for family in FAMILIES:
                rows.append(measure(solved_problem(family, norm, n, batch), names))
                print(json.dumps(rows[-1]), flush=True)
    packages = ("wellposed", "torch", "torchidl", "torchdeq", "jax", "jaxopt", "optimistix")
    save(options, versions=versions(*packages), seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
