"""Data of several experiments, and what counts as success on it. Nothing here knows a model."""
