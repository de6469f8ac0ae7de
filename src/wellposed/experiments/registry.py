"""All suites by name."""

from wellposed.errors import unknown_name
from wellposed.experiments.suite import Suite
from wellposed.experiments.suites import activations, arithmetic, identity, parameters

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE for module in (identity, arithmetic, activations, parameters)
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
