"""Activation maps with the constants that well-posedness rests on."""

from wellposed.activations.activation import NORMS, Activation, Traits, block_view, check_constants
from wellposed.activations.blockwise import group_sort, matrix_product, max_pool, multiply, normalise, softmax
from wellposed.activations.catalogue import (
    activation_names,
    elu,
    get_activation,
    hardtanh,
    leaky_relu,
    register_activation,
    rescaled,
    softplus,
    softshrink,
)

__all__ = [
    "NORMS",
    "Activation",
    "Traits",
    "activation_names",
    "block_view",
    "check_constants",
    "elu",
    "get_activation",
    "group_sort",
    "hardtanh",
    "leaky_relu",
    "matrix_product",
    "max_pool",
    "multiply",
    "normalise",
    "register_activation",
    "rescaled",
    "softmax",
    "softplus",
    "softshrink",
]
