"""Which samples provably keep their class, which an attack changes, and how wide the bounds of each method are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import IllPosedError, MissingExtraError, WellposedError
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
        holds: Tensor = getattr(self, name)
        return float(holds.double().mean())

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers."""
        shares = {f"{name}_accuracy": self.share(name) for name in ("clean", "certified", "attacked")}
        return {"epsilon": self.epsilon, **shares, "widths": self.widths, "not_applicable": self.reasons}


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


@dataclass(frozen=True, eq=False)
class Examination:
    """What is known at several radii, and what became of every sample.

    Args:
        radii: the smallest first.
        proven: (B,), the largest of the radii at which a sample provably keeps its class; -1 where there is none.
        broken: (B,), the smallest at which the attack changed its class; infinite where it did not, or where the
            class was wrong before.
        attacked: the input that did it; the clean one elsewhere.
        said: (B,), the class that the model gives to that input.
    """

    radii: list[Radius]
    proven: Tensor
    broken: Tensor
    attacked: Tensor
    said: Tensor


def examine_radii(
    model: ImplicitForm | nn.Module,
    form: ImplicitForm,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilons: Sequence[float],
    *,
    method: str = "best",
    valid: tuple[float, float] = (0.0, 1.0),
    budget: float | None = None,
    steps: int = 40,
    tell: Callable[[int], None] = lambda count: None,
) -> Examination:
    """Certifies and attacks every sample at several radii, of which each box contains the ones before.

    A class that an attack changed is changed at all larger radii, and one that could not be proven is not asked
    about again. ``"best"`` is asked only where an attack left the class standing and ``"crown"`` left it open.

    Args:
        model, form: the classifier, and the same as a form. Proofs about a network are about the network itself,
            not about the form, whose weights conversion has rounded.
        epsilons, valid: the radii, in any order, and the range of the inputs.
        budget, steps: seconds for the bounds of `PART` samples, and steps of the attack.
        tell: is told how many samples are done, once for every radius.

    Raises:
        UnsoundError: a bound and the attack contradict each other, which must not happen.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> u, target = torch.tensor([[0.9, 0.1], [0.6, 0.5], [0.1, 0.9]]), torch.tensor([0, 0, 0])
        >>> examination = examine_radii(form, form, u, target, [0.02, 0.1])
        >>> examination.proven.tolist(), [one.share("attacked") for one in examination.radii]
        ([0.1, 0.02, -1.0], [0.666..., 0.333...])
    """
    network = isinstance(model, nn.Module) and not isinstance(model, ImplicitModel)
    proof = to_form(model, form.input_shape) if network else form
    with torch.no_grad():
        said = torch.cat([model(part).argmax(1) for part in u.split(PART)])
    standing, open_, inputs = (clean := said == target).clone(), clean.clone(), u.clone()
    proven_at, broken_at = (torch.full((len(u),), x, dtype=torch.float64) for x in (-1.0, torch.inf))
    radii = []
    for epsilon in sorted(set(epsilons)):
        alive = standing.nonzero()[:, 0]
        tell(len(u) - len(alive))
        for rows in alive.split(PART):
            attack = pgd(model, u[rows], target[rows], epsilon, steps=steps, lower=valid[0], upper=valid[1])
            proven, some = open_[rows], rows[open_[rows]]
            if len(some):
                box = Box.around(u[some].reshape(len(some), *form.input_shape), epsilon, *valid).to(proof.dtype)
                left = ~attack.success[proven]
                proven[proven.clone()] = _proven(proof, box, target[some], left, method, budget)
            proven = _agreed(proven, attack, target[rows], f"{method} at {epsilon:g}")
            fallen = rows[attack.success]
            inputs[fallen], said[fallen] = attack.inputs[attack.success], attack.outputs.argmax(1)[attack.success]
            standing[fallen], broken_at[fallen] = False, epsilon
            open_[rows], proven_at[rows[proven]] = proven, epsilon
            tell(len(rows))
        radii.append(Radius(epsilon, clean, standing.clone(), open_.clone()))
    return Examination(radii, proven_at, broken_at, inputs, said)


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
        except (MethodError, IllPosedError, MissingExtraError) as error:
            reasons[method] = str(error).splitlines()[0]
    return widths, reasons
