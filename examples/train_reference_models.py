"""Trains the small models that come with the package and writes them with their cards.

    python examples/train_reference_models.py                    # all, where load_reference finds them
    python examples/train_reference_models.py digits --out here  # one of them, elsewhere

Takes some minutes on a CPU; seeds are fixed. Needs the lab: pip install . ./lab.
"""

import argparse
import time
from pathlib import Path

from wellposed_lab.reference import RECIPES, train_reference

from wellposed.models.io.storage import TRAINED, store_reference


def main() -> None:
    """Trains, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--out", type=Path, default=TRAINED, help="folder of the models")
    options = parser.parse_args()
    for name in options.names or RECIPES:
        began = time.perf_counter()
        model, card = train_reference(name)
        folder = store_reference(model, card, options.out)
        size = (folder / "model.safetensors").stat().st_size / 1024
        print(card, f"{size:.0f} KB, {time.perf_counter() - began:.0f} s", sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main()
