"""What the adversarial runs show, in sentences: what the defences are worth once the attacks know them."""

from collections.abc import Sequence

from wellposed_lab.engine.store import Record
from wellposed_lab.report.findings import median_of

DATA = "mnist"
ATTACKS = {
    "construction": "by the attack of 004",
    "construction-eot": "along the same gradient, averaged over draws, with shorter steps at last",
    "implicit-eot": "along the implicit gradient",
    "steps-eot": "through all steps",
    "square": "by Square Attack",
    "worst": "by the worst for every image",
}


def sentences(records: Sequence[Record], models: Sequence[str]) -> list[str]:
    """Returns all findings for which there are records."""
    return [
        *_table(records, models),
        *_masking(records, models),
        *_defences(records, models),
        *_pair(records),
    ]


def _accuracy(records: Sequence[Record], model: str, at: str) -> float | None:
    return median_of(records, DATA, model, "adaptive_accuracy", at)


def _table(records: Sequence[Record], models: Sequence[str]) -> list[str]:
    found = []
    for model in models:
        clean = median_of(records, DATA, model, "accuracy")
        known = [(how, _accuracy(records, model, at)) for at, how in ATTACKS.items()]
        told = ", ".join(f"{how} {100 * value:.0f}" for how, value in known if value is not None)
        if clean is not None and told:
            found.append(f"{model}: {100 * clean:.0f} % without attack; within 0.3 {told} %.")
    return found


def _masking(records: Sequence[Record], models: Sequence[str]) -> list[str]:
    """Says how much further other attacks than that of 004 go, and how much of it is the gradient."""
    further: list[str] = []
    masked: list[str] = []
    plain: list[str] = []
    for model in models:
        own, same, exact, worst = (
            _accuracy(records, model, at) for at in ("construction", "construction-eot", "steps-eot", "worst")
        )
        if own is not None and worst is not None:
            (further if model.startswith("deq") else plain).append(f"{model} {100 * (own - worst):.0f}")
        if same is not None and exact is not None:
            masked.append(f"{model} {100 * (same - exact):.0f}")
    told = []
    if further:
        others = f"; of networks, whose gradient is exact, {', '.join(plain)}" if plain else ""
        told.append(
            "How much robustness the attack of 004, along its unrolled gradient, overstates beside the worst "
            f"attack, in points: {', '.join(further)}{others}."
        )
    if masked:
        told.append(
            "How much of it is masked by the unrolled gradient, all else equal (through all steps instead, the "
            f"same attack and as many draws), in points: {', '.join(masked)}."
        )
    return told


def _defences(records: Sequence[Record], models: Sequence[str]) -> list[str]:
    """Says which defences are worth something under the worst attack."""
    told = []
    for kind in ("deq", "ffw"):
        plain = _accuracy(records, f"{kind}-conv", "worst")
        gains = []
        for model in models:
            value = _accuracy(records, model, "worst")
            if model.startswith(f"{kind}-conv-") and model.count("-") > 2 and "trades" not in model:
                gains += [] if value is None or plain is None else [f"{model} {100 * (value - plain):+.0f}"]
        if gains:
            told.append(f"Under the worst attack, against the {kind.upper()} trained alike without a defence, in "
                        f"points: {', '.join(gains)}.")  # fmt: skip
    return told


def _pair(records: Sequence[Record]) -> list[str]:
    """Compares the best defended DEQ and FFW of 004."""
    told = []
    for ending, how in (("", "PGD"), ("-trades", "TRADES")):
        deq, ffw = f"deq-conv-input-0db{ending}", f"ffw-conv-state-0db{ending}"
        values = [_accuracy(records, model, at) for at in ("construction", "worst") for model in (deq, ffw)]
        if all(value is not None for value in values):
            paper, worst = ([100 * (value or 0) for value in part] for part in (values[:2], values[2:]))
            told.append(
                f"Trained with {how}, DEQ with input noise against FFW with state noise, both of 0 dB: "
                f"{paper[0]:.0f} and {paper[1]:.0f} % under the attack of 004, {worst[0]:.0f} and "
                f"{worst[1]:.0f} % under the worst."
            )
    return told
