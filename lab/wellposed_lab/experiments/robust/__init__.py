"""Bounds on states and outputs, training that certifies (003), and proofs for monotone equilibrium networks."""

from wellposed_lab.experiments.robust import bounds, certified_loops, certified_training, mondeq

SUITES = (
    bounds.SUITE,
    certified_training.SUITE,
    mondeq.SUITE,
    certified_loops.SUITE,
)
