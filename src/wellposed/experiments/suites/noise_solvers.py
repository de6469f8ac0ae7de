"""Solvers and stopping rules on a random map with noise (004 appendix B, Figures 4 and 5)."""

from collections.abc import Sequence

from wellposed.experiments.config import Scale
from wellposed.experiments.findings import median_of
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role, Run
from wellposed.experiments.solver_trace_run import SOLVERS, SolverTraceRun
from wellposed.experiments.stop_run import StopRun
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

TASK = "random-tanh"
POINTS = (30.0, 20.0, 10.0, 0.0)
RULES = ("relative", "mean-relative")


def plan(scale: Scale) -> list[Run]:
    """Returns every solver alone and with both rules, unrolling at a tighter tolerance, and a trained model."""

    def run(solver: str, rule: str = "none", tolerance: float = 0.05) -> SolverTraceRun:
        small = {"size": 20, "batch": 8, "steps": 30, "points": (20.0,)} if scale == "tiny" else {"points": POINTS}
        role: Role = "ours" if "mean" in rule or solver == "stochastic-unrolling" else "baseline"
        return SolverTraceRun(suite="noise-solvers", seed=0, scale=scale, role=role, solver=solver, rule=rule,
                              tolerance=tolerance, **small)  # fmt: skip

    alone = [run(solver) for solver in SOLVERS]
    ruled = [run(solver, rule) for solver in SOLVERS for rule in RULES]
    return [*alone, *ruled, *(run("unrolling", rule, 0.01) for rule in RULES), *_trained(scale)]


def _trained(scale: Scale) -> list[StopRun]:
    """Returns both rules in a classifier, on MNIST; tiny runs are on digits."""
    settings: dict[str, object] = {"data": "mnist"}
    if scale == "tiny":
        settings = {"data": "digits", "images": 200, "epochs": 1, "samples": 50, "points": (10.0,)}
    roles: tuple[Role, ...] = ("baseline", "ours")
    return [
        StopRun(suite="noise-solvers", seed=0, scale=scale, role=role, rule=rule, **settings)  # type: ignore[arg-type]
        for role, rule in zip(roles, RULES, strict=True)
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says where the averaged rule saves steps and where it costs some."""
    sentences = [
        "Residuals are those of the map without noise, after 60 steps; that of stochastic unrolling is at the "
        "mean of its last ten iterates, the others at the last one. A solve that never stops counts as 60 steps.",
    ]
    for at in POINTS:
        told = []
        for solver in SOLVERS:
            plain, mean = (median_of(records, TASK, f"{solver}-{rule}", "steps", at) for rule in RULES)
            if plain is not None and mean is not None:
                told.append(f"{solver} {plain:.1f} and {mean:.1f}")
        if told:
            sentences.append(
                f"Steps until the relative and the averaged rule stop at 0.05, {at:g} dB: {', '.join(told)}."
            )
    for at in StopRun.points:
        found = [median_of(records, "mnist", f"deq-128-{rule}", "steps", at) for rule in RULES]
        if None not in found:
            sentences.append(
                f"In a DEQ trained on MNIST, at {at:g} dB and a tolerance of 0.01, the relative rule takes "
                f"{found[0]:.1f} steps and the averaged one {found[1]:.1f}; 60 is never."
            )
    tight = [median_of(records, TASK, f"unrolling-{rule}-0.01", "fired", 20.0) for rule in RULES]
    if None not in tight:
        sentences.append(
            f"At a tolerance of 0.01 and 20 dB the relative rule stops {100 * (tight[0] or 0):.0f} % of the "
            f"samples, the averaged one {100 * (tight[1] or 0):.0f} %."
        )
    return sentences


SUITE = Suite(
    name="noise-solvers",
    title="Solving under noise",
    claim="Under noise a mean over iterates is closer to the solution than an iterate, and stopping by it saves "
    "steps.",
    papers=("004 section 3.2", "004 appendix B", "004 Figures 4 and 5"),
    plan=plan,
    seeds={"tiny": 1, "default": 5, "paper": 5},
    figures=(
        Figure("Residual after 60 steps", (TASK,), "residual", "signal-to-noise ratio in decibels",
               paper="004 Figure 4", log="y", quantity="relative residual without noise"),
        Figure("Steps until a rule stops", (TASK, "mnist"), "steps", "signal-to-noise ratio in decibels",
               paper="004 Figures 4 and 5", log=""),
    ),
    findings=findings,
    thresholds=(
        Threshold("At 20 dB the averaged rule stops plain unrolling after at most 14 steps.",
                  Measure("steps", "unrolling-mean-relative", TASK, 20), "at most", 14.0),
        Threshold("At 20 dB the relative rule takes plain unrolling at least 15 steps.",
                  Measure("steps", "unrolling-relative", TASK, 20), "at least", 15.0),
    ),
)  # fmt: skip
