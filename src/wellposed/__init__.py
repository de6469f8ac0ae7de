"""Implicit deep learning: x = f(x, u) is the model; a solver finds it, a stopping rule accepts it, a
gradient differentiates it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wellposed import (
        activations,
        baselines,
        convert,
        convex,
        equilibrium,
        errors,
        experiments,
        forms,
        kernels,
        models,
        robust,
        tasks,
        training,
    )
    from wellposed.activations import Activation, register_activation
    from wellposed.convert import to_implicit
    from wellposed.convex import States, eliminate_features, fit_states, record_states
    from wellposed.equilibrium import (
        Absolute,
        Anderson,
        Broyden,
        Certificate,
        Contraction,
        ErrorBound,
        Gradient,
        Implicit,
        MeanRelative,
        Newton,
        Phantom,
        Picard,
        RandomSteps,
        Relative,
        Solution,
        Solver,
        Status,
        Steps,
        Stopping,
        Unrolled,
        certificate,
        fixed_point,
        watch,
    )
    from wellposed.forms import add, feedback, graph, parallel, product, series, spy
    from wellposed.models import (
        DEQ,
        Ensemble,
        ImplicitForm,
        ImplicitModel,
        ImplicitRNN,
        MultiscaleDEQ,
        fixed_steps,
        load,
        save,
    )
    from wellposed.robust import Box, SparseBox
    from wellposed.training import fit

__version__ = "0.1.0"

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
    "Phantom",
    "Picard",
    "RandomSteps",
    "Relative",
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
    "baselines",
    "certificate",
    "convert",
    "convex",
    "eliminate_features",
    "equilibrium",
    "errors",
    "experiments",
    "feedback",
    "fit",
    "fit_states",
    "fixed_point",
    "fixed_steps",
    "forms",
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
    "series",
    "spy",
    "tasks",
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
    "Certificate": "wellposed.equilibrium",
    "Contraction": "wellposed.equilibrium",
    "Ensemble": "wellposed.models",
    "ErrorBound": "wellposed.equilibrium",
    "Gradient": "wellposed.equilibrium",
    "Implicit": "wellposed.equilibrium",
    "ImplicitForm": "wellposed.models",
    "ImplicitModel": "wellposed.models",
    "ImplicitRNN": "wellposed.models",
    "MeanRelative": "wellposed.equilibrium",
    "MultiscaleDEQ": "wellposed.models",
    "Newton": "wellposed.equilibrium",
    "Phantom": "wellposed.equilibrium",
    "Picard": "wellposed.equilibrium",
    "RandomSteps": "wellposed.equilibrium",
    "Relative": "wellposed.equilibrium",
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
    "baselines": "wellposed",
    "certificate": "wellposed.equilibrium",
    "convert": "wellposed",
    "convex": "wellposed",
    "eliminate_features": "wellposed.convex",
    "equilibrium": "wellposed",
    "errors": "wellposed",
    "experiments": "wellposed",
    "feedback": "wellposed.forms",
    "fit": "wellposed.training",
    "fit_states": "wellposed.convex",
    "fixed_point": "wellposed.equilibrium",
    "fixed_steps": "wellposed.models",
    "forms": "wellposed",
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
    "series": "wellposed.forms",
    "spy": "wellposed.forms",
    "tasks": "wellposed",
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
    return [*__all__, "__version__"]
