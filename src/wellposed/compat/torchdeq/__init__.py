"""torchdeq's way of calling, for code that moves over: ``z_out, info = get_deq(...)(f, z0)``.

All 26 functions and classes of torchdeq 0.1.0 (Geng and Kolter 2023) are here, with the same names in the same
submodules. What differs is said where it differs: an unknown option is an error, every sample stops by itself, and
a sample without an equilibrium is reported. Broyden's line search (``ls=True``) is refused.
"""

from wellposed.compat.torchdeq import core, dropout, grad, loss, norm, solver, utils
from wellposed.compat.torchdeq.core import get_deq, register_deq, reset_deq
from wellposed.compat.torchdeq.dropout import (
    VariationalDropout,
    VariationalDropout1d,
    VariationalDropout2d,
    VariationalDropout3d,
    VariationalDropToken1d,
    VariationalDropToken2d,
    VariationalDropToken3d,
    reset_dropout,
)
from wellposed.compat.torchdeq.loss import fp_correction, jac_reg, power_method, register_weight_func
from wellposed.compat.torchdeq.norm import (
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)
from wellposed.compat.torchdeq.solver import get_solver, register_solver, solver_stat_from_final_step
from wellposed.compat.torchdeq.utils import add_deq_args, mem_gc, mixed_init

__all__ = [
    "VariationalDropToken1d",
    "VariationalDropToken2d",
    "VariationalDropToken3d",
    "VariationalDropout",
    "VariationalDropout1d",
    "VariationalDropout2d",
    "VariationalDropout3d",
    "add_deq_args",
    "apply_norm",
    "core",
    "dropout",
    "fp_correction",
    "get_deq",
    "get_solver",
    "grad",
    "jac_reg",
    "loss",
    "mem_gc",
    "mixed_init",
    "norm",
    "power_method",
    "register_deq",
    "register_norm",
    "register_norm_module",
    "register_solver",
    "register_weight_func",
    "remove_norm",
    "reset_deq",
    "reset_dropout",
    "reset_norm",
    "solver",
    "solver_stat_from_final_step",
    "utils",
]
