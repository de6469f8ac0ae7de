"""Explicit networks to compare with."""

from wellposed.baselines.mlp import MLP, parameter_count

__all__ = ["MLP", "parameter_count"]
