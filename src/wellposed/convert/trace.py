"""The graph of a network: by torch.fx where its code can be traced, by torch.export elsewhere."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from wellposed.convert.batch import first_of, for_one_sample
from wellposed.convert.dispatch import RULES, UnsupportedError, signals_in
from wellposed.convert.mutation import has_hazard
from wellposed.convert.signal import Network, Signal
from wellposed.errors import InputError

REGISTER = "register a rule with @to_implicit.register({name}); its arguments are the module and its signals"
_ASKING = (getattr, len, "size", "dim", "numel", torch.ops.aten.sym_size.int)  # about shapes, not about values
_FAILURES = (InputError, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


class _Tracer(fx.Tracer):
    """Stops at modules that have a rule, and at those that cannot be traced."""

    def __init__(self, opaque: frozenset[nn.Module] = frozenset()) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.opaque:
            return True
        leaf = RULES.of_module(m) is not None or super().is_leaf_module(m, module_qualified_name)
        return leaf and not _hooked(m)


def _hooked(module: nn.Module) -> bool:
    """Tells whether hooks may change what a module computes; then they are traced with it."""
    before = [hook for hook in module._forward_pre_hooks.values() if not _recomputes(hook)]
    return bool(before or module._forward_hooks)


def _recomputes(hook: Any) -> bool:
    """Tells whether a hook is one of torch's own that set a weight before every call."""
    return type(hook).__module__.startswith("torch.nn.utils")


class Converter(fx.Interpreter):
    """Runs the graph of a network on signals.

    Args:
        batch: for how many samples the sizes in the graph were recorded.
    """

    def __init__(
        self, module: nn.Module, graph: fx.Graph, network: Network, place: str = "", batch: int = 1
    ) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False  # our errors say where
        self.network, self.batch, self.root = network, batch, place

    def run_node(self, n: fx.Node) -> Any:
        stack = n.meta.get("nn_module_stack") or {}
        inner = next((path for path, _ in reversed(list(stack.values()))), "")
        target = n.target if n.op == "call_module" else ""
        path = str(target or inner).removeprefix("L['self'].")
        path = "" if path.startswith("_empty_nn_module_stack") else path
        self.network.place = ".".join(part for part in (self.root, path) if part)
        found = super().run_node(n)
        readers = [user for user in n.users if user.target not in _ASKING]
        # what several layers read is computed once
        return found.kept() if isinstance(found, Signal) and found.costly and len(readers) > 1 else found

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self.batch > 1 and n.op == "call_function":
            args = for_one_sample(n, tuple(args), self.batch)
        return tuple(args), kwargs

    def call_module(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if str(target).endswith("_guards_fn"):
            return None  # of torch.export, on the shape of a batch
        return convert_module(self.fetch_attr(target), self.network.place, args, kwargs)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if next(iter(signals_in((args, kwargs))), None) is None:
            return super().call_function(target, args, kwargs)
        return self._apply(target, getattr(target, "__name__", str(target)), args, kwargs)

    def call_method(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if next(iter(signals_in((args, kwargs))), None) is None:
            return super().call_method(target, args, kwargs)
        return self._apply(target, f"the method {target}", args, kwargs)

    def _apply(self, target: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        rule = RULES.of_function(target)
        if rule is None:
            raise UnsupportedError(
                f"{name}{_where(self.network.place)} has no implicit form yet; register a rule with "
                f"@to_implicit.register_function({_key(target)}), or a rule for the module "
                "that calls it",
                placed=True,
            )
        if target in (getattr, len, operator.getitem) and not isinstance(args[0], Signal):
            return target(*args, **kwargs)  # an entry of what a layer returned
        if "input" in kwargs:
            args = (kwargs["input"], *args)
            kwargs = {key: value for key, value in kwargs.items() if key != "input"}
        return _guarded(lambda: rule(*args, **kwargs), name, self.network.place)


def _key(target: Any) -> str:
    """Writes what a rule of a function is registered by."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.overloadpacket}"
    if isinstance(target, str):
        return repr(target)
    return f"{target.__module__}.{target.__name__}".removeprefix("_").replace("None.", "")


def _guarded(work: Callable[[], Any], name: str, place: str) -> Any:
    """Runs a rule and says where it was if it fails."""
    try:
        return work()
    except UnsupportedError as error:
        if error.placed:
            raise
        raise UnsupportedError(f"{name}{_where(place)}: {error}", placed=True) from error
    except _FAILURES as error:
        raise UnsupportedError(f"{name}{_where(place)} cannot be converted: {error}", placed=True) from error


def _where(place: str) -> str:
    return f" at {place!r}" if place else ""


def convert_module(module: nn.Module, place: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Converts one module: by its rule, or else by what it calls."""
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    given = next(iter(signals_in((args, kwargs))), None)
    if given is None:
        return module(*args, **kwargs)
    network, rule, name = given.network, RULES.of_module(module), type(module).__name__
    network.place = place
    if rule is not None and not _hooked(module):
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        return _guarded(lambda: rule(module, *args, **kwargs), name, place)
    if isinstance(module, torch.jit.ScriptModule) or (rule is None and _is_torch_layer(module)):
        raise UnsupportedError(
            f"{name}{_where(place)} has no implicit form yet; {REGISTER.format(name=name)}", placed=True
        )
    root = nn.Sequential(module) if _hooked(module) else module
    with _unchanged(root):
        graph = _graph(root)
        if isinstance(graph, fx.Graph) and not has_hazard(graph, root):
            return Converter(root, graph, network, place).run(*args, **kwargs)
    reason = graph if isinstance(graph, Exception) else "values are read after they were changed in place"
    if len(args) != 1 or kwargs or not isinstance(args[0], Signal):
        raise UnsupportedError(
            f"{name}{_where(place)} cannot be traced: {reason}; {REGISTER.format(name=name)}", placed=True
        )
    return convert_program(_export(module, args[0], place, reason), args[0], place)


def _is_torch_layer(module: nn.Module) -> bool:
    containers = isinstance(module, nn.Sequential)
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not containers


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Takes away what tracing leaves on a module: constants that its code makes."""
    before = set(vars(module))
    try:
        yield
    finally:
        for name in set(vars(module)) - before:
            delattr(module, name)


def _graph(module: nn.Module) -> fx.Graph | Exception:
    """Traces a module, its parts that cannot be traced left whole; returns the error if its own code cannot."""
    try:
        return _Tracer().trace(module)
    except Exception as error:
        opaque = frozenset(part for part in module.children() if _opaque(part))
        if not opaque:
            return error
    try:
        return _Tracer(opaque).trace(module)
    except Exception as error:
        return error


def _opaque(module: nn.Module) -> bool:
    if RULES.of_module(module) is not None or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    try:
        with _unchanged(module):
            _Tracer().trace(module)
    except Exception:
        return True
    return False


def _export(module: nn.Module, signal: Signal, place: str, reason: Exception | str) -> ExportedProgram:
    example = torch.zeros(signal.shape, dtype=signal.dtype, device=signal.device)
    try:
        return torch.export.export(module, (example,), strict=False)
    except Exception as error:
        name = type(module).__name__
        raise UnsupportedError(
            f"{name}{_where(place)} can be traced neither by torch.fx ({_short(reason)}) nor by torch.export "
            f"({_short(error)}): its control flow may depend on data; {REGISTER.format(name=name)}",
            placed=True,
        ) from error


def _short(reason: Exception | str) -> str:
    return str(reason).strip().partition("\n")[0]


def convert_program(program: ExportedProgram, signal: Signal, place: str = "") -> Any:
    """Converts an exported program of one input."""
    examples = program.example_inputs
    inputs = [value for value in (examples[0] if examples else ()) if isinstance(value, Tensor)]
    if inputs and (len(inputs) != 1 or tuple(inputs[0].shape[1:]) != signal.shape[1:]):
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        raise InputError(f"the program takes inputs {shapes}; expected one of (batch, *{signal.shape[1:]})")
    graph = program.module()
    if has_hazard(graph.graph, graph):
        graph = program.run_decompositions({}).module()
    batch = _recorded_batch(graph.graph)
    return first_of(Converter(graph, graph.graph, signal.network, place, batch).run(signal), batch)


def _recorded_batch(graph: fx.Graph) -> int:
    """Reads for how many samples a program was exported; 1 if for any number."""
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), Tensor):
            return value.shape[0] if isinstance(value.shape[0], int) else 1
    return 1
