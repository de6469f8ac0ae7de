"""All widths or depths, strengths of noise and seeds of one half of the pairs of 004, as one tensor program."""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from wellposed.activations import get_activation
from wellposed.errors import InputError
from wellposed.models import DenseCell
from wellposed_lab.experiments.noise.models import Equilibrium, Pair
from wellposed_lab.experiments.noise.solve import attach, disturbed_tanh, solve_averaged, solve_plain, unrolled
from wellposed_lab.networks.twins import FeedForward, HiddenLayer

MULTIPLE = 16  # widths of padded states on a GPU, whose matrix units want round numbers

DRAWS = 5  # of the noise in the derivative of the mean map, each with its mirror image


@dataclass(frozen=True)
class Member:
    """One model of an ensemble: what it is, the noise of its training in decibels, and its seed."""

    pair: Pair
    noise: float | None
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What a pass of all members came to.

    Attributes:
        logits: ``(M, B, q)``.
        steps: of the solves, ``(M, B)``.
        penalty: the Jacobian penalty, ``(M,)``.
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
        self.penalised = False  # whether the Jacobian penalty is computed
        self.unrolled = False  # whether equilibria are differentiated through all steps
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
    """Equilibrium models of any widths; those that are trained without noise stand first."""

    @staticmethod
    def arranged(members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple(sorted(members, key=lambda member: member.noise is not None))

    def layers(self, model: nn.Module) -> list[list[nn.Linear]]:
        assert isinstance(model, Equilibrium) and isinstance(model.deq.cell, DenseCell)
        cell = model.deq.cell
        return [[cell.input], [layer for layer in cell.layers if isinstance(layer, nn.Linear)], [model.readout]]

    def forward(self, u: Tensor, noises: Noises, training: bool = False) -> Outcome:
        x = self.encode(u) + self.b[0]
        quiet = sum(at is None for at in noises.decibels) if training else 0
        parts = [range(quiet), range(quiet, len(self.members))]
        found = [self._part(part, x, noises, training) for part in parts if len(part)]
        states, steps, means = (torch.cat(pieces) for pieces in zip(*found, strict=True))
        penalty = self._penalty(x, states) if self.penalised else None
        averaged = None if training else self.readout(means)
        return Outcome(self.readout(states), steps, penalty, averaged)

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
            found = solve_plain(W.detach(), x.detach(), self.static)
        else:
            found = solve_averaged(W.detach(), x.detach(), amplitude, draw if noisy else None, self.static)
        if not torch.is_grad_enabled():
            return found.value, found.steps, found.mean
        noise = torch.stack([draw(None) for _ in range(DRAWS)]) if noisy else None
        both = None if noise is None else torch.cat([noise, -noise])  # mirrored, which makes their mean exact
        states = attach(W, x, found, amplitude, both, self.static)
        if noisy:  # one more step, whose noise the readout sees (004 eq. 5)
            states = disturbed_tanh(torch.baddbmm(x, states, W.mT), draw(None), amplitude)
        return states, found.steps, found.mean

    @staticmethod
    def _draw(part: range, batch: int, draws: Draws, done: Tensor | None) -> Tensor:
        busy = [True] * len(part) if done is None else (~done.all(1)).tolist()
        return draws(part, batch, busy)

    def _penalty(self, x: Tensor, states: Tensor) -> Tensor:  # (M,)
        """Returns the mean of ``|J|_F^2 / n``, J the Jacobian of the cell at its state, a constant."""
        W = self.W[0]
        return _squares(torch.tanh(torch.baddbmm(x, states.detach(), W.mT)), W, self.widths).mean(1)


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
        z = x = self.encode(u)
        injected, penalty = self.inject * x, x.new_zeros(len(self.members))
        for depth in range(self.members[0].pair.layers):
            W, b = (part[0 if self.members[0].pair.tied else depth] for part in (self.W, self.b))
            rows = slice(len(W))
            if self.penalised:
                constant = torch.baddbmm(b, z[rows].detach(), W.mT) + injected[rows]
                own = _squares(torch.tanh(constant), W, self.widths[rows]).mean(1)
                penalty = torch.cat([penalty[rows] + own, penalty[len(W) :]])
            s = self._disturbed(torch.baddbmm(b, z[rows], W.mT) + injected[rows], noises)
            z = torch.cat([torch.tanh(s), z[len(W) :]])
        return Outcome(self.readout(z), penalty=penalty if self.penalised else None)

    @staticmethod
    def _disturbed(s: Tensor, noises: Noises) -> Tensor:
        noisy = [at is not None for at in noises.decibels[: len(s)]]
        if not any(noisy):
            return s
        size = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        return s + noises.amplitude[: len(s)] * size * noises.draws(range(len(s)), s.shape[1], noisy)


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
