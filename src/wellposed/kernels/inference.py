"""Which matrices of a model are sparse enough that inference is faster with sparse products."""

from typing import Any

import torch
from torch import Tensor

from wellposed.conditions.conditions import Triangular
from wellposed.equilibrium.tracing import under_transform
from wellposed.kernels.sparse import LEAST, SparseModel, SparseRows, largest_share, sparse_or_none
from wellposed.kernels.support import installation_problem, tensor_problem

Tensors = tuple[Tensor | None, ...]
NOTHING = SparseModel(None, None, None, None)


def sparse_parts(model: Any, u: Tensor) -> SparseModel:
    """Returns the matrices whose sparse products are faster for a batch, none where derivatives are needed.

    Args:
        model: an `ImplicitModel`.
        u: inputs ``(..., p)``.
    """
    if model.state_features < LEAST:
        return NOTHING
    tensors = _tensors(model)
    if _obstacle(model, tensors) or _needs_gradient((u, *tensors)):
        return NOTHING
    return faster_parts(known_parts(model, tensors), u.shape[:-1].numel())


def faster_parts(known: SparseModel, batch: int) -> SparseModel:
    """Leaves out what is faster dense."""
    A = known.A if known.A is not None and known.A.pays(batch) else None
    others = (part if part is not None and part.pays_once(batch) else None for part in (known.B, known.C, known.D))
    found = A, *others
    return SparseModel(*found) if any(part is not None for part in found) else NOTHING


def known_parts(model: Any, tensors: Tensors) -> SparseModel:
    """Returns all matrices that are sparse enough for some batch, made anew when parameters have changed."""
    settings = model.state.condition, model.state.kappa, model.activation
    found: SparseModel = model.sparse_cache.get(tensors, settings, lambda: _make_parts(model))
    return found


def _tensors(model: Any) -> Tensors:
    """Returns all that the outputs depend on; A has no free parameter of its own where it is of low rank."""
    state = model.state
    return getattr(state, "raw", None), state.log_weights, model.B, model.C, model.D, model.bias


@torch.no_grad()
def _make_parts(model: Any) -> SparseModel:
    others = (None if part is None else sparse_or_none(part) for part in (model.B, model.C, model.D))
    return SparseModel(sparse_or_none(model.state.dense(), square=True), *others)


def _obstacle(model: Any, tensors: Tensors) -> bool:
    """Tells whether A is not iterated with as it is, or cannot be looked at or kept."""
    rule = model.state.condition
    if model.executor == "reference" or tensors[0] is None or installation_problem() or under_transform():
        return True
    shifted = rule.name in ("mu", "monotone") or (isinstance(rule, Triangular) and rule.diagonal)
    # Tensors made in inference mode do not tell when they change.
    hidden = any(part is not None and part.is_inference() for part in tensors)
    return shifted or hidden or bool(tensor_problem(tensors[0]))


def _needs_gradient(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)


def explain_parts(model: Any, u: Tensor) -> str:
    """Says which products are sparse and why; nothing for small models.

    Example:
        >>> from wellposed import ImplicitModel
        >>> explain_parts(ImplicitModel(3, 2, 8), torch.zeros(5, 3))
        ''
    """
    n, batch, tensors = model.state_features, u.shape[:-1].numel(), _tensors(model)
    if n < LEAST or _obstacle(model, tensors):
        return ""
    known, limit = known_parts(model, tensors), largest_share(n, batch)
    stored = int(model.state.dense().count_nonzero()) if known.A is None else known.A.stored
    found, share = faster_parts(known, batch), f"{stored / n**2:.1%} of its entries"
    if found is NOTHING:
        return f"dense A ({share}; sparse up to {limit:.0%} at batch {batch})"
    if _needs_gradient((u, *tensors)):
        return f"dense A ({share}; sparse products are for inference, under torch.no_grad())"
    names = " and ".join(name for name in "ABCD" if getattr(found, name) is not None)
    if found.A is None:
        return f"sparse {names}, dense A ({share}; sparse up to {limit:.0%} at batch {batch})"
    substituted = f", substitution in {found.A.levels} levels" if _substitutes(model, found.A) else ""
    return f"sparse {names} (A: {share}; sparse up to {limit:.0%} at batch {batch}){substituted}"


def _substitutes(model: Any, A: SparseRows) -> bool:
    return model.solver is None and len(A.arrays[3]) > 0
