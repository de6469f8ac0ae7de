"""README.md from its template beside this file, its two charts, and tables of the documentation, from records.

A place «name» of the template is filled with a number of a record: the demo's (results/package/demo.json, a copy
of what `wellposed demo` writes), the benchmarks', or the verdicts on the lab's records; «output» is what the first
example prints.

Run: make readme = python -m benchmarks.figures.readme
"""

import contextlib
import functools
import io
import json
import os
import re
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.engine.judge import JUDGEMENTS, Verdict, tally, verdicts
from wellposed_lab.report.paper import committed_records

from benchmarks.harness import markdown
from benchmarks.solve.cells import solved
from wellposed.pages.charts import Scale, Series, share_chart

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = Path(__file__).with_suffix(".md")
STATES = 64  # of the problems in the chart
RADIUS = 0.08  # of the demo's radii, named in README
LIBRARIES = {  # and their marks in the chart
    "wellposed": "s1",
    "torchidl": "s3",
    "torchdeq": "s4",
    "jaxopt plain": "s0",
    "jaxopt anderson": "s5",
    "optimistix plain": "s2",
}
COLOURS = {"light": ("#1f5fd0", "#c2410c", "#00795a", "#b0508a", "#6b7280", "#0e7490"),
           "dark": ("#7fb0ff", "#ff9d5c", "#4fd1a5", "#f0a3d0", "#b4bcc7", "#67e8f9")}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    """Reads a committed result."""
    record: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return record


# Numbers.


def percent(value: float) -> str:
    """Writes a share as README does.

    Example:
        >>> percent(0.9), percent(0.765)
        ('90 %', '76.5 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def demo_numbers(demo: dict[str, Any]) -> dict[str, str]:
    """Takes from the demo's record what README says."""
    feedback, sparse, robustness = demo["feedback"], demo["sparse"], demo["robustness"]
    at = robustness["radii"].index(RADIUS)
    difference = demo["equation"]["largest_difference"]
    return {
        "test_images": f"{demo['data']['test_images']}",
        "failed": f"{feedback['failed']}",
        "steps_fewest": f"{feedback['steps_fewest']}",
        "steps_most": f"{feedback['steps_most']}",
        "error_bound": f"{feedback['largest_error_bound']:.1e}",
        "largest_output": f"{demo['equation']['largest_output']:.0f}",
        "difference": f"{difference:.0e}" if difference else "0",
        "zeros": percent(sparse["zeros"]),
        "gap": f"{sparse['largest_relative_gap']:.0e}",
        "images_lost": f"{sparse['images_lost']}",
        "claims": f"{sum(map(len, demo['checker']['proven'].values()))}",
        "checker_seconds": f"{demo['checker']['seconds']:.1f}",
        "radius": f"{RADIUS:g}",
        "robust_proven": percent(robustness["robust"]["certified"][at]),
        "plain_proven": percent(robustness["plain"]["certified"][at]),
        "feedback_right": f"{feedback['images_right']}",
        "network_right": f"{demo['network']['images_right']}",
    }


def best_rivals(rows: list[dict[str, Any]]) -> list[float]:
    """Returns how many times as long as ours the fastest rival takes that reaches the error, for each problem."""
    ratios = []
    for row in rows:
        times = {name: one["ms"] for name, one in row["libraries"].items() if one["error"] <= row["target"]}
        ratios.append(min(time for name, time in times.items() if name != "wellposed") / times["wellposed"])
    return ratios


def charted(speed: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the problems of the chart."""
    return [row for row in speed["rows"] if row["n"] == STATES]


def speed_numbers(speed: dict[str, Any]) -> dict[str, str]:
    """Takes from the benchmark what README says."""
    large = charted(speed)
    small = [row for row in speed["rows"] if row["n"] < STATES]
    numbers = {
        "speed_states": f"{STATES}",
        "speed_batch": f"{large[0]['batch']}",
        "small_states": f"{small[0]['n']}",
    }
    for name, ratios in (("speed", best_rivals(large)), ("small", best_rivals(small))):
        numbers |= {f"{name}_least": f"{min(ratios):.1f}", f"{name}_most": f"{max(ratios):.1f}"}
    behind = sum(ratio < 1 for ratio in best_rivals(small))
    return numbers | {"small_behind": str(behind or "none"), "small_count": str(len(small))}


def lab_numbers() -> dict[str, str]:
    """Counts the suites, the distinct published claims and the verdicts on them."""
    published = [one for one in judged() if not one.claim.own]
    counts = {name.replace(" ", "_"): count for name, count in tally(published).items()}
    counts |= {"suites": len(list(all_suites())), "all_claims": len(published)}
    return {name: str(count) for name, count in counts.items()}


@functools.cache
def judged() -> tuple[Verdict, ...]:
    """Judges all claims by the committed records."""
    return tuple(verdicts(committed_records(ROOT / "lab" / "results")))


def verdict_table() -> str:
    """Counts the verdicts under the rules of judging, beside those before there were any."""
    published, own = ([one for one in judged() if one.claim.own is mine] for mine in (False, True))
    before = json.loads((ROOT / "lab" / "results" / "verdicts-before.json").read_text(encoding="utf-8"))
    rows = [
        ["published, before the rules", *(before["published"].get(name, 0) for name in JUDGEMENTS)],
        ["published, now", *tally(published).values()],
        ["of these by three or four seeds, or one network", *tally(v for v in published if v.marked).values()],
        ["our own questions, before", *(before["own"].get(name, 0) for name in JUDGEMENTS)],
        ["our own questions, now", *tally(own).values()],
    ]
    return markdown(["distinct claims", *JUDGEMENTS], rows)


def numbers() -> dict[str, str]:
    """Returns everything that the template asks for, but for what the example prints."""
    demo, speed = read("package/demo.json"), read("rivals/equal_error.json")
    return demo_numbers(demo) | speed_numbers(speed) | lab_numbers()


def fill(template: str, values: dict[str, str]) -> str:
    """Fills the places; a name without a number is an error.

    Example:
        >>> fill("«a» of 3", {"a": "2"})
        '2 of 3'
    """
    return re.sub("«(\\w+)»", lambda match: values[match[1]], template)


def printed(text: str) -> str:
    """Runs the first example of the page and returns what it prints."""
    code = re.findall("^```python\n(.*?)^```", text, re.M | re.S)[0]
    output, before = io.StringIO(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        os.chdir(folder)
        try:
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)
    return output.getvalue().strip()


# Charts, as files: coloured for light and dark by the reader's system.


def standalone(drawing: str, width: int, height: int) -> str:
    """Makes a file of a drawing that a page would have coloured."""
    sheets = {}
    for mode, (text, quiet, line) in {
        "light": ("#1b1f24", "#59616b", "#dbe0e6"),
        "dark": ("#e7eaee", "#a5adb8", "#353c45"),
    }.items():
        rules = [f"text{{fill:{text}}} .quiet{{fill:{quiet}}} .grid{{stroke:{line}}} .axis{{stroke:{quiet}}}"]
        rules += [
            f".line.s{index}{{stroke:{colour}}} .s{index}:not(.line){{fill:{colour};stroke:{colour}}}"
            for index, colour in enumerate(COLOURS[mode])
        ]
        sheets[mode] = "\n".join(rules)
    style = (
        "text{font:12px system-ui,sans-serif;text-anchor:middle} .line{fill:none;stroke-width:2} "
        ".dashed{stroke-dasharray:5 4} .band{opacity:.18;stroke:none!important} "
        f"circle.missed{{fill:none!important;stroke-width:1.5}}\n{sheets['light']}\n"
        f"@media (prefers-color-scheme:dark){{\n{sheets['dark']}\n}}"
    )
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return drawing.replace("<svg", opening, 1).replace(">", f">\n<style>\n{style}\n</style>", 1) + "\n"


def demo_chart(demo: dict[str, Any]) -> str:
    """Draws proven and attacked accuracy against the radius, as the demo's page does."""
    accuracies = demo["robustness"]
    radii = [0.0, *accuracies["radii"]]
    series = [
        Series(title, style, radii, low=[one["clean"], *one["certified"]], high=[one["clean"], *one["attacked"]])
        for style, (title, one) in enumerate(
            (("plain model", accuracies["plain"]), ("trained for it", accuracies["robust"]))
        )
    ]
    title = "Accuracy against the radius"
    return standalone(
        share_chart(series, title, "how far every pixel may move", "digits read correctly", x_ticks=radii),
        480,
        360,
    )


def speed_chart(speed: dict[str, Any]) -> str:
    """Draws the milliseconds of every library, a line a problem; hollow where the error was not reached."""
    rows = charted(speed)
    times = [one["ms"] for row in rows for one in row["libraries"].values()]
    x = Scale(min(times) / 1.4, max(times) * 1.4, 130, 620, log=True)
    top, gap = 62, 30
    bottom = top + gap * len(rows)
    shapes = []
    for tick in x.ticks():
        shapes.append(f'<path class="grid" d="M{x(tick):.1f} {top - 14}V{bottom - 10}"/>')
        shapes.append(f'<text x="{x(tick):.1f}" y="{bottom + 6}">{tick:g}</text>')
    shapes.append(f'<text class="quiet" x="375" y="{bottom + 24}">milliseconds, forward and backward (log)</text>')
    for index, (name, mark) in enumerate(LIBRARIES.items()):
        left, line = 130 + 165 * (index % 3), 14 + 18 * (index // 3)
        shapes.append(f'<circle class="{mark}" cx="{left}" cy="{line}" r="5"/>')
        shapes.append(f'<text x="{left + 10}" y="{line + 4}" style="text-anchor:start">{escape(name)}</text>')
    for index, row in enumerate(rows):
        y = top + gap * index
        shapes.append(f'<path class="grid" d="M130 {y}H620"/>')
        label = f"{row['family']}, {row['norm']:g}"
        shapes.append(f'<text x="120" y="{y + 4}" style="text-anchor:end">{escape(label)}</text>')
        for name, one in reversed(row["libraries"].items()):
            missed = "" if one["error"] <= row["target"] else " missed"
            shapes.append(f'<circle class="{LIBRARIES[name]}{missed}" cx="{x(one["ms"]):.1f}" cy="{y}" r="5"/>')
    title = "Milliseconds of every library at equal true error; hollow: it reached that error at no tolerance"
    head = f'<svg viewBox="0 0 640 {bottom + 34}" role="img" aria-label="{escape(title)}">'
    return standalone("\n".join([head, f"<title>{escape(title)}</title>", *shapes, "</svg>"]), 640, bottom + 34)


# Tables of docs/speed.md.


def speed_table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Lays out milliseconds and, in brackets, how many times as long as ours; a star where the error is missed."""
    lines = []
    for row in rows:
        timings = row["libraries"]
        cells = [
            f"{row['family']}, {row['norm']:g}",
            f"{row['n']}, {row['batch']}",
            f"{timings['wellposed']['ms']:.2f}",
        ]
        for name in names:
            star = "" if timings[name]["error"] <= row["target"] else "\\*"
            times = timings[name]["ms"] / timings["wellposed"]["ms"]
            cells.append(f"{timings[name]['ms']:.1f} ({times:.1f}x{star})")
        lines.append(cells)
    return markdown(["problem", "n, batch", "wellposed", *names], lines) + "\n"


def cells_table(rows: list[dict[str, Any]]) -> str:
    """Lays out, cell by cell, milliseconds and evaluations: ours by default, and the fastest solver of others."""
    groups = {
        "plain loop": lambda run: run == "ours default",
        "compiled": lambda run: run == "ours default compiled",
        "torchdeq's fastest": lambda run: run.startswith("torchdeq") and not run.endswith("compiled"),
        "its fastest compiled": lambda run: run.startswith("torchdeq") and run.endswith("compiled"),
        "jaxopt": lambda run: run.startswith("jaxopt"),
    }
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        line = [cell]
        for belongs in groups.values():
            timed = [r for r in rows if r["cell"] == cell and belongs(r["run"]) and solved(r)]
            best = min(timed, key=lambda row: row["both_ms"], default=None)
            line.append("-" if best is None else f"{best['both_ms']:.1f} ({best['steps']})")
        lines.append(line)
    return markdown(["cell", *groups], lines) + "\n"


def first_call_table(rows: list[dict[str, Any]]) -> str:
    """Lays out wall-clock seconds until the first answer, and until the first gradients where there are any."""
    ways = {
        "background": "nothing on the disk",
        "waiting": "the same, waiting for the compiler",
        "warm": "compiled before",
        "plain loop": "plain loop",
    }
    lines = []
    for work in dict.fromkeys(row["work"] for row in rows):
        mine = {row["way"]: row for row in rows if row["work"] == work and row["device"] == "cpu"}
        line = [f"`{work}`"]
        for way in ways:
            times = [mine[way][name] for name in ("forward", "both") if mine[way][name]] if way in mine else []
            line.append(" / ".join(f"{wall:.2f}" for wall, _ in times) or "-")
        lines.append(line)
    return markdown(["seconds", *ways.values()], lines) + "\n"


def files() -> dict[Path, str]:
    """Returns the text of everything that is written from records alone."""
    kernels, speed = read("kernels/layer.json"), read("rivals/equal_error.json")
    rivals = [name for name in LIBRARIES if name != "wellposed"]
    return {
        ROOT / "docs" / "_static" / "demo.svg": demo_chart(read("package/demo.json")),
        ROOT / "docs" / "_static" / "speed.svg": speed_chart(speed),
        ROOT / "docs" / "speed-rivals.inc": speed_table(speed["rows"], rivals),
        ROOT / "docs" / "speed-cells.inc": cells_table(read("solve/cells.json")["rows"]),
        ROOT / "docs" / "speed-first-call.inc": first_call_table(read("kernels/first_call.json")["rows"]),
        ROOT / "docs" / "verdicts.inc": verdict_table(),
        ROOT / "docs" / "speed-kernels.inc": speed_table(kernels["rows"], ["torchidl", "torchdeq"]),
    }


def main() -> None:
    """Writes all files."""
    template = TEMPLATE.read_text(encoding="utf-8")
    text = fill(template, numbers() | {"output": printed(template)})
    for path, content in {**files(), ROOT / "README.md": text}.items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
