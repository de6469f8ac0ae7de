"""The states of a form, block by block: substitution where nothing loops, a fixed point where it does.

`LoopEquation` is one loop of a form, ``x = phi(Ax + v)`` with an operator A, its certificate and its solution.
`EvaluationOrder` sorts the blocks: those that feed one another are a loop (`strong_components`), and a `Stage`
comes after all that it reads. `Evaluation` computes the states of a batch in that order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.activations.blockwise import piecewise
from wellposed.conditions.certificate import AffineBound, Certificate
from wellposed.conditions.conditions import CONDITIONS, certify
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import ROOM, reciprocal_gap, upward
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.solvers import Picard
from wellposed.equilibrium.stopping import STOPPINGS, Relative, Settled, bound_error
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import IllPosedError
from wellposed.forms.operators.base import Operator, Sparse
from wellposed.forms.operators.block import Block, combine
from wellposed.forms.operators.entries import LARGEST_DENSE, abs_upper_bound, sum_length
from wellposed.forms.operators.plain import Dense
from wellposed.forms.operators.structured import Selection


class LoopEquation:
    """The equation ``x = phi(Ax + v)`` of some states that feed one another.

    Args:
        A: operator from the states to themselves.
        activation: phi of all of them.
        activations: phi of every block where A is a block matrix.
    """

    def __init__(self, A: Operator, activation: Activation, activations: tuple[Activation, ...]) -> None:
        self.A, self.activation, self.activations = A, activation, activations
        self._why_not = ""  # there is no certificate, once that is known

    @cached_property
    def feedforward(self) -> bool:
        """Whether the states can be put in an order in which none depends on a later one."""
        listed = self.A.shape[0] <= LARGEST_DENSE or isinstance(self.A, Dense | Sparse | Selection)
        return self.activation.componentwise and listed and self.A.is_strictly_triangular()

    @cached_property
    def certificate(self) -> Certificate:
        """The proof of exactly one solution for every v, by norms of blocks where those suffice."""
        if not self._why_not:
            try:
                return self._proven()
            except IllPosedError as error:
                self._why_not = str(error)
        raise IllPosedError(self._why_not)

    def _proven(self) -> Certificate:
        if "inf" in self.activation.constants:
            norm = _row_norm(self.A)
            value = (norm + ROOM) * self.activation.lipschitz("inf") if norm else 0.0
            if value < 1:
                return Certificate.of("inf", value, gain=reciprocal_gap(value))
        bounded = all("inf" in phi.constants for phi in self.activations)
        if isinstance(self.A, Block) and len(self.activations) > 1 and bounded:
            certificate = block_certificate(self.A, self.activations)
            if certificate.holds:
                return certificate
        if self.feedforward:
            return Certificate.of("triangular", 0.0, note="strictly triangular")
        if self.A.shape[0] > LARGEST_DENSE:
            raise IllPosedError(
                f"norms of blocks do not prove that the loop of {self.A.shape[0]} states has one solution, and "
                f"finer conditions are tried up to {LARGEST_DENSE} states only; rescale or shrink its gains"
            )
        A = self.A.to_dense()
        if not self.activation.componentwise:
            self._require_small(A)
        return certify(A, self.activation)

    @torch.no_grad()
    def _require_small(self, A: Tensor) -> None:
        """Raises where a map of blocks, such as a normalisation, is too steep for a proof by any norm of A."""
        steepest = max(self.activations, key=lambda phi: min(phi.constants.values()))
        constant = min(steepest.constants.values())
        least = constant * float(A.abs().amax())  # |A|_p is no smaller than an entry
        if steepest.componentwise or not least >= 1:
            return
        about = f"the Lipschitz constant {constant:.3g}" if math.isfinite(constant) else "no Lipschitz constant"
        raise IllPosedError(
            f"the loop of {len(A)} states is not proven to have one solution: it goes through {steepest.name}, a "
            f"map of blocks with {about}; norms of blocks fail, and gamma |A| >= {least:.3g} in every norm, where "
            "a proof needs less than 1"
        )

    def iteration(self, v: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
        """Returns a step ``(x, v) -> x`` that converges to the solution, in the dtype of v, and the v it takes."""
        A, damping, phi = self.A.to(dtype=v.dtype), 1.0, self.activation.function
        condition = self.certificate.condition
        if condition in ("mu", "monotone", "triangular") and not self.feedforward:
            system = CONDITIONS.get(condition).equivalent(A.to_dense(), self.activation)
            A, v, damping = Dense(system.A), v * system.scale, system.damping

        def step(x: Tensor, offset: Tensor) -> Tensor:
            image = phi((A @ x) + offset)
            return image if damping == 1 else torch.lerp(x, image, damping)

        return step, v

    def solve(self, v: Tensor, options: dict[str, Any]) -> Solution:
        """Solves for every row of ``v (B, n)``; `options` are those of `fixed_point`."""
        options, dtype, gain = dict(options), v.dtype, max(1.0, self.certificate.gain)
        if self.feedforward:
            options = {"solver": Picard(), "stop": Settled(self.A.shape[0]), **options}
        elif math.isfinite(gain):
            options["stop"], wide = bound_error(STOPPINGS.get(options.get("stop") or Relative()), gain, dtype)
            v = v.to(wide)
        step, v = self.iteration(v)
        start = options.pop("x0", None)
        solution = fixed_point(step, torch.zeros_like(v) if start is None else start.to(v), v, **options)
        assert isinstance(solution.value, Tensor)
        return replace(solution, value=solution.value.to(dtype), trace=lambda: solution.residuals.to(dtype))

    def bound(self, x: Tensor, v: Tensor, size: Tensor, terms: int) -> Tensor | None:
        """Bounds the distance of x to the solution; None where only norms of blocks are known."""
        if self.certificate.condition == "blocks" or self.A.shape[0] > LARGEST_DENSE:
            return None
        bound = AffineBound(self.certificate, self.A.to_dense(), self.activation, terms)
        return bound(x, torch.cat([v, size], dim=1).detach())


def _row_norm(A: Operator) -> float:
    """Returns ``|A|_inf``, rounded up; formed in float64, which costs less than what float32 would have to add."""
    device = "cpu" if A.device.type == "mps" else A.device
    with torch.no_grad():
        exact = A.to(device=device, dtype=torch.float64)
        return float(upward(abs_upper_bound(exact).row_sums(), sum_length(A)).max())


def block_norms(A: Block) -> Tensor:  # (L, L)
    """Returns the inf norm of every block, rounded up: N(A) of 003 eq. (2.6) for gamma = 1.

    Example:
        >>> block_norms(Block((1, 1), (1, 1), {(0, 1): Dense(torch.tensor([[-2.0]]))})).round()
        tensor([[0., 2.],
                [0., 0.]], dtype=torch.float64)
    """
    norms = torch.zeros(len(A.heights), len(A.widths), dtype=torch.float64)
    for (i, j), part in A.parts.items():
        norms[i, j] = _row_norm(part) if min(part.shape) else 0.0
    return norms


def block_certificate(A: Block, activations: tuple[Activation, ...]) -> Certificate:
    """Checks rho(N(A, gamma)) < 1 with ``N_ij = gamma_i |A_ij|_inf`` (003, Theorem 1), forming nothing.

    Example:
        >>> from wellposed.activations import get_activation
        >>> gain, loss = Dense(torch.tensor([[4.0]])), Dense(torch.tensor([[0.125]]))
        >>> loop = Block((1, 1), (1, 1), {(0, 1): gain, (1, 0): loss})
        >>> block_certificate(loop, (get_activation("relu"),) * 2).holds
        True
    """
    gamma = torch.tensor([part.lipschitz("inf") for part in activations], dtype=torch.float64)
    norms = block_norms(A)
    gains = torch.where(norms > 0, gamma[:, None] * (norms + ROOM), 0.0)
    if not bool(gains.isfinite().all()):
        return Certificate.of("blocks", torch.inf, note="a map in the loop has no Lipschitz constant")
    weights, value = perron_weights(upward(gains, 1))
    note = f"Perron-Frobenius eigenvalue of the norms of {len(activations)} blocks"
    return Certificate.of("blocks", value, weights=weights, gain=reciprocal_gap(value), note=note)


def strong_components(edges: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """Finds the strongly connected components, each after those it depends on (Tarjan, 1972).

    Args:
        edges: what every node depends on; ties are broken by the order of its keys.

    Example:
        >>> strong_components({0: [1], 1: [2], 2: [1], 3: []})
        [(1, 2), (0,), (3,)]
    """
    import networkx  # here, because importing it takes a sixth of a second

    graph = networkx.from_dict_of_lists(edges, create_using=networkx.DiGraph)
    return [tuple(sorted(members)) for members in networkx.strongly_connected_components(graph)]


@dataclass(frozen=True)
class Stage:
    """Some blocks that are computed together; `loop` is None where they are one block without a loop."""

    blocks: tuple[int, ...]
    loop: LoopEquation | None


@dataclass(frozen=True)
class EvaluationOrder:
    """The order in which the blocks of ``x = phi(Ax + v)`` are computed (003, Theorems 2 and 3).

    Args:
        A: block matrix of the states.
        activations: phi of every block.
    """

    A: Block
    activations: tuple[Activation, ...]

    @cached_property
    def rows(self) -> list[dict[int, Any]]:
        """The operators of every block row by block column, without those that have no entry."""
        return [{j: part for j, part in row.items() if min(part.shape)} for row in self.A.rows()]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The loops of A, each after everything it depends on."""
        order = strong_components({k: list(row) for k, row in enumerate(self.rows)})
        return tuple(Stage(blocks, self._loop(blocks)) for blocks in order)

    def _loop(self, blocks: tuple[int, ...]) -> LoopEquation | None:
        if len(blocks) == 1 and blocks[0] not in self.rows[blocks[0]]:
            return None
        activations = tuple(self.activations[k] for k in blocks)
        sizes = tuple(self.A.heights[k] for k in blocks)
        inner = self.A.part(blocks[0], blocks[0]) if len(blocks) == 1 else self.A.chosen(blocks, blocks)
        return LoopEquation(inner, piecewise(activations, sizes), activations)

    @cached_property
    def loops(self) -> tuple[LoopEquation, ...]:
        """The loops."""
        return tuple(stage.loop for stage in self.stages if stage.loop is not None)

    @cached_property
    def last_read(self) -> list[list[int]]:
        """The blocks that every stage is the last to read."""
        blocks: list[list[int]] = [[] for _ in self.stages]
        for k, number in self.last_use.items():
            blocks[number].append(k)
        return blocks

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last stage that reads a block; its own if none does."""
        number_of = {k: number for number, stage in enumerate(self.stages) for k in stage.blocks}
        last = dict(number_of)
        for i, j in self.A.parts:
            last[j] = max(last[j], number_of[i])
        return last


@dataclass
class Evaluation:
    """The states of one batch while they are computed."""

    order: EvaluationOrder
    offset: Sequence[Tensor]  # (B, n_k) of every block: Bu + b
    options: dict[str, Any] = field(default_factory=dict)
    outputs: frozenset[int] | None = None  # blocks that the output reads; None for all
    states: list[Tensor | None] = field(default_factory=list)
    solutions: list[Solution] = field(default_factory=list)
    total: Tensor | float = 0.0  # (B,) of all entries, so that it is not finite if one of them is not

    def run(self) -> "Evaluation":
        """Computes every block and frees those that are no longer read."""
        self.states = [None] * len(self.order.activations)
        for number, stage in enumerate(self.order.stages):
            if stage.loop is None:
                (k,) = stage.blocks
                row = self.order.rows[k]
                driven = combine(row, self.states, self.offset[k]) if row else self.offset[k]
                state = self.order.activations[k].function(driven)
                self.states[k], self.total = state, self.total + state.detach().sum(1)
            else:
                self._close(stage.loop, stage.blocks)
            self._forget(number)
        return self

    def _driven(self, k: int, inside: tuple[int, ...]) -> Tensor:
        """Adds up what reaches a block from the input and from blocks outside its loop."""
        row = {j: part for j, part in self.order.rows[k].items() if j not in inside}
        offset = self.offset[k]
        return combine(row, self.states, offset) if row else offset

    def _close(self, loop: LoopEquation, blocks: tuple[int, ...]) -> None:
        v = torch.cat([self._driven(k, blocks) for k in blocks], dim=1)
        lost = ~v.detach().isfinite().all(1, keepdim=True)  # overflow on the way is no fault of the other samples
        overflow = not under_transform() and bool(lost.any())
        v = v.masked_fill(lost, 0.0) if overflow else v
        options = dict(self.options)
        if (start := options.get("x0")) is not None:
            pieces = start.split(self.order.A.heights, dim=1)
            options["x0"] = torch.cat([pieces[k] for k in blocks], dim=1)
        solution = loop.solve(v, options)
        x = solution.value
        assert isinstance(x, Tensor)
        if overflow:
            x = x.masked_fill(lost, torch.nan)
            solution = replace(solution, value=x, status=solution.status.masked_fill(lost[:, 0], Status.NONFINITE))
        sizes = [self.order.A.heights[k] for k in blocks]
        for k, piece in zip(blocks, x.split(sizes, dim=1), strict=True):
            self.states[k] = piece
        self.total = self.total + x.detach().sum(1)
        self.solutions.append(solution)

    def _forget(self, number: int) -> None:
        if self.outputs is None:
            return
        for k in self.order.last_read[number]:
            if k not in self.outputs:
                self.states[k] = None

    def solution(self) -> Solution:
        """Reports on all loops together: the worst status, all steps, the largest residual."""
        value = torch.cat([state for state in self.states if state is not None], dim=1)
        status = torch.full(value.shape[:1], Status.CONVERGED, dtype=torch.int8, device=value.device)
        steps = torch.zeros_like(status, dtype=torch.int64)
        residual = value.new_zeros(value.shape[0])
        for part in self.solutions:
            status = torch.maximum(status, part.status)
            steps, residual = steps + part.steps, torch.maximum(residual, part.residual)
        lost = ~value.detach().isfinite().all(1)
        status = torch.where(lost, torch.tensor(Status.NONFINITE, dtype=torch.int8, device=value.device), status)
        steps = steps.clamp(min=1)
        trace = value.new_full((len(steps), int(steps.max()) if len(steps) else 0), torch.nan)
        trace.scatter_(1, steps[:, None] - 1, residual.detach()[:, None])
        return Solution(value, status, steps, lambda: trace)
