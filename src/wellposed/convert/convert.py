"""to_implicit: a network as an implicit model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from wellposed.convert.dispatch import RULES, FunctionRule, ModuleRule, UnsupportedError
from wellposed.convert.signal import Network, Signal
from wellposed.convert.trace import convert_module, convert_program
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm


class Conversion:
    """Converts networks to implicit models; see `to_implicit`."""

    def __call__(self, module: nn.Module | ExportedProgram, input_shape: Sequence[int] | int) -> ImplicitForm:
        """Writes a network as ``x = phi(Ax + Bu + b)``, ``y = Cx + Du + c`` (003, section 2.5).

        The network is taken in evaluation mode: batch normalisation is folded into the weights, dropout is left
        out. Weights are copied. Nothing is densified; states come last layer first (003 eq. 2.10), so A is
        strictly block upper-triangular unless the network has a loop of its own, and `form(u)` computes it in
        one pass. A sum that several layers read becomes a block with phi = identity, so that it is computed
        once. The output is flattened, ``(B, q)``; of several outputs it is the first.

        Args:
            module: any module that torch.fx or torch.export can trace, or an exported program.
            input_shape: the shape of one sample, without the batch.

        Raises:
            UnsupportedError: names the module or function without a rule, its place in the network and how to
                register a rule.

        Example:
            >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> form = to_implicit(network, (4,))
            >>> form
            ImplicitForm(8 states, 4 inputs, 2 outputs, relu)
            >>> u = torch.randn(3, 4)
            >>> torch.allclose(form(u), network(u), atol=1e-6)
            True
        """
        shape = _shape(input_shape)
        with torch.no_grad():
            if isinstance(module, ExportedProgram):
                network = Network(shape, *_home(list(module.state_dict.values())))
                output = convert_program(module, network.input)
            elif isinstance(module, nn.Module):
                network = Network(shape, *_home([*module.parameters(), *module.buffers()]))
                with _evaluating(module):
                    output = convert_module(module, "", (network.input,), {})
            else:
                raise InputError(
                    f"to_implicit takes a module or exported program; received {type(module).__name__}"
                )
            return network.form(_single(output, network))

    def register(self, *kinds: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
        """Registers the rule of module types: ``rule(module, *signals) -> signal``.

        Example:
            >>> class Double(nn.Module):
            ...     def forward(self, x):
            ...         return 2 * x
            >>> @to_implicit.register(Double)
            ... def double(module, signal):
            ...     return signal.scaled(2.0)
        """
        return RULES.module(*kinds)

    def register_function(self, *functions: Any) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of functions, ATen operators or tensor methods (by name)."""
        return RULES.function(*functions)


to_implicit = Conversion()


def _shape(input_shape: Sequence[int] | int) -> tuple[int, ...]:
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"input_shape holds positive sizes of one sample, without the batch; received {shape}")
    return shape


def _home(values: list[torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    floating = [value for value in values if value.is_floating_point()]
    kinds = {value.dtype for value in floating}
    if len(kinds) > 1:
        raise InputError(f"the network mixes {', '.join(sorted(map(str, kinds)))}; convert it to one of them")
    if not floating:
        return torch.get_default_dtype(), torch.device("cpu")
    return floating[0].dtype, floating[0].device


def _single(output: Any, network: Network) -> Signal:
    """Takes the first of several outputs, as recurrent layers have them; a constant one is an output too."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Signal):
        return first
    if isinstance(first, Tensor):
        return network.constant(first)
    raise UnsupportedError(f"a network must return a tensor, or several of them; got {type(output).__name__}")


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a network in evaluation mode for a while."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
