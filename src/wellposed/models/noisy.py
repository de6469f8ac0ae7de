"""Noisy: any model under noise."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.packing import State
from wellposed.equilibrium.solution import Solution
from wellposed.errors import InputError
from wellposed.kernels import explain
from wellposed.kernels.noisy import NoisyLoop, Strength
from wellposed.kernels.support import engine_of
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.noise import Disturbance, Noise, NoisyMap, disturbed_signals, signal_points


class Noisy(nn.Module):
    """Evaluates a model under noise, which the comparison of equilibrium and feed-forward models needs for both.

    Of an `ImplicitModel` ``phi(A x + B u + b)`` is the signal. Of a model with a `DEQ` inside the noise is that of
    the DEQ. Of any other network signals are what goes into its nonlinearities, those of a layer called
    "projection" apart, and states what comes out of all of them but the last.

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
        inner = [part for part in self.model.modules() if isinstance(part, DEQ)]
        return self._around(inner, u) if inner else self._layers(u)

    def equilibrium(self, u: Tensor) -> Solution:
        """Computes the states of an `ImplicitModel` and tells, per sample, how they were reached."""
        if not isinstance(self.model, ImplicitModel):
            raise InputError(f"only an ImplicitModel has one equilibrium; received {type(self.model).__name__}")
        return self._implicit(self.model, u)[0]

    def _implicit(self, model: ImplicitModel, u: Tensor) -> tuple[Solution, Tensor]:
        system = model.state.system()
        if system.splitting is not None or system.damping != 1 or system.scale is not None:
            raise InputError(f"noise needs plain steps, which condition {model.condition.name!r} does not take")
        model._check(u)
        flat = u.reshape(-1, model.in_features)
        disturbance = Disturbance(self.noise, flat.shape[0], counter=True)
        given = disturbance.input(flat)
        assert isinstance(given, Tensor)
        A, v = model.A, F.linear(given, model.B, model.bias)
        start, rows = torch.zeros_like(v), torch.arange(len(v), device=v.device)

        def f(x: Tensor, v: Tensor) -> Tensor:
            return model.activation.function(disturbance.signal(F.linear(x, A) + v))

        noisy = NoisyMap(f, disturbance)
        found = fixed_point(noisy, start, v, rows, solver=model.solver, stop=model.stop, max_steps=model.max_steps,
                            gradient=model.gradient, on_failure=model.on_failure,
                            loop=self._loop(noisy, model, A))  # fmt: skip
        x = found.value
        assert isinstance(x, Tensor)
        y = F.linear(x, model.C)
        y = y if model.D is None else y + F.linear(given, model.D)
        return found, y.reshape(*u.shape[:-1], model.out_features)

    def _loop(self, noisy: NoisyMap, model: ImplicitModel, A: Tensor) -> NoisyLoop:
        """Returns what computes the solve; evaluations after it have draws that no step had."""
        disturbance, noise, n = noisy.disturbance, self.noise, model.state_features
        strength = None
        if disturbance.seed is not None:
            sizes = noise.scale(noise.state, n), noise.scale(noise.signal, n)
            strength = Strength(disturbance.seed, *sizes, noise.kind == "additive", not noise.redraw)

        def after(steps: int) -> None:
            disturbance.step = steps - 1

        return NoisyLoop(noisy, A, model.activation, strength, model.executor, after)

    def explain(self, u: Tensor) -> str:
        """Says which executor computes the equilibrium of an `ImplicitModel` for `u`, and why.

        Example:
            >>> from wellposed.equilibrium import Steps
            >>> model = ImplicitModel(3, 2, 8, solver="picard", stop=Steps(9), executor="reference")
            >>> Noisy(model, Noise(signal=0.0)).explain(torch.zeros(5, 3))
            'reference: executor="reference" was asked for'
        """
        model = self.model
        if not isinstance(model, ImplicitModel):
            return f"reference: {type(model).__name__} under noise has no kernel"
        if self.noise.silent():
            return explain(model, u)
        v = torch.empty(u.shape[:-1].numel(), model.state_features, dtype=model.B.dtype, device=u.device)
        method = model.method()
        with torch.no_grad():
            strength = None if self.noise.counter is False else Strength(0, 0.0, 0.0, False, False)
            loop = NoisyLoop(model, v, model.activation, strength, model.executor, lambda steps: None)
            problem = loop.problem(v, method.solver, method.stop)
        if problem:
            return f"reference: {problem}"
        dtype, solver = str(v.dtype).removeprefix("torch."), type(method.solver).__name__
        size = f"{v.shape[1]} states, batch {v.shape[0]}"
        return f"{engine_of(v)}: {model.activation.name}, {dtype}, {size}, {solver}, noise by counters"

    def _around(self, inner: list[DEQ], u: Tensor) -> Tensor:
        """Lends the noise to the equilibrium models inside."""
        before = [part.noise for part in inner]
        try:
            for part in inner:
                part.noise = self.noise
            y: Tensor = self.model(u)
            return y
        finally:
            for part, noise in zip(inner, before, strict=True):
                part.noise = noise

    def _layers(self, u: Tensor) -> Tensor:
        points = signal_points(self.model)
        disturbance = Disturbance(self.noise, u.shape[0])

        def hook(_: nn.Module, __: tuple[Tensor, ...], x: State) -> State:
            return disturbance.state(x)

        handles = [point.register_forward_hook(hook) for point in points[:-1]]
        try:
            with disturbed_signals(points, disturbance):
                y: Tensor = self.model(disturbance.input(u))
                return y
        finally:
            for handle in handles:
                handle.remove()
