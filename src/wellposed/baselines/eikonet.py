"""EikoNet, the rival of the earthquake task."""

from torch import Tensor, nn


class EikoNet(nn.Module):
    """Six linear layers with ELU, the middle two of them a residual block (002 section 4.2).

    ``30 x 32 x 128 x [128 x 128] x 32 x 4``: the tables of 001 and 002 print 270 inputs, those of another
    task with 45 stations; their 42,500 parameters belong to 30. After EikoNet (Smith et al. 2021), which
    solves the eikonal equation with more and wider blocks of this kind.

    Args:
        in_features: six for each of five stations.
        out_features: longitude, latitude, depth and time.
        narrow, wide: the two widths.
        skip: whether a linear map leads from the input straight to the output, the control for the
            feedthrough of an implicit model.

    Example:
        >>> import torch
        >>> model = EikoNet()
        >>> model(torch.zeros(7, 30)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 4]), 42500)
    """

    def __init__(
        self,
        in_features: int = 30,
        out_features: int = 4,
        *,
        narrow: int = 32,
        wide: int = 128,
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(in_features, narrow), nn.ELU(), nn.Linear(narrow, wide), nn.ELU())
        self.block = ResidualBlock(wide)
        self.leave = nn.Sequential(nn.Linear(wide, narrow), nn.ELU(), nn.Linear(narrow, out_features))
        self.skip = nn.Linear(in_features, out_features, bias=False) if skip else None

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.leave(self.block(self.enter(u)))
        return y if self.skip is None else y + self.skip(u)


class ResidualBlock(nn.Module):
    """Adds two linear layers to their input: ``elu(x + W elu(Vx + a) + b)``.

    Example:
        >>> import torch
        >>> ResidualBlock(8)(torch.zeros(7, 8)).shape
        torch.Size([7, 8])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
        self.activation = nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output."""
        y: Tensor = self.activation(x + self.layers(x))
        return y
