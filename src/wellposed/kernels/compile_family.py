"""The process that compiles kernels for another one, which `kernels.cpu.background` starts."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from wellposed.activations import get_activation
from wellposed.atomic import atomic_write
from wellposed.equilibrium.affine import AffineSolve, AffineSpec, affine_equilibrium
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.method import Solve, SolveOptions
from wellposed.equilibrium.solvers import Anderson
from wellposed.equilibrium.stopping import Relative
from wellposed.errors import require
from wellposed.kernels.cpu.background import BUSY, MODEL, SEQUENCE, marker_of
from wellposed.kernels.engine import NUMBA
from wellposed.kernels.layer import run_layer
from wellposed.kernels.sequence import run_sequences
from wellposed.kernels.spec import CellMatrices, SequenceSpec

if sys.platform != "win32":
    import fcntl


def compile_family(name: str, dtype: str, memory: int) -> None:
    """Compiles a family of kernels into numba's cache and leaves its marker.

    Args:
        name: of `kernels.cpu.background`, or a module that has kernels of its own and a function `use_kernels`.
        dtype: "float32" or "float64".
        memory: of Anderson's method.
    """
    threading.Thread(target=end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    marker = marker_of((name, dtype, memory))
    if marker is None:
        raise SystemExit(1)
    with held(marker.parent) as alone:
        if not alone:
            raise SystemExit(BUSY)
        if not marker.exists():
            use_kernels(name, getattr(torch, dtype), memory)
            with atomic_write(marker) as temporary:
                temporary.touch()


def end_with_parent(stream: IO[bytes]) -> None:
    """Ends this process when its parent has gone and no longer holds its end of the pipe."""
    stream.read()
    os._exit(1)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Locks a folder; tells whether nobody else has. Without such locks, kernels may be compiled twice."""
    if sys.platform == "win32":
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def use_kernels(name: str, dtype: torch.dtype, memory: int) -> None:
    """Solves small equations for which all kernels of a family are compiled."""
    if name not in (MODEL, SEQUENCE):
        require(name).use_kernels()
        return
    solver = Anderson(memory=memory)
    options = SolveOptions(solver, Relative(), 100, "ignore")
    spec = AffineSpec(get_activation("relu"), options, Implicit(solver=solver), executor=NUMBA.name)
    shapes = (5, 4), (3, 3), (3, 4), (2, 3), (2, 4), (3,)
    u, W, B, C, D, bias = (torch.rand(shape, dtype=dtype).requires_grad_() for shape in shapes)
    if name == MODEL:
        A, levels = NUMBA.project_rows(W, 0.9)
        NUMBA.project_rows_backward(W, levels, A)
        NUMBA.accepts(spec, A, A)
        NUMBA.norm(A)
        run_layer(NUMBA, spec, 0.9, u, W, B, C, D, bias).sum().backward()
        v = torch.rand(5, 3, dtype=dtype).requires_grad_()
        solve = AffineSolve(spec, NUMBA, Solve(options), trace=False)
        affine_equilibrium(solve, v, torch.zeros_like(v), v.detach(), A)[0].sum().backward()
        return
    cell, h0 = CellMatrices(W, B, C, D, bias), torch.zeros(5, 2, dtype=dtype)
    sequences = SequenceSpec(spec, NUMBA, Solve(options), (5, 5), radius=0.9)
    run_sequences(sequences, torch.rand(10, 2, dtype=dtype), h0, cell).hidden.sum().backward()
