"""Find ``x = f(x, u)`` and differentiate it."""

from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit, Phantom, Polished, Unrolled
from wellposed.equilibrium.maps import Contraction, Map
from wellposed.equilibrium.method import watch
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.solvers import SOLVERS, Anderson, Broyden, Newton, Picard, RobbinsMonro, Solver
from wellposed.equilibrium.stopping import (
    STOPPINGS,
    Absolute,
    ErrorBound,
    MeanRelative,
    RandomSteps,
    RandomThreshold,
    Relative,
    Step,
    Steps,
    Stopping,
)

__all__ = [
    "GRADIENTS",
    "SOLVERS",
    "STOPPINGS",
    "Absolute",
    "Anderson",
    "Broyden",
    "Contraction",
    "ErrorBound",
    "Gradient",
    "Implicit",
    "Map",
    "MeanRelative",
    "Newton",
    "Phantom",
    "Picard",
    "Polished",
    "RandomSteps",
    "RandomThreshold",
    "Relative",
    "RobbinsMonro",
    "Solution",
    "Solver",
    "Status",
    "Step",
    "Steps",
    "Stopping",
    "Unrolled",
    "fixed_point",
    "watch",
]
