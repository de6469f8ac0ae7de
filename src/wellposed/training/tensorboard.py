"""Every epoch of a training run for TensorBoard."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, require
from wellposed.training.history import History

COLUMNS = ("train_loss", "validation_loss", "steps", "failed_share", "seconds")


@final
class TensorBoard:
    """Writes the numbers of every epoch as TensorBoard reads them; pass it to `fit` as `on_epoch`.

    Losses, steps to equilibrium, the share of failed solves and seconds come from the history; each member of an
    Ensemble has its own curves. A run that goes on from a checkpoint goes on in them. Extra: `tensorboard`.

    Args:
        folder: where the event file is written, one run each: ``tensorboard --logdir`` its parent compares them.
        numbers: more of them by name, each a function that is called after every epoch, an accuracy for instance.
        parameters: a module whose parameters and their gradients are drawn as histograms.
        every: epochs from one set of histograms to the next.

    Example:
        >>> import tempfile
        >>> from wellposed.training.loop import fit
        >>> model, u = nn.Linear(1, 1), torch.rand(8, 1)
        >>> with TensorBoard(tempfile.mkdtemp(), {"weight": lambda: model.weight.item()}) as board:
        ...     history = fit(model, (u, u), nn.functional.mse_loss, epochs=2, progress=False, on_epoch=board)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        numbers: Mapping[str, Callable[[], float]] | None = None,
        *,
        parameters: nn.Module | None = None,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1; received {every}")
        self.folder, self.numbers = os.fspath(folder), dict(numbers or {})
        taken = sorted(self.numbers.keys() & set(COLUMNS))
        if taken:
            raise InputError(f"these numbers are written anyway: {', '.join(taken)}; choose other names")
        self.parameters, self.every = parameters, every
        require("tensorboard", extra="plots")
        self._library = require("torch.utils.tensorboard", extra="plots")
        self._writer: Any = None

    def __call__(self, history: History) -> None:
        """Writes the latest epoch and flushes it to the disk."""
        epoch = len(history) - 1
        if self._writer is None:  # epochs from here on are written anew if a stopped run had got further
            self._writer = self._library.SummaryWriter(self.folder, purge_step=epoch)
        for name, value in self._scalars(history):
            self._writer.add_scalar(name, value, epoch)
        if self.parameters is not None and epoch % self.every == 0:
            for name, values in _histograms(self.parameters):
                self._writer.add_histogram(name, values, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; another call opens a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalars(self, history: History) -> Iterable[tuple[str, float]]:
        """Yields the numbers of an epoch by name; those that are NaN are left out."""
        for name in COLUMNS:
            latest = getattr(history, name)[-1]
            members = {name: latest} if latest.ndim == 0 else {f"{name}/{k}": v for k, v in enumerate(latest)}
            yield from ((tag, float(value)) for tag, value in members.items() if math.isfinite(value))
        yield from ((name, float(compute())) for name, compute in self.numbers.items())


def _histograms(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for tag, values in ((f"parameters/{name}", parameter), (f"gradients/{name}", parameter.grad)):
            if values is not None and values.numel() and torch.isfinite(values).all():
                yield tag, values.detach().float().cpu()
