"""From a form to a model that goes on training."""

from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.blockwise import piecewise
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm, Zero
from wellposed.forms.form import MODEL_BUILDERS
from wellposed.models.implicit import ImplicitModel

LARGEST = 2 << 30  # bytes of a dense A


def continued(
    form: ImplicitForm, *, feedback: bool = True, kappa: float | None = None, **options: Any
) -> ImplicitModel:
    """Builds a model that computes what a form computes, with all entries of A free to train.

    A network without loops is rescaled first so that ``|A|_inf`` stays below the cap and its outputs stay the
    same (003, section 2.5); training may then add feedback. An output bias becomes one state of constant value.

    Args:
        form: up to some twenty thousand states, since A is formed.
        feedback: False keeps a strictly triangular A triangular, without a cap.
        kappa: the cap on A; by default 0.95 over the Lipschitz constant of phi or, if larger, what A needs.
        options: keywords of `ImplicitModel`.

    Example:
        >>> A = torch.tensor([[0.0, 8.0], [0.0, 0.0]])
        >>> model = continued(ImplicitForm(A, torch.eye(2), torch.ones(1, 2)))
        >>> model.A.detach()
        tensor([[0.0000, 0.5000],
                [0.0000, 0.0000]])
    """
    n = form.sizes[0]
    if n * n * form.A.dtype.itemsize > LARGEST:
        raise InputError(
            f"a model holds A in full: {n} states make {n * n * form.A.dtype.itemsize / 2**30:.1f} GiB, more than "
            f"{LARGEST >> 30}; convert a smaller network, or train the network and convert it afterwards"
        )
    if n == 0:
        raise InputError("the form has no states: a linear map needs no equilibrium; train a torch.nn.Linear")
    if not feedback:
        options["triangular"] = True
    elif not form.plan.systems or form.certificate().condition == "triangular":
        form = _capped(form, kappa)
    A, B, C = (block.to_dense() for block in (form.A, form.B, form.C))
    bias, activation = form.bias, form.activation
    if form.output_bias is not None and bool(form.output_bias.any()):
        A, B, C, bias, activation = _with_constant(form, A, B, C)
    D = None if isinstance(form.D, Zero) else form.D.to_dense()
    if kappa is not None:
        options["kappa"] = kappa
    return ImplicitModel.from_matrices(A, B, C, D, bias=bias, activation=activation, **options)


def _capped(form: ImplicitForm, kappa: float | None) -> ImplicitForm:
    """Rescales where the rows of A are above the cap."""
    cap = 0.95 / max(1.0, form.activation.lipschitz()) if kappa is None else kappa
    return form if float(form.A.abs().row_sums().max()) < cap else form.rescale(cap)


def _with_constant(
    form: ImplicitForm, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Activation]:
    """Adds a state whose value is a constant, which C multiplies by the output bias."""
    n = len(A)
    phi, value = form.activation, torch.ones(1, dtype=A.dtype, device=A.device)
    single = phi.componentwise and len(set(form.activations)) == 1
    if single and float(phi(value)) != 0:
        value = phi(value)
    else:
        phi = piecewise((*form.activations, get_activation("identity")), (*form.partition, 1))
    bias = A.new_zeros(n) if form.bias is None else form.bias
    assert form.output_bias is not None
    return (
        torch.nn.functional.pad(A, (0, 1, 0, 1)),
        torch.nn.functional.pad(B, (0, 0, 0, 1)),
        torch.cat([C, (form.output_bias / value)[:, None]], dim=1),
        torch.cat([bias, torch.ones(1, dtype=A.dtype, device=A.device)]),
        phi,
    )


MODEL_BUILDERS.append(continued)
