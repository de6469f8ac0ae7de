"""Models as folders in the conventions of the Hugging Face hub: weights, configuration and a card, no pickle."""

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.conditions.certificate import Certificate
from wellposed.errors import FileFormatError, InputError, require, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import FORM_FORMAT, pack_form, registered_name, unpack_form
from wellposed.models.atomic import written_whole
from wellposed.models.attention import TransformerCell
from wellposed.models.cell_parts import Cell
from wellposed.models.cells import ConvCell, DenseCell, PlainConvCell, RecallCell
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.proof import evaluated, write_certificate
from wellposed.models.reading import check_counts, filled, making_sense
from wellposed.models.recurrent import ImplicitRNN
from wellposed.models.storage import FORMAT, build, configuration, decode, encode
from wellposed.models.tensor_file import checksum, write_tensors

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
DEQ_FORMAT = "wellposed-deq-1"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_CELLS: dict[str, type[Cell]] = {
    cell.__name__: cell for cell in (ConvCell, DenseCell, PlainConvCell, RecallCell, TransformerCell)
}
Shared = ImplicitModel | ImplicitRNN | ImplicitForm | DEQ


def save_pretrained(
    model: Shared, folder: str | os.PathLike[str], *, card: str = "", certificate: bool = False
) -> None:
    """Writes ``model.safetensors``, ``config.json`` and the model card ``README.md``.

    The folder is what a repository of the hub holds. All of it is tensors and text: loading runs no code of it.

    Args:
        model: an `ImplicitModel`, `ImplicitRNN` or `ImplicitForm`, or a `DEQ` with a cell of this library.
        folder: made if it is not there; files of these names in it are replaced.
        card: Markdown about data, training and limits, put into the card.
        certificate: writes ``model.cert`` too, as `save` does; not for a `DEQ`, of which nothing is proven.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save_pretrained(ImplicitModel(3, 2, 8), folder)
        >>> sorted(os.listdir(folder))
        ['README.md', 'config.json', 'model.safetensors']
        >>> from_pretrained(folder).state_features
        8
    """
    if certificate:
        if isinstance(model, DEQ):
            raise InputError("nothing is proven of a DEQ, so it has no certificate; leave certificate out")
        model = evaluated(model)
    tensors, config = _packed(model)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config["sha256"] = _seal(config, tensors)
    with written_whole(target / WEIGHTS) as place:
        write_tensors(place, tensors, {"format": "pt"})
    texts = {CONFIG: json.dumps(config, indent=2) + "\n", CARD: _card(model, config, card)}
    for name, text in texts.items():
        with written_whole(target / name) as place:
            place.write_text(text, encoding="utf-8")
    if certificate and not isinstance(model, DEQ):
        write_certificate(model, target / WEIGHTS, config=True)


def from_pretrained(source: str | os.PathLike[str], *, revision: str | None = None) -> Shared:
    """Reads what `save_pretrained` has written, on the CPU.

    Args:
        source: a folder, or the name ``owner/model`` of a repository of the hub, which is then downloaded once by
            `huggingface_hub`.
        revision: branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing in it.
        FileFormatError: weights and configuration do not make up a model.
    """
    folder = _folder(source, revision)
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {os.fspath(folder)!r}; save_pretrained writes such folders")
    where = f"{CONFIG} and {WEIGHTS} in {os.fspath(folder)!r} make no model"
    try:
        with making_sense("the configuration makes no sense"):
            tensors, config = (
                load_file(folder / WEIGHTS),
                json.loads((folder / CONFIG).read_text(encoding="utf-8")),
            )
            if "sha256" in config and config["sha256"] != _seal(config, tensors):  # older folders have none
                raise FileFormatError(
                    "their checksum does not match: one is damaged, or of another model. Get both once more; if "
                    "you have changed them yourself, delete the entry sha256"
                )
            check_counts(config, tensors)
            return _unpacked(tensors, config)
    except (SafetensorError, FileFormatError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def _folder(source: str | os.PathLike[str], revision: str | None) -> Path:
    """Finds the folder, if need be by a download."""
    if Path(source).is_dir():
        if revision is not None:
            raise InputError(f"revision={revision!r} is of a repository; {os.fspath(source)!r} is a folder here")
        return Path(source)
    if not isinstance(source, str) or not _REPOSITORY.fullmatch(source):
        raise FileNotFoundError(f"no folder at {os.fspath(source)!r}; a repository is named 'owner/model'")
    hub = require("huggingface_hub", extra="share")
    return Path(hub.snapshot_download(source, revision=revision, allow_patterns=[WEIGHTS, CONFIG, CARD]))


def _seal(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Returns a checksum of the weights and of what decides their meaning; they are two files."""
    said = {name: config.get(name) for name in ("format", "config", "form")}
    return checksum(json.dumps(said, sort_keys=True), tensors)


def _packed(model: Shared) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config: dict[str, Any] = {"library_name": "wellposed", "architectures": [type(model).__name__]}
    if isinstance(model, ImplicitForm):
        tensors, metadata = pack_form(model)
        return tensors, {**config, "format": FORM_FORMAT, "form": json.loads(metadata["form"])}
    if isinstance(model, DEQ):
        config |= {"format": DEQ_FORMAT, "config": _deq_configuration(model)}
    elif isinstance(model, ImplicitModel | ImplicitRNN):
        config |= {"format": FORMAT, "config": configuration(model)}
    else:
        raise InputError(
            "save_pretrained takes an ImplicitModel, ImplicitRNN, ImplicitForm or DEQ; received "
            f"{type(model).__name__}"
        )
    return {name: value.detach().contiguous() for name, value in model.state_dict().items()}, config


def _unpacked(tensors: dict[str, Tensor], config: dict[str, Any]) -> Shared:
    kind = config["format"]
    if kind == FORM_FORMAT:
        return unpack_form({"form": json.dumps(config["form"])}, tensors)
    if kind == FORMAT:
        return build(config["config"], tensors)
    if kind == DEQ_FORMAT:
        return _build_deq(config["config"], tensors)
    raise FileFormatError(f"the format {kind!r} is not known; known are {FORMAT}, {FORM_FORMAT} and {DEQ_FORMAT}")


def _deq_configuration(model: DEQ) -> dict[str, Any]:
    if type(model.cell).__name__ not in _CELLS or not isinstance(model.cell, Cell):
        raise InputError(
            f"a DEQ can be shared with a cell of this library ({', '.join(sorted(_CELLS))}); its cell is a "
            f"{type(model.cell).__name__}, whose code would not be part of the folder"
        )
    if any(parametrize.is_parametrized(layer) for layer in model.modules()):
        raise InputError("weights under a norm cannot be shared as such; call wellposed.models.remove_norms first")
    parts = {
        name: encode(getattr(model, name)) for name in ("solver", "stop", "max_steps", "gradient", "on_failure")
    }
    shape = model.state_shape
    return {
        "cell": {"type": type(model.cell).__name__, **_cell_options(model.cell)},
        "state_shape": shape,
        **parts,
    }


def _cell_options(cell: nn.Module) -> dict[str, Any]:
    """Returns the arguments that make a cell of the same kind."""
    names = (
        "in_features",
        "state_features",
        "in_channels",
        "channels",
        "dims",
        "groups",
        "width",
        "heads",
        "causal",
    )
    options = {name: getattr(cell, name) for name in names if hasattr(cell, name)}
    for name in ("activation", "projection"):
        if hasattr(cell, name):
            options[name] = registered_name(getattr(cell, name).activation)
    if isinstance(cell, DenseCell | RecallCell):
        options["depth"] = len(cell.layers)
    if isinstance(cell, PlainConvCell | RecallCell):
        options["kernel_size"] = cell.state.kernel_size[0]
    if isinstance(cell, ConvCell):
        options |= {"kernel_size": cell.input.kernel_size[0], "dropout": cell.block.dropout.p}
    if isinstance(cell, TransformerCell):
        options |= {"hidden": cell.hidden.out_features, "dropout": cell.dropouts[0].p}
    return options


def _build_deq(config: dict[str, Any], tensors: dict[str, Tensor]) -> DEQ:
    cell = dict(config.pop("cell"))
    name = cell.pop("type")
    if name not in _CELLS:
        raise unknown_name("cell", name, _CELLS)
    return filled(
        lambda: DEQ(_CELLS[name](**cell), **{key: decode(value) for key, value in config.items()}), tensors
    )


def _card(model: Shared, config: dict[str, Any], text: str) -> str:
    """Writes the model card; its head is what the hub reads."""
    kind = config["architectures"][0]
    facts = [f"- kind: `{kind}`", *_facts(model)]
    lines = ["---", "library_name: wellposed", "tags:", "- implicit-deep-learning", "- pytorch", "---", ""]
    lines += [f"# {kind}", "", *([text.strip(), ""] if text.strip() else []), *facts, "", "```python"]
    lines += ["import wellposed as wp", "", 'model = wp.from_pretrained("FOLDER OR owner/model")', "```", ""]
    return "\n".join(lines)


def _facts(model: Shared) -> list[str]:
    if isinstance(model, ImplicitForm):
        states, inputs, outputs = model.sizes
        return [f"- {inputs} inputs, {states} states, {outputs} outputs"]
    found = [f"- {sum(value.numel() for value in model.parameters()):,} parameters"]
    if isinstance(model, DEQ):
        return [*found, f"- cell: `{type(model.cell).__name__}`"]
    cells = [model] if isinstance(model, ImplicitModel) else [model.cell(k) for k in range(len(model.cells))]
    certificates: list[Certificate] = [cell.certificate() for cell in cells]
    return [*found, *(f"- well-posedness: {certificate}" for certificate in certificates)]
