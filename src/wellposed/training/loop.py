"""fit(): the training loop.

`reporting` shows a progress bar and calls `on_epoch`.
`fit` trains a module or an Ensemble.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wellposed.equilibrium.method import watch
from wellposed.models.warm_start import WarmStart
from wellposed.training.batches import Batches, Data
from wellposed.training.checkpoint import Checkpoint, Snapshot
from wellposed.training.history import History, Interrupted, solve_counts
from wellposed.training.run import (
    EarlyStopping,
    Loss,
    Run,
    check_arguments,
    make_optimizer,
    make_schedule,
    make_starts,
    seeds_of,
    shape_of,
)
from wellposed.training.team import Team, unwrap

OnEpoch = Callable[[History], None]


@contextlib.contextmanager
def reporting(
    epochs: int, progress: bool | str, on_epoch: OnEpoch | None = None, silent: bool = False
) -> Iterator[OnEpoch]:
    """Shows epochs, loss, steps and failures on stderr if it is a terminal, and calls `on_epoch`."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
        disable=silent or not (progress and console.is_interactive),
    )
    with bar:
        task = bar.add_task(progress if isinstance(progress, str) else "training", total=epochs, numbers="")

        def report(history: History) -> None:
            bar.update(task, completed=len(history), numbers=summary(history))
            if on_epoch is not None and not silent:
                on_epoch(history)

        yield report


def summary(history: History) -> str:
    """Summarises the latest epoch in a line; for an Ensemble, its median member.

    Example:
        >>> import torch
        >>> history = History()
        >>> loss, steps, share = torch.tensor([0.25, 7.0, 0.0])
        >>> history.append(train_loss=loss, steps=steps, failed_share=share)
        >>> summary(history)
        'loss 0.25, 7.0 steps, 0.0 % not converged'
    """
    text = f"loss {_median(history.train_loss):.3g}"
    validation, steps = _median(history.validation_loss), _median(history.steps)
    if validation == validation:
        text += f", validation {validation:.3g}"
    if steps == steps:
        share = 100 * float(history.failed_share[-1].nan_to_num().max())
        text += f", {steps:.1f} steps, {share:.1f} % not converged"
    return text


def _median(column: Tensor) -> float:
    return float(column[-1].nanmedian())


def fit(
    model: nn.Module,
    data: Data,
    loss: Loss,
    *,
    epochs: int,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    schedule: Literal["cosine"] | Callable[[Optimizer], LRScheduler] | None = None,
    batch_size: int | None = 128,
    validation: Data | None = None,
    patience: int | None = None,
    clip: float | None = None,
    project: bool = False,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    seed: int | Sequence[int] | None = None,
    per_member: bool = False,
    progress: bool | str = True,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    warm_start: bool | WarmStart = False,
    on_epoch: OnEpoch | None = None,
) -> History:
    """Trains a module or an Ensemble in place and returns the numbers of every epoch.

    Under torchrun processes share every batch, as if one had it all. Ctrl-C raises `Interrupted` with the history.

    Args:
        data, validation: ``(inputs, targets)``, a Dataset of such pairs, or an iterable of batches.
        loss: maps predictions and targets to the mean over the samples; of an Ensemble, one member's.
        optimizer: an instance, or a function of the parameters; Adam with lr 1e-2 by default.
        schedule: ``"cosine"`` (to zero) or a function of the optimizer; it advances once an epoch.
        patience: epochs without a better validation loss after which the best parameters come back.
        clip: largest gradient norm, of an Ensemble each member's.
        project: whether to call ``model.project_()`` after every step.
        autocast: dtype of the forward pass, e.g. ``torch.bfloat16``.
        seed: of the data order, or one for each member; 0, or the seeds of the Ensemble, by default.
        per_member: whether the tensors of data and validation hold one data set for each member, (M, N, ...).
        progress: whether to show a bar, or its label.
        checkpoint: a file, rewritten after every epoch, from which a stopped run goes on; see `Checkpoint`.
        warm_start: whether every training sample begins its solve at its last equilibrium; see `WarmStart`.
        on_epoch: called with the history after every epoch (by the first process alone); e.g. a `TensorBoard`.

    Example:
        >>> u = torch.linspace(-1, 1, 64)[:, None]
        >>> fit(nn.Linear(1, 1), (u, 2 * u), nn.functional.mse_loss, epochs=5, progress=False).train_loss.argmin()
        tensor(4)
    """
    team, inner = Team.join(model, device), unwrap(model)
    given = {"epochs": epochs, "batch_size": batch_size, "patience": patience, "clip": clip}
    check_arguments(inner, given, validation is not None, project, per_member)
    optimizer = make_optimizer(unwrap(model.to(team.device)), optimizer)
    scaler = torch.amp.GradScaler(team.device.type, enabled=autocast is torch.float16)
    batches = Batches(data, batch_size, seeds_of(inner, seed), per_member)
    starts = make_starts(inner, warm_start, batches.length)
    run = Run(team.wrap(model), loss, optimizer, team, scaler, clip, project, autocast, starts)
    checks = None if validation is None else Batches(validation, batch_size, (), per_member)
    best = EarlyStopping(inner, patience, torch.ones(shape_of(model), dtype=torch.bool))
    snapshot = Snapshot(run, batches, make_schedule(optimizer, schedule, epochs), best, History())
    with reporting(epochs, progress, on_epoch, silent=team.rank > 0) as report:
        return _train(snapshot, checks, epochs, snapshot.resume(checkpoint), report)


def _train(
    snapshot: Snapshot,
    checks: Batches | None,
    epochs: int,
    file: Checkpoint | None,
    report: OnEpoch,
) -> History:
    run, best, history, was_training = snapshot.run, snapshot.best, snapshot.history, snapshot.run.model.training
    try:
        for epoch in range(len(history), epochs):
            if not best.active.any():
                break
            began, active = time.perf_counter(), best.active
            with watch() as log:
                columns = {"train_loss": run.train(snapshot.batches, epoch, active)}
            steps, samples, failures, solves = run.team.sum(solve_counts(log, active.shape))
            columns |= {"steps": steps / samples, "failed_share": failures / solves}
            if checks is not None:
                columns["validation_loss"] = run.evaluate(checks)
                best.update(epoch, columns["validation_loss"])
            columns = {name: column.masked_fill(~active, torch.nan) for name, column in columns.items()}
            if snapshot.schedule is not None:
                snapshot.schedule.step()
            history.append(**columns, seconds=torch.tensor(time.perf_counter() - began))
            if file is not None and run.team.rank == 0:
                file.save(snapshot.take())
            report(history)
    except KeyboardInterrupt as stop:
        raise Interrupted(history) from stop
    finally:
        best.restore()
        history.best_epoch = best.epoch if best.patience is not None else None
        run.model.train(was_training)
    return history
