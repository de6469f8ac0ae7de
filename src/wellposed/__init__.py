"""Implicit deep learning: x = f(x, u) is the model; a solver finds it, a stopping rule accepts it, a
gradient differentiates it.

The public names stand in ``__init__.pyi``; each is imported when it is first used.
"""

import ast
import warnings
from importlib import import_module
from pathlib import Path

__version__ = "0.2.0"

_MODULES = {  # by public name
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
# Without what needs an extra (scikit-learn), so that a star import works in every installation.
__all__ = sorted(name for name, module in _MODULES.items() if module != "wellposed.estimators")
_DEPRECATED = {  # names that version 0.2 had here, with the package that has them
    "Ensemble": "wellposed.models",
    "ImplicitSequenceClassifier": "wellposed.estimators",
    "ImplicitSequenceRegressor": "wellposed.estimators",
    "Noisy": "wellposed.models",
    "fixed_steps": "wellposed.models",
    "from_pretrained": "wellposed.models",
    "save_pretrained": "wellposed.models",
    "spy": "wellposed.forms",
    "watch": "wellposed.equilibrium",
}


def __getattr__(name):
    if name in _DEPRECATED:
        package = _DEPRECATED[name]
        warnings.warn(f"wellposed.{name} is deprecated; use {package}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(package), name)
    if name not in _MODULES:
        raise AttributeError(f"module 'wellposed' has no attribute {name!r}{_elsewhere(name)}")
    module = _MODULES[name]
    value = import_module(f"wellposed.{name}") if module == __name__ else getattr(import_module(module), name)
    globals()[name] = value
    return value


def _elsewhere(name):
    """Says which package has a name that is not among the public ones."""
    if name.startswith("_"):
        return ""
    packages = sorted({module for module in _MODULES.values() if module not in (__name__, "wellposed.estimators")})
    return next((f"; it is {package}.{name}" for package in packages if hasattr(import_module(package), name)), "")


def __dir__():
    return [*_MODULES, "__version__"]
