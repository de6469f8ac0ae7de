"""graph: the node diagram of a form."""

import os
from typing import Any

from wellposed.forms.form import ImplicitForm
from wellposed.forms.links import COLOURS, MEANING, Wiring
from wellposed.forms.pictures.block_diagram import block_diagram
from wellposed.forms.pictures.diagram import interactive, still
from wellposed.forms.pictures.page import is_page, write_page
from wellposed.forms.pictures.state_diagram import state_diagram

STATES = 30  # states, inputs and outputs of one block up to which each is a node
PIXELS = 9000  # of a picture's side at most


def graph(form: ImplicitForm, path: str | os.PathLike[str] | None = None, *, title: str | None = None) -> Any:
    """Draws the blocks of a form as nodes and its operators as arrows (003 Figure 5.14).

    Layers run from the input at the top to the output, every block below what it reads, deep networks in several
    columns; arrows that feed back are red and lead up again. The single states of a form of one small block are
    nodes of their own.

    Args:
        form: any form.
        path: a file ending with .png, .svg or .pdf, or with .html for a page to zoom and hover; None only returns.
        title: the heading.

    Returns:
        The matplotlib figure, or the plotly figure of a page.

    Example:
        >>> import torch
        >>> form = ImplicitForm(torch.ones(3, 3).triu(1), torch.eye(3), torch.ones(1, 3))
        >>> len(graph(form).axes[0].texts)  # three states, three inputs, one output
        7
    """
    page, wiring = is_page(path), Wiring(form)
    n, p, q = form.sizes
    heading = title or f"{n:,} states, {p:,} inputs, {q:,} outputs"
    small = len(form.partition) == 1 and max(n, p, q) <= STATES
    diagram = state_diagram(wiring, heading) if small else block_diagram(wiring, heading)
    if page and path is not None:
        figure = interactive(diagram)
        about = "Hover nodes and arrows for details, drag to move, scroll to zoom, double-click to go back."
        keys = {MEANING[role]: COLOURS[role] for role in diagram.roles}
        write_page(figure, path, heading, about, keys, diagram.tall)
        return figure
    figure = still(diagram)
    if path is not None:
        figure.savefig(path, dpi=min(200, PIXELS / max(figure.get_size_inches())))
    return figure
