"""The volatility of stocks and futures by minutes (001, 002)."""

from wellposed_lab.experiments.volatility import suite

SUITES = (suite.SUITE,)
