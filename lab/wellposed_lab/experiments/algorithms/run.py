"""Runs that learn an algorithm on small inputs and are tested on large ones, with and without noise in states.

`Joined` trains networks of one design as one: their convolutions over sequences become products of stacked
matrices (`StackedConvolution`). `AlgorithmRun` is the run.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium import watch
from wellposed.errors import InputError
from wellposed.models import Noise, path_independence
from wellposed.training import fit
from wellposed_lab.config import Training
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.experiments.algorithms.models import Design, Equilibrium, Layers, with_fixed_steps
from wellposed_lab.experiments.algorithms.picture import drawn_maze
from wellposed_lab.experiments.algorithms.tasks import Mazes
from wellposed_lab.tasks.task import Point, Task

Module = TypeVar("Module", bound=nn.Module)


class StackedConvolution(nn.Module):
    """Applies M convolutions, each to its own part of the batch: ``(M B, C, L) -> (M B, D, L)``.

    A few channels leave a processor idle; M of them in one product do less so.

    Example:
        >>> layers = [nn.Conv1d(2, 3, 3, padding=1) for _ in range(4)]
        >>> x = torch.randn(4, 5, 2, 7)
        >>> y = StackedConvolution(layers)(x.flatten(0, 1)).unflatten(0, (4, 5))
        >>> bool(torch.allclose(y[2], layers[2](x[2]), atol=1e-6))
        True
    """

    def __init__(self, layers: Sequence[nn.Conv1d]) -> None:
        super().__init__()
        size = layers[0].kernel_size[0]
        if any(layer.padding != (size // 2,) or layer.stride != (1,) or size % 2 == 0 for layer in layers):
            raise InputError(f"convolutions must keep the length of a sequence; received {layers[0]}")
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))  # (M, D, C, k)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes all of them."""
        members, size = self.weight.shape[0], self.weight.shape[3]
        parts = x.unflatten(0, (members, -1)).transpose(1, 2)  # (M, C, B, L)
        padded, length = F.pad(parts, (size // 2, size // 2)), x.shape[2]
        windows = torch.stack([padded[..., k : k + length] for k in range(size)], 2)  # (M, C, k, B, L)
        y = self.weight.flatten(2) @ windows.flatten(3).flatten(1, 2)
        y = y if self.bias is None else y + self.bias[:, :, None]
        return y.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)

    @torch.no_grad()
    def give_back(self, layers: Sequence[nn.Conv1d]) -> None:
        """Writes what was learnt into the convolutions."""
        for index, layer in enumerate(layers):
            layer.weight.copy_(self.weight[index])
            if layer.bias is not None and self.bias is not None:
                layer.bias.copy_(self.bias[index])


class Joined(nn.Module):
    """Runs networks that differ in their weights only as one, ``(B, M, ...) -> (B, M, ...)``.

    Each network sees the samples of its own column and is not influenced by the others.
    """

    def __init__(self, networks: Sequence[Module]) -> None:
        super().__init__()
        self.networks = tuple(networks)  # a tuple, so that their own weights are not trained
        self.inner = copy.deepcopy(networks[0])
        for name, layer in [*self.inner.named_modules()]:
            if isinstance(layer, nn.Conv1d):
                above, _, last = name.rpartition(".")
                setattr(self.inner.get_submodule(above), last, StackedConvolution(self._same(name)))

    def forward(self, u: Tensor) -> Tensor:
        """Computes the outputs of every network."""
        y: Tensor = self.inner(u.transpose(0, 1).flatten(0, 1))
        return y.unflatten(0, (len(self.networks), -1)).transpose(0, 1)

    def give_back(self) -> None:
        """Writes what was learnt into the networks."""
        for name, layer in self.inner.named_modules():
            if isinstance(layer, StackedConvolution):
                layer.give_back(self._same(name))

    def _same(self, name: str) -> list[nn.Conv1d]:
        found = [network.get_submodule(name) for network in self.networks]
        return [layer for layer in found if isinstance(layer, nn.Conv1d)]


PART = 400_000  # numbers of the inputs that are evaluated at once
Network = Equilibrium | Layers


@dataclass(frozen=True, kw_only=True)
class AlgorithmRun(Run):
    """Trains a model on an algorithmic task, perhaps under noise, and tests it on inputs of other sizes.

    The scores of the task are at every size, under the noise of the training; ``steps`` and ``settled`` (the share
    of solves that came to rest) too for an equilibrium without noise, and ``fixed_...`` is the first score if it
    takes no more steps than in training. Trained without noise, ``noisy_...`` is the first score on inputs of the
    training size under noise of so many decibels, and ``alignment`` and ``independent`` say whether solves from
    zero, from random states and from the equilibrium of another sample end at the same point (Anil et al. 2022).
    Networks of one convolution with few channels are trained side by side; their ``train_loss`` is the mean.

    Args:
        task: what to learn.
        design: the model.
        training: epochs, batch size and so on.
        noise: decibels in the state, in training and test; None for none.
        decibels: of the noise in tests of a model that was trained without.
        probed: sizes at which path independence is measured.
        starts: samples for that.
        shown: sizes of which a maze is kept with its answer, of the first seed.
    """

    task: Task
    design: Design
    training: Training
    noise: float | None = None
    decibels: tuple[float, ...] = (20.0, 10.0, 0.0)
    probed: tuple[Point, ...] = ()
    starts: int = 16
    shown: tuple[Point, ...] = ()
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, self.design.name + ("" if self.noise is None else f"-noise-{self.noise:g}db"), None

    @property
    def batch_seeds(self) -> bool:
        return self.design.form == "plain"  # else a single network already fills a processor

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed)
            models, losses = self._trained(runs, context)
            with torch.no_grad():
                return [run._result(model.eval(), losses) for run, model in zip(runs, models, strict=True)]

    def _trained(self, runs: Sequence[Self], context: Context) -> tuple[list[Network], list[float]]:
        """Trains the models of all runs, and returns them with the mean loss of every epoch."""
        models = [run.design.build(run.seed).to(context.device) for run in runs]
        if context.device != "cpu":  # convolutions of images by pixels, as GPUs want them
            models = [model.to(memory_format=torch.channels_last) for model in models]  # type: ignore[call-overload]
        network, count = (models[0], 1) if len(runs) == 1 else (Joined(models), len(runs))
        (network.inner if isinstance(network, Joined) else network).noise = self._noise(self.noise, context.device)
        data = [run.task.train(run.seed) for run in runs]
        joined = (torch.stack(part, 1) if count > 1 else part[0] for part in zip(*data, strict=True))
        u, y = (part.to(context.device) for part in joined)

        def loss(
            prediction: Tensor, target: Tensor
        ) -> Tensor:  # summed over the networks, so that each has its own
            return count * self.task.loss(prediction, target)

        history = fit(network, (u, y), loss, **self.training.arguments(), seed=self.seed, device=context.device,
                      checkpoint=context.checkpoint(runs),
                      progress=context.progress and ": ".join(self.labels[:2]))  # fmt: skip
        if isinstance(network, Joined):
            network.give_back()
        for run, model in zip(runs, models, strict=True):
            model.noise = run._noise(run.noise, context.device)
        return models, (history.train_loss / count).tolist()

    def _result(self, model: Network, losses: Sequence[float]) -> Result:
        series = {"train_loss": [float(f"{loss:.5g}") for loss in losses]}
        return Result(tuple(self._measured(model)), series, self._facts(model))

    def _noise(self, decibels: float | None, device: object) -> Noise | None:
        if decibels is None:
            return None
        return Noise(state=decibels, generator=torch.Generator(torch.device(str(device))).manual_seed(self.seed))

    def _measured(self, model: Network) -> list[Value]:
        values = [Value("parameters", float(sum(p.numel() for p in model.parameters())))]
        for at in self.task.points:
            values += self._tested(model, at)
        if self.noise is not None:
            return values
        values += self._under_noise(model)
        return values + (self._from_several_starts(model) if isinstance(model, Equilibrium) else [])

    def _tested(self, model: Network, at: Point) -> list[Value]:
        u, y = self.task.test(self.seed, at)
        with watch() as log:
            scores = self.task.score(predict(model, u), y)
        if isinstance(model, Equilibrium) and self.noise is None:
            first, growth = next(iter(scores)), model.growth
            scores |= {"steps": log.mean_steps, "settled": 1 - log.failed_share}
            scores[f"fixed_{first}"] = self.task.score(predict(with_fixed_steps(model), u), y)[first]
            model.growth = growth
        return [Value(name, score, at) for name, score in scores.items()]

    def _under_noise(self, model: Network) -> list[Value]:
        u, y = self.task.validation(self.seed)
        found = []
        for at in self.decibels:
            model.noise = self._noise(at, device_of(model))
            name, score = next(iter(self.task.score(predict(model, u), y).items()))
            found.append(Value(f"noisy_{name}", score, at))
        model.noise = None
        return found

    def _from_several_starts(self, model: Equilibrium) -> list[Value]:
        found = []
        for at in self.probed:
            u = self.task.test(self.seed, at)[0][: self.starts].to(device_of(model))
            generator = torch.Generator().manual_seed(self.seed)
            ends = path_independence(model, u, starts=2, generator=generator)
            found += [
                Value("alignment", float(ends.alignment.double().mean()), at),
                Value("independent", float(ends.independent.double().mean()), at),
            ]
        return found

    def _facts(self, model: Network) -> dict[str, Any]:
        """Keeps mazes with the answers to them."""
        if not isinstance(self.task, Mazes) or self.seed != 0:
            return {}
        kept = {}
        for at in self.shown:
            u, y = dataclasses.replace(self.task, test_samples=1).test(self.seed, at)
            kept[f"{at:g}"] = drawn_maze(u[0], y[0, 0], predict(model, u)[0, 0], self.task.pixels)
        return {"mazes": kept} if kept else {}


def device_of(model: nn.Module) -> torch.device:
    """Returns where the parameters of a model are."""
    return next(model.parameters()).device


@torch.no_grad()
def predict(model: nn.Module, u: Tensor) -> Tensor:
    """Computes the outputs part by part, and brings them to the CPU."""
    rows = max(1, PART // max(u[0].numel(), 1))
    return torch.cat([model(part.to(device_of(model))).cpu() for part in u.split(rows)])
