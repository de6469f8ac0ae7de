"""Losses that train robust models: penalised, certified and adversarial; `wellposed.training.fit` takes them.

A loss sees predictions and targets only, so those here that need the inputs watch the model (`Watch`): they
remember the batch of its latest forward pass. `Penalised`, `CertifiedLoss` and `AdversarialLoss` wrap a loss.
`SignSteps` is an attack by plain steps along signs, with which `TradesLoss` trains.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.forms import ImplicitForm, Zero
from wellposed.robust.attacks.attack import Attack, Threat
from wellposed.robust.attacks.gradient import pgd
from wellposed.robust.bounds import Method, margin_loss, worst_case_loss
from wellposed.robust.crown import lines_of
from wellposed.robust.intervals import image
from wellposed.robust.sensitivity import differentiable_form
from wellposed.robust.sets import Box, Interval

Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]
START_NOISE = 1e-3  # standard deviation of the start of TRADES, where its gradient would be zero


@dataclass
class Ramp:
    """A radius that grows linearly with the steps of training, after a start without any.

    Args:
        epsilon: the last radius.
        warmup: steps at radius zero.
        steps: over which it grows; 0 for the last radius at once.
        taken: steps so far; set it to resume.

    Example:
        >>> ramp = Ramp(0.1, warmup=1, steps=2)
        >>> [round(ramp.next(), 3) for _ in range(4)]
        [0.0, 0.05, 0.1, 0.1]
    """

    epsilon: float
    warmup: int = 0
    steps: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < float("inf") or min(self.warmup, self.steps, self.taken) < 0:
            raise InputError(f"a ramp has a finite radius and steps that are not negative; received {self}")

    def next(self) -> float:
        """Takes a step and returns its radius."""
        self.taken += 1
        if self.taken <= self.warmup:
            return 0.0
        return self.epsilon * min(1.0, (self.taken - self.warmup) / max(self.steps, 1))


@dataclass(frozen=True)
class Penalised:
    """Adds a penalty to a loss.

    Args:
        penalty: without arguments, such as ``lambda: norm_penalty(model)``.

    Example:
        >>> loss = Penalised(nn.functional.mse_loss, lambda: torch.tensor(3.0), 0.5)
        >>> loss(torch.zeros(1), torch.ones(1))
        tensor(2.5000)
    """

    loss: Loss
    penalty: Callable[[], Tensor]
    weight: float

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        return self.loss(predictions, target) + self.weight * self.penalty()


class Watch:
    """Remembers what a model was last given, except in a `paused` block."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"training needs a module; received {type(model).__name__}")
        self.model, self._active, self._latest = model, True, None
        self._handle = model.register_forward_pre_hook(self._remember)

    def _remember(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._active:
            self._latest = arguments[0].detach()

    def batch(self, predictions: Tensor) -> Tensor:
        """Returns the inputs of these predictions."""
        latest: Tensor | None = self._latest
        if latest is None or len(latest) != len(predictions):
            raise InputError(
                "the loss did not see the inputs of these predictions; build it on the model that is trained, and "
                "call it right after the model (an Ensemble is not supported)"
            )
        return latest

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Remembers nothing of what the model is given in the block."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def close(self) -> None:
        """Stops watching."""
        self._handle.remove()


class _RobustLoss(abc.ABC):
    """A loss with a second term, about the inputs within a radius; while a model is evaluated, the last radius."""

    def __init__(self, model: nn.Module, ramp: Ramp | float, loss: Loss) -> None:
        self.watch, self.ramp = Watch(model), ramp if isinstance(ramp, Ramp) else Ramp(ramp)
        self.loss = loss

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        model, u = self.watch.model, self.watch.batch(predictions)
        radius = self.ramp.next() if model.training else self.ramp.epsilon
        clean = self.loss(predictions, target)
        return clean if radius == 0 else self.combine(clean, predictions, target, u, radius)

    @abc.abstractmethod
    def combine(self, clean: Tensor, predictions: Tensor, target: Tensor, u: Tensor, radius: float) -> Tensor:
        """Adds the second term to the loss of the predictions."""


class CertifiedLoss(_RobustLoss):
    """Mixes the loss with a proven bound of the cross-entropy on a box around every input (interval or CROWN).

        ``(1 - share) loss(y, target) + share worst_case_loss(Box(u, epsilon), target)``

    While the model is evaluated the radius is the last one of the ramp, so that epochs can be compared. Samples
    of which nothing is proven, as may be where a loop has no certificate, are left out of the bound.

    With an attack the first term is the loss on attacked inputs (De Palma et al., 2024).

    Args:
        model: the model that is trained, an `ImplicitModel` or a network that `to_implicit` converts.
        ramp: the radius, or how it grows.
        method: of the bound; ``"interval"`` is cheap and trains well, ``"crown"`` is tighter, and of loops whose
            norm proves nothing it is the one that applies (`Crown`, by continuation).
        share: of the bound.
        samples: of how many samples of a batch in training the loss is bounded, its first; of all if None.
        sweeps: in training, estimate the bound by this many sweeps of intervals through the loop, whatever the
            method (`swept_margins`): fast, and for loops of any condition. None bounds by the method.
        lines: how much of that estimate is by lines over the intervals, which costs more and leaves the model more
            freedom; the rest is by intervals alone.
        attack: takes the model, u, target and the radius, as in `AdversarialLoss`; None for none.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> loss = CertifiedLoss(model, 0.1, share=1.0)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) >= nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        method: str | Method = "interval",
        share: float = 0.5,
        samples: int | None = None,
        sweeps: int | None = None,
        lines: float = 0.0,
        attack: Callable[[nn.Module, Tensor, Tensor, float], Attack | Tensor] | None = None,
        loss: Loss = nn.functional.cross_entropy,
        lower: float | None = 0.0,
        upper: float | None = 1.0,
    ) -> None:
        for name, count in (("samples", samples), ("sweeps", sweeps)):
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1; received {count}")
        if lines and sweeps is None:
            raise InputError("lines are of the estimate by sweeps; give their number, say sweeps=8")
        super().__init__(model, ramp, loss)
        self.method, self.share, self.samples, self.range = method, _checked(share), samples, (lower, upper)
        self.sweeps, self.lines, self.attack = sweeps, _checked(lines, "lines"), attack

    def combine(self, clean: Tensor, predictions: Tensor, target: Tensor, u: Tensor, radius: float) -> Tensor:
        """Adds the bound on boxes of the radius."""
        if self.share == 0:
            return clean
        model = self.watch.model
        if self.attack is not None:
            with self.watch.paused():
                clean = self.loss(model(_inputs(self.attack(model, u, target, radius))), target)
        some = slice(self.samples if model.training else None)
        box = Box.around(u[some].flatten(1), radius, *self.range)
        worst = self._worst(differentiable_form(model, tuple(u.shape[1:])), box, target[some])
        return clean if worst is None else (1 - self.share) * clean + self.share * worst

    def _worst(self, form: ImplicitForm, box: Box, target: Tensor) -> Tensor | None:  # ()
        """Returns the mean of the bounds that are finite; None if none is."""
        if self.sweeps is not None and self.watch.model.training:
            return margin_loss(swept_margins(form, box, target, self.sweeps, self.lines), target).mean()
        worst = worst_case_loss(form, box, target, method=self.method)
        proven = worst.detach().isfinite()
        if not bool(proven.all()):  # an infinite bound has no gradient
            if not bool(proven.any()):
                return None
            box = Box(box.lower[proven], box.upper[proven])
            worst = worst_case_loss(form, box, target[proven], method=self.method)
        return worst.mean()


def swept_margins(
    form: ImplicitForm, box: Box, target: Tensor, sweeps: int, lines: float = 0.0
) -> Tensor:  # (B, q)
    """Estimates the largest ``y_i - y_target`` on boxes by sweeps of intervals through the loop, to train with.

    Intervals of ``z = Ax + Bu + b`` start from those of ``Bu + b`` and approach the ones of the method
    ``"interval"`` from within, which they reach where that many sweeps pass all layers. Where they would not
    settle, as for |A| of a spectral radius above one, they grow with every sweep, and training makes them smaller.
    Nothing is rounded outward: this proves nothing.

    Args:
        lines: how much of the estimate is by lines of the activations over these intervals, carried back through
            the loop by as many sweeps (CROWN-IBP, Zhang et al., 2020); the rest is by intervals alone.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> swept_margins(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([0]), 30)
        tensor([[ 0., -4.]])
    """
    A, B = _of_ends(form.A.to_dense()), form.B.to_dense()
    center, radius = (box.upper + box.lower) / 2, (box.upper - box.lower) / 2
    middle = nn.functional.linear(center, B, form.bias)
    reach = nn.functional.linear(radius, B.abs())
    z = v = torch.cat([middle - reach, middle + reach], 1)
    for _ in range(sweeps):
        z = torch.addmm(v, _states(form, z), A.mT)
    states, inputs = (
        matrix - matrix[target][:, None] for matrix in (form.C.to_dense(), form.D.to_dense())
    )  # (B, q, n) and (B, q, p)
    low, high = _states(form, z).chunk(2, 1)
    x = (high + low) / 2, (high - low) / 2
    margins = _largest(states, *x) + (0 if isinstance(form.D, Zero) else _largest(inputs, center, radius))
    if lines:
        margins = torch.lerp(margins, _by_lines(form, (states, inputs), z, x, (center, radius), sweeps), lines)
    shift = form.output_bias
    return margins if shift is None else margins + shift - shift[target][:, None]


def _by_lines(
    form: ImplicitForm, rows: Pair, z: Tensor, x: Pair, u: Pair, sweeps: int
) -> Tensor:  # (B, q, n) and (B, q, p), (B, 2n), ... -> (B, q)
    """Bounds rows of states and inputs by lines on intervals, as `crown` does, with ``nu <- c + A' lam(nu)``."""
    (states, inputs), A, B = rows, form.A.to_dense(), form.B.to_dense()
    ends = zip(*(end.split(form.partition, 1) for end in z.chunk(2, 1)), strict=True)
    blocks = [(lines_of(phi), Interval(*pair)) for phi, pair in zip(form.activations, ends, strict=True)]
    slopes = []
    for (kind, interval), phi in zip(blocks, form.activations, strict=True):
        if kind is None:
            raise InputError(f"no lines are known of {phi.name!r}; train with lines=0")
        slopes.append(kind.slopes(interval))
    lower, upper = (torch.cat([getattr(one, side) for one in slopes], 1)[:, None] for side in ("lower", "upper"))
    nu = states
    for _ in range(sweeps):
        nu = states + (torch.where(nu > 0, upper, lower) * nu) @ A
    lam = torch.where(nu > 0, upper, lower) * nu
    value = _largest(states + lam @ A - nu, *x) + _largest(inputs + lam @ B, *u)
    value = value if form.bias is None else value + lam @ form.bias
    parts = zip(blocks, nu.split(form.partition, 2), lam.split(form.partition, 2), strict=True)
    for (kind, interval), of_nu, of_lam in parts:
        assert kind is not None
        wide = Interval(interval.lower[:, None], interval.upper[:, None])
        value = value + kind.intercept(of_nu, of_lam, wide).sum(2)
    return value


def _largest(rows: Tensor, center: Tensor, radius: Tensor) -> Tensor:  # (B, q, n), (B, n), (B, n) -> (B, q)
    """Returns the largest values of rows on boxes."""
    return (rows @ center[..., None] + rows.abs() @ radius[..., None])[..., 0]


def _of_ends(A: Tensor) -> Tensor:  # (n, m) -> (2n, 2m)
    """Returns the matrix that takes the ends (x0, x1) of intervals to those of Ax."""
    above, below = A.clamp(min=0), A.clamp(max=0)
    return torch.cat([torch.cat([above, below], 1), torch.cat([below, above], 1)])


def _states(form: ImplicitForm, z: Tensor) -> Tensor:  # (B, 2n)
    """Returns the ends of phi(z)."""
    if len(form.activations) == 1 and form.activations[0].increasing and form.activations[0].componentwise:
        return form.activations[0].function(z)  # both ends at once
    ends = zip(*(end.split(form.partition, 1) for end in z.chunk(2, 1)), strict=True)
    x = [image(phi, Interval(*pair)) for phi, pair in zip(form.activations, ends, strict=True)]
    return torch.cat([part for end in zip(*x, strict=True) for part in end], 1)


class AdversarialLoss(_RobustLoss):
    """Mixes the loss with that on attacked inputs, found along exact gradients (Madry et al., 2018).

    Args:
        model: the model that is trained.
        ramp: the radius, or how it grows.
        attack: takes the model, u, target and the radius and returns an `Attack` or the inputs; `pgd` with ten
            steps by default, `SignSteps` for the plainer attack of Madry et al.
        share: of the attacked inputs.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> loss = AdversarialLoss(model, 0.1, share=1.0)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) > nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        attack: Callable[[nn.Module, Tensor, Tensor, float], Attack | Tensor] | None = None,
        share: float = 1.0,
        loss: Loss = nn.functional.cross_entropy,
    ) -> None:
        super().__init__(model, ramp, loss)
        self.attack, self.share = attack or _ten_steps, _checked(share)

    def combine(self, clean: Tensor, predictions: Tensor, target: Tensor, u: Tensor, radius: float) -> Tensor:
        """Adds the loss on attacked inputs."""
        if self.share == 0:
            return clean
        model = self.watch.model
        with self.watch.paused():
            attacked = self.loss(model(_inputs(self.attack(model, u, target, radius))), target)
        return (1 - self.share) * clean + self.share * attacked


def _inputs(attack: Attack | Tensor) -> Tensor:
    return attack if isinstance(attack, Tensor) else attack.inputs


def _ten_steps(model: nn.Module, u: Tensor, target: Tensor, radius: float) -> Attack:
    return pgd(model, u, target, radius, steps=10, step_size=0.25, restarts=0, loss="cross_entropy")


def augment_with_attacks(u: Tensor, target: Tensor, *attacks: Attack) -> tuple[Tensor, Tensor]:
    """Adds attacked inputs with the classes they should have had, for another training (003, section 4.4).

    Example:
        >>> attack = Attack(torch.ones(2, 3), torch.tensor([True, False]), torch.zeros(2, 2), torch.ones(2), "")
        >>> inputs, classes = augment_with_attacks(torch.zeros(2, 3), torch.tensor([1, 0]), attack)
        >>> inputs.shape, classes
        (torch.Size([3, 3]), tensor([1, 0, 1]))
    """
    if any(attack.inputs.shape != u.shape for attack in attacks):
        raise InputError(f"attacks must be on these inputs {tuple(u.shape)}; give those of u")
    inputs = [u, *(attack.inputs[attack.success] for attack in attacks)]
    classes = [target, *(target[attack.success] for attack in attacks)]
    return torch.cat(inputs), torch.cat(classes)


def _checked(share: float, name: str = "share") -> float:
    if not 0 <= share <= 1:
        raise InputError(f"{name} lies in [0, 1]; received {share}")
    return share


@dataclass(frozen=True)
class SignSteps:
    """Goes from a random point some steps of one length along the signs of the gradient, and returns the last.

    The attack of Madry et al. (2018), and that of 004 (section 4.2: ten steps of 0.1 within 0.3). It asks the
    model once a step and keeps no best point, so it is cheap, and honest where answers are random; `pgd` is the
    stronger attack. The model is attacked as it is, in training mode where it is in training.

    Args:
        steps: how many.
        length: of a step, in the units of the inputs; a third of the radius if None.
        loss: what is raised, of outputs and targets.
        lower, upper: the valid range.
        generator: of the starts; torch's own if None.

    Example:
        >>> attack = SignSteps(3, 0.1)
        >>> model, u = nn.Linear(2, 2), torch.full((4, 2), 0.5)
        >>> attacked = attack(model, u, torch.zeros(4, dtype=torch.int64), 0.2)
        >>> bool(((attacked - u).abs() <= 0.2 + 1e-6).all())
        True
    """

    steps: int = 10
    length: float | None = None
    loss: Loss = nn.functional.cross_entropy
    lower: float = 0.0
    upper: float = 1.0
    generator: torch.Generator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.length is not None and not self.length > 0):
            raise InputError(
                f"steps are not negative and their length is positive; received {self.steps}, {self.length}"
            )

    def __call__(self, model: nn.Module, u: Tensor, target: Tensor, radius: float) -> Tensor:
        """Attacks inputs."""
        threat = Threat(u, radius, "inf", self.lower, self.upper)
        length = radius / 3 if self.length is None else self.length
        start = threat.random(self.generator) if self.steps else u
        return climbed(lambda points: self.loss(model(points), target), start, threat, self.steps, length)


def climbed(
    raised: Callable[[Tensor], Tensor], points: Tensor, threat: Threat, steps: int, length: float
) -> Tensor:
    """Raises a function of inputs by steps of one length, each cut to the set, and returns the last point.

    Example:
        >>> threat = Threat(torch.tensor([[0.5, 0.5]]), 0.25)
        >>> climbed(lambda u: (u * torch.tensor([1.0, -2.0])).sum(), threat.u, threat, 3, 0.1)
        tensor([[0.7500, 0.2500]])
    """
    for _ in range(steps):
        with torch.enable_grad():
            moving = points.detach().requires_grad_()
            (slope,) = torch.autograd.grad(raised(moving), moving)
        points = threat.project(points.detach() + length * threat.steepest(slope))
    return points.detach()


class TradesLoss(_RobustLoss):
    """Adds to the loss how far outputs move within a radius (Zhang et al., 2019).

        ``loss(y, target) + weight KL(softmax y | softmax y')``, y' the outputs at the inputs that raise the second
        term most, found by steps along signs from beside the clean inputs

    With a weight of 6 as in 004 (section D.3). While the model is evaluated the radius is the last of the ramp.

    Args:
        model: the model that is trained.
        ramp: the radius, or how it grows.
        weight: of the second term.
        steps, length: of the attack; the length is a third of the radius if None.
        lower, upper: the valid range.
        generator: of the starts; torch's own if None.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> loss = TradesLoss(model, 0.1)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) > nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        weight: float = 6.0,
        steps: int = 10,
        length: float | None = None,
        loss: Loss = nn.functional.cross_entropy,
        lower: float = 0.0,
        upper: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if not weight >= 0 or steps < 1:
            raise InputError(f"weight is not negative and steps at least 1; received {weight} and {steps}")
        super().__init__(model, ramp, loss)
        self.weight, self.steps, self.length, self.generator = weight, steps, length, generator
        self.range = lower, upper

    def combine(self, clean: Tensor, predictions: Tensor, target: Tensor, u: Tensor, radius: float) -> Tensor:
        """Adds the divergence between the outputs at clean and at attacked inputs."""
        if self.weight == 0:
            return clean
        with self.watch.paused():
            moved = self.watch.model(self.attacked(u, predictions.detach(), radius))
        return clean + self.weight * divergence(predictions, moved)

    def attacked(self, u: Tensor, predictions: Tensor, radius: float) -> Tensor:
        """Returns inputs within the radius whose outputs are far from given ones."""
        threat = Threat(u, radius, "inf", *self.range)
        noise = torch.randn(u.shape, generator=self.generator, dtype=u.dtype, device=u.device)
        start = threat.project(u + START_NOISE * noise)
        length = radius / 3 if self.length is None else self.length
        model = self.watch.model
        return climbed(lambda points: divergence(predictions, model(points)), start, threat, self.steps, length)


def divergence(outputs: Tensor, others: Tensor) -> Tensor:  # (B, q) twice -> ()
    """Returns the mean of ``sum_i p_i log(p_i / q_i)`` with p and q the softmax of two outputs.

    Example:
        >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 3.0]]).log())  # p = (1/2, 1/2), q = (0, 1)
        tensor(inf)
    """
    p, q = outputs.log_softmax(1), others.log_softmax(1)
    return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
