"""Find ``x = f(x, u)`` and differentiate it."""

from wellposed.equilibrium.anderson import Anderson
from wellposed.equilibrium.broyden import Broyden
from wellposed.equilibrium.certificate import Certificate
from wellposed.equilibrium.conditions import CONDITIONS, certificate, certify
from wellposed.equilibrium.fixed_point import SOLVERS, fixed_point
from wellposed.equilibrium.gradient import GRADIENTS, Gradient, Implicit, Phantom, Polished, Unrolled
from wellposed.equilibrium.map import Contraction, Map
from wellposed.equilibrium.monitor import watch
from wellposed.equilibrium.newton import Newton
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.projection import project_rows
from wellposed.equilibrium.robbins_monro import RobbinsMonro
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.solver import Solver
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
    "CONDITIONS",
    "GRADIENTS",
    "SOLVERS",
    "STOPPINGS",
    "Absolute",
    "Anderson",
    "Broyden",
    "Certificate",
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
    "certificate",
    "certify",
    "fixed_point",
    "project_rows",
    "watch",
]
