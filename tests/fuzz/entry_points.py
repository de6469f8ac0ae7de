"""Public calls with arguments that make no sense: ``python -m tests.fuzz.entry_points --cases 100 --seed 0``.

Every call has arguments that work; one or two of them are replaced by odd ones. What comes back must be an answer
or an error of our own, or of torch that there is no memory for the size that was asked for. Where an argument is
of another type altogether, such as a tensor for a number, which a type checker sees, the errors that Python or
torch raise for that are accepted too. No call may take longer than a few seconds, and the address space may not
grow by more than a stated amount.
"""

import argparse
import collections
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wellposed as wp
from tests.fuzz.mutate import GROWTH, limit_memory
from wellposed import robust
from wellposed.convex import RowFit
from wellposed.errors import WellposedError
from wellposed.estimators import ImplicitRegressor
from wellposed.models import DenseCell
from wellposed.robust import attacks

NUMBERS = (-1, 0, 1, 2, 7, 1.5, -0.5, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"), True, 10**9, 10**30)
ENDLESS = ("steps", "max_steps", "epochs", "max_epochs", "num_layers")  # whose largest value is what it asks for
TEXTS = ("", "x", "relu", "inf", "picard", "\u2603", "a" * 5000)
STRANGE = (None, [], {}, (), b"x", object, 1j)
# What Python and torch raise for arguments of other types.
OF_TYPES = (TypeError, AttributeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError)
SECONDS = 60  # a call that compiles kernels takes a while


def tensors(draw: random.Random) -> Tensor:
    """Draws a tensor of an odd shape, type or content."""
    shape = draw.choice(((), (0,), (3,), (0, 4), (4, 0), (1, 4), (6, 4), (6, 3), (2, 3, 4), (4, 4), (1, 1, 1, 1)))
    kinds = (torch.float32, torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(draw.randrange(9))).to(draw.choice(kinds))
    if tensor.is_floating_point() and tensor.numel() and draw.random() < 0.4:
        tensor.view(-1)[0] = draw.choice((float("nan"), float("inf"), 1e30, -1e30, 1e-40))
    if draw.random() < 0.2:
        return (
            tensor.expand(2, *tensor.shape) if tensor.dim() else tensor.requires_grad_(tensor.is_floating_point())
        )
    return tensor.transpose(0, 1) if tensor.dim() > 1 and draw.random() < 0.2 else tensor


def odd(draw: random.Random, name: str, given: Any) -> Any:
    """Draws an odd argument, mostly of the type of the given one."""
    makers = {
        float: lambda: draw.choice(NUMBERS if name not in ENDLESS else NUMBERS[:-2]),
        Tensor: lambda: tensors(draw),
        str: lambda: draw.choice(TEXTS),
    }
    if draw.random() < 0.75 and kind(given) in makers:
        return makers[kind(given)]()
    return draw.choice((lambda: draw.choice(STRANGE), *makers.values()))()


@dataclass(frozen=True)
class Entry:
    """One public call.

    Args:
        call: what is called.
        arguments: makes arguments that work, by name.
    """

    call: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]


def model(**options: Any) -> wp.ImplicitModel:
    return wp.ImplicitModel(4, 3, 6, on_failure="ignore", **options)


def batch() -> Tensor:
    return torch.rand(6, 4, generator=torch.Generator().manual_seed(0))


def classes() -> Tensor:
    return torch.arange(6) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def real(u: Any) -> Any:
    """Changes the type of an input to that of a cell: what a module of one's own raises comes through."""
    return u.float() if isinstance(u, Tensor) and not u.is_complex() else u


def built(**arguments: Any) -> Tensor:
    return wp.ImplicitModel(**arguments)(batch())


def recurrent(u: Any, **arguments: Any) -> Any:
    return wp.ImplicitRNN(**{"batch_first": True, **arguments})(u)


def solved(x0: Any, u: Any, **arguments: Any) -> Any:
    return wp.fixed_point(lambda x, u: torch.tanh(0.5 * x + 1), x0, u, **arguments)


def trained(u: Any, y: Any, **arguments: Any) -> Any:
    return wp.fit(model(), (u, y), lambda y, given: y.square().mean(), progress=False, **arguments)


def estimated(X: Any, y: Any, **arguments: Any) -> Any:
    return ImplicitRegressor(**arguments).fit(X, y).predict(X)


def rows(X: Any, U: Any, Z: Any, **arguments: Any) -> Any:
    return RowFit(**arguments).solve(X, U, Z)


def form(**arguments: Any) -> Any:
    return wp.ImplicitForm(**arguments)(batch())


def saved(what: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        wp.save(what, Path(folder) / "m.safetensors")
        return wp.load(Path(folder) / "m.safetensors")


def states() -> wp.States:
    return wp.record_states(network(), [batch()])


def attacked(attack: Callable[..., Any], u: Any, target: Any, **arguments: Any) -> Any:
    return attack(model(), u, target, **arguments)


def bounded(lower: Any, upper: Any, **arguments: Any) -> Any:
    return robust.output_bounds(model(), wp.Box(lower, upper), **arguments)


def square() -> Tensor:
    return 0.1 * torch.eye(4)


ENTRIES = {
    "ImplicitModel": Entry(
        built,
        lambda: {
            "in_features": 4,
            "out_features": 2,
            "state_features": 5,
            "activation": "relu",
            "kappa": 0.9,
            "condition": "inf",
            "rank": None,
            "bias": True,
            "feedthrough": True,
            "solver": "picard",
            "max_steps": 50,
            "on_failure": "ignore",
            "executor": "auto",
        },
    ),
    "ImplicitModel, inputs": Entry(lambda u: model()(u), lambda: {"u": batch()}),
    "from_matrices": Entry(
        wp.ImplicitModel.from_matrices,
        lambda: {"A": square(), "B": square(), "C": square(), "bias": torch.zeros(4), "kappa": 0.9},
    ),
    "ImplicitRNN": Entry(
        recurrent,
        lambda: {
            "u": torch.rand(2, 5, 4),
            "input_size": 4,
            "hidden_size": 3,
            "state_features": 5,
            "out_features": 2,
            "num_layers": 2,
        },
    ),
    "DEQ": Entry(
        lambda u, **o: wp.DEQ(DenseCell(4, 3), **o)(real(u)),
        lambda: {"u": batch(), "solver": "anderson", "max_steps": 20, "on_failure": "ignore"},
    ),
    "Ensemble": Entry(
        lambda u, seeds: wp.models.Ensemble.of(model, seeds=seeds)(u), lambda: {"u": batch(), "seeds": [1, 2]}
    ),
    "Noisy": Entry(
        lambda u, **o: wp.models.Noisy(model(), wp.Noise(**o))(u),
        lambda: {"u": batch(), "signal": 20.0, "state": 30.0},
    ),
    "ImplicitForm": Entry(
        form, lambda: {"A": square(), "B": square(), "C": square(), "D": square(), "activation": "relu"}
    ),
    "series": Entry(
        lambda a, b: wp.series(a, b), lambda: {"a": model().form(), "b": wp.to_implicit(nn.Linear(3, 2), (3,))}
    ),
    "feedback": Entry(lambda a: wp.feedback(a), lambda: {"a": wp.to_implicit(nn.Linear(2, 2), (2,))}),
    "fixed_point": Entry(
        solved,
        lambda: {
            "x0": torch.zeros(6, 4),
            "u": batch(),
            "solver": "anderson",
            "max_steps": 30,
            "on_failure": "ignore",
        },
    ),
    "to_implicit": Entry(wp.to_implicit, lambda: {"module": network(), "input_shape": (4,)}),
    "fit": Entry(
        trained,
        lambda: {"u": batch(), "y": torch.zeros(6, 3), "epochs": 1, "batch_size": 3, "device": "cpu", "seed": 0},
    ),
    "record_states": Entry(
        lambda u, limit: wp.record_states(model(), [u], limit=limit), lambda: {"u": batch(), "limit": 10**6}
    ),
    "fit_states": Entry(
        wp.fit_states,
        lambda: {
            "states": states(),
            "kappa": 0.9,
            "objective": "none",
            "strength": 0.0,
            "target_sparsity": None,
            "support": "layered",
            "jobs": 1,
            "solver": "automatic",
        },
    ),
    "RowFit": Entry(
        rows,
        lambda: {
            "X": batch(),
            "U": batch(),
            "Z": torch.rand(6, 2),
            "kappa": 0.5,
            "bound": "state",
            "ridge": 0.0,
            "lasso": 0.0,
            "chunk": 2,
        },
    ),
    "eliminate_features": Entry(wp.eliminate_features, lambda: {"states": states(), "kappa": 0.5}),
    "output_bounds": Entry(
        bounded, lambda: {"lower": batch() - 0.1, "upper": batch() + 0.1, "method": "box", "budget": None}
    ),
    "crown": Entry(bounded, lambda: {"lower": batch() - 0.1, "upper": batch() + 0.1, "method": "crown"}),
    "certified_accuracy": Entry(
        lambda u, y, e: robust.certified_accuracy(model(), wp.Box.around(u, e), y),
        lambda: {"u": batch(), "y": classes(), "e": 0.1},
    ),
    "lipschitz": Entry(robust.lipschitz, lambda: {"model": model()}),
    "pgd": Entry(
        partial(attacked, attacks.pgd),
        lambda: {"u": batch(), "target": classes(), "epsilon": 0.1, "steps": 2, "norm": "inf"},
    ),
    "fgsm": Entry(partial(attacked, attacks.fgsm), lambda: {"u": batch(), "target": classes(), "epsilon": 0.1}),
    "jsma": Entry(partial(attacked, attacks.jsma), lambda: {"u": batch(), "target": classes(), "count": 1}),
    "save": Entry(saved, lambda: {"what": model()}),
    "estimator": Entry(
        estimated,
        lambda: {
            "X": np.eye(6),
            "y": np.arange(6.0),
            "state_features": 3,
            "max_epochs": 1,
            "kappa": 0.9,
            "learning_rate": 0.01,
            "batch_size": 3,
        },
    ),
}


def tried(entry: Entry, draw: random.Random) -> str:
    """Calls with one or two odd arguments; returns the kind of error, or nothing."""
    torch.manual_seed(0)
    arguments = entry.arguments()
    names = draw.sample(sorted(arguments), min(len(arguments), draw.choice((1, 1, 2))))
    strange = False
    for name in names:
        value = odd(draw, name, arguments[name])
        strange = strange or kind(value) is not kind(arguments[name])
        arguments[name] = value
    try:
        entry.call(**arguments)
    except WellposedError as error:
        return type(error).__name__
    except OF_TYPES as error:
        if not strange and "can't allocate memory" not in str(error):
            raise
        return "another type" if strange else "no memory"
    return ""


def kind(value: Any) -> type:
    """Tells numbers, texts, tensors and the rest apart."""
    return float if isinstance(value, bool | int | float) else type(value)


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def fuzz(name: str, cases: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Returns how often every kind of outcome came, and what was not ours."""
    draw, counts, failures = random.Random(f"{seed} {name}"), collections.Counter[str](), {}
    ENTRIES[name].call(**ENTRIES[name].arguments())
    for _ in range(cases):
        signal.alarm(SECONDS)
        try:
            counts[tried(ENTRIES[name], draw) or "answer"] += 1
        except Exception as error:
            signal.alarm(0)
            counts["NOT OURS"] += 1
            frames = [one for one in traceback.extract_tb(error.__traceback__) if "wellposed" in one.filename]
            line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            what = f"{type(error).__name__} at {line}"
            failures.setdefault(what, f"{what}: {str(error)[:150]!r}")
        finally:
            signal.alarm(0)
    return counts, list(failures.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="of every call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="calls whose names contain this")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_long)
    limit_memory(GROWTH)
    start, bad = time.monotonic(), 0
    names = [name for name in ENTRIES if given.only in name]
    for name in names:
        counts, failures = fuzz(name, given.cases, given.seed)
        bad += len(failures)
        print(f"{name:24s} {dict(counts)}", *failures, sep="\n    " if failures else "", flush=True)
    print(f"{len(names)} calls, {given.cases} times each, seed {given.seed}: {bad} kinds of failures, "
          f"{time.monotonic() - start:.0f} s", file=sys.stderr)  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
