"""004 section 4.2, Figures 3 and 14-17: training with attacks, and the defences. All results are plots."""

from collections.abc import Iterator

from wellposed.experiments.papers.row import Row, Sheet
from wellposed.experiments.rules import Measure

DEFENCES = {
    "": "none",
    "-input-10db": "noise of 10 dB on the input",
    "-state-0db": "noise of 0 dB on the state",
    "-state-10db": "noise of 10 dB on the state",
    "-random-threshold": "a random number of solver steps",
}
DEQ, FFW = "deq-conv-input-0db", "ffw-conv-state-0db"  # the best defended by 004
SHEET = Sheet("004", "adversarial")
MASKED = (
    "Judged as in 004, by attacks along the gradient of nine unrolled steps; the controls say what attacks along "
    "exact gradients leave."
)
STRONGER = (
    "Not in 004: of its attacks, Square and those along exact gradients, averaged over the randomness, the worst "
    "for every image."
)
UNSTATED = "The text names no order, and the curves are only in the plot."


def measure(metric: str, model: str, at: float | str | None = None) -> Measure:
    """Names one of our numbers."""
    return Measure(metric, model, "mnist", at)


def defences() -> Iterator[Row]:
    for defence, name in DEFENCES.items():
        claim = f"Against PGD noise of 0 dB on the input defends the DEQ better than {name}."
        ours = measure("pgd_accuracy", DEQ, 10)
        yield SHEET.order("Figure 3 (a)", claim, ours, f"deq-conv{defence}", "higher", note=MASKED)
    for defence in ("", "-state-10db"):
        claim = f"Against PGD noise of 0 dB on the states defends the FFW better than {DEFENCES[defence]}."
        ours = measure("pgd_accuracy", FFW, 10)
        yield SHEET.order("Figure 3 (b)", claim, ours, f"ffw-conv{defence}", "higher")
    note = "The radii are only in the plot; judged at 0.2. "
    for best, kind in ((DEQ, "deq"), (FFW, "ffw")):
        claim = f"At every radius of PGD the strongest defence of the {kind.upper()} beats none."
        ours = measure("epsilon_accuracy", best, 0.2)
        yield SHEET.order("Figure 14", claim, ours, f"{kind}-conv", "higher", note=note + MASKED)
        claim = f"Under AutoAttack at 0.3 the strongest defence of the {kind.upper()} beats none."
        ours = measure("autoattack_accuracy", best, 0.3)
        yield SHEET.order("Figure 15", claim, ours, f"{kind}-conv", "higher", note=MASKED)
        claim = f"Under every attack of ours the strongest defence of the {kind.upper()} beats none."
        ours = measure("adaptive_accuracy", best, "worst")
        yield SHEET.order("section 4.2", claim, ours, f"{kind}-conv", "higher", note=STRONGER)
    for name in ("speckle", "salt and pepper"):
        claim = f"Under {name} the defences differ."
        yield SHEET.excluded("Figure 15", claim, None, UNSTATED)


def pairs() -> Iterator[Row]:
    note = "The range of steps is only in the plot; judged from 10 to 40. " + MASKED
    claim, lead = "The lead of the DEQ grows with the number of PGD steps.", "pgd_gain"
    yield SHEET.order("section 4.2", claim, measure(lead, DEQ, 40), measure(lead, DEQ, 10), "higher", note=note)
    for ending, how, place in (("", "PGD", "Figures 3 (c-f) and 16"), ("-trades", "TRADES", "Figure 17")):
        deq, ffw, best = DEQ + ending, FFW + ending, "the best defended DEQ is more accurate than the FFW"
        claim = f"Trained with {how}, {best} under PGD of 40 steps."
        yield SHEET.order(place, claim, measure("pgd_accuracy", deq, 40), ffw, "higher", note=MASKED)
        claim = f"Trained with {how}, {best} under PGD within 0.2."
        yield SHEET.order(place, claim, measure("epsilon_accuracy", deq, 0.2), ffw, "higher", note=MASKED)
        claim = f"Trained with {how}, {best} under AutoAttack at 0.3."
        yield SHEET.order(place, claim, measure("autoattack_accuracy", deq, 0.3), ffw, "higher", note=MASKED)
        claim = f"Trained with {how}, {best} under AutoAttack for random models at 0.3."
        yield SHEET.order(place, claim, measure("autoattack_rand_accuracy", deq, 0.3), ffw, "higher", note=MASKED)
        claim = f"Trained with {how}, {best} under every attack of ours."
        yield SHEET.order(place, claim, measure("adaptive_accuracy", deq, "worst"), ffw, "higher", note=STRONGER)
        for name in ("speckle", "salt and pepper"):
            claim = f"Trained with {how}, {best} under {name}."
            yield SHEET.excluded(place, claim, None, UNSTATED)


def adversarial() -> Iterator[Row]:
    """Returns all rows of the suite."""
    yield from defences()
    yield from pairs()
