"""The ResNet-20 of the CIFAR suites."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from wellposed_lab.networks.resnet import (
    MARGIN,
    Augmented,
    accuracy,
    augment,
    save_weights,
    train_resnet,
    trained_resnet20,
)

from wellposed.data.cache import MissingDataError
from wellposed.data.images import Images, load_images
from wellposed.errors import FileFormatError


def _images(count: int = 24) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 32, 32), generator=generator).to(torch.uint8)
    return Images(pixels, torch.arange(count) % 10, tuple("abcdefghij"), "noise")


def test_moved_images_are_windows_of_the_padded_ones() -> None:
    u = torch.rand(40, 3, 12, 12, generator=torch.Generator().manual_seed(1)) + 1
    wide = torch.nn.functional.pad(u, (MARGIN,) * 4)
    seen = set()
    for image, padded in zip(augment(u, torch.Generator().manual_seed(2)), wide, strict=True):
        places = [
            (row, column, mirrored)
            for row in range(2 * MARGIN + 1)
            for column in range(2 * MARGIN + 1)
            for mirrored in (False, True)
            if torch.equal(_window(padded, row, column, mirrored), image)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) > 20 and {mirrored for _, _, mirrored in seen} == {False, True}


def _window(padded: torch.Tensor, row: int, column: int, mirrored: bool) -> torch.Tensor:
    part = padded[:, row : row + 12, column : column + 12]
    return part.flip(2) if mirrored else part


def test_an_epoch_has_every_image_once_in_another_order() -> None:
    images = replace(_images(), labels=torch.arange(24))
    batches = Augmented(images, 8, torch.Generator().manual_seed(0))
    first, second = (torch.cat([labels for _, labels in batches]) for _ in range(2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(24))
    assert first.tolist() != second.tolist()


def test_training_is_reproducible_and_weights_survive_the_file(tmp_path: Path) -> None:
    one, other = (train_resnet(_images(), epochs=1, batch_size=8, seed=3, progress=False) for _ in range(2))
    u = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(one(u), other(u))
        save_weights(one, tmp_path / "weights.safetensors")
        read = trained_resnet20(tmp_path / "weights.safetensors")(u)
        torch.testing.assert_close(read, one(u), rtol=2e-2, atol=2e-2)
        assert not torch.equal(read, one(u)), "stored in half precision"


@pytest.mark.parametrize("content", [b"", b"no weights", None])
def test_what_is_no_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileFormatError, match="ResNet-20"):
        trained_resnet20(path)


def test_trained_weights_classify_held_out_photographs() -> None:
    try:
        images = load_images("cifar10", "test")
    except MissingDataError:
        pytest.skip("CIFAR-10 is not here")
    some = replace(images, pixels=images.pixels[:200], labels=images.labels[:200])
    assert accuracy(trained_resnet20(), some) > 0.85
