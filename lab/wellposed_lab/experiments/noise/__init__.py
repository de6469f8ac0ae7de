"""Equilibrium models whose every step is disturbed (004)."""

from wellposed_lab.experiments.noise import cifar, mnist, regression, solvers

SUITES = (
    mnist.SUITE,
    cifar.SUITE,
    regression.SUITE,
    solvers.SUITE,
)
