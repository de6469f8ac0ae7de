"""Calls of Triton kernels for which Triton prepares nothing.

A call through Triton looks at the type and alignment of every argument, at all global constants and at settings,
which takes longer than a small solve. Here that happens once for every kind of call; later ones hand numbers and
addresses straight to the compiled kernel.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # bytes, on which compiled kernels rely


@functools.cache
def _compiled() -> dict[Hashable, Any]:
    """Returns the kernels that were compiled so far, by the kind of call."""
    return {}


def call(
    kernel: Any, blocks: int, kind: Hashable, tensors: Sequence[Tensor], numbers: Sequence[Any],
    constants: dict[str, Any], options: dict[str, int], flag: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches a kernel.

    Args:
        kernel: whose parameters are the flag if there is one, the tensors, the numbers and the constants.
        blocks: of the grid.
        kind: everything but addresses and unspecialised numbers on which the compiled kernel depends.
        tensors: on the current device.
        numbers: integers and floats.
        constants: by name, in the order of the parameters.
        options: of the compiler.
        flag: a tensor that may lie in the memory of the host.
    """
    pointers = [tensor.data_ptr() for tensor in tensors]
    first = () if flag is None else (flag,)
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
        return
    key = kernel, index, kind
    known = _compiled().get(key)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        known[(blocks, 1, 1)](*first, *pointers, *numbers, *constants.values())
        return
    known = kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        _compiled()[key] = known
