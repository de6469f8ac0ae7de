"""Sparse fits to a small MLP on the digits that come with scikit-learn, in seconds."""

from collections.abc import Sequence

from wellposed_lab.config import Scale
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.store import Record
from wellposed_lab.experiments.sparsify.fashion import figures, sparsify_findings, sparsify_runs
from wellposed_lab.experiments.sparsify.run import SparsifyRun
from wellposed_lab.networks.trained import Dense


def plan(scale: Scale) -> list[SparsifyRun]:
    """Returns every method along every axis."""
    return sparsify_runs("sparsify-digits", scale, Dense("digits", epochs=20 if scale == "tiny" else 60))


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    return sparsify_findings(records, "digits")


SUITE = Suite(
    name="sparsify-digits",
    title="Sparse fits on digits",
    claim="What 002 and 003 say of larger images, on digits of 8 x 8 pixels, which need no download.",
    papers=("002 section 5.2", "003 section 3.4"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=figures("digits"),
    findings=findings,
    differs="No paper has run this; it is the smallest of the three sets of images.",
)
