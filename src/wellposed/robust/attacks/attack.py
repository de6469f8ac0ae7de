"""What an attacker may do to an input, what an attack returns, and how the best of many points is kept.

`Attack` is the result; `Victim` asks the model and remembers the worst inputs. `Threat` says how far an attacker
may go, in which norm, within which range.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.query import check_target
from wellposed.robust.sets import Ball, Box, SparseBox, Uncertainty, finite_batch, radii

Model = ImplicitForm | nn.Module
Raised = Callable[[Tensor, Tensor], Tensor]  # outputs (R, q) and targets (R,) to what is raised (R,)


@dataclass(frozen=True)
class Attack:
    """The most damaging inputs that were found; they lie in the set, and were run through the model itself.

    Args:
        inputs: of the shape of the clean ones, which are kept where nothing worse was found.
        success: (B,), whether the model gives another class than the target; also where it always did.
        outputs: (B, q), of the model at `inputs`.
        queries: (B,), how often the model was asked about a sample; a gradient counts once.
        name: of the attack.
        notes: what a reader should know, such as signs of masked gradients.

    Example:
        >>> success = torch.tensor([True, False])
        >>> attack = Attack(torch.zeros(2, 3), success, torch.zeros(2, 2), torch.ones(2), "none")
        >>> attack.accuracy
        0.5
    """

    inputs: Tensor
    success: Tensor
    outputs: Tensor
    queries: Tensor
    name: str
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """The share of samples that keep their class."""
        return 1.0 - float(self.success.double().mean())

    def joined(self, other: "Attack") -> "Attack":
        """Keeps of every sample the attack that succeeded, the first if both did."""
        take = other.success & ~self.success
        wide = take.view(-1, *[1] * (self.inputs.dim() - 1))
        return Attack(
            torch.where(wide, other.inputs, self.inputs),
            self.success | other.success,
            torch.where(take[:, None], other.outputs, self.outputs),
            self.queries + other.queries,
            f"{self.name} + {other.name}",
            (*self.notes, *other.notes),
        )


class Victim:
    """A model under attack: answers queries, counts them, and remembers the worst inputs.

    Args:
        u: clean inputs.
        target: their classes.
        draws: how often a model with random answers is asked about a point; what counts is the mean.
    """

    def __init__(self, model: Model, u: Tensor, target: Tensor, draws: int = 1) -> None:
        if draws < 1:
            raise InputError(f"draws is at least 1; received {draws}")
        self.model, self.u, self.target, self.draws = model, finite_batch("u", u).detach(), target, draws
        self.queries = torch.zeros(len(u), dtype=torch.int64, device=u.device)
        clean = self.outputs(self.u)
        self.classes = clean.shape[1]
        check_target(target, len(u), self.classes)
        self.best_inputs, self.best_outputs = self.u.clone(), clean
        self.best = margin(clean, target)

    def outputs(self, points: Tensor, rows: Tensor | None = None) -> Tensor:  # (R, q)
        """Runs points of some samples, all by default, through the model."""
        with torch.no_grad():
            return _mean(self._run(points, rows) for _ in range(self.draws))

    def _run(self, points: Tensor, rows: Tensor | None) -> Tensor:
        outputs = self.model(points)
        if outputs.dim() != 2 or len(outputs) != len(points) or outputs.shape[1] < 2:
            raise InputError(
                "an attack needs a model with one output a class, (batch, classes); it returned "
                f"{tuple(outputs.shape)}"
            )
        if not bool(outputs.isfinite().all()):
            raise InputError(
                "the model returned NaN or infinite outputs, so nothing can be ranked; check the model"
            )
        self.queries[slice(None) if rows is None else rows] += 1
        return outputs

    def gradient(self, points: Tensor, raised: Raised, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the outputs at points and the gradient of a function of them, both means over the draws."""
        target = self.target if rows is None else self.target[rows]
        answers: list[Tensor] = []
        slopes: list[Tensor] = []
        for _ in range(self.draws):
            with torch.enable_grad():
                moving = points.detach().requires_grad_()
                logits = self._run(moving, rows)
                slopes += torch.autograd.grad(raised(logits, target).sum(), moving)
            answers.append(logits.detach())
        return _mean(answers), _mean(slopes)

    def consider(self, points: Tensor, outputs: Tensor, rows: Tensor | None = None) -> None:
        """Keeps points with a larger margin of another class than all before."""
        every = torch.arange(len(self.u), device=self.u.device) if rows is None else rows
        margins = margin(outputs, self.target[every])
        better = margins > self.best[every]
        chosen = every[better]
        self.best[chosen], self.best_inputs[chosen] = margins[better], points[better].detach()
        self.best_outputs[chosen] = outputs[better]

    def try_(self, points: Tensor, rows: Tensor | None = None) -> None:
        """Runs points through the model and keeps the worse ones."""
        self.consider(points, self.outputs(points, rows), rows)

    @property
    def standing(self) -> Tensor:  # (R,)
        """The samples that still have their class."""
        return (self.best_outputs.argmax(1) == self.target).nonzero()[:, 0]

    def attack(self, name: str, notes: tuple[str, ...] = ()) -> Attack:
        """Closes the attack."""
        success = self.best_outputs.argmax(1) != self.target
        return Attack(self.best_inputs, success, self.best_outputs, self.queries, name, notes)


def _mean(outputs: Iterable[Tensor]) -> Tensor:
    first, *others = outputs
    return torch.stack([first, *others]).mean(0) if others else first


class Loss:
    """A function of outputs and targets that an attack raises, ``(R, q), (R,) -> (R,)``.

    Example:
        >>> Loss("margin")(torch.tensor([[1.0, 3.0]]), torch.tensor([0]))
        tensor([2.])
    """

    def __init__(self, name: str) -> None:
        if name not in ("margin", "cross_entropy"):
            raise unknown_name("loss of an attack", name, ("margin", "cross_entropy"))
        self.name = name

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.name == "margin":
            return margin(outputs, target)
        return nn.functional.cross_entropy(outputs, target, reduction="none")


def margin(outputs: Tensor, target: Tensor) -> Tensor:  # (R, q), (R,) -> (R,)
    """Returns by how much the best other class is ahead of the target.

    Example:
        >>> margin(torch.tensor([[1.0, 0.0, -2.0]]), torch.tensor([0]))
        tensor([-1.])
    """
    others = outputs.scatter(1, target[:, None], -torch.inf)
    return others.amax(1) - outputs.gather(1, target[:, None])[:, 0]


def largest(scores: Tensor, count: int) -> Tensor:
    """Marks the largest entries of every sample.

    Example:
        >>> largest(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        tensor([[ True, False,  True]])
    """
    flat = scores.flatten(1)
    marks = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, flat.topk(count, dim=1).indices, True)
    return marks.view_as(scores)


@contextmanager
def under_attack(model: Model, u: Tensor, target: Tensor, draws: int = 1) -> Iterator[Victim]:
    """Opens an attack on a model, which is in evaluation mode for its time."""
    with evaluating(model):
        yield Victim(model, u, target, draws)


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Puts a module in evaluation mode, and each of its parts back afterwards."""
    modes = {part: part.training for part in model.modules()} if isinstance(model, nn.Module) else {}
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@dataclass(frozen=True)
class Threat:
    """All inputs near clean ones that are valid.

    Args:
        u: clean inputs, in the valid range.
        epsilon: the largest change, of every entry or of the Euclidean length; for entries also one a feature.
        norm: ``"inf"`` or ``"2"``.
        lower, upper: the valid range, [0, 1] by default.
        count: how many entries may change, all if None.

    Example:
        >>> threat = Threat(torch.tensor([[0.5, 0.95]]), 0.1)
        >>> threat.project(torch.tensor([[0.0, 2.0]]))
        tensor([[0.4000, 1.0000]])
    """

    u: Tensor
    epsilon: float | Tensor
    norm: str = "inf"
    lower: float = 0.0
    upper: float = 1.0
    count: int | None = None

    def __post_init__(self) -> None:
        finite_batch("u", self.u)
        if self.norm not in ("inf", "2"):
            raise InputError(f"the norm is 'inf' or '2'; received {self.norm!r}")
        if not self.lower < self.upper or bool(((self.u < self.lower) | (self.u > self.upper)).any()):
            raise InputError(
                f"clean inputs lie in the valid range [{self.lower}, {self.upper}]; received entries from "
                f"{float(self.u.min()):.4g} to {float(self.u.max()):.4g}: scale them, or give lower and upper"
            )
        if self.norm == "2" and (isinstance(self.epsilon, Tensor) or self.count is not None):
            raise InputError(
                "in the 2-norm epsilon is one number, and the count of changed entries is not limited"
            )
        size = self.u[0].numel() if len(self.u) else 0
        if self.count is not None and (isinstance(self.count, bool) or not 0 <= self.count <= size):
            raise InputError(f"count is how many of {size} entries may change; received {self.count!r}")
        self.set()  # raises for a radius that is negative or not finite

    def set(self) -> Uncertainty:
        """The set to give to bounds; a ball is not cut to the valid range, which makes it larger."""
        if self.norm == "2":
            assert not isinstance(self.epsilon, Tensor)
            return Ball(self.u, float(self.epsilon))
        if self.count is None:
            return self._box
        return SparseBox(self.u, self.epsilon, self.count, self.lower, self.upper)

    @property
    def _box(self) -> Box:
        return Box.around(self.u, self.epsilon, self.lower, self.upper)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The least and the largest valid value of every entry."""
        if self.norm == "2":
            return torch.full_like(self.u, self.lower), torch.full_like(self.u, self.upper)
        spread = radii(self.u, self.epsilon)  # not rounded outward, as proofs need it
        return (self.u - spread).clamp(min=self.lower), (self.u + spread).clamp(max=self.upper)

    def of(self, rows: Tensor) -> "Threat":
        """The threat to some samples."""
        epsilon = self.epsilon
        if isinstance(epsilon, Tensor) and epsilon.shape == self.u.shape:
            epsilon = epsilon[rows]
        return Threat(self.u[rows], epsilon, self.norm, self.lower, self.upper, self.count)

    def project(self, points: Tensor) -> Tensor:
        """Takes points to the nearest ones in the set, in the 2-norm to near ones: shortened, then cut."""
        if self.norm == "2":
            change = (points - self.u).flatten(1)
            length = torch.linalg.vector_norm(change, dim=1)
            most = float(self.epsilon) * (1 - 8 * torch.finfo(points.dtype).eps)
            factor = torch.where(length > most, most / length.clamp(min=torch.finfo(length.dtype).tiny), 1.0)
            points = self.u + (change * factor[:, None]).view_as(self.u)
        lower, upper = self.ends
        points = torch.minimum(torch.maximum(points, lower), upper)
        if self.count is None:
            return points
        return torch.where(largest((points - self.u).abs(), self.count), points, self.u)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Returns the direction of length one in which a linear function rises fastest."""
        if self.norm == "inf":
            return gradient.sign()
        flat = gradient.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=torch.finfo(flat.dtype).tiny)
        return (flat / length).view_as(gradient)

    def extreme(self, gradient: Tensor) -> Tensor:
        """Returns where a linear function is largest; exact for boxes, also with few changed entries."""
        if self.norm == "2":
            return self.project(self.u + float(self.epsilon) * self.steepest(gradient))
        lower, upper = self.ends
        points = torch.where(gradient > 0, upper, torch.where(gradient < 0, lower, self.u))
        if self.count is None:
            return points
        return torch.where(largest(gradient * (points - self.u), self.count), points, self.u)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Draws a point of the set for every sample."""
        noise = torch.rand(self.u.shape, generator=generator, dtype=self.u.dtype, device=self.u.device)
        if self.norm == "2":
            direction = self.steepest(
                torch.randn(self.u.shape, generator=generator, dtype=self.u.dtype, device=self.u.device)
            )
            share = noise.flatten(1)[:, 0].view(-1, *[1] * (self.u.dim() - 1))
            return self.project(self.u + share * float(self.epsilon) * direction)
        lower, upper = self.ends
        return self.project(torch.lerp(lower, upper, noise))
