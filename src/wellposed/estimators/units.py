"""Columns measured from their mean in units of their spread."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Units:
    """What zero and one stand for in every column.

    Example:
        >>> units = Units.of(np.array([[1.0, 5.0], [3.0, 5.0]]), np.ones(2))
        >>> units.mean, units.scale  # a constant column keeps its unit
        (array([2., 5.]), array([1., 1.]))
        >>> units.standardised(np.array([[4.0, 5.0]]))
        array([[2., 0.]])
    """

    mean: Array  # (p,)
    scale: Array  # (p,)

    @classmethod
    def of(cls, values: Array, weights: Array) -> "Units":  # (N, ..., p), (N,)
        """Measures weighted data, in float64."""
        rows = values.astype(np.float64).reshape(len(values), -1, values.shape[-1])
        rows = rows.transpose(1, 0, 2)  # (T, N, p)
        mean = np.average(rows, axis=1, weights=weights).mean(0)
        scale = np.sqrt(np.average((rows - mean) ** 2, axis=1, weights=weights).mean(0))
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, scale))

    def standardised(self, values: Array) -> Array:
        """Expresses values in these units, in the dtype that they have."""
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def restored(self, values: Array) -> Array:
        """Expresses standardised values in units of the data again."""
        return values * self.scale + self.mean
