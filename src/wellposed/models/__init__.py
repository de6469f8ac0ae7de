"""Modules whose forward pass is a fixed point."""

from wellposed.models.implicit import ImplicitModel

__all__ = ["ImplicitModel"]
