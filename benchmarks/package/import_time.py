"""How long `import wellposed` takes beside `import torch`, in fresh processes in which a warning is an error.

Run: python -m benchmarks.package.import_time          measures, writes results/package/import_time.json and prints the table
     python -m benchmarks.package.import_time --table  prints the table from the JSON
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).parents[1] / "results" / "package" / "import_time.json"
STATEMENTS = {
    "torch": "import torch",
    "wellposed": "import torch, wellposed",
    "wellposed, a model": "import wellposed; wellposed.ImplicitModel",
    "wellposed, an estimator": "import wellposed; wellposed.ImplicitRegressor",
}
REPEATS = 7
PROGRAM = "import time; began = time.process_time(); {}; print(time.process_time() - began)"


def seconds(statement: str) -> float:
    """Returns the CPU time of a statement in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def measured() -> dict[str, Any]:
    """Returns the least CPU time of every statement, measured in turns so that all see the same machine."""
    best = dict.fromkeys(STATEMENTS, float("inf"))
    for _ in range(REPEATS):
        for name, statement in STATEMENTS.items():
            best[name] = min(best[name], seconds(statement))
    return {"python": sys.version.split()[0], "torch": torch.__version__, "seconds": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table from the JSON")
    if not parser.parse_args().table:
        RESULT.write_text(json.dumps(measured(), indent=1) + "\n")
    found = json.loads(RESULT.read_text())
    print(f"Python {found['python']}, torch {found['torch']}")
    for name, value in found["seconds"].items():
        print(f"{name:26s} {value:5.2f} s  {value / found['seconds']['torch']:4.2f} x")


if __name__ == "__main__":
    main()
