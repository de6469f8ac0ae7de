"""The same equilibrium model in the libraries for JAX: compiled ahead, float32, one thread."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.rivals.libraries import MAX_STEPS, TOLERANCE, Run, rival

Solve = Callable[[Any, Any], tuple[Any, Any, Any]]  # (A, v) -> x, steps and failures


def _array(tensor: Tensor) -> Any:
    return rival("jax.numpy").asarray(tensor.numpy())


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def _phi(problem: Problem) -> Callable[[Any], Any]:
    jax = rival("jax")
    return {"relu": jax.nn.relu, "tanh": jax.numpy.tanh, "identity": lambda z: z}[problem.activation]


def _capped(problem: Problem, A: Any) -> Any:
    jnp = rival("jax.numpy")
    return A if problem.cap is None else A * jnp.minimum(problem.cap / jnp.abs(A).sum(1).max(), 1)


def _compile(function: Callable, arguments: tuple) -> tuple[Callable, float]:
    start = time.process_time()
    compiled = rival("jax").jit(function).lower(*arguments).compile()
    return compiled, time.process_time() - start


def _run(problem: Problem, solve: Solve) -> Run:
    jax = rival("jax")
    data = tuple(_array(t) for t in (problem.A, problem.B, problem.C, problem.u))
    weights = _array(problem.weights)

    def output(A: Any, B: Any, C: Any, u: Any) -> tuple[Any, tuple]:
        x, *report = solve(_capped(problem, A), u @ B.T)
        return x @ C.T, tuple(report)

    def loss(A: Any, B: Any, C: Any, u: Any) -> Any:
        return (output(A, B, C, u)[0] * weights).sum()

    value, first = _compile(lambda *arguments: output(*arguments)[0], data)
    gradient, second = _compile(jax.grad(loss, argnums=(0, 1, 2)), data)
    steps, failures = jax.jit(lambda *arguments: output(*arguments)[1])(*data)
    used = gradient.memory_analysis()  # type: ignore[attr-defined]

    def gradients() -> dict[str, Tensor]:
        return dict(zip("ABC", map(_tensor, gradient(*data)), strict=True))

    failed = int(np.sum(failures))
    return Run(
        forward=lambda: jax.block_until_ready(value(*data)),
        step=lambda: jax.block_until_ready(gradient(*data)),
        output=lambda: _tensor(value(*data)),
        gradients=gradients,
        steps=lambda: _tensor(steps).expand(problem.batch),
        memory=lambda: int(used.temp_size_in_bytes + used.output_size_in_bytes),
        complaint=lambda: f"{failed} out of steps" if failed else "",
        compile_seconds=first + second,
    )


def jaxopt_plain(problem: Problem) -> Run:
    """Runs jaxopt's FixedPointIteration, each sample by itself (vmap), with its default adjoint (normal CG)."""
    jax, jaxopt, phi = rival("jax"), rival("jaxopt"), _phi(problem)
    tolerance = TOLERANCE * problem.states**0.5  # its residual is the 2-norm
    solver = jaxopt.FixedPointIteration(lambda x, A, v: phi(A @ x + v), maxiter=MAX_STEPS, tol=tolerance)

    def solve(A: Any, v: Any) -> tuple[Any, Any, Any]:
        found = jax.vmap(lambda row: solver.run(jax.numpy.zeros_like(row), A, row))(v)
        return found.params, found.state.iter_num, found.state.error > tolerance

    return _run(problem, solve)


def jaxopt_anderson(problem: Problem) -> Run:
    """Runs jaxopt's AndersonAcceleration on the batch as one state, which is faster than under vmap."""
    jax, jaxopt, phi = rival("jax"), rival("jaxopt"), _phi(problem)
    tolerance = TOLERANCE * (problem.states * problem.batch) ** 0.5
    solver = jaxopt.AndersonAcceleration(lambda x, A, v: phi(x @ A.T + v), maxiter=MAX_STEPS, tol=tolerance)

    def solve(A: Any, v: Any) -> tuple[Any, Any, Any]:
        found = solver.run(jax.numpy.zeros_like(v), A, v)
        return found.params, found.state.iter_num, found.state.error > tolerance

    return _run(problem, solve)


def optimistix_plain(problem: Problem) -> Run:
    """Runs optimistix' FixedPointIteration under vmap, with its default adjoint (a dense factorisation)."""
    jax, optimistix, phi = rival("jax"), rival("optimistix"), _phi(problem)
    solver = optimistix.FixedPointIteration(rtol=0.0, atol=TOLERANCE)

    def one(A: Any, row: Any) -> tuple[Any, Any, Any]:
        found = optimistix.fixed_point(
            lambda x, args: phi(args[0] @ x + args[1]),
            solver,
            jax.numpy.zeros_like(row),
            (A, row),
            max_steps=MAX_STEPS,
            throw=False,
        )
        return found.value, found.stats["num_steps"], found.result != optimistix.RESULTS.successful

    return _run(problem, jax.vmap(one, in_axes=(None, 0)))
