"""Adversarial training of equilibrium models with and without noise (004)."""

from wellposed_lab.experiments.adversarial import suite

SUITES = (suite.SUITE,)
