"""The componentwise activation maps, and all activation maps by name.

First come the families with parameters (`leaky_relu`, `elu`, `hardtanh`, `softplus`, `softshrink`), then the table
of named maps (`catalogue`) and the map of states in other units, phi_D(z) = D phi(D^-1 z) with D = 2^e
(`rescaled_by`, `rescaled`). `get_activation` looks a name up, `register_activation` adds one.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations.activation import NORMS, Activation, Map, alike, product_ends, real, same_map, used
from wellposed.activations.blockwise import (
    group_sort,
    matrix_product,
    max_pool,
    multiply,
    normalise,
    pool,
    softmax,
    sort,
)
from wellposed.activations.check import check_constants
from wellposed.errors import InputError, unknown_name


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
    name = f"leaky_relu({slope!r})"
    return Activation(name, function, bounds, derivative, homogeneous=True, rounding=2.0, image=image)


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
    return Activation(f"softshrink({margin!r})", function, (0.0, 1.0), derivative, rounding=2.0)


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


def catalogue() -> list[Activation]:
    cone = {"homogeneous": True, "projection": True, "rounding": 0.0}
    box = {"projection": True, "rounding": 0.0, "image": (0.0, 6.0)}
    selu_image = {"image": (_SELU_LEAST, math.inf)}
    positive, unit_image, ball = {"image": (0.0, math.inf)}, {"image": (0.0, 1.0)}, {"image": (-1.0, 1.0)}
    unit, sixth = (0.0, 1.0), math.nextafter(1 / 6, 1.0)
    rows: list[tuple[str, Map, tuple[float, float], Map | None, dict[str, Any]]] = [
        ("identity", _identity, (1.0, 1.0), torch.ones_like, cone),
        ("relu", torch.relu, unit, partial(step, left=0.0, right=1.0), cone | positive),
        ("relu6", F.relu6, unit, partial(window, low=0.0, high=6.0), box),
        (
            "selu",
            F.selu,
            (0.0, 1.7580993408473773),
            partial(elu_slope, scale=_SELU[0], alpha=_SELU[1]),
            selu_image,
        ),
        ("gelu", F.gelu, (1.0 - _GELU, _GELU), _gelu_slope, {"image": (-0.1699713, math.inf)}),
        ("silu", F.silu, (1.0 - _SILU, _SILU), _silu_slope, {"image": (-0.2784646, math.inf)}),
        ("softsign", F.softsign, unit, _softsign_slope, ball),
        ("tanh", torch.tanh, unit, _tanh_slope, ball),
        ("sigmoid", torch.sigmoid, (0.0, 0.25), _sigmoid_slope, unit_image),
        ("hardsigmoid", _hardsigmoid, (0.0, sixth), partial(window, low=-3.0, high=3.0, height=1 / 6), unit_image),
        ("tanhshrink", F.tanhshrink, unit, _tanhshrink_slope, {}),
        ("sin", torch.sin, (-1.0, 1.0), torch.cos, ball),
        ("mish", F.mish, (-0.1125262, 1.0884982), _mish_slope, {"image": (-0.3088435, math.inf)}),
        ("hardswish", _hardswish, (-0.5, 1.5), _hardswish_slope, {"image": (-0.3750001, math.inf)}),
        ("logsigmoid", F.logsigmoid, unit, _logsigmoid_slope, {"image": (-math.inf, 0.0)}),
        ("gelu_tanh", _gelu_tanh, (1.0 - _GELU_TANH, _GELU_TANH), None, {"image": (-0.1700408, math.inf)}),
    ]
    halves = dict.fromkeys(NORMS, 0.5)
    softmax = Activation("softmax", partial(torch.softmax, dim=-1), block=0, constants=halves, image=(0.0, 1.0))
    plain = [replace(make(), name=make.__name__) for make in (elu, hardtanh, softplus, softshrink, leaky_relu)]
    return [softmax, *plain, *(Activation(*row[:4], **row[4]) for row in rows)]


def rescaled_by(activation: Activation, exponent: float) -> Activation:
    """Returns phi_D(z) = 2^e phi(2^-e z); phi itself if it is homogeneous or e is zero."""
    exponent = real("exponent of rescaled", exponent)
    if activation.homogeneous or exponent == 0:
        return activation
    if abs(exponent) > 1000:
        raise InputError(
            f"exponent of rescaled must lie within +-1000, the range of float64; received {exponent:g}"
        )
    factor = 2.0**exponent
    bind = partial(_rescaled, factor=factor)
    derivative = activation.derivative and partial(bind, phi=activation.derivative, outer=False)
    return replace(
        activation,
        name=f"rescaled({activation.name!r}, {exponent!r})",
        function=partial(bind, phi=activation.function),
        derivative=derivative,
        rounding=activation.rounding + (0.0 if exponent.is_integer() else 4.0),
        image=product_ends(*activation.image, factor),
    )


def _rescaled(z: Tensor, phi: Callable[[Tensor], Tensor], factor: float, outer: bool = True) -> Tensor:
    value = phi(z / factor)
    return value * factor if outer else value


_REFUSED = {
    "hardshrink": "it jumps at +-0.5, so no Lipschitz constant exists; use 'softshrink'",
    "threshold": "it jumps, so no Lipschitz constant exists; use 'relu'",
    "sign": "it jumps at 0, so no Lipschitz constant exists; use 'hardtanh' or 'tanh'",
    "rrelu": "its slope is random, so f is not a function; use leaky_relu(slope)",
}


BUILT_IN = {activation.name: activation for activation in catalogue()}
_REGISTRY = dict(BUILT_IN)


def activation_names() -> tuple[str, ...]:
    """Lists the registered names.

    Example:
        >>> "relu" in activation_names()
        True
    """
    return tuple(sorted(_REGISTRY))


_LAYERS: dict[type[nn.Module], Callable[[Any], Activation]] = {
    **{
        kind: partial(lambda name, layer: BUILT_IN[name], name)
        for name, kind in {
            "identity": nn.Identity,
            "relu": nn.ReLU,
            "relu6": nn.ReLU6,
            "selu": nn.SELU,
            "silu": nn.SiLU,
            "softsign": nn.Softsign,
            "tanh": nn.Tanh,
            "sigmoid": nn.Sigmoid,
            "hardsigmoid": nn.Hardsigmoid,
            "tanhshrink": nn.Tanhshrink,
            "mish": nn.Mish,
            "hardswish": nn.Hardswish,
            "logsigmoid": nn.LogSigmoid,
        }.items()
    },
    nn.GELU: lambda layer: BUILT_IN["gelu" if layer.approximate == "none" else "gelu_tanh"],
    nn.LeakyReLU: lambda layer: leaky_relu(layer.negative_slope),
    nn.ELU: lambda layer: elu(layer.alpha),
    nn.Hardtanh: lambda layer: hardtanh(layer.min_val, layer.max_val),
    nn.Softplus: lambda layer: softplus(layer.beta),
    nn.Softshrink: lambda layer: softshrink(layer.lambd),
    **{
        kind: partial(lambda name, layer: get_activation(name), name)  # says why it is refused
        for name, kind in {"hardshrink": nn.Hardshrink, "threshold": nn.Threshold, "rrelu": nn.RReLU}.items()
    },
}


def _of_torch(value: Any) -> Activation:
    """Returns the activation that a layer or a function of torch computes."""
    layer = value() if isinstance(value, type) and value in _LAYERS else value
    if type(layer) in _LAYERS:
        return _LAYERS[type(layer)](layer)
    name = getattr(value, "__name__", "")
    if name in (*_REGISTRY, *_REFUSED) and value in (getattr(torch, name, None), getattr(F, name, None)):
        return get_activation(name)
    received = getattr(value, "__name__", repr(value))
    raise InputError(
        "an activation is a name, a layer such as nn.ReLU(), a function of torch such as torch.relu, or an "
        f"Activation that states the slopes of a function of yours; received {received}"
    )


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
    if activation in _REFUSED:
        raise InputError(f"activation {activation!r} is refused: {_REFUSED[activation]}")
    if activation not in _REGISTRY:
        if (built := _built(activation)) is not None:
            return built
        raise unknown_name("activation", activation, _REGISTRY)
    return _REGISTRY[activation]


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
    if activation.name in _REFUSED:
        raise InputError(f"the name {activation.name!r} is refused: {_REFUSED[activation.name]}")
    _check_name(activation, replace)
    if check:
        check_constants(activation)
    _REGISTRY[activation.name] = activation
    return activation


def rescaled(activation: str | Activation, exponent: float) -> Activation:
    """Builds phi_D(z) = 2^e phi(2^-e z), the map of states in other units; phi itself if it is homogeneous.

    It has the slopes and constants of phi, and its values are bit-identical to scaled values of phi.

    Example:
        >>> rescaled("tanh", 3).image
        (-8.0, 8.0)
    """
    return rescaled_by(get_activation(activation), exponent)


_FAMILIES: dict[str, Callable[..., Activation]] = {
    "elu": elu,
    "group_sort": group_sort,
    "hardtanh": hardtanh,
    "leaky_relu": leaky_relu,
    "matrix_product": matrix_product,
    "max_pool": max_pool,
    "multiply": multiply,
    "normalise": normalise,
    "rescaled": rescaled,
    "softmax": softmax,
    "softplus": softplus,
    "softshrink": softshrink,
}


def _check_name(activation: Activation, replace: bool) -> None:
    """Refuses names that say that an activation is another one."""
    name = activation.name
    if name in BUILT_IN:
        if not replace and not same_map(activation, BUILT_IN[name]):
            raise InputError(
                f"{name!r} is an activation of the library, and yours is another one; choose another name, or "
                "pass replace=True"
            )
        return
    family = name.partition("(")[0].strip()
    if "(" not in name or family not in {*BUILT_IN, *_FAMILIES}:
        return
    try:
        known = _built(name)
    except InputError:
        known = None
    if known is None or not same_map(activation, known):
        raise InputError(
            f"the name {name!r} reads like {family!r} of the library with parameters, and yours is another "
            "activation; choose another name"
        )


# The functions behind families that have parameters, and how they call these.
_WITH_PARAMETERS: tuple[tuple[Callable[..., Tensor], Callable[..., Activation], tuple[str, ...]], ...] = (
    (F.leaky_relu, leaky_relu, ("negative_slope",)),
    (F.elu, elu, ("alpha",)),
    (torch.clamp, hardtanh, ("min", "max")),
    (_softplus, softplus, ("beta",)),
    (F.softshrink, softshrink, ("lambd",)),
    (pool, max_pool, ("size",)),
    (sort, group_sort, ("size",)),
)


def family_of(activation: Activation) -> str:
    """Returns what the library knows an activation as, by the function it evaluates and never by its name.

    It is empty for functions of your own, and where slopes or the derivative are not those of the library.

    Example:
        >>> family_of(leaky_relu(0.1)), family_of(Activation("relu", torch.tanh))
        ('leaky_relu', 'tanh')
        >>> family_of(Activation("mine", torch.relu))
        'relu'
    """
    function, known, family = activation.function, None, ""
    for one in BUILT_IN.values():
        if one.function is function:
            known, family = one, one.name
    if known is None and isinstance(function, partial) and not function.args:
        for inner, make, names in _WITH_PARAMETERS:
            if function.func is inner and function.keywords.keys() == set(names):
                known, family = make(*(function.keywords[name] for name in names)), make.__name__
    if known is None or (known.slope, known.block) != (activation.slope, activation.block):
        return ""
    return family if activation.derivative is None or alike(activation.derivative, known.derivative) else ""


def _built(name: str) -> Activation | None:
    """Builds ``family(parameters)``; None if the name is not of that form."""
    family, bracket, rest = name.partition("(")
    if not bracket or family not in _FAMILIES or not rest.endswith(")"):
        return None
    try:
        return _FAMILIES[family](*ast.literal_eval(f"({rest[:-1]},)" if rest != ")" else "()"))
    except (SyntaxError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise InputError(f"activation {name!r} has parameters that {family} does not take: {error}") from error
