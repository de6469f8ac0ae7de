"""Modules whose forward pass is a fixed point."""

from wellposed.forms import ImplicitForm
from wellposed.models.implicit import ImplicitModel
from wellposed.models.storage import load, save

__all__ = ["ImplicitForm", "ImplicitModel", "load", "save"]
