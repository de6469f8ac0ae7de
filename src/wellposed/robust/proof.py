"""Bounds as claims of a certificate: boxes of states that an implicit model maps into themselves."""

import torch
from torch import Tensor, nn

from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import upward
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.models.io.certificates import Claim
from wellposed.robust.bounds import state_bounds
from wellposed.robust.query import as_form
from wellposed.robust.uncertainty import Box

ROOM = 1e-9  # of the size of the states, by which boxes are larger than they need be


def enclosures(model: ImplicitForm | nn.Module, inputs: Box) -> list[Claim]:
    """Claims, for the inputs of every box, boxes that hold the states and the outputs.

    A box X with phi(AX + BU + b) within X holds a solution for every u in U (Brouwer), and so the only one; the
    checker needs nothing else. X is the interval bound, larger by a little in the direction of weights v with
    ``gamma |A| v < v``, which the map makes smaller again.

    Args:
        model: an `ImplicitModel` or a form of matrices, with increasing activations.
        inputs: one box a sample; the claims refer to these numbers, in float64.

    Raises:
        IllPosedError: |A| has no such weights, as where strong negative feedback is proven by "mu".

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> (claim,) = enclosures(ImplicitModel(2, 1, 3).double(), Box.around(torch.zeros(1, 2).double(), 0.1))
        >>> claim.kind, sorted(claim.tensors)
        ('enclosure', ['u0', 'u1', 'x0', 'x1', 'y0', 'y1'])
    """
    with torch.no_grad():
        form, box = as_form(model, inputs).to(torch.float64), inputs.to(torch.float64)
        A, C, D = (part.to_dense() for part in (form.A, form.C, form.D))
        found = state_bounds(form, box, "interval")
        size = torch.maximum(found.lower.abs(), found.upper.abs()).amax(1, keepdim=True)
        room = ROOM * (1 + size) * _weights(form, A)
        lower, upper = found.lower - room, found.upper + room
        low, high = _reach(C, lower, upper), _reach(D, box.lower, box.upper)
        shift = 0.0 if form.output_bias is None else form.output_bias
        spare = ROOM * (1 + low[2] + high[2])
        y0, y1 = low[0] + high[0] + shift - spare, low[1] + high[1] + shift + spare
    names = ("u0", "u1", "x0", "x1", "y0", "y1")
    ends = box.lower, box.upper, lower, upper, y0, y1
    facts = {"inputs": ["u0", "u1"], "states": ["x0", "x1"], "outputs": ["y0", "y1"]}
    rows = ({name: part[k] for name, part in zip(names, ends, strict=True)} for k in range(len(box)))
    return [Claim("enclosure", facts, tensors) for tensors in rows]


def _weights(form: ImplicitForm, A: Tensor) -> Tensor:  # (n,)
    constants = torch.tensor([phi.lipschitz() for phi in form.activations], dtype=torch.float64)
    gamma = constants.repeat_interleave(torch.tensor(list(form.partition)))
    weights, value = perron_weights(upward(A.abs() * gamma[:, None], 1))
    if not value < 1:
        raise IllPosedError("no box of states is known to map into itself: |A| has no weights v with |A| v < v")
    return weights


def _reach(matrix: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the range of ``matrix x`` over a box, and the size of its terms."""
    center, radius = (lower + upper) / 2, (upper - lower) / 2
    middle, spread = center @ matrix.mT, radius @ matrix.abs().mT
    return middle - spread, middle + spread, (center.abs() + radius) @ matrix.abs().mT
