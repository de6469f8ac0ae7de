"""A whole model ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as one node of the graph.

What torch does around a solve (a node for every product, a report for every solve) costs more than it takes to
solve a hundred samples of twenty states. Here the forward and the backward pass are one function each, for every
engine. Everything but first derivatives takes the general path, through `affine_equilibrium`.

On a device the forward pass is five launches, the backward pass about eight, whatever the number of steps; the
row-wise projection of A is part of the node. Where they take the host longer than the device, a batch size that
returns is captured: then each pass is one CUDA graph, between a copy in and a copy out.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineSolve, AffineSpec, affine_equilibrium
from wellposed.equilibrium.method import Solve
from wellposed.errors import WellposedError
from wellposed.kernels.cpu.engine import Matrix, Numba, multiply_sparse
from wellposed.kernels.gpu.engine import RESIDENT, ReplayedFlag, Triton
from wellposed.kernels.graphs import capture
from wellposed.kernels.sparse import SparseRows

Optional = Tensor | None
How = tuple[Any, AffineSpec, float | None]  # engine, spec and radius, as in `run_layer`


def run_layer(
    engine: Triton | Numba, spec: AffineSpec, radius: float | None, u: Tensor, W: Matrix, B: Matrix, C: Matrix,
    D: Matrix | None, bias: Optional,
) -> Tensor:  # fmt: skip
    """Computes the outputs ``(B, q)`` of a model.

    Args:
        engine: that has a kernel for the equation.
        spec: how it is solved.
        radius: of the l1 ball on which the rows of W are projected; None where W is A.
        u: inputs ``(B, p)``.
        W, B, C, D: matrices; where nothing is differentiated, an engine may take sparse ones.
        bias: ``(n,)``.
    """
    if torch.is_grad_enabled():
        output: Tensor = _Layer.apply((engine, spec, radius), u, W, B, C, D, bias)
        return output
    return _forward(engine, spec, radius, (u, W, B, C, D, bias), saves=False)[0]


def _forward(
    engine: Triton | Numba, spec: AffineSpec, radius: float | None, tensors: Sequence[Any], *, saves: bool
) -> tuple[Tensor, ...]:
    """Returns outputs and what the backward pass needs: one buffer, or the states and what the engine saved."""
    if isinstance(engine, Numba) and radius is not None and engine.fuses(tensors):
        return engine.forward_layer(spec, radius, tensors)
    u, W, B, C, D, bias = tensors
    with engine.threads(_work(u, B, C)):
        solve = engine.begin(spec, radius, W, _product(u, B, bias), saves=saves)
        x = solve.value
        y = _product(x, C, None)
        if D is not None:
            y = y + _product(u, D, None) if isinstance(D, SparseRows) else torch.addmm(y, u, D.t())
    solve.check(u, y)
    return y, x, *solve.saved


def _work(u: Tensor, B: Matrix, C: Matrix) -> int:
    """Counts the multiplications of a step and of the products around the solve."""
    states, inputs = B.shape
    return u.shape[0] * (states + inputs) * (states + C.shape[0])


def _product(u: Tensor, W: Matrix, bias: Optional) -> Tensor:
    return multiply_sparse(u, W, bias) if isinstance(W, SparseRows) else F.linear(u, W, bias)


class _Layer(torch.autograd.Function):
    """The outputs of a model; with slopes d the backward pass is ``y = d (A'y + C'g)`` between two products."""

    @staticmethod
    def forward(ctx: Any, how: How, *tensors: Any) -> Tensor:
        ctx.lease = lease = _lease(how, tensors, ctx.needs_input_grad[1:])
        y = None if lease is None else lease.layer.forward(tensors[0])
        if lease is None or y is None:
            ctx.lease, (y, *saved) = None, _forward(*how, tensors, saves=True)
        else:
            saved = lease.layer.saved
        ctx.how = how
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,), needs = gradients, ctx.needs_input_grad[1:]
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        (engine, spec, radius), stored = ctx.how, ctx.saved_tensors
        tensors, saved = stored[:6], stored[6:]
        if torch.is_grad_enabled():
            return None, *_differentiable(engine, spec, radius, tensors, g, needs)
        if len(saved) == 1:
            return None, *engine.backward_layer(spec, radius, tensors, saved[0], g, needs)
        replayed = None if ctx.lease is None else ctx.lease.layer.backward(g)
        if replayed is not None:
            return None, *replayed
        with engine.threads(_work(tensors[0], *tensors[2:4])):
            return None, *_backward(engine, spec, radius, tensors, saved, g, needs)


def _backward(
    engine: Any, spec: AffineSpec, radius: float | None, tensors: Any, saved: Any, g: Tensor, needs: Sequence[bool]
) -> list[Optional]:
    """Returns the gradients by u, W, B, C, D and the bias, as far as they are needed."""
    (u, W, B, C, D, _), (x, *own) = tensors, saved  # what the engine itself has saved
    du, dW, dB, dC, dD, db = needs
    mm, gT = torch.mm, g.t()  # `@` has overhead as long as a launch
    solve = engine.begin_adjoint(spec, own, x, mm(g, C)) if du or dW or dB or db else None
    by_C, by_D = mm(gT, x) if dC else None, mm(gT, u) if dD else None
    if solve is None:
        return [None, None, None, by_C, by_D, None]
    y = solve.value
    yT = y.t()
    by_W, by_B, by_bias = mm(yT, x) if dW else None, mm(yT, u) if dB else None, y.sum(0) if db else None
    if by_W is not None and radius is not None:
        by_W = engine.project_rows_backward(W, own[1], by_W)
    by_u = None if not du else mm(y, B) if D is None else torch.addmm(mm(g, D), y, B)
    solve.check()
    return [by_u, by_W, by_B, by_C, by_D, by_bias]


def _differentiable(
    engine: Any, spec: AffineSpec, radius: float | None, tensors: Any, g: Tensor, needs: Sequence[bool]
) -> list[Optional]:
    """Computes gradients that can be differentiated, by solving once more."""
    u, W, B, C, D, bias = tensors
    v, A = F.linear(u, B, bias), W if radius is None else project_rows(W, radius)
    run = AffineSolve(spec, engine, Solve(spec.forward), trace=False)
    x = affine_equilibrium(run, v, torch.zeros_like(v), v.detach(), A)[0]
    y = F.linear(x, C) if D is None else F.linear(x, C) + F.linear(u, D)
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    gradients = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(gradients) if need else None for need in needs]


SMALL = 1 << 20  # numbers in the states or inputs of a batch, up to which launching takes longer than computing
EAGER = 2  # calls of a kind before it is captured
RETRY = 1000  # calls after a capture that failed, before the next attempt
KINDS = 4  # of calls that have graphs, the most recently used
LAYERS = 3  # of a kind: a training loop may hold the node of the last batch while the next is computed


class CapturedLayer:
    """Both passes of a model for one batch size, each as a CUDA graph over buffers of fixed addresses.

        u -> [copy] -> v = Bu + b, A, x, phi'(x), y, check -> [copy] -> y
        g -> [copy] -> adjoint, products with x and u      -> [copy] -> gradients

    Between the passes the buffers belong to one node of the graph of torch, which holds a lease. Parameters are
    read at their addresses. A replay in which a sample fails is computed again without a graph, which reports it.

    Attributes:
        saved: what the backward pass needs besides inputs and parameters.
        lease: of the node that uses the buffers, as long as it exists.
    """

    def __init__(self, how: How, tensors: Sequence[Any], needs: Sequence[bool]) -> None:
        (_, spec, radius), u = how, tensors[0]
        self.flag = None if spec.forward.on_failure == "ignore" else ReplayedFlag(u.device)
        self.how, self.needs = (Triton(self.flag), spec, radius), needs
        self.u = u.detach().clone(memory_format=torch.contiguous_format)
        self.tensors = (self.u, *(None if tensor is None else tensor.detach() for tensor in tensors[1:]))
        self.lease: weakref.ref[Lease] = weakref.ref(Lease(self))
        stream, pool = torch.cuda.Stream(u.device), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiled kernels and workspaces must exist before a capture
            self._compute()
            self.g = torch.zeros_like(self.y)
            self._differentiate()
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs = [capture(run, stream, pool) for run in (self._compute, self._differentiate)]

    def _compute(self) -> None:
        self.y, *self.saved = _forward(*self.how, self.tensors, saves=True)

    def _differentiate(self) -> None:
        gradients = _backward(*self.how, self.tensors, self.saved, self.g, self.needs)
        self.gradients = [gradient for gradient in gradients if gradient is not None]

    def forward(self, u: Tensor) -> Optional:
        """Returns the outputs of other inputs; None if a sample has failed."""
        self.u.copy_(u)
        self.graphs[0].replay()
        y = self.y.clone()
        return None if self.flag is not None and self.flag.wait() else y

    def backward(self, g: Tensor) -> list[Optional] | None:
        """Returns the gradients of the latest forward pass; None if a sample has failed or inside a capture."""
        if torch.cuda.is_current_stream_capturing():
            return None
        self.g.copy_(g)
        self.graphs[1].replay()
        gradients = iter(torch._foreach_mul(self.gradients, 1.0))  # copies all of them by one launch
        if self.flag is not None and self.flag.wait():
            return None
        return [next(gradients) if need else None for need in self.needs]


@dataclass(frozen=True, eq=False)
class Lease:
    """Keeps the buffers of a captured layer from being used for another pass, as long as it exists."""

    layer: CapturedLayer


class _Captures:
    """The captured layers of a spec by kind of call, and how often a kind was called. Copies are empty."""

    def __init__(self) -> None:
        self.counts: OrderedDict[Hashable, int] = OrderedDict()
        self.layers: OrderedDict[Hashable, list[CapturedLayer]] = OrderedDict()
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def lease(self, key: Hashable, how: How, tensors: Sequence[Any], needs: Sequence[bool]) -> Lease | None:
        """Leases a captured layer for a call; None if the kind is new or all its layers are in use."""
        with self.lock:
            count = self.counts[key] = self.counts.pop(key, 0) + 1
            if len(self.counts) > 16 * KINDS:
                self.counts.popitem(last=False)
            if count <= EAGER:
                return None
            layers = self.layers.setdefault(key, [])
            self.layers.move_to_end(key)
            if len(self.layers) > KINDS:
                self.counts.pop(self.layers.popitem(last=False)[0], None)
            layer = next((layer for layer in layers if layer.lease() is None), None)
            if layer is None and len(layers) < LAYERS:
                try:
                    layer = CapturedLayer(how, tensors, needs)
                except WellposedError:  # a sample has failed
                    raise
                except RuntimeError:  # too little memory, or something that another thread does
                    self.counts[key] = -RETRY
                    return None
                layers.append(layer)
            if layer is None:
                return None
            lease = Lease(layer)
            layer.lease = weakref.ref(lease)
            return lease


def _lease(how: How, tensors: Sequence[Any], needs: Sequence[bool]) -> Lease | None:
    """Leases a captured layer for a call, where its launches take longer than its work and nothing forbids it."""
    (engine, spec, radius), (u, _, B, *_) = how, tensors
    if not isinstance(engine, Triton) or not u.is_cuda or not any(needs) or len(u) == 0:
        return None
    states, inputs = B.shape
    if states > RESIDENT[u.element_size()] or len(u) * max(states, inputs) > SMALL:
        return None
    if torch.cuda.is_current_stream_capturing() or u.device.index != torch.cuda.current_device():
        return None
    parameters = tuple(None if one is None else (one.data_ptr(), one.shape, one.stride()) for one in tensors[1:])
    precision = torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()
    stream = torch.cuda.current_stream().cuda_stream
    key = radius, u.shape, u.dtype, parameters, needs, precision, stream
    captures: _Captures = spec.prepared.setdefault("captures", _Captures())
    return captures.lease(key, how, tensors, needs)
