"""Attacks by the sensitivity matrix beside attacks by gradients (003)."""

from wellposed_lab.experiments.attack import cifar, mnist

SUITES = (
    mnist.SUITE,
    cifar.SUITE,
)
