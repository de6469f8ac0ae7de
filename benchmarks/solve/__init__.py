"""Solvers of the fixed-point equation: time, steps and error, memory, warm starts."""
