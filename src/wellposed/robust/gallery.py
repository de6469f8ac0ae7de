"""Clean and attacked inputs side by side, with their difference and what the model says (003 Figures 4.5-4.7)."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError, require
from wellposed.robust.attacks.attack import Attack, Model

INK, RED, QUIET = "#1c2530", "#c2410c", "#5b6168"
PER_ROW = 8


def gallery(
    model: Model,
    clean: Tensor,
    attack: Attack,
    target: Tensor,  # (B,)
    path: str | os.PathLike[str] | None = None,
    *,
    count: int = PER_ROW,
    classes: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Draws clean inputs, attacked ones, and their difference, with the class that the model gives above each.

    Samples that the attack changed come first, of those the ones that were right before. The difference is shown
    on its own scale, which is printed; red raises and blue lowers a pixel. Inputs that are no images are drawn as
    squares if their length is that of one, else as strips.

    Args:
        clean: the inputs that were attacked.
        path: a file ending with .png, .svg or .pdf; None only returns.
        count: how many samples.
        classes: their names; numbers by default.

    Returns:
        The matplotlib figure.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> from wellposed.robust.attacks import pgd
        >>> form = ImplicitForm(torch.zeros(4, 4), torch.eye(4), torch.eye(4))
        >>> u, target = torch.tensor([[0.6, 0.5, 0.0, 0.0]]), torch.tensor([0])
        >>> drawn = gallery(form, u, pgd(form, u, target, 0.1), target)
        >>> [axes.get_title() for axes in drawn.axes[:2]]
        ['0', '1']
    """
    if clean.shape != attack.inputs.shape or len(target) != len(clean) or count < 1:
        raise InputError(
            f"the gallery needs the {tuple(attack.inputs.shape)} inputs that were attacked, their classes and a "
            f"positive count; received {tuple(clean.shape)}, {tuple(target.shape)} and {count}"
        )
    with torch.no_grad():
        before = model(clean).argmax(1)
    rows = telling(before, attack, target)[:count].tolist()
    names = [str(k) for k in range(attack.outputs.shape[1])] if classes is None else list(classes)
    figure = require("matplotlib.figure", extra="plots").Figure(figsize=(1.2 * len(rows) + 1.2, 4.3), dpi=150)
    _draw(figure, clean, attack, rows, ([names[k] for k in before], [names[k] for k in attack.outputs.argmax(1)]))
    changed = int(attack.success.sum())
    shown = title or f"{attack.name}: {changed} of {len(target)} samples are given a wrong class (red)"
    figure.suptitle(shown, fontsize=10, color=INK)
    if path is not None:
        figure.savefig(path, bbox_inches="tight")
    return figure


def _draw(figure: Any, clean: Tensor, attack: Attack, rows: list[int], said: tuple[list[str], list[str]]) -> None:
    """Draws three lines of pictures, a column a sample."""
    change = (attack.inputs - clean).flatten(1)
    ends = min(0.0, float(attack.inputs.min())), max(1.0, float(attack.inputs.max()))
    scale = max(float(change[rows].abs().max()), 1e-12)
    grid = figure.subplots(3, len(rows), squeeze=False, gridspec_kw={"hspace": 0.32, "wspace": 0.12})
    for column, row in enumerate(rows):
        _image(grid[0][column], clean[row], said[0][row], INK, ends)
        _image(grid[1][column], attack.inputs[row], said[1][row], RED if attack.success[row] else INK, ends)
        _difference(grid[2][column], change[row].view_as(clean[row]), scale)
    names = ("clean", "attacked", f"difference\n(\N{PLUS-MINUS SIGN}{scale:.3g})")
    for axes, name in zip(grid[:, 0], names, strict=True):
        axes.set_ylabel(name, fontsize=9, color=QUIET, rotation=0, ha="right", va="center")


def telling(before: Tensor, attack: Attack, target: Tensor) -> Tensor:  # (B,)
    """Sorts samples: changed by the attack, then unchanged, then wrong from the start.

    Args:
        before: (B,), the classes that were given to the clean inputs.
    """
    right = before == target
    order = torch.where(right & attack.success, 0, torch.where(right, 1, 2))
    return order.argsort(stable=True)


def as_picture(u: Tensor) -> Tensor:
    """Writes one input as (height, width) or (height, width, 3).

    Example:
        >>> as_picture(torch.zeros(64)).shape, as_picture(torch.zeros(3, 4, 5)).shape
        (torch.Size([8, 8]), torch.Size([4, 5, 3]))
        >>> as_picture(torch.zeros(7)).shape
        torch.Size([1, 7])
    """
    if u.dim() == 3 and u.shape[0] == 3:
        return u.permute(1, 2, 0)
    if u.dim() == 3 and u.shape[0] == 1:
        return u[0]
    if u.dim() == 2:
        return u
    flat = u.flatten()
    side = math.isqrt(flat.numel())
    return flat.view(side, side) if side * side == flat.numel() else flat[None]


def _image(axes: Any, u: Tensor, name: str, colour: str, ends: tuple[float, float]) -> None:
    _bare(axes)
    share = (as_picture(u).double().cpu() - ends[0]) / (ends[1] - ends[0])
    axes.imshow(share.clamp(0, 1).numpy(), cmap="gray_r", vmin=0, vmax=1, aspect=_aspect(u))
    axes.set_title(name, fontsize=9, color=colour, pad=3)


def _difference(axes: Any, change: Tensor, scale: float) -> None:
    _bare(axes)
    picture = strongest(change).double().cpu()
    axes.imshow(picture.numpy(), cmap="RdBu_r", vmin=-scale, vmax=scale, aspect=_aspect(change))


def strongest(change: Tensor) -> Tensor:
    """Writes a change as (height, width), of the colours of a pixel the one that moved most.

    Example:
        >>> strongest(torch.tensor([0.1, -0.5, 0.2]).view(3, 1, 1))
        tensor([[-0.5000]])
    """
    picture = as_picture(change)
    if picture.dim() == 2:
        return picture
    return picture.gather(2, picture.abs().argmax(2, keepdim=True))[..., 0]


def _aspect(u: Tensor) -> str:
    return "auto" if as_picture(u).shape[0] == 1 else "equal"


def _bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#d3d9e1")
