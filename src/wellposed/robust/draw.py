"""Pictures of sensitivity matrices, bounds and attacks.

`gallery` shows clean and attacked inputs side by side, with their difference and what the model says (003 Figures
4.5-4.7). `sensitivity_map` and `class_maps` show the sensitivity matrix, `bound_projection` bounds of two states
(003 Figures 4.1-4.4).
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import IllPosedError, InputError, require
from wellposed.forms import ImplicitForm
from wellposed.forms.draw.page import save_figure
from wellposed.robust.attacks.attack import Attack, Model
from wellposed.robust.bounds import METHODS, state_bounds
from wellposed.robust.query import Bounds, MethodError, as_form
from wellposed.robust.sets import Box, Uncertainty

INK, RED, QUIET = "#1c2530", "#c2410c", "#5b6168"
PALETTE = ("#1f5fd0", "#c2410c", "#00795a", "#b0508a", "#a86a00", "#2b7fb8", "#4b5563", "#7c3aed")
DRAWN = ("box", "lp", "interval", "l2", "crown", "optimised", "triangle")
PER_ROW = 8
Path = str | os.PathLike[str] | None


def gallery(
    model: Model,
    clean: Tensor,
    attack: Attack,
    target: Tensor,  # (B,)
    path: Path = None,
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
    figure = _figure(1.2 * len(rows) + 1.2, 4.3)
    _draw(figure, clean, attack, rows, ([names[k] for k in before], [names[k] for k in attack.outputs.argmax(1)]))
    right = before == target
    changed, count = int((right & attack.success).sum()), int(right.sum())
    shown = title or f"{attack.name}: {changed} of {count} samples that were right are given a wrong class (red)"
    figure.suptitle(shown, fontsize=10, color=INK)
    return _finished(figure, path)


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


def row_correlation(S: Tensor) -> float:  # (q, p)
    """Returns the mean correlation of two rows; near one, the maps of all classes are the same picture.

    Example:
        >>> round(row_correlation(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.5]])), 3)
        0.998
    """
    matrix = _checked(S)
    if len(matrix) < 2:
        return 1.0
    centred = matrix - matrix.mean(1, keepdim=True)
    unit = centred / torch.linalg.vector_norm(centred, dim=1, keepdim=True).clamp(min=1e-300)
    products = unit @ unit.T
    return float((products.sum() - products.trace()) / (len(matrix) * (len(matrix) - 1)))


def caveat(S: Tensor) -> str:
    """Says how far the rows of a sensitivity matrix tell classes apart.

    Example:
        >>> caveat(torch.eye(2)).partition(":")[0]
        'Rows of S have a mean correlation of -1.0000'
    """
    correlation = row_correlation(S)
    start = f"Rows of S have a mean correlation of {correlation:.4f}"
    if correlation > 0.9:
        return (
            f"{start}: they are nearly one picture, and say which inputs matter, not which class they speak for."
        )
    return f"{start}: they differ, though S has no sign and bounds all inputs at once."


def sensitivity_map(
    S: Tensor, path: Path = None, *, classes: Sequence[str] | None = None, title: str | None = None
) -> Any:
    """Draws the sensitivity matrix, an output a line, as 003 Figures 4.1 and 4.2 do; a darker entry is larger.

    Args:
        S: (q, p), of `sensitivity`.
        path: a file ending with .png, .svg or .pdf; None only returns.
        classes: names of the outputs; numbers by default.

    Example:
        >>> sensitivity_map(torch.eye(3)).axes[0].get_ylabel()
        'output'
    """
    matrix = _checked(S)
    figure = _figure(9.0, min(1.9 + 0.22 * len(matrix), 9.0))
    axes = figure.add_subplot()
    drawn = axes.imshow(matrix.numpy(), aspect="auto", cmap="Greys", vmin=0, interpolation="nearest")
    if len(matrix) <= 40:
        names = [str(k) for k in range(len(matrix))] if classes is None else list(classes)
        axes.set_yticks(range(len(matrix)), names, fontsize=8)
    axes.set_xlabel("input", color=INK)
    axes.set_ylabel("output", color=INK)
    figure.colorbar(drawn, ax=axes, pad=0.015).set_label("units of output per unit of input", fontsize=8)
    q, p = matrix.shape
    axes.set_title(title or f"Sensitivity matrix, {q:,} outputs by {p:,} inputs", fontsize=10, color=INK)
    return _finished(figure, path, caveat(matrix))


def class_maps(
    S: Tensor,
    path: Path = None,
    *,
    shape: tuple[int, ...] | None = None,
    classes: Sequence[str] | None = None,
    count: int = 10,
) -> Any:
    """Draws the rows of the sensitivity matrix as pictures, in the manner of 003 Figure 4.4, with a caveat.

    Args:
        shape: of an input, (height, width) or (channels, height, width); of colours the sum is drawn.
        count: how many classes.

    Example:
        >>> len(class_maps(torch.rand(3, 64), shape=(8, 8)).axes)
        3
    """
    matrix = _checked(S)
    wanted = (matrix.shape[1],) if shape is None else tuple(shape)
    if torch.Size(wanted).numel() != matrix.shape[1] or count < 1:
        raise InputError(f"S has {matrix.shape[1]} inputs; received the shape {wanted} and {count} classes")
    rows = min(count, len(matrix))
    columns = min(rows, 5)
    height = -(-rows // columns)
    figure = _figure(1.7 * columns, 1.75 * height + 0.7)
    grid = figure.subplots(height, columns, squeeze=False, gridspec_kw={"hspace": 0.25, "wspace": 0.1})
    for index, axes in enumerate(grid.flat):
        axes.set_axis_off()
        if index >= rows:
            axes.remove()
            continue
        row = matrix[index].view(wanted)
        picture = as_picture(row.sum(0) if row.dim() == 3 else row)
        axes.imshow(picture.numpy(), cmap="Greys", vmin=0, aspect="auto" if len(picture) == 1 else "equal")
        axes.set_title(str(index) if classes is None else classes[index], fontsize=9, color=INK, pad=3)
    return _finished(figure, path, caveat(matrix))


def bound_projection(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    path: Path = None,
    *,
    states: tuple[int, int] | None = None,
    methods: Sequence[str] = DRAWN,
    samples: int = 2000,
    title: str | None = None,
) -> Any:
    """Draws bounds of two states by several methods around sampled ones, in the manner of 003 Figure 4.3.

    Args:
        inputs: a set for one sample, the first one if there are more.
        states: which two; those that move most among the samples by default.
        methods: names of `METHODS`; those that do not apply are left out, and named.
        samples: inputs drawn from the set, half of them extreme.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> drawn = bound_projection(form, Box(torch.zeros(1, 2), torch.ones(1, 2)), methods=("box", "interval"))
        >>> drawn.axes[0].get_xlabel()
        'state 0'
    """
    for name in methods:
        METHODS.get(name)
    if samples < 2:
        raise InputError(f"samples must be at least 2; received {samples}")
    with torch.no_grad():
        form = as_form(model, inputs)
        u = inputs.sample(samples, torch.Generator(inputs.device).manual_seed(0))[:, 0]
        points = _states(form, u).double().cpu()
        bounds, missing = _boxes(form, inputs, methods)
    pair = _moving(points) if states is None else states
    if len(set(pair)) != 2 or not all(0 <= k < form.sizes[0] for k in pair):
        raise InputError(f"states are two of 0 to {form.sizes[0] - 1}; received {pair}")
    edge = _reached(form, inputs, u, pair) if isinstance(inputs, Box) else points[:0, :2]
    figure = _figure(6.4, 5.2)
    _draw_boxes(figure.add_subplot(), bounds, (points[:, list(pair)], edge), pair)
    figure.axes[0].set_title(title or "Bounds of two states", fontsize=10, color=INK)
    further = f"; crosses: {len(edge)} found by gradients" if len(edge) else ""
    left_out = f" Not applicable: {', '.join(missing)}." if missing else ""
    return _finished(figure, path, f"Dots: {samples:,} inputs of the set{further}.{left_out}")


def _states(form: ImplicitForm, u: Tensor) -> Tensor:  # (R, n)
    x = form.equilibrium(u).value
    assert isinstance(x, Tensor)
    return x


def _reached(form: ImplicitForm, box: Box, u: Tensor, pair: tuple[int, int], steps: int = 20) -> Tensor:  # (32, 2)
    """Moves two states as far as sign gradients can, in 32 directions, each from the farthest of some inputs."""
    angle = torch.arange(32, dtype=box.dtype, device=box.device) * (2 * torch.pi / 32)
    towards = torch.stack([angle.cos(), angle.sin()], dim=1)
    with torch.no_grad():
        u = u[(_states(form, u)[:, list(pair)] @ towards.T).argmax(0)]
    lower, upper = box.lower[:1].detach(), box.upper[:1].detach()
    best, far = torch.zeros_like(towards), torch.full_like(angle, -torch.inf)
    for step in range(steps):
        with torch.enable_grad():
            moving = u.detach().requires_grad_()
            x = _states(form, moving)[:, list(pair)]
            value = (x * towards).sum(1)
            (slope,) = torch.autograd.grad(value.sum(), moving)
        better = value.detach() > far
        best, far = torch.where(better[:, None], x.detach(), best), torch.where(better, value.detach(), far)
        u = (u + (1 - step / steps) * (upper - lower) * slope.sign()).clamp(lower, upper)
    return best.double().cpu()


def _boxes(
    form: ImplicitForm, inputs: Uncertainty, methods: Sequence[str]
) -> tuple[dict[str, Bounds], dict[str, str]]:
    bounds, missing = {}, {}
    for method in methods:
        try:
            bounds[method] = state_bounds(form, inputs, method)
        except (MethodError, IllPosedError) as error:
            missing[method] = str(error)
    if not bounds:
        raise MethodError("no method applies: " + "; ".join(missing.values()))
    return bounds, missing


def _moving(points: Tensor) -> tuple[int, int]:
    if points.shape[1] < 2:
        raise InputError("a projection on two states needs a model with at least two")
    one, other = (points.amax(0) - points.amin(0)).topk(2).indices.tolist()
    return min(one, other), max(one, other)


def _draw_boxes(
    axes: Any, bounds: Mapping[str, Bounds], points: tuple[Tensor, Tensor], pair: tuple[int, int]
) -> None:
    patches = require("matplotlib.patches", extra="plots")
    axes.plot(*points[0].T.numpy(), ".", color="#9aa3ad", markersize=2, zorder=1)
    axes.plot(*points[1].T.numpy(), "x", color=INK, markersize=4, zorder=1)
    dashes = ("-", "--", "-.", ":")
    for index, (name, box) in enumerate(bounds.items()):
        low, high = (side[0, list(pair)].double().cpu() for side in (box.lower, box.upper))
        size = (high - low).tolist()
        axes.add_patch(patches.Rectangle(low.tolist(), *size, fill=False, linewidth=1.6, zorder=2 + index,
                       edgecolor=PALETTE[index % len(PALETTE)], linestyle=dashes[index % len(dashes)],
                       label=f"{name}: {size[0]:.3g} x {size[1]:.3g}"))  # fmt: skip
    axes.autoscale_view()
    axes.set_xlabel(f"state {pair[0]}", color=INK)
    axes.set_ylabel(f"state {pair[1]}", color=INK)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _checked(S: Tensor) -> Tensor:
    if (
        not isinstance(S, Tensor)
        or S.dim() != 2
        or not S.numel()
        or not bool((S >= 0).all() and S.isfinite().all())
    ):
        got = tuple(S.shape) if isinstance(S, Tensor) else type(S).__name__
        raise InputError(f"a sensitivity matrix is (outputs, inputs) and not negative; received {got}")
    return S.detach().double().cpu()


def _figure(width: float, height: float) -> Any:
    return require("matplotlib.figure", extra="plots").Figure(figsize=(width, height), dpi=150)


def _finished(figure: Any, path: Path, note: str = "") -> Any:
    """Prints a note under the picture, if there is one, and writes it."""
    if note:
        figure.text(0.5, -0.01, note, ha="center", va="top", fontsize=8, color=QUIET, wrap=True)
    if path is not None:
        save_figure(figure, path, bbox_inches="tight")
    return figure
