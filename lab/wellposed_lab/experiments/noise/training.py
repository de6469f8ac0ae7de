"""Training and testing of the ensembles of 004: every member as if it were alone, on a GPU by CUDA graphs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wellposed.training.checkpoint import Checkpoint
from wellposed_lab.config import Schedule
from wellposed_lab.experiments.noise.ensemble import Draws, Noises, Stack, make_stack

SAVED = 55  # seconds between checkpoints
WARM = 3  # steps before a graph is captured
PART = 500  # images that are tested at once
Progress = Callable[[str], None]
Loss = Callable[[Tensor, Tensor], Tensor]  # from outputs (M, B, q) and targets of all members to losses (M,)


def entropies(logits: Tensor, labels: Tensor) -> Tensor:  # (M, B, q), (M, B) -> (M,)
    """Returns the mean cross-entropy of every member."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.reshape(labels.shape).mean(1)


def orders(seeds: Sequence[int], total: int, schedule: Schedule) -> "list[Order]":
    """Returns the data order of every member; members of one seed share it."""
    known = {seed: Order(seed, total, schedule.images) for seed in seeds}
    return [known[seed] for seed in seeds]


class Order:
    """The images of one seed, every epoch in another order; as `fit` takes them."""

    def __init__(self, seed: int, total: int, images: int) -> None:
        self.rows = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:images]
        self.generator, self.epoch, self.drawn = torch.Generator().manual_seed(seed), -1, self.rows

    def of(self, epoch: int) -> Tensor:  # (N,)
        """Returns the rows of an epoch; epochs are asked for one after another."""
        if epoch != self.epoch:
            self.drawn = self.rows[torch.randperm(len(self.rows), generator=self.generator)]
            self.epoch = epoch
        return self.drawn


class Trainer:
    """Takes steps with all members, on a GPU by replaying a graph of the whole step.

    Args:
        stack: the ensemble, trained in place.
        u, targets: all images and classes, or all samples of a regression, on the device.
        schedule: how.
        loss: of every member.
    """

    def __init__(
        self, stack: Stack, u: Tensor, targets: Tensor, schedule: Schedule, loss: Loss = entropies
    ) -> None:
        self.stack, self.u, self.targets, self.schedule, self.loss = stack, u, targets, schedule, loss
        cuda = u.device.type == "cuda"
        self.noises = Noises([m.noise for m in stack.members], Draws(stack.members, u.device, stack.size))
        self.optimizer = torch.optim.Adam(stack.parameters(), schedule.learning_rate, fused=cuda, capturable=cuda)
        self.losses = torch.zeros(len(stack.members), device=u.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rows = torch.zeros(len(stack.members), schedule.batch_size, dtype=torch.int64, device=u.device)
        self.taken = 0
        stack.static = cuda

    def step(self, rows: Tensor) -> None:
        """Takes one step on the images of every member, ``(M, B)``."""
        if self.u.device.type != "cuda" or rows.shape != self.rows.shape:
            self._step(rows)
            return
        self.rows.copy_(rows)
        if self.taken < WARM:
            self._apart()
        elif self.graph is None:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        self.taken += 1

    def _step(self, rows: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        found = self.stack(self.u[rows], self.noises, training=True)
        losses = self.loss(found.logits, self.targets[rows])
        total = losses if found.penalty is None else losses + found.penalty
        total.sum().backward()
        self.optimizer.step()
        self.losses += losses.detach()

    @property
    def state(self) -> dict[str, Any]:
        """All that decides how training goes on, but for the order of the data."""
        draws = [generator.get_state() for generator in self.noises.draws.generators]
        return {"weights": self.stack.state_dict(), "adam": self.optimizer.state_dict()["state"], "draws": draws}

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from such a state; before the first step."""
        self.stack.load_state_dict(state["weights"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["adam"], "param_groups": groups})
        for generator, draws in zip(self.noises.draws.generators, state["draws"], strict=True):
            generator.set_state(draws.cpu())

    def _apart(self) -> None:
        """Takes a step on another stream, as capturing wants it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(self.rows)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        for generator in self.noises.draws.generators:
            self.graph.register_generator_state(generator)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self._step(self.rows)


@contextlib.contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Lets matrix products on a GPU round to TF32, whose 11 bits are finer than the tolerances of the solves.

    Example:
        >>> with fast_products(torch.device("cpu")):
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def train(
    stack: Stack,
    u: Tensor,
    targets: Tensor,
    schedule: Schedule,
    tell: Progress = lambda text: None,
    *,
    loss: Loss = entropies,
    own: "Sequence[Order] | None" = None,
    exact: bool = False,
    file: Checkpoint | None = None,
) -> Tensor:
    """Trains all members in place and returns their mean losses, ``(epochs, M)``.

    Args:
        stack, u, targets, schedule, loss: as for `Trainer`.
        tell: is told how an epoch went.
        own: the order of every member; that of its seed if None.
        exact: whether products on a GPU are not rounded to TF32.
        file: where the state is kept once a minute, and from where training goes on.
    """
    own = orders([member.seed for member in stack.members], len(u), schedule) if own is None else own
    trainer, state = Trainer(stack, u, targets, schedule, loss), None if file is None else file.load()
    history: list[Tensor] = []
    if state is not None:
        trainer.resume(state)
        history = list(state["history"])
    saved = time.perf_counter()
    with contextlib.nullcontext() if exact else fast_products(u.device):
        for epoch in range(schedule.epochs):
            drawn, began = torch.stack([order.of(epoch) for order in own]), time.perf_counter()
            if epoch < len(history):
                continue
            history.append(_epoch(trainer, drawn.to(u.device)))
            mean, now = float(history[-1].mean()), time.perf_counter()
            tell(f"epoch {epoch + 1}: mean loss {mean:.4f}, {now - began:.1f} s")
            if file is not None and now - saved > SAVED and len(history) < schedule.epochs:
                file.save({**trainer.state, "history": history})
                saved = time.perf_counter()
    stack.static = False
    return torch.stack(history)


def _epoch(trainer: Trainer, drawn: Tensor) -> Tensor:  # (M,), from (M, N)
    """Takes the steps of an epoch on the images of every member; returns their mean losses."""
    batches = drawn.split(trainer.schedule.batch_size, dim=1)
    for rows in batches:
        trainer.step(rows)
    losses = (trainer.losses / len(batches)).cpu()
    trainer.losses.zero_()
    return losses


@dataclass(frozen=True)
class Score:
    """What a test found, one entry a member; `averaged` is the accuracy of the mean over the last iterates."""

    accuracy: Tensor
    steps: Tensor | None
    averaged: Tensor | None


@torch.no_grad()
def score(stack: Stack, u: Tensor, labels: Tensor, decibels: float | None, passes: int = 1) -> Score:
    """Tests all members under noise of one strength; of several passes the mean of the probabilities decides."""
    noises = Noises([decibels] * len(stack.members), Draws(stack.members, u.device, stack.size))
    right, averaged, taken = [], [], []
    for part, target in zip(u.split(PART), labels.split(PART), strict=True):
        with fast_products(u.device):
            found = [stack(part, noises) for _ in range(passes)]
        logits = torch.stack([one.logits.softmax(-1) for one in found]).mean(0)
        right.append((logits.argmax(-1) == target).sum(1))
        if found[0].steps is not None:
            averaged.append((found[0].averaged.argmax(-1) == target).sum(1))
            taken.append(found[0].steps.double().mean(1))
    steps = torch.stack(taken).mean(0).cpu() if taken else None
    return Score(_share(right, len(u)), steps, _share(averaged, len(u)) if averaged else None)


def _share(counts: list[Tensor], total: int) -> Tensor:
    return (torch.stack(counts).sum(0) / total).cpu()


def chosen(stack: Stack, places: Sequence[int]) -> Stack:
    """Returns an ensemble of some members of another one."""
    device = stack.V.device.type
    members = [stack.members[place] for place in places]
    smaller = make_stack(members, stack.inputs, stack.outputs, device)
    where = {member: place for place, member in zip(places, members, strict=True)}
    smaller.stack([stack.member(where[member]) for member in smaller.members])
    return smaller.to(device)
