"""Noisy: any model under noise."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.maps import FunctionMap, Map, State
from wellposed.equilibrium.method import Loop, report_outputs
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import InputError
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.noise import Noise, NoiseDraws, NoisyMap, disturbed_signals, nonlinearities


class Noisy(nn.Module):
    """Evaluates a model under noise: equilibrium and feed-forward models alike, so that they can be compared.

    The signal of an `ImplicitModel` is ``A x + B u + b``. In a model with a `DEQ` inside, the noise is that of the
    DEQ. In any other network, signals are the inputs of its nonlinearities, except in layers called "projection",
    and states are the outputs of all of them but the last.

    Args:
        model: a module; its parameters stay its own.
        noise: what disturbs it; may be reassigned at any time.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> noisy, u = Noisy(network, Noise(signal=0.0)), torch.ones(1, 2)
        >>> bool(noisy(u) == noisy(u)), bool(Noisy(network, Noise())(u) == network(u))
        (False, True)
    """

    def __init__(self, model: nn.Module, noise: Noise) -> None:
        super().__init__()
        self.model, self.noise = model, noise

    def forward(self, u: Tensor) -> Tensor:
        """Computes the outputs."""
        if self.noise.silent():
            y: Tensor = self.model(u)
            return y
        if isinstance(self.model, ImplicitModel):
            return self._implicit(self.model, u)[1]
        inner = [module for module in self.model.modules() if isinstance(module, DEQ)]
        return self._around(inner, u) if inner else self._layers(u)

    def equilibrium(self, u: Tensor) -> Solution:
        """Computes the states of an `ImplicitModel` and, per sample, how they were reached."""
        if not isinstance(self.model, ImplicitModel):
            raise InputError(f"only an ImplicitModel has one equilibrium; received {type(self.model).__name__}")
        return self._implicit(self.model, u)[0]

    def _implicit(self, model: ImplicitModel, u: Tensor) -> tuple[Solution, Tensor]:
        system = model.state.system()
        if system.splitting is not None or system.damping != 1 or system.scale is not None:
            raise InputError(f"noise needs plain steps, which condition {model.condition.name!r} does not take")
        if model.executor in ("numba", "triton"):
            raise InputError(
                f'executor="{model.executor}" cannot compute this: noise has no kernel; use executor="auto"'
            )
        model._check(u)
        flat = u.reshape(-1, model.in_features)
        draws = NoiseDraws(self.noise, flat.shape[0], counter=True)
        given = draws.input(flat)
        assert isinstance(given, Tensor)
        A, v = model.A, F.linear(given, model.B, model.bias)
        start, rows = torch.zeros_like(v), torch.arange(len(v), device=v.device)

        def f(x: Tensor, v: Tensor) -> Tensor:
            return model.activation.function(draws.signal(F.linear(x, A) + v))

        noisy = NoisyMap(f, draws)
        solution = fixed_point(
            noisy, start, v, rows, solver=model.solver, stop=model.stop, max_steps=model.max_steps,
            gradient=model.gradient, on_failure=model.on_failure, loop=_new_draws_afterwards(noisy),
        )  # fmt: skip
        x = solution.value
        assert isinstance(x, Tensor)
        y = F.linear(x, model.C)
        y = y if model.D is None else y + F.linear(given, model.D)
        if not under_transform():
            report_outputs(y.detach(), x, model.on_failure)
        return solution, y.reshape(*u.shape[:-1], model.out_features)

    def explain(self, u: Tensor) -> str:
        """Says which executor computes the equilibrium of an `ImplicitModel` for `u`, and why.

        Example:
            >>> Noisy(ImplicitModel(3, 2, 8), Noise(signal=0.0)).explain(torch.zeros(5, 3))
            'reference: ImplicitModel under noise has no kernel'
        """
        if isinstance(self.model, ImplicitModel) and (self.noise.silent() or self.model.executor == "reference"):
            return self.model.explain(u)
        return f"reference: {type(self.model).__name__} under noise has no kernel"

    def _around(self, inner: list[DEQ], u: Tensor) -> Tensor:
        """Adds the noise to the equilibrium models inside, until the block ends."""
        before = [deq.noise for deq in inner]
        try:
            for deq in inner:
                deq.noise = self.noise
            y: Tensor = self.model(u)
            return y
        finally:
            for deq, noise in zip(inner, before, strict=True):
                deq.noise = noise

    def _layers(self, u: Tensor) -> Tensor:
        layers = nonlinearities(self.model)
        draws = NoiseDraws(self.noise, u.shape[0])

        def hook(_: nn.Module, __: tuple[Tensor, ...], x: State) -> State:
            return draws.state(x)

        handles = [layer.register_forward_hook(hook) for layer in layers[:-1]]
        try:
            with disturbed_signals(layers, draws):
                y: Tensor = self.model(draws.input(u))
                return y
        finally:
            for handle in handles:
                handle.remove()


def _new_draws_afterwards(noisy: NoisyMap) -> Loop:
    """Returns the loop of a noisy map, which gives evaluations after a solve draws that no step had."""

    def loop(f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates:
        iterates = iterate(f, x, solver, stop, max_steps)
        if isinstance(f, FunctionMap) and f.function is noisy:  # not the equation of the backward pass
            noisy.draws.step = max_steps - 1
        return iterates

    return loop
