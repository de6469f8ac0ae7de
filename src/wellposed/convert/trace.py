"""The graph of a network: by torch.fx where its code can be traced, by torch.export elsewhere."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from wellposed.convert.dispatch import RULES, UnsupportedError, signals_in
from wellposed.convert.signal import Network, Signal
from wellposed.errors import InputError

REGISTER = "register a rule with @to_implicit.register({name}); its arguments are the module and its signals"


class _Tracer(fx.Tracer):
    """Stops at modules that have a rule."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return RULES.of_module(m) is not None or super().is_leaf_module(m, module_qualified_name)


class Converter(fx.Interpreter):
    """Runs the graph of a network on signals."""

    def __init__(self, graph: fx.GraphModule, network: Network, batch: int = 1) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.network, self.batch = network, batch

    def run_node(self, n: fx.Node) -> Any:
        stack = n.meta.get("nn_module_stack") or {}
        place = next((path for path, _ in reversed(list(stack.values()))), "")
        target = n.target if n.op == "call_module" else ""
        self.network.place = str(target or place).removeprefix("L['self'].")
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return convert_module(self.fetch_attr(target), str(target), args, kwargs)

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
            where = f" in {self.network.place!r}" if self.network.place else ""
            raise UnsupportedError(
                f"{name}{where} has no implicit form yet; register a rule with "
                f"@to_implicit.register_function({name}), or a rule for the module that calls it"
            )
        return rule(*args, **kwargs)


def convert_module(module: nn.Module, place: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Converts one module: by its rule, or else by what it calls."""
    network = next(iter(signals_in((args, kwargs)))).network
    rule, network.place = RULES.of_module(module), place
    if rule is not None:
        return rule(module, *args, **kwargs)
    name = type(module).__name__
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential):
        raise UnsupportedError(
            f"{name} at {place or 'the top'!r} has no implicit form yet; {REGISTER.format(name=name)}"
        )
    try:
        graph = fx.GraphModule(module, _Tracer().trace(module))
    except Exception as error:
        if len(args) != 1 or kwargs or not isinstance(args[0], Signal):
            raise UnsupportedError(
                f"{name} at {place or 'the top'!r} cannot be traced: {error}; {REGISTER.format(name=name)}"
            ) from error
        return convert_program(_export(module, args[0], place, error), args[0])
    return Converter(graph, network).run(*args, **kwargs)


def _export(module: nn.Module, signal: Signal, place: str, reason: Exception) -> ExportedProgram:
    example = torch.zeros(signal.shape, dtype=signal.dtype, device=signal.device)
    try:
        return torch.export.export(module, (example,), strict=False)
    except Exception as error:
        name = type(module).__name__
        raise UnsupportedError(
            f"{name} at {place or 'the top'!r} can be traced neither by torch.fx ({reason}) nor by torch.export "
            f"({error}): its control flow may depend on data; {REGISTER.format(name=name)}"
        ) from error


def convert_program(program: ExportedProgram, signal: Signal) -> Signal:
    """Converts an exported program of one input."""
    examples = program.example_inputs
    inputs = [value for value in (examples[0] if examples else ()) if isinstance(value, Tensor)]
    if inputs and (len(inputs) != 1 or tuple(inputs[0].shape[1:]) != signal.shape[1:]):
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        raise InputError(f"the program takes inputs {shapes}; expected one of (batch, *{signal.shape[1:]})")
    batch = inputs[0].shape[0] if inputs else 1
    graph = program.module()
    found = Converter(graph, signal.network, batch).run(signal)
    return found
