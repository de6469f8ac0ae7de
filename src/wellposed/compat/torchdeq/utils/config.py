"""What `get_deq` and `apply_norm` understand, from a dict, a parsed command line or keywords."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from wellposed.equilibrium.method import OnFailure
from wellposed.errors import InputError, unknown_name

NORM_OPTIONS = {
    "norm_type": "weight_norm",
    "norm_no_scale": False,
    "norm_clip": False,
    "norm_clip_value": 1.0,
    "norm_target_norm": 1.0,
    "sn_n_power_iters": 1,
}
PROGRAM_OPTIONS = {
    "gamma": 0.8,
    "jac_loss_weight": 0.0,
    "jac_loss_freq": 0.0,
    "jac_incremental": 0,
    "sradius_mode": False,
}


@dataclass(frozen=True)
class Options:
    """What `get_deq` understands, with the defaults of torchdeq; `on_failure` is new."""

    core: str = "sliced"
    f_solver: str = "fixed_point_iter"
    b_solver: str = "fixed_point_iter"
    f_max_iter: int = 40
    b_max_iter: int = 40
    f_tol: float = 1e-3
    b_tol: float = 1e-6
    f_stop_mode: str = "abs"
    b_stop_mode: str = "abs"
    eval_factor: float = 1.0
    eval_f_max_iter: int = 0
    ift: bool = False
    hook_ift: bool = False
    grad: int | Sequence[int] = 1
    tau: float = 1.0
    no_stat: bool | None = None
    n_states: int = 1
    indexing: Sequence[int] | None = None
    sup_gap: int = -1
    sup_loc: Sequence[int] | None = None
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        for name in (self.f_stop_mode, self.b_stop_mode):
            if name not in ("abs", "rel"):
                raise unknown_name("stop mode", name, ("abs", "rel"))
        if min(self.grad_steps, default=0) < 1:
            raise InputError(f"grad is the number of steps to differentiate, at least 1; received {self.grad!r}")
        if self.sup_gap > min(self.grad_steps):
            raise InputError(
                f"sup_gap={self.sup_gap} returns no state of {min(self.grad_steps)} steps; raise grad or lower it"
            )

        outside = [step for step in self.sup_loc or () if not 1 <= step <= max(self.grad_steps)]
        if outside:
            raise InputError(f"sup_loc names steps 1 to {max(self.grad_steps)}, those of grad; received {outside}")

    @property
    def grad_steps(self) -> tuple[int, ...]:
        """Steps that are differentiated without `ift`, for every state or for all of them alike."""
        return (self.grad,) if isinstance(self.grad, int) else tuple(self.grad)


class DEQConfig(dict[str, Any]):
    """Options by name, from a mapping, a parsed command line or any object with attributes.

    Example:
        >>> DEQConfig({"f_tol": 1e-3, "grad": 2}).get("grad", 1)
        2
    """

    def __init__(self, config: Any = None, **options: Any) -> None:
        if not (config is None or isinstance(config, Mapping) or hasattr(config, "__dict__")):
            raise InputError(f"args is a dict or an argparse.Namespace; received {type(config).__name__}")
        super().__init__(config if isinstance(config, Mapping) else {} if config is None else vars(config))
        self.update(options)


def read_config(function: str, args: Any, given: Mapping[str, Any], valid: Iterable[str]) -> DEQConfig:
    """Collects options from `args` and from keywords, which win.

    A command line may hold options of the program; one that merely looks like a valid one is an error there, and
    any unknown one in a dict or among the keywords.
    """
    known = [*valid, *NORM_OPTIONS, *PROGRAM_OPTIONS]
    config = DEQConfig(args)
    strict = isinstance(args, Mapping) and not isinstance(args, DEQConfig)
    similar = [name for name in config if difflib.get_close_matches(name, known, n=1, cutoff=0.85)]
    require_known(function, config if strict else similar, known)
    require_known(function, given, known)
    config.update(given)
    return config


def read_options(args: Any, given: Mapping[str, Any]) -> Options:
    """Collects the options of `get_deq`."""
    names = [field.name for field in fields(Options)]
    config = read_config("get_deq", args, given, names)
    return Options(**{name: config[name] for name in names if name in config})


def require_known(function: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raises TypeError at the first option that is not one.

    Example:
        >>> require_known("get_deq", {"f_max_iters": 3}, ["f_max_iter", "f_tol"])
        Traceback (most recent call last):
        ...
        TypeError: get_deq: unknown option 'f_max_iters'; valid: f_max_iter, f_tol; did you mean 'f_max_iter'?
    """
    names = list(valid)
    for name in given:
        if name not in names:
            raise TypeError(f"{function}: {unknown_name('option', name, names)}")
