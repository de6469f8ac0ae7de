"""``python -m wellposed.checker model.safetensors``: the check alone, without torch or any other package."""

import sys
from pathlib import Path

from wellposed.checker.check import check
from wellposed.checker.tensors import RefusedError


def main(arguments: list[str]) -> int:
    """Returns 0 if all is proven, 1 if something is refused, 2 if there is nothing to check."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m wellposed.checker model.safetensors [model.cert]", file=sys.stderr)
        return 2
    try:
        for finding in check(*map(Path, arguments)):
            print("proven:", *finding, sep="\t")
    except RefusedError as error:
        print(f"refused: {error}")
        return 1
    except OSError as error:
        print(f"cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
