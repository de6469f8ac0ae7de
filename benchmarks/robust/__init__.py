"""Bounds of outputs under changes of the input."""
