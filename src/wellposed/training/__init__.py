"""The one training loop, in plain torch."""

from wellposed.models.warm_start import WarmStart
from wellposed.training.checkpoint import Checkpoint
from wellposed.training.history import History, Interrupted
from wellposed.training.loop import fit
from wellposed.training.tensorboard import TensorBoard

__all__ = ["Checkpoint", "History", "Interrupted", "TensorBoard", "WarmStart", "fit"]
