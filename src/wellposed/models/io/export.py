"""Export for runtimes that know nothing of fixed points.

`fixed_steps` replaces every equilibrium by a known number of plain steps and nothing else; `export_onnx` writes
the result as an ONNX file.
"""

import contextlib
import copy
import io
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.atomic import atomic_write
from wellposed.equilibrium.maps import State
from wellposed.errors import InputError, positive_integer, require
from wellposed.forms.evaluation import Evaluation, LoopEquation
from wellposed.forms.form import ImplicitForm
from wellposed.models.deq import DEQ, split_injection
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN

FEWEST_STEPS, MOST_STEPS = 4, 1024  # of those that are tried where none are given


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keeps torch from printing programs and warnings while it traces; what it raises says enough."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def fixed_steps(model: nn.Module | ImplicitForm, steps: int) -> nn.Module:
    """Copies a module with every equilibrium in it replaced by `steps` plain steps of its map.

    The copy has no stopping rule, status or branch that depends on values, so that `torch.export.export` and
    ONNX see an ordinary feed-forward graph. Its weights are constants: the projections and parametrisations
    that keep a model well-posed are applied here. It is as exact as so many steps of Picard iteration are;
    compare it with the model on inputs of yours before it is shipped.

    Args:
        model: an `ImplicitModel`, `ImplicitRNN`, `DEQ`, a module that contains some, or an `ImplicitForm`.
        steps: evaluations of the map in every solve.

    Example:
        >>> model = ImplicitModel(3, 2, 8)
        >>> program = torch.export.export(fixed_steps(model, 30), (torch.zeros(5, 3),))
        >>> program.module()(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    steps = positive_integer("steps", steps)
    if isinstance(model, ImplicitForm):
        return _FixedForm(model, steps)
    copied = copy.deepcopy(model).eval()
    _settle_weights(copied)
    plain = _replaced(copied, steps)
    if not any(isinstance(part, FixedStep) for part in plain.modules()):
        raise InputError(
            f"{type(model).__name__} contains no ImplicitModel, ImplicitRNN or DEQ; export it as it is"
        )
    return plain.requires_grad_(False)


def _choose_steps(model: nn.Module | ImplicitForm, example: Tensor) -> int:
    """Doubles the steps until the outputs agree as far as half of the digits, or change no more."""
    exact = _outputs(model, example)
    scale = max(float(part.abs().max()) for part in exact)
    wanted = math.sqrt(torch.finfo(example.dtype).eps) * max(scale, torch.finfo(example.dtype).tiny)
    steps = FEWEST_STEPS
    while steps < MOST_STEPS and _distance(exact, _outputs(fixed_steps(model, steps), example)) > wanted / 10:
        steps *= 2
    return steps


def _settle_weights(module: nn.Module) -> None:
    """Replaces parametrised weights (weight norm, spectral norm) by the values they stand for."""
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer):
            values = {name: getattr(layer, name).detach() for name in layer.parametrizations}  # type: ignore[union-attr]
            # remove_parametrizations would change the class, which a copy shares with its original
            layer.__class__ = type(layer).__bases__[0]
            del layer.parametrizations
            for name, value in values.items():
                layer.register_parameter(name, nn.Parameter(value))


def _replaced(module: nn.Module, steps: int) -> nn.Module:
    for kind, form in FORMS.items():
        if isinstance(module, kind):
            return form(module, steps)
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child, steps))
    return module


class FixedStep(nn.Module):
    """Marks the fixed-step forms."""


class _FixedImplicit(FixedStep):
    """``x <- (1 - d) x + d phi(Ax + Bu + b)`` from zero, then ``y = Cx + Du``."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    bias: Tensor | None

    @torch.no_grad()
    def __init__(self, model: ImplicitModel, steps: int) -> None:
        super().__init__()
        system = model.state.system()
        if system.splitting is not None:
            raise InputError(
                "condition 'monotone' is solved by operator splitting, which plain steps are not; use one of the "
                "conditions 'inf', 'weighted', 'mu' or 'spectral' in a model to export"
            )
        self.steps, self.damping, self.activation = steps, system.damping, model.activation
        factors, bias = system.factors, model.bias
        scale = torch.ones_like(model.B[:1, :1]) if system.scale is None else system.scale.reshape(-1, 1)
        matrices: dict[str, Tensor | None] = {
            "A": factors[0] if len(factors) == 1 else factors[0] @ factors[1].mT,
            "B": scale * model.B,
            "C": model.C,
            "D": model.D,
            "bias": None if bias is None else scale[:, 0] * bias,
        }
        for name, value in matrices.items():
            self.register_buffer(name, None if value is None else value.detach().clone())

    def states(self, v: Tensor, x: Tensor | None = None) -> Tensor:
        """Iterates from `x`."""
        x = torch.zeros_like(v) if x is None else x
        for _ in range(self.steps):
            image = self.activation.function(F.linear(x, self.A) + v)
            x = image if self.damping == 1 else torch.lerp(x, image, self.damping)
        return x

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        y = F.linear(self.states(F.linear(u, self.B, self.bias)), self.C)
        return y if self.D is None else y + F.linear(u, self.D)


class _FixedDEQ(FixedStep):
    """``x <- cell(x, u)`` from zero or `x0`."""

    def __init__(self, model: DEQ, steps: int) -> None:
        super().__init__()
        self.steps, self.start, self.cell = steps, model.start, model.cell

    def forward(self, u: State, x0: State | None = None) -> State:
        x = self.start(u) if x0 is None else x0
        step, given = split_injection(self.cell, u)
        for _ in range(self.steps):
            x = step(x, given)
        return x


class _FixedRecurrent(FixedStep):
    """Runs the cells over padded sequences of one length."""

    def __init__(self, model: ImplicitRNN, steps: int) -> None:
        super().__init__()
        self.batch_first, self.directions, self.warm_start = model.batch_first, model.directions, model.warm_start
        self.cells = nn.ModuleList(_FixedImplicit(model.cell(k), steps) for k in range(len(model.cells)))
        self.hidden_size, self.readout = model.hidden_size, model.readout

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        data = input.transpose(0, 1) if self.batch_first else input
        if h0 is None:
            h0 = torch.zeros(
                len(self.cells), data.shape[1], self.hidden_size, dtype=data.dtype, device=data.device
            )
        last = []
        for first in range(0, len(self.cells), self.directions):
            outputs = [self._walk(k, data, h0[k]) for k in range(first, first + self.directions)]
            last += [output[0 if k % self.directions else -1] for k, output in enumerate(outputs)]
            data = torch.cat(outputs, -1)
        y = data if self.readout is None else self.readout(data)
        return y.transpose(0, 1) if self.batch_first else y, torch.stack(last)

    def _walk(self, index: int, data: Tensor, h: Tensor) -> Tensor:  # (T, B, h)
        cell: _FixedImplicit = self.cells[index]  # type: ignore[assignment]
        backwards, outputs, x = index % self.directions == 1, [], None
        for s in reversed(data.unbind()) if backwards else data.unbind():
            u = torch.cat([s, h], -1)
            x = cell.states(F.linear(u, cell.B, cell.bias), x if self.warm_start else None)
            h = F.linear(x, cell.C)
            h = h if cell.D is None else h + F.linear(u, cell.D)
            outputs.append(h)
        return torch.stack(outputs[::-1] if backwards else outputs)


@dataclass
class _FixedEvaluation(Evaluation):
    """Takes a fixed number of steps in every loop, without reading values."""

    steps: int = 1

    def _close(self, loop: LoopEquation, blocks: tuple[int, ...]) -> None:
        driven = torch.cat([self._driven(k, blocks) for k in blocks], dim=1)
        step, v = loop.iteration(driven)
        x = torch.zeros_like(v)
        for _ in range(self.steps):
            x = step(x, v)
        sizes = [self.order.A.heights[k] for k in blocks]
        for k, piece in zip(blocks, x.split(sizes, dim=1), strict=True):
            self.states[k] = piece


class _FixedForm(FixedStep):
    """The blocks of a form in their order, with so many steps in every loop."""

    def __init__(self, form: ImplicitForm, steps: int) -> None:
        super().__init__()
        self.form, self.steps = form, steps

    def forward(self, u: Tensor) -> Tensor:  # (B, *input_shape) -> (B, q)
        return self.form.evaluated(u, partial(_FixedEvaluation, steps=self.steps))


FORMS: dict[type[nn.Module], type] = {ImplicitModel: _FixedImplicit, ImplicitRNN: _FixedRecurrent, DEQ: _FixedDEQ}


def export_onnx(
    model: nn.Module | ImplicitForm,
    path: str | os.PathLike[str],
    example: Tensor | None = None,
    *,
    steps: int | None = None,
    dynamic_batch: bool = True,
) -> float:
    """Writes a module with every equilibrium in it replaced by `steps` plain steps as one ONNX file.

    The graph has the input ``u`` and the output ``y`` (``h_n`` as well for an `ImplicitRNN`), and weights inside.

    Args:
        model: as in `fixed_steps`.
        path: the file to write.
        example: an input, batch-first with at least two samples. All of its other sizes are fixed by it. One is
            drawn for an `ImplicitForm` or an `ImplicitModel` if None.
        steps: evaluations of the map in every solve; None doubles them until the outputs on `example` agree to
            half of their digits.
        dynamic_batch: whether the file takes batches of any size.

    Returns:
        the largest difference between the outputs of `steps` steps and those of the model on `example`. Choose the
        steps by it.

    Example:
        >>> from wellposed.models.implicit import ImplicitModel
        >>> export_onnx(ImplicitModel(3, 2, 8), "model.onnx", torch.randn(4, 3), steps=50)  # doctest: +SKIP
        1.1920928955078125e-07
    """
    require("onnx", extra="share")
    require("onnxscript", extra="share")
    example = _drawn(model) if example is None else example
    if not isinstance(example, Tensor) or example.dim() < 2 or example.shape[0] < 2:
        received = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise InputError(f"example must be a batch of at least two inputs, (B, ...); received {received}")
    plain = fixed_steps(model, _choose_steps(model, example) if steps is None else steps).eval()
    exact, approximate = _outputs(model, example), _outputs(plain, example)
    names = (
        ["y", "h_n"][: len(approximate)] if len(approximate) < 3 else [f"y{k}" for k in range(len(approximate))]
    )
    shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
    program = _program(plain, example, input_names=["u"], output_names=names, dynamic_shapes=shapes)
    if dynamic_batch and isinstance(program.model.graph.inputs[0].shape[0], int):
        raise InputError(
            f"torch.onnx has fixed the batch size of {type(model).__name__} at {len(example)}; pass "
            "dynamic_batch=False and an example with as many samples as the file is to take"
        )
    with atomic_write(path) as temporary:
        program.save(os.fspath(temporary))
    return _distance(exact, approximate)


def _drawn(model: nn.Module | ImplicitForm) -> Tensor:
    """Draws two inputs for a model that knows their shape."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, ImplicitForm):
        return torch.randn(2, *model.input_shape, generator=generator).to(model.device, model.dtype)
    if isinstance(model, ImplicitModel):
        return torch.randn(2, model.in_features, generator=generator).to(model.B)
    raise InputError(f"the inputs of {type(model).__name__} can have many shapes; give an example, (B, ...)")


@torch.no_grad()
def _outputs(model: nn.Module | ImplicitForm, example: Tensor) -> tuple[Tensor, ...]:
    outputs = (model if isinstance(model, ImplicitForm) else copy.deepcopy(model).eval())(example)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _distance(exact: tuple[Tensor, ...], approximate: tuple[Tensor, ...]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(exact, approximate, strict=True))


def _program(plain: nn.Module, example: Tensor, **names: Any) -> Any:
    try:
        with silenced():
            return torch.onnx.export(plain, (example,), **names, dynamo=True, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise InputError(
            f"torch.onnx cannot export {type(plain).__name__}: {reason}; its control flow may depend on data"
        ) from error
