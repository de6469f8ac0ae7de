"""How long `import wellposed` takes beside `import torch`, in fresh processes.

Run: python -m benchmarks.import_time
"""

import subprocess
import sys
import time

STATEMENTS = {
    "torch": "import torch",
    "wellposed": "import torch, wellposed",
    "wellposed, a model": "import wellposed; wellposed.ImplicitModel",
    "wellposed, an estimator": "import wellposed; wellposed.ImplicitRegressor",
}
REPEATS = 5
PROGRAM = "import time; began = time.process_time(); {}; print(time.process_time() - began)"


def seconds(statement: str) -> float:
    """Returns the least CPU time of a statement over several processes."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(statement)]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(REPEATS))


def main() -> None:
    print(time.strftime("%Y-%m-%d"), sys.version.split()[0])
    base = None
    for name, statement in STATEMENTS.items():
        found = seconds(statement)
        base = base or found
        print(f"{name:26s} {found:5.2f} s  {found / base:4.2f} x")


if __name__ == "__main__":
    main()
