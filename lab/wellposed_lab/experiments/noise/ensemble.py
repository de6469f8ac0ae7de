"""All widths or depths, strengths of noise and seeds of one half of the pairs of 004, as one tensor program."""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from wellposed.activations import get_activation
from wellposed.errors import InputError
from wellposed.models import DenseCell
from wellposed_lab.experiments.noise.models import STEPS, Equilibrium, Pair
from wellposed_lab.experiments.noise.solve import (
    attach,
    compiled,
    disturbed_tanh,
    solve_at_once,
    solve_averaged,
    solve_plain,
    unrolled,
)
from wellposed_lab.networks.twins import FeedForward, HiddenLayer

MULTIPLE = 16  # widths of padded states on a GPU, whose matrix units want round numbers

DRAWS = 5  # of the noise in the derivative of the mean map, each with its mirror image


@dataclass(frozen=True)
class Member:
    """One model of an ensemble.

    Args:
        pair: what it is.
        noise: decibels of the noise of its training; None for none.
        seed: of its start, data order and noise.
        jacobian: weight of the Jacobian penalty in its training.
    """

    pair: Pair
    noise: float | None
    seed: int
    jacobian: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a pass of all members came to.

    Attributes:
        logits: ``(M, B, q)``.
        steps: of the solves, ``(M, B)``.
        penalty: the Jacobian penalty by its weight, ``(M,)``, in training.
        averaged: the logits of the mean over the last iterates.
    """

    logits: Tensor
    steps: Tensor | None = None
    penalty: Tensor | None = None
    averaged: Tensor | None = None


class Draws:
    """Normal numbers for every member, from a generator of its own; on a GPU from one for all of them.

    A member draws as if it were alone: for its own width, and until the last of its samples is done. On a GPU
    states that are filled up get draws too, which `Noises` gives no weight.
    """

    def __init__(self, members: Sequence[Member], device: torch.device, size: int) -> None:
        self.widths = [member.pair.width for member in members]
        own = [torch.Generator(device).manual_seed(member.seed) for member in members]
        self.generators, self.device, self.size = own if device.type == "cpu" else own[:1], device, size
        self.mask = torch.stack([torch.arange(size) < width for width in self.widths])[:, None].to(device)

    def many(self, count: int, batch: int) -> Tensor:  # (count, M, B, n)
        """Draws for all members, many times."""
        if self.device.type == "cpu":
            everyone = [True] * len(self.widths)
            return torch.stack([self(range(len(self.widths)), batch, everyone) for _ in range(count)])
        shape = count, len(self.widths), batch, self.size
        return torch.randn(shape, generator=self.generators[0], device=self.device)

    def __call__(self, members: range, batch: int, busy: Sequence[bool]) -> Tensor:  # (M', B, n)
        """Draws for some members; those that are not busy get zeros where each has its own generator."""
        if self.device.type != "cpu":
            shape = len(members), batch, self.size
            return torch.randn(shape, generator=self.generators[0], device=self.device)
        drawn = torch.zeros(len(members), batch, self.size)
        for place, index in enumerate(members):
            if busy[place] and self.widths[index] == self.size:
                drawn[place].normal_(generator=self.generators[index])
            elif busy[place]:
                width = self.widths[index]
                drawn[place, :, :width] = torch.randn(batch, width, generator=self.generators[index])
        return drawn


class Noises:
    """The noise of some passes.

    Args:
        decibels: of every member; None for none.
        draws: where it is drawn.

    Attributes:
        amplitude: its standard deviation for a signal of norm one, ``(M, 1, n)``, and zero where states are
            filled up.
    """

    def __init__(self, decibels: Sequence[float | None], draws: Draws) -> None:
        self.decibels, self.draws = tuple(decibels), draws
        pairs = zip(decibels, draws.widths, strict=True)
        values = [0.0 if at is None else 10 ** (-at / 20) / math.sqrt(width) for at, width in pairs]
        self.amplitude = torch.tensor(values, device=draws.device)[:, None, None] * draws.mask


class Stack(nn.Module, abc.ABC):
    """Networks of one kind side by side: weights ``(M, ...)``, narrow ones filled up with zeros, which stay.

    Args:
        members: the models, in the order of `arranged`.
        inputs, outputs: sizes.
        size: width of the states, at least that of the widest member.
    """

    widths: Tensor
    jacobian: Tensor
    inject: Tensor
    biased: Tensor
    projected: Tensor

    def __init__(self, members: Sequence[Member], inputs: int, outputs: int, size: int | None = None) -> None:
        super().__init__()
        if not members:
            raise InputError("an ensemble needs at least one member; received none")
        self.members, self.inputs, self.outputs = self.arranged(members), inputs, outputs
        self.size = max(member.pair.width for member in members) if size is None else size
        self.static = False  # whether a pass looks at no values, for CUDA graphs
        self.unrolled = False  # whether equilibria are differentiated through all steps
        self.penalised = max((place + 1 for place, m in enumerate(self.members) if m.jacobian), default=0)
        self.register_buffer("jacobian", torch.tensor([m.jacobian for m in self.members]))
        self.register_buffer("widths", torch.tensor([[float(m.pair.width)] for m in self.members]))  # (M, 1)
        self.register_buffer("inject", torch.tensor([[[float(m.pair.inject)]] for m in self.members]))
        self.kinds = sorted({member.pair.projection for member in self.members})
        projected = [[[self.kinds.index(member.pair.projection)]] for member in self.members]
        self.register_buffer("projected", torch.tensor(projected))
        self.stack([member.pair.build(inputs, outputs, member.seed) for member in self.members])

    @staticmethod
    @abc.abstractmethod
    def arranged(members: Sequence[Member]) -> tuple[Member, ...]:
        """Returns the members in the order in which they are stacked."""

    @abc.abstractmethod
    def layers(self, model: nn.Module) -> list[list[nn.Linear]]:
        """Returns the layers of a member: those of projection, hidden part and readout."""

    @abc.abstractmethod
    def forward(self, u: Tensor, noises: Noises, training: bool = False) -> Outcome:
        """Computes the logits, of inputs for each member, ``(M, B, p)``, or for all, ``(B, p)``."""

    def stack(self, models: Sequence[nn.Module]) -> None:
        """Copies the weights of modules."""
        first, hidden, last = zip(*(self.layers(model) for model in models), strict=True)
        self.V = nn.Parameter(_filled([part[0].weight for part in first], self.size, self.inputs))
        biases = [part[0].bias for part in first]  # a cell whose projection is the identity has none beside b
        self.c = nn.Parameter(_filled([torch.zeros(1, 0) if c is None else c[None] for c in biases], 1, self.size))
        self.register_buffer("biased", torch.tensor([[[float(c is not None)]] for c in biases]))
        depth = max(len(part) for part in hidden)
        deep = [[part[k] for part in hidden if len(part) > k] for k in range(depth)]
        square = (self.size, self.size)
        self.W = nn.ParameterList(_filled([layer.weight for layer in row], *square) for row in deep)
        self.b = nn.ParameterList(_filled([layer.bias[None] for layer in row], 1, self.size) for row in deep)
        self.C = nn.Parameter(_filled([part[0].weight for part in last], self.outputs, self.size))
        self.e = nn.Parameter(_filled([part[0].bias[None] for part in last], 1, self.outputs))

    @torch.no_grad()
    def member(self, index: int) -> nn.Module:
        """Returns a member as a module of its own, on the CPU."""
        one = self.members[index]
        model = one.pair.build(self.inputs, self.outputs, one.seed)
        first, hidden, last = self.layers(model)
        weights = [(self.V, self.c), *zip(self.W, self.b, strict=True)][: 1 + len(hidden)]
        for layer, (weight, bias) in zip([*first, *hidden, *last], [*weights, (self.C, self.e)], strict=True):
            rows, columns = layer.weight.shape
            layer.weight.copy_(weight[index, :rows, :columns])
            if layer.bias is not None:
                layer.bias.copy_(bias[index, 0, :rows])
        return model.eval()

    def encode(self, u: Tensor) -> Tensor:  # (M, B, p) or (B, p) -> (M, B, n)
        """Computes the projected input."""
        s = u @ self.V.mT + self.biased * self.c
        first, *others = self.kinds
        x = get_activation(first).function(s)
        for index, kind in enumerate(others, start=1):
            x = torch.where(self.projected == index, get_activation(kind).function(s), x)
        return x

    def readout(self, z: Tensor) -> Tensor:  # (M, B, n) -> (M, B, q)
        """Computes the logits."""
        return torch.baddbmm(self.e, z, self.C.mT)


class EquilibriumStack(Stack):
    """Equilibrium models of any widths; the penalised stand first, and all without noise before the others."""

    @staticmethod
    def arranged(members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple(sorted(members, key=lambda member: (member.noise is not None, not member.jacobian)))

    def layers(self, model: nn.Module) -> list[list[nn.Linear]]:
        assert isinstance(model, Equilibrium) and isinstance(model.deq.cell, DenseCell)
        cell = model.deq.cell
        return [[cell.input], [layer for layer in cell.layers if isinstance(layer, nn.Linear)], [model.readout]]

    def forward(self, u: Tensor, noises: Noises, training: bool = False) -> Outcome:
        x = self.encode(u) + self.b[0]
        if training and self.static and not self.unrolled:
            return self._at_once(x, noises)
        quiet = sum(at is None for at in noises.decibels) if training else 0
        parts = [range(quiet), range(quiet, len(self.members))]
        found = [self._part(part, x, noises, training) for part in parts if len(part)]
        states, steps, means = (torch.cat(pieces) for pieces in zip(*found, strict=True))
        penalty = self._penalty(x, states) if training and self.penalised else None
        averaged = None if training else self.readout(means)
        return Outcome(self.readout(states), steps, penalty, averaged)

    def _at_once(self, x: Tensor, noises: Noises) -> Outcome:
        """Solves for all members in one program, as `_part` does for those of one rule."""
        W, amplitude = self.W[0], noises.amplitude
        noise = noises.draws.many(STEPS + DRAWS + 1, x.shape[1])
        found = solve_at_once(W.detach(), x.detach(), amplitude, noise)
        states = attach(W, x, found, amplitude, noise[STEPS:-1], static=True)
        last = compiled(disturbed_tanh, True)(torch.baddbmm(x, states, W.mT), noise[-1], amplitude)
        states = torch.where((amplitude > 0).any(-1, keepdim=True), last, states)
        penalty = self._penalty(x, states) if self.penalised else None
        return Outcome(self.readout(states), found.steps, penalty)

    def _part(self, part: range, x: Tensor, noises: Noises, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Solves for members that stop by the same rule."""
        rows = slice(part.start, part.stop)
        W, x, amplitude = self.W[0][rows], x[rows], noises.amplitude[rows]
        noisy = any(at is not None for at in noises.decibels[rows])
        draw = partial(self._draw, part, x.shape[1], noises.draws)
        if training and not noisy and self.unrolled:
            states, steps = unrolled(W, x, self.static)
            return states, steps, states
        if training and not noisy:
            found = solve_plain(W.detach(), x.detach())
        else:
            found = solve_averaged(W.detach(), x.detach(), amplitude, draw if noisy else None)
        if not torch.is_grad_enabled():
            return found.value, found.steps, found.mean
        noise = torch.stack([draw(None) for _ in range(DRAWS)]) if noisy else None
        states = attach(W, x, found, amplitude, noise)
        if noisy:  # one more step, whose noise the readout sees (004 eq. 5)
            states = disturbed_tanh(torch.baddbmm(x, states, W.mT), draw(None), amplitude)
        return states, found.steps, found.mean

    @staticmethod
    def _draw(part: range, batch: int, draws: Draws, done: Tensor | None) -> Tensor:
        busy = [True] * len(part) if done is None else (~done.all(1)).tolist()
        return draws(part, batch, busy)

    def _penalty(self, x: Tensor, states: Tensor) -> Tensor:  # (M,)
        """Returns the mean of ``|J|_F^2 / n`` by its weight; J is that of the cell at its state, a constant."""
        rows = slice(self.penalised)
        W, z = self.W[0][rows], states[rows].detach()
        own = _squares(torch.tanh(torch.baddbmm(x[rows], z, W.mT)), W, self.widths[rows]).mean(1)
        return pad(self.jacobian[rows] * own, (0, len(states) - self.penalised))


class FeedForwardStack(Stack):
    """Feed-forward networks of one width and any depths, the deepest first; of tied ones, of one depth."""

    @staticmethod
    def arranged(members: Sequence[Member]) -> tuple[Member, ...]:
        if len({(member.pair.width, member.pair.tied) for member in members}) > 1:
            raise InputError("feed-forward networks of an ensemble must have one width, and all or none be tied")
        if members[0].pair.tied and len({member.pair.layers for member in members}) > 1:
            raise InputError("tied networks of an ensemble must have one depth")
        return tuple(sorted(members, key=lambda member: -member.pair.layers))

    def layers(self, model: nn.Module) -> list[list[nn.Linear]]:
        assert isinstance(model, FeedForward)
        hidden = [layer.linear for layer in model.layers if isinstance(layer, HiddenLayer)]
        return [[model.projection], hidden[:1] if self.members[0].pair.tied else hidden, [model.readout]]

    def forward(self, u: Tensor, noises: Noises, training: bool = False) -> Outcome:
        fixed = training and self.static
        noisy = fixed and any(at is not None for at in noises.decibels)
        drawn = noises.draws.many(self.members[0].pair.layers, u.shape[-2]) if noisy else None
        passed = compiled(self._passed, True) if fixed else self._passed
        z, penalty = passed(u, noises, drawn, training)
        return Outcome(self.readout(z), penalty=penalty)

    def _passed(
        self, u: Tensor, noises: Noises, drawn: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the states of the last layers and the penalty; without draws it makes them."""
        z = x = self.encode(u)
        injected, penalty, ended = self.inject * x, None, []
        for depth in range(self.members[0].pair.layers):
            W, b = (part[0 if self.members[0].pair.tied else depth] for part in (self.W, self.b))
            if len(W) < len(z):  # those of fewer layers are through
                ended.append(z[len(W) :])
                z, injected = z[: len(W)], injected[: len(W)]
            if training and self.penalised:
                own = self._penalty(z, W, b + injected)
                penalty = own if penalty is None else penalty + own
            s = z @ W.mT + (b + injected)
            if drawn is None:
                s = self._disturbed(s, noises)
            else:
                s = torch.addcmul(s, drawn[depth, : len(s)], noises.amplitude[: len(s)] * _norm(s))
            z = torch.tanh(s)
        return torch.cat([z, *reversed(ended)]), penalty

    def _penalty(self, z: Tensor, W: Tensor, added: Tensor) -> Tensor:  # (M,)
        """Returns the mean of ``|J|_F^2 / n`` of a layer by its weight; J is at the states, constants."""
        rows = slice(min(self.penalised, len(W)))
        constant = z[rows].detach() @ W[rows].mT + added[rows]
        own = self.jacobian[rows] * _squares(torch.tanh(constant), W[rows], self.widths[rows]).mean(1)
        return pad(own, (0, len(self.members) - len(own)))

    @staticmethod
    def _disturbed(s: Tensor, noises: Noises) -> Tensor:
        noisy = [at is not None for at in noises.decibels[: len(s)]]
        if not any(noisy):
            return s
        return s + noises.amplitude[: len(s)] * _norm(s) * noises.draws(range(len(s)), s.shape[1], noisy)


def _norm(s: Tensor) -> Tensor:  # (..., n) -> (..., 1)
    return torch.linalg.vector_norm(s, dim=-1, keepdim=True)


def _squares(y: Tensor, W: Tensor, widths: Tensor) -> Tensor:  # (M, B)
    """Returns ``|diag(1 - y^2) W|_F^2 / n`` for each sample."""
    return ((1 - y.square()).square() @ W.square().sum(2)[..., None])[..., 0] / widths


def _filled(parts: Sequence[Tensor], rows: int, columns: int) -> Tensor:  # (M, rows, columns)
    """Stacks matrices, filling up with zeros."""
    filled = torch.zeros(len(parts), rows, columns)
    for place, part in zip(filled, parts, strict=True):
        place[: part.shape[0], : part.shape[1]] = part.detach()
    return filled


def make_stack(members: Sequence[Member], inputs: int, outputs: int, device: str) -> Stack:
    """Returns the ensemble of some members of one kind, on a device."""
    kinds: dict[str, Callable[..., Stack]] = {"deq": EquilibriumStack, "ffw": FeedForwardStack}
    size = None
    if device != "cpu":
        size = MULTIPLE * math.ceil(max(member.pair.width for member in members) / MULTIPLE)
    return kinds[members[0].pair.kind](members, inputs, outputs, size).to(device)
