"""WarmStart: every sample of a training set starts its solve where its last one ended."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.equilibrium.gradients import Unrolled
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import SolveHooks, make_options
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
    state, and twice that with `adjoint`; it is allocated at the first solve, and `nbytes` says how much.

    Args:
        dtype: of the stored states; that of the model's if None. A short one saves memory and costs steps.
        device: of the stored states; that of the model's if None.
        adjoint: whether to store and use the solutions of the backward solves as well.

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
        """The memory allocated; 0 before the first solve."""
        return sum(states.numel() * states.element_size() for states in self.states.values())

    def prepare(self, model: nn.Module, samples: int) -> None:
        """Finds the solves of a model and checks that their starts may be chosen.

        Stored states of the same model and as many samples stay; anything else needs another object.
        """
        if self.samples and self.samples != samples:
            raise InputError(f"this WarmStart keeps {self.samples} samples; received {samples}; make another one")
        self._solvers, self.samples = _solvers_of(model), samples

    @contextlib.contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:  # (B,)
        """Starts the model from the stored states of the samples `rows`, and stores the states it reaches."""
        with contextlib.ExitStack() as stack:
            batches = [_BatchSolves(self, name, rows) for name in self._solvers]
            for batch, solver in zip(batches, self._solvers.values(), strict=True):
                stack.enter_context(_hooked(solver, batch))
            yield
            if not any(batch.called for batch in batches):
                raise InputError("no solve was seen; call the model that was prepared inside this block")

    def read(self, name: str, rows: Tensor, like: Tensor) -> Tensor:  # (R, n)
        """Returns the starts of a solve; zeros for samples that are not known."""
        states = self.states.get(name)
        if states is None:
            return torch.zeros_like(like)
        _require_shape(name, states.shape[1], rows, like)
        return states[rows.to(states.device)].reshape(like.shape).to(like)

    def write(self, name: str, rows: Tensor, value: Tensor, status: Tensor) -> None:  # (B,), (R, n), (R,)
        """Stores the states of a solve, zeros where it failed."""
        width = self.states[name].shape[1] if name in self.states else value.numel() // len(rows)
        _require_shape(name, width, rows, value)
        if name not in self.states:
            dtype, device = self.dtype or value.dtype, self.device or value.device
            self.states[name] = torch.zeros(self.samples, width, dtype=dtype, device=device)
        states = self.states[name]
        short = value.detach().to(states.dtype)
        # A row with NaN or infinity has no finite sum; a wide sum, as many numbers of a short dtype may exceed it.
        good = ~failed(status) & short.sum(1, dtype=torch.promote_types(short.dtype, torch.float32)).isfinite()
        if not bool(good.all()):
            short = short.masked_fill(~good[:, None], 0)
        states[rows.to(states.device)] = short.reshape(len(rows), width).to(states.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the stored states."""
        return dict(self.states)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over states that another process stored, in the dtype and on the device of this object."""
        for name, states in state.items():
            if states.shape[0] != self.samples:
                raise ValueError(f"starts of {states.shape[0]} samples, expected {self.samples}")
            parameter = next(self._solvers[name.partition("#")[0]].parameters(), torch.empty(0))
            dtype, device = self.dtype or states.dtype, self.device or parameter.device
            self.states[name] = states.to(device, dtype, copy=True)


@dataclass
class _BatchSolves:
    """The solves of one module for one batch, which may be several."""

    starts: WarmStart
    name: str
    rows: Tensor
    count: int = 0
    called: bool = False  # whether the module was called at all

    def __call__(self) -> SolveHooks:
        """Returns the hooks of the next solve."""
        self.called = True
        return _WarmSolve(self)


@dataclass
class _WarmSolve(SolveHooks):
    """One solve, forward and backward."""

    batch: _BatchSolves
    name: str = ""
    dtype: torch.dtype = torch.float32  # of the states
    backward: int = 0  # backward solves so far; second derivatives have another equation

    def start(self, zeros: Tensor) -> Tensor:
        """Returns the starts of the samples."""
        batch, self.dtype = self.batch, zeros.dtype
        self.name, batch.count = f"{batch.name}#{batch.count}", batch.count + 1
        return batch.starts.read(self.name, batch.rows, zeros)

    def on_result(self, iterates: Iterates) -> None:
        """Stores the states."""
        self._write(self.name, iterates)

    def adjoint_start(self, like: Tensor) -> Tensor | None:
        """Returns where the backward solve of the same samples ended."""
        starts, self.backward = self.batch.starts, self.backward + 1
        wanted = starts.adjoint and self.backward == 1
        return starts.read(f"{self.name}#adjoint", self.batch.rows, like) if wanted else None

    def on_adjoint(self, iterates: Iterates) -> None:
        """Stores the solutions of the backward solve."""
        if self.batch.starts.adjoint and self.backward == 1:
            self._write(f"{self.name}#adjoint", iterates)

    def _write(self, name: str, iterates: Iterates) -> None:
        """Stores the last points: those that were accepted are accepted again, which their images may not be."""
        points = iterates.value if iterates.points is None else iterates.points
        self.batch.starts.write(name, self.batch.rows, points.to(self.dtype), iterates.status)


@contextlib.contextmanager
def _hooked(module: ImplicitModel | DEQ, batch: _BatchSolves) -> Iterator[None]:
    """Installs the hooks for the solves of a module."""
    before, module.hooks = module.hooks, batch
    try:
        yield
    finally:
        module.hooks = before


def _solvers_of(model: nn.Module) -> dict[str, ImplicitModel | DEQ]:
    if isinstance(model, Ensemble):
        raise InputError("warm starts need values, which an Ensemble under vmap lacks; train its members apart")
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise InputError("warm starts do not reach a compiled model; pass the module itself, not torch.compile's")
    recurrent = [module for module in model.modules() if isinstance(module, ImplicitRNN)]
    inner = {id(module) for rnn in recurrent for module in rnn.modules()}
    solvers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ImplicitModel | DEQ) and id(module) not in inner
    }
    if not solvers:
        hint = "; an ImplicitRNN begins every step at the one before anyway" if recurrent else ""
        raise InputError(f"{type(model).__name__} has no ImplicitModel or DEQ whose solves could be warm{hint}")
    for name, module in solvers.items():
        _require_independence(name, module)
    return solvers


def _require_independence(name: str, module: ImplicitModel | DEQ) -> None:
    """Raises where the result depends on the start by more than a tolerance."""
    where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
    stop = make_options(module.solver, module.stop, module.max_steps, module.on_failure).stop
    if not stop.certifies:
        raise InputError(
            f"warm starts would change the answers of {where}, which counts steps ({stop}); use Relative()"
        )
    if isinstance(module.gradient, Unrolled):
        raise InputError(
            f"warm starts would cut the gradient of {where} short, as Unrolled() follows the steps; use Implicit()"
        )


def _require_shape(name: str, width: int, rows: Tensor, value: Tensor) -> None:
    if len(value) % len(rows) or width * len(rows) != value.numel():
        raise InputError(
            f"warm starts need states of one shape, equally many for each sample; the solve {name!r} has "
            f"{tuple(value.shape)} for {len(rows)} samples and {width} stored numbers each; leave warm_start out"
        )
