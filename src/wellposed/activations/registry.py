"""Activation maps by name."""

import ast
from collections.abc import Callable

from wellposed.activations.activation import Activation
from wellposed.activations.blockwise import group_sort, matrix_product, max_pool, multiply, normalise, softmax
from wellposed.activations.catalogue import catalogue
from wellposed.activations.check import check_constants
from wellposed.activations.family import elu, hardtanh, leaky_relu, softplus, softshrink
from wellposed.activations.rescaled import rescaled_by
from wellposed.errors import InputError, unknown_name

_REFUSED = {
    "hardshrink": "it jumps at +-0.5, so no Lipschitz constant exists; use 'softshrink'",
    "threshold": "it jumps, so no Lipschitz constant exists; use 'relu'",
    "sign": "it jumps at 0, so no Lipschitz constant exists; use 'hardtanh' or 'tanh'",
    "rrelu": "its slope is random, so f is not a function; use leaky_relu(slope)",
}


_REGISTRY = {activation.name: activation for activation in catalogue()}


def activation_names() -> tuple[str, ...]:
    """Lists the registered names.

    Example:
        >>> "relu" in activation_names()
        True
    """
    return tuple(sorted(_REGISTRY))


def get_activation(activation: str | Activation) -> Activation:
    """Returns the activation of that name; an `Activation` passes through.

    A name may carry parameters: ``"leaky_relu(0.2)"``, ``"max_pool(4)"``, ``"elu(0.5)"``.

    Example:
        >>> get_activation("selu").slope
        (0.0, 1.7580993408473773)
        >>> get_activation("hardtanh(0.0, 2.0)").image
        (0.0, 2.0)
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str):
        raise InputError(f"an activation is given by its name; received {type(activation).__name__}")
    if activation in _REFUSED:
        raise InputError(f"activation {activation!r} is refused: {_REFUSED[activation]}")
    if activation not in _REGISTRY:
        if (built := _built(activation)) is not None:
            return built
        raise unknown_name("activation", activation, _REGISTRY)
    return _REGISTRY[activation]


def register_activation(activation: Activation, *, check: bool = True) -> Activation:
    """Makes an activation available by name, after a sampled check of its constants.

    Example:
        >>> register_activation(leaky_relu(0.2)).name
        'leaky_relu(0.2)'
    """
    if activation.name in _REFUSED:
        raise InputError(f"the name {activation.name!r} is refused: {_REFUSED[activation.name]}")
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


def _built(name: str) -> Activation | None:
    """Builds ``family(parameters)``; None if the name is not of that form."""
    family, bracket, rest = name.partition("(")
    if not bracket or family not in _FAMILIES or not rest.endswith(")"):
        return None
    try:
        return _FAMILIES[family](*ast.literal_eval(f"({rest[:-1]},)" if rest != ")" else "()"))
    except (SyntaxError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise InputError(f"activation {name!r} has parameters that {family} does not take: {error}") from error
