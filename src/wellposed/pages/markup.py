"""HTML that is escaped unless it says that it is HTML."""

import re
from collections.abc import Iterable
from html import escape

VOID = ("br", "img", "input", "meta")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str] | None


def element(tag: str, *children: Child, **attributes: str | int | bool | None) -> Html:
    """Writes an element; plain text is escaped, `Html` is kept.

    Args:
        tag: its name.
        children: texts, elements or lists of them; None is nothing.
        attributes: underscores become hyphens, one at the end is dropped (`class_`); None and False are left out.

    Example:
        >>> element("p", "a < b, ", element("b", "c"), class_="quiet", hidden=True)
        '<p class="quiet" hidden>a &lt; b, <b>c</b></p>'
    """
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Html(opening if tag in VOID else f"{opening}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Puts texts and elements after one another.

    Example:
        >>> join("1 < 2", element("br"), ["a", "b"])
        '1 &lt; 2<br>ab'
    """
    parts = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else escape(child))
        elif child is not None:
            parts.append(join(*child))
    return Html("".join(parts))


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def prose(text: str) -> Html:
    """Writes text with its powers raised.

    Example:
        >>> prose("x < R^100")
        'x &lt; R<sup>100</sup>'
    """
    return Html(re.sub(r"\^(\d+)", r"<sup>\1</sup>", escape(text)))


def plural(count: int, word: str) -> str:
    """Writes a count with its word.

    Example:
        >>> plural(1, "seed"), plural(2400, "run")
        ('1 seed', '2,400 runs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"
