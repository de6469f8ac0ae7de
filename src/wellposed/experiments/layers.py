"""A fitted model without loops as a network of layers, to be trained further with its zeros kept."""

import torch
from torch import Tensor, nn

from wellposed.baselines.pruning import keep_zeros
from wellposed.models.implicit import ImplicitModel


class Layers(nn.Module):
    """ReLU layers that may read all layers before them and the input.

    It computes what the model computes, by substitution: block after block, the last one first.

    Args:
        model: without loops between blocks; all activations are ReLU.
        blocks: sizes of its blocks of states, the last layer first.
        exponents: its states are in units of 2^-e; the layers are in those of the recording.

    Example:
        >>> A, B, C = torch.tensor([[0.0, 0.5], [0.0, 0.0]]), torch.ones(2, 1), torch.ones(1, 2)
        >>> model = ImplicitModel.from_matrices(A, B, C)
        >>> [Layers(model, (1, 1), units)(torch.tensor([[2.0]])).tolist() for units in ((0.0, 0.0), (3.0, -1.0))]
        [[[5.0]], [[5.0]]]
    """

    def __init__(self, model: ImplicitModel, blocks: tuple[int, ...], exponents: tuple[float, ...]) -> None:
        super().__init__()
        sizes = (*blocks, len(model.A) - sum(blocks))  # a constant state for the output's bias, if there is one
        factors = torch.tensor([2.0**e for e in (*exponents, 0.0)]).repeat_interleave(torch.tensor(sizes))
        A, B, C = (
            model.A.detach() * factors / factors[:, None],
            model.B.detach() / factors[:, None],
            model.C.detach(),
        )
        bias = torch.zeros(len(A)) if model.bias is None else model.bias.detach() / factors
        C = C * factors
        layers, high = [], len(A)
        for size in [size for size in reversed(sizes) if size]:
            low = high - size
            weight = torch.cat([A[low:high, high:], B[low:high]], dim=1)
            layers.append(_linear(weight, bias[low:high]))
            high = low
        self.hidden = nn.ModuleList(layers)
        self.output = _linear(C, torch.zeros(len(C)))
        keep_zeros(self)

    def forward(self, u: Tensor) -> Tensor:
        """Evaluates layer after layer."""
        x = u[:, :0]
        for layer in self.hidden:
            x = torch.cat([layer(torch.cat([x, u], dim=1)).relu(), x], dim=1)
        return self.output(x)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight.contiguous())
    layer.bias = nn.Parameter(bias)
    return layer
