"""A fixed-point problem: the map, where to start, and how to solve it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from wellposed.equilibrium.failure import Once, OnFailure, report
from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.map import Map
from wellposed.equilibrium.monitor import SolveLog, active_logs
from wellposed.equilibrium.solution import Adjoint
from wellposed.equilibrium.solver import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.equilibrium.transform import under_transform

Loop = Callable[[Map, Tensor, Solver, Stopping, int], Iterates]


@dataclass(frozen=True)
class Method:
    """How equations are solved and what happens when one is not.

    A method is made anew for every solve: it carries the place where the backward pass leaves its report.
    """

    solver: Solver
    stop: Stopping
    max_steps: int
    on_failure: OnFailure = "warn"
    logs: tuple[SolveLog, ...] = field(default_factory=active_logs)
    adjoint: Adjoint = field(default_factory=Adjoint)
    place: str = ""  # of the solve in a sequence, for messages
    once: Once | None = None
    loop: Loop = iterate  # or a faster one that does the same

    def solve(self, f: Map, x0: Tensor) -> Iterates:
        """Solves the forward equation, logs it and applies the failure policy."""
        masked = under_transform()
        if masked:
            found = iterate(f, x0, self.solver, self.stop, self.max_steps, masked=True)
        else:
            found = self.run(f, x0)
            for log in self.logs:
                log.forward.append((found.status, found.steps))
            self._report(found, "equilibrium")
        return found

    def run(self, f: Map, x0: Tensor) -> Iterates:
        """Solves an equation and says nothing about it."""
        return self.loop(f, x0, self.solver, self.stop, self.max_steps)

    def solve_adjoint(self, f: Map, x0: Tensor) -> Tensor:
        """Solves the equation of the backward pass and leaves a report."""
        found = self.run(f, x0)
        self.note_adjoint(found)
        return found.value

    def note_adjoint(self, found: Iterates) -> None:
        """Records how a backward solve went and applies the failure policy."""
        self.adjoint.iterates = found
        for log in self.logs:
            log.adjoint.append((found.status, found.steps))
        self._report(found, "adjoint solve")

    def _report(self, found: Iterates, solve: str) -> None:
        name = solve + self.place
        report(found, self.on_failure, solve=name, max_steps=self.max_steps, once=self.once)
