"""The componentwise activation maps, and all activation maps by name.

First come the families with parameters (`leaky_relu`, `elu`, `hardtanh`, `softplus`, `softshrink`), then the table
of named maps and the map of states in other units, phi_D(z) = D phi(D^-1 z) with D = 2^e
(`rescaled`). `get_activation` looks a name up, `register_activation` adds one.
"""

import ast
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations.activation import (
    NORMS,
    Activation,
    Traits,
    check_constants,
    product_ends,
    real,
    same_map,
    used,
)
from wellposed.activations.blockwise import group_sort, matrix_product, max_pool, multiply, normalise, softmax
from wellposed.errors import InputError
from wellposed.registry import Registry


def leaky_relu(slope: float = 0.01) -> Activation:
    """Builds z -> max(z, 0) + slope min(z, 0), the PReLU of a fixed slope.

    Example:
        >>> leaky_relu(0.5)(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  2.0000])
    """
    slope = real("slope of leaky_relu", slope)
    least, most = used(slope)
    bounds = (min(least, 1.0), max(most, 1.0))
    function, derivative = partial(F.leaky_relu, negative_slope=slope), partial(step, left=slope, right=1.0)
    image = (-math.inf if slope > 0 else 0.0, math.inf)
    name, traits = f"leaky_relu({slope!r})", Traits(kernel=("sloped", slope), kinks=(0.0,))
    return Activation(
        name, function, bounds, derivative, homogeneous=True, rounding=2.0, image=image, traits=traits
    )


def elu(alpha: float = 1.0) -> Activation:
    """Builds z -> z above zero and alpha (e^z - 1) below.

    Example:
        >>> elu(2.0).lipschitz()
        2.0
    """
    alpha = real("alpha of elu", alpha, 0.0)
    function, derivative = partial(F.elu, alpha=alpha), partial(elu_slope, alpha=alpha)
    most = used(alpha)[1]
    return Activation(
        f"elu({alpha!r})", function, (0.0, max(1.0, most)), derivative, image=(-most, math.inf), rounding=8.0
    )


def hardtanh(low: float = -1.0, high: float = 1.0) -> Activation:
    """Builds the projection on an interval.

    Example:
        >>> hardtanh(0.0, 3.0)(torch.tensor([-1.0, 2.0, 5.0]))
        tensor([0., 2., 3.])
    """
    low, high = real("low of hardtanh", low), real("high of hardtanh", high)
    if not low < high:
        raise InputError(f"hardtanh needs low < high; received {low} and {high}")
    function, derivative = partial(torch.clamp, min=low, max=high), partial(window, low=low, high=high)
    image = used(low)[0], used(high)[1]
    return Activation(
        f"hardtanh({low!r}, {high!r})",
        function,
        (0.0, 1.0),
        derivative,
        projection=True,
        rounding=0.0 if used(low) + used(high) == (low, low, high, high) else 1.0,
        image=image,
        traits=Traits(kinks=(low, high)),
    )


def softplus(beta: float = 1.0) -> Activation:
    """Builds z -> log(1 + e^(beta z)) / beta.

    Example:
        >>> softplus(2.0)(torch.zeros(1))
        tensor([0.3466])
    """
    beta = real("beta of softplus", beta, 0.0, above=True)
    function, derivative = partial(_softplus, beta=beta), partial(_softplus_slope, beta=beta)
    return Activation(f"softplus({beta!r})", function, (0.0, 1.0), derivative, image=(0.0, math.inf))


def softshrink(margin: float = 0.5) -> Activation:
    """Builds the soft threshold z -> sign(z) max(|z| - margin, 0).

    Example:
        >>> softshrink(1.0)(torch.tensor([0.5, -3.0]))
        tensor([ 0., -2.])
    """
    margin = real("margin of softshrink", margin, 0.0)
    function, derivative = partial(F.softshrink, lambd=margin), partial(_softshrink_slope, margin=margin)
    traits = Traits(kinks=(-margin, margin))
    return Activation(f"softshrink({margin!r})", function, (0.0, 1.0), derivative, rounding=2.0, traits=traits)


def step(z: Tensor, left: float, right: float) -> Tensor:
    """Returns `right` where z is positive and `left` elsewhere."""
    return torch.full_like(z, left).masked_fill(z > 0, right)


def window(z: Tensor, low: float, high: float, height: float = 1.0) -> Tensor:
    """Returns `height` strictly between two bounds and zero elsewhere."""
    return torch.zeros_like(z).masked_fill((z > low) & (z < high), height)


def elu_slope(z: Tensor, scale: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Returns the derivative of scale * (z if z > 0 else alpha (e^z - 1))."""
    return torch.where(z > 0, scale, scale * alpha * torch.exp(z.clamp(max=0)))


def _softplus(z: Tensor, beta: float) -> Tensor:
    # F.softplus jumps by 2e-9 at its threshold of 20, which float64 sees.
    return torch.logaddexp(beta * z, torch.zeros_like(z)) / beta


def _softplus_slope(z: Tensor, beta: float) -> Tensor:
    return torch.sigmoid(beta * z)


def _softshrink_slope(z: Tensor, margin: float) -> Tensor:
    return 1 - window(z, -margin, margin)


def _identity(z: Tensor) -> Tensor:
    return z


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _silu_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


def _softsign_slope(z: Tensor) -> Tensor:
    return (1 + z.abs()).reciprocal().square()


def _tanh_slope(z: Tensor) -> Tensor:
    # As 1 - tanh(z)^2 it would have no digit left where tanh(z) rounds to one.
    return (4 * torch.sigmoid(2 * z) * torch.sigmoid(-2 * z)).clamp_max(1)


def _sigmoid_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * torch.sigmoid(-z)


def _hardsigmoid(z: Tensor) -> Tensor:
    # F.hardsigmoid differentiates with a float32 sixth, also in float64.
    return (z / 6 + 0.5).clamp(0, 1)


def _mish_slope(z: Tensor) -> Tensor:
    gate = torch.tanh(F.softplus(z))
    return gate + z * (1 - gate.square()) * torch.sigmoid(z)


def _hardswish(z: Tensor) -> Tensor:
    return z * _hardsigmoid(z)


def _hardswish_slope(z: Tensor) -> Tensor:
    return _hardsigmoid(z) + z * window(z, -3.0, 3.0, 1 / 6)


def _logsigmoid_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(-z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _tanhshrink_slope(z: Tensor) -> Tensor:
    return torch.tanh(z).square()


_GELU_TANH = 1.1289930687  # largest slope
_SELU = (1.0507009873554805, 1.6732632423543772)  # scale and alpha
_SELU_LEAST = -1.7580995  # no value lies below it, also where float32 has rounded the product of the two
_GELU, _SILU = 1.1289041452, 1.0998393202  # largest slopes


_UNIT, _POSITIVE, _BALL = (0.0, 1.0), (0.0, math.inf), (-1.0, 1.0)
_SIXTH = math.nextafter(1 / 6, 1.0)
_CATALOGUE = [  # an entry is all that the library knows of a map
    Activation(
        "identity", _identity, (1.0, 1.0), torch.ones_like, homogeneous=True, projection=True, rounding=0.0,
        traits=Traits((nn.Identity,), kernel=("sloped", 1.0), kinks=()),
    ),
    Activation(
        "relu", torch.relu, _UNIT, partial(step, left=0.0, right=1.0), homogeneous=True, projection=True,
        rounding=0.0, image=_POSITIVE, traits=Traits((nn.ReLU,), ("relu",), kernel=("relu", 0.0), kinks=(0.0,)),
    ),
    Activation(
        "relu6", F.relu6, _UNIT, partial(window, low=0.0, high=6.0), projection=True, rounding=0.0,
        image=(0.0, 6.0), traits=Traits((nn.ReLU6,), ("relu6",), kinks=(0.0, 6.0)),
    ),
    Activation(
        "tanh", torch.tanh, _UNIT, _tanh_slope, image=_BALL,
        traits=Traits((nn.Tanh,), ("tanh",), kernel=("tanh", 0.0), stretch=1.0),
    ),
    Activation(
        "sigmoid", torch.sigmoid, (0.0, 0.25), _sigmoid_slope, image=_UNIT,
        traits=Traits((nn.Sigmoid,), ("sigmoid", "expit"), kernel=("sigmoid", 0.0), stretch=0.5),
    ),
    Activation(
        "hardsigmoid", _hardsigmoid, (0.0, _SIXTH), partial(window, low=-3.0, high=3.0, height=1 / 6),
        image=_UNIT, traits=Traits((nn.Hardsigmoid,), ("hardsigmoid",), kinks=(-3.0, 3.0)),
    ),
    Activation(
        "selu", F.selu, (0.0, 1.7580993408473773), partial(elu_slope, scale=_SELU[0], alpha=_SELU[1]),
        image=(_SELU_LEAST, math.inf), traits=Traits((nn.SELU,), ("selu",)),
    ),
    Activation("gelu", F.gelu, (1.0 - _GELU, _GELU), _gelu_slope, image=(-0.1699713, math.inf)),
    Activation(
        "gelu_tanh", _gelu_tanh, (1.0 - _GELU_TANH, _GELU_TANH), image=(-0.1700408, math.inf)
    ),
    Activation(
        "silu", F.silu, (1.0 - _SILU, _SILU), _silu_slope, image=(-0.2784646, math.inf),
        traits=Traits((nn.SiLU,), ("silu",)),
    ),
    Activation(
        "mish", F.mish, (-0.1125262, 1.0884982), _mish_slope, image=(-0.3088435, math.inf),
        traits=Traits((nn.Mish,), ("mish",)),
    ),
    Activation(
        "hardswish", _hardswish, (-0.5, 1.5), _hardswish_slope, image=(-0.3750001, math.inf),
        traits=Traits((nn.Hardswish,), ("hardswish",)),
    ),
    Activation(
        "logsigmoid", F.logsigmoid, _UNIT, _logsigmoid_slope, image=(-math.inf, 0.0),
        traits=Traits((nn.LogSigmoid,), ("logsigmoid", "log_sigmoid")),
    ),
    Activation(
        "softsign", F.softsign, _UNIT, _softsign_slope, image=_BALL,
        traits=Traits((nn.Softsign,), ("softsign",)),
    ),
    Activation(
        "tanhshrink", F.tanhshrink, _UNIT, _tanhshrink_slope, traits=Traits((nn.Tanhshrink,), ("tanhshrink",))
    ),
    Activation("sin", torch.sin, (-1.0, 1.0), torch.cos, image=_BALL, traits=Traits(functions=("sin",))),
    Activation(
        "softmax", partial(torch.softmax, dim=-1), block=0, constants=dict.fromkeys(NORMS, 0.5), image=_UNIT,
        traits=Traits(functions=("softmax",)),
    ),
    *(replace(make(), name=make.__name__) for make in (elu, hardtanh, softplus, softshrink, leaky_relu)),
]  # fmt: skip


def in_other_units(activation: Activation, name: str, factor: Tensor | float, *, exact: bool) -> Activation:
    """Builds ``z -> factor phi(z / factor)``, which has the slopes and constants of phi.

    Args:
        factor: positive, one for all states or one for each.
        exact: whether factors are powers of two.

    Example:
        >>> in_other_units(get_activation("tanh"), "wide", torch.tensor([0.5, 8.0]), exact=True).image
        (-8.0, 8.0)
    """
    bind = partial(_in_other_units, factor=factor)
    extremes = (float(factor.min()), float(factor.max())) if isinstance(factor, Tensor) else (factor,)
    low, high = zip(*(product_ends(*activation.image, value) for value in extremes), strict=True)
    return replace(
        activation,
        name=name,
        function=partial(bind, phi=activation.function),
        derivative=activation.derivative and partial(bind, phi=activation.derivative, outer=False),
        rounding=activation.rounding + (0.0 if exact else 4.0),
        image=(min(low), max(high)),
    )


def _in_other_units(
    z: Tensor, phi: Callable[[Tensor], Tensor], factor: Tensor | float, outer: bool = True
) -> Tensor:
    factor = factor.to(z) if isinstance(factor, Tensor) else factor
    value = phi(z / factor)
    return value * factor if outer else value


@dataclass(frozen=True)
class Family:
    """Activations with parameters: how one is built, and what torch calls them.

    Args:
        settings: of the layer and the function, in their order and with their defaults.
        of_torch: builds one from these settings; None if `build` takes them.
    """

    build: Callable[..., Activation]
    layers: tuple[type[nn.Module], ...] = ()
    functions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_torch: Callable[..., Activation] | None = None

    def of_layer(self, layer: Any) -> Activation:
        """Returns what a module computes."""
        return (self.of_torch or self.build)(*(getattr(layer, name) for name in self.settings))

    def of_call(self, *args: Any, **options: Any) -> Activation:
        """Returns what the function computes when it is called with z and these arguments."""
        given = dict(zip((*self.settings, "inplace"), args, strict=False)) | options
        if len(args) > len(self.settings) + 1 or not given.keys() <= {*self.settings, "inplace"}:
            raise TypeError(f"it takes {', '.join((*self.settings, 'inplace'))}; received {args} and {options}")
        return (self.of_torch or self.build)(*(given.get(name, self.settings[name]) for name in self.settings))


def _refused(name: str, reason: str, layers: tuple[type[nn.Module], ...], functions: tuple[str, ...]) -> Family:
    def refuse(*settings: Any) -> Activation:
        raise InputError(f"activation {name!r} is refused: {reason}")

    return Family(refuse, layers, functions)


_JUMPS = "so no Lipschitz constant exists; use"
REFUSED = {
    name: _refused(name, reason, layers, functions)
    for name, reason, layers, functions in (
        ("hardshrink", f"it jumps at +-0.5, {_JUMPS} 'softshrink'", (nn.Hardshrink,), ("hardshrink",)),
        ("threshold", f"it jumps, {_JUMPS} 'relu'", (nn.Threshold,), ("threshold",)),
        ("sign", f"it jumps at 0, {_JUMPS} 'hardtanh' or 'tanh'", (), ("sign", "sgn", "heaviside")),
        (
            "rrelu",
            "its slope is random, so f is not a function; use leaky_relu(slope)",
            (nn.RReLU,),
            ("rrelu",),
        ),
    )
}
BUILT_IN = {activation.name: activation for activation in _CATALOGUE}
ACTIVATIONS: Registry[Activation] = Registry.of("activation", Activation, BUILT_IN)


def activation_names() -> tuple[str, ...]:
    """Lists the registered names.

    Example:
        >>> "relu" in activation_names()
        True
    """
    return tuple(sorted(ACTIVATIONS))


def _known() -> Iterator[Family]:
    """Lists what torch has names for, the library's own activations first: registering changes none of them."""
    for phi in BUILT_IN.values():
        yield Family(partial(BUILT_IN.__getitem__, phi.name), phi.traits.layers, phi.traits.functions)
    yield from FAMILIES.values()
    yield from REFUSED.values()
    for factory in ACTIVATIONS.factories.values():
        yield Family(factory, factory().traits.layers, factory().traits.functions)


def of_layer(layer: type[nn.Module]) -> Family | None:
    """Returns the activations that a module type computes; None if it is no activation.

    Example:
        >>> of_layer(nn.LeakyReLU).of_layer(nn.LeakyReLU(0.5)).name, of_layer(nn.Linear)
        ('leaky_relu(0.5)', None)
    """
    return next((family for family in _known() if layer in family.layers), None)


def of_function(function: Any) -> Family | None:
    """Returns the activations that a function, method or operator of torch computes; None if it is none.

    Example:
        >>> of_function(F.leaky_relu).of_call(0.5).name, of_function(torch.exp)
        ('leaky_relu(0.5)', None)
    """
    for family in _known():
        if any(function in spellings(name) for name in family.functions):
            return family
    return None


@cache
def spellings(name: str) -> frozenset[Any]:
    """Lists the functions, the ATen operator and the method of a name, in-place variants too.

    Example:
        >>> torch.relu in spellings("relu") and "relu_" in spellings("relu")
        True
    """
    modules = torch, F, torch.special, Tensor, torch.ops.aten
    variants = name, f"{name}_"
    return frozenset(variants) | {getattr(m, v) for m in modules for v in variants if hasattr(m, v)}


def get_activation(activation: Any) -> Activation:
    """Returns the activation of that name; an `Activation` passes through.

    A name may carry parameters: ``"leaky_relu(0.2)"``, ``"max_pool(4)"``, ``"elu(0.5)"``. Layers and functions of
    torch stand for their names: ``nn.LeakyReLU(0.2)``, ``torch.tanh``.

    Example:
        >>> get_activation("selu").slope
        (0.0, 1.7580993408473773)
        >>> get_activation("hardtanh(0.0, 2.0)").image
        (0.0, 2.0)
        >>> get_activation(nn.LeakyReLU(0.5)).name
        'leaky_relu(0.5)'
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str):
        return _of_torch(activation)
    if activation in REFUSED:
        return REFUSED[activation].build()
    built = None if activation in ACTIVATIONS else _built(activation)
    return ACTIVATIONS[activation] if built is None else built


def _of_torch(value: Any) -> Activation:
    """Returns the activation that a layer or a function of torch computes."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, nn.Module) and (family := of_layer(kind)) is not None:
        return family.of_call() if value is kind else family.of_layer(value)
    if callable(value) and isinstance(value, Hashable) and (family := of_function(value)) is not None:
        return family.of_call()
    received = getattr(value, "__name__", repr(value))
    raise InputError(
        "an activation is a name, a layer such as nn.ReLU(), a function of torch such as torch.relu, or an "
        f"Activation that states the slopes of a function of yours; received {received}"
    )


def register_activation(activation: Activation, *, check: bool = True, replace: bool = False) -> Activation:
    """Makes an activation available by name, after a sampled check of its constants.

    Args:
        activation: its name must not read like one with parameters of the library, such as ``"tanh(2)"``.
        check: whether the constants are checked.
        replace: allows the name of an activation of the library, such as ``"tanh"``. What is known of that one is
            not said of yours; files with that name are read with yours.

    Example:
        >>> register_activation(leaky_relu(0.2)).name
        'leaky_relu(0.2)'
    """
    if activation.name in REFUSED:
        REFUSED[activation.name].build()
    _check_name(activation, replace)
    if check:
        check_constants(activation)
    ACTIVATIONS.register(activation.name, lambda: activation)
    return activation


def rescaled(activation: str | Activation, exponent: float) -> Activation:
    """Builds phi_D(z) = 2^e phi(2^-e z), the map of states in other units; phi itself if it is homogeneous.

    It has the slopes and constants of phi, and its values are bit-identical to scaled values of phi.

    Example:
        >>> rescaled("tanh", 3).image
        (-8.0, 8.0)
    """
    activation = get_activation(activation)
    exponent = real("exponent of rescaled", exponent)
    if activation.homogeneous or exponent == 0:
        return activation
    if abs(exponent) > 1000:
        raise InputError(
            f"exponent of rescaled must lie within +-1000, the range of float64; received {exponent:g}"
        )
    name = f"rescaled({activation.name!r}, {exponent!r})"
    return in_other_units(activation, name, 2.0**exponent, exact=exponent.is_integer())


def _gelu(approximate: str = "none") -> Activation:
    if approximate not in ("none", "tanh"):
        raise InputError(f"gelu takes approximate='none' or 'tanh'; received {approximate!r}")
    return BUILT_IN["gelu" if approximate == "none" else "gelu_tanh"]


def _torch_softplus(beta: float, threshold: float) -> Activation:
    if threshold < 20:
        raise InputError(f"softplus with threshold={threshold} jumps where it becomes linear; use 20")
    return softplus(beta)


FAMILIES: dict[str, Family] = {
    "leaky_relu": Family(leaky_relu, (nn.LeakyReLU,), ("leaky_relu",), {"negative_slope": 0.01}),
    "elu": Family(elu, (nn.ELU,), ("elu",), {"alpha": 1.0}),
    "gelu": Family(_gelu, (nn.GELU,), ("gelu",), {"approximate": "none"}),
    "hardtanh": Family(hardtanh, (nn.Hardtanh,), ("hardtanh",), {"min_val": -1.0, "max_val": 1.0}),
    "softplus": Family(softplus, (nn.Softplus,), ("softplus",), {"beta": 1.0, "threshold": 20.0}, _torch_softplus),
    "softshrink": Family(softshrink, (nn.Softshrink,), ("softshrink",), {"lambd": 0.5}),
    "group_sort": Family(group_sort),
    "matrix_product": Family(matrix_product),
    "max_pool": Family(max_pool),
    "multiply": Family(multiply),
    "normalise": Family(normalise),
    "rescaled": Family(rescaled),
    "softmax": Family(softmax),
}


def _check_name(activation: Activation, replace: bool) -> None:
    """Refuses a name that would mean another activation."""
    name = activation.name
    if name in BUILT_IN:
        if not replace and not same_map(activation, BUILT_IN[name]):
            raise InputError(
                f"{name!r} is an activation of the library, and yours is another one; choose another name, or "
                "pass replace=True"
            )
        return
    family = name.partition("(")[0].strip()
    if "(" not in name or family not in {*BUILT_IN, *FAMILIES}:
        return
    try:
        parametrised = _built(name)
    except InputError:
        parametrised = None
    if parametrised is None or not same_map(activation, parametrised):
        raise InputError(
            f"the name {name!r} reads like {family!r} of the library with parameters, and yours is another "
            "activation; choose another name"
        )


def _built(name: str) -> Activation | None:
    """Builds ``family(parameters)``; None if the name is not of that form."""
    family, bracket, rest = name.partition("(")
    if not bracket or family not in FAMILIES or not rest.endswith(")"):
        return None
    try:
        return FAMILIES[family].build(*ast.literal_eval(f"({rest[:-1]},)" if rest != ")" else "()"))
    except (SyntaxError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise InputError(f"activation {name!r} has parameters that {family} does not take: {error}") from error
