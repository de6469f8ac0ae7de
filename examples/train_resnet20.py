"""Trains the ResNet-20 that the CIFAR suites use, on data_batch_1 to data_batch_4, and writes its weights.

    python examples/train_resnet20.py --device cuda --out resnet20.safetensors     # minutes on a GPU
    python examples/train_resnet20.py --epochs 1 --images 2000                     # to see that it works

Prints the accuracy on data_batch_5, which it has not seen, and on the test images that are there. Needs CIFAR-10;
`wellposed.data.load_images` says where it looks for it.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from wellposed_lab.networks.resnet import accuracy, save_weights, train_resnet, trained_resnet20

from wellposed.data.images import Images, load_images


def main() -> None:
    """Trains, writes and measures what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="train on the first so many only")
    parser.add_argument("--out", type=Path, default=Path("resnet20.safetensors"))
    options = parser.parse_args()
    began = time.perf_counter()
    images = load_images("cifar10", "fit")
    if options.images:
        images = _first(images, options.images)
    model = train_resnet(images, epochs=options.epochs, seed=options.seed, device=options.device)
    save_weights(model, options.out)
    print(f"trained on {len(images)} images in {time.perf_counter() - began:.0f} s, wrote {options.out}")
    written = trained_resnet20(options.out).to(options.device)
    for split in ("holdout", "test"):
        unseen = load_images("cifar10", split)
        print(f"{split}: {100 * accuracy(written, unseen):.2f} % of {len(unseen)} images")


def _first(images: Images, count: int) -> Images:
    return replace(images, pixels=images.pixels[:count], labels=images.labels[:count])


if __name__ == "__main__":
    main()
