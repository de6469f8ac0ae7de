"""Solvers of the problem of one row, each with a duality gap."""
