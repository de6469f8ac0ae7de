"""A question about a model: which functions of its outputs or states are to be bounded, over which inputs."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.convert import to_implicit
from wellposed.errors import InputError
from wellposed.forms import Dense, ImplicitForm, LowRank
from wellposed.forms.gains import require_finite_entries
from wellposed.models import ImplicitModel
from wellposed.robust.uncertainty import Uncertainty

T = TypeVar("T")


class MethodError(InputError):
    """A method does not apply to the form or set; the message says why and what does."""


@dataclass(frozen=True)
class Query:
    """Asks for bounds of ``combination @ y`` for every sample, or of all states.

    Args:
        combination: (B, k, q), or None for the states.
        deadline: `time.monotonic` after which nothing more is tightened.
        cache: what several methods need, by name; see `once`.
    """

    form: ImplicitForm
    set: Uncertainty
    combination: Tensor | None
    deadline: float = math.inf
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, name: str, make: "Callable[[Query], T]") -> "T":
        """Returns what `make` returned when it was first asked for under that name."""
        if name not in self.cache:
            self.cache[name] = make(self)
        found: T = self.cache[name]
        return found

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the bounds."""
        rows = self.form.sizes[0] if self.combination is None else self.combination.shape[1]
        return len(self.set), rows

    @cached_property
    def sample(self) -> Tensor:  # (R,)
        """The sample of every row of the combination, row after row."""
        return torch.arange(len(self.set), device=self.set.device).repeat_interleave(self.shape[1])


def to_form(model: ImplicitForm | nn.Module, input_shape: tuple[int, ...] | None) -> ImplicitForm:
    """Reads a model as a form; a network is converted for inputs of the given shape.

    The matrices of an `ImplicitModel` keep their gradients where gradients are recorded.

    Example:
        >>> to_form(ImplicitModel(3, 2, 5), None)
        ImplicitForm(5 states, 3 inputs, 2 outputs, relu)
    """
    if isinstance(model, ImplicitForm):
        return model
    if isinstance(model, ImplicitModel):
        return _live_form(model) if torch.is_grad_enabled() else model.form()
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an ImplicitForm, ImplicitModel or module; received {type(model).__name__}")
    if input_shape is None:
        raise InputError("a network is converted for inputs of one shape; give input_shape, without the batch")
    return to_implicit(model, input_shape)


def as_form(model: ImplicitForm | nn.Module, inputs: Uncertainty) -> ImplicitForm:
    """Reads a model as a form that fits a set: its number of inputs, its type and its device.

    Example:
        >>> from wellposed.robust import Box
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> as_form(network, Box(torch.zeros(1, 4), torch.ones(1, 4)))
        ImplicitForm(8 states, 4 inputs, 2 outputs, relu)
    """
    form = to_form(model, inputs.sample_shape)
    if inputs.center.shape[1] != form.sizes[1]:
        raise InputError(
            f"the form takes {form.sizes[1]} inputs {form.input_shape}; the set has {inputs.center.shape[1]} "
            f"{inputs.sample_shape}"
        )
    if (inputs.dtype, inputs.device) != (form.dtype, form.device):
        raise InputError(
            f"the set is {inputs.dtype} on {inputs.device} and the form {form.dtype} on {form.device}; "
            "convert one of them with .to()"
        )
    require_finite_entries(form)
    return form


def _live_form(model: ImplicitModel) -> ImplicitForm:
    factors = tuple(model.state.factors())
    A = Dense(factors[0]) if len(factors) == 1 else LowRank(*factors)
    return ImplicitForm(A, model.B, model.C, model.D, model.bias, model.activation)


def margins(q: int, target: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, q, q)
    """Builds the rows ``e_i - e_target``.

    Example:
        >>> margins(2, torch.tensor([1]), torch.zeros(1))
        tensor([[[ 1., -1.],
                 [ 0.,  0.]]])
    """
    unit = torch.eye(q, dtype=like.dtype, device=like.device)
    return unit - unit[target][:, None, :]


def check_target(target: Tensor, batch: int, q: int) -> Tensor:
    """Checks class labels.

    Example:
        >>> check_target(torch.tensor([1, 0]), 2, 3)
        tensor([1, 0])
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or tuple(target.shape) != (batch,):
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise InputError(f"target holds one class a sample, an integer tensor of shape ({batch},); received {got}")
    if batch and not bool(((target >= 0) & (target < q)).all()):
        raise InputError(
            f"the classes are 0 to {q - 1}; target reaches from {int(target.min())} to {int(target.max())}"
        )
    return target
