"""ImplicitForm: the matrices of an implicit model, evaluating themselves."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.bounds import AffineBound
from wellposed.equilibrium.certificate import Certificate
from wellposed.equilibrium.conditions import certify, get_condition
from wellposed.equilibrium.fixed_point import fixed_point, require_finite
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.rescaling import apply_rescaling, rescaling
from wellposed.equilibrium.rounding import double, reciprocal_gap, upward
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.stopping import Settled
from wellposed.errors import InputError, MissingExtraError
from wellposed.forms.operators import Dense, Operator, Zero, as_operator

MODEL_BUILDERS: list[Callable[["ImplicitForm"], Any]] = []  # filled by wellposed.models


class ImplicitForm:
    """The prediction rule ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` (003 eq. 2.1) with operators as blocks.

    Args:
        A, B, C, D: operators or tensors, dense or sparse; D None is zero.
        bias: b, zero if None.
        activation: phi, by name or object.
        input_shape: the shape of one input; ``(p,)`` if None.

    Example:
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.ones(1, 2))
        >>> form(torch.tensor([[1.0, -3.0]]))
        tensor([[1.]])
    """

    def __init__(
        self,
        A: Operator | Tensor,
        B: Operator | Tensor,
        C: Operator | Tensor,
        D: Operator | Tensor | None = None,
        bias: Tensor | None = None,
        activation: Activation | str = "relu",
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.A, self.B, self.C = as_operator(A), as_operator(B), as_operator(C)
        n, p, q = self.sizes
        self.D = Zero((q, p), self.A.dtype, self.A.device) if D is None else as_operator(D)
        self.bias, self.activation = bias, get_activation(activation)
        self.input_shape = (p,) if input_shape is None else tuple(input_shape)
        for name, shape in {"A": (n, n), "B": (n, p), "C": (q, n), "D": (q, p)}.items():
            if (received := getattr(self, name).shape) != shape:
                raise InputError(f"{name} must have the shape {shape} to fit; received {received}")
        if bias is not None and tuple(bias.shape) != (n,):
            raise InputError(f"bias must have the shape {(n,)}; received {tuple(bias.shape)}")
        if math.prod(self.input_shape) != p:
            raise InputError(f"input_shape {self.input_shape} has not the {p} entries that B takes")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers n of states, p of inputs and q of outputs."""
        return self.A.shape[0], self.B.shape[1], self.C.shape[0]

    def __repr__(self) -> str:
        n, p, q = self.sizes
        return f"ImplicitForm({n} states, {p} inputs, {q} outputs, {self.activation.name})"

    def __call__(self, u: Tensor) -> Tensor:  # (B, *input_shape) or (B, p) -> (B, q)
        """Evaluates the rule."""
        flat = self._flat(u)
        x = self._solve(flat, {}).value
        assert isinstance(x, Tensor)
        return (self.C @ x) + (self.D @ flat)

    def equilibrium(self, u: Tensor, **options: Any) -> Solution:
        """Computes the states and tells how they were reached; `options` are those of `fixed_point`."""
        flat = self._flat(u)
        solution = self._solve(flat, options)
        assert isinstance(solution.value, Tensor)
        x, inputs = solution.value.detach(), flat.detach()
        return replace(solution, bound=lambda: self._bound(x, inputs))

    def certificate(self) -> Certificate:
        """Proves that every input has exactly one equilibrium, or raises `IllPosedError`."""
        return self._certified

    @cached_property
    def _feedforward(self) -> bool:
        return self.activation.componentwise and self.A.is_strictly_triangular()

    @cached_property
    def _certified(self) -> Certificate:
        if self.activation.componentwise:
            sums = upward(double(self.A.abs().row_sums()), self.A.shape[1])
            rounding = 1 + 2 * self.A.shape[1] * torch.finfo(self.A.dtype).eps
            value = float(sums.max()) * rounding * self.activation.lipschitz()
            if value < 1:
                return Certificate.of("inf", value, gain=reciprocal_gap(value))
            if self._feedforward:
                return get_condition("triangular").certify(self.A.to_dense(), self.activation)
        return certify(self.A.to_dense(), self.activation)

    def _offset(self, flat: Tensor) -> Tensor:  # (B, n)
        v = self.B @ flat
        return v if self.bias is None else v + self.bias

    def _solve(self, flat: Tensor, options: dict[str, Any]) -> Solution:
        A, v, damping = self.A, self._offset(flat), 1.0
        condition = get_condition(self._certified.condition)
        if condition.name in ("mu", "monotone", "triangular"):
            system = condition.equivalent(A.to_dense(), self.activation)
            A, v, damping = Dense(system.A), v * system.scale, system.damping
        if self._feedforward:
            options = {"solver": Picard(), "stop": Settled(A.shape[0]), **options}
        phi = self.activation.function

        def f(x: Tensor, offset: Tensor) -> Tensor:
            image = phi((A @ x) + offset)
            return image if damping == 1 else torch.lerp(x, image, damping)

        start = options.pop("x0", None)
        return fixed_point(f, torch.zeros_like(v) if start is None else start, v, **options)

    def _bound(self, x: Tensor, u: Tensor) -> Tensor:
        size = self.B.abs() @ u.abs()
        if self.bias is not None:
            size = size + self.bias.abs()
        n, p, _ = self.sizes
        bound = AffineBound(self._certified, self.A.to_dense(), self.activation, n + p + 2)
        return bound(x, torch.cat([self._offset(u), size], dim=1).detach())

    def _flat(self, u: Tensor) -> Tensor:
        _, p, _ = self.sizes
        if u.dim() == 0 or tuple(u.shape[1:]) not in ((p,), self.input_shape):
            raise InputError(
                f"u must have the shape (batch, {p}) or (batch, *{self.input_shape}); received {tuple(u.shape)}"
            )
        if u.dtype != self.A.dtype:
            raise InputError(f"u is {u.dtype} and the form {self.A.dtype}; convert one of them")
        require_finite("u", u)
        return u.reshape(u.shape[0], p)

    def to_dense(self) -> "ImplicitForm":
        """Forms all blocks."""
        A, B, C, D = (block.to_dense() for block in (self.A, self.B, self.C, self.D))
        return ImplicitForm(A, B, C, D, self.bias, self.activation, self.input_shape)

    def rescale(self, kappa: float) -> "ImplicitForm":
        """Changes the units of the states so that ``|A|_inf < kappa``; outputs stay the same."""
        A, B, C = (block.to_dense() for block in (self.A, self.B, self.C))
        scale = rescaling(A, kappa, blocks=self.activation.block)
        new = apply_rescaling(A, B, C, self.bias, scale, self.activation)
        return ImplicitForm(new.A, new.B, new.C, self.D, new.bias, new.activation, self.input_shape)

    def to_model(self) -> Any:
        """Returns an `ImplicitModel` with these matrices, to go on training."""
        if not MODEL_BUILDERS:
            raise MissingExtraError("import wellposed.models before calling to_model()")
        return MODEL_BUILDERS[-1](self)
