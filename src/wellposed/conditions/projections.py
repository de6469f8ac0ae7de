"""Differentiable projections of a weight matrix on the sets that guarantee an equilibrium."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.conditions.norms import block_norms, block_sizes
from wellposed.equilibrium.tracing import forward_rule, under_forward_mode
from wellposed.errors import InputError, SecondDerivativeError


def project_rows(W: Tensor, radius: float) -> Tensor:
    """Projects every row on the l1 ball: min |p - w|_2 subject to sum_j |p_j| <= radius.

    p_j = sign(w_j) (|w_j| - theta)_+ with theta = max_k ((|w|_(1) + ... + |w|_(k) - radius) / k)_+ over
    the sorted entries. This is the projection on |A|_inf <= radius (003, Remark 2). A row
    inside is returned bit for bit; the exact row sum of the result never exceeds the radius.

    Args:
        W: (..., n, m).
        radius: the largest row sum.

    Example:
        >>> project_rows(torch.tensor([[3.0, -1.0], [0.25, 0.5]]), 1.0)
        tensor([[1.0000, 0.0000],
                [0.2500, 0.5000]])
    """
    return _shrink_rows(W, radius, None)


def project_rows_one_sided(W: Tensor, radius: float) -> Tensor:
    """Projects every row on W_ii + sum_{j != i} |W_ij| <= radius, so that mu_inf(W) <= radius.

    The KKT conditions of the Euclidean projection are those of the l1 ball with a diagonal that is signed
    and always active: d = w_ii - theta, p_j = sign(w_j) (|w_j| - theta)_+ with one theta >= 0 a row. Bit for
    bit the identity inside.

    Args:
        W: (..., n, n).

    Example:
        >>> project_rows_one_sided(torch.tensor([[-5.0, 4.0], [2.0, 0.0]]), 0.5)
        tensor([[-5.0000, 4.0000],
                [ 1.2500, -0.7500]])
    """
    return _shrink_rows(W, radius, torch.eye(W.shape[-1], dtype=torch.bool, device=W.device))


def _shrink_rows(W: Tensor, radius: float, diagonal: Tensor | None) -> Tensor:
    wide, eps = _wide(W), torch.finfo(W.dtype).eps
    with torch.no_grad():
        if diagonal is None and _may_branch(W) and W.numel():
            largest = float(torch.linalg.vector_norm(W, 1, -1, dtype=wide).max())
            if largest * (1 + (W.shape[-1] + 4) * torch.finfo(wide).eps) <= radius:
                return W
        load, sign = W.abs(), W.sign()  # (..., n, m)
        size = total = load.sum(-1, keepdim=True, dtype=wide)
        if diagonal is not None:
            load, sign = torch.where(diagonal, W, load), sign.masked_fill(diagonal, 1.0)
            total = load.sum(-1, keepdim=True, dtype=wide)
        # The slack pays for rounding in the sums, 2 eps for that of the result: row sums never exceed radius.
        unit = (W.shape[-1] + 4) * torch.finfo(wide).eps
        outside = total + unit * size > radius
        if _may_branch(W) and not bool(outside.any()):
            return W
        top = _origin(load, radius) if diagonal is None else torch.zeros_like(size, dtype=W.dtype)
        load = load - top
        capped = size if diagonal is not None else size.clamp(max=radius)
        near = torch.where(load > -radius, load.abs(), 0.0) if diagonal is None else W.abs()
        summed = torch.maximum(near.sum(-1, keepdim=True, dtype=wide), capped)
        target = radius - 4 * unit * summed - 2 * eps * capped
        level = _threshold(load if diagonal is not None else load.clamp(min=-2 * radius), target, diagonal)
        level = level + 2 * eps * level.abs()
        active = (load - torch.where(outside, level, -torch.inf).to(W.dtype)).sign().clamp(min=0)
        active = active if diagonal is None else active.masked_fill(diagonal, 1.0)
        sign, count = sign * active, active.sum(-1, keepdim=True, dtype=wide)
        share = outside / count.clamp(min=1)
    moved = W * active - sign * top
    theta = ((moved * sign).sum(-1, keepdim=True, dtype=wide) - target) * share
    theta = torch.where(top > 0, theta, theta.abs())
    return moved - sign * (theta + 2 * eps * theta.detach().abs()).to(W.dtype)


def _origin(load: Tensor, radius: float) -> Tensor:
    """Returns the origin to measure entries from: the largest entry in rows far outside, else zero.

    Entries of a result lie within the radius of the largest one, and where that is more than twice the radius, the
    differences are exact, so that nothing of the size of the entries is rounded.
    """
    top = load.amax(-1, keepdim=True)
    return torch.where(top > 2 * radius, top, 0.0)


def _wide(W: Tensor) -> torch.dtype:
    return torch.float32 if W.device.type == "mps" else torch.float64


def _may_branch(W: Tensor) -> bool:
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return W.device.type == "cpu" and not traced


def _threshold(load: Tensor, radius: Tensor, diagonal: Tensor | None) -> Tensor:
    """Returns theta = max_k (load_(1) + ... + load_(k) - radius) / k, the diagonal counted first."""
    if diagonal is None:
        ordered = _descending(load)
    else:
        first = load.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        rest = _descending(load.masked_fill(diagonal, -1.0))[..., :-1]
        ordered = torch.cat([first, rest], -1)
    rank = torch.arange(1, load.shape[-1] + 1, dtype=radius.dtype, device=load.device)
    return ((ordered.cumsum(-1, dtype=radius.dtype) - radius) / rank).amax(-1, keepdim=True)


def _descending(load: Tensor) -> Tensor:
    if _may_branch(load) and load.dtype in (torch.float32, torch.float64):
        # Ten times faster than torch.sort on a CPU, which also sorts indices.
        return -torch.from_numpy(np.sort((-load).numpy(), axis=-1))
    return load.sort(-1, descending=True).values


class _FirstOnly(torch.autograd.Function):
    """Passes a gradient through and refuses to be differentiated itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, W: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise SecondDerivativeError(
            "the clipping of singular values or of the symmetric part is differentiable once; "
            "use condition='inf' or 'mu', whose projection has all derivatives"
        )

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, w_tangent: Tensor | None) -> Tensor | None:
        return tangent if w_tangent is None else _FirstOnly.backward(ctx)


def _excess_slopes(s: Tensor, kappa: float, sign: float) -> Tensor:
    """Returns (e(s_i) - sign e(s_j)) / (s_i - sign s_j) for e(s) = (s - kappa)_+, e' on the diagonal."""
    excess = (s - kappa).clamp(min=0)
    left, right = s.unsqueeze(-1), s.unsqueeze(-2)
    numerator = excess.unsqueeze(-1) - sign * excess.unsqueeze(-2)
    both = (left > kappa) & (right > kappa)
    none = (left <= kappa) & (right <= kappa)
    if sign > 0:
        return torch.where(
            both, 1.0, torch.where(none, 0.0, numerator / torch.where(both | none, 1.0, left - right))
        )
    return torch.where(none, 0.0, numerator / torch.where(none, 1.0, left + right))


class _Clip(torch.autograd.Function):
    """Clips singular values or, where `symmetric`, the eigenvalues of the symmetric part."""

    @staticmethod
    def forward(W: Tensor, kappa: float, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if symmetric:
            s, Q = torch.linalg.eigh((W + W.mT) / 2)
            return W - (Q * (s - kappa).clamp(min=0).unsqueeze(-2)) @ Q.mT, Q, s, Q.mT.clone()
        U, s, Vh = torch.linalg.svd(W)
        inside = (s[..., :1] <= kappa).unsqueeze(-1)
        return torch.where(inside, W, (U * s.clamp(max=kappa).unsqueeze(-2)) @ Vh), U, s, Vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, bool], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.save_for_forward(inputs[0], *output[1:])
        ctx.how = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        return _clip_derivative(ctx.saved_tensors, gradient, *ctx.how), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], W: Tensor, *how: Any) -> tuple[Any, int]:
        return _Clip.apply(W.movedim(in_dims[0], 0), *how), 0


class _DualClip(_Clip):
    """The same with a rule for forward mode, which torch.compile does not take."""

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: None) -> tuple[Tensor, None, None, None]:
        return _clip_derivative(saved, tangent, *ctx.how), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], W: Tensor, *how: Any) -> tuple[Any, int]:
        return _DualClip.apply(W.movedim(in_dims[0], 0), *how), 0


def _clip_derivative(saved: Sequence[Tensor], change: Tensor, kappa: float, symmetric: bool) -> Tensor:
    """Applies the derivative to a change of W; it is symmetric, and so the same for both modes."""
    W, U, s, Vh = saved
    inner = U.mT @ change @ Vh.mT
    clipped = _excess_slopes(s, kappa, 1.0) * (inner + inner.mT) / 2
    if not symmetric:
        clipped = clipped + _excess_slopes(s, kappa, -1.0) * (inner - inner.mT) / 2
    derivative: Tensor = _FirstOnly.apply(change - U @ clipped @ Vh, W)
    return derivative


def clip_singular_values(W: Tensor, kappa: float) -> Tensor:
    """Projects a square matrix on the spectral ball: U diag(min(s, kappa)) V'.

    The derivative is the Daleckii-Krein formula: with f(s) = min(s, kappa), the symmetric part of U'dWV is
    multiplied by (f_i - f_j) / (s_i - s_j) and its skew part by (f_i + f_j) / (s_i + s_j), finite also at
    repeated singular values. Bit for bit the identity inside; |result|_2 <= kappa up to rounding.

    Args:
        W: (..., n, n).

    Example:
        >>> clip_singular_values(torch.diag(torch.tensor([3.0, 0.5])), 1.0).diagonal()
        tensor([1.0000, 0.5000])
    """
    return _clip(W, kappa, symmetric=False)


def clip_symmetric_part(W: Tensor, kappa: float) -> Tensor:
    """Projects on lambda_max((W + W') / 2) <= kappa; the skew part stays as it is.

    The derivative multiplies Q' dS Q by the divided differences of min(lambda, kappa) (Daleckii-Krein).

    Args:
        W: (..., n, n).

    Example:
        >>> clip_symmetric_part(torch.tensor([[2.0, 5.0], [-5.0, -7.0]]), 0.5)
        tensor([[ 0.5000,  5.0000],
                [-5.0000, -7.0000]])
    """
    return _clip(W, kappa, symmetric=True)


def project_block_rows(W: Tensor, blocks: int | Sequence[int], kappa: float, norm: str) -> Tensor:
    """Scales blocks so that sum_j |W_ij|_{p->p} <= kappa in every block row i.

    The vector of block norms is projected on the l1 ball and block ij is multiplied by the ratio, so that
    |N(A, 1)|_inf <= kappa (003, eq. 2.6 and Remark 2). Bit for bit the identity inside.

    Args:
        W: (..., n, n).
        blocks: the sizes, or one size for all (0: a single block).
        norm: "1", "2" or "inf".

    Example:
        >>> project_block_rows(torch.diag(torch.tensor([4.0, 2.0, 0.5])), [2, 1], 1.0, "inf").diagonal()
        tensor([1.0000, 0.5000, 0.5000])
    """
    sizes = block_sizes(W.shape[-1], blocks)
    norms = block_norms(W, sizes, norm)  # (..., L, L)
    capped = project_rows(norms, kappa * (1 - (W.shape[-1] + 8) * torch.finfo(W.dtype).eps))
    ratio = torch.where(norms > 0, capped / torch.where(norms > 0, norms, 1.0), 1.0)
    repeats = torch.tensor(sizes, device=W.device)
    spread = ratio.repeat_interleave(repeats, -2, output_size=sum(sizes))
    return W * spread.repeat_interleave(repeats, -1, output_size=sum(sizes))


@torch.no_grad()
def _is_inside(W: Tensor, kappa: float, symmetric: bool) -> bool:
    """Tells whether nothing is to be clipped, by a Cholesky factor: far cheaper than a decomposition."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not W.numel():
        return False
    if W.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    wide = W.detach().to(_wide(W))
    square, limit = ((wide + wide.mT) / 2, kappa) if symmetric else (wide.mT @ wide, kappa**2)
    eye = torch.eye(W.shape[-1], dtype=wide.dtype, device=W.device)
    factor, failed = torch.linalg.cholesky_ex(limit * eye - square)
    return bool((failed == 0).all() & factor.isfinite().all())


def _clip(W: Tensor, kappa: float, *, symmetric: bool) -> Tensor:
    if W.ndim < 2 or W.shape[-1] != W.shape[-2]:
        raise InputError(f"expected square matrices (..., n, n), got {tuple(W.shape)}")
    if _is_inside(W, kappa, symmetric):
        return W
    function = _DualClip if under_forward_mode() else _Clip
    # In float64: on a GPU a float32 decomposition may be wrong in the fourth digit.
    try:
        clipped: Tensor = function.apply(W.to(_wide(W)), kappa, symmetric)[0]
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise InputError(
            "the raw matrix has no decomposition: it holds NaN, infinite or far too large entries; find out where "
            "they come from (a learning rate that is too large, a division by zero) and start from finite ones"
        ) from error
    return clipped.to(W.dtype)
