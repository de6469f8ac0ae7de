"""DistilBERT: a generated checkpoint in the published names, against the architecture written down once more."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from wellposed_lab.networks.transformers import TextClassifier, TextShape, encoder_layers, load_distilbert

from wellposed.errors import FileFormatError, InputError

WIDTH, HEADS, HIDDEN, LAYERS, WORDS, PLACES, CLASSES = 12, 3, 20, 2, 40, 16, 5


def checkpoint():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "distilbert.embeddings.word_embeddings.weight": draw(WORDS, WIDTH),
        "distilbert.embeddings.position_embeddings.weight": draw(PLACES, WIDTH),
        "distilbert.embeddings.LayerNorm.weight": 1 + 0.1 * draw(WIDTH),
        "distilbert.embeddings.LayerNorm.bias": draw(WIDTH),
        "vocab_projector.bias": draw(WORDS),  # of the language model, to be left out
    }
    for k in range(LAYERS):
        start = f"distilbert.transformer.layer.{k}"
        sizes = {f"attention.{name}": (WIDTH, WIDTH) for name in ("q_lin", "k_lin", "v_lin", "out_lin")}
        sizes |= {"ffn.lin1": (HIDDEN, WIDTH), "ffn.lin2": (WIDTH, HIDDEN)}
        for name, (rows, columns) in sizes.items():
            tensors[f"{start}.{name}.weight"] = draw(rows, columns) / columns**0.5
            tensors[f"{start}.{name}.bias"] = draw(rows)
        for name in ("sa_layer_norm", "output_layer_norm"):
            tensors[f"{start}.{name}.weight"] = 1 + 0.1 * draw(WIDTH)
            tensors[f"{start}.{name}.bias"] = draw(WIDTH)
    for name, rows in (("pre_classifier", WIDTH), ("classifier", CLASSES)):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw(rows, WIDTH), draw(rows)
    return tensors


def reference(tensors, ids):
    """The published architecture in functions of torch, one text at a time without its padding."""

    def linear(x, name):
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    logits = []
    for text in ids:
        words = text[text != 0]
        x = tensors["distilbert.embeddings.word_embeddings.weight"][words]
        x = norm(x + tensors["distilbert.embeddings.position_embeddings.weight"][: len(words)],
                 "distilbert.embeddings.LayerNorm")  # fmt: skip
        for k in range(LAYERS):
            start = f"distilbert.transformer.layer.{k}"
            q, key, v = (
                linear(x, f"{start}.attention.{name}_lin").view(len(words), HEADS, -1).transpose(0, 1)
                for name in "qkv"
            )
            mixed = F.scaled_dot_product_attention(q, key, v).transpose(0, 1).reshape(len(words), WIDTH)
            x = norm(x + linear(mixed, f"{start}.attention.out_lin"), f"{start}.sa_layer_norm")
            hidden = F.gelu(linear(x, f"{start}.ffn.lin1"))
            x = norm(x + linear(hidden, f"{start}.ffn.lin2"), f"{start}.output_layer_norm")
        logits.append(linear(F.relu(linear(x[0], "pre_classifier")), "classifier"))
    return torch.stack(logits)


@pytest.fixture
def folder(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"n_heads": HEADS}))
    return tmp_path


def test_loaded_network_computes_what_the_architecture_says(folder):
    ids = torch.randint(1, WORDS, (6, 9), generator=torch.Generator().manual_seed(1))
    ids[1, 4:] = 0
    ids[2, 1:] = 0
    model = load_distilbert(folder)
    assert not model.training and model.shape == TextShape(WORDS, PLACES, WIDTH, LAYERS, HEADS, HIDDEN, CLASSES)
    with torch.no_grad():
        assert torch.allclose(model(ids), reference(checkpoint(), ids), atol=1e-5)
        assert torch.equal(load_distilbert(folder / "model.safetensors", heads=HEADS)(ids), model(ids))
        assert not torch.allclose(load_distilbert(folder, heads=1)(ids), model(ids), atol=1e-2)


def test_names_without_the_prefix_and_half_precision_are_read(folder, tmp_path):
    ids = torch.randint(1, WORDS, (2, 5))
    plain = {name.removeprefix("distilbert."): value.half() for name, value in checkpoint().items()}
    save_file(plain, tmp_path / "plain.safetensors")
    found = load_distilbert(tmp_path / "plain.safetensors", heads=HEADS)
    with torch.no_grad():
        assert found.words.weight.dtype == torch.float32
        assert torch.allclose(found(ids), load_distilbert(folder)(ids), atol=0.2)


def test_what_is_missing_is_named(tmp_path):
    tensors = checkpoint()
    del tensors["classifier.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match=r"classifier.weight.*train it to classify"):
        load_distilbert(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="lacks"):
        load_distilbert(tmp_path)
    with pytest.raises(FileFormatError, match=r"give model.safetensors"):
        load_distilbert(tmp_path / "none.safetensors")
    (tmp_path / "config.json").write_text("{}")
    save_file(checkpoint(), tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="n_heads"):
        load_distilbert(tmp_path)


def test_padding_changes_nothing_and_empty_texts_are_answered():
    torch.manual_seed(0)
    for pooling in ("first", "mean"):
        model = TextClassifier(TextShape(30, 12, 8, 2, 2, 16, 3, pooling)).eval()
        ids = torch.randint(1, 30, (2, 5))
        padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
        with torch.no_grad():
            assert torch.allclose(model(padded), model(ids), atol=1e-6)
            assert bool(model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all())


def test_layers_are_named_and_errors_say_what_to_do():
    model = TextClassifier(TextShape(30, 6, 8, 2, 2, 16, 3))
    known = dict(model.named_modules())
    assert len(encoder_layers(model)) == 12 and all(name in known for name in encoder_layers(model))
    with pytest.raises(InputError, match="at most 6 words"):
        model(torch.ones(1, 7, dtype=torch.int64))
    with pytest.raises(InputError, match="pooling"):
        TextShape(pooling="max")
    with pytest.raises(InputError, match="TextClassifier"):
        encoder_layers(torch.nn.Linear(1, 1))
