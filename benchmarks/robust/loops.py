"""Certified accuracy of classifiers with loops: what norms prove, what continuation proves, what an attack leaves.

`ImplicitModel` without feedthrough, with biases, kappa .9, under the conditions monotone, spectral and inf, is
trained on 20,000 images of MNIST for 4 epochs by Adam, without any robust training, in float32. The first images
of the test set are then attacked (PGD, 40 steps) and certified in the box of radius eps, clipped to [0, 1], in
float64 on one processor. All columns but those of "asked" are percent of the same images: "clean" and "pgd" what
keeps its class, "norms" what CROWN proves if loops are enclosed by norms alone, "crown" what it proves with boxes
of continuation, "slopes" what is proven once those that it leaves open are asked about again, with eight rounds of
refinement and slopes optimised; "boxes" are the samples that have such a box (others are affine, or known well
enough, or not proven).

"open" images are left by the attack and not proven by CROWN. Branch and bound is asked about them: "asked" are
those that have an answer, then "proven", "counter-examples", and "undecided" when the seconds (of the processor,
not of the clock) were over. "unsplit" is the percentage of all images that are proven before anything is split,
"complete" of all that are proven then, "pgd and complete" what neither of the two attacks; all three are missing
where not all open images have an answer. Milliseconds are of the processor, per image that was asked about. A line
with a "note" says in it what is different; the next run replaces it.

Run: python -m benchmarks.robust.loops [--quick] [--images 200] [--models monotone-87,inf-40] [--columns complete]
Models, radii and columns that are not run keep what the file says of them. With --verdicts every answer is added
to a file as it comes, and a later run asks only what that file does not answer; with --merge it asks nothing.
"""

import json
import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import cpu_seconds, load, make_parser, save
from wellposed.data import load_images
from wellposed.errors import MissingExtraError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, certified, crown
from wellposed.robust.attacks import pgd
from wellposed.robust.certification import Verdict, branch_and_bound
from wellposed.training import fit

MODELS = tuple(f"{condition}-{n}" for n in (40, 87, 200) for condition in ("monotone", "spectral", "inf"))
EPSILONS, PART = (0.01, 0.02, 0.05), 20  # images that are bounded at once
METHODS = {"norms": Crown(continuation=False), "crown": Crown(), "slopes": Crown(rounds=8, slope_steps=20)}
Line = dict[str, Any]


def trained(name: str, folder: Path) -> ImplicitModel:
    """Trains a classifier, or reads one that an earlier run has left in a folder."""
    condition, states = name.split("-")
    torch.manual_seed(0)
    model = ImplicitModel(
        784, 10, int(states), condition=condition, kappa=0.9, bias=True, feedthrough=False, on_failure="ignore"
    )
    file = folder / f"{name}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file))
    else:
        data, loss = load_images("mnist", "train"), torch.nn.functional.cross_entropy
        pairs = data.flat()[:20_000], data.labels[:20_000]
        fit(model, pairs, loss, epochs=4, optimizer=lambda p: torch.optim.Adam(p, 1e-3), seed=0, progress=False)
        torch.save(model.state_dict(), file)
    return model.double()


_model, _images = cache(trained), cache(load_images)  # what jobs of one process share


class Job(NamedTuple):
    """A column of the table for some images of one model at one radius."""

    model: str
    epsilon: float
    column: str
    images: list[int]

    def run(self, seconds: float, forms: Path, until: float) -> list[Line]:
        """Returns an answer about every image, with milliseconds of the processor; none if it is too late."""
        if time.time() > until:
            return []
        torch.set_num_threads(1)
        model, test, more = _model(self.model, forms), _images("mnist", "test"), [{} for _ in self.images]
        u, labels = test.flat()[self.images].double(), test.labels[self.images]
        if self.column == "pgd":
            spent, answers = cpu_seconds(lambda: attacked(model, u, labels, self.epsilon))
        else:
            form, box = model.form(detach=True), Box.around(u, self.epsilon)
            prove = (
                partial(decided, seconds=seconds) if self.column == "complete" else partial(proven, self.column)
            )
            spent, (answers, more) = cpu_seconds(lambda: prove(form=form, box=box, labels=labels))
        about = {"model": self.model, "epsilon": self.epsilon, "column": self.column}
        ms = round(1000 * spent / len(self.images), 1)
        return [
            {**about, "image": image, "answer": one, "ms": ms, **rest}
            for image, one, rest in zip(self.images, answers, more, strict=True)
        ]


def attacked(model: ImplicitModel, u: Tensor, labels: Tensor, epsilon: float) -> list[str]:
    """Attacks images: are they wrong, broken or left?"""
    with torch.no_grad():
        wrong = model(u).argmax(1) != labels
    broken = pgd(model, u, labels, epsilon, steps=40).success
    return ["wrong" if w else "broken" if b else "left" for w, b in zip(wrong, broken, strict=True)]


def proven(name: str, form: ImplicitForm, box: Box, labels: Tensor) -> tuple[list[bool], list[Line]]:
    """Certifies images by bounds; also tells which have a box of continuation."""
    boxes: list[Tensor] = [torch.zeros(len(labels))]
    call = crown.Continuation.__call__
    with mock.patch.object(crown.Continuation, "__call__", lambda *given: boxes.append(call(*given)) or boxes[-1]):
        held = certified(form, box, labels, METHODS[name])
    return held.tolist(), [{"box": one} for one in (torch.stack(boxes).amax(0) > 1).tolist()]


def decided(seconds: float, form: ImplicitForm, box: Box, labels: Tensor) -> tuple[list[str], list[Line]]:
    """Asks branch and bound about one image; where a linear program has no solver, there is no verdict."""
    with mock.patch.object(time, "monotonic", time.process_time):  # other processes must not use up the seconds
        try:
            (verdict,) = branch_and_bound(form, box, labels, seconds)
        except MissingExtraError:
            verdict = Verdict("undecided", math.inf, 0)
    return [verdict.status], [{"seconds": seconds, "splits": verdict.splits}]


class Answers:
    """What is known of every image, by model, radius and column; read from and added to a file of verdicts."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.known: dict[tuple[str, float, str], dict[int, Line]] = {}
        file = options.verdicts
        for text in file.read_text().splitlines() if file is not None and file.exists() else ():
            line = json.loads(text) if text.endswith("}") else {}  # else the run that wrote it was cut off
            again = line.get("answer") == "undecided" and line["seconds"] < options.seconds and not options.merge
            if line and not again:
                self._add(line)

    def _add(self, line: Line) -> None:
        self.known.setdefault((line["model"], line["epsilon"], line["column"]), {})[line["image"]] = line

    def of(self, name: str, epsilon: float, column: str) -> dict[int, Line]:
        """Returns what a column says of the images of this run that it was asked about."""
        known = self.known.get((name, epsilon, column), {})
        return {image: known[image] for image in sorted(known) if image < self.options.images}

    def held(self, name: str, epsilon: float, columns: Iterable[str] = METHODS) -> set[int]:
        """Returns the images that are proven by bounds."""
        pairs = (pair for column in columns for pair in self.of(name, epsilon, column).items())
        return {image for image, line in pairs if line["answer"]}

    def open(self, name: str, epsilon: float) -> list[int]:
        """Returns the images that the attack leaves and bounds do not prove."""
        attack = self.of(name, epsilon, "pgd")
        left = {image for image, line in attack.items() if line["answer"] == "left"}
        if wrong := self.held(name, epsilon) & (attack.keys() - left):
            raise AssertionError(f"{name} at {epsilon}: the classes of images {wrong} are proven and attacked")
        return sorted(left - self.held(name, epsilon))

    def ask(self, jobs: list[Job]) -> None:
        """Answers what has no answer yet, in random order.

        After the time of --within no further image is asked about, but all that were asked about get their
        answer: a random sample, which does not favour those that are decided quickly.
        """
        parts = []
        for job in jobs if not self.options.merge else ():
            images = [image for image in job.images if image not in self.of(*job[:3])]
            size = 1 if job.column == "complete" else PART
            parts += [job._replace(images=images[i : i + size]) for i in range(0, len(images), size)]
        random.Random(0).shuffle(parts)
        run = partial(Job.run, seconds=self.options.seconds, forms=self.options.forms, until=self.options.until)
        with multiprocessing.get_context("spawn").Pool(self.options.processes) as pool:
            for lines in pool.imap_unordered(run, parts):
                for line in lines:
                    self._add(line)
                if self.options.verdicts is not None:
                    with self.options.verdicts.open("a") as file:
                        file.write("".join(json.dumps(line) + "\n" for line in lines))

    def line(self, name: str, epsilon: float) -> Line:
        """Returns a line of the table, without the columns whose images do not all have an answer."""
        count, open_, new = self.options.images, self.open(name, epsilon), {}
        attack = [line["answer"] for line in self.of(name, epsilon, "pgd").values()]
        if len(attack) < count:
            return new
        left, held = attack.count("left"), self.held(name, epsilon)
        new |= {"clean": _percent(count - attack.count("wrong"), count), "pgd": _percent(left, count)}
        for column in METHODS:
            known = self.of(name, epsilon, column)
            proven = held if column == "slopes" else self.held(name, epsilon, [column])
            if known.keys() >= (set(open_) if column == "slopes" else set(range(count))):
                new |= {column: _percent(len(proven), count), f"{column} ms": _mean_ms(known.values())}
            if column == "crown" and column in new:
                new["boxes"] = _percent(sum(line["box"] for line in known.values()), count)
        asked = [line for image, line in self.of(name, epsilon, "complete").items() if image in open_]
        verdicts = [line["answer"] for line in asked]
        if open_ and not asked:
            return new
        new |= {"open": len(open_), "asked": len(asked), "seconds": self.options.seconds}
        new |= {one: verdicts.count(one.removesuffix("s")) for one in ("proven", "counter-examples", "undecided")}
        new["complete ms"] = _mean_ms(asked)
        if len(asked) == len(open_):
            unsplit = sum(line["answer"] == "proven" and not line["splits"] for line in asked)
            new |= {"unsplit": _percent(len(held) + unsplit, count)}
            new |= {"complete": _percent(len(held) + new["proven"], count)}
            new |= {"pgd and complete": _percent(left - new["counter-examples"], count)}
        return new


def _percent(some: int, count: int) -> float:
    return round(100 * some / count, 1)


def _mean_ms(lines: Collection[Line]) -> float:
    return round(sum(line["ms"] for line in lines) / max(1, len(lines)), 1)


def main() -> None:
    """Measures everything and writes the result."""
    parser = make_parser(__doc__, __file__, quick="ten images of one model at one radius", table="print the table")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--columns", default=",".join((*METHODS, "complete")))
    parser.add_argument("--seconds", type=float, default=10.0, help="for branch and bound of one image")
    parser.add_argument("--forms", type=Path, help="a folder in which trained models are left")
    parser.add_argument("--processes", type=int, default=1, help="images that are examined at the same time")
    parser.add_argument("--verdicts", type=Path, help="a file of answers, read first and added to")
    parser.add_argument("--merge", action="store_true", help="make the table of --verdicts alone, and ask nothing")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds after which no image is asked about"
    )
    options = parser.parse_args()
    options.until = time.time() + options.within
    if options.table:
        for line in load(options)["lines"]:
            print(line)
        return
    options.images = 10 if options.quick else options.images
    chosen = [(name, eps) for name in options.models.split(",") for eps in options.epsilons]
    chosen = chosen[: 1 if options.quick else None]
    with tempfile.TemporaryDirectory() as folder:
        options.forms = options.forms or Path(folder)
        for name in {name for name, _ in chosen} if not options.merge else ():
            trained(name, options.forms)
        answers = asked(options, chosen)
    for name, epsilon in chosen:
        if new := answers.line(name, epsilon):
            print({"model": name, "epsilon": epsilon, **new}, flush=True)
            _save(options, {"model": name, "epsilon": epsilon, "images": options.images}, new)


def asked(options: Any, chosen: list[tuple[str, float]]) -> Answers:
    """Asks for all columns, those first that tell which images are open."""
    columns = options.columns.split(",")
    needed = {"pgd", *columns, *(("crown",) if "complete" in columns else ())}
    answers, everything = Answers(options), list(range(options.images))
    first = [column for column in ("pgd", "norms", "crown") if column in needed]
    answers.ask([Job(*pair, column, everything) for pair in chosen for column in first])
    for column in ("slopes", "complete"):
        if column in columns:
            answers.ask([Job(*pair, column, answers.open(*pair)) for pair in chosen])
    return answers


def _save(options: Any, about: Line, new: Line) -> None:
    """Adds columns to a line of the file, or replaces them; a line about other images or of before goes."""
    exists = not options.quick and (options.out or options.result).exists()
    lines = load(options)["lines"] if exists else []
    keys = [(name, epsilon) for name in MODELS for epsilon in EPSILONS]
    same = [line for line in lines if (line["model"], line["epsilon"]) == (about["model"], about["epsilon"])]
    old = same[0] if same and same[0].get("images") == about["images"] and "note" not in same[0] else {}
    if "asked" in new:
        old = {name: value for name, value in old.items() if "complete" not in name and name != "unsplit"}
    lines = [line for line in lines if line not in same]
    lines = sorted(
        [*lines, {**old, **about, **new}], key=lambda line: keys.index((line["model"], line["epsilon"]))
    )
    save(options, lines=lines)


if __name__ == "__main__":
    main()
