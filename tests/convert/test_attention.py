import math

import pytest
import torch
import torch.nn.functional as F
from comparison import Using, equal_form
from torch import nn
from wellposed_lab.networks.transformers import ArrayEncoder, ArrayTransformer, SequenceEncoder

from wellposed.activations import get_activation
from wellposed.convert import UnsupportedError, to_implicit
from wellposed.errors import InputError

PADDED = torch.tensor([[False, False, True, True, True]])
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
BIAS = torch.linspace(-2, 2, 25, dtype=torch.float64).reshape(5, 5)


def tokens(length=5, width=8, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(count, length, width, generator=generator, dtype=torch.float64).to(dtype)


def assert_same(network, u, expected=None, tolerance=1e-10):
    form = equal_form(network, u, expected, tolerance)
    assert all(i < j for i, j in form.blocks[0].parts)
    assert form.bias is None or form.bias.isfinite().all()
    return form


def lipschitz(form, kind):
    found = {a.name: a.lipschitz("1") for a in form.activations if a.name.startswith(kind)}
    assert found
    return found


SCALED = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": ~CAUSAL},
    "float mask": {"attn_mask": BIAS},
    "minus infinity": {"attn_mask": BIAS.masked_fill(CAUSAL, -math.inf)},
    "blind query": {"attn_mask": ~CAUSAL & (torch.arange(5) != 2)[:, None]},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_dot_product_attention_equals_torch(case):
    def heads(network, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (network.q(x), network.k(x), x))
        options = {
            key: v.to(x.dtype) if key == "attn_mask" and v.dtype != torch.bool else v
            for key, v in SCALED[case].items()
        }
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert_same(Using(heads, q=nn.Linear(8, 8), k=nn.Linear(8, 8)), tokens())


def test_masks_of_other_shapes_and_of_signals():
    def one_per_head(network, x):
        q = network.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mask = torch.stack([~CAUSAL, ~CAUSAL.mT])
        return F.scaled_dot_product_attention(q, q[:, :, :5], q, attn_mask=mask)

    assert_same(Using(one_per_head, q=nn.Linear(8, 8)), tokens())
    learned = Using(
        lambda n, x: F.scaled_dot_product_attention(x, x, x, attn_mask=n.bias(x)), bias=nn.Linear(8, 5)
    )
    assert_same(learned, tokens())


def test_hidden_scores_have_weight_zero_whatever_they_are():
    """Scores of 1e6 behind the mask must not leak, nor hurt the others."""

    def weights(network, x):
        scores = (1e6 * x @ x.mT).masked_fill(CAUSAL, -torch.inf) * 1e-6
        return (
            F.scaled_dot_product_attention(1e3 * x, 1e3 * x, network.v(x), is_causal=True) + scores.softmax(-1) @ x
        )

    form = assert_same(Using(weights, v=nn.Linear(8, 8)), tokens(), tolerance=1e-9)
    u = tokens()
    moved = u.clone()
    moved[:, 1:] += 5.0
    width = 8
    assert torch.equal(form(u)[:, :width], form(moved)[:, :width])  # the first token sees itself only


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 3},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "add_bias_kv": True},
    ],
    ids=str,
)
def test_multihead_attention_equals_torch(heads, options):
    def cross(network, x):
        memory = network.memory(x)[:, :4]
        key = memory[..., : options.get("kdim", 8)]
        return network.attention(x, key, memory[..., : options.get("vdim", 8)], need_weights=False)[0]

    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, heads, batch_first=True, dropout=0.3, **options)
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    assert_same(Using(cross, attention=layer, memory=nn.Linear(8, 8)), tokens())


@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": CAUSAL},
        {"attn_mask": BIAS},
        {"attn_mask": CAUSAL.mT[None].repeat(2, 1, 1)},
        {"key_padding_mask": torch.tensor([[False, True, False, False, True]])},
        {
            "attn_mask": CAUSAL,
            "key_padding_mask": torch.tensor([[False, False, True, True, True]]),
            "is_causal": True,
        },
    ],
    ids=lambda masks: " and ".join(masks),
)
@pytest.mark.parametrize("appended", [True, False])
def test_masks_of_multihead_attention(masks, appended):
    def batched(x):  # one mask a sample, as torch wants it
        count = len(x)
        given = dict(masks)
        if given.get("attn_mask") is not None and given["attn_mask"].dim() == 3:
            given["attn_mask"] = given["attn_mask"].repeat(count, 1, 1)
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"].expand(count, -1)
        return layer(x, x, x, **given)[0]

    layer = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=appended, add_zero_attn=appended)
    network = Using(lambda n, x: n.attention(x, x, x, **masks)[0], attention=layer)
    assert_same(network, tokens(), batched)


def test_weights_and_time_first():
    def weights(network, x):
        return network.attention(x, x, x)[1]

    def separate(network, x):
        return network.attention(x, x, x, average_attn_weights=False)[1]

    def turned(network, x):
        x = x.transpose(0, 1)
        return network.attention(x, x, x)[0].transpose(0, 1)

    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    assert_same(Using(weights, attention=layer), tokens())
    assert_same(Using(separate, attention=layer), tokens())
    assert_same(Using(turned, attention=nn.MultiheadAttention(8, 2)), tokens())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "gelu"}, {"activation": nn.SiLU(), "bias": False}, {"activation": torch.tanh}],
    ids=["relu", "gelu", "silu module without bias", "tanh function"],
)
def test_encoder_layer_equals_torch(norm_first, options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, batch_first=True, **options)
    form = assert_same(layer, tokens())
    assert {"self_attn scores", "self_attn weights", "self_attn values", "activation"} <= set(form.labels)
    timewise = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, **options).double().eval()
    assert_same(timewise, tokens(), lambda u: timewise(u.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_decoders_and_transformers(norm_first):
    options = {"batch_first": True, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(8, 2, 12, **options)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    form = assert_same(encoder, tokens())
    assert form.labels[0] == "norm" and "layers.1.self_attn scores" in form.labels
    assert_same(Using(lambda n, x: n.encoder(x, mask=CAUSAL), encoder=encoder), tokens())
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, 12, activation="gelu", **options), 2)
    network = Using(
        lambda n, x: n.decoder(x[:, 2:], n.memory(x), CAUSAL[:3, :3]), decoder=decoder, memory=nn.Linear(8, 8)
    )
    assert_same(network, tokens())
    whole = nn.Transformer(8, 2, 1, 1, 12, activation=F.relu, **options)
    assert_same(Using(lambda n, x: n.whole(x, x[:, 1:3].tanh(), src_mask=CAUSAL), whole=whole), tokens())


def test_encoder_in_float32():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert_same(encoder, tokens(9, 16, dtype=torch.float32), tolerance=1e-5)


class ByHand(nn.Module):
    """Attention as people write it: views, matmul, mask, softmax."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.kind == "einsum":
            q, k, v = (part.unflatten(-1, (2, 4)) for part in (q, k, v))
            weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 2).softmax(-1)
            return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
        if self.kind == "bmm":
            weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 8**-0.5 + BIAS, dim=-1)
            return self.out(torch.bmm(weights, v))
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, width // 2).permute(0, 2, 1, 3) for part in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // 2)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize("kind", ["einsum", "bmm", "views"])
def test_attention_by_hand(kind):
    form = assert_same(ByHand(kind), tokens())
    kinds = [a.name.partition("(")[0] for a in form.activations if "identity" not in a.name]
    assert kinds == ["matrix_product", "softmax", "matrix_product"]


EXPORTED = {
    "multihead": lambda: Using(lambda n, x: n.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
    "norm first": lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True),
    "causal": lambda: Using(
        lambda n, x: F.scaled_dot_product_attention(x, n.k(x), x, is_causal=True), k=nn.Linear(8, 8)
    ),
    "by hand": lambda: ByHand("views"),
    "einsum": lambda: ByHand("einsum"),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_exported_attention(kind):
    network, u = EXPORTED[kind]().double().eval(), tokens(count=1)
    form = to_implicit(torch.export.export(network, (u,), strict=False), (5, 8))
    with torch.no_grad():
        torch.testing.assert_close(form(u), network(u).flatten(1), rtol=0, atol=1e-10)
    assert form.bias is None or form.bias.isfinite().all()


class Bounded(nn.Module):
    """Attention whose queries, keys and values have been through tanh (003, section 2.4)."""

    def __init__(self, bounded):
        super().__init__()
        self.bounded, self.qkv = bounded, nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.bounded:
            q, k, v = torch.tanh(q), torch.tanh(k), torch.tanh(v)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


def test_bounded_multiplicative_attention_is_lipschitz_and_plain_attention_is_not():
    u = tokens(3, 4)
    form = assert_same(Bounded(True), u)
    found = lipschitz(form, "matrix_product")
    assert found == {"matrix_product(3, 4, 3, 1.0, 1.0)": 3.0, "matrix_product(3, 3, 4, 1.0, 1.0)": 4.0}
    assert set(lipschitz(assert_same(Bounded(False), u), "matrix_product").values()) == {math.inf}


def test_constants_of_bounded_attention_hold_along_the_network():
    """Difference quotients of every product block, between states that inputs really reach."""
    torch.manual_seed(0)
    network = Bounded(True).double()
    form = to_implicit(network, (3, 4))
    u = 3 * torch.randn(400, 3, 4, dtype=torch.float64)
    other = u + 10.0 ** torch.empty(400, 1, 1, dtype=torch.float64).uniform_(-4, 0) * torch.randn_like(u)
    before, after = (driven(form, value) for value in (u, other))
    for number, phi in enumerate(form.activations):
        z, w = before[number], after[number]
        for norm in ("1", "2", "inf"):
            distance = torch.linalg.vector_norm(z - w, float(norm), -1)
            moved = torch.linalg.vector_norm(phi(z) - phi(w), float(norm), -1)
            if not phi.componentwise and phi.block == z.shape[1]:
                assert (moved <= phi.lipschitz(norm) * distance * (1 + 1e-9)).all()


def driven(form, u):
    """Returns what every block of states is applied to."""
    x = form.equilibrium(u).value
    z = (form.A @ x) + (form.B @ u.flatten(1))
    z = z if form.bias is None else z + form.bias
    return z.split(form.partition, dim=1)


def test_clipping_never_changes_bounded_attention():
    torch.manual_seed(0)
    network = Bounded(True)
    with torch.no_grad():
        network.qkv.weight.mul_(100)
    for dtype in (torch.float32, torch.float64):
        form, u = to_implicit(network.to(dtype), (3, 4)), 10 * tokens(3, 4, 50, dtype)
        names = [a.name.split(", 1.0, 1.0")[0] + ")" * (", 1.0, 1.0" in a.name) for a in form.activations]
        free = form.replaced(activation=[get_activation(name) for name in names])
        assert names != [a.name for a in form.activations] and torch.equal(form(u), free(u))


@pytest.mark.parametrize(
    ("baseline", "shape"),
    [
        (SequenceEncoder(6, 1, width=4, heads=2, feedforward=8), (6,)),
        (SequenceEncoder(6, 2, width=4, heads=2, feedforward=8, layers=2, head="step", causal=True), (6,)),
        (ArrayEncoder(10, 2, feedforward=7, heads=5), (10,)),
        (ArrayTransformer(10, 2), (10,)),
    ],
)
def test_baselines(baseline, shape):
    u = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_same(baseline, u)


def test_what_has_no_implicit_form_says_so():
    x = nn.Linear(8, 8)
    with pytest.raises(InputError, match="query, key and value"):
        to_implicit(nn.MultiheadAttention(8, 2), (5, 8))
    with pytest.raises(InputError, match="a module that calls it"):
        to_implicit(nn.TransformerDecoderLayer(8, 2), (5, 8))
    with pytest.raises(UnsupportedError, match="embedded tokens"):
        to_implicit(nn.Sequential(nn.Embedding(7, 8)), (5,))
    dropping = Using(lambda n, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    with pytest.raises(UnsupportedError, match=r"dropout_p=0\.1"):
        to_implicit(dropping, (5, 8))
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    blind = Using(lambda n, x: n.a(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool))[0], a=layer)
    with pytest.raises(InputError, match="hides all keys"):
        to_implicit(blind, (5, 8))
    wrong = Using(lambda n, x: n.a(x, x, x, attn_mask=CAUSAL[:4, :4])[0], a=layer)
    with pytest.raises(InputError, match=r"\(5, 5\) or \(2, 5, 5\)"):
        to_implicit(wrong, (5, 8))
    depending = Using(lambda n, x: n.a(x, x, x, attn_mask=n.x(x)[0, :, :5])[0], a=layer, x=x)
    with pytest.raises(UnsupportedError, match="must be constant"):
        to_implicit(depending, (5, 8))
    hint = Using(lambda n, x: n.a(x, x, x, is_causal=True)[0], a=layer)
    with pytest.raises(InputError, match="only a hint"):
        to_implicit(hint, (5, 8))
    mixing = Using(lambda n, x: n.a(n.x(x)), a=nn.TransformerEncoderLayer(8, 2), x=x)
    with pytest.raises(InputError, match=r"transpose\(0, 1\)"):
        to_implicit(mixing, (5, 8))
    odd = Using(lambda n, x: n.a(x), a=nn.TransformerEncoderLayer(8, 2, activation=lambda z: z, batch_first=True))
    with pytest.raises(UnsupportedError, match="has no rule"):
        to_implicit(odd, (5, 8))
