"""How far states, outputs and margins can move: one entry point for all methods.

A method takes a `Query` and returns `Bounds`; a further one is a line in `METHODS`.
"""

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from wellposed.conditions.rounding import plain_sums
from wellposed.errors import InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.best import best_bounds
from wellposed.robust.box_bound import box_bounds
from wellposed.robust.crown_bound import Crown
from wellposed.robust.interval_bound import interval_bounds
from wellposed.robust.l2_bound import l2_bounds
from wellposed.robust.norm_bound import norm_bounds
from wellposed.robust.query import Query, as_form, check_target, margins
from wellposed.robust.relaxation import Relaxation
from wellposed.robust.result import Bounds
from wellposed.robust.uncertainty import Uncertainty

Method = Callable[[Query], Bounds]

METHODS: dict[str, Method] = {
    "norm": norm_bounds,
    "box": box_bounds,
    "interval": interval_bounds,
    "l2": l2_bounds,
    "crown": Crown(),
    "optimised": Crown(slope_steps=20),
    "lp": Relaxation("lp"),
    "triangle": Relaxation("triangle"),
}
METHODS["best"] = partial(best_bounds, methods=METHODS)


def state_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds every state of the equilibrium, (B, n), over a set of inputs.

    Args:
        model: a form, an `ImplicitModel`, or a network, which is converted.
        inputs: one set for every sample.
        method: ``"norm"``, ``"box"``, ``"interval"``, ``"l2"``, ``"crown"``, ``"optimised"``
            (crown with slopes optimised), ``"lp"`` (as printed in 003), ``"triangle"``, ``"best"``,
            or an object such as `Crown`.
        budget: seconds after which bounds are returned as tight as they are by then.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> state_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), "box").upper.round(decimals=3)
        tensor([[4.]])
    """
    form = as_form(model, inputs)
    return _answer(method, Query(form, inputs, None, _deadline(budget)))


def output_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds every output, (B, q); arguments as in `state_bounds`.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.ones(1, 2))
        >>> found = output_bounds(form, Box(-torch.ones(1, 2), torch.ones(1, 2)))
        >>> found.upper.round(decimals=3), found.method
        (tensor([[2.]]), 'crown')
    """
    form = as_form(model, inputs)
    unit = torch.eye(form.sizes[2], dtype=form.dtype, device=form.device)
    return _answer(method, Query(form, inputs, unit.expand(len(inputs), -1, -1), _deadline(budget)))


def margin_bounds(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> Bounds:
    """Bounds ``y_i - y_target`` for every output i, (B, q); arguments as in `state_bounds`.

    Bounded as one functional ``(C_i - C_target) x``, which is tighter than the difference of two bounds. A sample
    keeps its class on the whole set if all other upper bounds are negative.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> margin_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([0])).upper.round()
        tensor([[ 0., -2.]])
    """
    form = as_form(model, inputs)
    q = form.sizes[2]
    rows = margins(q, check_target(target, len(inputs), q), inputs.center)
    return _answer(method, Query(form, inputs, rows, _deadline(budget)))


def _answer(method: str | Method, query: Query) -> Bounds:
    prove = get_method(method)
    if not len(query.set):
        none = query.set.center.new_zeros(query.shape)
        return Bounds(none, none, method if isinstance(method, str) else type(method).__name__, none)
    with plain_sums(query.set.center):
        return prove(query).stated()


def get_method(method: str | Method) -> Method:
    """Returns the method of that name; other callables pass through.

    Example:
        >>> get_method("box").__name__
        'box_bounds'
    """
    if callable(method):
        return method
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return METHODS[method]


def _deadline(budget: float | None) -> float:
    if budget is None:
        return math.inf
    if not budget > 0:
        raise InputError(f"the time budget is a positive number of seconds; received {budget}")
    return time.monotonic() + budget
