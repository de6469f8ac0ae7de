"""Training with attacks as a program in which nothing depends on values, which a GPU replays as one graph a step.

A step of training asks a model twelve times, and through the library that is some 4,000 small kernels and 400
waits for the GPU. `FixedProgram` computes what a `Classifier` does with a third of the kernels and no
wait: always all steps, weights under weight norm once a pass, no checks. Its draws are those of the library where
both draw on a CPU. `FixedModel` is a trained classifier that answers by it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from wellposed.errors import NonFiniteLossError
from wellposed.robust.training import START_NOISE, Ramp, divergence
from wellposed.training.batches import Batches
from wellposed.training.checkpoint import Checkpoint
from wellposed_lab.experiments.adversarial.models import THRESHOLD, Classifier, ImageCell

WARM = 3  # steps before a graph is captured
POLISHED, DAMPING = 9, 0.5  # of `Polished`
TIGHT = 1e-3  # relative, of a solver that stops at random


@dataclass(frozen=True)
class Weights:
    """The weights of a classifier as its layers use them."""

    input: Tensor
    state: Tensor
    read: Tensor


class FixedProgram:
    """The forward pass of a classifier.

    Args:
        network: whose weights, noise and thresholds are used.
        thresholds: of the draws of a solver that stops at random.
    """

    def __init__(self, network: Classifier, thresholds: torch.Generator) -> None:
        self.network, self.thresholds = network, thresholds
        cell = network.cell if network.deq is None else network.deq.cell
        pooling, _, last = network.readout
        assert isinstance(cell, ImageCell) and cell.state.bias is not None and isinstance(last, nn.Linear)
        self.cell, self.pooling, self.last, self.bias = cell, pooling, last, cell.state.bias

    def weights(self) -> Weights:
        """Computes the weights once for several passes; kernels of convolutions by pixels, as GPUs want them."""
        layers = (self.cell.input.weight, self.cell.state.weight)
        image, state = (weight.contiguous(memory_format=torch.channels_last) for weight in layers)
        return Weights(image, state, self.last.weight)

    def __call__(self, weights: Weights, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        layer, defended = self.cell.input, self.network.defended
        given = self._disturbed(u) if defended.place == "input" else u
        added = conv2d(given, weights.input, layer.bias, layer.stride, layer.padding).relu()
        x = self._solved(weights, added) if defended.kind == "deq" else self._applied(weights, added)
        return nn.functional.linear(self.pooling(x).flatten(1), weights.read, self.last.bias)

    def _applied(self, weights: Weights, x: Tensor) -> Tensor:
        x = self._disturbed(x) if self.network.defended.place == "state" else x
        return torch.tanh(conv2d(x, weights.state, self.bias, padding=1))

    def _solved(self, weights: Weights, added: Tensor) -> Tensor:
        """Takes the steps of the solver without a gradient and the damped ones with it."""
        added = added + self.bias[:, None, None]
        with torch.no_grad():
            x = self._unrolled(weights, added)
        for _ in range(POLISHED):
            x = torch.lerp(x, self._step(weights, x, added), DAMPING)
        return x

    def _unrolled(self, weights: Weights, added: Tensor) -> Tensor:
        x = torch.zeros_like(added)
        if not self.network.defended.random:
            for _ in range(THRESHOLD):
                x = self._step(weights, x, added)
            if self.network.defended.place == "state":
                self._draw(x)  # of the residual after the last step
            return x
        place = self.thresholds.device
        last = torch.randint(1, THRESHOLD + 1, (len(x),), generator=self.thresholds, device=place).to(x.device)
        last = last[:, None, None, None]
        done = torch.zeros_like(last, dtype=torch.bool)
        for index in range(THRESHOLD):
            new = self._step(weights, x, added)
            size, change = (_sizes(part) for part in (new, new - x))
            done = done | (change <= TIGHT * size) | (index >= last)
            x = torch.where(done, x, new)
        return x

    def _step(self, weights: Weights, x: Tensor, added: Tensor) -> Tensor:
        x = self._disturbed(x) if self.network.defended.place == "state" else x
        return torch.tanh(conv2d(x, weights.state, padding=1) + added)

    def _disturbed(self, x: Tensor) -> Tensor:
        """Adds multiplicative noise, as `NoiseDraws` does."""
        scale = self.network.noise.scale(self.network.defended.decibels, math.prod(x.shape[1:]))
        return torch.addcmul(x, _sizes(x), self._draw(x), value=scale)

    def _draw(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.network.noise.generator, device=x.device)


class FixedModel(nn.Module):
    """A trained classifier that answers by a `FixedProgram`: the same answers and gradients by inputs.

    Args:
        network: trained; its weights are read now.
    """

    def __init__(self, network: Classifier) -> None:
        super().__init__()
        self.network, self.program = network, FixedProgram(network, torch.Generator())
        with torch.no_grad():
            self.weights = self.program.weights()

    def reseed(self, seed: int) -> None:
        """Begins the draws of noise and thresholds anew."""
        self.network.reseed(seed)
        self.program.thresholds.manual_seed(seed)

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        return self.program(self.weights, u)


def _sizes(x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, 1, 1, 1)
    return torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)


class AttackedStep:
    """A step of training on attacked images, as `AdversarialLoss` with `SignSteps`, or `TradesLoss`, takes it.

    Args:
        network: trained in place.
        steps: of the attack, each a third of the radius.
        weight: of the second term of TRADES.
        seed: of the starts of attacks, and of thresholds.
        rate: of Adam, with the largest second moments.
        size: of the batches, of which a GPU replays a step as a graph.
    """

    def __init__(self, network: Classifier, steps: int, weight: float, seed: int, rate: float, size: int) -> None:
        first = next(network.parameters())
        device, cuda = first.device, first.device.type == "cuda"
        self.network, self.steps, self.weight, self.size, self.cuda = network, steps, weight, size, cuda
        self.generator = torch.Generator(device).manual_seed(seed)
        self.program = FixedProgram(network, torch.Generator(device).manual_seed(seed))
        self.optimizer = torch.optim.Adam(
            network.parameters(),
            torch.tensor(rate, device=device) if cuda else rate,
            amsgrad=True,
            capturable=cuda,
        )
        self.radius, self.losses = torch.zeros((), device=device), torch.zeros((), device=device)
        self.batch: tuple[Tensor, Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0

    def __call__(self, u: Tensor, target: Tensor, radius: float) -> None:
        """Takes one step and adds its loss to `losses`."""
        self.radius.fill_(radius)
        if not self.cuda or len(u) != self.size:
            self._step(u, target)
            return
        if self.batch is None:
            self.batch = torch.empty_like(u), torch.empty_like(target)
        for old, new in zip(self.batch, (u, target), strict=True):
            old.copy_(new)
        if self.taken < WARM:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(*self.batch)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._replay(self.batch)
        self.taken += 1

    @property
    def generators(self) -> list[torch.Generator]:
        """All that draw in a step."""
        every = (self.generator, self.program.thresholds, self.network.noise.generator)
        return [generator for generator in every if generator is not None]

    def _replay(self, batch: tuple[Tensor, Tensor]) -> None:
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                self.graph.register_generator_state(generator)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph):
                self._step(*batch)
        self.graph.replay()

    def _step(self, u: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(u, target)
        loss.backward()
        self.optimizer.step()
        self.losses += loss.detach()

    def _loss(self, u: Tensor, target: Tensor) -> Tensor:
        trained_by, program = self.network.defended.trained_by, self.program
        if trained_by == "clean":
            return cross_entropy(program(program.weights(), u), target)
        with torch.no_grad():
            constant = program.weights()
        if trained_by == "pgd":
            if not self.cuda:
                with torch.no_grad():
                    program(constant, u)  # for its draws alone: the library asks for these predictions too
            start = torch.lerp(*self._ends(u), torch.rand(u.shape, generator=self.generator, device=u.device))
            attacked = self._climbed(u, start, lambda points: cross_entropy(program(constant, points), target))
            return cross_entropy(program(program.weights(), attacked), target)
        weights = program.weights()
        clean = program(weights, u)
        start = u + START_NOISE * torch.randn(u.shape, generator=self.generator, device=u.device)
        fixed = clean.detach()
        attacked = self._climbed(u, start, lambda points: divergence(fixed, program(constant, points)))
        return cross_entropy(clean, target) + self.weight * divergence(clean, program(weights, attacked))

    def _ends(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return (u - self.radius).clamp(min=0.0), (u + self.radius).clamp(max=1.0)

    def _climbed(self, u: Tensor, points: Tensor, raised: Callable[[Tensor], Tensor]) -> Tensor:
        """Takes the steps of an attack, each cut to the box around the images."""
        lower, upper = self._ends(u)
        points = torch.minimum(torch.maximum(points, lower), upper)
        for _ in range(self.steps):
            moving = points.requires_grad_()
            (slope,) = torch.autograd.grad(raised(moving), moving)
            points = points.detach() + self.radius / 3 * slope.sign()
            points = torch.minimum(torch.maximum(points, lower), upper)
        return points.detach()


@dataclass
class Trainer:
    """Trains a classifier in place, by a cosine over the epochs; a stopped one goes on from its last epoch.

    Args:
        step: of one batch.
        data: images and their classes.
        ramp: of the radius.
        epochs: how often all images are seen.
        seed: of their order.
        file: rewritten after every epoch; None: there is none.
    """

    step: AttackedStep
    data: tuple[Tensor, Tensor]
    ramp: Ramp
    epochs: int
    seed: int
    file: Checkpoint | None = None

    def train(self) -> list[float]:
        """Returns the mean loss of every epoch."""
        step, network, device = self.step, self.step.network.train(), self.step.radius.device
        batches = Batches((self.data[0].to(device), self.data[1].to(device)), step.size, [self.seed])
        schedule = CosineAnnealingLR(step.optimizer, self.epochs)
        known = None if self.file is None else self.file.load()
        history = [] if known is None else self._restore(known, schedule, batches)
        for epoch in range(len(history), self.epochs):
            step.losses.zero_()
            count = 0
            for batch in batches:
                step(batch.u, batch.y, self.ramp.next())
                count += 1
            schedule.step()
            history.append(float(step.losses) / count)
            if not math.isfinite(history[-1]):
                raise NonFiniteLossError(f"the loss is {history[-1]} in epoch {epoch}; lower the learning rate")
            if self.file is not None:
                self.file.save({
                    "network": network.state_dict(), "optimizer": step.optimizer.state_dict(),
                    "schedule": schedule.state_dict(), "taken": self.ramp.taken, "history": history,
                    "random": [generator.get_state() for generator in (*batches.generators, *step.generators)],
                })  # fmt: skip
        return history

    def _restore(self, known: dict[str, Any], schedule: CosineAnnealingLR, batches: Batches) -> list[float]:
        step, rate = self.step, self.step.optimizer.param_groups[0]["lr"]
        step.network.load_state_dict(known["network"])
        step.optimizer.load_state_dict(known["optimizer"])
        schedule.load_state_dict(known["schedule"])
        if isinstance(rate, Tensor):  # a graph reads the rate at its address on the device
            step.optimizer.param_groups[0]["lr"] = rate.copy_(step.optimizer.param_groups[0]["lr"])
        for generator, state in zip((*batches.generators, *step.generators), known["random"], strict=True):
            generator.set_state(state)
        self.ramp.taken = known["taken"]
        history: list[float] = known["history"]
        return history
