"""Products of forms, which are Lipschitz where their factors are bounded (003, section 2.4)."""

import math

import torch

from wellposed.activations import multiply
from wellposed.conditions.rounding import double, upward
from wellposed.errors import InputError
from wellposed.forms.block import Block
from wellposed.forms.blocks import Blocks
from wellposed.forms.compose import concatenate, same_home, same_input, same_output, series
from wellposed.forms.form import ImplicitForm
from wellposed.forms.selection import Selection


def product(first: ImplicitForm, second: ImplicitForm, bounds: tuple[float, float] | None = None) -> ImplicitForm:
    """Multiplies the outputs of two forms with the same input: ``product(f, g)(u) = f(u) * g(u)``.

    A block of pairs (f_i, g_i) -> (f_i g_i, 0) is put in front of the states of both. The factors are clipped
    at their bounds ``|f(u)| <= c1`` and ``|g(u)| <= c2``, which makes the block Lipschitz (003, section 2.4;
    `product_lipschitz`); within the bounds the product is exact.

    Args:
        bounds: (c1, c2); None derives them from the images of the activations that C reads, ``|C| |x| + |c|``,
            which are bounded only where D is zero.

    Example:
        >>> from wellposed.forms.compose import linear
        >>> same = linear(torch.eye(1))
        >>> product(same, same, bounds=(10.0, 10.0))(torch.tensor([[3.0]]))
        tensor([[9.]])
    """
    same_home(first, second)
    same_input(first, second)
    same_output(first, second)
    c1, c2 = (output_bound(first), output_bound(second)) if bounds is None else bounds
    if not (0 <= c1 < math.inf and 0 <= c2 < math.inf):
        raise InputError(
            f"a product is Lipschitz for bounded factors only; here |f| <= {c1:g} and |g| <= {c2:g}; pass "
            "bounds=(c1, c2), at which they are clipped, or end the factors with a bounded activation as tanh"
        )
    q, home = first.sizes[2], (first.dtype, first.device)
    place = torch.arange(2 * q, device=first.device)
    inputs = {
        (0, 0): Selection(torch.where(place % 2 == 0, place // 2, -1), q, first.dtype),
        (0, 1): Selection(torch.where(place % 2 == 1, place // 2, -1), q, first.dtype),
    }
    pairs = ImplicitForm(
        Block((2 * q,), (2 * q,), {}, *home),
        Block((2 * q,), (q, q), dict(inputs)),
        Selection(place[::2], 2 * q, first.dtype),
        activation=[multiply(c1, c2)],
        labels=["product"] if first.labels or second.labels else None,
    )
    return series(concatenate(first, second), pairs)


def output_bound(form: ImplicitForm) -> float:
    """Bounds every ``|y_i|`` over all inputs, rounded up; infinite where D is not zero or a state unbounded.

    Example:
        >>> from wellposed.forms.compose import linear
        >>> squashed = ImplicitForm(torch.zeros(1, 1), torch.eye(1), 2 * torch.eye(1), activation="tanh")
        >>> output_bound(squashed) < 2.00001, output_bound(linear(torch.eye(1)))
        (True, inf)
    """
    f = Blocks.of(form)
    if f.D.parts:
        return math.inf
    limits = [max(abs(low), abs(high)) for low, high in (phi.image for phi in f.activations)]
    bound = torch.zeros(form.sizes[2], dtype=torch.float64, device=form.device)
    if form.output_bias is not None:
        bound = bound + double(form.output_bias).abs()
    if not all(math.isfinite(limits[j]) for _, j in f.C.parts):
        return math.inf
    sizes = [limit if math.isfinite(limit) else 0.0 for limit in limits]
    states = [bound.new_full((1, n), size) for n, size in zip(f.A.heights, sizes, strict=True)]
    with torch.no_grad():
        bound = bound + f.C.to(torch.float64).abs().apply(torch.cat(states, dim=1))[0]
    # the last factor lets sums that are rounded in the form's own type pass unclipped
    return float(upward(bound, form.sizes[0] + 2).amax()) * (1 + form.sizes[0] * torch.finfo(form.dtype).eps)


def product_lipschitz(c1: float, gamma1: float, c2: float, gamma2: float) -> float:
    """Returns the Lipschitz constant max(c2 gamma_1, c1 gamma_2) of a product of bounded maps (003, section 2.4).

    ``|phi_1(a) phi_2(b) - phi_1(a') phi_2(b')| <= c2 gamma_1 |a - a'| + c1 gamma_2 |b - b'|``, so the constant is
    that of the l1 norm of (a, b).

    Args:
        c1, c2: bounds of ``|phi_1|`` and ``|phi_2|``.
        gamma1, gamma2: their Lipschitz constants.

    Example:
        >>> product_lipschitz(1.0, 0.25, 3.0, 1.0)
        1.0
    """
    return max(c2 * gamma1, c1 * gamma2)
