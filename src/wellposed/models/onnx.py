"""Export to ONNX, for runtimes that know nothing of fixed points."""

import copy
import os

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, require
from wellposed.models.atomic import written_whole
from wellposed.models.fixed_steps import fixed_steps


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor,
    *,
    steps: int,
    dynamic_batch: bool = True,
) -> float:
    """Writes a module with every equilibrium in it replaced by `steps` plain steps as one ONNX file.

    The graph has the input ``u`` and the output ``y`` (``h_n`` as well for an `ImplicitRNN`), and weights inside.

    Args:
        model: as in `fixed_steps`.
        path: the file to write.
        example: an input, batch-first with at least two samples. All of its other sizes are fixed by it.
        steps: evaluations of the map in every solve.
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
    if not isinstance(example, Tensor) or example.dim() < 2 or example.shape[0] < 2:
        received = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise InputError(f"example must be a batch of at least two inputs, (B, ...); received {received}")
    plain = fixed_steps(model, steps).eval()
    with torch.no_grad():
        exact, found = _parts(copy.deepcopy(model).eval()(example)), _parts(plain(example))
    names = ["y", "h_n"][: len(found)] if len(found) < 3 else [f"y{k}" for k in range(len(found))]
    shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
    program = torch.onnx.export(
        plain, (example,), input_names=["u"], output_names=names, dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    with written_whole(path) as place:
        program.save(os.fspath(place))
    return max(float((a - b).abs().max()) for a, b in zip(exact, found, strict=True))


def _parts(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
