"""Gaps of fitted rows as claims of a certificate: data and dual vectors from which anyone computes them again."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.conditions.rounding import double, upward
from wellposed.convex.problem import SMALLEST_RIDGE, common_support
from wellposed.convex.report import FitReport
from wellposed.convex.rows import block_starts
from wellposed.convex.states import States
from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.certificates import Claim

SLACK = 1e-12  # of |z|^2 / 2, for the rounding of the gap


def gap_claim(
    model: ImplicitModel, report: FitReport, states: States, support: Tensor | None = None, *, own: bool = False
) -> Claim:
    """Claims how far every row of (A, B) is from the best row, for the plain misfit under the cap.

    The claim brings data that have the same misfit for every row (the triangular factor of states, inputs and
    targets, of which the means are taken where there is a bias) and a dual vector a row, so that the gap
    ``F(w) - D(nu)`` of 003 eq. (3.4) can be computed from it and the model alone.

    Args:
        model, report: from `fit_states`, in the units of the fit (not ``rescale="undo"``).
        states: what it was fitted to.
        support: which entries the best row may use, ``(n, n + p)``; None is those that the row itself uses.
        own: compares with rows on the model's own states, as ``sequential=True`` fits them.

    Raises:
        InputError: the model has other states than the recording, as those of `rescale="undo"` may have.
    """
    n, p = states.X.shape[1], states.U.shape[1]
    if model.state_features not in (n, n + 1) or model.in_features != p:
        raise InputError(f"the model has {model.state_features} states and the recording {n}; they must agree")
    powers = torch.tensor([2.0**e for e in report.exponents], dtype=torch.float64)
    factors = powers.repeat_interleave(torch.tensor(report.blocks))
    U, Z = double(states.U).cpu(), double(states.Z).cpu() * factors
    with torch.no_grad():
        A, B = double(model.A).cpu()[:n, :n], double(model.B).cpu()[:n]
    X = _own_states(model, states.U)[:, :n] if own else double(states.X).cpu() * factors
    data = _Data(torch.cat([X, U], 1), Z, torch.cat([A, B], 1), n, report, model.bias is not None)
    groups: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    largest = 0.0
    for rows, columns in _groups(report.blocks, data.weights, support):
        facts, arrays, worst = data.group(rows, columns, "nonzeros" if support is None else "all")
        names = {name: f"{name}{len(groups)}" for name in arrays}
        tensors |= {names[name]: value for name, value in arrays.items()}
        groups.append({**facts, **names})
        largest = max(largest, worst)
    return Claim("row-gaps", {"groups": groups, "largest": largest}, tensors)


def with_claimed_gaps(report: FitReport, claim: Claim) -> FitReport:
    """Returns a report with the gaps that a claim proves, which are those of the fit and what rounding may add."""
    gap, relative = report.gap.clone(), report.relative_gap.clone()
    for group in claim.facts["groups"]:
        proven, size = claim.tensors[group["gaps"]], claim.tensors[group["targets"]].square().sum(1) / 2
        gap[group["rows"]] = proven.to(gap)
        relative[group["rows"]] = torch.where(size > 0, proven / size, 0.0).to(relative)
    return replace(report, gap=gap, relative_gap=relative)


@torch.no_grad()
def _own_states(model: ImplicitModel, U: Tensor) -> Tensor:  # (m, n)
    states = model.equilibrium(U.to(model.B)).value
    assert isinstance(states, Tensor)
    return double(states).cpu()


def _groups(blocks: tuple[int, ...], weights: Tensor, support: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Groups rows that share their columns: those of a layer, or those of the same support."""
    if support is not None:
        return [pair for pair in common_support(support.cpu()) if len(pair[0])]
    starts = block_starts(blocks)
    rows = [torch.arange(starts[k], starts[k + 1]) for k in range(len(blocks))]
    return [(part, torch.nonzero((weights[part] != 0).any(0))[:, 0]) for part in rows if len(part)]


@dataclass(frozen=True, eq=False)
class _Data:
    """Samples, targets and rows in float64."""

    M: Tensor  # (m, n + p)
    Z: Tensor  # (m, n)
    weights: Tensor  # (n, n + p)
    states: int
    report: FitReport
    bias: bool

    def group(
        self, rows: Tensor, columns: Tensor, support: str
    ) -> tuple[dict[str, Any], dict[str, Tensor], float]:
        """Returns facts and tensors of some rows, and their largest relative gap."""
        states = columns[columns < self.states]
        capped = len(states) if self.report.bound == "state" else len(columns)
        design, targets = _reduced(self.M[:, columns], self.Z[:, rows], self.bias)
        weights = self.weights[rows][:, columns]
        kappa = max(self.report.kappa, float(upward(weights[:, :capped].abs().sum(1), len(columns)).max()))
        ridge = torch.zeros(len(columns), dtype=torch.float64)
        ridge[capped:] = (SMALLEST_RIDGE * design.square().sum(0))[capped:].clamp(min=1e-300)
        dual, gaps = torch.empty_like(targets.mT), torch.empty(len(rows), dtype=torch.float64)
        for k in range(len(rows)):
            used = torch.ones_like(columns, dtype=torch.bool) if support == "all" else weights[k] != 0
            cut = int(used[:capped].sum())
            dual[k], gaps[k] = _dual(design[:, used], targets[:, k], weights[k, used], ridge[used], cut, kappa)
        size = targets.square().sum(0) / 2
        gaps = torch.where(size > 0, gaps.clamp(min=0) * (1 + 1e-6) + SLACK * size, 0.0)
        facts = {"rows": rows.tolist(), "states": states.tolist(), "capped": capped, "kappa": kappa,
                 "inputs": (columns[len(states) :] - self.states).tolist(), "support": support}  # fmt: skip
        tensors = {"design": design, "targets": targets.mT, "dual": dual, "ridge": ridge, "gaps": gaps}
        ratio = torch.where(size > 0, gaps / size, 0.0)
        return facts, tensors, float(ratio.max()) * (1 + 1e-12)


def _reduced(M: Tensor, Z: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Replaces many samples by few with the same misfits: the triangular factor of all columns."""
    if bias:
        M, Z = M - M.mean(0), Z - Z.mean(0)
    whole = torch.cat([M, Z], 1)
    if len(whole) > whole.shape[1]:
        whole = torch.linalg.qr(whole, mode="r").R
    return whole[:, : M.shape[1]].contiguous(), whole[:, M.shape[1] :].contiguous()


def _dual(M: Tensor, z: Tensor, w: Tensor, ridge: Tensor, capped: int, kappa: float) -> tuple[Tensor, Tensor]:
    """Returns the residual at the best free entries for the capped ones, and the gap that it proves."""
    target = z - M[:, :capped] @ w[:capped]
    free, root = M[:, capped:], ridge[capped:].sqrt()
    if free.shape[1]:
        stacked = torch.cat([free, root.diag()])
        best = torch.linalg.lstsq(
            stacked, torch.cat([target, torch.zeros_like(root)])[:, None], driver="gelsd"
        ).solution
        nu = free @ best[:, 0] - target
    else:
        nu = -target
    slopes = M.mT @ nu
    residual = M @ w - z
    top = slopes[:capped].abs().max() if capped else slopes.new_zeros(())
    primal = residual @ residual + (ridge * w * w).sum()
    least = -(nu @ nu) - 2 * (z @ nu) - 2 * kappa * top - (slopes[capped:].square() / ridge[capped:]).sum()
    return nu, (primal - least) / 2
