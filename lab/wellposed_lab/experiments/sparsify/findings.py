"""Sentences about networks that were made sparse, from records."""

from collections.abc import Sequence

from wellposed_lab.engine.store import Record
from wellposed_lab.report.findings import median_of

RIVAL_NAMES = {
    "magnitude": "pruning by magnitude",
    "magnitude-tuned": "pruning by magnitude with training afterwards",
    "sss": "SSS with training afterwards",
    "spr": "SPR with training afterwards",
}


def frontier_sentences(records: Sequence[Record], data: str, points: Sequence[float]) -> list[str]:
    """Says where the fit is ahead of each rival at equal sparsity, and where it is not."""
    task, sentences = f"{data}-sparsity", []
    for rival, name in RIVAL_NAMES.items():
        ours = "state-driven-tuned" if rival != "magnitude" else "state-driven"
        known: list[tuple[float, float]] = []  # sparsity and lead
        for at in points:
            one, other = (median_of(records, task, model, "accuracy", at) for model in (ours, rival))
            if one is not None and other is not None:
                known.append((at, one - other))
        ahead, behind = ([at for at, lead in known if (lead > 0) == wanted] for wanted in (True, False))
        if known:
            extra = " with the same training afterwards" if ours.endswith("tuned") else ""
            sentences.append(
                f"Against {name} the fit{extra} is ahead in the median at a sparsity of {_list(ahead)}"
                f" and not at {_list(behind)}."
            )
    return sentences


def drop_sentence(records: Sequence[Record], data: str, at: float) -> list[str]:
    """Says what a sparsity costs."""
    drop = median_of(records, f"{data}-sparsity", "state-driven", "accuracy_drop", at)
    if drop is None:
        return []
    return [f"With {100 * at:g} % of the weights zero the fit alone loses {100 * drop:.2g} points in the median."]


def bound_sentences(records: Sequence[Record], data: str, kappa: float) -> list[str]:
    """Compares caps on the rows of A and of (A, B)."""
    names = ("state-driven", "state-driven-row", "state-driven-literal")
    state, row, literal = (median_of(records, data, name, "accuracy", kappa) for name in names)
    if state is None or row is None or literal is None:
        return []
    return [
        f"At kappa = {kappa:g} a cap on the rows of A gives an accuracy of {100 * state:.1f} %, one on those of "
        f"(A, B) {100 * row:.1f} %, and the latter in the units of the recording with all columns, as printed, "
        f"{100 * literal:.1f} %: the cap that 003 prints makes the model sparse at the expense of B. Only with it "
        "kappa controls the sparsity."
    ]


def warm_sentence(records: Sequence[Record], data: str, kappas: Sequence[float]) -> list[str]:
    """Says how much warm starts save."""
    pairs = [
        [median_of(records, data, model, "steps", kappa) for model in ("cold-start", "warm-start")]
        for kappa in kappas
    ]
    ratios = [cold / warm for cold, warm in pairs if cold and warm]
    if not ratios:
        return []
    return [
        f"Warm starts of Algorithm 1 save sweeps of coordinate descent by a factor from {min(ratios):.2g} to "
        f"{max(ratios):.2g}. The exact path, which all other fits here use, has no starts and no halvings."
    ]


def loss_sentence(records: Sequence[Record], data: str, points: Sequence[float]) -> list[str]:
    """Says what every sparsity costs."""
    drops = [(at, median_of(records, f"{data}-sparsity", "state-driven", "accuracy_drop", at)) for at in points]
    known = [f"{100 * drop:.1f} points at {100 * at:g} %" for at, drop in drops if drop is not None]
    return [f"What the fit alone loses, in the median: {', '.join(known)} of zero weights."] if known else []


def certificate_sentence(records: Sequence[Record], data: str, points: Sequence[float]) -> list[str]:
    """Says what is proven of the rows."""

    def largest(metric: str) -> float | None:
        values = [median_of(records, f"{data}-sparsity", "state-driven", metric, at) for at in points]
        return max((value for value in values if value is not None), default=None)

    norm, gap = largest("largest_norm"), largest("largest_gap")
    if norm is None or gap is None:
        return []
    holds = "so that the implicit form contracts" if norm < 1 else "so that the cap proves nothing"
    return [
        f"In units of powers of two for each layer the largest row of A has an l1-norm of {norm:.3g}, {holds}; "
        f"the largest relative duality gap of a row is {gap:.1g}."
    ]


def lead_sentences(
    records: Sequence[Record], data: str, points: Sequence[float], tuned: Sequence[float]
) -> list[str]:
    """Says how far the fit is ahead of pruning by magnitude, without and with training afterwards."""
    sentences = []
    for ours, rival, where, extra in (
        ("state-driven", "magnitude", points, ""),
        ("state-driven", "magnitude-layerwise", points, " in every layer"),
        ("state-driven-tuned", "magnitude-tuned", tuned, ", both trained a little afterwards"),
    ):
        leads = []
        for at in where:
            pair = [median_of(records, f"{data}-sparsity", model, "accuracy", at) for model in (ours, rival)]
            if pair[0] is not None and pair[1] is not None:
                leads.append(f"{100 * (pair[0] - pair[1]):+.1f} points at {100 * at:g} %")
        if leads:
            sentences.append(f"Against pruning by magnitude{extra}: {', '.join(leads)}.")
    return sentences


def recorded_sentence(records: Sequence[Record], data: str, at: float) -> list[str]:
    """Says what is gained by fitting to the states of the sparse layers instead of the network's."""
    task = f"{data}-sparsity"
    one, other = (
        median_of(records, task, model, "accuracy", at) for model in ("state-driven", "state-driven-recorded")
    )
    if one is None or other is None:
        return []
    return [
        f"At {100 * at:g} % a fit on the states of the network gives {100 * other:.1f} %, a fit on those of the "
        f"sparse layers before {100 * one:.1f} %: errors of one layer are made good by the next."
    ]


def cap_sentence(records: Sequence[Record], data: str, kappas: Sequence[float]) -> list[str]:
    """Says what a cap on whole rows does."""
    results = []
    for kappa in kappas:
        accuracy, sparsity = (
            median_of(records, data, "state-driven-row", metric, kappa) for metric in ("accuracy", "sparsity")
        )
        if accuracy is not None and sparsity is not None:
            zeros = f"{100 * sparsity:.0f} % zeros" if sparsity >= 0 else f"{-100 * sparsity:.0f} % more weights"
            results.append(f"{100 * accuracy:.1f} % with {zeros} at {kappa:g}")
    if not results:
        return []
    return [
        "A cap on whole rows, as 003 prints it, in units in which the network's own rows just fit at .99, gives "
        f"{', '.join(results)}: it shrinks what it keeps, and is no way to sparsity."
    ]


MLA_SENTENCE = (
    "MLA, the third rival of 003 Table 3.2, is run on 20 Newsgroups alone. It selects channels by how features "
    "are distributed over the positions of a feature map, and hidden layers of an MLP have no positions."
)


def _list(points: Sequence[float]) -> str:
    return ", ".join(f"{100 * at:g} %" for at in points) or "none"
