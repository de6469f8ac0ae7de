"""Training with attacks, noise and random thresholds as defences, and what attacks leave (004 section 4.2)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.experiments.adversarial.evaluation import Budget
from wellposed_lab.experiments.adversarial.findings import DATA, sentences
from wellposed_lab.experiments.adversarial.models import Defended, Shape
from wellposed_lab.experiments.adversarial.run import AdversarialRun, AdversarialSchedule

DEQS = (
    Defended("deq"),
    Defended("deq", "input", 0.0),
    Defended("deq", "input", 10.0),
    Defended("deq", "state", 0.0),
    Defended("deq", "state", 10.0),
    Defended("deq", random=True),
    Defended("deq", "input", 0.0, trained_by="trades"),
)
FFWS = (
    Defended("ffw"),
    Defended("ffw", "state", 0.0),
    Defended("ffw", "state", 10.0),
    Defended("ffw", "state", 0.0, trained_by="trades"),
)
CONTROLS = (Defended("deq", trained_by="clean"), Defended("ffw", trained_by="clean"))
MODELS: tuple[tuple[Role, Defended], ...] = (
    *(("ours", model) for model in DEQS),
    *(("baseline", model) for model in FFWS),
    *(("control", model) for model in CONTROLS),
)
TINY = (Defended("deq", "input", 0.0), Defended("deq", random=True), Defended("ffw", "state", trained_by="trades"))
LITTLE = Budget(samples=6, pgd_steps=(1, 2), epsilons=(0.3,), auto_epsilons=(0.3,), auto_samples=3, auto_steps=1,
                queries=3, levels=(0.3,), adaptive_steps=2, draws=2, answers=2)  # fmt: skip
MUCH = Budget(samples=500, auto_samples=500, part=500)
SIZES = {
    "tiny": (Shape(4, 3, 2, 2), AdversarialSchedule(100, 1, 50, 3e-3, steps=2), LITTLE),
    "default": (Shape(16, 5, 4, 7), AdversarialSchedule(3_000, 4, 40, 5e-3), Budget()),
    "paper": (Shape(kernel=5, stride=2), AdversarialSchedule(60_000, 6, 128, 5e-3), MUCH),
}


def plan(scale: Scale) -> list[AdversarialRun]:
    """Returns every model with every defence; tiny runs are of three models on digits."""
    shape, schedule, budget = SIZES[scale]
    data = "digits" if scale == "tiny" else DATA
    return [
        AdversarialRun(suite="adversarial", seed=0, scale=scale, role=role, data=data, model=model, shape=shape,
                       schedule=schedule, budget=budget)
        for role, model in MODELS
        if scale != "tiny" or model in TINY
    ]  # fmt: skip


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the runs differ from 004, and what the defences are worth."""
    small, large = SIZES["default"], SIZES["paper"]
    return [
        f"004 trains for 64 epochs in batches of 32. At the scale default the state has {small[0].channels} "
        f"channels of 7 x 7 positions, {small[1].images} images are seen {small[1].epochs} times in batches of "
        f"{small[1].batch_size}; at the scale paper 32 channels, as published, of 14 x 14 positions, and "
        f"{large[1].images} images are seen {large[1].epochs} times in batches of {large[1].batch_size}. Plain "
        "steps solve, not Broyden's. The radius grows to 0.3 over the first half.",
        "A model with random answers is judged by new answers after an attack, not by those the attack was lucky "
        "with. The attacks along other gradients know the defence and average over its randomness.",
        *sentences(records, [model.name for _, model in MODELS]),
    ]


def _thresholds() -> tuple[Threshold, ...]:
    def within(model: str, at: str) -> Measure:
        return Measure("adaptive_accuracy", model, DATA, at)

    clean = [
        Threshold(f"Without attack {name} is right about at least 75 % of the images.",
                  Measure("accuracy", name, DATA), "at least", 0.75)
        for name in ("deq-conv", "ffw-conv")
    ]  # fmt: skip
    broken = [
        Threshold(f"Nothing that is trained without attacks withstands them: {name}.", within(name, "worst"),
                  "at most", 0.05)
        for name in ("deq-conv-clean", "ffw-conv-clean")
    ]  # fmt: skip
    adaptive = [
        Threshold(f"The worst attack on {model.name} is no weaker than that of 004.", within(model.name, "worst"),
                  "at most", 1.05, rival=within(model.name, "construction"))
        for model in DEQS
    ]  # fmt: skip
    exact = [
        Threshold(f"On {model.name} exact gradients go as far as an attack without gradients.",
                  within(model.name, "steps-eot"), "at most", 1.1, rival=within(model.name, "square"))
        for model in DEQS
    ]  # fmt: skip
    return (*clean, *broken, *adaptive, *exact)


def _figure(title: str, metric: str, axis: str, paper: str) -> Figure:
    return Figure(title, (DATA, "digits"), metric, axis, paper=paper, log="", quantity="accuracy")


SUITE = Suite(
    name="adversarial",
    title="Training with attacks",
    claim="Noise on the input defends an equilibrium model that is trained with attacks better than other "
    "defences do, and better than a feed-forward network can be defended.",
    papers=("004 section 4.2", "004 appendix C", "004 Figures 3 and 14-17"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        _figure("PGD by steps", "pgd_accuracy", "steps within 0.3", "004 Figures 3 (a, b) and 14 (right)"),
        _figure("PGD by radius", "epsilon_accuracy", "epsilon", "004 Figure 14 (left)"),
        _figure("AutoAttack", "autoattack_accuracy", "epsilon", "004 Figures 15-17"),
        _figure("AutoAttack for random models", "autoattack_rand_accuracy", "epsilon", "004 Figures 16 and 17"),
        _figure("Salt and pepper", "salt_and_pepper_accuracy", "share of the pixels", "004 Figures 15-17"),
        _figure("Speckle", "speckle_accuracy", "scale", "004 Figures 15-17"),
        *(
            Figure(
                title,
                (DATA, "digits"),
                "adaptive_accuracy",
                "attack within 0.3",
                log="",
                only=(at,),
                quantity="accuracy within 0.3",
            )
            for title, at in (("Under the attack of 004", "construction"), ("Under the worst attack", "worst"))
        ),
    ),
    findings=findings,
    thresholds=_thresholds(),
    floors=(Floor("accuracy", "at least", 0.93),),
    differs="The networks see 60,000 images 6 times in batches of 128, published are 64 epochs in batches of 32; "
    "kernels and strides are ours, plain steps take the place of Broyden's method, and AutoAttack has 500 images, "
    "10 steps and 300 queries.",
)
