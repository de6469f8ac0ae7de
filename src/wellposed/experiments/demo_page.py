"""The demo as one self-contained HTML page: no script, no network."""

from html import escape

from torch import Tensor

from wellposed.experiments.demo import SHIFTS, DemoResult, ModelResult
from wellposed.experiments.demo_text import FINDING, certificates, number, share_failed, steps_at
from wellposed.experiments.svg import Series, histogram, line_chart

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1e21; --quiet: #5b6168; --line: #d9dde2;
  --panel: #f5f6f8; --c0: #1f5fd0; --c1: #c2410c; --c2: #15803d; --c3: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #e6e8eb; --quiet: #a3abb5;
  --line: #363c44; --panel: #1e2329; --c0: #7fb0ff; --c1: #ff9d5c; --c2: #5fd38a; --c3: #aab2bd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .5rem 0; max-width: 44rem; }
.quiet, figcaption { color: var(--quiet); font-size: .9rem; }
.finding { background: var(--panel); border-left: 4px solid var(--c0); padding: .5rem 1rem; margin: 1.2rem 0;
  border-radius: 4px; }
.finding p { max-width: none; } sup { line-height: 0; }
.figures { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); text-anchor: middle; }
.grid { stroke: var(--line); } .axis { stroke: var(--quiet); }
.line { fill: none; stroke-width: 2; } .band { opacity: .16; } .dot { stroke: none; }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c1); stroke-dasharray: 7 4; }
.line.s2 { stroke: var(--c2); stroke-dasharray: 2 3; }
.line.s3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.band.s0, .dot.s0, .bar.s0 { fill: var(--c0); } .band.s1, .dot.s1, .bar.s1 { fill: var(--c1); }
.band.s2, .dot.s2 { fill: var(--c2); } .band.s3, .dot.s3 { fill: var(--c3); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .5rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; }
th:first-child { text-align: left; } td small { display: block; color: var(--quiet); }
pre { background: var(--panel); padding: .8rem 1rem; border-radius: 4px; margin: .5rem 0;
  white-space: pre-wrap; }
ul { padding-left: 1.2rem; }
@media (max-width: 46rem) {
  thead { display: none; } table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); border: 1px solid var(--line);
    border-radius: 6px; padding: .5rem; margin-bottom: .8rem; }
  tr th { grid-column: 1 / -1; text-align: left; }
  th, td { border: 0; padding: .25rem .4rem; text-align: left; }
  td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: .78rem; }
}
"""

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
    model = _implicit(result)
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


def _implicit(result: DemoResult) -> ModelResult:
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
