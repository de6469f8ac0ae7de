"""Networks as implicit models: ``to_implicit(module, input_shape)``."""

from wellposed.convert.convert import exact_form, to_implicit
from wellposed.convert.rules import (
    activation,  # noqa: F401  they register their rules
    arithmetic,  # noqa: F401  they register their rules
    attention,  # noqa: F401  they register their rules
    convolution,  # noqa: F401  they register their rules
    linear,  # noqa: F401  they register their rules
    norm,  # noqa: F401  they register their rules
    recurrent,  # noqa: F401  they register their rules
    shape,  # noqa: F401  they register their rules
)
from wellposed.convert.signal import Network, Signal, UnsupportedError, stacked

__all__ = ["Network", "Signal", "UnsupportedError", "exact_form", "stacked", "to_implicit"]
