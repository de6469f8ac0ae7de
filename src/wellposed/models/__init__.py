"""Modules whose forward pass is a fixed point."""

from wellposed.forms import ImplicitForm
from wellposed.models.deq import DEQ
from wellposed.models.dropout import VariationalDropout
from wellposed.models.ensemble import Ensemble
from wellposed.models.fixed_steps import fixed_steps
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN, RecurrentSolution
from wellposed.models.storage import load, save

__all__ = [
    "DEQ",
    "Ensemble",
    "ImplicitForm",
    "ImplicitModel",
    "ImplicitRNN",
    "RecurrentSolution",
    "VariationalDropout",
    "fixed_steps",
    "load",
    "save",
]
