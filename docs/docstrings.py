"""Prepares docstrings and signatures, which are written for readers of the source, for Sphinx."""

import re
from typing import Any

from docutils import nodes

HIDDEN = re.compile(r"<factory>|<function (\w+\.)*<lambda>>")
MODULES = re.compile(r"~(\w+\.)+")
NAMED = re.compile(r"<(?:function|class) '?(?:\w+\.)*(\w+)'?>")


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


def plain_defaults(signature: str) -> str:
    """Writes a default that is a function or a class by its name, and one without a name as dots.

    Example:
        >>> plain_defaults("(loss=<function mse_loss>, kind=<class 'runs.Run'>, tell=<function <lambda>>)")
        '(loss=mse_loss, kind=Run, tell=...)'
    """
    return NAMED.sub(r"\1", HIDDEN.sub("...", signature))


def shorten_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Makes the defaults of a signature readable."""
    return signature and plain_defaults(signature), result


def shorten_types(app: Any, doctree: nodes.document) -> None:
    """Drops the modules of types in fields of parameters that Sphinx has marked with a tilde, but left there."""
    for field in doctree.findall(nodes.field_body):
        for text in list(field.findall(nodes.Text)):
            if "~" in text and not isinstance(text.parent, nodes.literal | nodes.literal_block):
                text.parent.replace(text, nodes.Text(MODULES.sub("", text)))


def prepare(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Drops what a constant only has from its type, and escapes the rest."""
    if what == "data" and getattr(obj, "__doc__", None) == type(obj).__doc__:
        lines.clear()
    lines[:] = escape_bars(lines)


def setup(app: Any) -> dict[str, Any]:
    """Connects all of it, after the docstrings have been read by napoleon."""
    app.connect("autodoc-process-docstring", prepare, priority=900)
    app.connect("autodoc-process-signature", shorten_signature, priority=900)
    app.connect("doctree-read", shorten_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
