"""Algorithms that go on for longer than in training: prefix sums, mazes, sums of matrices (004)."""

from wellposed_lab.experiments.algorithms import matrix_addition, mazes, prefix_sums

SUITES = (
    prefix_sums.SUITE,
    mazes.SUITE,
    matrix_addition.SUITE,
)
