"""Networks kept in the cache: trained once, checked when read, told apart by their configuration."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from wellposed.errors import FileFormatError
from wellposed.experiments.kept import checksum, train_or_load


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
