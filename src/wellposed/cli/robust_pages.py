"""The pages of `wellposed certify` and `wellposed attack`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.cli.inputs import Labelled
from wellposed.pages.charts import Series, dot_chart, share_chart
from wellposed.pages.images import image, ink, signed
from wellposed.pages.markup import Html, Step, element, figure, page, percent, plural, table
from wellposed.robust.attacks import Attack
from wellposed.robust.certification import Examination, Radius
from wellposed.robust.draw import as_picture, strongest, telling

TILES = 5  # images of a gallery of certify
CHANGED, OTHERS = 17, 3  # images of the gallery of attack
METHODS = {  # what each proves, in a line
    "norm": "one number for all states, from induced norms (003 eq. 4.3-4.4)",
    "box": "a box from |A| and |B|, by elimination with a check (003 Theorems 5-6)",
    "interval": "intervals pushed through until they rest; on layers the same as interval propagation",
    "l2": "a Euclidean ball of states, where the form is monotone or contractive in the 2-norm",
    "crown": "linear bounds at the fixed point, refined",
    "optimised": "the same, slopes optimised for every bound",
    "lp": "the linear program as printed (003 section 4.3)",
    "triangle": "a linear program over the convex hull of every ReLU, on refined intervals",
}


@dataclass(frozen=True)
class Heading:
    """What a page is about.

    Args:
        given: model and samples.
        about: facts in a few words each.
        command: that makes the page again.
        valid: the range of the inputs.
    """

    given: Labelled
    about: Sequence[str]
    command: str
    valid: tuple[float, float]

    def facts(self) -> list[str]:
        """Returns what stands below the title."""
        return [f"model: {self.given.name}", f"data: {self.given.source}", *self.about]

    def picture(self, u: Tensor, text: str) -> Html:
        """Shows one input as ink on paper, or in its colours."""
        return image(ink(as_picture(u).double().cpu().numpy(), *self.valid), text)

    @property
    def pictorial(self) -> bool:
        """Whether inputs can be shown as pictures."""
        return as_picture(self.given.u[0]).shape[0] > 1


def certificate_page(
    heading: Heading, examination: Examination, radii: Sequence[Radius], method: str, samples: int
) -> str:
    """Writes the page of `wellposed certify`.

    Args:
        radii: those of `examination`, with the widths of bounds.
        samples: how many the widths were measured on.
    """
    clean, count = radii[0].share("clean"), len(examination.proven)
    half = min(radii, key=lambda one: abs(one.share("certified") - clean / 2))  # where proofs begin to end
    lead = (
        f"{percent(clean)} of {plural(count, 'sample')} have their class. If every input may move by up to "
        f"{half.epsilon:g}, {percent(half.share('certified'))} provably keep it, and "
    )
    if half.share("certified") == half.share("attacked"):
        lead += "no others do under the attack that was tried: nothing is left open."
    else:
        lead += (
            f"{percent(half.share('attacked'))} keep it under the attack that was tried: the truth lies between."
        )
    end = next((one.epsilon for one in radii if not bool(one.certified.any())), None)
    limit = f"From a radius of {end:g} on, nothing is proven." if end is not None else (
        f"At the largest radius, {radii[-1].epsilon:g}, some samples are still proven.")  # fmt: skip
    body = [
        element("div", _accuracy(radii, method), _widths_figure(radii, samples), class_="figures"),
        *(_proven_and_broken(heading, examination) if heading.pictorial else []),
        element("h2", "Accuracy by radius"),
        table(["radius", "clean", "certified", "attacked", "open"], [_line(one) for one in radii]),
        *_width_section(radii),
    ]
    attack = next((one.epsilon for one in radii if bool((one.clean & ~one.attacked).any())), radii[-1].epsilon)
    command = f"wellposed attack --model {heading.given.name} --data {heading.given.data} --epsilon {attack:g}"
    return page(
        "How far can the input move before the class can change?",
        body,
        lead=[element("p", lead), element("p", limit)],
        facts=heading.facts(),
        command=heading.command,
        steps=[Step("See what an attack does at the first radius at which it succeeds.", command), *_training()],
    )


def _training() -> list[Step]:
    return [Step("Compare with a small model that was trained to be provable.",
                 "wellposed certify --model reference:digits-robust --data digits")]  # fmt: skip


def _accuracy(radii: Sequence[Radius], method: str) -> Html:
    start = [radii[0].share("clean")] if radii[0].epsilon > 0 else []  # at radius zero all are clean accuracy
    places = [*(0.0 for _ in start), *(one.epsilon for one in radii)]
    low, high = ([*start, *(one.share(name) for one in radii)] for name in ("certified", "attacked"))
    clean = [radii[0].share("clean")] * len(places)
    series = [
        Series("clean", 3, places, clean, dashed=True),
        Series("true accuracy", 0, places, low=low, high=high),
    ]
    drawn = share_chart(
        series, "Accuracy against the radius", "radius", "samples with their class", x_ticks=places
    )
    if low == high:
        return figure(
            drawn, "What is proven is all that an attack (PGD) leaves, at every radius: nothing is left open."
        )
    caption = (
        f"Solid: proven (bounds: {method}). Dashed blue: what an attack (PGD) leaves. The truth lies between."
    )
    return figure(drawn, caption)


def _widths_figure(radii: Sequence[Radius], samples: int) -> Html | None:
    widths = {f"{one.epsilon:g}": one.widths for one in radii if one.widths}
    if not widths:
        return None
    drawn = dot_chart(widths, "Widths of the bounds by method", "mean width of an output's bounds")
    return figure(
        drawn, f"Bounds of all outputs by method, mean over {plural(samples, 'sample')}; a colour a radius."
    )


def _proven_and_broken(heading: Heading, examination: Examination) -> list[Html]:
    """Shows the samples that are proven farthest and those that break first."""
    u, target = heading.given.u, heading.given.target
    proven = [
        row
        for row in examination.proven.argsort(descending=True, stable=True).tolist()
        if examination.proven[row] >= 0
    ]
    broken = [
        row for row in examination.broken.argsort(stable=True).tolist() if torch.isfinite(examination.broken[row])
    ]
    strong, weak = [], []
    for row in proven[:TILES]:
        name = f"is {int(target[row])}"
        verdict = element("span", "proven", class_="good")
        about = f"{name}, ", verdict, element("br"), f"to {examination.proven[row]:g}"
        strong.append(element("div", heading.picture(u[row], name), *about))
    for row in broken[:TILES]:
        name, said = f"is {int(target[row])}", f"said {int(examination.predicted[row])}"
        pictures = (
            heading.picture(u[row], name),
            heading.picture(examination.attacked[row], f"the same, attacked: {said}"),
        )
        label = element("span", said, class_="wrong")
        weak.append(element("div", pictures, f"{name}, ", label, element("br"), f"at {examination.broken[row]:g}"))
    galleries = []
    if strong:
        caption = f"{plural(len(proven), 'sample')} provable at some radius; these hold out longest."
        galleries.append(figure(element("div", strong, class_="gallery"), caption))
    if weak:
        caption = (
            f"{plural(len(broken), 'sample')} broken by the attack at some radius, these first; below each, how."
        )
        galleries.append(figure(element("div", weak, class_="gallery"), caption))
    return [element("h2", "Proven and broken"), element("div", galleries, class_="figures")] if galleries else []


def _line(one: Radius) -> list[str]:
    shares = [one.share(name) for name in ("clean", "certified", "attacked")]
    return [f"{one.epsilon:g}", *(percent(value) for value in (*shares, shares[2] - shares[1]))]


def _width_section(radii: Sequence[Radius]) -> list[Html]:
    methods = list(dict.fromkeys(method for one in radii for method in (*one.widths, *one.reasons)))
    if not any(one.widths for one in radii):
        return []
    lines = []
    for method in methods:
        cells = [f"{one.widths[method]:.4g}" if method in one.widths else "\N{EN DASH}" for one in radii]
        lines.append([method, *cells])
    why = {name: f" Not computed: {text.rstrip('.')}." for one in radii for name, text in one.reasons.items()}
    items = [element("li", element("b", name), f": {METHODS[name]}.", why.get(name, "")) for name in methods]
    return [
        element("h2", "Widths of the outputs' bounds"),
        table(["method", *(f"{one.epsilon:g}" for one in radii)], lines),
        element("ul", items, class_="quiet"),
    ]


def attack_page(heading: Heading, attack: Attack, before: Tensor, epsilon: float) -> str:
    """Writes the page of `wellposed attack`.

    Args:
        before: (B,), the classes of the clean inputs.
    """
    right = before == heading.given.target
    changed = right & attack.success
    lead = (
        f"Of {plural(len(right), 'sample')}, {int(right.sum())} have their class; {attack.name} with epsilon "
        f"{epsilon:g} changes {int(changed.sum())} of these, which leaves an accuracy of "
        f"{percent(attack.accuracy)}."
    )
    quiet = "Every changed input lies in its set and was run through the model itself."
    body = [*(_gallery(heading, attack, before) if heading.pictorial else [])]
    if attack.notes:
        body += [element("h2", "Notes"), element("ul", [element("li", note) for note in attack.notes])]
    command = f"wellposed certify --model {heading.given.name} --data {heading.given.data}"
    return page(
        "What an attack finds",
        body,
        lead=[element("p", lead), element("p", quiet, class_="quiet")],
        facts=heading.facts(),
        command=heading.command,
        steps=[Step("An attack that fails proves nothing. See what can be proven.", command), *_training()],
    )


def _gallery(heading: Heading, attack: Attack, before: Tensor) -> list[Html]:
    """Shows the samples that were changed, then some that were not; those that were wrong before are left out."""
    target, u = heading.given.target, heading.given.u
    right = before == target
    rows = [row for row in telling(before, attack, target).tolist() if right[row]]
    changed = [row for row in rows if attack.success[row]]
    unchanged = [row for row in rows if not attack.success[row]]
    shown = [*changed[:CHANGED], *unchanged[:OTHERS]]
    if not shown:
        return [element("p", "No sample had its class before the attack, so there is nothing to show.")]
    change = (attack.inputs - u)[shown]
    scale = max(float(change.abs().max()), 1e-12)
    tiles = []
    for row, moved in zip(shown, change, strict=True):
        name, said = f"is {int(target[row])}", f"said {int(attack.outputs[row].argmax())}"
        pictures = (
            heading.picture(u[row], name),
            heading.picture(attack.inputs[row], f"the same, attacked: {said}"),
            image(signed(strongest(moved).double().cpu().numpy(), scale), "what was changed"),
        )
        verdict = element(
            "span", said if attack.success[row] else "kept", class_="wrong" if attack.success[row] else "good"
        )
        tiles.append(element("div", pictures, f"{name}, ", verdict))
    wrong = int((~right).sum())
    left_out = f" Wrong before, and not shown: {plural(wrong, 'sample')}." if wrong else ""
    caption = (
        "From top to bottom: clean, attacked, and the change, blue where an input rises and orange where it falls"
        f", by {scale:.3g} at most. Changed classes first: {len(changed)}, of which {min(len(changed), CHANGED)} "
        f"are shown; then {min(len(unchanged), OTHERS)} of {len(unchanged)} that were kept.{left_out}"
    )
    return [element("h2", "Attacked inputs"), figure(element("div", tiles, class_="gallery"), caption)]
