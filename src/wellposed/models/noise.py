"""Noise inside models: how strong it is, where it enters and when it is drawn (004 section 3.2).

`normals` returns normal numbers that are functions of a seed and a position, by Philox-4x32-10 (`philox`) and the
Box-Muller transform. A draw is identified by its seed, its sample, its step, its site in the step and its number
there, so that its value does not depend on the order of computation, the device or the rest of the batch. `Noise`
says how strong the noise is and where it enters, `NoiseDraws` draws it for one solve, and `NoisyMap` adds it to a
map. `noise_sensitivity` computes how states move with the noise: the derivatives of 004 (section 3.3 and
appendix A), by their recursions.

Reference: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import jvp

from wellposed.activations import Activation, get_activation
from wellposed.activations.catalogue import of_layer
from wellposed.equilibrium.maps import State
from wellposed.errors import InputError, unknown_name

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by in every round
ROUNDS, MASK = 10, 0xFFFFFFFF
INPUT, STATE, SIGNAL, SITES = range(4)  # where noise enters; a site is SITES times its number in a step and this

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(generator: torch.Generator | None) -> int:
    """Returns a seed, one draw of a generator; torch's own if None. All seeds have 63 bits.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> draw_seed(generator) == draw_seed(generator)
        False
    """
    device = None if generator is None else generator.device
    return 1 << 62 | int(torch.randint(1 << 62, (), generator=generator, device=device))


def philox(counter: Words, seed: int) -> Words:
    """Returns four words of 32 bits for every counter of four, in the integers of int64 tensors.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), 0)]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    low, high = seed & MASK, seed >> 32
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wraps; the bits are those of the product
        a, c = (second >> 32 & MASK) ^ b ^ low, (first >> 32 & MASK) ^ d ^ high
        b, d = second & MASK, first & MASK
        low, high = (low + WEYL[0]) & MASK, (high + WEYL[1]) & MASK
    return a, b, c, d


def normals(
    seed: int, samples: Tensor, step: int, site: int, count: int, dtype: torch.dtype = torch.float64
) -> Tensor:  # (B, count)
    """Returns standard normal numbers of some samples at one site of one step.

    Words ``w`` give uniform numbers ``(w + 1/2) / 2^32`` for radii and ``w / 2^32`` for angles, so that nothing
    lies beyond 6.8 standard deviations. Computed in float64 and then rounded.

    Args:
        seed: below 2^64.
        samples: numbers of the samples, ``(B,)``.
        step, site: when and where.
        count: how many a sample.
        dtype: of the result.

    Example:
        >>> batch = normals(1, torch.arange(5), 0, STATE, 6)
        >>> torch.equal(batch[3:, :2], normals(1, torch.arange(3, 5), 0, STATE, 2))
        True
    """
    number = torch.arange((count + 3) // 4, device=samples.device)
    when, where = torch.full_like(number, step), torch.full_like(number, site)
    a, b, c, d = philox((number, when, samples[:, None], where), seed)
    pairs = [normal for radius, angle in ((a, b), (c, d)) for normal in _box_muller(radius, angle)]
    return torch.stack(pairs, dim=-1).flatten(1)[:, :count].to(dtype)


def _box_muller(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    size = (-2 * torch.log((radius.double() + 0.5) / 2**32)).sqrt()
    turn = angle.double() * (2 * math.pi / 2**32)
    return size * torch.cos(turn), size * torch.sin(turn)


Kind = Literal["multiplicative", "additive"]
KINDS = get_args(Kind)
TARGETS = {"input": INPUT, "state": STATE, "signal": SIGNAL}


@dataclass(frozen=True)
class Noise:
    """Gaussian noise at up to three places of a model, by signal-to-noise ratios in decibels.

    A ratio is one of powers: at D decibels the noise added to a sample ``x`` of d numbers has the standard
    deviation ``|x|_2 / sqrt(d 10^(D/10))`` in each of them. The formula as 004 prints it (eq. 4) lacks d, and its
    noise is that much stronger; ``literal=True`` selects it. Additive noise ignores the size of the sample: its
    standard deviation is ``10^(-D/20)``, that of a signal of power one (004 eq. 8 with eta).

    Args:
        signal: of noise before the nonlinearities of a step, drawn anew at each step; None for none.
        state: of noise added to the state before each step (of a feed-forward network, between its layers).
        input: of noise added to the input, once a solve.
        kind: "multiplicative" or "additive".
        redraw: whether every step draws anew; else a solve reuses its first draw, as in the theory of 004.
        literal: whether to use eq. 4 of 004 as printed.
        generator: of the draws; torch's own if None.
        counter: whether draws are functions of sample, step and state (Philox), under a seed that every solve
            draws once, so that they do not depend on which samples are still active. If False, torch draws; None
            means counters for `ImplicitModel` and torch's draws elsewhere.

    Example:
        >>> x = torch.ones(1, 4)
        >>> Noise(state=0).deviation(x, 0.0).item(), Noise(state=0, literal=True).deviation(x, 0.0).item()
        (1.0, 2.0)
    """

    signal: float | None = None
    state: float | None = None
    input: float | None = None
    kind: Kind = field(default="multiplicative", kw_only=True)
    redraw: bool = field(default=True, kw_only=True)
    literal: bool = field(default=False, kw_only=True)
    generator: torch.Generator | None = field(default=None, kw_only=True, compare=False, repr=False)
    counter: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind of noise", self.kind, KINDS)
        if self.literal and self.kind == "additive":
            raise InputError("literal is about multiplicative noise; additive noise has one reading only")
        for name in ("signal", "state", "input"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise InputError(f"{name} is a signal-to-noise ratio in decibels; received {value}")

    def deviation(self, x: Tensor, decibels: float) -> Tensor:  # (B, 1, ...)
        """Returns the standard deviation of the noise of each sample."""
        scale = self.scale(decibels, math.prod(x.shape[1:]))
        ones = (x.shape[0],) + (1,) * (x.dim() - 1)
        if self.kind == "additive":
            return x.new_full(ones, scale)
        size = torch.linalg.vector_norm(x.flatten(1), dim=1).reshape(ones)
        return size * scale

    def scale(self, decibels: float | None, size: int) -> float:
        """Returns the deviation of a sample of `size` numbers, of multiplicative noise that of l2 norm one.

        Without noise it is -1.
        """
        if decibels is None or decibels == math.inf:
            return -1.0
        amplitude: float = 10 ** (-decibels / 20)
        return amplitude if self.literal or self.kind == "additive" else amplitude / math.sqrt(max(size, 1))

    def silent(self) -> bool:
        """Whether there is no noise at all."""
        return all(ratio is None or ratio == math.inf for ratio in (self.signal, self.state, self.input))


class NoiseDraws:
    """The noise of one solve, or of one pass through a feed-forward network.

    Every sample has its own draws, whichever companions leave the batch before it: they are made for the whole
    batch and then indexed by the active rows, or they are functions of the sample.

    Args:
        noise: how strong, where and when.
        batch: the number of samples.
        counter: whether draws are counted where the noise leaves that open.
    """

    def __init__(self, noise: Noise, batch: int, *, counter: bool = False) -> None:
        self.noise, self.batch, self.silent = noise, batch, noise.silent()
        counted = not self.silent and (counter if noise.counter is None else noise.counter)
        self.seed = draw_seed(noise.generator) if counted else None
        self.step = -1  # which evaluation this is
        self.rows: Tensor | None = None  # active samples; None for all
        self.quiet = False  # whether to add no noise
        self._calls: Counter[str] = Counter()  # additions of noise to each target since the step began
        self._reused: dict[tuple[object, ...], Tensor] = {}

    def begin(self, rows: Tensor | None = None) -> None:
        """Notes that a step begins, and for which samples."""
        self.rows, self.step = rows, self.step + 1
        self._calls.clear()

    def input(self, u: State) -> State:
        """Adds noise to the input of a model."""
        return self._add("input", u, self.noise.input)

    def state(self, x: State) -> State:
        """Adds noise to a state."""
        return self._add("state", x, self.noise.state)

    def signal(self, z: Tensor) -> Tensor:
        """Adds noise to the input of a nonlinearity."""
        noisy = self._add("signal", z, self.noise.signal)
        assert isinstance(noisy, Tensor)
        return noisy

    def _add(self, target: str, x: State, decibels: float | None) -> State:
        if decibels is None or decibels == math.inf or self.quiet:
            return x
        if not isinstance(x, Tensor):
            return tuple(self._add_to_tensor(target, tensor, decibels) for tensor in x)
        return self._add_to_tensor(target, x, decibels)

    def _add_to_tensor(self, target: str, x: Tensor, decibels: float) -> Tensor:
        if not x.is_floating_point():
            return x
        draw = self._draw(target, x) if self.seed is None else self._draw_counted(target, x, self.seed)
        self._calls[target] += 1
        return x + self.noise.deviation(x, decibels) * draw

    def _draw_counted(self, target: str, x: Tensor, seed: int) -> Tensor:
        samples = torch.arange(self.batch, device=x.device) if self.rows is None else self.rows
        step = max(self.step, 0) if self.noise.redraw else 0
        site = SITES * self._calls[target] + TARGETS[target]
        return normals(seed, samples, step, site, x.shape[1:].numel(), x.dtype).reshape(x.shape)

    def _draw(self, target: str, x: Tensor) -> Tensor:
        key = target, self._calls[target], x.shape[1:]
        draw = self._reused.get(key)
        if draw is None:
            shape = (self.batch, *x.shape[1:])
            draw = torch.randn(shape, generator=self.noise.generator, dtype=x.dtype, device=x.device)
            if not self.noise.redraw:
                self._reused[key] = draw
        return draw if self.rows is None or self.rows.shape[0] == self.batch else draw[self.rows]


class NoisyMap:
    """A map of state and inputs with noise at every evaluation, and its `noiseless` counterpart.

    It takes one input more than the map, the numbers of the active samples.
    """

    def __init__(self, function: Callable[..., State], draws: NoiseDraws) -> None:
        self.function, self.draws = function, draws

    def __call__(self, x: State, *arguments: Tensor) -> State:
        """Evaluates the map with noise."""
        self.draws.begin(arguments[-1])
        return self.function(self.draws.state(x), *arguments[:-1])

    def noiseless(self, x: State, *arguments: Tensor) -> State:
        """Evaluates the map without noise."""
        self.draws.quiet = True
        try:
            return self.function(x, *arguments[:-1])
        finally:
            self.draws.quiet = False


def nonlinearities(module: nn.Module) -> list[nn.Module]:
    """Returns the nonlinearities of a network or cell, except in layers called "projection...".

    Example:
        >>> len(nonlinearities(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())))
        2
    """
    return [
        layer
        for name, layer in module.named_modules()
        if _is_nonlinearity(layer) and not any(word.startswith("projection") for word in name.split("."))
    ]


def _is_nonlinearity(layer: nn.Module) -> bool:
    """Returns whether a layer only applies an activation."""
    named = not isinstance(layer, nn.Identity) and any(map(of_layer, type(layer).__mro__))
    applies = named or isinstance(getattr(layer, "activation", None), Activation)
    return applies and not any(True for _ in layer.children())


@contextlib.contextmanager
def disturbed_signals(layers: Iterable[nn.Module], draws: NoiseDraws) -> Iterator[None]:
    """Adds noise to the inputs of some layers, until the block ends."""
    layers = list(layers)
    if draws.noise.signal not in (None, math.inf) and not layers:
        raise InputError(
            "signal noise enters before the nonlinearities, and this model has none that is a layer; use modules "
            "(nn.Tanh(), a ready cell) in place of functions, or name the layers"
        )

    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return draws.signal(arguments[0]), *arguments[1:]

    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def noise_sensitivity(
    weights: Tensor | Sequence[Tensor],
    injection: Tensor | Sequence[Tensor],
    xi: Tensor,
    eta: float = 1.0,
    *,
    activation: str | Activation = "tanh",
    kind: Kind = "additive",
    steps: int | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the last state and its derivative with respect to noise that is held fixed.

    States follow ``z <- phi(s + g xi)`` with ``s = W z + injection``; g is `eta` (additive, 004 eqs. 8 and 13) or
    ``eta |s|_2`` (multiplicative, eqs. 22 and 41). The derivative J follows
    ``J <- diag(phi') (W J + g I + xi (dg)')`` with ``(dg)' = eta s' W J / |s|_2``, which is eqs. 9, 11, 25 and 44;
    the closed forms (21), (31) and (40) of 004 move diagonal matrices past W and are something else.

    Args:
        weights: one matrix for all steps (an equilibrium model), or one for each (a feed-forward network).
        injection: what input and bias add to every step, ``(B, d)``, or one such tensor for each step. A
            feed-forward network whose input enters only by its first state (004 eqs. 10 and 32) has its biases
            here and the input as `start`.
        xi: the noise, ``(B, d)``.
        eta: its amplitude.
        steps: of an equilibrium model; as many as there are weights otherwise.
        start: the first state, zeros if None.

    Returns:
        the states ``(B, d)`` and the derivatives ``(B, d, d)``, one column for each entry of xi.
    """
    matrices = _matrices(weights, steps)
    function = get_activation(activation).function
    injections = [injection] * len(matrices) if isinstance(injection, Tensor) else list(injection)
    z = torch.zeros_like(xi) if start is None else start
    J = z.new_zeros(*z.shape, z.shape[1])
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    for W, added in zip(matrices, injections, strict=True):
        s = z @ W.mT + added
        moved = W @ J  # (B, d, d)
        if kind == "additive":
            total, moved = s + eta * xi, moved + eta * eye
        else:
            size = torch.linalg.vector_norm(s, dim=1, keepdim=True)
            gradient = eta * (s / size)[:, None, :] @ moved  # (B, 1, d)
            total, moved = s + eta * size * xi, moved + eta * size[:, :, None] * eye + xi[:, :, None] * gradient
        z, slope = jvp(function, (total,), (torch.ones_like(total),))[:2]
        J = slope[:, :, None] * moved
    return z, J


def sensitivity_norms(J: Tensor) -> Tensor:  # (B, d)
    """Returns ``|dz / dxi_i|_2`` for each entry of the noise, the quantity of 004 Figure 2b.

    Example:
        >>> sensitivity_norms(torch.eye(3)[None])
        tensor([[1., 1., 1.]])
    """
    return torch.linalg.vector_norm(J, dim=1)


def _matrices(weights: Tensor | Sequence[Tensor], steps: int | None) -> list[Tensor]:
    if isinstance(weights, Tensor):
        if steps is None or steps < 1:
            raise InputError(f"an equilibrium model needs a number of steps, at least 1; received {steps}")
        return [weights] * steps
    if steps is not None and steps != len(weights):
        raise InputError(f"a feed-forward network has one step a matrix: {len(weights)}; received {steps}")
    return list(weights)
