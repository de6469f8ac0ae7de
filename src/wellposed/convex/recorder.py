"""Records the activations of a network that has no implicit form, while it runs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from wellposed.activations import Activation, elu, get_activation, hardtanh, leaky_relu, softplus, softshrink
from wellposed.activations.blockwise import softmax
from wellposed.errors import InputError

Named = Callable[..., Activation]

_PLAIN = (
    *("relu", "relu6", "selu", "silu", "softsign", "tanh", "sigmoid", "hardsigmoid", "tanhshrink", "mish"),
    *("hardswish", "logsigmoid"),
)


def _plain(name: str) -> Named:
    return lambda z, *args, **kwargs: get_activation(name)


def _clamp(z: Tensor, min: Any = None, max: Any = None) -> Activation:
    if isinstance(min, int | float) and isinstance(max, int | float):
        return hardtanh(float(min), float(max))
    if min == 0 and max is None:
        return get_activation("relu")
    raise InputError(
        f"clamp(min={min}, max={max}) is not an activation that can be recorded; use relu or hardtanh"
    )


def _softmax(z: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Activation:
    if dim not in (-1, z.dim() - 1):
        raise InputError(f"softmax along dimension {dim} of {tuple(z.shape)} is not recorded; use the last one")
    return softmax(z.shape[-1])


def _prelu(z: Tensor, weight: Tensor) -> Activation:
    slopes = weight.detach().flatten()
    if bool((slopes != slopes[0]).any()):
        raise InputError("PReLU with several slopes has no activation map by name; give it one slope")
    return leaky_relu(float(slopes[0]))


_NAMED: dict[str, Named] = {name: _plain(name) for name in _PLAIN} | {
    "leaky_relu": lambda z, negative_slope=0.01, inplace=False: leaky_relu(float(negative_slope)),
    "elu": lambda z, alpha=1.0, *rest, **other: elu(float(alpha)),
    "gelu": lambda z, approximate="none": get_activation("gelu_tanh" if approximate == "tanh" else "gelu"),
    "hardtanh": lambda z, min_val=-1.0, max_val=1.0, inplace=False: hardtanh(float(min_val), float(max_val)),
    "softplus": lambda z, beta=1.0, threshold=20.0: softplus(float(beta)),
    "softshrink": lambda z, lambd=0.5: softshrink(float(lambd)),
    "prelu": _prelu,
    "softmax": _softmax,
    "clamp": _clamp,
    "clamp_min": lambda z, min: _clamp(z, min),
    "hardshrink": _plain("hardshrink"),
    "threshold": _plain("threshold"),
    "rrelu": _plain("rrelu"),
}


def _functions() -> dict[Any, Named]:
    """Lists the torch functions and tensor methods of every activation, in place or not."""
    found: dict[Any, Named] = {}
    for name, rule in _NAMED.items():
        for place in (torch, F, Tensor, torch.nn.functional):
            for spelled in (name, f"{name}_"):
                if (function := getattr(place, spelled, None)) is not None:
                    found[function] = rule
    return found


class Recorder(TorchFunctionMode):
    """Notes argument, result and map of every activation that is called, by whatever name.

    Arguments are copied before the call, since an activation in place would overwrite them; a module that is used
    twice gives two entries. Functions that are not activations are taken to be linear.

    Example:
        >>> with Recorder() as recorder:
        ...     _ = torch.relu(torch.tensor([[-1.0, 2.0]]))
        >>> [(z.tolist(), x.tolist(), phi.name) for z, x, phi in recorder.entries]
        [([[-1.0, 2.0]], [[0.0, 2.0]], 'relu')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Tensor, Tensor, Activation]] = []
        self.known = _functions()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self.known.get(func)
        if rule is None:
            return func(*args, **kwargs)
        z = (args[0] if args else kwargs["input"]).detach().clone()
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        try:
            activation = rule(z, *args[1:], **rest)
        except TypeError as error:
            name = resolve_name(func) or str(func)
            raise InputError(f"{name} is called with arguments that cannot be recorded: {error}") from error
        result = func(*args, **kwargs)
        self.entries.append((z, result.detach().clone(), activation))
        return result
