"""The same equilibrium model in each library, ready to be measured.

None of the other libraries is imported before it is asked for.
"""

import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import cpu_seconds, peak_bytes
from benchmarks.problems import PHI, SLOPE, Problem
from wellposed import Absolute, ImplicitModel, Solution, Status, fixed_point
from wellposed.errors import IllPosedError

TOLERANCE = 3e-6  # of the largest entry of f(x) - x
MAX_STEPS = 3000


class NotRunError(Exception):
    """A library cannot run a problem; the message says why."""


def rival(package: str) -> Any:
    """Imports a package of the benchmark environment."""
    try:
        installed([package.partition(".")[0]])
        return import_module(package)
    except ImportError as error:
        raise NotRunError(f"{package} is not installed here; `make rivals` installs it") from error


def installed(names: Iterable[str]) -> list[str]:
    """Returns those of some libraries that can be imported.

    The package torchidl imports plotting and convex solvers that its model does not need; without them the model
    is loaded alone.
    """
    specs = {name: find_spec(name) for name in names}
    package = specs.get("torchidl")
    if package is not None and package.origin is not None:
        try:
            import_module("torchidl")
        except ImportError:
            bare: Any = types.ModuleType("torchidl")
            bare.__path__, bare.__spec__ = [str(Path(package.origin).parent)], package
            sys.modules["torchidl"] = bare
            bare.ImplicitModel = import_module("torchidl.implicit_base_model").ImplicitModel
    return [name for name, spec in specs.items() if spec is not None]


@dataclass(frozen=True)
class Run:
    """One library on one problem.

    Attributes:
        forward: computes the output and nothing else.
        step: computes the output and the gradients of the loss.
        output, gradients: what they computed.
        steps: evaluations of the map in the forward solve, per sample.
        memory: peak bytes of one `step`, beyond parameters and inputs.
        complaint: what the library itself says went wrong; empty if nothing did.
        compile_seconds: spent before the first run.
    """

    forward: Callable[[], object]
    step: Callable[[], object]
    output: Callable[[], Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    steps: Callable[[], Tensor]
    memory: Callable[[], int]
    complaint: Callable[[], str]
    compile_seconds: float = 0.0


def torch_run(
    problem: Problem,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    steps: Callable[[], Tensor],
    complaint: Callable[[], str],
) -> Run:
    """Measures a torch module."""

    def forward() -> Tensor:
        with torch.no_grad():
            return model(problem.u)

    def step() -> None:
        model.zero_grad()
        (model(problem.u) * problem.weights).sum().backward()

    def gradients() -> dict[str, Tensor]:
        step()
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    def memory() -> int:
        model.zero_grad()
        return peak_bytes(step)

    return Run(forward, step, forward, gradients, steps, memory, complaint)


def _failures(solution: Solution) -> str:
    """Says how many samples ended without meeting the tolerance."""
    stuck = solution.status == Status.STAGNATED
    counts = {"out of steps": int(solution.failed.sum()), "stagnated": int(stuck.sum())}
    said = [f"{count} of {stuck.numel()} {name}" for name, count in counts.items() if count]
    if bool(stuck.any()):
        said.append(f"residual up to {float(solution.residual.max()):.0e}")
    return ", ".join(said)


def ours(A: Tensor, B: Tensor, C: Tensor, **options: Any) -> ImplicitModel:
    """Returns our model with the given matrices."""
    defaults: dict[str, Any] = {"max_steps": MAX_STEPS, "executor": "reference"}
    return ImplicitModel.from_matrices(A, B, C, **defaults | options)


def wellposed_model(problem: Problem) -> Run:
    """Runs `ImplicitModel` with its own solver."""
    if problem.cap is not None:
        raise NotRunError("caps rows one by one instead of scaling the whole matrix: another model")
    try:
        model = ours(
            problem.A,
            problem.B,
            problem.C,
            activation=problem.activation,
            stop=Absolute(TOLERANCE),
            executor="auto",
        )
    except IllPosedError:
        raise NotRunError("takes only matrices proven well-posed, and this one is not") from None
    parameters = {"A": model.state.raw, "B": model.B, "C": model.C}
    with torch.no_grad():
        solution = model.equilibrium(problem.u)
    return torch_run(problem, model, parameters, lambda: solution.steps, lambda: _failures(solution))


class _Cell(nn.Module):
    """The parameters and the map of a problem, for libraries that solve any map."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.A, self.B, self.C = (nn.Parameter(m.clone()) for m in (problem.A, problem.B, problem.C))

    def map(self) -> Callable[[Tensor, Tensor], Tensor]:
        A, phi = self.problem.capped(self.A), PHI[self.problem.activation]
        return lambda x, v: phi(torch.addmm(v, x, A.mT))

    @property
    def named(self) -> dict[str, Tensor]:
        return {"A": self.A, "B": self.B, "C": self.C}


class _FixedPointModel(_Cell):
    """The model on our `fixed_point`, which knows nothing of the map."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        super().__init__(problem)
        self.options = options

    def forward(self, u: Tensor) -> Tensor:
        value: Any = self.solve(u).value
        return value @ self.C.mT

    def solve(self, u: Tensor) -> Solution:
        v = u @ self.B.mT
        options = {"stop": Absolute(TOLERANCE), "max_steps": MAX_STEPS, **self.options}
        return fixed_point(self.map(), torch.zeros_like(v), v, **options)


def wellposed_fixed_point(problem: Problem, **options: Any) -> Run:
    """Runs `fixed_point` on the map as a function."""
    model = _FixedPointModel(problem, **options)
    begin = time.perf_counter()
    with torch.no_grad():
        solution = model.solve(problem.u)
    run = torch_run(problem, model, model.named, lambda: solution.steps, lambda: _failures(solution))
    if options.get("compile"):
        run.step()
        run = replace(run, compile_seconds=time.perf_counter() - begin)
    return run


def torchidl_model(A: Tensor, B: Tensor, C: Tensor, kappa: float = 0.9999, function: type | None = None) -> Any:
    """Returns torchidl's ImplicitModel with the given matrices and its own solver."""
    torchidl = rival("torchidl")
    chosen = {} if function is None else {"f": function}
    model = torchidl.ImplicitModel(
        B.shape[1], C.shape[0], A.shape[0], no_D=True, mitr=MAX_STEPS, grad_mitr=MAX_STEPS, kappa=kappa, **chosen
    )
    with torch.no_grad():
        model.A.copy_(A)
        model.B.copy_(B)
        model.C.copy_(C)
    return model


def _torchidl_function(problem: Problem, count: list[int] | None = None) -> type:
    """Returns its implicit function with another activation, as its documentation suggests."""
    base = rival("torchidl.implicit_function").ImplicitFunctionInf
    phi = PHI[problem.activation]

    def counting(z: Tensor) -> Tensor:
        assert count is not None
        count[0] += 1
        return phi(z)

    plain = phi if count is None else counting
    return type("Chosen", (base,), {"phi": staticmethod(plain), "dphi": staticmethod(SLOPE[problem.activation])})


def torchidl(problem: Problem) -> Run:
    """Runs torchidl's plain iteration, which stops when the whole batch has converged."""
    norm = float(torch.linalg.matrix_norm(problem.A, torch.inf))
    if problem.cap is None and norm >= 1:
        raise NotRunError(f"would scale A from |A|_inf = {norm:.1f} to below one: another problem")
    kappa = 0.9999 if problem.cap is None else problem.cap
    function = None if problem.activation == "relu" else _torchidl_function(problem)
    model = torchidl_model(problem.A, problem.B, problem.C, kappa, function)
    count = [0]
    counter = torchidl_model(problem.A, problem.B, problem.C, kappa, _torchidl_function(problem, count))
    with torch.no_grad():
        counter(problem.u)
    steps = torch.full((problem.batch,), count[0])
    parameters: dict[str, Tensor] = {"A": model.A, "B": model.B, "C": model.C}
    return torch_run(
        problem, model, parameters, lambda: steps, lambda: "out of steps" if count[0] >= MAX_STEPS else ""
    )


class _TorchdeqModel(_Cell):
    def __init__(self, problem: Problem, solver: str, tolerance: float, max_steps: int) -> None:
        super().__init__(problem)
        self.deq = rival("torchdeq").get_deq(
            f_solver=solver, f_max_iter=max_steps, f_tol=tolerance, f_stop_mode="abs",
            b_solver=solver, b_max_iter=max_steps, b_tol=tolerance, b_stop_mode="abs", ift=True,
        )  # fmt: skip

    def forward(self, u: Tensor) -> Tensor:
        return self.solve(u)[0] @ self.C.mT

    def solve(self, u: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        v, f = u @ self.B.mT, self.map()
        z, report = self.deq(lambda x: f(x, v), torch.zeros_like(v))
        return z[-1], report


def torchdeq_model(A: Tensor, B: Tensor, C: Tensor, tolerance: float = TOLERANCE) -> Any:
    """Returns the ReLU model written for torchdeq, with Anderson acceleration and implicit differentiation."""
    nothing = torch.empty(0)
    length = tolerance * A.shape[0] ** 0.5  # it measures 2-norms
    return _TorchdeqModel(Problem("", A, B, C, nothing, nothing), "anderson", length, 200)


def _torchdeq(problem: Problem, solver: str, max_steps: int) -> Run:
    # Its residual is the 2-norm over a sample; in this unit the tolerance is that of the others on average.
    tolerance = TOLERANCE * problem.states**0.5
    model = _TorchdeqModel(problem, solver, tolerance, max_steps)
    with torch.no_grad():
        report = model.solve(problem.u)[1]
    worst = float(report["abs_lowest"].max())
    complaint = "" if worst < tolerance else f"stalls at {worst / problem.states**0.5:.0e}"
    return torch_run(problem, model, model.named, lambda: report["nstep"], lambda: complaint)


def torchdeq_anderson(problem: Problem) -> Run:
    """Runs torchdeq's Anderson acceleration, 200 steps at most: it stalls before it needs more."""
    return _torchdeq(problem, "anderson", 200)


def torchdeq_plain(problem: Problem) -> Run:
    """Runs torchdeq's plain iteration, its default."""
    return _torchdeq(problem, "fixed_point_iter", MAX_STEPS)


# JAX: compiled ahead, float32.

JaxSolve = Callable[[Any, Any], tuple[Any, Any, Any]]  # (A, v) -> x, steps and failures


def _jax_array(tensor: Tensor) -> Any:
    return rival("jax.numpy").asarray(tensor.numpy())


def _from_jax(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def _jax_phi(problem: Problem) -> Callable[[Any], Any]:
    jax = rival("jax")
    return {"relu": jax.nn.relu, "tanh": jax.numpy.tanh, "identity": lambda z: z}[problem.activation]


def _jax_capped(problem: Problem, A: Any) -> Any:
    jnp = rival("jax.numpy")
    return A if problem.cap is None else A * jnp.minimum(problem.cap / jnp.abs(A).sum(1).max(), 1)


def _compile(function: Callable, arguments: tuple) -> tuple[Callable, float]:
    seconds, compiled = cpu_seconds(lambda: rival("jax").jit(function).lower(*arguments).compile())
    return compiled, seconds


def _jax_run(problem: Problem, solve: JaxSolve) -> Run:
    jax = rival("jax")
    data = tuple(_jax_array(t) for t in (problem.A, problem.B, problem.C, problem.u))
    weights = _jax_array(problem.weights)

    def output(A: Any, B: Any, C: Any, u: Any) -> tuple[Any, tuple]:
        x, *report = solve(_jax_capped(problem, A), u @ B.T)
        return x @ C.T, tuple(report)

    def loss(A: Any, B: Any, C: Any, u: Any) -> Any:
        return (output(A, B, C, u)[0] * weights).sum()

    value, first = _compile(lambda *arguments: output(*arguments)[0], data)
    gradient, second = _compile(jax.grad(loss, argnums=(0, 1, 2)), data)
    steps, failures = jax.jit(lambda *arguments: output(*arguments)[1])(*data)
    used = gradient.memory_analysis()  # type: ignore[attr-defined]

    def gradients() -> dict[str, Tensor]:
        return dict(zip("ABC", map(_from_jax, gradient(*data)), strict=True))

    failed = int(np.sum(failures))
    return Run(
        forward=lambda: jax.block_until_ready(value(*data)),
        step=lambda: jax.block_until_ready(gradient(*data)),
        output=lambda: _from_jax(value(*data)),
        gradients=gradients,
        steps=lambda: _from_jax(steps).expand(problem.batch),
        memory=lambda: int(used.temp_size_in_bytes + used.output_size_in_bytes),
        complaint=lambda: f"{failed} out of steps" if failed else "",
        compile_seconds=first + second,
    )


def jaxopt_plain(problem: Problem) -> Run:
    """Runs jaxopt's FixedPointIteration, each sample by itself (vmap), with its default adjoint (normal CG)."""
    jax, jaxopt, phi = rival("jax"), rival("jaxopt"), _jax_phi(problem)
    tolerance = TOLERANCE * problem.states**0.5  # its residual is the 2-norm
    solver = jaxopt.FixedPointIteration(lambda x, A, v: phi(A @ x + v), maxiter=MAX_STEPS, tol=tolerance)

    def solve(A: Any, v: Any) -> tuple[Any, Any, Any]:
        solution = jax.vmap(lambda row: solver.run(jax.numpy.zeros_like(row), A, row))(v)
        return solution.params, solution.state.iter_num, solution.state.error > tolerance

    return _jax_run(problem, solve)


def jaxopt_anderson(problem: Problem) -> Run:
    """Runs jaxopt's AndersonAcceleration on the batch as one state, which is faster than under vmap."""
    jax, jaxopt, phi = rival("jax"), rival("jaxopt"), _jax_phi(problem)
    tolerance = TOLERANCE * (problem.states * problem.batch) ** 0.5
    solver = jaxopt.AndersonAcceleration(lambda x, A, v: phi(x @ A.T + v), maxiter=MAX_STEPS, tol=tolerance)

    def solve(A: Any, v: Any) -> tuple[Any, Any, Any]:
        solution = solver.run(jax.numpy.zeros_like(v), A, v)
        return solution.params, solution.state.iter_num, solution.state.error > tolerance

    return _jax_run(problem, solve)


def optimistix_plain(problem: Problem) -> Run:
    """Runs optimistix' FixedPointIteration under vmap, with its default adjoint (a dense factorisation)."""
    jax, optimistix, phi = rival("jax"), rival("optimistix"), _jax_phi(problem)
    solver = optimistix.FixedPointIteration(rtol=0.0, atol=TOLERANCE)

    def one(A: Any, row: Any) -> tuple[Any, Any, Any]:
        solution = optimistix.fixed_point(
            lambda x, args: phi(args[0] @ x + args[1]),
            solver,
            jax.numpy.zeros_like(row),
            (A, row),
            max_steps=MAX_STEPS,
            throw=False,
        )
        return solution.value, solution.stats["num_steps"], solution.result != optimistix.RESULTS.successful

    return _jax_run(problem, jax.vmap(one, in_axes=(None, 0)))
