"""Trained networks answer alike; those kept in the cache folder are trained once and checked when read."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from wellposed_lab.config import describe
from wellposed_lab.experiments.attack.run import AttackRun
from wellposed_lab.experiments.earthquake.eliminate import StationDense
from wellposed_lab.experiments.earthquake.task import StationNetwork
from wellposed_lab.experiments.sparsify.texts import Newsgroups
from wellposed_lab.networks.trained import Dense, FoldedResNet, ResidualNetwork, checksum, train_or_load

from wellposed.errors import FileFormatError


@dataclass(frozen=True)
class Config:
    width: int = 3


class Trainer:
    """A network whose training can be counted."""

    def __init__(self):
        self.network, self.trainings = nn.Linear(3, 2), 0

    def train(self):
        self.trainings += 1
        nn.init.constant_(self.network.weight, 7.0)

    def keep(self, folder, config=Config()):  # noqa: B008 - frozen
        train_or_load("net", config, self.network, self.train, folder)
        return self


def only_file(folder):
    (place,) = (folder / "networks").iterdir()
    return place


def test_the_second_process_reads_what_the_first_has_trained(tmp_path):
    first, second = Trainer().keep(tmp_path), Trainer().keep(tmp_path)
    assert (first.trainings, second.trainings) == (1, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True)
    )


def test_another_configuration_is_another_network(tmp_path):
    Trainer().keep(tmp_path)
    assert Trainer().keep(tmp_path, Config(width=4)).trainings == 1
    assert len(list((tmp_path / "networks").iterdir())) == 2


def test_a_changed_weight_is_noticed(tmp_path):
    Trainer().keep(tmp_path)
    place = only_file(tmp_path)
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"checksum is wrong; delete it"):
        Trainer().keep(tmp_path)


def test_files_that_are_cut_off_or_of_something_else(tmp_path):
    Trainer().keep(tmp_path)
    place = only_file(tmp_path)
    whole = place.read_bytes()
    place.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileFormatError, match=r"holds no weights.*delete it"):
        Trainer().keep(tmp_path)
    save_file({"other": torch.ones(2)}, place, {"sha256": checksum({"other": torch.ones(2)})})
    with pytest.raises(FileFormatError, match=r"another network; delete it"):
        Trainer().keep(tmp_path)
    save_file({"other": torch.ones(2)}, place)
    with pytest.raises(FileFormatError, match=r"checksum is wrong"):
        Trainer().keep(tmp_path)


def test_an_interrupted_training_leaves_nothing(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_or_load("net", Config(), nn.Linear(3, 2), interrupt, tmp_path)
    assert not (tmp_path / "networks").exists()


def test_checksums_see_names_shapes_and_values():
    plain = {"a": torch.ones(2, 3)}
    others = [
        {"b": torch.ones(2, 3)},
        {"a": torch.ones(3, 2)},
        {"a": torch.ones(2, 3).double()},
        {"a": torch.zeros(2, 3)},
    ]
    assert len({checksum(tensors) for tensors in (plain, *others)}) == 5


def test_the_file_holds_plain_tensors(tmp_path):
    Trainer().keep(tmp_path)
    assert set(load_file(only_file(tmp_path))) == {"weight", "bias"}


STATIONS = StationDense(
    StationNetwork(earth="homogeneous", stations=3, epicentres=3, depths=5, test_samples=10), (4,), epochs=1
)
NETWORKS = {
    "dense": Dense("digits", hidden=(8,), epochs=1),
    "stations": STATIONS,
    "residual": ResidualNetwork("digits", depth=8, epochs=1),
    "folded": FoldedResNet("digits", held_out=10, steps=5),
    "words": Newsgroups("topics", words=50, length=8, width=16, epochs=1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_speaks_the_same_language(name):
    network = NETWORKS[name]
    model = network.trained(1)
    assert model is network.trained(1) and model is not network.trained(2) and not model.training
    u, target = network.training(1)
    drawn = network.draw(1, 6)
    assert len(u) == len(target) and drawn.shape == (6, *u.shape[1:])
    assert set(network.layers(model)) <= {place for place, _ in model.named_modules()} and network.layers(model)
    scores = network.scores(model, 1)
    assert next(iter(scores)) == network.metric and network.score(model, 1) == scores[network.metric]
    other = copy.deepcopy(model).requires_grad_(True)
    network.tune(other, 1, 2)
    assert network.score(model, 1) == scores[network.metric], "the shared network stays as it was"
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_does_not_decide_the_weights_trains_no_second_network():
    for name, change in (
        ("stations", {"inputs_only": True}),
        ("folded", {"held_out": 0}),
        ("words", {"tested": 9}),
    ):
        assert NETWORKS[name].trained(0) is replace(NETWORKS[name], **change).trained(0)
    assert NETWORKS["dense"].trained(0) is not replace(NETWORKS["dense"], hidden=(9,)).trained(0)


def test_renamed_networks_keep_their_names_in_records():
    assert describe(ResidualNetwork("digits", 8, 2)) == {
        "type": "AttackedResNet", "images": "digits", "depth": 8, "epochs": 2,
    }  # fmt: skip
    assert describe(FoldedResNet("digits"))["type"] == "Photographs"
    run = AttackRun(
        suite="attack-mnist", seed=0, scale="tiny", victim=Dense("digits"), axis="clean", attack="dense"
    )
    assert run.config["victim"] == {"type": "AttackedDense", "dense": describe(Dense("digits"))}
