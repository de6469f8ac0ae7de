"""Networks as implicit models: ``to_implicit(module, input_shape)``."""

from wellposed.convert import (  # noqa: F401  they register their rules
    activation,
    arithmetic,
    attention,
    convolution,
    linear,
    models,
    norm,
    padding,
    pooling,
    recurrent,
    resize,
    shape,
    softmax,
    transformer,
)
from wellposed.convert.convert import Conversion, to_implicit
from wellposed.convert.dispatch import UnsupportedError
from wellposed.convert.signal import Network, Signal, stacked

__all__ = ["Conversion", "Network", "Signal", "UnsupportedError", "stacked", "to_implicit"]
