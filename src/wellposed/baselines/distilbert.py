"""Reads the weights of DistilBERT as they are published: safetensors with the names of `transformers`."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wellposed.baselines.text_classifier import TextClassifier, TextShape
from wellposed.errors import FileFormatError

PREFIX = "distilbert."
OUTSIDE = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.LayerNorm": "norm",
}
LAYER = {
    "attention.q_lin": "attention.query",
    "attention.k_lin": "attention.key",
    "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.out",
    "sa_layer_norm": "norms.0",
    "ffn.lin1": "expand",
    "ffn.lin2": "contract",
    "output_layer_norm": "norms.1",
}
HEAD = {"pre_classifier": "hidden", "classifier": "readout"}
HEAD_WIDTH = 64  # of one attention head in the published models


def load_distilbert(path: str | os.PathLike[str], *, heads: int | None = None) -> TextClassifier:
    """Loads a DistilBERT that was trained to classify, in evaluation mode.

    All sizes are read off the tensors. Tensors of the masked language model are left out.

    Args:
        path: ``model.safetensors``, or the folder in which it lies.
        heads: of the attention; by default as in ``config.json`` beside the file, else one for 64 features.

    Raises:
        FileFormatError: no such file, or tensors are missing; the message says which.
    """
    place = Path(path)
    place = place / "model.safetensors" if place.is_dir() else place
    try:
        tensors = load_file(place)
    except (OSError, SafetensorError) as error:
        raise FileFormatError(
            f"{str(place)!r} is not a safetensors file: {error}; give model.safetensors of a DistilBERT for "
            "sequence classification, or the folder that holds it"
        ) from error
    found = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    renamed = _renamed(found, place)
    shape = _shape(renamed, heads or _heads(place))
    model = TextClassifier(shape)
    model.load_state_dict({name: value.to(model.words.weight) for name, value in renamed.items()})
    return model.eval()


def _renamed(tensors: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """Gives the tensors our names."""
    pairs = dict(OUTSIDE | HEAD)
    numbers = {name.split(".")[2] for name in tensors if name.startswith("transformer.layer.")}
    for k in range(len(numbers)):
        pairs |= {f"transformer.layer.{k}.{theirs}": f"layers.{k}.{ours}" for theirs, ours in LAYER.items()}
    found, missing = {}, [] if numbers else ["transformer.layer.0.attention.q_lin.weight"]
    for theirs, ours in pairs.items():
        for ending in ("weight",) if "_embeddings" in theirs else ("weight", "bias"):
            if (value := tensors.get(f"{theirs}.{ending}")) is None:
                missing.append(f"{theirs}.{ending}")
            else:
                found[f"{ours}.{ending}"] = value
    if missing:
        hint = "; train it to classify first" if any(name.split(".")[0] in HEAD for name in missing) else ""
        raise FileFormatError(
            f"{str(place)!r} lacks {len(missing)} tensors of a DistilBERT for sequence classification, such as "
            f"{missing[0]!r}{hint}"
        )
    return found


def _shape(tensors: dict[str, Tensor], heads: int | None) -> TextShape:
    (vocabulary, width), length = tensors["words.weight"].shape, len(tensors["places.weight"])
    layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    feedforward, classes = len(tensors["layers.0.expand.weight"]), len(tensors["readout.weight"])
    return TextShape(vocabulary, length, width, layers, heads or max(1, width // HEAD_WIDTH), feedforward, classes)


def _heads(place: Path) -> int | None:
    file = place.with_name("config.json")
    if not file.exists():
        return None
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return int(settings["n_heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{str(file)!r} does not say n_heads: {error}") from error
