"""Extrapolation on the identity and on sums (000, 001, 002), and counts of parameters."""

from wellposed_lab.experiments.mathematics import activations, arithmetic, feedback, identity, parameters

SUITES = (
    identity.SUITE,
    arithmetic.SUITE,
    activations.SUITE,
    feedback.SUITE,
    parameters.SUITE,
)
