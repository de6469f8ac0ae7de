"""The one training loop, in plain torch."""

from wellposed.training.history import History, Interrupted
from wellposed.training.loop import fit

__all__ = ["History", "Interrupted", "fit"]
