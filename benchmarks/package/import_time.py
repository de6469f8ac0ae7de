"""How long `import wellposed` takes beside `import torch`, in fresh processes in which a warning is an error.

Run: python -m benchmarks.package.import_time [--quick | --table]
"""

import subprocess
import sys

from benchmarks.harness import load, make_parser, save

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


def measure(repeats: int) -> dict[str, float]:
    """Returns the least CPU time of every statement, measured in turns so that all see the same machine."""
    best = dict.fromkeys(STATEMENTS, float("inf"))
    for _ in range(repeats):
        for name, statement in STATEMENTS.items():
            best[name] = min(best[name], seconds(statement))
    return best


def main() -> None:
    """Measures, or prints what was measured."""
    options = make_parser(__doc__, __file__, quick="each import once", table="print the table").parse_args()
    if options.table:
        best = load(options)["seconds"]
    else:
        best = measure(1 if options.quick else REPEATS)
        save(options, seconds=best)
    for name, value in best.items():
        print(f"{name:26s} {value:5.2f} s  {value / best['torch']:4.2f} x")


if __name__ == "__main__":
    main()
