"""MultiscaleDEQ: an image classifier whose states of several resolutions are one equilibrium."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from wellposed.equilibrium.gradients import Gradient
from wellposed.equilibrium.method import OnFailure, require_finite
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Relative, Stopping
from wellposed.errors import InputError
from wellposed.models.cells import MultiscaleCell, convolution, require_grid, require_positive, require_scales
from wellposed.models.deq import DEQ
from wellposed.models.norms import weight_norm as put_under_weight_norm

States = tuple[Tensor, ...]


class MultiscaleDEQ(nn.Module):
    """Classifies images by the joint equilibrium of up to four resolutions (Bai et al. 2020; 004 Table 3).

    A stem turns images into the input of `MultiscaleCell`; the head brings the states at equilibrium together
    from fine to coarse, and a linear layer classifies their mean over the pixels. Batch norm stands in stem and
    head only: in the cell, samples must not see each other. The default sizes are those of 004 Table 3 and
    have 1,860,874 parameters for three input channels and ten classes.

    Args:
        in_channels, classes: of the images.
        channels: of the states, from fine to coarse; every further one halves the resolution, rounding up.
        head_channels: of the head, one for each scale.
        final_channels: features per pixel before the mean.
        kernel_size: odd.
        groups: of the group norms in the cell; must divide all `channels`. Few numbers in a group make a stiff
            map: take fewer groups for few channels or tiny images.
        weight_norm: whether the convolutions of the cell are under weight norm.
        dropout: share of channels that `VariationalDropout` zeroes in the cell.
        stem_downsample: how often the stem halves the images.
        solver, max_steps, gradient, on_failure: as in `fixed_point`, from then on attributes of `deq`. 004 takes
            ``"broyden"``, which needs as many steps at several times their price.
        stop: as in `fixed_point`; None means ``Relative(1e-4, norm="2")``.
        executor: as in `DEQ`.

    Attributes:
        stem, deq, head, classifier: the modules, in this order.

    Example:
        >>> import torch
        >>> model = MultiscaleDEQ(1, 10, channels=(8, 16), head_channels=(8, 16), final_channels=32)
        >>> model(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        *,
        channels: Sequence[int] = (32, 64, 128, 128),
        head_channels: Sequence[int] = (32, 64, 128, 128),
        final_channels: int = 400,
        kernel_size: int = 3,
        groups: int = 8,
        weight_norm: bool = True,
        dropout: float = 0.0,
        stem_downsample: int = 0,
        solver: Solver | str | None = None,
        stop: Stopping | str | None = None,
        max_steps: int | None = 40,
        gradient: Gradient | str | None = None,
        on_failure: OnFailure = "warn",
        executor: str = "auto",
    ) -> None:
        super().__init__()
        require_positive(classes=classes, final_channels=final_channels)
        scales, heads = require_scales("channels", channels), require_scales("head_channels", head_channels)
        if len(scales) != len(heads):
            raise InputError(f"channels and head_channels belong together; received {scales} and {heads}")
        self.in_channels, self.classes = in_channels, classes
        self.stem = _stem(in_channels, scales[0], kernel_size, stem_downsample)
        cell = MultiscaleCell(scales, kernel_size=kernel_size, groups=groups, dropout=dropout)
        self.deq = DEQ(
            put_under_weight_norm(cell) if weight_norm else cell,
            solver=solver,
            stop=Relative(1e-4, norm="2") if stop is None else stop,
            max_steps=max_steps,
            gradient=gradient,
            on_failure=on_failure,
            executor=executor,
        )
        self.head = _Head(scales, heads, final_channels, kernel_size)
        self.classifier = nn.Linear(final_channels, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        return self.classifier(self.features(images))

    def features(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, final_channels)
        """Computes what the classifier sees."""
        return self.head(self.deq(self._inject(images)))

    def equilibrium(self, images: Tensor, x0: States | None = None) -> Solution:
        """Computes the states, one tensor a scale, and, per sample, how they were reached."""
        injection = self._inject(images)
        if x0 is not None:
            expected = [(len(images), *shape) for shape in self.deq.cell.state_shape(injection)]  # type: ignore[operator]
            if [tuple(state.shape) for state in x0] != expected:
                received = [tuple(state.shape) for state in x0]
                raise InputError(f"x0 must be a tuple of tensors with the shapes {expected}; received {received}")
        return self.deq.equilibrium(injection, x0)

    def _inject(self, images: Tensor) -> Tensor:
        require_grid(images, self.in_channels, 2, name="images")
        dtype = self.classifier.weight.dtype
        if images.is_complex() or (images.dtype != dtype and not torch.is_autocast_enabled(images.device.type)):
            raise InputError(f"images are {images.dtype} and the model {dtype}; convert one of them with .to(...)")
        if not images.is_cuda:
            require_finite("images", images)
        return self.stem(images)


def _stem(in_channels: int, channels: int, kernel_size: int, downsample: int) -> nn.Sequential:
    if not isinstance(downsample, int) or downsample < 0:
        raise InputError(f"stem_downsample must not be negative; received {downsample!r}")
    layers = [_normed(in_channels, channels, kernel_size, stride=2 if downsample else 1)]
    layers += [_normed(channels, channels, kernel_size, stride=2) for _ in range(downsample - 1)]
    return nn.Sequential(*layers)


def _normed(in_channels: int, channels: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        convolution(2, in_channels, channels, kernel_size, bias=False, stride=stride),
        nn.BatchNorm2d(channels, momentum=0.1),
        nn.ReLU(),
    )


class _Head(nn.Module):
    """Adds the states up from fine to coarse and averages features of them over the pixels."""

    def __init__(
        self, channels: tuple[int, ...], heads: tuple[int, ...], final_channels: int, kernel_size: int
    ) -> None:
        super().__init__()
        self.increase = nn.ModuleList(
            _normed(count, head, kernel_size) for count, head in zip(channels, heads, strict=True)
        )
        self.down = nn.ModuleList(_normed(fine, coarse, kernel_size, stride=2) for fine, coarse in pairwise(heads))
        self.final = _normed(heads[-1], final_channels, 1)

    def forward(self, states: States) -> Tensor:  # (B, final_channels)
        """Computes the features."""
        total = self.increase[0](states[0])
        for increase, down, state in zip(self.increase[1:], self.down, states[1:], strict=True):
            total = increase(state) + down(total)
        return self.final(total).mean((2, 3))
