"""Newton's method for samples that plain steps have not finished after a while, sample by sample.

The step at which a sample is handed over depends on the number of states and on `max_steps` alone (`patience`, a
rule from `benchmarks.solve.solver_choice`), never on its batch companions; a sample that finishes earlier has the
values and steps of the plain kernel. `handover_step` and `adjoint_step` apply the rule to the two passes, and
`hand_over` solves what is left.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.method import Method
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.stopping import Absolute, Relative, Stopping
from wellposed.errors import require


def patience(states: int) -> int:
    """Returns after how many steps a sample that is still not finished goes to Newton's method.

    About the steps that Newton's forward pass costs at a usual batch, so that a sample takes at most about twice
    as long as it would have with the better of the two, whatever its rate (the ski-rental argument). It looks at
    nothing but the number of states: a sample's way does not depend on its batch companions.

    Measured in float32 on one thread, ReLU, contractions 0.99 and 0.999: forward and backward Newton's method
    costs 1500 to 2700 plain steps at n = 20 and batch 128, 280 to 1100 at (64, 512), 130 to 740 at (190, 500),
    170 to 590 at (300, 256) and 90 to 530 at (512, 64).

    Example:
        >>> patience(20), patience(64), patience(300)
        (675, 262, 115)
    """
    return 75 + 12000 // states


STATES = 512  # up to which factorising was measured to be worth its while
RESERVE = 48  # evaluations that are left to Newton's method; it seldom needs ten
LEAST = 2 * RESERVE  # a lower limit on steps is somebody's wish to see few steps


@functools.cache
def _active_set() -> ModuleType:
    """Imports what needs numba, on first use."""
    return require("wellposed.kernels.cpu.newton", extra="fast")


def stop_is_plain(stop: Stopping) -> bool:
    """Tells whether Newton's method can obey a stopping rule: one step is enough for it to certify."""
    return type(stop) in (Absolute, Relative)


def handover_step(f: Map, stop: Stopping, max_steps: int) -> int:
    """Returns the step at which unfinished samples go to Newton's method; `max_steps` if none do.

    Example:
        >>> from wellposed.activations import get_activation
        >>> f = AffineMap((torch.eye(64) / 2,), torch.ones(1, 64), get_activation("relu"))
        >>> handover_step(f, Relative(), 200), handover_step(f, Relative(), 4000), handover_step(f, Relative(), 50)
        (152, 262, 50)
    """
    if not isinstance(f, AffineMap | TransposedMap) or (isinstance(f, AffineMap) and not f.activation.homogeneous):
        return max_steps
    return adjoint_step(f.factors[0].shape[-1], stop, max_steps)


def adjoint_step(states: int, stop: Stopping, max_steps: int) -> int:
    """Returns the same for the linear equation of the backward pass, which any activation has."""
    if states > STATES or max_steps < LEAST or not stop_is_plain(stop):
        return max_steps
    return min(patience(states), max_steps - RESERVE)


def adjoint_patience(states: int, method: Method, small: int, *, automatic: bool) -> int:
    """Returns after how many steps a kernel factorises backward systems; 0 for never.

    Args:
        states: n.
        method: of the backward pass.
        small: the answer for systems so small that they are factorised under any solver; 0 for others.
        automatic: whether nobody has asked for a solver.
    """
    if not stop_is_plain(method.stop):
        return 0
    limit = adjoint_step(states, method.stop, method.max_steps)
    return limit if automatic and limit < method.max_steps else min(small, method.max_steps)


def hand_over(
    f: AffineMap | TransposedMap, found: Iterates, stop: Stopping, limit: int, max_steps: int
) -> Iterates:
    """Solves by Newton's method what is not finished after `limit` steps; the rest stays as it is.

    Newton's method counts its evaluations as steps and leaves no residuals but the last.
    """
    status = found.status
    if status.numel() == 0 or int(status.numpy().max()) < Status.MAX_STEPS:
        return found
    rest = ((status == Status.MAX_STEPS) | (status == Status.DIVERGED)).nonzero()[:, 0]
    if not len(rest):
        return found
    module = _active_set()
    A, x, left = f.factors[0].detach(), found.value[rest], max(max_steps - limit, 1)
    with torch.no_grad():
        if isinstance(f, AffineMap):
            start = f.v.detach()[rest]
            answer = module.solve_active_set(A, start, f.activation, x, stop, left, warm=0)
        else:
            rows = TransposedMap(f.factors, f.slope[rest], f.offset[rest], 1.0)
            answer = module.finish_adjoint(A.mT, rows, x, stop, left)
    steps = found.steps.index_add(0, rest, answer.steps)
    value = found.value.index_copy(0, rest, answer.value)
    final = status.index_copy(0, rest, answer.status)
    return Iterates(value, final, steps, lambda: _trace(found.residuals, rest, answer.residual, steps))


def _trace(before: Tensor, rest: Tensor, last: Tensor, steps: Tensor) -> Tensor:  # (B, K)
    """Appends the last residuals of samples that were handed over."""
    wide = before.new_full((before.shape[0], max(int(steps.max()), before.shape[1])), torch.nan)
    wide[:, : before.shape[1]] = before
    wide[rest, steps[rest] - 1] = last
    return wide
