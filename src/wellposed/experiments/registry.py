"""All suites by name."""

from wellposed.errors import unknown_name
from wellposed.experiments.suite import Suite
from wellposed.experiments.suites import (
    activations,
    arithmetic,
    attack_mnist,
    beyond,
    bounds,
    certified_training,
    depth,
    eliminate_fashion,
    feedback,
    identity,
    parameters,
    rolling_argmax,
    rolling_average,
    sparsify_digits,
    sparsify_fashion,
    spiky,
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
        feedback,
        depth,
        beyond,
        sparsify_digits,
        sparsify_fashion,
        eliminate_fashion,
        bounds,
        attack_mnist,
        certified_training,
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
