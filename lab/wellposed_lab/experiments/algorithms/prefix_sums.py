"""Prefix sums: learnt on 32 bits, tested on up to 512, with and without noise in the state (004 Figure 18 a)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from wellposed_lab.config import Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.engine.thresholds import Plateau, Threshold
from wellposed_lab.experiments.algorithms.findings import accuracy_sentences, independence_sentence
from wellposed_lab.experiments.algorithms.models import Design, Growth, Kind
from wellposed_lab.experiments.algorithms.run import AlgorithmRun, Network, device_of, predict
from wellposed_lab.experiments.algorithms.tasks import PrefixSums
from wellposed_lab.report.findings import median_of

TASK, CARRY = "prefix-sums", "prefix-sums-carry"
SHOWN = 10.0  # decibels at which every bit is shown
CHANNELS = 6  # 004 section E.4
TRAINED = 36  # steps for 32 bits
ENOUGH = 0.999
MODELS: tuple[tuple[Role, Kind, int, float | None], ...] = (
    ("ours", "deq", 1, None),
    ("ours", "deq", 1, 0.0),
    ("baseline", "ffw", 1, None),
    ("baseline", "ffw", 1, 0.0),
    ("control", "recurrent", 1, None),
    ("control", "ffw", TRAINED, None),
)


@dataclass(frozen=True, kw_only=True)
class CarryRun(AlgorithmRun):
    """Asks of an equilibrium that was trained without noise at which bits it errs under noise in its state.

    The state of a bit is the carry of the next, so that noise which destroys the carry makes the last bits worse
    than the first, and noise which only disturbs the read-out all of them alike (004 section D.4).
    ``early_accuracy`` is of the first eighth of the bits and ``late_accuracy`` of the last, at every strength of
    noise; ``bit_accuracy`` is that of every bit under 10 dB.
    """

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return CARRY, self.design.name, None

    def _measured(self, model: Network) -> list[Value]:
        u, y = self.task.validation(self.seed)
        few, values = max(1, y.shape[-1] // 8), []
        for at in (None, *self.decibels):
            model.noise = self._noise(at, device_of(model))
            right = ((predict(model, u) > 0) == (y > 0.5)).double().mean((0, 1))  # (bits,)
            ends = (("early_accuracy", right[:few]), ("late_accuracy", right[-few:]))
            values += [Value(name, float(part.mean()), at) for name, part in ends]
            if at == SHOWN:
                values += [
                    Value("bit_accuracy", float(share), float(bit)) for bit, share in enumerate(right, start=1)
                ]
        model.noise = None
        return values


def plan(scale: Scale) -> list[AlgorithmRun]:
    """Returns the equilibrium and the feed-forward cell without and with noise, two controls, and its errors."""
    tiny = scale == "tiny"
    task = PrefixSums(test_samples=1_000 if scale == "paper" else 100)
    training = Training(epochs=8, batch_size=64, learning_rate=3e-3, schedule=None)
    if tiny:
        task = PrefixSums(length=8, samples=64, test_samples=8, points=(8, 16))
        training = Training(epochs=1, batch_size=32, learning_rate=3e-3, schedule=None)

    probed = (8, 16) if tiny else (32, 128, 512)

    def run(role: Role, kind: Kind, layers: int, noise: float | None) -> AlgorithmRun:
        design = Design(kind, "plain", 1, CHANNELS, 1, Growth(1.3, 24), TRAINED, layers=layers)
        return AlgorithmRun(suite=TASK, seed=0, scale=scale, role=role, task=task, design=design,
                            training=training, noise=noise, probed=probed)  # fmt: skip

    asked = run("ours", "deq", 1, None)
    carry = CarryRun(**{part.name: getattr(asked, part.name) for part in fields(asked)})
    return [*(run(*model) for model in MODELS), carry]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how many nets solve the longest strings, and what they need for it."""
    nets = [r for r in records if r.model == "deq" and r.error is None and r.value("accuracy", 512) is not None]
    if not nets:
        return []
    good = [net for net in nets if (net.value("accuracy", 512) or 0) >= ENOUGH]
    names = {
        "deq": "the DEQ",
        "recurrent": "the cell repeated without its input",
        f"ffw-{TRAINED}": f"{TRAINED} layers with the input and weights of their own",
        "ffw": "the FFW of one layer",
    }
    return [
        f"{len(good)} of {len(nets)} equilibrium nets are right in at least 99.9 % of bits of 512-bit strings.",
        *_who_is_independent(good, [net for net in nets if net not in good]),
        *accuracy_sentences(records, TASK, (32, 512), names, "bits"),
        *independence_sentence(records, TASK, (32, 128, 512), "bits"),
        *_carried(records),
    ]


def _carried(records: Sequence[Record]) -> list[str]:
    """Says where an equilibrium errs under noise."""
    told = []
    for at in (20.0, 10.0, 0.0):
        ends = [median_of(records, CARRY, "deq", f"{end}_accuracy", at) for end in ("early", "late")]
        if None not in ends:
            told.append(f"{100 * float(ends[0] or 0):.0f} and {100 * float(ends[1] or 0):.0f} % at {at:g} dB")
    if not told:
        return []
    return [
        "Trained without noise and tested with noise in the state, an equilibrium answers the first and the last "
        f"four of 32 bits right in {', '.join(told)}: noise in the read-out alone would spare neither."
    ]


def _who_is_independent(good: Sequence[Record], bad: Sequence[Record]) -> list[str]:
    """Compares the path independence of nets that solve the longest strings with that of the others."""
    shares = [[net.value("independent", 512) for net in nets] for nets in (good, bad)]
    means = [sum(share or 0 for share in part) / len(part) for part in shares if part and None not in part]
    if len(means) < 2:
        return []
    return [
        f"Of 512-bit strings {100 * means[0]:.0f} % have an equilibrium that does not depend on the start in "
        f"these nets, and {100 * means[1]:.0f} % in the others."
    ]


def _thresholds() -> tuple[Threshold, ...]:
    far = Measure("accuracy", "deq", TASK, 512)
    noisy, drowned = (Measure("noisy_accuracy", "deq", TASK, at) for at in (20, 0))
    return (
        Threshold("The median net is right in 99.9 % of the bits of 512.", far, "at least", ENOUGH, middle=True),
        Threshold("At 20 dB the median net keeps 99 % of the bits of 32.", noisy, "at least", 0.99, middle=True),
        Threshold("At 0 dB the median net is hardly above chance.", drowned, "at most", 0.65, middle=True),
    )


SUITE = Suite(
    name=TASK,
    title="Prefix sums",
    claim="An equilibrium model that learnt prefix sums on 32 bits is right on 512, and noise of 0 dB in the "
    "state takes that away.",
    papers=("004 section D.4", "004 section E.4", "004 Figure 18 (a)"),
    plan=plan,
    seeds={"tiny": 1, "default": 6, "paper": 6},
    figures=(
        Figure("Accuracy over the length", (TASK,), "accuracy", "bits", paper="004 Figure 18 (a)", log="x",
               quantity="share of bits that are right"),
        Figure("Accuracy of every bit under noise of 10 dB in the state", (CARRY,), "bit_accuracy", "bit", log="",
               quantity="share that is right"),
        Figure("Steps until the state is at rest", (TASK,), "steps", "bits", log="xy"),
        Figure("Accuracy under noise in the state", (TASK,), "noisy_accuracy", "signal-to-noise ratio in decibels",
               log="", quantity="share of bits that are right, of 32"),
    ),
    findings=findings,
    thresholds=_thresholds(),
    plateaus=(Plateau("both are at chance", "accuracy", "at most", 0.55),),
    differs="8 epochs in batches of 64 are ours: neither is published.",
)  # fmt: skip
