"""Networks of many kinds with the shape of one sample, for the tests of conversion."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from wellposed_lab.networks.mlp import MLP, EikoNet
from wellposed_lab.networks.resnet import ResNet
from wellposed_lab.networks.simple import LinearRegression
from wellposed_lab.networks.twins import ConvNet, FeedForward

from wellposed.models import ImplicitModel


class LeNet(nn.Module):
    """Two convolutions with pooling, then three dense layers, all in functional form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), (2, 2))
        x = x.view(x.size(0), -1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (8, "pool", 16, 16, "pool", 32, "pool"):
        if width == "pool":
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        before = width
    head = [nn.Flatten(), nn.Linear(128, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)]
    return nn.Sequential(*layers, *head)


class DenseNet(nn.Module):
    """Every layer reads all that came before it, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * k) for k in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * k, 4, 3, padding=1, bias=False) for k in range(4))
        self.transition = nn.Sequential(nn.Conv2d(24, 12, 1), nn.AvgPool2d(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        x = self.transition(torch.cat(features, dim=1))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolution, with skip connections by concatenation."""

    def __init__(self, up: str = "transposed") -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        ups = {
            "transposed": lambda a, b: nn.ConvTranspose2d(a, b, 2, stride=2),
            "bilinear": lambda a, b: nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(a, b, 1)
            ),
        }
        self.up2, self.up1 = ups[up](8, 8), ups[up](8, 4)
        self.join2 = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU())
        self.join1 = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(bottom), second], 1))
        return self.join1(torch.cat([self.up1(x), first], 1))


class InvertedResidual(nn.Module):
    """Expands, filters each channel alone, projects linearly and adds its input."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        wide, self.skip = 3 * channels, stride == 1
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


def mobilenet() -> nn.Module:
    blocks = [InvertedResidual(6), InvertedResidual(6, 2), InvertedResidual(6), InvertedResidual(6)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Hardswish(), *blocks, *head)


class Inception(nn.Module):
    """Four branches of different reach, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(3, 4, 1)
        self.branch3 = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1))
        self.branch5 = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding="same"))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 1))
        self.after = nn.Sequential(nn.Conv2d(16, 4, (1, 3)), nn.ELU(0.5), nn.AvgPool2d(2, ceil_mode=True))

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.branch1(x), self.branch3(x), self.branch5(x), self.pool(x)]
        return self.after(F.relu(torch.cat(branches, dim=1))).flatten(1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residual and skip connections."""

    def __init__(self, gate: str = "product") -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 4, 1)
        self.layers = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**k) for k in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.leave, self.gate = nn.Conv1d(4, 2, 1), gate

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.enter(x), 0
        for k, (layer, skip) in enumerate(zip(self.layers, self.skips, strict=True)):
            z = layer(F.pad(x, (2**k, 0)))
            if self.gate == "glu":
                z = F.glu(z, dim=1)
            else:
                a, b = z.chunk(2, dim=1)
                z = torch.tanh(a) * torch.sigmoid(b)
            total = total + skip(z)
            x = x + z
        return self.leave(F.relu(total))


class SqueezeExcitation(nn.Module):
    """Scales channels by a gate that reads their averages."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU())
        self.squeeze, self.excite = nn.Linear(6, 3), nn.Linear(3, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c = x.shape[:2]
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=[2, 3])))))
        x = x * gate.view(b, c, 1, 1)
        return self.head(x.mean((-1, -2)))


class Mixer(nn.Module):
    """Mixes tokens and channels in turn, on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(4, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(tokens, 6), nn.GELU(), nn.Linear(6, tokens))
        self.channels = nn.Sequential(nn.Linear(channels, 12), nn.GELU(), nn.Linear(12, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).permute(0, 2, 1)).permute(0, 2, 1)
        return x + self.channels(self.norm2(x))


class SharedResidual(nn.Module):
    """Applies one and the same residual block several times."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = x + self.block(x)
        return self.leave(x)


class Branching(nn.Module):
    """Decides by shapes and settings, which torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.odd, self.bn = nn.Linear(3, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            x = x.flatten(1)
        x = x.reshape(x.shape[0], -1, 6).sum(1) if x.shape[1] % 6 == 0 else self.odd(x)
        for k in range(min(len(self.layers), x.shape[1])):
            x = F.relu(self.layers[k](x)) if k % 2 else torch.tanh(self.layers[k](x)) + x
        return self.bn(x)


class PreActivation(nn.Module):
    """A residual stream to which nothing but sums is done."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + 0.5 * layer(x)
        return self.head(F.leaky_relu(self.norm(x), 0.1).mean((2, 3)))


class HighwayNet(nn.Module):
    """Gates between a transformed and the plain signal."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gate = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for change, gate in zip(self.change, self.gate, strict=True):
            t = torch.sigmoid(gate(x))
            x = t * F.relu(change(x)) + (1 - t) * x
        return x


class TextConvolution(nn.Module):
    """Convolutions of several widths over a sequence of vectors, the largest values of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(5, 4, width) for width in (2, 3, 4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        x = x.transpose(1, 2)
        pooled = [F.adaptive_max_pool1d(torch.relu(layer(x)), 1).squeeze(-1) for layer in self.layers]
        return F.log_softmax(self.head(torch.cat(pooled, dim=1)), dim=1)


class SetNetwork(nn.Module):
    """The same network for every element, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.SELU(), nn.Linear(8, 8), nn.CELU(0.7))
        self.outer = nn.Sequential(nn.Linear(8, 6), nn.Mish(), nn.Linear(6, 2), nn.Softsign())

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).sum(dim=1) / x.shape[1])


class TimeDistributed(nn.Module):
    """Folds time into the batch, filters every frame, and unfolds it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(4 * 3 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C, H, W)
        b, t = x.shape[0], x.shape[1]
        z = torch.relu(self.conv(x.reshape(b * t, *x.shape[2:])))
        return self.head(z.reshape(b, t, -1).flatten(1))


class ShuffleNet(nn.Module):
    """Splits channels, works on one half, and shuffles."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.PReLU(8))
        self.branch = nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            left, right = torch.split(x, 4, dim=1)
            x = torch.cat((left, self.branch(right)), 1)
            b, c, h, w = x.size()
            x = x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
        return self.head(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
        self.code, self.decode = nn.Linear(32, 3), nn.Linear(3, 32)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1), nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 3, 2, 1, output_padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        z = self.code(self.encoder(x).flatten(1))
        return self.decoder(self.decode(z).unflatten(1, (8, 2, 2)))


class GraphConvolution(nn.Module):
    """Multiplies by a constant matrix of neighbours from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.softmax(torch.randn(5, 5), 1))
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, nodes, features)
        x = torch.relu(self.neighbours @ self.first(x))
        return torch.einsum("ij,bjc->bic", self.neighbours, self.second(x))


class KolmogorovPieces(nn.Module):
    """Sums of piecewise-linear functions: absolute values, maxima, minima and clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        hinges = torch.maximum(a, b) - torch.minimum(a, 0.3 * b) + a.abs()
        return hinges.clamp(-1.0, 4.0) + b.clamp(min=0.2) - torch.clamp(a, max=0.1)


def siren() -> nn.Module:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(3.0 * x)

    return nn.Sequential(nn.Linear(2, 16), Sine(), nn.Linear(16, 16), Sine(), nn.Linear(16, 1))


def normalised_weights() -> nn.Module:
    first = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    second = parametrizations.spectral_norm(nn.Linear(4 * 36, 5))
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), second)


def maxout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(1, (4, 3)), nn.MaxPool1d(3), nn.Flatten(), nn.Linear(4, 6),
        nn.Unflatten(1, (1, 6)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(3, 2),
    )  # fmt: skip


def implicit_between() -> nn.Module:
    middle = ImplicitModel(5, 4, 7, bias=True, activation="tanh")
    with torch.no_grad():
        middle.bias.uniform_(-1, 1)
        middle.D.uniform_(-1, 1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), middle, nn.Linear(4, 3))


def pyramid() -> nn.Module:
    layers = [nn.ReflectionPad2d(1), nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.GELU("tanh")]
    more = [nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten()]
    return nn.Sequential(*layers, *more, nn.Linear(24, 3), nn.Softmax(dim=1))


def video() -> nn.Module:
    layers = [
        nn.Conv3d(1, 3, (2, 3, 3)),
        nn.BatchNorm3d(3),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(3, 4, 2),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten())


def super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 9, 3, padding=1), nn.PixelShuffle(3)
    )


ARCHITECTURES = {
    "linear regression": (lambda: LinearRegression(5, 2), (5,)),
    "MLP of 13 layers": (lambda: MLP([10, *[16] * 12, 3]), (10,)),
    "MLP with a skip": (lambda: MLP([6, 12, 12, 2], "tanh", skip=True), (6,)),
    "MLP with learned slopes": (lambda: MLP([6, 12, 12, 2], "multiprelu"), (6,)),
    "EikoNet": (lambda: EikoNet(skip=True), (30,)),
    "feed-forward twin": (lambda: FeedForward(6, 3, width=8, depth=4, inject=True, tied=True), (6,)),
    "LeNet": (LeNet, (1, 28, 28)),
    "ResNet-20": (lambda: ResNet(20), (3, 32, 32)),
    "ResNet-20, shortcut B": (lambda: ResNet(20, shortcut="B"), (3, 32, 32)),
    "ResNet-8 of one channel": (lambda: ResNet(8, in_channels=1), (1, 12, 12)),
    "convolutional twin": (lambda: ConvNet(2, 4, channels=6, cells=2, final_channels=5, inject=True), (2, 8, 8)),
    "VGG": (vgg, (3, 16, 16)),
    "DenseNet": (DenseNet, (3, 8, 8)),
    "U-Net": (UNet, (1, 8, 8)),
    "U-Net, bilinear": (lambda: UNet("bilinear"), (1, 8, 8)),
    "MobileNet": (mobilenet, (3, 12, 12)),
    "Inception": (Inception, (3, 7, 9)),
    "WaveNet": (WaveNet, (1, 17)),
    "WaveNet with GLU": (lambda: WaveNet("glu"), (1, 17)),
    "squeeze and excitation": (SqueezeExcitation, (3, 6, 6)),
    "MLP-Mixer": (Mixer, (3, 8, 8)),
    "shared residual block": (SharedResidual, (5,)),
    "control flow": (Branching, (3, 4)),
    "control flow, other branch": (Branching, (3,)),
    "pre-activation": (PreActivation, (3, 6, 6)),
    "highway": (HighwayNet, (6,)),
    "text convolution": (TextConvolution, (9, 5)),
    "set network": (SetNetwork, (7, 4)),
    "time-distributed": (TimeDistributed, (4, 2, 6, 6)),
    "ShuffleNet": (ShuffleNet, (3, 8, 8)),
    "autoencoder": (Autoencoder, (1, 8, 8)),
    "graph convolution": (GraphConvolution, (5, 3)),
    "piecewise linear": (KolmogorovPieces, (4,)),
    "SIREN": (siren, (2,)),
    "normalised weights": (normalised_weights, (3, 8, 8)),
    "maxout": (maxout, (6,)),
    "pyramid": (pyramid, (2, 7, 7)),
    "video": (video, (1, 4, 8, 8)),
    "super-resolution": (super_resolution, (1, 5, 5)),
    "implicit model between layers": (implicit_between, (6,)),
}
LOOPS = {"implicit model between layers"}


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """Draws statistics and weights of normalisations, which are trivial at first."""
    generator = torch.Generator().manual_seed(seed)
    for part in network.modules():
        if isinstance(part, LinearRegression):
            part.linear.reset_parameters()
        for name, value in [*part.named_buffers(recurse=False), *part.named_parameters(recurse=False)]:
            if name.startswith("running") or (name in ("weight", "bias") and "Norm" in type(part).__name__):
                low = 0.5 if name == "running_var" else -1.0
                value.data.copy_(low + 1.5 * torch.rand(value.shape, generator=generator))
    return network
