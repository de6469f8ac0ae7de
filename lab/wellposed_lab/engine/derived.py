"""Numbers that suites make from several of their records."""

from collections.abc import Iterable

from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.engine.store import Record


def with_derived(records: Iterable[Record]) -> list[Record]:
    """Returns the records with the numbers that their suites derive from them.

    Example:
        >>> with_derived([])
        []
    """
    known = list(records)
    for suite in all_suites().values():
        own = [index for index, record in enumerate(known) if record.suite == suite.name]
        if suite.derived is not None and own:
            for index, record in zip(own, suite.derived([known[index] for index in own]), strict=True):
                known[index] = record
    return known
