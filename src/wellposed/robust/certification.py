"""Which samples provably keep their class, which an attack changes, and how wide the bounds of each method are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import IllPosedError, WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust.attacks import Attack, pgd
from wellposed.robust.attacks.attack import margin
from wellposed.robust.bounds import METHODS, certified, output_bounds
from wellposed.robust.query import MethodError, to_form
from wellposed.robust.sets import Box

FIRST = "crown"  # decides most samples in little time; "best" goes on with those it leaves open
ROUNDING = 1e3  # units by which the outputs of a model may be off
PART = 50  # samples that are bounded at once
WIDTHS = ("norm", "box", "interval", "l2", "crown", "optimised", "lp", "triangle")


class UnsoundError(WellposedError):
    """An attack succeeded within a set on which the class was proven."""


@dataclass(frozen=True)
class Radius:
    """What is known at one radius, per sample.

    Args:
        epsilon: the radius.
        clean, attacked, certified: (B,), whether a sample has its class, keeps it under attack, provably keeps it.
        widths: mean width of the outputs' bounds, by method.
        reasons: why a method is missing.
    """

    epsilon: float
    clean: Tensor
    attacked: Tensor
    certified: Tensor
    widths: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """Returns the share of samples of which one of the three holds."""
        found: Tensor = getattr(self, name)
        return float(found.double().mean())

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers."""
        shares = {f"{name}_accuracy": self.share(name) for name in ("clean", "certified", "attacked")}
        return {"epsilon": self.epsilon, **shares, "widths": self.widths, "not_applicable": self.reasons}


def examine(
    model: ImplicitForm | nn.Module,
    form: ImplicitForm,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float,
    *,
    method: str = "best",
    valid: tuple[float, float] = (0.0, 1.0),
    budget: float | None = None,
    steps: int = 40,
    tell: Callable[[int], None] = lambda count: None,
) -> Radius:
    """Certifies and attacks every sample on the box of a radius.

    ``"best"`` is asked only about samples that an attack left standing and ``"crown"`` left open: no other answer
    could change.

    Args:
        model, form: the classifier, and the same as a form. Of a network, the proofs are about the network itself,
            not about the form, whose weights conversion has rounded.
        budget: seconds for the bounds of `PART` samples.
        steps: of the attack.
        tell: is told how many samples are done.

    Raises:
        UnsoundError: a bound and the attack contradict each other, which must not happen.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> u, target = torch.tensor([[0.9, 0.1], [0.6, 0.5]]), torch.tensor([0, 0])
        >>> found = examine(form, form, u, target, 0.1)
        >>> found.share("clean"), found.share("attacked"), found.share("certified")
        (1.0, 0.5, 0.5)
    """
    network = isinstance(model, nn.Module) and not isinstance(model, ImplicitModel)
    found, proof = [], to_form(model, form.input_shape) if network else form
    for rows in torch.arange(len(u)).split(PART):
        attack = pgd(model, u[rows], target[rows], epsilon, steps=steps, lower=valid[0], upper=valid[1])
        with torch.no_grad():
            clean = model(u[rows]).argmax(1) == target[rows]
        box = Box.around(u[rows].reshape(len(rows), *form.input_shape), epsilon, *valid)
        proven = _proven(proof, box.to(proof.dtype), target[rows], ~attack.success, method, budget)
        found.append((clean, ~attack.success, _agreed(proven, attack, target[rows], f"{method} at {epsilon:g}")))
        tell(len(rows))
    clean, attacked, proven = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Radius(epsilon, clean, attacked, proven)


def _agreed(proven: Tensor, attack: Attack, target: Tensor, where: str) -> Tensor:
    """Compares proofs with an attack; a lead as small as the rounding of the model only costs the proof."""
    both = proven & attack.success
    rounding = ROUNDING * torch.finfo(attack.outputs.dtype).eps * attack.outputs.abs().amax(1)
    if bool((margin(attack.outputs, target) > rounding)[both].any()):
        raise UnsoundError(f"{where}: an attack changes a class that was proven; please report this")
    return proven & ~attack.success


def _proven(
    form: ImplicitForm, box: Box, target: Tensor, standing: Tensor, method: str, budget: float | None
) -> Tensor:  # (B,)
    if method != "best":
        return certified(form, box, target, method, budget)
    try:
        proven = certified(form, box, target, FIRST, budget)
    except (MethodError, IllPosedError):
        return certified(form, box, target, method, budget)
    left = (standing & ~proven).nonzero()[:, 0]
    if len(left):
        proven[left] = certified(form, Box(box.lower[left], box.upper[left]), target[left], method, budget)
    return proven


@torch.no_grad()
def output_widths(
    model: ImplicitForm | nn.Module, u: Tensor, epsilon: float, *,
    methods: Sequence[str] = WIDTHS, valid: tuple[float, float] = (0.0, 1.0), budget: float | None = None,
) -> tuple[dict[str, float], dict[str, str]]:  # fmt: skip
    """Measures the mean width of the outputs' bounds by method; a method that does not apply says why.

    Example:
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        >>> widths, reasons = output_widths(form, torch.full((1, 1), 0.5), 0.1, methods=("box", "interval"))
        >>> round(widths["box"], 3), reasons
        (0.2, {})
    """
    proof = to_form(model, tuple(u.shape[1:]))
    box = Box.around(u.reshape(len(u), *proof.input_shape), epsilon, *valid).to(proof.dtype)
    widths, reasons = {}, {}
    for method in methods:
        try:
            widths[method] = float(output_bounds(proof, box, METHODS[method], budget).width.mean())
        except (MethodError, IllPosedError) as error:
            reasons[method] = str(error).splitlines()[0]
    return widths, reasons
