"""Modules whose forward pass is a fixed point."""

from wellposed.forms import ImplicitForm
from wellposed.models.attention import TransformerCell
from wellposed.models.cells import ConvCell, DenseCell, PlainConvCell, RecallCell
from wellposed.models.continuation import continued
from wellposed.models.deq import DEQ
from wellposed.models.dropout import VariationalDropout
from wellposed.models.ensemble import Ensemble
from wellposed.models.fixed_steps import fixed_steps
from wellposed.models.implicit import ImplicitModel
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.path_independence import PathIndependence, path_independence
from wellposed.models.recurrent import ImplicitRNN, RecurrentSolution
from wellposed.models.stabilisers import jacobian_penalty, remove_norms, spectral_norm, weight_norm
from wellposed.models.storage import load, save

__all__ = [
    "DEQ",
    "ConvCell",
    "DenseCell",
    "Ensemble",
    "ImplicitForm",
    "ImplicitModel",
    "ImplicitRNN",
    "MultiscaleDEQ",
    "PathIndependence",
    "PlainConvCell",
    "RecallCell",
    "RecurrentSolution",
    "TransformerCell",
    "VariationalDropout",
    "continued",
    "fixed_steps",
    "jacobian_penalty",
    "load",
    "path_independence",
    "remove_norms",
    "save",
    "spectral_norm",
    "weight_norm",
]
