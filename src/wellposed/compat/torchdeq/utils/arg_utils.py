"""Options of a command line."""

import argparse
from dataclasses import fields
from typing import Any

from wellposed.compat.torchdeq.utils.config import NORM_OPTIONS, PROGRAM_OPTIONS, Options

HELP = {
    "core": "states to return while training: sliced restarts the solver at each of them, indexing does not",
    "f_solver": "solver: anderson, broyden, fixed_point_iter, simple_fixed_point_iter, or a registered one",
    "b_solver": "solver of the backward pass",
    "f_max_iter": "most evaluations in a solve",
    "b_max_iter": "most evaluations in a backward solve",
    "f_tol": "tolerance of the solve",
    "b_tol": "tolerance of the backward solve",
    "f_stop_mode": "abs: length of the residual; rel: divided by the length of the state",
    "b_stop_mode": "the same for the backward solve",
    "eval_factor": "multiplies f_max_iter in eval mode",
    "eval_f_max_iter": "replaces f_max_iter in eval mode, unless 0",
    "ift": "differentiate by the implicit function theorem",
    "hook_ift": "the same as ift here",
    "grad": "steps to differentiate, one number or one for each state",
    "tau": "damping of these steps",
    "n_states": "states to return, evenly spaced over the solve",
    "indexing": "steps whose states are returned besides the equilibrium",
    "sup_gap": "return every so many of the differentiated steps",
    "sup_loc": "differentiated steps to return besides the last",
    "norm_type": "weight_norm, spectral_norm or none",
    "norm_no_scale": "fix the norm at norm_target_norm instead of learning it",
    "norm_clip": "never multiply weights by more than norm_clip_value",
    "norm_clip_value": "the largest factor under norm_clip",
    "norm_target_norm": "the norm, or where a learned spectral norm begins",
    "sn_n_power_iters": "not needed here: the largest singular value is computed exactly",
    "gamma": "decay of the weights in fp_correction",
    "jac_loss_weight": "weight of jac_reg in the loss of the program",
    "jac_loss_freq": "how often the program adds jac_reg",
    "jac_incremental": "steps after which the program raises jac_loss_weight",
    "sradius_mode": "estimate the spectral radius in eval mode",
}
LISTS: dict[str, list[int]] = {"grad": [1], "indexing": [], "sup_loc": []}


def add_deq_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `get_deq`, `apply_norm` and `fp_correction` to a parser, with torchdeq's defaults.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_deq_args(parser)
        >>> args = parser.parse_args(["--f_solver", "anderson", "--grad", "1", "2", "--ift"])
        >>> args.f_solver, args.grad, args.ift, args.norm_type
        ('anderson', [1, 2], True, 'weight_norm')
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(Options)}
    defaults |= {**NORM_OPTIONS, **PROGRAM_OPTIONS, **LISTS}
    for name, text in HELP.items():
        if name in LISTS:
            parser.add_argument(f"--{name}", type=int, nargs="+", default=list(LISTS[name]), help=text)
        elif isinstance(defaults[name], bool):
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", type=type(defaults[name]), default=defaults[name], help=text)
