"""to_implicit: a network as an implicit model.

The graph of a network comes from torch.fx where its code can be traced, and from torch.export elsewhere.
`has_hazard` looks for in-place operations, which are harmless unless something older that shares the memory is
read afterwards. `for_one_sample` reads programs that were exported for a fixed number of samples as programs for
one. `Converter` runs the graph on signals, and `to_implicit`, an instance of `Conversion`, builds the form.
"""

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from wellposed.convert.signal import RULES, FunctionRule, ModuleRule, Network, Signal, UnsupportedError, signals_in
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.forms.operators.base import exact_algebra, tensors
from wellposed.models.io.export import silenced
from wellposed.models.norms import VariationalDropout

_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow
}  # fmt: skip
_VIEWS = {
    "alias", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem", "movedim",
    "narrow", "permute", "ravel", "reshape", "select", "slice", "split", "squeeze", "swapaxes", "t", "to",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "Identity", "Dropout", "Flatten",
    "getattr", "dropout",
}  # fmt: skip


def has_hazard(graph: fx.Graph, root: nn.Module) -> bool:
    """Returns whether some value is read after it was changed in place, through itself or through a view.

    Example:
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         return y + torch.relu_(y)
        >>> has_hazard(fx.Tracer().trace(network := Network()), network)
        True
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    return any(
        order[user] > order[changing]
        for changing in order
        if _in_place(root, changing)
        for alias in _aliases(root, changing)
        if order[alias] < order[changing]
        for user in alias.users
    )


def _name(root: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return str(getattr(target, "__name__", target))


def _in_place(root: nn.Module, node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr") or not node.args:
        return False
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = _name(root, node)
    named = name.endswith("_") and not name.endswith("__")
    return named or node.target in _ASSIGNMENTS or bool(node.kwargs.get("inplace", False))


def _aliases(root: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    """Lists the nodes that may share memory with what a node changes."""
    start = node.args[0]
    while isinstance(start, fx.Node) and _passes(root, start):
        start = start.args[0]
    waiting = [start] if isinstance(start, fx.Node) else []
    while waiting:
        alias = waiting.pop()
        yield alias
        waiting += [user for user in alias.users if user.args and user.args[0] is alias and _passes(root, user)]


def _passes(root: nn.Module, node: fx.Node) -> bool:
    """Returns whether a node may return the memory of its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return _in_place(root, node) or _name(root, node) in _VIEWS


_RESHAPING = ("view", "reshape", "_unsafe_view", "expand", "view_copy")
_MEETING = {
    "add", "sub", "rsub", "mul", "div", "where", "maximum", "minimum", "masked_fill", "lerp", "addcmul", "cat",
    "stack", "hstack", "matmul", "bmm", "baddbmm", "slice_scatter", "select_scatter", "copy", "gather",
}  # fmt: skip


def for_one_sample(node: fx.Node, args: tuple, batch: int) -> tuple:
    """Changes the arguments of a node, written for a batch, to what they are for one sample.

    Sizes are those of the batch where the graph was recorded, so which dimension holds the samples is known from
    the recorded shape of the signal and its shape now.
    """
    recorded = _recorded(node.args[0])
    signal = args[0] if args else None
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in _RESHAPING and isinstance(signal, Signal) and recorded is not None:
        own = _recorded(node)
        dim = _held(recorded, signal.shape, batch)
        if own is None or dim is None:
            return args
        wanted = _expanded if name == "expand" else _reshaped
        return (signal, wanted(own, recorded, signal.shape, dim, batch), *args[2:])
    return tuple(_narrowed(node, args, batch)) if name.removesuffix("_") in _MEETING else args


def _recorded(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _held(recorded: Sequence[int], shape: Sequence[int], batch: int) -> int | None:
    """Finds the dimension that holds the samples."""
    changed = [k for k, (then, now) in enumerate(zip(recorded, shape, strict=True)) if then != now]
    if not changed:
        return None
    if len(changed) > 1 or recorded[changed[0]] != batch * shape[changed[0]]:
        raise UnsupportedError(f"a tensor {tuple(recorded)} of the program is {tuple(shape)} for one sample")
    return changed[0]


def _reshaped(own: Sequence[int], recorded: Sequence[int], shape: Sequence[int], dim: int, batch: int) -> list:
    """Divides the dimension in which the samples end up, by where they lie in memory."""
    stride = shape[dim] * math.prod(recorded[dim + 1 :])
    for k, size in enumerate(own):
        inner = math.prod(own[k + 1 :])
        if inner <= stride and stride * batch <= inner * size:
            return [n // batch if j == k else n for j, n in enumerate(own)]
    raise UnsupportedError(f"the program mixes the samples of its batch of {batch}; export it for one sample")


def _expanded(own: Sequence[int], recorded: Sequence[int], shape: Sequence[int], dim: int, batch: int) -> list:
    axis = len(own) - len(recorded) + dim
    return [shape[dim] if k == axis else n for k, n in enumerate(own)]


def _narrowed(node: fx.Node, args: tuple, batch: int) -> list:
    """Takes one sample of constants that were made for the whole batch and meet a signal."""
    held = None
    for given, value in _pairs(node.args, args):
        if isinstance(value, Signal) and (recorded := _recorded(given)) is not None:
            dim = _held(recorded, value.shape, batch)
            held = None if dim is None else dim - len(recorded)
            break
    return list(args) if held is None else [_one(value, held, batch) for value in args]


def _pairs(nodes: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Lists the arguments of a node with their values, those in lists one by one."""
    for node, value in zip(nodes, values, strict=True):
        if isinstance(node, list | tuple):
            yield from zip(node, value, strict=True)
        else:
            yield node, value


def _one(value: Any, dim: int, batch: int) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        return [_one(part, dim, batch) for part in value]
    if not isinstance(value, Tensor) or value.dim() < -dim or value.shape[dim] != batch:
        return value
    first = value.narrow(dim, 0, 1)
    if not torch.equal(first.expand_as(value), value):
        raise UnsupportedError("a constant of the program differs from sample to sample of its batch")
    return first


def first_of(value: Any, batch: int) -> Any:
    """Takes one sample of an output that does not depend on the input."""
    if isinstance(value, list | tuple):
        return type(value)(first_of(part, batch) for part in value)
    return _one(value, -value.dim(), batch) if isinstance(value, Tensor) and value.dim() else value


REGISTER = "register a rule with @to_implicit.register({name}); its arguments are the module and its signals"
_ASKING = (getattr, len, "size", "dim", "numel", torch.ops.aten.sym_size.int)  # about shapes, not about values
_FAILURES = (InputError, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


class _Tracer(fx.Tracer):
    """Stops at modules that have a rule, and at those that cannot be traced."""

    def __init__(self, opaque: frozenset[nn.Module] = frozenset()) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.opaque:
            return True
        leaf = RULES.of_module(m) is not None or super().is_leaf_module(m, module_qualified_name)
        return leaf and not _hooked(m)


def _hooked(module: nn.Module) -> bool:
    """Returns whether hooks may change what a module computes; then they are traced with it."""
    # torch's own hooks set a weight before every call
    kinds = (type(hook).__module__ for hook in module._forward_pre_hooks.values())
    return bool(module._forward_hooks) or not all(kind.startswith("torch.nn.utils") for kind in kinds)


class Converter(fx.Interpreter):
    """Runs the graph of a network on signals.

    Args:
        batch: for how many samples the sizes in the graph were recorded.
    """

    def __init__(
        self, module: nn.Module, graph: fx.Graph, network: Network, path: str = "", batch: int = 1
    ) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False  # our errors say where
        self.network, self.batch, self.root = network, batch, path

    def run_node(self, n: fx.Node) -> Any:
        stack = n.meta.get("nn_module_stack") or {}
        inner = next((path for path, _ in reversed(list(stack.values()))), "")
        target = n.target if n.op == "call_module" else ""
        path = str(target or inner).removeprefix("L['self'].")
        path = "" if path.startswith("_empty_nn_module_stack") else path
        self.network.path = ".".join(part for part in (self.root, path) if part)
        value = super().run_node(n)
        readers = [user for user in n.users if user.target not in _ASKING]
        # what several layers read is computed once
        return value.as_state() if isinstance(value, Signal) and value.costly and len(readers) > 1 else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self.batch > 1 and n.op == "call_function":
            args = for_one_sample(n, tuple(args), self.batch)
        return tuple(args), kwargs

    def call_module(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if str(target).endswith("_guards_fn"):
            return None  # of torch.export, on the shape of a batch
        return convert_module(self.fetch_attr(target), self.network.path, args, kwargs)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if next(iter(signals_in((args, kwargs))), None) is None:
            return super().call_function(target, args, kwargs)
        return self._apply(target, getattr(target, "__name__", str(target)), args, kwargs)

    def call_method(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if next(iter(signals_in((args, kwargs))), None) is None:
            return super().call_method(target, args, kwargs)
        return self._apply(target, f"the method {target}", args, kwargs)

    def _apply(self, target: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        rule = RULES.of_function(target)
        if rule is None:
            raise UnsupportedError(
                f"{name}{_where(self.network.path)} has no implicit form yet; register a rule with "
                f"@to_implicit.register_function({_key(target)}), or a rule for the module "
                "that calls it",
                placed=True,
            )
        if target in (getattr, len, operator.getitem) and not isinstance(args[0], Signal):
            return target(*args, **kwargs)  # an entry of what a layer returned
        if "input" in kwargs:
            args = (kwargs["input"], *args)
            kwargs = {key: value for key, value in kwargs.items() if key != "input"}
        return _guarded(lambda: rule(*args, **kwargs), name, self.network.path)


def _key(target: Any) -> str:
    """Writes what a rule of a function is registered by."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.overloadpacket}"
    if isinstance(target, str):
        return repr(target)
    return f"{target.__module__}.{target.__name__}".removeprefix("_").replace("None.", "")


def _guarded(work: Callable[[], Any], name: str, path: str) -> Any:
    """Runs a rule and says where it was if it fails."""
    try:
        return work()
    except UnsupportedError as error:
        if error.placed:
            raise
        raise UnsupportedError(f"{name}{_where(path)}: {error}", placed=True) from error
    except _FAILURES as error:
        raise UnsupportedError(f"{name}{_where(path)} cannot be converted: {error}", placed=True) from error


def _where(path: str) -> str:
    return f" at {path!r}" if path else ""


def convert_module(module: nn.Module, path: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Converts one module: by its rule, or else by what it calls."""
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    given = next(iter(signals_in((args, kwargs))), None)
    if given is None:
        return module(*args, **kwargs)
    network, rule, name = given.network, RULES.of_module(module), type(module).__name__
    network.path = path
    if rule is not None and not _hooked(module):
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        return _guarded(lambda: rule(module, *args, **kwargs), name, path)
    layer = type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(
        module, nn.Sequential
    )
    if isinstance(module, torch.jit.ScriptModule) or (rule is None and layer):
        raise UnsupportedError(
            f"{name}{_where(path)} has no implicit form yet; {REGISTER.format(name=name)}", placed=True
        )
    root = nn.Sequential(module) if _hooked(module) else module
    with _unchanged(root):
        graph = _graph(root)
        if isinstance(graph, fx.Graph) and not has_hazard(graph, root):
            return Converter(root, graph, network, path).run(*args, **kwargs)
    reason = graph if isinstance(graph, Exception) else "values are read after they were changed in place"
    if kwargs or not all(isinstance(leaf, Signal) for leaf in tree_leaves(args)):
        raise UnsupportedError(
            f"{name}{_where(path)} cannot be traced: {reason}; {REGISTER.format(name=name)}", placed=True
        )
    return _run_program(_export(module, args, path, reason), args, network, path)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Takes away what tracing leaves on a module: constants that its code makes."""
    before = set(vars(module))
    try:
        yield
    finally:
        for name in set(vars(module)) - before:
            delattr(module, name)


def _graph(module: nn.Module) -> fx.Graph | Exception:
    """Traces a module, its parts that cannot be traced left whole; returns the error if its own code cannot."""
    try:
        return _Tracer().trace(module)
    except Exception as error:
        opaque = frozenset(part for part in module.children() if _opaque(part))
        if not opaque:
            return error
    try:
        return _Tracer(opaque).trace(module)
    except Exception as error:
        return error


def _opaque(module: nn.Module) -> bool:
    if RULES.of_module(module) is not None or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    try:
        with _unchanged(module):
            _Tracer().trace(module)
    except Exception:
        return True
    return False


def _export(module: nn.Module, args: tuple, path: str, reason: Exception | str) -> ExportedProgram:
    try:
        with silenced():
            return torch.export.export(module, tree_map_only(Signal, Signal.zeros, args), strict=False)
    except Exception as error:
        name = type(module).__name__
        raise UnsupportedError(
            f"{name}{_where(path)} can be traced neither by torch.fx ({_short(reason)}) nor by torch.export "
            f"({_short(error)}): its control flow may depend on data; {REGISTER.format(name=name)}",
            placed=True,
        ) from error


def _short(reason: Exception | str) -> str:
    return str(reason).strip().partition("\n")[0]


def convert_program(program: ExportedProgram, signal: Signal) -> Any:
    """Converts an exported program of one input."""
    examples = program.example_inputs
    inputs = [value for value in (examples[0] if examples else ()) if isinstance(value, Tensor)]
    if inputs and (len(inputs) != 1 or tuple(inputs[0].shape[1:]) != signal.shape[1:]):
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        raise InputError(f"the program takes inputs {shapes}; expected one of (batch, *{signal.shape[1:]})")
    recorded = [size for size in _recorded_shape(program.module().graph)[1:] if isinstance(size, int)]
    if len(recorded) == len(signal.shape) - 1 and recorded != [*signal.shape[1:]]:
        raise InputError(f"the program takes inputs of the shape {tuple(recorded)}; received {signal.shape[1:]}")
    return _run_program(program, (signal,), signal.network, "")


def _run_program(program: ExportedProgram, args: tuple, network: Network, path: str) -> Any:
    graph = program.module()
    if has_hazard(graph.graph, graph):
        graph = program.run_decompositions({}).module()
    samples = next(iter(_recorded_shape(graph.graph)), 1)
    batch = samples if isinstance(samples, int) else 1  # 1 if for any number
    return first_of(Converter(graph, graph.graph, network, path, batch).run(*args), batch)


def _recorded_shape(graph: fx.Graph) -> tuple[Any, ...]:
    """Reads for which inputs a program was exported; sizes that may vary are no whole numbers."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    return next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())


class Conversion:
    """Converts networks to implicit models; see `to_implicit`."""

    def __call__(
        self, module: nn.Module | ExportedProgram, input_shape: Sequence[int] | int, *, detach: bool = True
    ) -> ImplicitForm:
        """Writes a network as ``x = phi(Ax + Bu + b)``, ``y = Cx + Du + c`` (003, section 2.5).

        The network is taken in evaluation mode: batch normalisation is folded into the weights, dropout is left
        out. Weights are copied. Nothing is densified; states come last layer first (003 eq. 2.10), so A is
        strictly block upper-triangular unless the network has a loop of its own, and `form(u)` computes it in
        one pass. A sum that several layers read becomes a block with phi = identity, so that it is computed
        once. The output is flattened, ``(B, q)``; of several outputs it is the first.

        Args:
            module: any module that torch.fx or torch.export can trace, or an exported program.
            input_shape: the shape of one sample, without the batch.
            detach: whether the form is a copy. If not, its matrices are functions of the network's parameters,
                for training with bounds of the form.

        Raises:
            UnsupportedError: names the module or function without a rule, its place in the network and how to
                register a rule.

        Example:
            >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> form = to_implicit(network, (4,))
            >>> form
            ImplicitForm(8 states, 4 inputs, 2 outputs, relu)
            >>> u = torch.randn(3, 4)
            >>> torch.allclose(form(u), network(u), atol=1e-6)
            True
        """
        with torch.no_grad() if detach else nullcontext():
            return _converted(module, input_shape, exact=False)[0]

    def register(self, *kinds: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
        """Registers the rule of module types: ``rule(module, *signals) -> signal``.

        Example:
            >>> class Double(nn.Module):
            ...     def forward(self, x):
            ...         return 2 * x
            >>> @to_implicit.register(Double)
            ... def double(module, signal):
            ...     return signal.scaled(2.0)
        """
        return RULES.module(*kinds)

    def register_function(self, *functions: Any) -> Callable[[FunctionRule], FunctionRule]:
        """Registers the rule of functions, ATen operators or tensor methods (by name)."""
        return RULES.function(*functions)


to_implicit = Conversion()


def _converted(
    module: nn.Module | ExportedProgram, input_shape: Sequence[int] | int, exact: bool
) -> tuple[ImplicitForm, Network]:
    shape = _shape(input_shape)
    if isinstance(module, ExportedProgram):
        network = Network(shape, *_home(list(module.state_dict.values())), exact)
        output = convert_program(module, network.input)
    elif isinstance(module, nn.Module):
        network = Network(shape, *_home([*module.parameters(), *module.buffers()]), exact)
        if not exact:
            _tell_of_training(module)
        with _evaluating(module):
            output = convert_module(module, "", (network.input,), {})
    else:
        raise InputError(f"to_implicit takes a module or exported program; received {type(module).__name__}")
    return network.form(_single(output, network)), network


@torch.no_grad()
def exact_form(module: nn.Module, input_shape: Sequence[int] | int) -> tuple[ImplicitForm, Tensor]:
    """Converts a network without rounding its weights, for proofs about the network itself.

    `to_implicit` folds layers into each other, which rounds: its form is another network, off by some units of
    the terms that were added up. Here products and sums of weights stay products and sums of operators, and
    offsets before a linear map are states of their own, so that bounds of the form pay for everything. Constants
    that are no numbers of the network's type, such as the factors of batch normalisation, are off by a unit or
    two; a network in float32 that has some is converted in float64.

    Returns:
        the form, in float64 or in the type of the network, and which of its states are those of `to_implicit`.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> form, states = exact_form(network, (4,))
        >>> form.dtype, len(states)
        (torch.float64, 8)
    """
    with exact_algebra():
        form, network = _converted(module, input_shape, exact=True)
        if form.dtype not in (torch.float64, torch.complex128):
            wide, other = _converted(_doubled(module), input_shape, exact=True)
            if not _equal(form, wide):
                form, network = wide, other
    sizes, last = form.partition, len(network.sources) - 1
    own = [last - k not in network.added for k in range(len(sizes))]
    return form, torch.tensor(own).repeat_interleave(torch.tensor(sizes)).nonzero()[:, 0].to(form.device)


def _doubled(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).double()
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied to float64, to see what conversion rounds: {error}; "
            "convert it with to_implicit and ask about the form",
            placed=True,
        ) from error


def _equal(form: ImplicitForm, wide: ImplicitForm) -> bool:
    """Returns whether a form in float64 holds the numbers of one in another type."""
    pairs = [(getattr(form, name), getattr(wide, name)) for name in ("A", "B", "C", "D", "bias", "output_bias")]
    for one, two in pairs:
        mine, others = list(tensors(one)), list(tensors(two))
        if len(mine) != len(others) or any(a.shape != b.shape for a, b in zip(mine, others, strict=True)):
            return False
        if not all(torch.equal(a.to(b.dtype), b) for a, b in zip(mine, others, strict=True)):
            return False
    return [phi.name for phi in form.activations] == [phi.name for phi in wide.activations]


def _shape(input_shape: Sequence[int] | int) -> tuple[int, ...]:
    shape = (input_shape,) if isinstance(input_shape, SupportsIndex) else tuple(input_shape)
    if not all(isinstance(size, SupportsIndex) and size.__index__() > 0 for size in shape):
        raise InputError(f"input_shape holds positive sizes of one sample, without the batch; received {shape}")
    return tuple(size.__index__() for size in shape)


def _home(values: list[torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    floating = [value for value in values if value.is_floating_point()]
    kinds = {value.dtype for value in floating}
    if len(kinds) > 1:
        raise InputError(f"the network mixes {', '.join(sorted(map(str, kinds)))}; convert it to one of them")
    if not floating:
        return torch.get_default_dtype(), torch.device("cpu")
    return floating[0].dtype, floating[0].device


def _single(output: Any, network: Network) -> Signal:
    """Takes the first of several outputs, as recurrent layers have them; a constant one is an output too."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Signal):
        return first
    if isinstance(first, Tensor):
        return network.constant(first)
    raise UnsupportedError(f"a network must return a tensor, or several of them; got {type(output).__name__}")


def _tell_of_training(module: nn.Module) -> None:
    """Warns where a network in training mode computes something else than what is converted."""
    for path, part in module.named_modules():
        drops = isinstance(part, nn.modules.dropout._DropoutNd | VariationalDropout) and part.p > 0
        drops = drops or (isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0)
        averages = isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
        if part.training and (drops or averages or isinstance(part, nn.RReLU)):
            warnings.warn(
                f"the network is in training mode, where {type(part).__name__} at {path!r} differs; "
                "its evaluation mode is converted: call network.eval() to compare the two",
                stacklevel=3,
            )
            return


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a network in evaluation mode for a while."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
