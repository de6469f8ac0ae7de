"""Where an equilibrium is the answer: distances in graphs and inverse matrices."""

from wellposed_lab.experiments.beyond import suite

SUITES = (suite.SUITE,)
