"""The demo as one self-contained HTML page: no script, no network."""

from html import escape

from torch import Tensor

from wellposed.experiments.demo import SHIFTS, DemoResult, ModelResult
from wellposed.experiments.demo_text import FINDING, certificates, number, share_failed, steps_at
from wellposed.experiments.page_style import STYLE
from wellposed.experiments.svg import Series, histogram, line_chart

LEGEND = (
    "Median over the seeds, the worst seed below it; k = 2 is the training range. Steps to equilibrium are "
    "means at k = 1 and k = 100; failed is the share of test samples, over all k, that reached none."
)


def page(result: DemoResult) -> str:
    """Writes the whole page."""
    settings, title = result.config, "Who extrapolates, and why?"
    intro = (
        "Four models learn sums of two ranges of 50 numbers from U(&minus;1,&nbsp;1) and are tested on "
        "U(&minus;k/2,&nbsp;k/2): "
        f"{settings.seeds} seeds, {settings.samples:,} samples, {settings.epochs} epochs, "
        f"{result.seconds:.0f} seconds of training and testing."
    )
    body = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{intro}</p>',
        '<div class="finding">' + "".join(f"<p>{_prose(text)}</p>" for text in FINDING) + "</div>",
        '<div class="figures">' + _error_figure(result) + _training_figure(result) + "</div>",
        "<h2>Mean squared error by shift k</h2>",
        f'<p class="quiet">{_prose(LEGEND)}</p>',
        _table(result),
        "<h2>Equilibria</h2>",
        '<div class="figures">' + _steps_figure(result) + _certificates(result) + "</div>",
        "<h2>Run it again</h2>",
        f"<pre>{escape(settings.command)}</pre>",
        f'<p class="quiet">{_recipe(result)}</p>',
        f'<p class="quiet">{_versions(result)}</p>',
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>wellposed demo: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def _series(name: str, style: int, x: list[float], values: Tensor) -> Series:  # values (len(x), M)
    low, middle, high = values.amin(1), values.quantile(0.5, dim=1), values.amax(1)
    return Series(name, style, x, middle.tolist(), low.tolist(), high.tolist())


def _error_figure(result: DemoResult) -> str:
    shifts = [float(shift) for shift in SHIFTS]
    trained = [model for model in result.models if model.history is not None]
    series = [_series(model.name, i, shifts, model.errors) for i, model in enumerate(trained)]
    ends = "; ".join(f"{model.name} {number(model.median()[-1])}" for model in result.models)
    drawing = line_chart(
        series,
        f"Mean squared error against shift k, both logarithmic. Median at k = 100: {ends}.",
        "shift k: inputs from U(-k/2, k/2)",
        "mean squared error",
        x_ticks=shifts,
        log_x=True,
    )
    exact = ", ".join(model.name for model in result.models if model.history is None)
    caption = f"Error against shift. Line: median of the seeds; band: best to worst. Far below: {exact}."
    return _figure(drawing, caption)


def _training_figure(result: DemoResult) -> str:
    series, ends = [], []
    for index, model in enumerate(result.models):
        if model.history is not None:
            losses = model.history.train_loss
            epochs = [float(epoch) for epoch in range(1, len(losses) + 1)]
            series.append(_series(model.name, index, epochs, losses))
            ends.append(f"{model.name} {number(float(losses[-1].quantile(0.5)))}")
    text = f"Training loss against epoch, logarithmic. Median after the last epoch: {'; '.join(ends)}."
    caption = "Training loss, median and band alike. The linear fit is solved at once and has no curve."
    return _figure(line_chart(series, text, "epoch", "training loss"), caption)


def _steps_figure(result: DemoResult) -> str:
    model = _implicit_result(result)
    if model.steps is None:
        return ""
    samples = {f"k = {k}": model.steps[SHIFTS.index(k)].flatten().tolist() for k in (1, 100)}
    means = ", ".join(f"{steps_at(model, k)} at k = {k}" for k in (1, 100))
    drawing = histogram(
        samples,
        f"Histogram of steps to equilibrium; mean {means}.",
        "steps to equilibrium",
        "share of samples",
    )
    caption = (
        f"Steps to equilibrium of the test samples: {means} on average; {share_failed(model)} did not "
        "converge. The stopping rule is relative, so larger inputs need no more steps."
    )
    return _figure(drawing, caption)


def _certificates(result: DemoResult) -> str:
    verdict = "All implicit models are" if result.certified else "NOT all implicit models are"
    lines = "".join(f"<li>{escape(line)}</li>" for line in certificates(result))
    why = (
        "The largest absolute row sum of A, rounding included, is below one: the map is a contraction, and "
        "every input has exactly one equilibrium."
    )
    return f"<div><p>{verdict} certified well-posed.</p><ul>{lines}</ul><p class='quiet'>{why}</p></div>"


def _table(result: DemoResult) -> str:
    heads = ["parameters", *(f"k = {k}" for k in SHIFTS), "steps at 1", "steps at 100", "failed"]
    head = "".join(f'<th scope="col">{name}</th>' for name in ["model", *heads])
    rows = "".join(_row(model, heads) for model in result.models)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(model: ModelResult, heads: list[str]) -> str:
    pairs = zip(model.median(), model.worst(), strict=True)
    cells = [f"{model.parameters:,}"]
    cells += [f"{number(median)}<small>{number(worst)}</small>" for median, worst in pairs]
    cells += [steps_at(model, 1), steps_at(model, 100), share_failed(model)]
    filled = "".join(f'<td data-label="{h}">{cell}</td>' for h, cell in zip(heads, cells, strict=True))
    return f'<tr><th scope="row">{escape(model.name)}</th>{filled}</tr>'


def _implicit_result(result: DemoResult) -> ModelResult:
    return next(model for model in result.models if model.certificates)


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{_prose(caption)}</figcaption></figure>"


def _prose(text: str) -> str:
    return escape(text).replace("a^2", "a<sup>2</sup>").replace("k = ", "k&nbsp;=&nbsp;")


def _recipe(result: DemoResult) -> str:
    config = result.config
    return (
        f"Adam, learning rate {config.learning_rate:g} with cosine decay, batches of {config.batch_size}. The "
        "implicit model has 20 states, kappa 0.5 and no bias; its B and C start at a tenth of the usual size."
    )


def _versions(result: DemoResult) -> str:
    return escape(", ".join(f"{name} {version}" for name, version in result.versions.items()))
