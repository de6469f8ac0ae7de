"""Tables of the lab for the terminal, made to fit 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.judge import JUDGEMENTS, Verdict
from wellposed_lab.engine.runner import Progress
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.thresholds import Check


def suite_table(suites: Sequence[Suite]) -> Table:
    """Shows every suite with what it reproduces."""
    shown = _table("suite", "runs", "claims", "what it reproduces")
    for suite in suites:
        claims = sum(claim.suite == suite.name for claim in load_claims())
        papers = ", ".join(suite.papers)
        scale = f"\n[dim]at scale paper: {suite.differs}[/dim]" if suite.differs else ""
        text = f"{suite.claim}\n[dim]{papers}[/dim]{scale}"
        shown.add_row(suite.name, str(len(suite.runs())), str(claims), text)
    return shown


def suite_facts(suites: Sequence[Suite]) -> list[dict[str, object]]:
    """Returns the same as data."""
    return [
        {
            "suite": suite.name,
            "title": suite.title,
            "claim": suite.claim,
            "papers": list(suite.papers),
            "runs": len(suite.runs()),
            "claims": sum(claim.suite == suite.name for claim in load_claims()),
            "paper_scale_differs": suite.differs,
        }
        for suite in suites
    ]


def status_table(states: Sequence[Progress]) -> Table:
    """Shows how far every order is."""
    shown = _table("suite", "scale", "finished", "failed", "begun", "state")
    for state in states:
        count = f"{state.finished}/{state.planned}"
        shown.add_row(
            state.order.suite, state.order.scale, count, str(state.failed), str(state.begun), state_of(state)
        )
    return shown


def state_of(state: Progress) -> str:
    """Says in a word or two where an order stands."""
    if state.finished == state.planned:
        return "complete"
    if state.finished + state.failed == state.planned:
        return "complete, with failures"
    return "unfinished"


def status_facts(states: Sequence[Progress]) -> list[dict[str, object]]:
    """Returns the same as data."""
    return [
        {
            "suite": state.order.suite,
            "scale": state.order.scale,
            "planned": state.planned,
            "finished": state.finished,
            "failed": state.failed,
            "begun": state.begun,
            "state": state_of(state),
            "command": state.order.command,
        }
        for state in states
    ]


def verdict_table(judged: Sequence[Verdict]) -> Table:
    """Counts the verdicts of every suite that was run."""
    kinds = JUDGEMENTS[:-1]
    shown = _table("suite", *kinds)
    for suite in dict.fromkeys(verdict.claim.suite for verdict in judged):
        own = [verdict.verdict for verdict in judged if verdict.claim.suite == suite]
        shown.add_row(suite, *(str(own.count(kind)) for kind in kinds))
    return shown


def verdict_facts(judged: Sequence[Verdict]) -> list[dict[str, object]]:
    """Returns every verdict as data."""
    return [
        {
            "where": [f"{paper} {section}" for paper, section in verdict.claim.where],
            "suite": verdict.claim.suite,
            "claim": verdict.claim.says,
            "published": verdict.claim.value,
            "ours": verdict.ours,
            "verdict": verdict.verdict,
            "why": verdict.why,
            "own": verdict.claim.own,
            "seeds": verdict.seeds,
            "readings": {name: one.verdict for name, one in verdict.readings},
            "records": list(verdict.record_ids),
        }
        for verdict in judged
    ]


def threshold_table(checks: Sequence[tuple[str, Check]]) -> Table:
    """Shows every threshold of the suites that were run, with the records of the seeds that are beyond it."""
    shown = _table("suite", "threshold", "worst", "state")
    for suite, one in checks:
        beyond = f"\n[dim]{' '.join(one.failing_ids)}[/dim]" if one.failing_ids else ""
        shown.add_row(suite, f"{one.threshold.text}{beyond}", number(one.judged), one.state)
    return shown


def threshold_facts(checks: Sequence[tuple[str, Check]]) -> list[dict[str, object]]:
    """Returns the same as data."""
    return [
        {
            "suite": suite,
            "claim": one.threshold.claim,
            "threshold": one.threshold.text,
            "state": one.state,
            "values": {str(seed): value for seed, value in one.values.items()},
            "beyond": one.failing_ids,
        }
        for suite, one in checks
    ]


def _table(*headings: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        numeric = heading not in ("suite", "scale", "state", "threshold", "what it reproduces")
        shown.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric or heading == "suite")
    return shown
