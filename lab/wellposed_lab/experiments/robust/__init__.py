"""Bounds on states and outputs, and training that certifies (003)."""

from wellposed_lab.experiments.robust import bounds, certified_training

SUITES = (
    bounds.SUITE,
    certified_training.SUITE,
)
