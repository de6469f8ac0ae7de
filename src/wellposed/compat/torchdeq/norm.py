"""Weight norm and spectral norm of the layers of a model, by torchdeq's calls.

``W <- W min(clip_value, g / |W|)``, with the norm of every output (weight norm) or the largest singular value of
the weight as a matrix (spectral norm). g is learned, or fixed with ``norm_no_scale``; the minimum is taken with
``norm_clip``. The norms are parametrisations of torch, functions of the weights that are never out of date, and
the singular value is exact where torchdeq has an estimate. A `state_dict` of torchdeq's can be loaded.

A bound of the convolution itself, and not of its weight as a matrix, is `wellposed.models.spectral_norm`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.compat.torchdeq.utils.config import DEQConfig, read_config
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import InputError, unknown_name
from wellposed.registry import Registry

__all__ = ["apply_norm", "register_norm", "register_norm_module", "remove_norm", "reset_norm"]

Targets = dict[type[nn.Module], tuple[str | Sequence[str], int | Sequence[int]]]
LAYERS: Targets = {
    **{layer: ("weight", 0) for layer in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{layer: ("weight", 1) for layer in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)},
}
KEYWORDS = ("names", "dims", "learn_scale", "target_norm", "clip", "clip_value", "n_power_iterations", "eps")


class _Scaled(nn.Module):
    """``W min(clip_value, g / |W|)`` where g is a parameter, or a constant."""

    def __init__(self, dim: int, learn_scale: bool, target: float, clip: float | None) -> None:
        super().__init__()
        self.dim, self.learn_scale, self.target, self.clip = dim, learn_scale, target, clip

    def size(self, weight: Tensor) -> Tensor:
        """Returns the norm, in a shape that divides the weight."""
        raise NotImplementedError

    def start(self, weight: Tensor) -> Tensor:
        """Returns g before training."""
        raise NotImplementedError

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        scale, weight = (self.target, first) if second is None else (first, second)
        factor = scale / self.size(weight)
        return weight * (factor if self.clip is None else factor.clamp_max(self.clip))

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (self.start(weight), weight) if self.learn_scale else weight


class _ScaledRows(_Scaled):
    def size(self, weight: Tensor) -> Tensor:
        others = tuple(axis for axis in range(weight.dim()) if axis != self.dim)
        return torch.linalg.vector_norm(weight, dim=others, keepdim=True)

    def start(self, weight: Tensor) -> Tensor:
        length = self.size(weight.detach())
        if bool((length == 0).any()):
            raise InputError("weight norm needs a direction for every output; rows of the weight are zero")
        return length


class _ScaledMatrix(_Scaled):
    def __init__(self, dim: int, learn_scale: bool, target: float, clip: float | None) -> None:
        super().__init__(dim, learn_scale, target, clip)
        self._known: tuple[Any, Tensor, Tensor] | None = None  # singular vectors, and of which weight

    def size(self, weight: Tensor) -> Tensor:
        left, right = self._vectors(weight)
        return left @ weight.movedim(self.dim, 0).flatten(1) @ right

    def _vectors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first singular vectors, which are computed again when the weight has changed."""
        whose = None if under_transform() else (weight.data_ptr(), weight._version, weight.dtype, weight.device)
        if whose is None or self._known is None or self._known[0] != whose:
            matrix = weight.detach().movedim(self.dim, 0).flatten(1)
            left, _, right = torch.linalg.svd(matrix, full_matrices=False)
            if whose is None:
                return left[:, 0], right[0]
            self._known = (whose, left[:, 0].contiguous(), right[0].contiguous())
        return self._known[1:]

    def start(self, weight: Tensor) -> Tensor:
        shape = [1 if axis != self.dim else weight.shape[axis] for axis in range(weight.dim())]
        return weight.detach().new_full(shape, self.target)


class Norm:
    """A norm that is applied to a module: what `register_norm` takes has the same two methods and table.

    `reset_norm` calls the object on its module; here that has nothing to do.
    """

    _target_modules: ClassVar[Targets]
    scaled: ClassVar[type[_Scaled]]
    stored: ClassVar[str]  # what torchdeq calls the weight below the norm

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    @classmethod
    def apply(
        cls,
        module: nn.Module,
        deq_args: Mapping[str, Any] | None = None,
        names: str | Sequence[str] | None = None,
        dims: int | Sequence[int] | None = None,
        learn_scale: bool = True,
        target_norm: float = 1.0,
        clip: bool = False,
        clip_value: float = 1.0,
        n_power_iterations: int = 1,
        eps: float = 1e-12,
    ) -> "Norm":
        """Puts weights of a module under the norm; options in `deq_args` win over keywords."""
        args = deq_args or {}
        if names is None or dims is None:
            names, dims = cls._target_modules[parametrize.type_before_parametrizations(module)]
        names = [names] if isinstance(names, str) else list(names)
        axes = [dims] * len(names) if isinstance(dims, int) else list(dims)
        if len(names) != len(axes):
            raise InputError(f"names and dims go together; received {names} and {axes}")
        learned = not args.get("norm_no_scale", not learn_scale)
        target = args.get("norm_target_norm", target_norm)
        limit = args.get("norm_clip_value", clip_value) if args.get("norm_clip", clip) else None
        for name, axis in zip(names, axes, strict=True):
            parametrize.register_parametrization(module, name, cls.scaled(axis, learned, target, limit))
        module.register_load_state_dict_pre_hook(cls._renamed(names))
        return cls(names)

    @classmethod
    def _renamed(cls, names: Sequence[str]) -> Callable[..., None]:
        """Returns a hook that lets a module load weights that torchdeq saved."""

        def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name in names:
                if f"{prefix}{name}{cls.stored}" not in state or not parametrize.is_parametrized(module, name):
                    continue
                ours = f"{prefix}parametrizations.{name}.original"
                weight, scale = state.pop(f"{prefix}{name}{cls.stored}"), state.pop(f"{prefix}{name}_g", None)
                state.update({ours: weight} if scale is None else {f"{ours}0": scale, f"{ours}1": weight})
                for vector in ("_u", "_v"):
                    state.pop(f"{prefix}{name}{vector}", None)

        return rename

    def __call__(self, module: nn.Module) -> None:
        """Does nothing: the weights are never out of date."""

    def remove(self, module: nn.Module) -> None:
        """Turns the weights into plain parameters with the same values."""
        for name in self.names:
            parametrize.remove_parametrizations(module, name)


class WeightNorm(Norm):
    """One norm for every output."""

    _target_modules: ClassVar[Targets] = dict(LAYERS)
    scaled, stored = _ScaledRows, "_v"


class SpectralNorm(Norm):
    """The largest singular value."""

    _target_modules: ClassVar[Targets] = dict(LAYERS)
    scaled, stored = _ScaledMatrix, "_orig"


NORMS: Registry[Any] = Registry.of("norm_type", type, {"weight_norm": WeightNorm, "spectral_norm": SpectralNorm})


def register_norm(norm_type: str, norm_class: Any) -> None:
    """Adds a norm for `apply_norm`: a class like `Norm`."""
    for name in ("apply", "_target_modules"):
        if not hasattr(norm_class, name):
            raise InputError(
                f"a norm has a class method 'apply' and a table '_target_modules'; {name!r} is missing"
            )
    NORMS.register(norm_type, lambda: norm_class)


def register_norm_module(
    module_class: type[nn.Module],
    norm_type: str,
    names: str | Sequence[str] = "weight",
    dims: int | Sequence[int] = 0,
) -> None:
    """Lets `apply_norm` treat a kind of module: parameters by name, and which of their dimensions are outputs."""
    NORMS[norm_type]._target_modules[module_class] = (names, dims)


def apply_norm(
    model: nn.Module,
    norm_type: str = "weight_norm",
    prefix_filter_out: str | Sequence[str] | None = None,
    filter_out: str | Sequence[str] | None = None,
    args: Any = None,
    **norm_kwargs: Any,
) -> None:
    """Puts the layers of a model under a norm, in place.

    Args:
        norm_type: ``"weight_norm"``, ``"spectral_norm"``, ``"none"`` or a registered one; that in `args` wins.
        prefix_filter_out, filter_out: modules whose name begins with, or contains, one of these are left alone.
        args: a dict, or a parsed command line, with ``norm_type``, ``norm_no_scale``, ``norm_clip``,
            ``norm_clip_value``, ``norm_target_norm``.
        norm_kwargs: the same, or keywords of the norm: ``learn_scale``, ``clip``, ``clip_value``, ``target_norm``.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        >>> apply_norm(layers, "spectral_norm", prefix_filter_out="1", norm_target_norm=0.5)
        >>> [nn.utils.parametrize.is_parametrized(layer) for layer in layers]
        [True, False]
        >>> round(float(torch.linalg.matrix_norm(layers[0].weight.detach(), 2)), 4)
        0.5
    """
    config = _read(norm_type, args, norm_kwargs)
    norm_type = config.get("norm_type", norm_type)
    if norm_type == "none":
        return
    if norm_type not in NORMS:
        raise unknown_name("norm_type", norm_type, [*NORMS, "none"])
    norm, prefixes, inside = NORMS[norm_type], _names(prefix_filter_out), _names(filter_out)
    keywords = {name: value for name, value in norm_kwargs.items() if name in KEYWORDS or norm_type not in _OURS}
    for name, module in list(model.named_modules()):
        kind = parametrize.type_before_parametrizations(module)
        skipped = name.startswith(prefixes) or any(part in name for part in inside)
        if kind in norm._target_modules and not skipped and not hasattr(module, "_deq_norm"):
            module._deq_norm = norm.apply(module, deq_args=config, **keywords)


_OURS = tuple(NORMS)


def _read(norm_type: str, args: Any, given: Mapping[str, Any]) -> DEQConfig:
    """Collects options; those of a registered norm are its own affair."""
    config = DEQConfig(args, **given)
    if config.get("norm_type", norm_type) not in (*_OURS, "none"):
        return config
    from_deq = args if not isinstance(args, Mapping) else DEQConfig(args)
    return read_config(f"apply_norm ({norm_type})", from_deq, given, KEYWORDS)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def reset_norm(model: nn.Module) -> None:
    """Calls registered norms on their modules; those of this file are never out of date."""
    for module in model.modules():
        applied: Any = getattr(module, "_deq_norm", None)
        if applied is not None:
            applied(module)


def remove_norm(model: nn.Module) -> None:
    """Turns weights under a norm into plain parameters with the same values, in place."""
    for module in model.modules():
        applied: Any = getattr(module, "_deq_norm", None)
        if applied is not None:
            applied.remove(module)
            del module._deq_norm
