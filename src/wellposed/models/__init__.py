"""Modules whose forward pass is a fixed point."""

from wellposed.forms import ImplicitForm
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.models.storage import load, save

__all__ = ["Ensemble", "ImplicitForm", "ImplicitModel", "load", "save"]
