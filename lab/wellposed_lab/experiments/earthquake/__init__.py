"""Earthquakes located from travel times, and features that can be left out (001, 002, 003)."""

from wellposed_lab.experiments.earthquake import eliminate, suite

SUITES = (
    suite.SUITE,
    eliminate.SUITE,
)
