import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from wellposed import Newton, Relative
from wellposed.errors import InputError, UnknownNameError
from wellposed.models.cells import ConvCell, DenseCell, PlainConvCell, RecallCell, TransformerCell
from wellposed.models.deq import DEQ
from wellposed.models.norms import VariationalDropout


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def perturbed(cell):
    """Moves all parameters, also those that start at zero or one."""
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return cell.double()


def by_windows(x, weight):
    """Convolves with zero padding, window by window."""
    dims, size = x.dim() - 2, weight.shape[-1]
    padded = F.pad(x, [size // 2] * (2 * dims))
    result = 0
    for offset in product(range(size), repeat=dims):
        window = padded
        for dim, start in enumerate(offset):
            window = window.narrow(dim + 2, start, x.shape[dim + 2])
        result = result + torch.einsum("oi,bi...->bo...", weight[(..., *offset)], window)
    return result


def by_groups(x, norm):
    """Normalises every group of channels of every sample."""
    parts = x.reshape(x.shape[0], norm.num_groups, -1)
    centred = parts - parts.mean(2, keepdim=True)
    scaled = (centred / (centred.square().mean(2, keepdim=True) + norm.eps).sqrt()).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return scaled * norm.weight.reshape(shape) + norm.bias.reshape(shape)


def channels(vector, x):
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))


def test_dense_is_the_unit_cell_of_the_paper():
    cell, x, u = perturbed(DenseCell(3, 5)), draw(4, 5), draw(4, 3, seed=2)
    layer = cell.layers[0]
    projected = (u @ cell.input.weight.mT + cell.input.bias).clamp_min(0)
    torch.testing.assert_close(cell(x, u), torch.tanh(x @ layer.weight.mT + layer.bias + projected))


def test_dense_with_depth_and_other_projection():
    cell, x, u = (
        perturbed(DenseCell(3, 5, activation="sin", projection="identity", depth=2)),
        draw(4, 5),
        draw(4, 3),
    )
    first, second = cell.layers
    assert cell.input.bias is None
    inner = torch.sin(x @ first.weight.mT + first.bias + u @ cell.input.weight.mT)
    torch.testing.assert_close(cell(x, u), torch.sin(inner @ second.weight.mT + second.bias))


def test_dense_takes_sequences_of_vectors():
    cell, u = DenseCell(3, 5), draw(2, 7, 3, dtype=torch.float32)
    found = DEQ(cell)(u)
    assert found.shape == (2, 7, 5)
    torch.testing.assert_close(found[:, 3], DEQ(cell)(u[:, 3]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(9,), (4, 5)])
def test_plain_convolution(shape):
    cell = perturbed(PlainConvCell(2, 3, dims=len(shape), projection="silu"))
    x, u = draw(4, 3, *shape), draw(4, 2, *shape, seed=2)
    projected = F.silu(by_windows(u, cell.input.weight) + channels(cell.input.bias, u))
    signal = by_windows(x, cell.state.weight) + channels(cell.state.bias, x) + projected
    torch.testing.assert_close(cell(x, u), torch.tanh(signal))


def test_prefix_sum_cell_has_the_published_size():
    cell = PlainConvCell(1, 6)
    assert sum(p.numel() for p in cell.parameters()) == 6 * 6 * 3 + 6 + 6 * 3
    assert all(DEQ(cell)(torch.ones(2, 1, length)).shape == (2, 6, length) for length in (16, 40))


@pytest.mark.parametrize("shape", [(9,), (4, 5)])
def test_recall_convolves_state_and_input_together(shape):
    cell = perturbed(RecallCell(2, 3, dims=len(shape), depth=3))
    x, u = draw(4, 3, *shape), draw(4, 2, *shape, seed=2)
    joined = by_windows(torch.cat([x, u], 1), torch.cat([cell.state.weight, cell.recall.weight], 1))
    branch = joined
    for position, layer in enumerate(cell.layers):
        branch = by_windows(torch.tanh(branch) if position else branch, layer.weight)
    torch.testing.assert_close(cell(x, u), torch.tanh(joined + branch))


@pytest.mark.parametrize("shape", [(9,), (4, 5)])
def test_residual_convolution(shape):
    cell = perturbed(ConvCell(2, 6, dims=len(shape), groups=3))
    x, u = draw(4, 6, *shape), draw(4, 2, *shape, seed=2)
    block, (first, second, third) = cell.block, cell.block.norms
    inner = by_windows(by_groups(by_windows(x, block.first.weight), first).clamp_min(0), block.second.weight)
    injected = inner + by_windows(u, cell.input.weight) + channels(cell.input.bias, u)
    expected = by_groups((x + by_groups(injected, second)).clamp_min(0), third)
    torch.testing.assert_close(cell(x, u), expected)


def plain_transformer(cell, x, u, visible):
    """Computes the transformer cell head by head."""
    width, size = cell.width, cell.width // cell.heads
    injection = u @ cell.input.weight.mT + cell.input.bias
    query, key, value = (x @ cell.state.weight.mT + injection[..., : 3 * width]).chunk(3, -1)
    heard = []
    for head in range(cell.heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[..., part] @ key[..., part].mT / math.sqrt(size)
        heard.append(torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ value[..., part])
    h = cell.norms[0](x + injection[..., 3 * width :] + cell.mix(torch.cat(heard, -1)))
    return cell.norms[1](h + cell.output(cell.hidden(h).clamp_min(0)))


@pytest.mark.parametrize("causal", [False, True])
def test_transformer_by_heads(causal):
    cell, x, u = perturbed(TransformerCell(6, 2, 10, causal=causal)), draw(3, 5, 6), draw(3, 5, 6, seed=2)
    visible = torch.ones(5, 5, dtype=torch.bool)
    expected = plain_transformer(cell, x, u, visible.tril() if causal else visible)
    torch.testing.assert_close(cell(x, u), expected)


def test_causal_equilibrium_does_not_see_the_future():
    model, u = DEQ(perturbed(TransformerCell(8, 2, 16, causal=True)), stop=Relative(1e-12)), draw(2, 6, 8)
    changed = u.clone()
    changed[:, 4:] += 1
    before, after = model(u), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-8, atol=1e-8)
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(causal):
    model = DEQ(perturbed(TransformerCell(8, 2, 16, causal=causal)), stop=Relative(1e-12))
    u = draw(3, 6, 8)
    mask = torch.arange(6) < torch.tensor([[6], [4], [0]])
    found = model.equilibrium((u, mask))
    assert found.converged.all() and found.value[2].eq(0).all()
    torch.testing.assert_close(found.value[0], model(u[:1])[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.value[1, :4], model(u[1:2, :4])[0], rtol=1e-8, atol=1e-8)
    (gradient,) = torch.autograd.grad(model((u.requires_grad_(), mask)).square().sum(), u)
    assert gradient[1, 4:].eq(0).all() and gradient[2].eq(0).all() and gradient[1, :4].ne(0).all()


def test_newton_differentiates_attention():
    cell, u = TransformerCell(8, 2, 16).double(), draw(2, 4, 8)
    found = DEQ(cell, solver=Newton(), stop=Relative(1e-12)).equilibrium(u)
    assert found.converged.all() and found.steps.max() < 12
    torch.testing.assert_close(found.value, DEQ(cell, stop=Relative(1e-12))(u), rtol=1e-8, atol=1e-8)


UNTRAINED = {
    "dense": (lambda: DenseCell(20, 64), (20,)),
    "deep dense": (lambda: DenseCell(20, 64, depth=3), (20,)),
    "prefix sums": (lambda: PlainConvCell(1, 6), (1, 32)),
    "plain images": (lambda: PlainConvCell(3, 32, dims=2), (3, 10, 10)),
    "recall": (lambda: RecallCell(1, 32), (1, 32)),
    "mazes": (lambda: RecallCell(3, 32, dims=2), (3, 9, 9)),
    "sequences": (lambda: ConvCell(3, 32, dims=1), (3, 32)),
    "images": (lambda: ConvCell(3, 32), (3, 10, 10)),
    "transformer": (lambda: TransformerCell(32, 4, 64), (12, 32)),
}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("name", UNTRAINED)
def test_untrained_cell_converges(name, solver):
    build, shape = UNTRAINED[name]
    for seed in range(3):
        torch.manual_seed(seed)
        found = DEQ(build(), solver=solver).equilibrium(torch.randn(8, *shape))
        assert found.converged.all() and found.steps.max() <= 40


def test_dropout_of_whole_channels_and_features():
    images, sequences = ConvCell(3, 8, dropout=0.5), TransformerCell(8, 2, 16, dropout=0.5)
    assert images.block.dropout.shared == (-2, -1)
    assert ConvCell(3, 8, dims=1, dropout=0.5).block.dropout.shared == (-1,)
    assert all(layer.shared == (1,) for layer in sequences.dropouts)
    x, u = torch.randn(2, 8, 5, 5), torch.randn(2, 3, 5, 5)
    assert not torch.equal(images(x, u), images(x, u))
    assert torch.equal(images.eval()(x, u), images(x, u))
    assert sum(isinstance(m, VariationalDropout) for m in sequences.modules()) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DenseCell(0, 5), "in_features"),
        (lambda: DenseCell(3, 5, depth=0), "depth"),
        (lambda: DenseCell(3, 5, activation="softmax"), "componentwise"),
        (lambda: PlainConvCell(1, 6, kernel_size=4), "odd"),
        (lambda: PlainConvCell(1, 6, dims=3), "dims"),
        (lambda: RecallCell(1, 6, depth=0), "depth"),
        (lambda: ConvCell(3, 12), "groups"),
        (lambda: TransformerCell(10, 4, 8), "heads"),
        (lambda: ConvCell(3, 8, dropout=1.0), "p must lie"),
    ],
)
def test_wrong_sizes_are_named(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_unknown_activation_is_named():
    with pytest.raises(UnknownNameError, match="did you mean 'tanh'"):
        DenseCell(3, 5, activation="tahn")


@pytest.mark.parametrize(
    ("cell", "u", "message"),
    [
        (DenseCell(3, 5), torch.zeros(2, 4), r"\(batch, ..., 3\); received \(2, 4\)"),
        (PlainConvCell(1, 6), torch.zeros(2, 3, 8), r"\(batch, 1, length\); received \(2, 3, 8\)"),
        (RecallCell(3, 6, dims=2), torch.zeros(2, 3, 8), r"\(batch, 3, height, width\)"),
        (ConvCell(3, 8), (torch.zeros(2, 3, 8, 8),), "received tuple"),
        (ConvCell(3, 8, dims=1), torch.zeros(2, 3, 1), "single number"),
        (TransformerCell(8, 2, 4), torch.zeros(2, 5, 7), r"length, 8"),
        (TransformerCell(8, 2, 4), (torch.zeros(2, 5, 8), torch.zeros(2, 5)), "boolean"),
        (TransformerCell(8, 2, 4), (torch.zeros(2, 5, 8), torch.ones(2, 4, dtype=torch.bool)), r"\(2, 5\)"),
    ],
)
def test_wrong_inputs_are_named(cell, u, message):
    with pytest.raises(InputError, match=message):
        DEQ(cell)(u)
