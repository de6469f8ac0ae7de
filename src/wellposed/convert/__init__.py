"""Networks as implicit models: ``to_implicit(module, input_shape)``."""

from wellposed.convert.convert import Conversion, to_implicit
from wellposed.convert.rules import (  # noqa: F401  they register their rules
    activation,
    arithmetic,
    attention,
    convolution,
    linear,
    norm,
    recurrent,
    shape,
)
from wellposed.convert.signal import Network, Signal, UnsupportedError, stacked

__all__ = ["Conversion", "Network", "Signal", "UnsupportedError", "stacked", "to_implicit"]
