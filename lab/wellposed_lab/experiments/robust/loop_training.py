"""Certified training of loops on a GPU: several recipes side by side, a step of all of them as one graph.

`LoopTrainer` trains copies of one classifier ``x = relu(Ax + Bu + b), y = Cx``, each by its own `Recipe`. The loss
bounds every image by intervals that are swept through the loop, or by lines over them (CROWN-IBP, Zhang et al.,
2020), in the box around the image or in a smaller one around an attacked image (Mueller et al., 2023).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.conditions.projections import project_rows
from wellposed.models import ImplicitModel
from wellposed_lab.config import Schedule

CLIP = 8.0  # of the norm of gradients
BETAS, TINY = (0.9, 0.999), 1e-8  # of Adam
WARM = 3  # steps before one is captured
PROJECT = {"inf": 10, "monotone": 50}  # steps between two projections of A on its condition
Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How one copy is trained.

    Args:
        radius: of the boxes, once it has grown.
        share: of the bound in the loss, the rest is the loss at the image.
        lines: of the bound, how much is by lines; the rest by intervals.
        shrink: radius of the box that is bounded, as a share of the radius; around an attacked image if below 1.
        learning_rate: as a multiple of that of the schedule.
        decay: of weights, per step and learning rate.
    """

    radius: float
    share: float = 0.8
    lines: float = 0.0
    shrink: float = 1.0
    learning_rate: float = 1.0
    decay: float = 0.0


class LoopTrainer:
    """Trains copies of a model by recipes, all in one step, on a GPU as one graph.

    Args:
        model: the initial weights, of ReLU, without feedthrough; on the device of the training.
        recipes: one for each copy.
        sweeps: through the loop, of intervals, of lines and of the image itself.
        flips: whether images are mirrored at random; their shape, or None.
        seed: of orders and flips.
    """

    def __init__(
        self,
        model: ImplicitModel,
        recipes: Sequence[Recipe],
        sweeps: int,
        flips: tuple[int, int, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.recipes, self.sweeps, self.flips = model, tuple(recipes), sweeps, flips
        assert model.bias is not None
        A = project_rows(model.A, model.kappa)  # in which intervals settle, whatever the condition
        values = A, model.B, model.bias[None], model.C  # of x = relu(Ax + Bu + b), y = Cx
        count = len(self.recipes)
        self.weights = [value.detach().repeat(count, 1, 1).requires_grad_() for value in values]
        self.moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.weights]
        self.device = self.weights[0].device
        self.generator = torch.Generator().manual_seed(seed)
        fields = ("radius", "share", "lines", "shrink", "learning_rate", "decay")
        self.settings = {
            name: torch.tensor([getattr(recipe, name) for recipe in self.recipes], device=self.device)
            for name in fields
        }
        self.grown, self.rate, self.taken, self.loss = (torch.zeros((), device=self.device) for _ in range(4))

    def train(self, u: Tensor, target: Tensor, schedule: Schedule, report: Report = lambda text: None) -> None:
        """Trains on images (N, p) on the device; radii grow over the first half, rates fall over the second."""
        size, start = schedule.batch_size, time.monotonic()
        steps = schedule.epochs * (len(u) // size)
        step, capture = 0, self.device.type == "cuda"
        graph: torch.cuda.CUDAGraph | None = None
        rows = torch.zeros(size, dtype=torch.int64, device=self.device)
        mirrored = torch.zeros(size, 1, dtype=torch.bool, device=self.device)
        for epoch in range(schedule.epochs):
            order = torch.randperm(len(u), generator=self.generator)[: steps // schedule.epochs * size]
            marks = torch.rand(len(order), 1, generator=self.generator) < 0.5
            for some, mark in zip(
                order.to(self.device).split(size), marks.to(self.device).split(size), strict=True
            ):
                done = step / steps
                self.grown.fill_(min(1.0, max(0.0, (done - 0.025) / 0.475)))
                self.rate.fill_(schedule.learning_rate * (0.5 + 0.5 * math.cos(math.pi * max(0.0, 2 * done - 1))))
                rows.copy_(some)
                mirrored.copy_(mark)
                if capture and step == WARM:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        self._step(u, target, rows, mirrored)
                if graph is not None:
                    graph.replay()
                elif capture:
                    stream = torch.cuda.Stream()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        self._step(u, target, rows, mirrored)
                    torch.cuda.current_stream().wait_stream(stream)
                else:
                    self._step(u, target, rows, mirrored)
                step += 1
                if step % PROJECT[self.model.condition.name] == 0:
                    self.project()
            if epoch % max(1, schedule.epochs // 20) == 0:
                report(f"epoch {epoch + 1}: loss {float(self.loss):.4f}, {time.monotonic() - start:.1f} s")
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Projects every A on the condition of the model."""
        model, A = self.model, self.weights[0]
        A.copy_(model.condition.parametrise(A.detach(), model.kappa, model.activation))

    def member(self, index: int) -> None:
        """Gives the model the weights of a copy."""
        with torch.no_grad():
            model, (A, B, b, C) = self.model, (weight[index] for weight in self.weights)
            assert model.bias is not None
            model.state.raw.copy_(A)
            model.B.copy_(B)
            model.bias.copy_(b[0])
            model.C.copy_(C)

    def _step(self, u: Tensor, target: Tensor, rows: Tensor, mirrored: Tensor) -> None:
        some = u[rows]
        if self.flips is not None:
            some = torch.where(mirrored, some.view(-1, *self.flips).flip(-1).flatten(1), some)
        losses = self.losses(some, target[rows])
        slopes = torch.autograd.grad(losses.sum(), self.weights)
        with torch.no_grad():
            self.loss.copy_(losses.mean())
            self._adam(slopes)

    def _adam(self, slopes: Sequence[Tensor]) -> None:
        """Takes a step of Adam with decoupled decay, of clipped gradients, for every copy by itself."""
        self.taken += 1
        sizes = torch.stack([slope.flatten(1).square().sum(1) for slope in slopes]).sum(0).sqrt()
        scale = (CLIP / (sizes + TINY)).clamp(max=1.0)
        rate = self.rate * self.settings["learning_rate"]
        one, two = (1 - beta**self.taken for beta in BETAS)
        for weight, slope, (first, second) in zip(self.weights, slopes, self.moments, strict=True):
            slope = slope * _wide(scale)
            first.lerp_(slope, 1 - BETAS[0])
            second.lerp_(slope.square(), 1 - BETAS[1])
            moved = (first / one) / ((second / two).sqrt() + TINY)
            weight.sub_(_wide(rate) * (moved + _wide(self.settings["decay"]) * weight))

    def losses(self, u: Tensor, target: Tensor) -> Tensor:  # (B, p), (B,) -> (M,)
        """Returns the loss of every copy at the present radius."""
        radius, shrink = self.grown * self.settings["radius"], self.settings["shrink"]
        center = u.expand(len(self.recipes), *u.shape)
        if bool(any(recipe.shrink < 1 for recipe in self.recipes)):
            center = center.detach().requires_grad_()
            y = self.outputs(center)
            (slope,) = torch.autograd.grad(_entropies(y, target).sum(), center)
            center = (center.detach() + _wide(radius * (1 - shrink)) * slope.sign()).clamp(0, 1)
        small = _wide(radius * shrink)
        lower, upper = (center - small).clamp(min=0), (center + small).clamp(max=1)
        clean, bounded = self.margins(u, lower, upper, target)
        share = self.settings["share"] * (self.grown > 0)
        return (1 - share) * _worst(clean) + share * _worst(bounded)

    def outputs(self, u: Tensor) -> Tensor:  # (M, B, p) -> (M, B, q)
        """Estimates the outputs by some steps."""
        A, B, b, C = self.weights
        z = v = torch.baddbmm(b, u, B.mT)
        for _ in range(self.sweeps):
            z = torch.baddbmm(v, z.relu(), A.mT)
        return z.relu() @ C.mT

    def margins(self, u: Tensor, lower: Tensor, upper: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates ``y_i - y_target`` at images (B, p), and its largest value in boxes (M, B, p), by sweeps."""
        A, B, b, C = self.weights
        reach, size = (upper - lower) / 2, len(u)
        center = torch.cat([(upper + lower) / 2, u.expand(len(A), *u.shape)], 1)
        v, w = torch.baddbmm(b, center, B.mT), reach @ B.abs().mT
        z, r, positive = v, w, A.abs()
        for _ in range(self.sweeps):
            low, high = (z[:, :size] - r).relu(), (z[:, :size] + r).relu()
            z = torch.baddbmm(v, torch.cat([(high + low) / 2, z[:, size:].relu()], 1), A.mT)
            r = torch.baddbmm(w, (high - low) / 2, positive.mT)
        l, h = z[:, :size] - r, z[:, :size] + r
        low, high = l.relu(), h.relu()
        x, radius = (high + low) / 2, (high - low) / 2
        mine = (target[:, None] == torch.arange(C.shape[1], device=C.device)).to(C.dtype)  # (B, q)
        rows = C[:, None] - (mine @ C)[:, :, None]  # (M, B, q, n)
        clean = (rows @ z[:, size:].relu()[..., None])[..., 0]
        bounded = (rows @ x[..., None] + rows.abs() @ radius[..., None])[..., 0]
        weight = self.settings["lines"][:, None, None]
        if any(recipe.lines for recipe in self.recipes):
            lines = self._by_lines(rows, l, h, x, radius, center[:, :size], reach)
            bounded = (1 - weight) * bounded + weight * lines
        return clean, bounded

    def _by_lines(
        self, rows: Tensor, l: Tensor, h: Tensor, x: Tensor, radius: Tensor, center: Tensor, reach: Tensor
    ) -> Tensor:  # (M, B, q)
        """Bounds rows of the state (M, B, q, n) by lines of ReLU between l and h, passed back through the loop.

        With ``nu <- c + A'(s nu)``, s the slope of the upper line where nu > 0 and of the lower one elsewhere, and
        ``lam = s nu``: ``c'x <= lam'(Bu + b) + sum max(nu, 0) t + (c + A'lam - nu)'x``, t the intercepts.
        """
        A, B, b, _ = self.weights
        flat = lambda value: value.flatten(1, 2)  # noqa: E731
        above = h.relu() / (h.relu() - l.clamp(max=0) + TINY)
        below = (h > -l).to(h.dtype)
        intercept = -above * l.clamp(max=0)
        above, below = above[:, :, None], below[:, :, None]
        nu = rows
        for _ in range(self.sweeps):
            nu = torch.baddbmm(flat(rows), flat(torch.where(nu > 0, above, below) * nu), A).view_as(rows)
        lam = torch.where(nu > 0, above, below) * nu
        rest = torch.baddbmm(flat(rows) - flat(nu), flat(lam), A).view_as(rows)
        inputs = (flat(lam) @ B).view(*rows.shape[:3], -1)
        columns = inputs @ center[..., None] + inputs.abs() @ reach[..., None]
        columns = columns + lam @ b[:, :, :, None] + nu.relu() @ intercept[..., None]
        columns = columns + rest @ x[..., None] + rest.abs() @ radius[..., None]
        return columns[..., 0]

    @torch.no_grad()
    def judged(self, u: Tensor, target: Tensor, radius: float, size: int = 1000) -> Tensor:  # (2, M)
        """Estimates the shares of images that are classified, and that lines would certify, of every copy."""
        sums = torch.zeros(2, len(self.recipes), device=self.device)
        settings, sweeps = self.settings["lines"], self.sweeps
        self.settings["lines"], self.sweeps = torch.ones_like(settings), 4 * sweeps
        recipes, self.recipes = self.recipes, tuple(Recipe(radius, lines=1.0) for _ in self.recipes)
        for some, classes in zip(u.split(size), target.split(size), strict=True):
            boxes = ((some + sign * radius).clamp(0, 1).expand(len(recipes), *some.shape) for sign in (-1, 1))
            for row, margins in zip(sums, self.margins(some, *boxes, classes), strict=True):
                margins = margins.scatter(2, classes.expand(len(recipes), -1)[..., None], -torch.inf)
                row += (margins.amax(2) < 0).sum(1)
        self.settings["lines"], self.sweeps, self.recipes = settings, sweeps, recipes
        return sums / len(u)


def _wide(values: Tensor) -> Tensor:  # (M,) -> (M, 1, 1)
    return values[:, None, None]


def _entropies(y: Tensor, target: Tensor) -> Tensor:  # (M, B, q) -> (M,)
    return F.cross_entropy(y.flatten(0, 1), target.repeat(len(y)), reduction="none").view(len(y), -1).mean(1)


def _worst(margins: Tensor) -> Tensor:  # (M, B, q) -> (M,)
    return margins.logsumexp(2).mean(1)
