"""Prepares docstrings, which are written for readers of the source, for Sphinx."""

from typing import Any


def escape_bars(lines: list[str]) -> list[str]:
    """Escapes the bars of norms and absolute values, which would else be substitutions; code is left alone.

    Example:
        >>> escape_bars(["Minimises |w| by ``a | b``.", ">>> print('|')", "|", "", "|x|"])
        ['Minimises \\\\|w\\\\| by ``a | b``.', ">>> print('|')", '|', '', '\\\\|x\\\\|']
    """
    written, in_example = [], False
    for line in lines:
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        written.append(line if in_example else "``".join(parts))
    return written


def prepare(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Drops what a constant only has from its type, and escapes the rest."""
    if what == "data" and getattr(obj, "__doc__", None) == type(obj).__doc__:
        lines.clear()
    lines[:] = escape_bars(lines)


def setup(app: Any) -> dict[str, Any]:
    """Connects it, after the docstrings have been read by napoleon."""
    app.connect("autodoc-process-docstring", prepare, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
