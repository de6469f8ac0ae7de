"""Penalties on how far outputs can move, differentiable in the parameters (003, sections 4.2 and 4.3)."""

import torch
from torch import Tensor, nn

from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.robust.live_form import live_form
from wellposed.robust.query import MethodError


def norm_penalty(model: ImplicitForm | nn.Module) -> Tensor:  # ()
    """Returns ``(|B|^2 + |C|^2) / (2 - 2 |A|) + |D|`` in inf-norms, a Lipschitz constant (003 eq. 4.9).

    It is eq. 4.7 under another number, convex in the matrices, and needs ``|A|_inf < 1``; B and A carry the
    Lipschitz constant of phi. By the inequality of the means it is never below `norm_gain`.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> norm_penalty(form), norm_gain(form)
        (tensor(10.), tensor(6.))
    """
    A, B, C, D = _norms(model)
    return 0.5 * (B.square() + C.square()) / (1 - A) + D


def norm_gain(model: ImplicitForm | nn.Module) -> Tensor:  # ()
    """Returns ``|B| |C| / (1 - |A|) + |D|`` in inf-norms, which `norm_penalty` bounds (003, section 4.2).

    Example:
        >>> norm_gain(ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1)))
        tensor(2.)
    """
    A, B, C, D = _norms(model)
    return B * C / (1 - A) + D


def sensitivity_penalty(model: ImplicitForm | nn.Module) -> Tensor:  # ()
    """Returns ``|S|_inf`` with ``S = |C| (I - |A|)^-1 |B| + |D|``, never above `norm_gain` (003, section 4.3).

    The largest row sum is ``max_i (|C| v + |D| 1)_i`` with ``v = (I - |A|)^-1 |B| 1``, one linear system. Not
    rounded up: `lipschitz` is the number to report.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> sensitivity_penalty(form)
        tensor(6.)
    """
    form = live_form(model)
    gamma = _gammas(form)
    A, B, C, D = (getattr(form, name).to_dense().abs() for name in "ABCD")
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    v = torch.linalg.solve(eye - gamma[:, None] * A, gamma * B.sum(1))
    if not bool((v.isfinite() & (v >= -1e-6 * v.detach().abs().max())).all()):
        raise IllPosedError(
            "the sensitivity matrix does not exist: the spectral radius of |A| is not below one; train with a "
            "condition that caps it, such as 'inf'"
        )
    return (C @ v + D.sum(1)).max()


def _norms(model: ImplicitForm | nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = live_form(model)
    gamma = _gammas(form)
    A, B, C, D = (getattr(form, name).to_dense().abs().sum(1) for name in "ABCD")
    norms = (gamma * A).max(), (gamma * B).max(), C.max(), D.max()
    if not float(norms[0].detach()) < 1:
        raise IllPosedError(
            f"the norm penalty needs |A|_inf < 1, and it is {float(norms[0].detach()):.4g}; use "
            "sensitivity_penalty, or form.rescale(kappa) first"
        )
    return norms


def _gammas(form: ImplicitForm) -> Tensor:  # (n,)
    """Returns the Lipschitz constant of every state's activation."""
    if not all(phi.componentwise for phi in form.activations):
        raise MethodError("penalties are for activations that act on every state alone; use lipschitz() to report")
    pairs = zip(form.activations, form.partition, strict=True)
    return torch.cat([torch.full((n,), phi.lipschitz(), dtype=form.dtype, device=form.device) for phi, n in pairs])
