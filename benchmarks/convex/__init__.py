"""Convex fits of implicit models to recorded states."""
