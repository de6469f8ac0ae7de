"""The report: its structure as text, and its behaviour in a browser where there is one."""

import base64
import html
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import Figure, all_suites
from wellposed_lab.engine.judge import DECIDED, DEPENDS, JUDGEMENTS, tally, verdicts
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.experiments.mathematics import arithmetic, identity
from wellposed_lab.report import write_report
from wellposed_lab.report.page import page
from wellposed_lab.report.section import SuiteResults, environments, orders, section
from wellposed_lab.report.tables import why_of

from wellposed.errors import MissingExtraError
from wellposed.pages.markup import Html, element, join

KNOWN = {module.SUITE.name: module.SUITE for module in (identity, arithmetic)}
POINTS = (5.0, 10.0, 15.0, 30.0, 45.0, 80.0, 205.0)
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ENVIRONMENT = {
    "python": "3.11.7",
    "wellposed": "0.1.0",
    "torch": "2.13.0",
    "commit": None,
    "device": "2 CPU cores",
}


def record(suite, task, model, size, role, seed, level, **fields):
    values = [Value("test_mse", level * (1 + 0.01 * seed) * at**2, at) for at in POINTS]
    known = {
        "scale": "default",
        "kind": "run",
        "config": {"seed": seed, "training": {"type": "Training", "epochs": 3, "patience": None}},
        "values": (Value("parameters", 196.0), Value("train_mse", level), *values),
        "series": {"train_loss": [level * 9, level * 3, level]},
        "facts": {"certificate": "inf: 0.5 < 1 holds"} if model == "implicit" else {},
        "environment": ENVIRONMENT,
        "started": "2026-03-01T10:00:00+00:00",
        "seconds": 60.0,
        **fields,
    }
    name = f"{suite}{task}{model}{size}{seed}{known['scale']}"
    return Record(id=name, suite=suite, task=task, model=model, size=size, role=role, seed=seed, **known)


def runs():
    models = [
        ("implicit", None, "ours", 1e-4),
        ("mlp", "001", "baseline", 1.0),
        ("mlp", "000", "baseline", 2.0),
        ("transformer-5-heads", "001", "baseline", 1.1),
        ("linear", "001", "control", 1e-20),
        ("implicit-bias", None, "control", 3e-3),
    ]
    found = [record("identity", "identity", *model[:3], seed, model[3]) for model in models for seed in range(5)]
    for task in ("addition", "subtraction"):
        found += [record("arithmetic", task, "implicit", None, "ours", seed, 1e-3) for seed in range(5)]
        found += [record("arithmetic", task, "nalu", None, "baseline", seed, 10.0) for seed in range(5)]
    failed = {"values": (), "series": {}, "facts": {}, "error": f"NonFiniteLossError: the loss became {EVIL}"}
    broken = [record("arithmetic", "addition", EVIL, None, "control", seed, 1.0, **failed) for seed in (1, 3)]
    return [*found, *broken, record("arithmetic", "addition", EVIL, None, "control", 2, 1.0)]


RUNS = runs()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_report(RUNS, tmp_path_factory.mktemp("report") / "made" / "report.html", suites=KNOWN)


@pytest.fixture(scope="module")
def text():
    """The page before what only scripts read is packed."""
    return page(RUNS, KNOWN)


class Collector(HTMLParser):
    VOID = ("meta", "input", "br")

    def __init__(self):
        super().__init__()
        self.elements, self.open, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)


@pytest.fixture(scope="module")
def found(text):
    collector = Collector()
    collector.feed(text)
    return collector


def attributes(found, name):
    return [known[name] for _, known in found.elements if name in known]


def test_the_page_is_well_formed_and_alone(found):
    assert found.open == []
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in found.elements}
    assert not attributes(found, "src") and not attributes(found, "srcset") and not attributes(found, "onerror")
    assert all(href.startswith("#") for href in attributes(found, "href"))
    policy = next(known["content"] for _, known in found.elements if "http-equiv" in known)
    assert "default-src 'none'" in policy and "http" not in policy


def test_links_and_labels_lead_somewhere(found):
    names = attributes(found, "id")
    assert len(names) == len(set(names))
    wanted = {href[1:] for href in attributes(found, "href")} | set(attributes(found, "aria-labelledby"))
    assert wanted <= set(names)
    assert {"summary", "results", "suite-identity", "suite-arithmetic", "not-run"} <= wanted


def test_the_page_can_be_used_without_a_mouse(found):
    tags = Counter(tag for tag, _ in found.elements)
    assert tags["h1"] == tags["main"] == tags["nav"] == tags["header"] == tags["footer"] == 1
    first = next(known for tag, known in found.elements if tag == "a")
    assert first["class"] == "skip" and first["href"] == "#results"
    regions = [known for _, known in found.elements if known.get("class") == "scroll"]
    assert regions and all(known["tabindex"] == "0" and known["aria-label"] for known in regions)
    assert all(known["scope"] in ("row", "col") for tag, known in found.elements if tag == "th")
    drawings = [known for _, known in found.elements if known.get("class") == "drawing"]
    assert all(known["role"] == "img" and len(known["aria-label"]) > 40 for known in drawings)
    assert ("html", {"lang": "en"}) in found.elements


def test_every_claim_is_listed_once_with_its_verdict(found):
    rows = [known for tag, known in found.elements if tag == "tr" and "data-verdict" in known]
    expected = Counter(verdict.verdict for verdict in verdicts(RUNS))
    assert len(rows) == len(load_claims())
    assert Counter(row["data-verdict"] for row in rows) == expected
    assert len(expected) >= 3 and set(expected) <= set(JUDGEMENTS)
    words = "".join(found.words)
    for verdict in verdicts(RUNS):
        assert re.sub(r"\^(\d)", r"\1", verdict.claim.says) in words
        why = DEPENDS if verdict.why.startswith(DEPENDS) else verdict.why  # the readings are listed below it
        assert re.sub(r"\^(\d)", r"\1", why) in words
        assert all(f" {one.verdict}: {name}" in words for name, one in verdict.readings)


def test_the_summary_counts_every_suite(text):
    summary = text[text.index('id="summary"') : text.index('id="filter"')]
    judged = Counter((verdict.claim.suite, verdict.verdict) for verdict in verdicts(RUNS))
    row = summary[summary.index(">The identity function<") :]
    row = row[: row.index("</tr>")]
    cells = re.findall(r"<td[^>]*>(?:<a[^>]*>)?([^<]*)", row)
    expected = [str(judged["identity", name] or "·") for name in JUDGEMENTS]
    assert cells == expected
    assert summary.count("<tr") == len({claim.suite for claim in load_claims()}) + 3
    totals = re.findall(r"<td[^>]*>([^<]*)", summary[summary.index('class="total"') :])[:12]
    for own, shown in ((False, totals[:6]), (True, totals[6:])):
        overall = tally(verdict for verdict in verdicts(RUNS) if verdict.claim.own is own)
        assert shown == [str(count or "·") for count in overall.values()]


def test_a_suite_says_everything(text, found):
    section = text[text.index('id="suite-arithmetic"') :]
    section = html.unescape(section[: section.index("</section>")])
    assert arithmetic.SUITE.claim in section
    assert "wellposed run arithmetic\nwellposed report" in section
    for sentence in arithmetic.findings([run for run in RUNS if run.suite == "arithmetic"]):
        assert sentence in section
    assert "python 3.11.7" in section and "Run on 2026-03-01" in section and "commit" not in section
    assert "seed 1, 3: NonFiniteLossError" in section
    assert "certificate inf: 0.5 < 1 holds" in section and "epochs 3" in section and "patience" not in section
    networks = [row for row in section.split("<tr") if "printed as 50x10x10x1, which has 631" in row]
    assert len(networks) == 2 and all("<td>631</td><td>1,497</td><td>no</td>" in row for row in networks)


def test_every_reading_has_the_badge_of_its_verdict():
    one = next(verdict for verdict in verdicts([]) if len(verdict.readings) > 1)
    shown = [str(part) for part in why_of(one) if 'class="reading"' in part]
    assert len(shown) == len(one.readings)
    for mark, (name, _) in zip(shown, one.readings, strict=True):
        assert 'class="badge not-judged"' in mark and f": {html.escape(name)}" in mark


def test_suites_without_runs_are_collapsed(text):
    left = text[text.index('id="not-run"') :]
    left = left[: left.index("</section>")]
    judged = {one.claim.suite for one in verdicts(RUNS) if one.verdict != "not judged"}
    expected = {claim.suite for claim in load_claims()} - {run.suite for run in RUNS} - judged
    titles = [name.replace("-", " ").capitalize() for name in all_suites() if name in expected]
    assert len(titles) > 20 and re.findall(r'<details class="suite-claims"><summary>([^<]+)<', left) == titles
    assert "<details open" not in text
    assert 'data-verdict="reproduced"' not in left


def test_the_file_holds_the_page_packed(place, text):
    file = place.read_text(encoding="utf-8")
    block = re.search(r'<script id="packed" type="text/plain">(.*?)</script>', file)
    parts = json.loads(zlib.decompress(base64.b64decode(block[1])))
    whole = file.replace(block[0], "")
    for number, part in enumerate(parts):
        opening = re.search(f' data-packed="{number}">(<summary>.*?</summary>)?', whole)
        whole = whole.replace(opening[0], f">{opening[1] or ''}{part}", 1)
    assert whole == text and len(file) < len(text) / 2


def test_what_was_learnt_stands_at_the_top_and_the_contents_are_folded(text):
    head = text[: text.index('id="summary"')]
    decided = [one.verdict for one in verdicts(RUNS) if one.verdict in DECIDED]
    held = sum(name in ("reproduced", "better") for name in decided)
    assert f"What was learnt: {held} of {len(decided)} decided claims hold" in head
    published = [one for one in verdicts(RUNS) if not one.claim.own]
    assert f"Of {len(published)} distinct published claims by {len(RUNS)} runs: " in head
    assert f"{tally(published)['undecided']} undecided" in head
    assert "<details><summary>Contents: " in head and "Where to go next" in text


def test_figures_hold_their_numbers(text):
    panels = [json.loads(part) for part in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(panels) == 2 + 4
    shift = panels[0]
    assert shift["layout"]["xaxis"]["type"] == shift["layout"]["yaxis"]["type"] == "log"
    ours = next(t for t in shift["data"] if t["meta"]["model"] == "implicit" and "band" not in t["meta"])
    assert ours["x"] == list(POINTS) and ours["y"][0] == pytest.approx(1e-4 * 1.02 * 25)
    band = next(t for t in shift["data"] if t["meta"] == {"model": "implicit", "colour": 0, "band": True})
    assert (min(band["y"]), max(band["y"])) == pytest.approx((1e-4 * 25, 1e-4 * 1.04 * 205**2), rel=1e-3)
    shown = {
        name: {t["visible"] for t in shift["data"] if t["meta"]["model"] == name} for name in models_of(shift)
    }
    assert shown.pop("linear (001)") == {False}
    assert len(shown) == 5 and all(visible == {True} for visible in shown.values())
    assert "In the style of 000 Figure 1, 001 Figure 3." in text and "because far below: linear (001)" in text


def models_of(panel):
    return [trace["meta"]["model"] for trace in panel["data"]]


def test_long_curves_are_thinned_and_keep_their_ends():
    suite = replace(
        identity.SUITE, figures=(Figure("T", ("identity",), "train_loss", "e", over="epoch", log="y"),)
    )
    long = replace(RUNS[0], series={"train_loss": [1000.0 - k for k in range(1000)]})
    panel = _panels([long], suite)[0]["data"][-1]
    assert len(panel["x"]) == 120 and panel["x"][0] == 1 and panel["x"][-1] == 1000 and panel["y"][-1] == 1


def test_figures_without_an_axis_are_dots():
    suite = replace(identity.SUITE, figures=(Figure("T", ("identity",), "train_mse", "x"),))
    panel = _panels([run for run in RUNS if run.suite == "identity"], suite)[0]
    assert [trace["y"] for trace in panel["data"]][-1] == ["implicit"]
    assert all(trace["mode"] == "markers" for trace in panel["data"]) and len(panel["data"]) == 5


def _panels(records, suite):
    text = section(SuiteResults(suite.name, suite, records, ()))
    return [json.loads(part) for part in re.findall(r'<script type="application/json">(.*?)</script>', text)]


def test_nothing_run_and_tiny_runs_are_called_so(tmp_path):
    text = write_report([], tmp_path / "empty.html", suites=KNOWN).read_text()
    assert "nothing has been run" in text and 'class="panel"' not in text
    tiny = [replace(run, scale="tiny", seconds=1.0) for run in RUNS if run.suite == "identity"]
    text = write_report(tiny, tmp_path / "tiny.html", suites={}).read_text()
    assert "all runs are tiny ones" in text and "These are tiny runs" in text
    assert "wellposed run identity --scale tiny" in text


def test_commands_restore_what_was_ordered():
    part = SuiteResults("identity", identity.SUITE, [run for run in RUNS if run.suite == "identity"], ())
    assert [order.command for order in orders(part)] == ["wellposed run identity"]
    fewer = replace(part, records=[run for run in part.records if run.seed < 3])
    assert [order.command for order in orders(fewer)] == ["wellposed run identity --seeds 3"]
    device = {**ENVIRONMENT, "device": "NVIDIA H100"}
    other = [replace(run, scale="paper", kind="search", environment=device) for run in part.records]
    assert [order.command for order in orders(replace(part, records=[*part.records, *other]))] == [
        "wellposed run identity",
        "wellposed run identity --scale paper --search --device cuda",
    ]


def test_environments_are_counted():
    other = replace(RUNS[0], environment={"python": "3.12.1"})
    assert environments([*RUNS[:3], other])[1] == "python 3.12.1 (1 run)"
    assert environments(RUNS) == ["python 3.11.7, wellposed 0.1.0, torch 2.13.0, device 2 CPU cores"]


def test_everything_is_escaped(text, found):
    assert EVIL not in text and "<script>alert" not in text and "<img" not in text
    assert html.escape(EVIL) in text
    assert element("p", "<b>", Html("<i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></p>'
    assert join("a & b", None, [element("br")]) == "a &amp; b<br>"


def test_a_missing_plotly_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match=r"wellposed\[plots\]"):
        write_report(RUNS[:5], tmp_path / "report.html", suites=KNOWN)
    assert not (tmp_path / "report.html").exists()


COLLECT = """<script>
window.troubles = [];
addEventListener("error", (event) => troubles.push("error: " + event.message));
addEventListener("unhandledrejection", (event) => troubles.push("rejection: " + event.reason));
addEventListener("securitypolicyviolation", (event) => troubles.push("policy: " + event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => troubles.push(name + ": " + words.join(" "));
</script>"""
DRIVE = """<script>
addEventListener("load", async () => {
  const pause = (time) => new Promise((done) => setTimeout(done, time));
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const shown = () => all(".verdicts tbody tr").filter((row) => !row.hidden);
  const facts = { width: innerWidth };
  facts.text = { at_first: shown().length, form: !document.getElementById("filter").hidden };
  location.hash = "#filter:verdict=reproduced&paper=001";
  await pause(100);
  facts.filtered = shown().map((row) => [row.dataset.verdict, row.dataset.papers]);
  facts.output = document.querySelector("#filter output").textContent;
  const field = document.querySelector("#filter input");
  field.value = "MLP shift";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  facts.searched = shown().map((row) => row.textContent.toLowerCase());
  facts.address = location.hash;
  document.querySelector("#filter [type=reset]").click();
  await pause(50);
  facts.reset = shown().length;
  document.querySelector("[data-filter='refuted']").click();
  await pause(50);
  facts.linked = [...new Set(shown().map((row) => row.dataset.verdict))];
  document.querySelector("#filter [type=reset]").click();
  await pause(50);
  const table = document.querySelector("#suite-identity .verdicts");
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[2].dataset.sort);
  table.tHead.rows[0].cells[2].querySelector("button").click();
  facts.ascending = column();
  table.tHead.rows[0].cells[2].querySelector("button").click();
  facts.descending = column();
  facts.sort = table.tHead.rows[0].cells[2].getAttribute("aria-sort");
  dispatchEvent(new Event("beforeprint"));
  await pause(1500);
  facts.open = all("details:not([open])").length;
  facts.drawings = all(".panel").map((panel) => [".main-svg", ".trace"].map((name) => all(name, panel).length));
  dispatchEvent(new Event("afterprint"));
  await pause(500);
  facts.closed = all("details[open]").length;
  const button = document.querySelector("#suite-identity .legend button[data-model='mlp (001)']");
  const lines = () => all(".scatterlayer .trace", document.querySelector("#suite-identity .panel")).length;
  await pause(300);
  facts.before = lines();
  button.click();
  await pause(300);
  facts.after = [lines(), button.getAttribute("aria-pressed")];
  all("details").forEach((one) => { one.open = true; });
  await pause(100);
  facts.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const outside = (one) => !one.closest(".scroll") && one.getBoundingClientRect().right > innerWidth + 1;
  facts.wide = all("body *").filter(outside).map((one) => one.tagName + "." + one.className);
  facts.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  facts.images = document.images.length;
  facts.troubles = troubles;
  parent.postMessage(facts, "*");
});
</script>"""
FRAMES = """<!doctype html><body><script>
addEventListener("message", ({ data }) => {
  const note = document.createElement("pre");
  note.textContent = JSON.stringify(data);
  document.body.append(note);
});
for (const width of [1280, 390]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  frame.src = "probe.html";
  document.body.append(frame);
}
</script></body>"""


@pytest.fixture(scope="module")
def seen(place):
    """What the page did in a browser, by the width of its window."""
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome is installed")
    probe = (
        place.read_text(encoding="utf-8")
        .replace("<head>", "<head>" + COLLECT, 1)
        .replace("</body>", DRIVE + "</body>", 1)
    )
    (place.parent / "probe.html").write_text(probe, encoding="utf-8")
    (place.parent / "frames.html").write_text(FRAMES, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    done = subprocess.run(
        [
            BROWSER,
            *flags.split(),
            f"--user-data-dir={place.parent / 'profile'}",
            "--window-size=1400,2000",
            "--virtual-time-budget=15000",
            "--dump-dom",
            (place.parent / "frames.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    notes = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    facts = [json.loads(html.unescape(note)) for note in notes]
    assert {one["width"] for one in facts} == {1280, 390}, done.stdout[-500:]
    return {one["width"]: one for one in facts}


@pytest.mark.parametrize("width", [1280, 390])
def test_the_browser_has_nothing_to_complain_of_and_asks_for_nothing(seen, width):
    assert seen[width]["troubles"] == []
    assert seen[width]["requests"] == []
    assert seen[width]["images"] == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window(seen, width):
    assert seen[width]["overflow"] == 0
    assert seen[width]["wide"] == []


def test_all_plots_are_drawn(seen):
    drawings = seen[1280]["drawings"]
    traces = [count for svgs, count in drawings if svgs]
    assert len(drawings) == len(traces) == 6
    assert min(traces[:2]) >= 10 and min(traces) >= 4  # of every model a line and a band


def test_the_filter_filters(seen):
    facts = seen[1280]
    judged = [one.claim for one in verdicts(RUNS) if one.verdict == "reproduced" and "001" in one.claim.papers]
    assert facts["text"] == {"at_first": len(load_claims()), "form": True}
    assert {verdict for verdict, _ in facts["filtered"]} == {"reproduced"}
    assert sorted(papers for _, papers in facts["filtered"]) == sorted(" ".join(one.papers) for one in judged)
    assert facts["output"] == f"{len(judged)} of {len(load_claims())} claims"
    assert 0 < len(facts["searched"]) < len(facts["filtered"])
    assert all("mlp" in words and "shift" in words for words in facts["searched"])
    assert facts["address"] == "#filter:verdict=reproduced&paper=001&text=MLP+shift"
    assert facts["reset"] == len(load_claims()) and facts["linked"] == ["refuted"]


def test_tables_are_sorted(seen):
    numbers = [float(value) for value in seen[1280]["ascending"] if value]
    assert len(numbers) > 5 and numbers == sorted(numbers)
    assert [float(value) for value in seen[1280]["descending"] if value] == numbers[::-1]
    assert seen[1280]["ascending"][-1] == "" == seen[1280]["descending"][-1]
    assert seen[1280]["sort"] == "descending"


def test_models_are_hidden_by_their_button(seen):
    before, (after, pressed) = seen[1280]["before"], seen[1280]["after"]
    assert after == before - 2 and pressed == "false"  # its line and its band


def test_everything_is_open_on_paper_and_closed_afterwards(seen):
    assert seen[1280]["open"] == 0 and seen[1280]["closed"] == 0
