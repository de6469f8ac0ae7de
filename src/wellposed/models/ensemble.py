"""Ensemble: many members of one architecture, run and trained as one tensor program."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from wellposed.errors import InputError


class Ensemble(nn.Module):
    """Runs M modules of one architecture as one program with a leading member dimension.

    `stacked` is a module of the members' own kind whose parameters and buffers have the shape ``(M, ...)``;
    optimisers, state_dict, ``.to``, deepcopy and pickle treat it like any other module. Members do not
    influence each other, so a sum of their losses and an elementwise optimiser (SGD, Adam, ...) train each
    one as if it were alone. Random layers such as dropout draw differently for every member.

    Args:
        models: modules that differ in nothing but the values of parameters and buffers; they are copied.
        seeds: one per member, from which `fit` draws its data order; 0, 1, ... by default.

    Example:
        >>> ensemble = Ensemble([nn.Linear(3, 2) for _ in range(5)])
        >>> ensemble(torch.zeros(7, 3)).shape
        torch.Size([5, 7, 2])
        >>> ensemble.stacked.weight.shape
        torch.Size([5, 2, 3])
    """

    def __init__(self, models: Sequence[nn.Module], seeds: Sequence[int] | None = None) -> None:
        super().__init__()
        models = list(models)
        if not models:
            raise InputError("an Ensemble needs at least one module; received none")
        for index, model in enumerate(models[1:], start=1):
            _require_same(models[0], model, index)
        self.seeds = tuple(range(len(models)) if seeds is None else seeds)
        if len(self.seeds) != len(models):
            raise InputError(f"{len(models)} members need as many seeds; received {len(self.seeds)}")
        states = [_state(model) for model in models]
        self.stacked = _with_state(models[0], lambda name: torch.stack([state[name] for state in states]))

    @classmethod
    def of(cls, factory: Callable[[], nn.Module], seeds: Iterable[int]) -> "Ensemble":
        """Builds one member per seed; the global random state is left as it was.

        Example:
            >>> ensemble = Ensemble.of(lambda: nn.Linear(3, 2), seeds=[7, 8])
            >>> len(ensemble), ensemble.seeds
            (2, (7, 8))
        """
        models, seeds = [], tuple(seeds)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            for seed in seeds:
                torch.manual_seed(seed)
                models.append(factory())
        return cls(models, seeds)

    def forward(self, u: Tensor, shared: bool | None = None) -> Any:  # (B, p) or (M, B, p) -> (M, B, q)
        """Computes the outputs of every member.

        Args:
            u: one batch for all members, or a batch for each with a leading member dimension.
            shared: which of the two; needed only for inputs that are not vectors, as the default takes
                ``(B, p)`` as shared and ``(M, B, p)`` as one batch for each.
        """
        if shared is None:
            shared = self._looks_shared(u)
        elif not shared and (u.dim() == 0 or u.shape[0] != len(self)):
            raise InputError(f"u must have one batch for each of {len(self)} members; received {tuple(u.shape)}")

        def call(state: dict[str, Tensor], u: Tensor) -> Any:
            return functional_call(self.stacked, state, (u,))

        in_dims = (0, None if shared else 0)
        return vmap(call, in_dims=in_dims, randomness="different")(_state(self.stacked), u)

    def member(self, index: int) -> nn.Module:
        """Returns one member as an ordinary module with parameters of its own."""
        state = self._state_of(index)
        return _with_state(self.stacked, lambda name: state[name].clone())

    def __len__(self) -> int:
        return len(self.seeds)

    @torch.no_grad()
    def project_(self) -> "Ensemble":
        """Calls `project_` of every member, e.g. after an optimiser step."""
        if not hasattr(self.stacked, "project_"):
            raise InputError(f"{type(self.stacked).__name__} has no project_(); leave it out for these members")
        target = _Projection(self.stacked)
        for index in range(len(self)):
            functional_call(target, {f"module.{k}": v for k, v in self._state_of(index).items()})
        return self

    def _looks_shared(self, u: Tensor) -> bool:
        if u.dim() == 2:
            return True
        if u.dim() == 3 and u.shape[0] == len(self):
            return False
        raise InputError(
            f"u must be (B, p), or (M, B, p) with M = {len(self)} members; received {tuple(u.shape)}. "
            "For other inputs say whether all members share them: shared=True or shared=False"
        )

    def _state_of(self, index: int) -> dict[str, Tensor]:
        """Returns views of one member's parameters and buffers."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"member {index} of an Ensemble of {len(self)}")
        return {name: value.detach()[index] for name, value in _state(self.stacked).items()}

    def extra_repr(self) -> str:
        return f"members={len(self)}"


class _Projection(nn.Module):
    """Makes `project_` callable by functional_call, which knows only forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> Any:
        return self.module.project_()  # type: ignore[operator]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _with_state(model: nn.Module, value: Callable[[str], Tensor]) -> nn.Module:
    """Copies a module with other tensors in place of its parameters and buffers; tied ones stay tied."""
    replaced: dict[int, Any] = {}
    for name, tensor in _state(model).items():
        new = value(name).detach()
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(model, replaced)


def _require_same(first: nn.Module, other: nn.Module, index: int) -> None:
    """Raises unless two modules differ in values of parameters and buffers only."""
    mine, yours = _description(first), _description(other)
    for attribute in [*mine, *yours]:
        if attribute not in mine or attribute not in yours or not _alike(mine[attribute], yours[attribute]):
            received = f"{mine.get(attribute, 'none')!r} and {yours.get(attribute, 'none')!r}"
            raise InputError(
                f"modules 0 and {index} of an Ensemble differ in {attribute!r}: {received}. Only the values of "
                "parameters and buffers may differ; make one Ensemble for each kind"
            )


def _description(model: nn.Module) -> dict[str, Any]:
    """Lists everything that defines a module, except the values of its parameters and buffers."""
    description: dict[str, Any] = {}
    for name, module in model.named_modules():
        description[name or "class"] = type(module)
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        description |= {f"{name}.{k}".lstrip("."): v for k, v in own.items()}
    for name, tensor in _state(model).items():
        description[f"{name} (shape, dtype, device)"] = (*tensor.shape, tensor.dtype, tensor.device)
        description[f"{name}.requires_grad"] = tensor.requires_grad
    return description


def _alike(a: Any, b: Any) -> bool:
    """Compares by content where a class defines no equality."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, type):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        mine, yours = [a.__code__, a.__defaults__, *cells[0]], [b.__code__, b.__defaults__, *cells[1]]
        return _alike(mine, yours)
    with contextlib.suppress(RuntimeError, ValueError):  # tensors inside have no single truth value
        if bool(a == b):
            return True
    return (
        hasattr(a, "__dict__")
        and hasattr(b, "__dict__")
        and _alike(a.__reduce_ex__(4)[1:3], b.__reduce_ex__(4)[1:3])
    )
