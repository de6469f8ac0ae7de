"""Modules whose forward pass is a fixed point."""

from wellposed.forms.form import ImplicitForm
from wellposed.models.attention import TransformerCell
from wellposed.models.cells import ConvCell, DenseCell, PlainConvCell, RecallCell
from wellposed.models.continuation import continued
from wellposed.models.deq import DEQ
from wellposed.models.dropout import VariationalDropout
from wellposed.models.ensemble import Ensemble
from wellposed.models.fixed_steps import fixed_steps
from wellposed.models.implicit import ImplicitModel
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.noise import Noise
from wellposed.models.noise_sensitivity import noise_sensitivity
from wellposed.models.noisy import Noisy
from wellposed.models.onnx import export_onnx
from wellposed.models.path_independence import PathIndependence, path_independence
from wellposed.models.pretrained import from_pretrained, save_pretrained
from wellposed.models.proof import Claim, write_certificate
from wellposed.models.recurrent import ImplicitRNN, RecurrentSolution
from wellposed.models.reference import ReferenceModel, load_reference, reference_models
from wellposed.models.stabilisers import jacobian_penalty, remove_norms, spectral_norm, weight_norm
from wellposed.models.storage import load, save

__all__ = [
    "DEQ",
    "Claim",
    "ConvCell",
    "DenseCell",
    "Ensemble",
    "ImplicitForm",
    "ImplicitModel",
    "ImplicitRNN",
    "MultiscaleDEQ",
    "Noise",
    "Noisy",
    "PathIndependence",
    "PlainConvCell",
    "RecallCell",
    "RecurrentSolution",
    "ReferenceModel",
    "TransformerCell",
    "VariationalDropout",
    "continued",
    "export_onnx",
    "fixed_steps",
    "from_pretrained",
    "jacobian_penalty",
    "load",
    "load_reference",
    "noise_sensitivity",
    "path_independence",
    "reference_models",
    "remove_norms",
    "save",
    "save_pretrained",
    "spectral_norm",
    "weight_norm",
    "write_certificate",
]
