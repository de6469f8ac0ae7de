"""Implicit deep learning: x = f(x, u) is the model; a solver finds it, a stopping rule accepts it, a
gradient differentiates it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wellposed import (
        activations,
        compat,
        conditions,
        convert,
        convex,
        data,
        equilibrium,
        errors,
        forms,
        kernels,
        models,
        robust,
        training,
    )
    from wellposed.activations import (
        Activation,
        register_activation,
    )
    from wellposed.conditions import (
        Certificate,
        certificate,
    )
    from wellposed.convert import (
        to_implicit,
    )
    from wellposed.convex import (
        States,
        eliminate_features,
        fit_states,
        record_states,
    )
    from wellposed.equilibrium import (
        Absolute,
        Anderson,
        Broyden,
        Contraction,
        ErrorBound,
        Gradient,
        Implicit,
        MeanRelative,
        Newton,
        Phantom,
        Picard,
        Polished,
        RandomSteps,
        RandomThreshold,
        Relative,
        RobbinsMonro,
        Solution,
        Solver,
        Status,
        Steps,
        Stopping,
        Unrolled,
        fixed_point,
        watch,
    )
    from wellposed.estimators import ImplicitClassifier as ImplicitClassifier
    from wellposed.estimators import ImplicitRegressor as ImplicitRegressor
    from wellposed.estimators import ImplicitSequenceClassifier as ImplicitSequenceClassifier
    from wellposed.estimators import ImplicitSequenceRegressor as ImplicitSequenceRegressor
    from wellposed.forms import (
        add,
        feedback,
        graph,
        parallel,
        product,
        series,
        spy,
    )
    from wellposed.models import (
        DEQ,
        Ensemble,
        ImplicitForm,
        ImplicitModel,
        ImplicitRNN,
        MultiscaleDEQ,
        Noise,
        Noisy,
        export_onnx,
        fixed_steps,
        from_pretrained,
        load,
        save,
        save_pretrained,
    )
    from wellposed.robust import (
        Box,
        SparseBox,
    )
    from wellposed.training import (
        fit,
    )

__version__ = "0.2.0"

# Without what needs an extra (scikit-learn), so that a star import works in every installation.
__all__ = [
    "DEQ",
    "Absolute",
    "Activation",
    "Anderson",
    "Box",
    "Broyden",
    "Certificate",
    "Contraction",
    "Ensemble",
    "ErrorBound",
    "Gradient",
    "Implicit",
    "ImplicitForm",
    "ImplicitModel",
    "ImplicitRNN",
    "MeanRelative",
    "MultiscaleDEQ",
    "Newton",
    "Noise",
    "Noisy",
    "Phantom",
    "Picard",
    "Polished",
    "RandomSteps",
    "RandomThreshold",
    "Relative",
    "RobbinsMonro",
    "Solution",
    "Solver",
    "SparseBox",
    "States",
    "Status",
    "Steps",
    "Stopping",
    "Unrolled",
    "activations",
    "add",
    "certificate",
    "compat",
    "conditions",
    "convert",
    "convex",
    "data",
    "eliminate_features",
    "equilibrium",
    "errors",
    "export_onnx",
    "feedback",
    "fit",
    "fit_states",
    "fixed_point",
    "fixed_steps",
    "forms",
    "from_pretrained",
    "graph",
    "kernels",
    "load",
    "models",
    "parallel",
    "product",
    "record_states",
    "register_activation",
    "robust",
    "save",
    "save_pretrained",
    "series",
    "spy",
    "to_implicit",
    "training",
    "watch",
]

_HOME = {
    "DEQ": "wellposed.models",
    "Absolute": "wellposed.equilibrium",
    "Activation": "wellposed.activations",
    "Anderson": "wellposed.equilibrium",
    "Box": "wellposed.robust",
    "Broyden": "wellposed.equilibrium",
    "Certificate": "wellposed.conditions",
    "Contraction": "wellposed.equilibrium",
    "Ensemble": "wellposed.models",
    "ErrorBound": "wellposed.equilibrium",
    "Gradient": "wellposed.equilibrium",
    "Implicit": "wellposed.equilibrium",
    "ImplicitClassifier": "wellposed.estimators",
    "ImplicitForm": "wellposed.models",
    "ImplicitModel": "wellposed.models",
    "ImplicitRNN": "wellposed.models",
    "ImplicitRegressor": "wellposed.estimators",
    "ImplicitSequenceClassifier": "wellposed.estimators",
    "ImplicitSequenceRegressor": "wellposed.estimators",
    "MeanRelative": "wellposed.equilibrium",
    "MultiscaleDEQ": "wellposed.models",
    "Newton": "wellposed.equilibrium",
    "Noise": "wellposed.models",
    "Noisy": "wellposed.models",
    "Phantom": "wellposed.equilibrium",
    "Picard": "wellposed.equilibrium",
    "Polished": "wellposed.equilibrium",
    "RandomSteps": "wellposed.equilibrium",
    "RandomThreshold": "wellposed.equilibrium",
    "Relative": "wellposed.equilibrium",
    "RobbinsMonro": "wellposed.equilibrium",
    "Solution": "wellposed.equilibrium",
    "Solver": "wellposed.equilibrium",
    "SparseBox": "wellposed.robust",
    "States": "wellposed.convex",
    "Status": "wellposed.equilibrium",
    "Steps": "wellposed.equilibrium",
    "Stopping": "wellposed.equilibrium",
    "Unrolled": "wellposed.equilibrium",
    "activations": "wellposed",
    "add": "wellposed.forms",
    "certificate": "wellposed.conditions",
    "compat": "wellposed",
    "conditions": "wellposed",
    "convert": "wellposed",
    "convex": "wellposed",
    "data": "wellposed",
    "eliminate_features": "wellposed.convex",
    "equilibrium": "wellposed",
    "errors": "wellposed",
    "export_onnx": "wellposed.models",
    "feedback": "wellposed.forms",
    "fit": "wellposed.training",
    "fit_states": "wellposed.convex",
    "fixed_point": "wellposed.equilibrium",
    "fixed_steps": "wellposed.models",
    "forms": "wellposed",
    "from_pretrained": "wellposed.models",
    "graph": "wellposed.forms",
    "kernels": "wellposed",
    "load": "wellposed.models",
    "models": "wellposed",
    "parallel": "wellposed.forms",
    "product": "wellposed.forms",
    "record_states": "wellposed.convex",
    "register_activation": "wellposed.activations",
    "robust": "wellposed",
    "save": "wellposed.models",
    "save_pretrained": "wellposed.models",
    "series": "wellposed.forms",
    "spy": "wellposed.forms",
    "to_implicit": "wellposed.convert",
    "training": "wellposed",
    "watch": "wellposed.equilibrium",
}


if not TYPE_CHECKING:  # a visible __getattr__ would hide misspelt names from type checkers

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module 'wellposed' has no attribute {name!r}")
        home = _HOME[name]
        value = import_module(f"wellposed.{name}") if home == "wellposed" else getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
