"""Solvers propose the next iterate; the loop decides when to stop."""

import abc

from torch import Tensor

from wellposed.equilibrium.map import Map

SolverState = tuple[Tensor, ...]


class Solver(abc.ABC):
    """Proposes the next iterate from ``x`` and ``f(x)``.

    The state is a tuple of batch-first tensors, so that the loop can drop finished rows.
    """

    block: int = 1  # steps that may be taken before the loop looks at them; 1 where a step is expensive

    def init(self, x: Tensor) -> SolverState:
        """Returns the solver's own state for a solve that starts at `x`."""
        return ()

    @abc.abstractmethod
    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        """Returns the next iterate and the next state."""
