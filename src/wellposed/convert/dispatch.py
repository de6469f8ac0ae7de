"""Which rule converts which module or function; open to rules of one's own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wellposed.convert.signal import Signal
from wellposed.errors import InputError

ModuleRule = Callable[..., Any]  # (module, *signals) -> signal
FunctionRule = Callable[..., Any]  # the arguments of the function, with signals in place of tensors


class Rules:
    """The registered rules of modules, by type, and of functions, by themselves or by method name."""

    def __init__(self) -> None:
        self.modules: dict[type[nn.Module], ModuleRule] = {}
        self.functions: dict[Any, FunctionRule] = {}

    def module(self, *kinds: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
        """Registers the rule of some module types."""

        def register(rule: ModuleRule) -> ModuleRule:
            self.modules.update(dict.fromkeys(kinds, rule))
            return rule

        return register

    def function(self, *functions: Any) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of functions, operators of ATen, or methods of a tensor given by name.

        The rule of ``torch.nn.functional.relu`` or of the method ``"relu"`` holds for the ATen operator of the
        same name and arguments if that is given too, for instance ``torch.ops.aten.relu``.
        """

        def register(rule: FunctionRule) -> FunctionRule:
            for function in functions:
                self.functions[function] = rule
            return rule

        return register

    def named(self, *names: str) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of everything that torch calls by these names; see `everywhere`."""
        return self.function(*(function for name in names for function in everywhere(name)))

    def of_module(self, module: nn.Module) -> ModuleRule | None:
        """Finds the rule of a module by its type or the nearest base class that has one."""
        return next((self.modules[kind] for kind in type(module).__mro__ if kind in self.modules), None)

    def of_function(self, function: Any) -> FunctionRule | None:
        """Finds the rule of a function; an ATen overload has that of its operator."""
        if function in self.functions:
            return self.functions[function]
        if isinstance(function, torch._ops.OpOverload):
            return self.functions.get(function.overloadpacket)
        return None


RULES = Rules()


class UnsupportedError(InputError):
    """A module or function that no rule converts.

    Args:
        placed: whether the message says where in the network it is.
    """

    def __init__(self, message: str, placed: bool = False) -> None:
        super().__init__(message)
        self.placed = placed


def everywhere(name: str) -> list[Any]:
    """Lists the function, the functional, the ATen operator and the method of a name, in-place variants too.

    Example:
        >>> torch.relu in everywhere("relu") and "relu_" in everywhere("relu")
        True
    """
    found: list[Any] = []
    for variant in (name, f"{name}_"):
        homes = [home for home in (torch, F, torch.special, torch.ops.aten) if hasattr(home, variant)]
        found += [*(getattr(home, variant) for home in homes), variant]
    return found


def signals_in(value: Any) -> Iterable[Signal]:
    """Lists the signals among arguments."""
    if isinstance(value, Signal):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from signals_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from signals_in(part)
