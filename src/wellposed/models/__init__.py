"""Modules whose forward pass is a fixed point."""

from wellposed.forms.form import MODEL_BUILDERS, ImplicitForm
from wellposed.models.cells import ConvCell, DenseCell, PlainConvCell, RecallCell, TransformerCell
from wellposed.models.deq import DEQ
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.certificates import Claim, write_certificate
from wellposed.models.io.export import export_onnx, fixed_steps
from wellposed.models.io.storage import (
    ReferenceModel,
    from_pretrained,
    load,
    load_reference,
    reference_models,
    save,
    save_pretrained,
)
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.noise import Noise, noise_sensitivity
from wellposed.models.noisy import Noisy
from wellposed.models.norms import VariationalDropout, jacobian_penalty, remove_norms, spectral_norm, weight_norm
from wellposed.models.path_independence import PathIndependence, path_independence
from wellposed.models.recurrent import ImplicitRNN, RecurrentSolution

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

MODEL_BUILDERS.append(ImplicitModel.from_form)
