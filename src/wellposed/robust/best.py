"""The method "best": what several methods prove, intersected, within a time budget."""

from collections.abc import Callable, Mapping

from wellposed.errors import IllPosedError, InputError, MissingExtraError
from wellposed.robust.query import Query
from wellposed.robust.result import Bounds

ORDER = ("interval", "l2", "crown", "optimised", "triangle")  # cheapest first; those that are registered are tried


def best_bounds(query: Query, methods: Mapping[str, Callable[[Query], Bounds]]) -> Bounds:
    """Intersects the bounds of all methods that apply, as long as there is time; their names are joined by +.

    The cheapest method always runs to its end, and the others stop tightening when the time is over.
    """
    found: Bounds | None = None
    reasons = []
    for name in ORDER:
        if name not in methods or (found is not None and query.late):
            continue
        try:
            bounds = methods[name](query).stated()
        except (InputError, IllPosedError, MissingExtraError) as error:
            reasons.append(f"{name}: {error}")
            continue
        found = bounds if found is None else found.within(bounds)
    if found is None:
        raise IllPosedError("no method bounds this form:\n" + "\n".join(reasons))
    return found.named(f"best ({found.method})")
