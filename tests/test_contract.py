"""The public names: where they are imported from, and which keywords they take."""

import inspect
from importlib import import_module

import pytest

# Module, name, and the parameters in order; those after "*" are keywords.
CONTRACT = {
    "wellposed": {
        "fixed_point": "f, x0, *inputs, solver, stop, max_steps, gradient, on_failure, generator",
        "Picard": "damping",
        "Anderson": "memory",
        "Broyden": "memory",
        "Newton": None,
        "Solver": None,
        "Stopping": None,
        "Relative": "rtol, atol, norm",
        "Absolute": "atol",
        "ErrorBound": "tol",
        "MeanRelative": "rtol, window",
        "Steps": None,
        "RandomSteps": "low, high",
        "Implicit": "solver, stop, max_steps",
        "Phantom": "steps, damping",
        "Unrolled": "",
        "Solution": None,
        "ImplicitModel": (
            "in_features, out_features, state_features, *, activation, kappa, condition, rank, feedthrough, bias, "
            "triangular, solver, stop, max_steps, gradient, on_failure, executor"
        ),
        "ImplicitRNN": "input_size, hidden_size, state_features, *, out_features, batch_first",
        "DEQ": "cell, *, state_shape, solver, stop, gradient, noise",
        "MultiscaleDEQ": None,
        "Noise": "signal, state, input, *, kind, redraw, literal",
        "certificate": None,
        "Certificate": None,
        "ImplicitForm": "A, B, C, D, bias, activation, input_shape",
        "series": None,
        "parallel": None,
        "add": None,
        "product": None,
        "feedback": None,
        "to_implicit": "module, input_shape",
        "States": "U, Z, X, Y, blocks, activations",
        "record_states": "network, loader",
        "fit_states": (
            "states, *, kappa, bound, objective, strength, target_sparsity, support, rescale, refit_output, "
            "solver, jobs, device"
        ),
        "eliminate_features": "states, *, kappa, gamma, method, keep",
        "Box": "lower, upper",
        "SparseBox": "center, radius, k, lower, upper",
        "save": "model, path",
        "load": "path",
        "ImplicitRegressor": (
            "state_features, *, kappa, max_epochs, batch_size, learning_rate, random_state, device"
        ),
        "ImplicitClassifier": (
            "state_features, *, kappa, max_epochs, batch_size, learning_rate, random_state, device"
        ),
    },
    "wellposed.robust": {
        "output_bounds": "method, budget",
        "state_bounds": "method, budget",
        "margin_bounds": None,
        "sensitivity": None,
        "lipschitz": None,
        "worst_case_loss": "target, loss",
        "Bounds": None,
    },
}
ATTRIBUTES = {
    "ImplicitModel": "forward equilibrium form certificate from_matrices",
    "ImplicitForm": "to_model rescale to_dense",
    "Solver": "init step",
    "Stopping": "begin check",
    "ImplicitRNN": "from_matrices",
}
SOLUTION = ("value", "status", "steps", "residuals", "error_bound", "converged", "adjoint")
NAMES = [(module, name) for module, names in CONTRACT.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_takes_its_keywords(module, name):
    thing, wanted = getattr(import_module(module), name), CONTRACT[module][name]
    if wanted is None:
        return
    parameters = inspect.signature(thing).parameters
    for word in (word.strip() for word in wanted.split(",") if word.strip() not in ("", "*")):
        assert word.lstrip("*") in parameters, f"{name} has no {word}: {list(parameters)}"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_public_class_has_its_methods(name):
    kind = getattr(import_module("wellposed"), name)
    assert all(hasattr(kind, method) for method in ATTRIBUTES[name].split())


def test_a_solution_says_all_that_is_promised():
    torch, wp = import_module("torch"), import_module("wellposed")
    solution = wp.fixed_point(lambda x, u: 0.5 * x + u, torch.zeros(2, 3), torch.ones(2, 3))
    assert all(hasattr(solution, name) for name in SOLUTION)
