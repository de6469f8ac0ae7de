"""The sensitivity matrix: how far every output can move per unit of every input (003, section 4.3).

`sensitivity` and `lipschitz` are proven bounds. `norm_penalty`, `norm_gain` and `sensitivity_penalty` are
differentiable in the parameters, for training (003, sections 4.2 and 4.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.activations import get_activation
from wellposed.conditions.norms import spectral_norm
from wellposed.conditions.rounding import EPS, upward
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, Diagonal, ImplicitForm, gains
from wellposed.forms.evaluation import Stage
from wellposed.forms.gains import AbsoluteForm, Loop
from wellposed.models import ImplicitModel
from wellposed.robust.query import MethodError, to_form


@torch.no_grad()
def sensitivity(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None = None) -> Tensor:  # (q, p)
    """Bounds ``|y(u) - y(u')| <= S |u - u'|`` by ``S = |C| (I - gamma |A|)^-1 gamma |B| + |D|``, rounded up.

    Its rows are found backwards, ``mu = |C_i| + |A|' Gamma mu`` and ``S_i = mu' Gamma |B| + |D_i|``, one
    right-hand side an output, by substitution where there is no loop and by elimination with a check in a loop.
    Any ``mu >= |C_i| + |A|' Gamma mu`` will do: a change d of the states obeys ``d <= Gamma (|A| d + |B| |du|)``,
    so ``|C_i| d <= mu' (d - Gamma |A| d) <= mu' Gamma |B| |du|``. Nothing is formed for a converted network. With
    maps on blocks (pooling, softmax) it goes forwards, an input at a time, which takes longer.

    Args:
        input_shape: of one sample, where a network is to be converted.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[-1.0]]), torch.tensor([[3.0]]))
        >>> sensitivity(form).round(decimals=6)
        tensor([[6.]], dtype=torch.float64)
    """
    form = to_form(model, input_shape)
    if not all(phi.componentwise for phi in form.activations):
        return gains(form, self_loops=False)
    backward = _Transposed.of(form)
    return backward.rows(torch.eye(form.sizes[2], dtype=torch.float64, device=backward.spread.device))


@torch.no_grad()
def lipschitz(
    model: ImplicitForm | nn.Module, norm: str = "inf", input_shape: tuple[int, ...] | None = None
) -> float:
    """Bounds the Lipschitz constant of u -> y by the norm of the sensitivity matrix, ``|S|_inf`` (003 eq. 4.9).

    Args:
        norm: of inputs and outputs, ``"1"``, ``"2"`` or ``"inf"``.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> round(lipschitz(form), 6)
        6.0
    """
    if norm not in ("1", "2", "inf"):
        raise InputError(f"norm is '1', '2' or 'inf'; received {norm!r}")
    S = sensitivity(model, input_shape)
    if norm == "2":
        return float(spectral_norm(S))
    sums = S.sum(1 if norm == "inf" else 0)
    return float(upward(sums, sum(S.shape)).max()) if len(sums) else 0.0


@dataclass(frozen=True)
class _Transposed:
    """The transposed absolute values of a form with componentwise activations."""

    spread: AbsoluteForm
    A: Block  # Gamma |A|, transposed
    B: Block  # Gamma |B|, transposed
    gammas: tuple[float, ...]

    @classmethod
    def of(cls, form: ImplicitForm) -> "_Transposed":
        spread = AbsoluteForm.of(form)
        gammas = tuple(phi.lipschitz() for phi in form.activations)
        return cls(spread, _scaled(spread.A, gammas).T, _scaled(spread.B, gammas).T, gammas)

    def rows(self, outputs: Tensor) -> Tensor:  # (k, q) >= 0 -> (k, p)
        """Bounds how far non-negative combinations of the outputs move, per unit of every input."""
        spread = self.spread
        pieces = upward(spread.apply(spread.C.T, outputs), spread.terms).split(spread.A.heights, dim=1)
        mu = dict(enumerate(pieces))
        total = spread.apply(spread.D.T, outputs)
        by_input = [_column(self.B, k) for k in range(len(mu))]
        for stage in reversed(spread.order.stages):
            self._close(stage, mu)
            for k in stage.blocks:
                total = total + spread.apply(by_input[k], mu[k])
                for j in spread.rows[k]:
                    if j not in stage.blocks:
                        mu[j] = upward(mu[j] + spread.apply(self.A.parts[j, k], mu[k]), self._terms)
                mu[k] = mu[k][:, :0]
        return upward(total, self._terms * len(spread.order.stages))

    @property
    def _terms(self) -> int:
        return self.spread.terms + max(self.A.shape) + max(self.B.shape) + 4

    def _close(self, stage: Stage, mu: dict[int, Tensor]) -> None:
        """Solves ``mu = c + |A|' Gamma mu`` in a loop."""
        if stage.loop is None:
            return
        inner = self.A.chosen(stage.blocks, stage.blocks)
        identity = get_activation("identity")
        loop = Loop.of(inner, None, (identity,) * len(stage.blocks), self._terms)
        sizes = [self.spread.A.heights[k] for k in stage.blocks]
        solved = loop.bound(torch.cat([mu[k] for k in stage.blocks], dim=1))
        mu.update(zip(stage.blocks, solved.split(sizes, dim=1), strict=True))


def _scaled(block: Block, gammas: tuple[float, ...]) -> Block:
    """Multiplies every block row by the constant of its activation, rounded up."""
    scaled = {}
    for (i, j), part in block.parts.items():
        factor = gammas[i]
        size = block.heights[i]
        scale = Diagonal(torch.full((size,), factor * (1 + 8 * EPS), dtype=torch.float64, device=block.device))
        scaled[i, j] = part if factor == 1 else scale @ part
    return Block(block.heights, block.widths, scaled, torch.float64, block.device)


def _column(block: Block, k: int) -> Block:
    return block.chosen(range(len(block.heights)), [k])


def differentiable_form(
    model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None = None
) -> ImplicitForm:
    """Reads a model as a form whose matrices are functions of its parameters.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> form = differentiable_form(network, (4,))
        >>> form, form.B.to_dense().requires_grad
        (ImplicitForm(8 states, 4 inputs, 2 outputs, relu), True)
    """
    if isinstance(model, ImplicitForm | ImplicitModel) or input_shape is None:
        return to_form(model, None)
    return to_implicit(model, input_shape, detach=False)


def norm_penalty(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None = None) -> Tensor:  # ()
    """Returns ``(|B|^2 + |C|^2) / (2 - 2 |A|) + |D|`` in inf-norms, a Lipschitz constant (003 eq. 4.9).

    It is eq. 4.7 under another number, convex in the matrices, and needs ``|A|_inf < 1``; B and A carry the
    Lipschitz constant of phi. By the inequality of the means it is never below `norm_gain`.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> norm_penalty(form), norm_gain(form)
        (tensor(10.), tensor(6.))
    """
    A, B, C, D = _norms(model, input_shape)
    return 0.5 * (B.square() + C.square()) / (1 - A) + D


def norm_gain(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None = None) -> Tensor:  # ()
    """Returns ``|B| |C| / (1 - |A|) + |D|`` in inf-norms, which `norm_penalty` bounds (003, section 4.2).

    Example:
        >>> norm_gain(ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1)))
        tensor(2.)
    """
    A, B, C, D = _norms(model, input_shape)
    return B * C / (1 - A) + D


def sensitivity_penalty(
    model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None = None
) -> Tensor:  # ()
    """Returns ``|S|_inf`` with ``S = |C| (I - |A|)^-1 |B| + |D|``, never above `norm_gain` (003, section 4.3).

    The largest row sum is ``max_i (|C| v + |D| 1)_i`` with ``v = (I - |A|)^-1 |B| 1``, one linear system. Not
    rounded up: `lipschitz` is the number to report.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> sensitivity_penalty(form)
        tensor(6.)
    """
    form = differentiable_form(model, input_shape)
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


def _norms(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None) -> tuple[Tensor, ...]:
    form = differentiable_form(model, input_shape)
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
