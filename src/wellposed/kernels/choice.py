"""Which solver to go on with after a few steps: a rule from measurements.

Measured in float32 on one thread, forward and backward to a true error of 1e-4, ReLU
(`benchmarks.solve.solver_choice`): the compiled plain step costs what its products cost, an accelerated step about
a tenth more, and Newton's method what `newton_cost` says, with little regard to the contraction. So the steps
still to go decide, and a probe of 16 accelerated steps tells them: residuals 3 to 6 are those of plain steps,
the second half shows what acceleration gains. Where the second half falls more slowly than the first, jumps
have failed and plain steps have slowed down: then the late rate is that of plain steps as well. Extrapolated
so, step counts come out about twice too large (ring at 0.99: 269 for 103, shift at 0.99: 785 for 233), hence
`SHARE`. Below the rounding of the map acceleration has nothing to work with, and what is left of the way goes
at the plain rate (positive matrices at 0.999, 190 states: 30 steps to 1e-5 and 434 to 1e-6); Newton's
method lands there at once.
"""

from typing import Literal

import torch
from torch import Tensor

Choice = Literal["picard", "anderson", "newton"]
PLAIN = 7  # residuals of a probe that belong to plain steps
CYCLE = 8  # evaluations of a cycle of Anderson's method
SHARE = 0.5  # of the steps that the rates of a probe foretell
EXTRA = 1.1  # cost of an accelerated step in plain ones


def newton_cost(states: int, batch: int) -> float:
    """Returns what Newton's method costs, both ways, in plain steps of the forward pass.

    About 150 steps for the factorisations of a ReLU and a fixed cost that small problems notice. This is near
    the lower end of what was measured at contractions 0.99 and 0.999: 1500 to 2700 steps at n = 20 and batch
    128, 280 to 1100 at (64, 512), 130 to 740 at (190, 500), 170 to 590 at (300, 256) and 90 to 530 at (512,
    64). It is least for positive matrices and most for a cyclic shift, where patterns take longest to settle;
    there the steps of the others are overestimated too, so that Newton is chosen somewhat early (a shift at
    0.99).

    Example:
        >>> round(newton_cost(20, 128)), round(newton_cost(190, 500))
        (1343, 214)
    """
    return 150 + 2.7e5 / (batch**0.5 * states)


def patience(states: int) -> int:
    """Returns after how many steps a sample that is still not finished goes to Newton's method.

    About the steps that Newton's forward pass costs at a usual batch, so that a sample takes at most about twice
    as long as it would have with the better of the two, whatever its rate (the ski-rental argument). It looks at
    nothing but the number of states: a sample's way does not depend on its batch companions.

    Example:
        >>> patience(20), patience(64), patience(300)
        (675, 262, 115)
    """
    return 75 + 12000 // states


def steps_to_go(residual: Tensor, goal: Tensor, rate: Tensor) -> Tensor:  # (B,)
    """Returns after how many steps a residual that falls by `rate` a step reaches its goal.

    Example:
        >>> steps_to_go(torch.tensor(1.0), torch.tensor(0.01), torch.tensor(0.1))
        tensor(2.0000, dtype=torch.float64)
    """
    logarithm = rate.double().clamp(1e-6, 1 - 1e-6).log()
    return ((goal.double() / residual.double()).log() / logarithm).clamp_min(0)


def choose(
    states: int,
    contraction: float | None,
    residuals: Tensor,
    goal: Tensor,
    rounding: Tensor | None = None,
) -> Choice:
    """Chooses how to go on from a probe of some steps of `Anderson()`.

    Args:
        states: n.
        contraction: a bound of the contraction factor; None where none is known. Rates beyond it are not believed.
        residuals: ``(B, K)`` of the probe, K >= 16, NaN after a sample has finished.
        goal: ``(B,)`` residual that the stopping rule will accept.
        rounding: ``(B,)`` of the map, as `Map.rounding` estimates it.

    Example:
        >>> slow = 0.999 ** torch.arange(16.0).expand(64, 16)
        >>> choose(300, 0.999, slow, torch.full((64,), 1e-5)), choose(20, 0.999, slow, torch.full((64,), 0.5))
        ('newton', 'picard')
    """
    if residuals.shape[1] < 2 * CYCLE:
        return "picard"  # nobody needed the whole probe
    last = residuals[:, 2 * CYCLE - 1]
    running = last.isfinite() & (last > goal)
    if not bool(running.any()):
        return "picard"
    floor = goal if rounding is None else torch.maximum(goal, rounding)
    residuals, last, goal, floor = residuals[running], last[running], goal[running], floor[running]
    bound = 1.0 if contraction is None else min(contraction, 1.0)
    early = _rate(residuals[:, PLAIN - 4], residuals[:, PLAIN - 1], 3).clamp_max(bound)
    late = _rate(residuals[:, CYCLE - 1], last, CYCLE).clamp_max(bound)
    slow = torch.maximum(early, late)
    plain = steps_to_go(last, goal, slow)
    fast = steps_to_go(last, floor, late) + steps_to_go(torch.minimum(last, floor), goal, slow)
    costs: dict[Choice, float] = {
        "picard": SHARE * float(plain.mean()),
        "anderson": SHARE * EXTRA * float(fast.mean()),
        "newton": newton_cost(states, len(last)) / 2,  # the other half is the backward pass
    }
    return min(costs, key=costs.__getitem__)


def _rate(before: Tensor, after: Tensor, steps: int) -> Tensor:
    return (after / before.clamp_min(torch.finfo(before.dtype).tiny)) ** (1 / steps)
