"""WarmStart: every sample of a training set begins its solve where its last one ended."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.equilibrium.fixed_point import make_options
from wellposed.equilibrium.gradients import Unrolled
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import SolveHooks
from wellposed.equilibrium.solution import failed
from wellposed.errors import InputError
from wellposed.models.deq import DEQ
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WarmStart:
    """Keeps the last equilibrium of every training sample as the start of its next solve.

    A start changes the number of steps and, within the tolerance of the stopping rule, nothing else: the rule
    is the same. A sample that failed, or whose state does not fit `dtype`, starts from zero the next time.

    Memory is ``samples * n * itemsize`` bytes for every solve in the model, n being the numbers in a sample's
    state, and twice that with `adjoint`; it is taken at the first solve, and `nbytes` tells.

    Args:
        dtype: in which states are kept; that of the states if None. A short one saves memory and costs steps.
        device: where they are kept; that of the states if None.
        adjoint: whether to keep and use the solutions of the backward solves as well.

    Example:
        >>> from wellposed import ImplicitModel
        >>> u, model, starts = torch.randn(10, 3), ImplicitModel(3, 2, 8), WarmStart()
        >>> starts.prepare(model, samples=10)
        >>> for rows in torch.randperm(10).split(5):
        ...     with starts.of(rows):
        ...         y = model(u[rows])
        >>> starts.nbytes
        320
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        adjoint: bool = False,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(map(str, DTYPES))}; received {dtype}")
        self.dtype, self.device, self.adjoint = dtype, device, adjoint
        self.samples = 0
        self.states: dict[str, Tensor] = {}  # (N, n) for every solve of a forward pass, and of a backward pass
        self._solvers: dict[str, ImplicitModel | DEQ] = {}

    @property
    def nbytes(self) -> int:
        """The memory that is taken; 0 before the first solve."""
        return sum(kept.numel() * kept.element_size() for kept in self.states.values())

    def prepare(self, model: nn.Module, samples: int) -> None:
        """Finds the solves of a model and checks that their starts may be chosen.

        States that are kept from the same model and as many samples stay; others must be left to another object.
        """
        if self.samples and self.samples != samples:
            raise InputError(f"this WarmStart keeps {self.samples} samples; received {samples}; make another one")
        self._solvers, self.samples = _solvers_of(model), samples

    @contextlib.contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:  # (B,)
        """Lets the model begin at what is kept for the samples `rows`, and keeps what it finds."""
        with contextlib.ExitStack() as stack:
            visits = [_Visit(self, name, rows) for name in self._solvers]
            for visit, solver in zip(visits, self._solvers.values(), strict=True):
                stack.enter_context(_hooked(solver, visit))
            yield
            if not any(visit.seen for visit in visits):
                raise InputError("no solve was seen; call the model that was prepared inside this block")

    def read(self, name: str, rows: Tensor, like: Tensor) -> Tensor:  # (R, n)
        """Returns the starts of a solve; zeros for samples that are not known."""
        kept = self.states.get(name)
        if kept is None:
            return torch.zeros_like(like)
        _require_shape(name, kept.shape[1], rows, like)
        return kept[rows.to(kept.device)].reshape(like.shape).to(like)

    def write(self, name: str, rows: Tensor, value: Tensor, status: Tensor) -> None:  # (B,), (R, n), (R,)
        """Keeps what a solve found, zeros where it found nothing."""
        width = self.states[name].shape[1] if name in self.states else value.numel() // len(rows)
        _require_shape(name, width, rows, value)
        if name not in self.states:
            dtype, device = self.dtype or value.dtype, self.device or value.device
            self.states[name] = torch.zeros(self.samples, width, dtype=dtype, device=device)
        kept = self.states[name]
        short = value.detach().to(kept.dtype)
        # A row with NaN or infinity has no finite sum; a wide sum, as many numbers of a short dtype may exceed it.
        good = ~failed(status) & short.sum(1, dtype=torch.promote_types(short.dtype, torch.float32)).isfinite()
        if not bool(good.all()):
            short = short.masked_fill(~good[:, None], 0)
        kept[rows.to(kept.device)] = short.reshape(len(rows), width).to(kept.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what is kept."""
        return dict(self.states)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what was kept by another process, in the dtype and on the device of this object."""
        for name, kept in state.items():
            if kept.shape[0] != self.samples:
                raise ValueError(f"starts of {kept.shape[0]} samples, expected {self.samples}")
            dtype, device = self.dtype or kept.dtype, self.device or self._device(name)
            self.states[name] = kept.to(device, dtype, copy=True)

    def _device(self, name: str) -> torch.device:
        parameter = next(self._solvers[name.partition("#")[0]].parameters(), torch.empty(0))
        return parameter.device


@dataclass
class _Visit:
    """The solves of one module for one batch, which may be several."""

    starts: WarmStart
    name: str
    rows: Tensor
    count: int = 0
    seen: bool = False  # whether the module was called at all

    def __call__(self) -> SolveHooks:
        """Returns the hooks of the next solve."""
        self.seen = True
        return _WarmSolve(self)


@dataclass
class _WarmSolve(SolveHooks):
    """One solve, forward and backward."""

    visit: _Visit
    name: str = ""
    dtype: torch.dtype = torch.float32  # of the states
    backward: int = 0  # backward solves so far; second derivatives have another equation

    def start(self, zeros: Tensor) -> Tensor:
        """Returns the starts of the samples."""
        visit, self.dtype = self.visit, zeros.dtype
        self.name, visit.count = f"{visit.name}#{visit.count}", visit.count + 1
        return visit.starts.read(self.name, visit.rows, zeros)

    def on_result(self, found: Iterates) -> None:
        """Keeps what the solve found."""
        self.visit.starts.write(self.name, self.visit.rows, found.value.to(self.dtype), found.status)

    def adjoint_start(self, like: Tensor) -> Tensor | None:
        """Returns where the backward solve of the same samples ended."""
        starts, self.backward = self.visit.starts, self.backward + 1
        wanted = starts.adjoint and self.backward == 1
        return starts.read(f"{self.name}#adjoint", self.visit.rows, like) if wanted else None

    def on_adjoint(self, found: Iterates) -> None:
        """Keeps what the backward solve found."""
        if self.visit.starts.adjoint and self.backward == 1:
            self.visit.starts.write(
                f"{self.name}#adjoint", self.visit.rows, found.value.to(self.dtype), found.status
            )


@contextlib.contextmanager
def _hooked(module: ImplicitModel | DEQ, visit: _Visit) -> Iterator[None]:
    """Has a module ask for the hooks of its solves."""
    before, module.hooks = module.hooks, visit
    try:
        yield
    finally:
        module.hooks = before


def _solvers_of(model: nn.Module) -> dict[str, ImplicitModel | DEQ]:
    if isinstance(model, Ensemble):
        raise InputError("warm starts need values, which an Ensemble under vmap has not; train its members apart")
    if any(hasattr(part, "_orig_mod") for part in model.modules()):
        raise InputError("warm starts do not reach a compiled model; pass the module itself, not torch.compile's")
    recurrent = [part for part in model.modules() if isinstance(part, ImplicitRNN)]
    inner = {id(part) for rnn in recurrent for part in rnn.modules()}
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, ImplicitModel | DEQ) and id(part) not in inner
    }
    if not found:
        hint = "; an ImplicitRNN begins every step at the one before as it is" if recurrent else ""
        raise InputError(f"{type(model).__name__} has no ImplicitModel or DEQ whose solves could be warm{hint}")
    for name, part in found.items():
        _require_independence(name, part)
    return found


def _require_independence(name: str, part: ImplicitModel | DEQ) -> None:
    """Raises where the result depends on the start by more than a tolerance."""
    where = f"{type(part).__name__} {name!r}" if name else type(part).__name__
    stop = make_options(part.solver, part.stop, part.max_steps, part.on_failure).stop
    if not stop.certifies:
        raise InputError(
            f"warm starts would change the answers of {where}, which counts steps ({stop}); use Relative()"
        )
    if isinstance(part.gradient, Unrolled):
        raise InputError(
            f"warm starts would cut the gradient of {where} short, as Unrolled() follows the steps; use Implicit()"
        )


def _require_shape(name: str, width: int, rows: Tensor, value: Tensor) -> None:
    if len(value) % len(rows) or width * len(rows) != value.numel():
        raise InputError(
            f"warm starts need states of one shape and as many for each sample; the solve {name!r} has "
            f"{tuple(value.shape)} for {len(rows)} samples and {width} numbers kept for each; leave warm_start out"
        )
