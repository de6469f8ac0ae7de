"""Functions, methods and operators one by one: traced by torch.fx, exported for any and for a fixed batch."""

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wellposed.convert import UnsupportedError, to_implicit

W, V = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 2, 4)
MASK = torch.tensor([True, False, True, True])


def in_place(x):
    y = x + 1
    z = torch.relu_(y)
    return y + 2 * z


def view_in_place(x):
    y = 1.0 * x
    y[:, 0] = 0.5
    y[:, :, 1:3] += 1
    return y * 2


def put_together(x):
    out = torch.zeros(x.shape[0], 3, 8)
    out[:, :, :4] = x
    out[:, 1, 4:] = x[:, 0]
    return out + 1


# name: (function of a tensor (B, 3, 4), whether it is linear)
FUNCTIONS = {
    "add": (lambda x: x + 1 + V + (2 + x), True),
    "add with alpha": (lambda x: torch.add(x, x[:, :1], alpha=0.5).sub(x, alpha=2), True),
    "sub": (lambda x: 3 - x - V, True),
    "neg": (lambda x: -x, True),
    "mul": (lambda x: 2 * x * V, True),
    "mul widens": (lambda x: x[:, :1] * torch.ones(3, 1) * V, True),
    "div": (lambda x: x / 3 / (V + 5), True),
    "in place arithmetic": (lambda x: (1 * x).add_(1).mul_(2).sub_(V).div_(2), True),
    "augmented": (lambda x: operator.imul(operator.iadd(x + 0, x), 2), True),
    "broadcast signals": (lambda x: x[:, :, :1] + x[:, :1, :] - x, True),
    "products": (lambda x: x * x[:, :1], False),
    "square": (lambda x: x**2 + torch.square(x) + x.pow(3), False),
    "lerp": (lambda x: torch.lerp(x, 2 * x, 0.3), True),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.5), False),
    "sum": (lambda x: x.sum(1) + torch.sum(x, dim=1) + x.sum(dim=(1, 2), keepdim=True)[:, 0], True),
    "mean": (lambda x: x.mean(-1, keepdim=True) + torch.mean(x, (1,), True), True),
    "mean of all but the batch": (lambda x: x.mean((1, 2)).unsqueeze(1) + x.flatten(1), True),
    "cat": (lambda x: torch.cat([x, 2 * x, torch.ones(x.shape[0], 3, 1)], dim=-1), True),
    "cat of constants": (lambda x: torch.cat([V.expand(x.shape[0], 1, 4), x], dim=1), True),
    "stack": (lambda x: torch.stack((x, x + 1), 2), True),
    "hstack": (lambda x: torch.hstack([x, x[:, 1:]]), True),
    "slices": (lambda x: x[:, 1:, ::2], True),
    "index": (lambda x: x[:, -1] + x[..., 2:3, :].squeeze(1), True),
    "index by list": (lambda x: x[:, [2, 0]], True),
    "index by mask": (lambda x: x[:, :, MASK], True),
    "None in index": (lambda x: x[:, None, :, 1], True),
    "index_select": (lambda x: x.index_select(1, torch.tensor([1, 1, 0])), True),
    "select, narrow": (lambda x: x.select(1, 2) + x.narrow(2, 0, 4)[:, 0], True),
    "gather": (lambda x: torch.gather(x.flatten(1), 1, torch.tensor([[3, 0, 5]]).expand(x.shape[0], 3)), True),
    "split": (lambda x: x.split(2, dim=2)[1] - x.split([1, 3], 2)[1][:, :, :2], True),
    "chunk": (lambda x: x.chunk(2, -1)[0] * 2, True),
    "unbind": (lambda x: x.unbind(1)[0] + x.unbind(1)[2], True),
    "view": (lambda x: x.view(x.size(0), -1), True),
    "view of shape": (lambda x: x.reshape(x.shape[0], 2, 6).reshape(-1, 12), True),
    "view through permute": (lambda x: x.permute(1, 0, 2).reshape(3, -1).view(3, -1, 4).permute(1, 0, 2), True),
    "merge the batch": (lambda x: (x.reshape(-1, 4) @ W).view(-1, 3, 4), True),
    "flatten": (lambda x: torch.flatten(x, 1).unflatten(1, (4, 3)), True),
    "transpose": (lambda x: x.transpose(1, 2) + torch.swapaxes(x, -1, -2) + x.mT, True),
    "permute": (lambda x: torch.permute(x, (0, 2, 1)).movedim(1, 2).contiguous(), True),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1).squeeze(), True),
    "expand": (lambda x: x[:, :1].expand(-1, 5, 4) + x[:, :1].expand(x.shape[0], 5, 4), True),
    "expand_as": (lambda x: x[:, :, :1].expand_as(x), True),
    "repeat": (lambda x: x.repeat(1, 2, 1), True),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), True),
    "flip": (lambda x: x.flip(1).flip([2]) + torch.flip(x, (1, 2)), True),
    "roll": (lambda x: x.roll(1, 2) + torch.roll(x, (1, -1), (1, 2)), True),
    "tril": (lambda x: torch.tril(x) + x.triu(1), True),
    "unfold": (lambda x: x.unfold(2, 2, 1), True),
    "diagonal": (lambda x: torch.diagonal(x, dim1=1, dim2=2), True),
    "clone": (lambda x: x.clone().detach().to(x.dtype).type_as(x), True),
    "pad": (lambda x: F.pad(x, (1, 2)) + F.pad(x, (2, 1), value=3.0), True),
    "pad by reflection": (lambda x: F.pad(x, (1, 2), mode="reflect") + F.pad(x, (3, 0), mode="circular"), True),
    "constants": (lambda x: x + torch.zeros_like(x) + torch.full_like(x, 2.0) + x.new_ones(4), True),
    "shapes": (lambda x: x * x.shape[1] + x.size(-1) + x.dim() + len(x.shape), True),
    "linear": (lambda x: F.linear(x, W, V), True),
    "matmul": (lambda x: x @ W + torch.matmul(x, W.T) + x @ V[:, None], True),
    "matmul from the left": (lambda x: W[:2, :3] @ x, True),
    "matmul by vectors": (lambda x: x @ V + (V[:3] @ x)[:, :3], True),
    "matmul by many": (lambda x: x.unsqueeze(1) @ torch.stack([W, 2 * W, W.T]), True),
    "matmul of many": (lambda x: torch.stack([W[:, :3], W[:, 1:]]) @ x.unsqueeze(1), True),
    "matmul of signals": (lambda x: x @ x.mT, False),
    "addmm": (lambda x: torch.addmm(V, x[:, 0], W, beta=2, alpha=0.5), True),
    "baddbmm": (lambda x: torch.baddbmm(V, x, W.expand(x.shape[0], 4, 4)), True),
    "einsum": (lambda x: torch.einsum("btc,dc->bdt", x, W), True),
    "einsum scales": (lambda x: torch.einsum("btc,c->bct", x, V), True),
    "einsum sums": (lambda x: torch.einsum("btc->bc", x), True),
    "einsum by heads": (lambda x: torch.einsum("bhd,hde->bhe", x, torch.stack([W, W.T, 2 * W])), True),
    "einsum of signals": (lambda x: torch.einsum("bic,bjc->bij", x, x), False),
    "where": (lambda x: torch.where(MASK, x, 2.0) + torch.where(MASK, -1.0, x[:, :1]), True),
    "masked_fill": (lambda x: x.masked_fill(~MASK, 7.0), True),
    "where by sign": (lambda x: torch.where(x > 0, x, 0.2 * x) + torch.where(x < 0, V * x, 3 * x), False),
    "where by sign, zero": (lambda x: torch.where(x >= 0, x, 0), False),
    "relu": (lambda x: F.relu(x) + torch.relu(-x).relu() + (1 * x).relu_() + F.relu(x - 1, inplace=True), False),
    "relu by keyword": (lambda x: F.relu(input=x), False),
    "activations": (
        lambda x: F.gelu(x) + F.silu(x) + x.tanh() + x.sigmoid() + F.elu(x, 0.5) + F.celu(x, 2),
        False,
    ),
    "more activations": (
        lambda x: (
            F.selu(x) + F.mish(x) + F.softplus(x, 2) + F.hardtanh(x, -2, 1) + F.hardswish(x) + F.relu6(3 * x)
        ),
        False,
    ),
    "yet more": (lambda x: F.logsigmoid(x) + F.leaky_relu(x, 0.3) + F.softshrink(x) + F.prelu(x, V[:3]), False),
    "still more": (
        lambda x: F.tanhshrink(x) + F.softsign(x) + F.hardsigmoid(x) + F.gelu(x, approximate="tanh"),
        False,
    ),
    "sine": (lambda x: x.sin() + torch.cos(x), False),
    "abs": (lambda x: x.abs() + abs(x), False),
    "maximum": (lambda x: torch.maximum(x, 2 * x + 1) + torch.minimum(x, V), False),
    "clamp": (lambda x: x.clamp(-1, 0.5) + torch.clamp(x, min=0.1) + x.clamp_max(0.2) + x.clamp(V - 1, V), False),
    "softmax": (lambda x: x.softmax(-1) + F.softmax(x, dim=1) + torch.softmax(x @ W, 2), False),
    "log_softmax": (
        lambda x: F.log_softmax(x @ W, dim=1) + x.log_softmax(2) + x.logsumexp(2, keepdim=True),
        False,
    ),
    "logaddexp": (lambda x: torch.logaddexp(x, x.flip(1)), False),
    "glu": (lambda x: F.glu(x, 2), False),
    "norms": (lambda x: F.layer_norm(x, (4,), V, V) + F.group_norm(x, 3) + F.rms_norm(x, (4,), V), False),
    "instance_norm": (lambda x: F.instance_norm(x), False),
    "batch_norm": (lambda x: F.batch_norm(x, V[:3], V[:3] + 2, V[1:], V[:3]), True),
    "convolution": (lambda x: F.conv1d(x, W[:, :3, None].expand(4, 3, 2), V, padding=1), True),
    "transposed convolution": (lambda x: F.conv_transpose1d(x, W[:3, :, None].expand(3, 4, 2), V, 2), True),
    "pools": (lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 2), False),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, 8, mode="linear"), True),
    "interpolate images": (
        lambda x: (
            F.interpolate(x[:, None], (5, 6), mode="bilinear") + F.interpolate(x[:, None], (5, 6), mode="nearest")
        ),
        True,
    ),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), True),
    "in place, read again": (in_place, False),
    "assignment": (view_in_place, True),
    "assignment to constants": (put_together, True),
    "nothing of the input": (lambda x: torch.zeros(x.shape[0], 2) + V[:2], True),
}


DECOMPOSED = {"still more": "softsign", "yet more": "softshrink in a functional graph"}  # to what may jump
SHAPES = ["cat", "cat of constants", "slices", "view", "view of shape", "view through permute", "merge the batch"]
SHAPES += ["flatten", "squeeze", "expand", "shapes", "constants", "assignment", "index by mask", "matmul", "pools"]
CHANGED = [
    "in place arithmetic",
    "in place, read again",
    "assignment",
    "assignment to constants",
    "batch_norm",
    "norms",
]
EXPORTS = [("fixed batch", list(FUNCTIONS)[k::6]) for k in range(6)]
EXPORTS += [("any batch", SHAPES), ("functional", CHANGED), ("functional", SHAPES)]


class Network(nn.Module):
    """Some functions next to each other."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        return torch.cat([function(x).flatten(1) for function in self.functions], 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    function, linear = FUNCTIONS[name]
    form = to_implicit(Network(function), (3, 4))
    u = 2 * torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = function(u.clone()).reshape(5, -1)
    torch.testing.assert_close(form(u), expected, rtol=1e-5, atol=1e-5)
    assert not linear or {phi.name for phi in form.activations} <= {"identity"}


@pytest.mark.parametrize(("how", "names"), EXPORTS)
def test_exported_functions(how, names):
    names = [name for name in names if name not in DECOMPOSED and (name != "index by mask" or how == "any batch")]
    functions = [FUNCTIONS[name][0] for name in names]
    size = 2 if how == "any batch" else 3  # with a channel number that could be mistaken for it
    dynamic = ({0: torch.export.Dim("batch", min=2, max=64)},) if how == "any batch" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Network(*functions), (torch.randn(size, 3, 4),), dynamic_shapes=dynamic)
        form = to_implicit(program.run_decompositions({}) if how == "functional" else program, (3, 4))
    u = 2 * torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    found, start = form(u), 0
    for name, function in zip(names, functions, strict=True):
        expected = function(u.clone()).reshape(5, -1)
        piece = found[:, start : start + expected.shape[1]]
        torch.testing.assert_close(piece, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)
        start += expected.shape[1]
    assert start == found.shape[1]


REFUSED = {
    "division": (lambda x: 1 / x, "division"),
    "division by a signal": (lambda x: x / (1 + x), "Lipschitz"),
    "exp": (lambda x: x.exp(), "the method exp"),
    "sign": (lambda x: torch.sign(x), "jumps"),
    "comparison": (lambda x: torch.where(x > 1, x, 0 * x), "jumps"),
    "jump": (lambda x: torch.where(x > 0, x + 1, x), "may jump"),
    "mean over the batch": (lambda x: x - x.mean(0), "mixes samples"),
    "sum of everything": (lambda x: x.sum(), "mixes samples"),
    "softmax over the batch": (lambda x: x.softmax(0), "mixes samples"),
    "type": (lambda x: x.double(), "torch.float64"),
    "random dropout": (lambda x: F.dropout(x), "random"),
    "square root": (lambda x: x**0.5, "whole exponents"),
    "rounding": (lambda x: torch.div(x, 2, rounding_mode="floor"), "jumps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_functions_say_why(name):
    function, reason = REFUSED[name]
    with pytest.raises(UnsupportedError, match=reason):
        to_implicit(Network(function), (3, 4))
