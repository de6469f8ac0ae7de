"""Fast executors of the loop for x = phi(Ax + Bu + b)."""

from wellposed.kernels.engine import EXECUTORS, choose_loop, explain

__all__ = ["EXECUTORS", "choose_loop", "explain"]
