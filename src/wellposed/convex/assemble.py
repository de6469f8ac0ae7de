"""From fitted rows to a model.

`fitting_units` chooses units of the states in which the rows of A fit in the ball; `assembled` builds the model;
`sparse_form` keeps the non-zero entries of one alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from wellposed.activations import Activation, get_activation, rescaled
from wellposed.activations.activation import same_map
from wellposed.activations.blockwise import parts_of, piecewise
from wellposed.conditions.rescaling import rescaling
from wellposed.conditions.rounding import double, upward
from wellposed.convex.matching import Output
from wellposed.convex.problem import WIDE, Design
from wellposed.convex.rows import RowFit, block_starts, row_groups
from wellposed.convex.states import GIBIBYTE, States, scratch
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import ImplicitForm
from wellposed.forms.evaluation import block_norms
from wellposed.forms.operators.base import Operator, Sparse
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.plain import Dense
from wellposed.models.implicit import ImplicitModel


@dataclass(frozen=True)
class Units:
    """One factor 2^e for every block of states: x <- Dx, z <- Dz, phi <- D phi(D^-1 .).

    Args:
        exponents: e, one a block; whole numbers unless the network has loops.
        sizes: of the blocks.
        source: where they come from: "form", "data" or "none".

    Example:
        >>> Units((-1.0, 0.0), (1, 2), "form").factors
        tensor([0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """

    exponents: tuple[float, ...]
    sizes: tuple[int, ...]
    source: str

    @property
    def factors(self) -> Tensor:  # (n,)
        """The diagonal of D."""
        powers = torch.tensor([2.0**e for e in self.exponents], dtype=WIDE)
        return powers.repeat_interleave(torch.tensor(self.sizes))

    def activations(self, given: Sequence[Activation]) -> tuple[Activation, ...]:
        """Returns phi_D of every block, which is phi where it is positively homogeneous."""
        return tuple(rescaled(phi, e) for phi, e in zip(given, self.exponents, strict=True))


def unchanged(states: States) -> Units:
    """Keeps the units of the recording."""
    return Units((0.0,) * len(states.blocks), states.blocks, "none")


def fitting_units(states: States, kappa: float, mask: Tensor) -> Units:
    """Chooses units in which the network's own rows have ``|a|_1 < kappa`` (003 section 2.5).

    From the weights of the network's form where there is one. Else from data: the rows are fitted without a cap on
    what lies before them in the network, and units are chosen for those. Powers of two, so that states, outputs
    and equilibria keep every bit, wherever the network has no loops. If no units exist they stay as they are.

    Args:
        states: with or without a form.
        kappa: the cap.
        mask: the support of the fit, ``(n, n + p)``.
    """
    if states.form is not None:
        norms, source = block_norms(states.form.blocks[0]).cpu(), "form"
    else:
        norms, source = _norms_from_data(states, mask), "data"
    try:
        units = rescaling(norms, kappa)
    except IllPosedError:
        return unchanged(states)
    return Units(tuple(float(value) for value in units.log2), states.blocks, source)


def _norms_from_data(states: States, mask: Tensor) -> Tensor:  # (L, L)
    """Estimates |A_ij|_inf of every pair of layers by least squares on the layers before."""
    n, starts = states.X.shape[1], block_starts(states.blocks)
    before = torch.zeros_like(mask)
    for low, high in pairwise(starts):
        before[low:high, high:] = mask[low:high, high:]
    design, targets = Design.of(states.X, states.U).centred(), Design.of(states.Z).centred()
    squares = design.squares()
    weights = torch.zeros(mask.shape, dtype=WIDE)
    for group in row_groups(before, capped=n):
        if len(group.columns):
            fit = RowFit(kappa=float("inf"), ridge=1e-6 * float(squares[group.columns].mean()))
            problem = fit.problem(design, targets, group, n)
            weights[group.rows[:, None], group.columns] = fit.solve_problem(problem).weights.cpu()
    size = weights[:, :n].abs()
    sums = torch.stack([part.sum(1) for part in size.split(list(states.blocks), dim=1)], dim=1)  # (n, L)
    return torch.stack([part.amax(0) for part in sums.split(list(states.blocks), dim=0)])


BATCH = 4096  # samples whose equilibria are computed at once


@dataclass(frozen=True, eq=False)
class Matrices:
    """A, B and b in double precision, and what a model needs beside them.

    Args:
        A, B, bias: fitted; no bias if None.
        activations, sizes: of the blocks, in the units of the fit.
        cap: on |A|_inf.
        dtype: of the model.
    """

    A: Tensor
    B: Tensor
    bias: Tensor | None
    activations: tuple[Activation, ...]
    sizes: tuple[int, ...]
    cap: float
    dtype: torch.dtype

    def cast(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Converts to the type of the model, and proves that |A|_inf stayed within the cap."""
        A, B = self.A.to(self.dtype), self.B.to(self.dtype)
        norm = float(upward(double(A).abs().sum(1), len(A)).amax()) if len(A) else 0.0
        if not norm <= self.cap:
            raise IllPosedError(f"the fitted A has the norm {norm!r}, above {self.cap!r}; fit in float64")
        return A, B, None if self.bias is None else self.bias.to(self.dtype)


def own_states(matrices: Matrices, U: Tensor, limit: int = GIBIBYTE) -> Tensor:  # (m, n), double
    """Computes the equilibria of fitted rows, on the CPU; above `limit` bytes they lie in a temporary file."""
    A, B, bias = (None if part is None else part.cpu() for part in matrices.cast())
    assert A is not None and B is not None
    phi = piecewise(matrices.activations, matrices.sizes)
    C = A.new_zeros(1, len(A))
    model = ImplicitModel.from_matrices(A, B, C, bias=bias, activation=phi, kappa=matrices.cap, condition="inf")
    X = scratch(len(U), len(A), limit)
    with torch.no_grad():
        for start in range(0, len(U), BATCH):
            rows = slice(start, start + BATCH)
            states = model.equilibrium(U[rows].cpu().to(A)).value
            assert isinstance(states, Tensor)
            X[rows] = states
    return X


def assembled(
    matrices: Matrices, output: Output, undo: Units | None, given: tuple[Activation, ...]
) -> ImplicitModel:
    """Builds the model; a bias of the output becomes one state of constant value.

    Args:
        matrices: in the units of the fit.
        output: in the same units.
        undo: units to leave again; then A is proven well-posed by a weighted norm.
        given: phi of the blocks in the units of the recording.
    """
    A, B, bias = (None if part is None else part.cpu() for part in matrices.cast())
    assert A is not None and B is not None
    C, D = output.C.cpu(), output.D
    phis, options = matrices.activations, {"kappa": matrices.cap, "condition": "inf"}
    if undo is not None:
        factors = undo.factors
        A = (A.double() * factors / factors[:, None]).to(A)
        B, C = (B.double() / factors[:, None]).to(B), C * factors
        bias = None if bias is None else (bias.double() / factors).to(bias)
        phis, options = given, {}
    phi = piecewise(phis, matrices.sizes)
    if output.bias is not None:
        A, B, C, bias, phi = _with_constant(A, B, C, bias, output.bias.cpu(), phi, phis, matrices.sizes)
    D = None if D is None else D.cpu().to(matrices.dtype)
    return ImplicitModel.from_matrices(A, B, C.to(matrices.dtype), D, bias=bias, activation=phi, **options)


def _with_constant(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    bias: Tensor | None,
    constant: Tensor,
    phi: Activation,
    phis: tuple[Activation, ...],
    sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Activation]:
    """Adds a state that is always phi(1), or 1, and multiplies it by the output's bias."""
    one = torch.ones(1, dtype=A.dtype)
    alone = phi.componentwise and all(same_map(part, phis[0]) for part in phis)
    value = double(phi(one)) if alone else one.double()
    if not alone or float(value) == 0:
        phi, value = piecewise((*phis, get_activation("identity")), (*sizes, 1)), one.double()
    bias = A.new_zeros(len(A)) if bias is None else bias
    C = torch.cat([C, (constant / value)[:, None]], dim=1)
    return pad(A, (0, 1, 0, 1)), pad(B, (0, 0, 0, 1)), C, torch.cat([bias, one]), phi


DENSE = 0.5  # fraction of non-zero entries above which a matrix is not stored by its entries


def sparse_form(model: ImplicitModel, blocks: Sequence[int]) -> ImplicitForm:
    """Returns a model as a form whose matrices hold their non-zero entries alone, layer by layer.

    It is evaluated without A as a whole. Outputs agree to rounding, since sums are taken in another order.

    Args:
        model: from `fit_states`.
        blocks: sizes of its layers, as in its report; a state of constant value may come after them.

    Example:
        >>> A = torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> model = ImplicitModel.from_matrices(A, torch.eye(3), torch.ones(1, 3))
        >>> form = sparse_form(model, (1, 2))
        >>> form.A.parts, float(form(torch.tensor([[1.0, 2.0, 3.0]])))
        ({(0, 1): Sparse(1 x 2)}, 7.0)
    """
    with torch.no_grad():
        A, B, C = model.A.clone(), model.B.detach().clone(), model.C.detach().clone()
    D = None if model.D is None else model.D.detach().clone()
    sizes = (*blocks, *([len(A) - sum(blocks)] if len(A) > sum(blocks) else []))
    joined = parts_of(model.activation)
    phis = [phi for phi, _ in joined] if joined else [model.activation] * len(sizes)
    if joined and tuple(size for _, size in joined) != sizes:
        raise InputError(f"the layers of the model have {[size for _, size in joined]} states; received {sizes}")
    return ImplicitForm(
        _cut(A, sizes, sizes), _cut(B, sizes, (B.shape[1],)), _cut(C, (len(C),), sizes),
        None if D is None else _cut(D, (len(D),), (D.shape[1],)),
        None if model.bias is None else model.bias.detach().clone(), phis if len(sizes) > 1 else phis[0],
    )  # fmt: skip


def _cut(matrix: Tensor, heights: Sequence[int], widths: Sequence[int]) -> Block:
    """Cuts a matrix into blocks, of which those without entries are left out."""
    blocks: dict[tuple[int, int], Operator] = {}
    for i, rows in enumerate(matrix.split(list(heights))):
        for j, part in enumerate(rows.split(list(widths), dim=1)):
            count = int(part.count_nonzero())
            if count:
                dense = count > DENSE * part.numel()
                blocks[i, j] = Dense(part.contiguous()) if dense else Sparse(part.to_sparse())
    return Block(tuple(heights), tuple(widths), blocks, matrix.dtype)
