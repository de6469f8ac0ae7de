"""How many steps an equilibrium takes, and how deep that makes a model (001, 002)."""

from wellposed_lab.experiments.depth import suite

SUITES = (suite.SUITE,)
