"""TransformerCell: a weight-tied transformer block for `DEQ`."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.equilibrium.maps import State
from wellposed.equilibrium.tracing import under_functorch
from wellposed.errors import InputError
from wellposed.models.cell_parts import Cell, require_positive, shape_of
from wellposed.models.dropout import VariationalDropout


class TransformerCell(Cell):
    """A transformer block whose input is injected at every step (the DEQ transformer of Bai et al. 2019).

    With queries, keys and values ``W x + V u`` and layer norms N after the sums, which bound the state,

    ``h = N1(x + R u + attention(W x + V u))``, ``x <- N2(h + F2 relu(F1 h))``.

    The gain of N2 starts at 1/2, so that the input outweighs the state: at initialisation the map contracts.
    Positions are not encoded here; add them to u.

    Args:
        width: of input and state.
        heads: of the attention; must divide the width.
        hidden: width between F1 and F2.
        dropout: of attention and feed-forward output; a solve keeps one mask for all positions and steps.
        causal: whether a position sees only itself and those before it.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> model = DEQ(TransformerCell(16, 4, 32))
        >>> model(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])

        A mask ``(B, T)``, False at padding, goes with the input; states at padding are zero.

        >>> mask = torch.arange(10) < torch.tensor([[10], [6]])
        >>> model((torch.randn(2, 10, 16), mask))[1, 6:].abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(self, width: int, heads: int, hidden: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        require_positive(width=width, heads=heads, hidden=hidden)
        if width % heads:
            raise InputError(f"heads must divide the width; received {heads} heads and width {width}")
        self.width, self.heads, self.causal = width, heads, causal
        self.input = nn.Linear(width, 4 * width)  # V and R
        self.state = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.nonlinearity = nn.ReLU()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        nn.init.constant_(self.norms[1].weight, 0.5)  # type: ignore[arg-type]
        self.dropouts = nn.ModuleList(VariationalDropout(dropout, shared=(1,)) for _ in range(2))

    def state_shape(self, u: State) -> tuple[int, ...]:
        return tuple(self._checked(u)[0].shape[1:])

    def inject(self, u: State) -> State:  # (B, T, d) -> (B, T, 4 d)
        sequence, mask = self._checked(u)
        return self.input(sequence) if mask is None else (self.input(sequence), mask)

    def step(self, x: Tensor, injection: State) -> Tensor:
        projected, mask = (injection, None) if isinstance(injection, Tensor) else injection
        shared, residual = projected.split((3 * self.width, self.width), dim=-1)
        heard = self.mix(self._attend(self.state(x) + shared, mask))
        h = self.norms[0](x + residual + self.dropouts[0](heard))
        x = self.norms[1](h + self.dropouts[1](self.output(self.nonlinearity(self.hidden(h)))))
        return x if mask is None else x * mask[:, :, None]

    def _attend(self, projections: Tensor, mask: Tensor | None) -> Tensor:  # (B, T, 3 d) -> (B, T, d)
        query, key, value = projections.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d/H)
        visible = None if mask is None else _visible(mask, self.causal)
        with _differentiable_attention():
            heard = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=self.causal and mask is None
            )
        return heard.transpose(1, 2).flatten(2)

    def _checked(self, u: State) -> tuple[Tensor, Tensor | None]:
        sequence, mask = (u, None) if isinstance(u, Tensor) else u if len(u) == 2 else (None, None)
        if sequence is None or sequence.dim() != 3 or sequence.shape[2] != self.width:
            received = ", ".join(shape_of(part) for part in ((u,) if isinstance(u, Tensor) else u))
            raise InputError(
                f"u must be a tensor (batch, length, {self.width}), or a pair of it and a mask; "
                f"received {received}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != sequence.shape[:2]):
            raise InputError(
                f"the mask must be boolean with the shape {tuple(sequence.shape[:2])}, False at padding; "
                f"received {tuple(mask.shape)}, {mask.dtype}"
            )
        return sequence, mask


def _visible(mask: Tensor, causal: bool) -> Tensor:  # (B, 1, T, T), from (B, T)
    """Tells which position sees which; each sees itself, so that no row is empty."""
    length = mask.shape[1]
    seen = mask[:, None, :] | torch.eye(length, dtype=torch.bool, device=mask.device)
    return (seen.tril() if causal else seen)[:, None]


def _differentiable_attention() -> contextlib.AbstractContextManager:
    """Chooses plain attention under torch.func, whose derivatives the fast kernels do not have (Newton)."""
    return sdpa_kernel(SDPBackend.MATH) if under_functorch() else contextlib.nullcontext()
