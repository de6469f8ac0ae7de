"""The sensitivity matrix: how far every output can move per unit of every input (003, section 4.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.activations import get_activation
from wellposed.conditions.norms import spectral_norm
from wellposed.conditions.rounding import EPS, upward
from wellposed.errors import InputError
from wellposed.forms import Block, Diagonal, ImplicitForm, gains
from wellposed.forms.evaluation import Stage
from wellposed.forms.gains import Loop, Spread
from wellposed.robust.query import to_form


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
    return float(upward(sums, sum(S.shape)).max())


@dataclass(frozen=True)
class _Transposed:
    """The transposed absolute values of a form with componentwise activations."""

    spread: Spread
    A: Block  # Gamma |A|, transposed
    B: Block  # Gamma |B|, transposed
    gammas: tuple[float, ...]

    @classmethod
    def of(cls, form: ImplicitForm) -> "_Transposed":
        spread = Spread.of(form)
        gammas = tuple(phi.lipschitz() for phi in form.activations)
        return cls(spread, _scaled(spread.A, gammas).T, _scaled(spread.B, gammas).T, gammas)

    def rows(self, outputs: Tensor) -> Tensor:  # (k, q) >= 0 -> (k, p)
        """Bounds how far non-negative combinations of the outputs move, per unit of every input."""
        spread = self.spread
        pieces = upward(spread.C.T.apply(outputs), spread.terms).split(spread.A.heights, dim=1)
        mu = dict(enumerate(pieces))
        total = spread.D.T.apply(outputs)
        by_input = [_column(self.B, k) for k in range(len(mu))]
        for stage in reversed(spread.plan.stages):
            self._close(stage, mu)
            for k in stage.blocks:
                total = total + by_input[k].apply(mu[k])
                for j in spread.rows[k]:
                    if j not in stage.blocks:
                        mu[j] = upward(mu[j] + self.A.parts[j, k].apply(mu[k]), self._terms)
                mu[k] = mu[k][:, :0]
        return upward(total, self._terms * len(spread.plan.stages))

    @property
    def _terms(self) -> int:
        return self.spread.terms + max(self.A.shape) + max(self.B.shape) + 4

    def _close(self, stage: Stage, mu: dict[int, Tensor]) -> None:
        """Solves ``mu = c + |A|' Gamma mu`` in a loop."""
        if stage.system is None:
            return
        inner = self.A.chosen(stage.blocks, stage.blocks)
        identity = get_activation("identity")
        loop = Loop.of(inner, None, (identity,) * len(stage.blocks), self._terms)
        sizes = [self.spread.A.heights[k] for k in stage.blocks]
        found = loop.bound(torch.cat([mu[k] for k in stage.blocks], dim=1))
        mu.update(zip(stage.blocks, found.split(sizes, dim=1), strict=True))


def _scaled(block: Block, gammas: tuple[float, ...]) -> Block:
    """Multiplies every block row by the constant of its activation, rounded up."""
    parts = {}
    for (i, j), part in block.parts.items():
        factor = gammas[i]
        size = block.heights[i]
        scale = Diagonal(torch.full((size,), factor * (1 + 8 * EPS), dtype=torch.float64, device=block.device))
        parts[i, j] = part if factor == 1 else scale @ part
    return Block(block.heights, block.widths, parts, torch.float64, block.device)


def _column(block: Block, k: int) -> Block:
    return block.chosen(range(len(block.heights)), [k])
