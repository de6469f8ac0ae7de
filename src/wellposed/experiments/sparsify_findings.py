"""Sentences about sparsified networks, from records."""

from collections.abc import Sequence

from wellposed.experiments.findings import median_of
from wellposed.experiments.record import Record

RIVAL_NAMES = {
    "magnitude": "pruning by magnitude",
    "magnitude-tuned": "pruning by magnitude with training afterwards",
    "sss": "SSS with training afterwards",
    "spr": "SPR with training afterwards",
}


def frontier_sentences(records: Sequence[Record], data: str, points: Sequence[float]) -> list[str]:
    """Says where the fit is ahead of each rival at equal sparsity, and where it is not."""
    task, found = f"{data}-sparsity", []
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
            found.append(
                f"Against {name} the fit{extra} is ahead in the median at a sparsity of {_list(ahead)}"
                f" and not at {_list(behind)}."
            )
    return found


def drop_sentence(records: Sequence[Record], data: str, at: float) -> list[str]:
    """Says what a sparsity costs."""
    drop = median_of(records, f"{data}-sparsity", "state-driven", "accuracy_drop", at)
    if drop is None:
        return []
    return [f"With {100 * at:g} % of the weights zero the fit alone loses {100 * drop:.2g} points in the median."]


def bound_sentences(records: Sequence[Record], data: str, kappa: float) -> list[str]:
    """Says what the ball is about."""
    names = ("state-driven", "state-driven-row", "state-driven-literal")
    found = [median_of(records, data, name, "accuracy", kappa) for name in names]
    state, row, literal = found
    if state is None or row is None or literal is None:
        return []
    return [
        f"At kappa = {kappa:g} a cap on the rows of A gives an accuracy of {100 * state:.1f} %, one on those of "
        f"(A, B) {100 * row:.1f} %, and the latter in the units of the recording with all columns, as printed, "
        f"{100 * literal:.1f} %: the cap that 003 prints makes the model sparse at the expense of B. Only with it "
        "kappa controls the sparsity."
    ]


def warm_sentence(records: Sequence[Record], data: str, kappas: Sequence[float]) -> list[str]:
    """Says what warm starts save."""
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


MLA_SENTENCE = (
    "Not run: MLA, the third rival of 003 Table 3.2. It selects channels by how features are distributed over the "
    "positions of a feature map, and hidden layers of an MLP have no positions."
)


def _list(points: Sequence[float]) -> str:
    return ", ".join(f"{100 * at:g} %" for at in points) or "none"
