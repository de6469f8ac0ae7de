"""Data, and what counts as success on it. Nothing here knows a model."""

from wellposed.tasks.math import Arithmetic, addition, subtraction

__all__ = ["Arithmetic", "addition", "subtraction"]
