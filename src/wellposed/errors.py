"""Exceptions and warnings, each with its remedy."""

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import SupportsIndex


class WellposedError(Exception):
    """Base of every error that the library raises on purpose."""


class InputError(WellposedError, ValueError):
    """An argument has the wrong shape, dtype or value."""


class UnknownNameError(WellposedError, ValueError):
    """A name is not registered; the message lists the valid ones and the nearest match."""


class IllPosedError(WellposedError, ValueError):
    """No certificate of well-posedness holds."""


class MapError(WellposedError, RuntimeError):
    """The map handed to a solver broke its contract."""


class ConvergenceError(WellposedError, RuntimeError):
    """Some samples did not reach an equilibrium and `on_failure="raise"` was asked for."""


class SecondDerivativeError(WellposedError, RuntimeError):
    """A second derivative was asked of a gradient that offers only the first."""


class NonFiniteLossError(WellposedError, RuntimeError):
    """The loss became NaN or infinite; the model keeps the parameters of the step before."""


class WorkerLostError(WellposedError, RuntimeError):
    """A worker of a parallel run died; what was kept on disk is not done again."""


class MissingExtraError(WellposedError, ImportError):
    """An optional package is not installed."""


class FileFormatError(WellposedError, ValueError):
    """A file is not what its reader expects."""


class ConvergenceWarning(RuntimeWarning):
    """Some samples did not reach an equilibrium."""


def require(package: str, extra: str | None = None) -> ModuleType:
    """Imports an optional package, or says how to install it.

    Args:
        package: a package or one of its modules.
        extra: of this library, or "lab" for what comes with the lab; None: the package is installed by its name.

    Example:
        >>> require("math").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(package)
    except MissingExtraError:
        raise  # one of our own modules has said what it needs
    except ImportError as error:
        name = package.partition(".")[0] if extra is None else f"'wellposed[{extra}]'"
        install = "make lab (or pip install ./lab) in a checkout" if extra == "lab" else f"pip install {name}"
        raise MissingExtraError(f"{package!r} is needed here and is not installed; run: {install}") from error


def require_all(packages: Iterable[tuple[str, str]]) -> None:
    """Names all packages at once that are not installed, each with its extra; imports none.

    Args:
        packages: pairs of a package, by the name under which it is imported, and the extra that brings it.

    Example:
        >>> require_all([("torch", "fast"), ("nowhere", "plots"), ("neither", "convex")])
        Traceback (most recent call last):
            ...
        wellposed.errors.MissingExtraError: neither, nowhere are needed here and not installed; run:
        pip install 'wellposed[convex,plots]'
    """
    missing = sorted({pair for pair in packages if importlib.util.find_spec(pair[0]) is None})
    if not missing:
        return
    names, extras = [name for name, _ in missing], sorted({extra for _, extra in missing})
    install = f"pip install 'wellposed[{','.join(extras)}]'"
    are = "is" if len(names) == 1 else "are"
    raise MissingExtraError(f"{', '.join(names)} {are} needed here and not installed; run: {install}")


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> UnknownNameError:
    """Builds the error for a mistyped name.

    Example:
        >>> str(unknown_name("solver", "andersen", ["anderson", "picard"]))
        "unknown solver 'andersen'; valid: anderson, picard; did you mean 'anderson'?"
        >>> str(unknown_name("activation", "ReLU", ["elu", "relu"]))
        "unknown activation 'ReLU'; valid: elu, relu; did you mean 'relu'?"
    """
    names = sorted(valid)
    by_lower_case = {each.lower(): each for each in reversed(names)}
    close = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1)
    hint = f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""
    return UnknownNameError(f"unknown {kind} {name!r}; valid: {', '.join(names)}{hint}")


def not_a_tensor(name: str, value: object) -> InputError:
    """Builds the error for an argument that is an array, a list or something else.

    Example:
        >>> str(not_a_tensor("u", [1.0, 2.0]))
        'u must be a tensor; received list: use torch.as_tensor(u), in the dtype of the model'
    """
    kind = type(value).__name__
    return InputError(
        f"{name} must be a tensor; received {kind}: use torch.as_tensor({name}), in the dtype of the model"
    )


def positive_integer(name: str, value: object) -> int:
    """Returns a size as an int; one of numpy's is taken too.

    Example:
        >>> positive_integer("in_features", 2.0)
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: in_features must be a positive integer; received 2.0
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not 1 <= value.__index__() < 2**31:
        raise InputError(f"{name} must be a positive integer; received {value!r}")
    return value.__index__()
