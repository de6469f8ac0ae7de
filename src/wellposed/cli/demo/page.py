"""What the demo says: six answers in plain words, as a table for the terminal and as one HTML page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from wellposed.cli.demo.questions import FEEDBACK, NETWORK, ROBUST, SPARSE, DemoResult, nothing_proven
from wellposed.pages.charts import (
    Series,
    bar_chart,
    histogram,
    limit_chart,
    line_chart,
    matrix_chart,
    share_chart,
)
from wellposed.pages.images import image, ink, signed
from wellposed.pages.markup import Html, Step, brand, document, element, figure, join, next_steps, percent, plural
from wellposed.robust.certification import Radius
from wellposed.robust.draw import as_picture

TITLE = "One digit reader, six questions"
WHAT = (
    "An implicit model computes its hidden state x as the solution of an equation, x = \N{GREEK SMALL LETTER PHI}"
    "(Ax + Bu), in place of a fixed stack of layers. "
    "This library sees to it that the solution exists, is the only one and was reached, and says so for every "
    "input u."
)
SHOWN = (0, 1, 2, 4, 8, 16, 32)  # steps of the iteration that is pictured
NUMBERS = tuple("abcdef")


@dataclass(frozen=True)
class Answer:
    """One question: its answer in a sentence, its numbers, and its caveats."""

    question: str
    answer: str
    numbers: Sequence[tuple[str, str]]  # value and what it is
    honest: str = ""


def answers(result: DemoResult) -> list[Answer]:
    """Answers the six questions."""
    return [_got(result), _equation(result), _needed(result), _reached(result), _checked(result), _moved(result)]


def _got(result: DemoResult) -> Answer:
    right, count = result.right(result.network.predicted), len(result.test)
    return Answer(
        "What have I got?",
        f"An ordinary network with two hidden layers that reads {right} of {count} unseen digits correctly.",
        [(percent(right / count), "of unseen digits"), (f"{result.network.weights:,}", "weights")],
    )


def _equation(result: DemoResult) -> Answer:
    equation = result.equation
    same = "exactly its outputs" if equation.difference == 0 else f"its outputs up to {equation.difference:.1e}"
    return Answer(
        "Is it one equation?",
        f"Yes: one line of code writes it as x = \N{GREEK SMALL LETTER PHI}(Ax + Bu), y = Cx + Du, and that gives "
        f"{same} on all {len(result.test)} images.",
        [(f"{equation.difference:.1g}", f"largest difference, of outputs up to {equation.largest_output:.0f}"),
         (str(equation.form.sizes[0]), "states")],
    )  # fmt: skip


def _needed(result: DemoResult) -> Answer:
    report = result.sparse.report
    lost = result.right(result.network.predicted) - result.right(result.sparse.predicted)
    left, allowed = int(report.nonzeros.sum()), report.allowed
    cost = f"costs {plural(lost, 'image')} of {len(result.test)}" if lost > 0 else "costs no image here"
    return Answer(
        "How much of it is needed?",
        f"A tenth: a model with {left} of {allowed:,} weights in A and B, fitted row by row by convex programs "
        f"that prove how near each row is to the best one, reads "
        f"{percent(result.accuracy(result.sparse.predicted))} of the digits correctly.",
        [(percent(report.sparsity), "zeros"),
         (f"{float(report.relative_gap.max()):.0e}", "largest duality gap of a row, relative"),
         ("proven" if report.certificate.holds else "not proven", "well-posed")],
        f"The zeros are not free: setting {percent(report.sparsity)} of the weights to zero {cost}.",
    )  # fmt: skip


def _reached(result: DemoResult) -> Answer:
    feedback, count = result.feedback, len(result.test)
    steps, failed = feedback.solution.steps, int(feedback.solution.failed.sum())
    gained = result.right(feedback.predicted) - result.right(result.network.predicted)
    share = result.accuracy(result.network.predicted)
    chance = max(1, round(math.sqrt(count * share * (1 - share))))
    more = (
        f"{plural(abs(gained), 'image')} {'more' if gained > 0 else 'fewer'} than the network"
        if gained
        else "as many as the network"
    )
    verdict = (
        f"Feedback buys no accuracy here: {result.right(feedback.predicted)} of {count} right, {more}; "
        f"differences of about {chance} are chance."
        if gained <= 2 * chance
        else f"On these images feedback gains {plural(gained, 'image')}; differences of about {chance} are "
        "chance, and one seed proves nothing."
    )
    reached = "every one of them was reached" if failed == 0 else f"{failed} of them were not reached"
    return Answer(
        "Was every equilibrium reached?",
        f"In a model whose states feed back into each other, each of the {count} images has its own "
        f"equilibrium; {reached}, in {int(steps.min())} to {int(steps.max())} steps, with a proven bound on the "
        "remaining error.",
        [(str(failed), "failed"), (f"{float(feedback.bounds.max()):.1e}", "largest error bound of a state"),
         (f"{int(feedback.settled.sum())} of {count}", "digits that this error cannot change")],
        verdict,
    )  # fmt: skip


def _checked(result: DemoResult) -> Answer:
    checked = result.checked
    claims = sum(map(len, checked.proven.values()))
    return Answer(
        "Who else can check?",
        f"Anyone: a separate program that imports neither torch nor the rest of this library proves "
        f"{plural(claims, 'claim')} about the two saved models again, in exact fractions, and refuses a copy "
        f"with one flipped bit.",
        [(f"{checked.row_sums[0]:.3f}", "largest row sum of |A|, which has to stay below 1"),
         (f"{checked.seconds:.1f} s", "for both files")],
    )  # fmt: skip


def _moved(result: DemoResult) -> Answer:
    plain, robust = result.robustness.plain, result.robustness.robust
    index = result.config.radii.index(result.robustness.epsilon)
    one, other = plain.radii[index], robust.radii[index]
    ends = [
        _end(name, robustness.radii)
        for name, robustness in (("the plain model", plain), ("the robust one", robust))
    ]
    return Answer(
        "How far can a pixel move?",
        f"If every pixel may change by {one.epsilon:g} of full ink, the plain model provably still reads "
        f"{percent(one.share('certified'))} of the digits correctly, and a model trained for it "
        f"{percent(other.share('certified'))}.",
        [(percent(one.share("certified")), f"proven at {one.epsilon:g}, plain"),
         (percent(other.share("certified")), f"proven at {one.epsilon:g}, robust")],
        f"Proofs end: {' and '.join(ends)}.",
    )  # fmt: skip


def _end(name: str, radii: Sequence[Radius]) -> str:
    end = nothing_proven(radii)
    if end is None:
        return f"{name} still has proofs at {radii[-1].epsilon:g}"
    return f"at {end:g} nothing is proven of {name}"


def speed(result: DemoResult) -> str:
    """Says how fast the equilibria were found."""
    compiled, plain = result.feedback.seconds.values()
    if not result.feedback.reason.startswith("numba"):
        return f"No compiled kernel was used here ({result.feedback.reason})."
    return (
        f"All {len(result.test)} equilibria take {1e3 * compiled:.1f} ms with the compiled kernel and "
        f"{1e3 * plain:.1f} "
        f"ms with the plain torch loop at the same tolerance, on one core: {plain / compiled:.0f} times less."
    )


def steps(result: DemoResult) -> list[Step]:
    """Returns three commands, which run as they are printed and take one's own network in place of the demo's."""
    network = result.folder / NETWORK
    return [
        Step("Write a network as one equation; your own as .pt2 file or module:factory.",
             f"wellposed convert {network} --input-shape 64 -o {result.folder / 'equation.safetensors'}"),
        Step("Keep a tenth of its weights, with a certificate.",
             f"wellposed sparsify --network {network} --data digits --target-sparsity 0.9 "
             f"-o {result.folder / 'tenth.safetensors'} --report {result.folder / 'tenth.html'}"),
        Step("Prove how far its inputs can move, and attack the rest.",
             f"wellposed certify --model {network} --data digits --samples 50 --no-widths "
             f"--out {result.folder / 'certify.html'}"),
    ]  # fmt: skip


def page(result: DemoResult) -> str:
    """Writes the whole page."""
    pictures = [_mistakes, _whole_matrices, _sparse_matrices, _equilibria, _proof, _radii]
    sections = [
        _section(number, answer, picture(result))
        for number, answer, picture in zip(NUMBERS, answers(result), pictures, strict=True)
    ]
    small = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    data = (
        f"{result.train:,} + {len(result.test)} handwritten digits of 8 \N{MULTIPLICATION SIGN} 8 pixels (UCI, "
        f"Alpaydin and Kaynak, CC BY 4.0). {result.seconds:.0f} seconds. {small}. Again: {result.config.command}"
    )
    return document(
        TITLE,
        [
            brand(),
            element("header", element("h1", TITLE), element("p", WHAT, class_="lead"), _hero(result)),
            element("main", sections),
            element("footer", element("h2", "Now with your own network"), next_steps(steps(result)),
                    element("p", data, class_="quiet")),
        ],
    )  # fmt: skip


def _section(number: str, answer: Answer, picture: Html) -> Html:
    numbers = [element("div", element("b", value), element("span", what)) for value, what in answer.numbers]
    text = element(
        "div",
        element("p", f"({number})", class_="order"),
        element("h2", answer.question),
        element("p", answer.answer, class_="answer"),
        element("div", numbers, class_="measured"),
        element("p", answer.honest, class_="honest") if answer.honest else None,
    )
    return element("section", text, picture, class_="question", id=f"question-{number}")


def _digit(u: Tensor, text: str) -> Html:
    return image(ink(as_picture(u).numpy()), text)


def _hero(result: DemoResult) -> Html:
    """Shows how one image's state comes to rest, step by step, and that every start ends there."""
    reaching = result.feedback.reaching
    states = reaching.iterates.numpy()
    side = math.isqrt(states.shape[1])
    shape = (side, side) if side * side == states.shape[1] else (1, states.shape[1])
    scale, last = float(states.max()), states[-1]
    tiles = [
        element("div", _digit(result.test.flat()[reaching.image], "the input"), element("b", "input u"), "a digit")
    ]
    for order, step in enumerate(SHOWN):
        away = float(np.abs(states[step] - last).max())
        predicted = int(reaching.predicted[step])
        picture = image(signed(states[step].reshape(shape), scale), f"the state after {step} steps")
        about = join(f"reads {predicted}", element("br"), f"{away:.1g} away" if step else "all zero")
        tiles.append(element("div", picture, element("b", f"step {step}"), about, class_="step",
                             style=f"--order: {order}"))  # fmt: skip
    read = int(reaching.predicted[-1])
    last_tile = element("div", str(read), class_="settled"), element("b", "equilibrium"), f"reads {read}"
    tiles.append(element("div", last_tile, class_="step", style=f"--order: {len(SHOWN)}"))
    caption = (
        f"The {result.config.states} states of the model of question (d) as squares, for one image: the same "
        f"step, x "
        "\N{RIGHTWARDS ARROW} \N{GREEK SMALL LETTER PHI}(Ax + Bu), is repeated until nothing changes any more. "
        "What "
        f"it would read on the way is below each picture; it settles on {read}."
    )
    series = [Series(name, style, list(range(len(values))), values)
              for style, (name, values) in enumerate(reaching.distances.items())]  # fmt: skip
    first = max(values[0] for values in reaching.distances.values())
    proven = [first * result.config.kappa**step for step in range(len(series[0].x))]
    series.append(Series("proven at worst", 3, series[0].x, proven, dashed=True))
    chart = line_chart(series, "Distance from the equilibrium against steps, from three starts", "step",
                       "distance from the equilibrium")  # fmt: skip
    text = "Wherever it starts, it ends at the same point: that is what well-posed means, and it is proven."
    return join(
        element("div", tiles, class_="reaching"),
        element("p", caption, class_="quiet"),
        element("div", figure(chart), element("div", element("p", text, class_="lead"), element("p",
                "The largest row sum of |A| is below 1, so every step brings any two states closer together by at "
                f"least the factor {result.config.kappa:g}, for every input there is.", class_="quiet")),
                class_="figures"),
    )  # fmt: skip


def _mistakes(result: DemoResult) -> Html:
    predicted, labels, u = result.network.predicted, result.test.labels, result.test.flat()
    tiles = [
        element("div", _digit(u[row], f"a digit {int(labels[row])}"), f"is {int(labels[row])}, ",
                element("span", f"read {int(predicted[row])}", class_="wrong"))
        for row in (predicted != labels).nonzero()[:, 0].tolist()[:15]
    ]  # fmt: skip
    caption = "All digits that it gets wrong." if len(tiles) < 15 else "Some of the digits that it gets wrong."
    return figure(element("div", tiles, class_="gallery"), caption)


def _whole_matrices(result: DemoResult) -> Html:
    form = result.equation.form
    A, B = form.A.to_dense().numpy(), form.B.to_dense().numpy()
    drawn = matrix_chart(A, B, form.partition, "The matrices A and B of the converted network")
    last, first = form.partition
    caption = (
        f"Blue above zero, orange below, empty where there is nothing. The {first} states of the first hidden "
        f"layer "
        f"read the image (B, lower half); the {last} of the second read the first (A, upper right). All below the "
        "diagonal is empty: no feedback, so the equation is solved in one sweep."
    )
    return figure(drawn, caption)


def _sparse_matrices(result: DemoResult) -> Html:
    model, sizes = result.sparse.model, result.sparse.report.blocks
    n = sum(sizes)
    A, B = model.A.detach().numpy()[:n, :n], model.B.detach().numpy()[:n]
    drawn = matrix_chart(A, B, sizes, "The matrices A and B of the sparse model")
    return figure(drawn, f"The same picture of the sparse model. Well-posed: {result.sparse.report.certificate}.")


def _equilibria(result: DemoResult) -> Html:
    feedback, labels, u = result.feedback, result.test.labels, result.test.flat()
    counts = feedback.solution.steps.tolist()
    drawn = histogram({"steps": counts}, "Histogram of the steps to equilibrium", "steps to equilibrium", "images")
    slowest = sorted(range(len(counts)), key=lambda row: (-counts[row], -float(feedback.bounds[row])))[:4]
    tiles = []
    for row in slowest:
        right = int(feedback.predicted[row]) == int(labels[row])
        verdict = element("span", f"reads {int(feedback.predicted[row])}", class_="good" if right else "wrong")
        about = f"{counts[row]} steps, error below {float(feedback.bounds[row]):.0e}"
        tiles.append(element("div", _digit(u[row], f"a digit {int(labels[row])}"), verdict, element("br"), about))
    return element(
        "div",
        figure(drawn, f"Steps per image, {float(feedback.solution.steps.double().mean()):.1f} on average."),
        element("h4", "The four slowest images"),
        element("div", tiles, class_="gallery"),
    )


def _proof(result: DemoResult) -> Html:
    checked = result.checked
    heading, x_label = "Row sums of |A| against the limit 1", "states of the feedback model"
    drawn = limit_chart(checked.row_sums, 1.0, heading, x_label, "row sum of |A|")
    claims = [(name, line.split("\t")) for name, proven in checked.proven.items() for line in proven]
    lines = [f"{name}: {', '.join(filter(None, cells))}" for name, cells in claims]
    used = (
        " Training has used up the cap in every row." if checked.row_sums[-1] > 0.99 * checked.row_sums[0] else ""
    )
    caption = (
        "The proof in a picture: with all sums below the dashed line, a step brings states closer together, so "
        "there "
        f"is one equilibrium and no other. The checker adds these sums up as fractions.{used}"
    )
    report = element("pre", element("code", "\n".join([*lines, f"one bit changed: {checked.why_not}"])))
    return join(element("div", figure(drawn, caption), element("h4", "What the checker says"), report))


def _radii(result: DemoResult) -> Html:
    robustness = result.robustness
    x = [0.0, *result.config.radii]
    series = []
    for style, (name, one) in enumerate((("plain", robustness.plain), (f"robust ({ROBUST})", robustness.robust))):
        clean = one.radii[0].share("clean")
        low, high = ([clean, *(radius.share(kind) for radius in one.radii)] for kind in ("certified", "attacked"))
        series.append(Series(name, style, x, low=low, high=high))
    drawn = share_chart(series, "Accuracy against the radius", "how far every pixel may move",
                        "digits read correctly", x_ticks=x)  # fmt: skip
    caption = (
        f"Solid: proven (CROWN bounds). Dashed: left by an attack (projected gradients). The truth lies in the "
        f"band. "
        f"First {len(robustness.plain.predicted)} unseen images."
    )
    sections: list[Html] = [figure(drawn, caption)]
    if robustness.images:
        sections += [element("h4", f"Broken and proven at {robustness.epsilon:g}"), _broken(result)]
    seconds = result.feedback.seconds
    shown = {name: f"{1e3 * value:.1f} ms" for name, value in seconds.items()}
    bars = bar_chart(seconds, "Time for all equilibria", shown)
    sections += [element("h4", "And how fast?"), figure(bars, speed(result))]
    return element("div", sections)


def _broken(result: DemoResult) -> Html:
    robustness, labels, u = result.robustness, result.test.labels, result.test.flat()
    tiles = []
    for row in robustness.images:
        label, predicted = int(labels[row]), int(robustness.plain.predicted[row])
        pictures = _digit(u[row], f"a digit {label}"), _digit(robustness.plain.attacked[row], "the same, attacked")
        tiles.append(
            element("div", pictures, element("span", f"plain reads {predicted}", class_="wrong"), element("br"),
                    element("span", f"robust proven {label}", class_="good"))
        )  # fmt: skip
    return figure(element("div", tiles, class_="gallery"), "Above the image, below it what the attack made of it.")


def files(result: DemoResult) -> list[str]:
    """Lists what the demo wrote besides the page."""
    return [str(result.folder / name) for name in (NETWORK, SPARSE, FEEDBACK)]
