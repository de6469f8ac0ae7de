"""In-place operations in a graph: harmless unless something older that shares the memory is read afterwards."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow
}  # fmt: skip
_VIEWS = {
    "alias", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem", "movedim",
    "narrow", "permute", "ravel", "reshape", "select", "slice", "split", "squeeze", "swapaxes", "t", "to",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "Identity", "Dropout", "Flatten",
    "getattr", "dropout",
}  # fmt: skip


def has_hazard(graph: fx.Graph, root: nn.Module) -> bool:
    """Tells whether some value is read after it was changed in place, through itself or through a view.

    Example:
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         return y + torch.relu_(y)
        >>> has_hazard(fx.Tracer().trace(network := Network()), network)
        True
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    return any(
        order[user] > order[changing]
        for changing in order
        if _in_place(root, changing)
        for alias in _aliases(root, changing)
        if order[alias] < order[changing]
        for user in alias.users
    )


def _name(root: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return str(getattr(target, "__name__", target))


def _in_place(root: nn.Module, node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr") or not node.args:
        return False
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = _name(root, node)
    named = name.endswith("_") and not name.endswith("__")
    return named or node.target in _ASSIGNMENTS or bool(node.kwargs.get("inplace", False))


def _aliases(root: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    """Lists the nodes that may share memory with what a node changes."""
    start = node.args[0]
    while isinstance(start, fx.Node) and _passes(root, start):
        start = start.args[0]
    waiting = [start] if isinstance(start, fx.Node) else []
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [user for user in found.users if user.args and user.args[0] is found and _passes(root, user)]


def _passes(root: nn.Module, node: fx.Node) -> bool:
    """Tells whether a node may return the memory of its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return _in_place(root, node) or _name(root, node) in _VIEWS
