"""Fast engines of the loop for x = phi(Ax + Bu + b)."""

from wellposed.kernels.engine import ENGINES, EXECUTORS, choose

__all__ = ["ENGINES", "EXECUTORS", "choose"]
