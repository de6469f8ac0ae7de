"""What a training run tells while it runs: a progress bar, and whoever wants to know of every epoch."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from wellposed.training.history import History

OnEpoch = Callable[[History], None]


@contextlib.contextmanager
def reporting(
    epochs: int, progress: bool | str, on_epoch: OnEpoch | None = None, silent: bool = False
) -> Iterator[OnEpoch]:
    """Shows epochs, loss, steps and failures on stderr, if that is a terminal that can, and calls `on_epoch`."""
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
    """Says where the latest epoch stands; of an Ensemble the median member.

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
