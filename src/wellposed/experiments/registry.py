"""All suites by name."""

from wellposed.errors import unknown_name
from wellposed.experiments.suite import Suite
from wellposed.experiments.suites import (
    activations,
    adversarial,
    arithmetic,
    attack_cifar,
    attack_mnist,
    beyond,
    bounds,
    certified_training,
    depth,
    earthquake,
    eliminate_earthquake,
    eliminate_fashion,
    feedback,
    identity,
    matrix_addition,
    mazes,
    noise_cifar,
    noise_mnist,
    noise_regression,
    noise_solvers,
    parameters,
    prefix_sums,
    rolling_argmax,
    rolling_average,
    sparsify_cifar,
    sparsify_digits,
    sparsify_fashion,
    sparsify_newsgroups,
    spiky,
    volatility,
)

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (
        identity,
        arithmetic,
        activations,
        rolling_average,
        rolling_argmax,
        spiky,
        volatility,
        earthquake,
        feedback,
        depth,
        beyond,
        sparsify_digits,
        sparsify_fashion,
        sparsify_cifar,
        sparsify_newsgroups,
        eliminate_fashion,
        eliminate_earthquake,
        bounds,
        attack_mnist,
        attack_cifar,
        certified_training,
        adversarial,
        noise_mnist,
        noise_cifar,
        noise_regression,
        noise_solvers,
        prefix_sums,
        mazes,
        matrix_addition,
        parameters,
    )
}


def get_suite(name: str) -> Suite:
    """Returns a suite, or says which ones there are.

    Example:
        >>> get_suite("identity").papers[0]
        '000 Figure 1'
    """
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]
