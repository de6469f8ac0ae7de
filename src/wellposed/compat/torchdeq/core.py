"""The module that solves: `get_deq`, and what it builds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.compat.torchdeq.dropout import reset_dropout
from wellposed.compat.torchdeq.grad import Produce, Writer, backward_factory
from wellposed.compat.torchdeq.loss import power_method
from wellposed.compat.torchdeq.norm import reset_norm
from wellposed.compat.torchdeq.solver import BUILT_IN, SOLVER_OPTIONS, get_solver
from wellposed.compat.torchdeq.utils.config import DEQConfig, read_options, require_known
from wellposed.equilibrium.maps import Packing, State
from wellposed.equilibrium.solution import Adjoint, Solution
from wellposed.errors import InputError
from wellposed.registry import Registry

__all__ = ["DEQIndexing", "DEQSliced", "get_deq", "register_deq", "reset_deq"]


class DEQBase(nn.Module):
    """Solves ``z = f(z)`` for a function that holds its inputs itself; see `get_deq`.

    A subclass says in `states` which states of a solve it returns while training.
    """

    def __init__(self, args: Any = None, **options: Any) -> None:
        super().__init__()
        self.options = read_options(args, options)
        self.args = DEQConfig(args, **options)
        chosen = self.options
        self.f_solver, self.b_solver = get_solver(chosen.f_solver), get_solver(chosen.b_solver)
        self.f_max_iter, self.b_max_iter = chosen.f_max_iter, chosen.b_max_iter
        self.f_tol, self.b_tol = chosen.f_tol, chosen.b_tol
        self.f_stop_mode, self.b_stop_mode = chosen.f_stop_mode, chosen.b_stop_mode
        self.eval_f_max_iter = chosen.eval_f_max_iter or int(chosen.f_max_iter * chosen.eval_factor)
        self.solution: Solution | None = None  # of the latest call; `.adjoint` knows the backward solve
        self.produce_grad = self._gradients(len(self.steps(self.f_max_iter)))

    def steps(self, f_max_iter: int) -> list[int]:
        """Returns the steps after which a state is returned, the last of them `f_max_iter`."""
        count = self.options.n_states
        if count > 1:
            return [f_max_iter - f_max_iter // count * (count - 1 - k) for k in range(count)]
        return [*(min(step, f_max_iter) for step in self.options.indexing or ()), f_max_iter]

    def states(
        self, f: "_Function", start: Tensor, most: int, extra: dict[str, Any], writer: Writer | None
    ) -> Any:
        """Returns the states of a training step, connected to what f depends on, and what the solve tells."""
        raise NotImplementedError(f"{type(self).__name__}.states")

    def _gradients(self, count: int) -> list[Produce]:
        options = self.options
        steps = options.grad_steps
        if len(steps) not in (1, count):
            raise InputError(f"grad has {len(steps)} numbers for {count} states; give one, or one for each state")
        sampling: dict[str, Any] = {"tau": options.tau, "sup_gap": options.sup_gap, "sup_loc": options.sup_loc}
        produce = [backward_factory(n, **sampling) for n in (steps if len(steps) == count else steps * count)]
        if options.ift or options.hook_ift:
            settings = {"max_iter": self.b_max_iter, "tol": self.b_tol, "stop_mode": self.b_stop_mode}
            settings["on_failure"] = options.on_failure
            produce[-1] = backward_factory("ift", options.hook_ift, self.b_solver, settings)
        return produce

    def forward(
        self,
        func: Callable[..., Any],
        z_init: Tensor | Sequence[Tensor],
        solver_kwargs: Mapping[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Writer | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns a list of states, the equilibrium last, and what torchdeq tells about a solve.

        Args:
            func: ``f(z)``; if the state is a list of tensors, ``f(*z)`` returning a list.
            z_init: where to start, batch-first.
            solver_kwargs: options of the solver for this call, and ``f_max_iter``.
            sradius_mode: whether to estimate the spectral radius of the Jacobian, in eval mode.
            backward_writer: called with what the backward solve tells, under ``ift``.
        """
        f, extra = _Function(func, z_init), dict(solver_kwargs or {})
        most = int(extra.pop("f_max_iter", self.f_max_iter if self.training else self.eval_f_max_iter))
        self.adjoint_record = Adjoint()
        if self.training:
            states, info = self.states(f, f.start, most, extra, backward_writer)
        else:
            z, _, info = self.solve(f, f.start, most, extra)
            states, radius = [z], torch.zeros(1, device=z.device)
            if sradius_mode:
                point = z.detach().requires_grad_()
                with torch.enable_grad():
                    _, radius = power_method(f(point), point)
            info["sradius"] = radius
        if "solution" in info:
            info["solution"] = replace(info["solution"], adjoint_record=self.adjoint_record)
        self.solution = info.get("solution")
        return [f.restore(z) for z in states], info

    def solve(
        self,
        f: Callable[..., Tensor],
        start: Tensor,
        most: int,
        extra: Mapping[str, Any],
        indexing: Sequence[int] | None = None,
        on_the_way: bool = False,
    ) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        """Solves without gradients; a solve on the way to an equilibrium reports no failure."""
        settings: dict[str, Any] = {"tol": self.f_tol, "stop_mode": self.f_stop_mode, "indexing": indexing}
        name = self.options.f_solver
        if name in BUILT_IN and self.f_solver is BUILT_IN[name]:
            all_steps = () if name == "simple_fixed_point_iter" else ("return_final",)
            require_known("solver_kwargs", extra, ["f_max_iter", *SOLVER_OPTIONS[name], *all_steps])
            settings["on_failure"] = "ignore" if on_the_way else self.options.on_failure
        with torch.no_grad():
            return self.f_solver(f, x0=start, max_iter=most, **settings, **extra)

    def extra_repr(self) -> str:
        return str(self.options)


class DEQSliced(DEQBase):
    """Returns states between which the solver starts again, from the step that is differentiated."""

    def states(
        self, f: "_Function", start: Tensor, most: int, extra: dict[str, Any], writer: Writer | None
    ) -> Any:
        states: list[Tensor] = []
        info: dict[str, Any] = {}
        ends = self.steps(most)
        counts = [end - begin for begin, end in pairwise([0, *ends])]
        if self.options.n_states > 1:
            counts = [most // len(ends)] * len(ends)
        for index, (count, produce) in enumerate(zip(counts, self.produce_grad, strict=True)):
            z, _, info = self.solve(f, start, count, extra, on_the_way=index < len(counts) - 1)
            states += produce(self, f, z.detach(), writer=writer)
            start = states[-1].detach()
        return states, info


class DEQIndexing(DEQBase):
    """Returns states of one solve; there are as many as asked for, however early it ends."""

    def states(
        self, f: "_Function", start: Tensor, most: int, extra: dict[str, Any], writer: Writer | None
    ) -> Any:
        indices = self.steps(most)
        z, sampled, info = self.solve(f, start, most, extra, indexing=indices[:-1])
        states: list[Tensor] = []
        for state, produce in zip([*sampled[: len(indices) - 1], z], self.produce_grad, strict=True):
            states += produce(self, f, state.detach(), writer=writer)
        return states, info


class _Function:
    """A function of torchdeq's kind on one tensor: lists of tensors become rows."""

    def __init__(self, func: Callable[..., Any], z_init: Tensor | Sequence[Tensor]) -> None:
        self.func, self.single = func, isinstance(z_init, Tensor)
        start: State = z_init if isinstance(z_init, Tensor) else tuple(z_init)
        self.packing = Packing.of(start)
        self.start = start if isinstance(start, Tensor) else self.packing.pack(start)

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        if self.single:
            image: Tensor = self.func(z)
        else:
            image = self.packing.pack_result(self.packing.cast(tuple(self.func(*self.packing.unpack(z)))))
        return image if tau == 1 else torch.lerp(z, image, tau)

    def restore(self, z: Tensor) -> Any:
        return z if self.single else list(self.packing.unpack(z))


CORES: Registry[Callable[..., nn.Module]] = Registry.of(
    "core", Callable, {"indexing": DEQIndexing, "sliced": DEQSliced}
)


def get_deq(args: Any = None, **options: Any) -> Any:
    """Builds a module that is called as ``z_out, info = deq(f, z0)``.

    Options have the names and defaults of torchdeq: solvers ``f_solver``, ``b_solver``, tolerances ``f_tol``,
    ``b_tol``, ``f_stop_mode`` ... The gradient is that of ``grad`` steps with damping ``tau``; with ``ift`` or
    ``hook_ift`` it is `wellposed.Implicit`. While training, ``n_states`` or ``indexing`` states are returned, and
    ``sup_gap`` or ``sup_loc`` say which of the ``grad`` steps.

    Args:
        args: a dict, or a parsed command line; options in it count unless given as keywords.
        options: see `Options`; ``on_failure`` is that of `wellposed.fixed_point`.

    Raises:
        TypeError: an option is unknown; the message has the valid ones and the nearest.

    Example:
        >>> deq = get_deq(f_solver="anderson", f_tol=1e-6, ift=True)
        >>> z_out, info = deq(lambda z: 0.5 * torch.cos(z), torch.zeros(3, 2))
        >>> z_out[-1].shape, bool(info["abs_lowest"].max() < 1e-6)
        (torch.Size([3, 2]), True)
    """
    config = DEQConfig(args, **options)
    core = config.get("core", "sliced")
    build = CORES[core]
    return build(args, **options) if build in (DEQIndexing, DEQSliced) else build(config)


def register_deq(deq_type: str, core: Callable[..., nn.Module]) -> None:
    """Adds a class for ``get_deq(core=...)``; it is built from the options, a `DEQConfig`."""
    if not callable(core):
        raise InputError(f"a core is a class that takes the options; received {type(core).__name__}")
    CORES.register(deq_type, lambda: core)


def reset_deq(model: nn.Module) -> None:
    """Lets dropout draw new masks, which it keeps until the next reset; call it before every batch."""
    reset_norm(model)
    reset_dropout(model)
