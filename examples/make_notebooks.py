"""Writes the examples as notebooks, without outputs: every `# %%` begins a cell.

python examples/make_notebooks.py            # writes examples/notebooks/*.ipynb
python examples/make_notebooks.py --check    # says which of them are not what their script is
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", re.M)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """Returns the scripts that are written in cells."""
    return [path for path in sorted(HERE.glob("*.py")) if path.read_text().startswith("# %%")]


def cells(text: str) -> list[tuple[str, str]]:
    """Splits a script in cells, each with its kind.

    Example:
        >>> cells("# %% [markdown]\\n# Title\\n\\n# %%\\nx = 1\\n")
        [('markdown', 'Title'), ('code', 'x = 1')]
    """
    split = []
    marks = [*MARK.finditer(text)]
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(text)], strict=True):
        body = text[mark.end() : end].strip("\n")
        if mark["kind"]:
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        split.append(("markdown" if mark["kind"] else "code", body))
    return split


def notebook(text: str) -> str:
    """Writes a script as the JSON of a notebook."""
    written = []
    for index, (kind, body) in enumerate(cells(text)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        written.append({**cell, "source": body.splitlines(keepends=True)})
    whole = {"cells": written, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def notebook_path(script: Path) -> Path:
    """Returns the path of the notebook of a script."""
    return HERE / "notebooks" / script.with_suffix(".ipynb").name


def stale() -> list[str]:
    """Names the notebooks that are missing, out of date, or without a script."""
    wanted = {notebook_path(script): notebook(script.read_text()) for script in scripts()}
    others = set((HERE / "notebooks").glob("*.ipynb")) - wanted.keys()
    changed = {path for path, text in wanted.items() if not path.is_file() or path.read_text() != text}
    return sorted(path.name for path in changed | others)


def main() -> None:
    """Writes the notebooks, or says which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is not up to date")
    if parser.parse_args().check:
        if names := stale():
            raise SystemExit(f"not up to date: {', '.join(names)}; run python examples/make_notebooks.py")
        return
    (HERE / "notebooks").mkdir(exist_ok=True)
    for script in scripts():
        notebook_path(script).write_text(notebook(script.read_text()))
        print("wrote", notebook_path(script).relative_to(HERE))


if __name__ == "__main__":
    main()
