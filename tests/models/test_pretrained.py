import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import FileFormatError, InputError, MissingExtraError, UnknownNameError
from wellposed.models import (
    ConvCell,
    DenseCell,
    PlainConvCell,
    RecallCell,
    TransformerCell,
    weight_norm,
)
from wellposed.models.cells import MultiscaleCell

MODELS = {
    "implicit": (lambda: wp.ImplicitModel(3, 2, 6, bias=True, kappa=0.5, condition="spectral"), (5, 3)),
    "low rank": (lambda: wp.ImplicitModel(3, 2, 6, rank=2, solver=wp.Broyden(4), stop=wp.Relative(1e-4)), (5, 3)),
    "recurrent": (lambda: wp.ImplicitRNN(3, 4, 5, out_features=2, num_layers=2, batch_first=True), (2, 4, 3)),
    "form": (lambda: wp.series(wp.ImplicitModel(3, 4, 6).form(), wp.ImplicitModel(4, 2, 5).form()), (5, 3)),
    "dense": (lambda: wp.DEQ(DenseCell(3, 6, depth=2, activation="sigmoid"), gradient=wp.Phantom(3)), (5, 3)),
    "plain": (lambda: wp.DEQ(PlainConvCell(2, 4, kernel_size=5), max_steps=500), (5, 2, 8)),
    "recall": (lambda: wp.DEQ(RecallCell(2, 4, depth=3, dims=2), on_failure="ignore"), (3, 2, 5, 5)),
    "convolution": (lambda: wp.DEQ(ConvCell(2, 8, groups=4, dropout=0.25)), (3, 2, 6, 6)),
    "transformer": (lambda: wp.DEQ(TransformerCell(8, 2, 16, causal=True), solver="picard"), (2, 5, 8)),
    "scales": (
        lambda: wp.DEQ(MultiscaleCell((4, 8), groups=2, dropout=0.5), stop=wp.Relative(1e-4)),
        (2, 4, 8, 8),
    ),
    "multiscale": (
        lambda: wp.MultiscaleDEQ(
            *(1, 3), channels=(4, 8), head_channels=(6, 8), final_channels=12, groups=2, stem_downsample=1
        ),
        (2, 1, 16, 16),
    ),
    "multiscale, no norm": (
        lambda: wp.MultiscaleDEQ(
            *(1, 3),
            channels=(4,),
            head_channels=(6,),
            final_channels=12,
            groups=2,
            weight_norm=False,
            dropout=0.25,
        ),
        (2, 1, 8, 8),
    ),
}


class Own(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("count", torch.tensor(7))
        with torch.no_grad():
            self.layer.weight.mul_(0.3)

    def forward(self, x, u):
        return torch.tanh(self.layer(x)) + u


@pytest.mark.parametrize("way", ["file", "folder", "pretrained"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, way, tmp_path):
    make, shape = MODELS[name]
    model, path = make(), str(tmp_path / "model") + ("" if way == "file" else "/")
    if isinstance(model, wp.MultiscaleDEQ):
        model(torch.randn(shape))  # batch norm has statistics and a counter now
    if way == "pretrained":
        wp.models.save_pretrained(model, path, card="Trained on *nothing*.")
        loaded = wp.models.from_pretrained(path)
    else:
        wp.save(model, path)
        loaded = wp.load(path)
    assert type(loaded) is type(model)
    u = torch.randn(shape)
    if isinstance(model, nn.Module):
        model, loaded = model.eval(), loaded.eval()
        assert str(loaded) == str(model)
    expected, again = model(u), loaded(u)
    for a, b in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (expected, again)), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    if isinstance(model, wp.DEQ):
        assert (loaded.max_steps, loaded.on_failure) == (model.max_steps, model.on_failure)


@pytest.mark.parametrize("ending", [".safetensors", "/"])
def test_a_cell_of_ones_own_is_given_when_it_is_loaded(ending, tmp_path):
    model, path = wp.DEQ(Own(), max_steps=77).double(), f"{tmp_path}/model{ending}"
    wp.save(model, path)
    loaded, u = wp.load(path, cell=Own()), torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(loaded(u), model(u))
    assert loaded.max_steps == 77 and loaded.cell.count == 7
    with pytest.raises(FileFormatError, match=r"load\(\.\.\., cell=Own\(\.\.\.\)\)"):
        wp.load(path)
    with pytest.raises(FileFormatError, match="received a Linear"):
        wp.load(path, cell=nn.Linear(3, 3))
    with pytest.raises(FileFormatError, match=r"asks for layer|asks for cell\.layer"):
        wp.load(path, cell=Own(4))


def test_damaged_files_of_a_deq(tmp_path):
    path = tmp_path / "model.safetensors"
    wp.save(wp.DEQ(DenseCell(3, 4)), path)
    whole = path.read_bytes()
    for broken in (whole[:-4], whole[: len(whole) // 2], whole[:-4] + b"\x00\x00\x80\x3f", b"nothing"):
        path.write_bytes(broken)
        with pytest.raises(FileFormatError):
            wp.load(path)
    wp.save(
        wp.MultiscaleDEQ(1, 2, channels=(4,), head_channels=(4,), final_channels=4, groups=2), f"{tmp_path}/many/"
    )
    config = json.loads((tmp_path / "many" / "config.json").read_text())
    del config["sha256"]
    for changes, reason in (
        ({"kind": "os.system"}, "MultiscaleDEQ"),
        ({"final_channels": 10**9}, "asks for"),
        ({"channels": 3}, "makes no sense"),
        ({"command": "true"}, "command"),
    ):
        changed = {**config, "config": {**config["config"], **changes}}
        (tmp_path / "many" / "config.json").write_text(json.dumps(changed))
        with pytest.raises((FileFormatError, UnknownNameError), match=reason):
            wp.load(tmp_path / "many")


def test_file_folder_and_repository_are_told_apart(tmp_path):
    with pytest.raises(InputError, match="card goes into a folder"):
        wp.save(wp.ImplicitModel(3, 2, 6), tmp_path / "file", card="text")
    wp.save(wp.ImplicitModel(3, 2, 6), tmp_path / "file")
    with pytest.raises(InputError, match="revision"):
        wp.load(tmp_path / "file", revision="main")
    with pytest.raises(FileNotFoundError, match=r"wellposed\.load reads files"):
        wp.models.from_pretrained(tmp_path / "file")
    for missing in (tmp_path / "none", str(tmp_path / "none"), "models/none.safetensors", "tests/none"):
        with pytest.raises(FileNotFoundError, match="owner/model"):
            wp.load(missing)
    wp.save(wp.ImplicitModel(3, 2, 6), tmp_path, card="About *this*.", certificate=True)
    assert "About *this*." in (tmp_path / "README.md").read_text() and (tmp_path / "model.cert").is_file()


def test_dtype_is_kept(tmp_path):
    wp.models.save_pretrained(wp.DEQ(DenseCell(3, 4)).double(), tmp_path)
    assert wp.models.from_pretrained(tmp_path)(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_the_folder_is_text_and_tensors(tmp_path):
    wp.models.save_pretrained(wp.ImplicitModel(3, 2, 6), tmp_path, card="Trained on *nothing*.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["library_name"] == "wellposed" and config["architectures"] == ["ImplicitModel"]
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: wellposed\n")
    assert "Trained on *nothing*." in card and "inf: 0.95 < 1 holds" in card


def test_what_cannot_be_saved_is_said(tmp_path):
    with pytest.raises(InputError, match="noise"):
        wp.models.save_pretrained(wp.DEQ(DenseCell(3, 4), noise=wp.Noise(signal=20.0)), tmp_path)
    with pytest.raises(InputError, match="nothing is proven of a DEQ"):
        wp.save(wp.DEQ(DenseCell(3, 4)), tmp_path / "file", certificate=True)
    with pytest.raises(InputError, match="remove_norms"):
        wp.models.save_pretrained(wp.DEQ(weight_norm(DenseCell(3, 4))), tmp_path)
    with pytest.raises(InputError, match="received Linear"):
        wp.models.save_pretrained(nn.Linear(2, 2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="owner/model"):
        wp.models.from_pretrained(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        wp.models.from_pretrained(tmp_path)
    wp.models.save_pretrained(wp.DEQ(DenseCell(3, 4)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert len(config.pop("sha256")) == 64

    def tried(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return wp.models.from_pretrained(tmp_path)

    with pytest.raises(FileFormatError, match="format 'other'"):
        tried(format="other")
    with pytest.raises(UnknownNameError, match="DenseCell"):
        tried(config={**config["config"], "cell": {"type": "os.system", "command": "true"}})
    with pytest.raises(FileFormatError, match="make no model"):
        tried(config={**config["config"], "cell": {**config["config"]["cell"], "state_features": 5}})
    with pytest.raises(InputError, match="revision"):
        wp.models.from_pretrained(tmp_path, revision="main")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match="make no model"):
        tried()


def test_weights_and_configuration_of_two_models_are_refused(tmp_path):
    """As a kill between the two files leaves them, when a folder is written over."""
    for activation, name in (("relu", "a"), ("tanh", "b")):
        wp.models.save_pretrained(wp.ImplicitModel(3, 2, 6, activation=activation), tmp_path / name)
    (tmp_path / "a" / "model.safetensors").replace(tmp_path / "b" / "model.safetensors")
    with pytest.raises(FileFormatError, match="checksum does not match"):
        wp.models.from_pretrained(tmp_path / "b")


def test_a_repository_is_downloaded_once_the_hub_is_there(tmp_path, monkeypatch):
    wp.models.save_pretrained(wp.ImplicitModel(3, 2, 6), tmp_path)
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options["revision"]))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert wp.models.from_pretrained("someone/model", revision="v1").state_features == 6
    assert asked == [("someone/model", "v1")]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"wellposed\[share\]"):
        wp.models.from_pretrained("someone/model")
