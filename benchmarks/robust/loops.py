"""Certified accuracy of classifiers with loops: what norms prove, what continuation proves, what an attack leaves.

`ImplicitModel` without feedthrough, with biases, kappa .9, under the conditions monotone, spectral and inf, is
trained on 20,000 images of MNIST for 4 epochs by Adam, without any robust training, in float32. The first images
of the test set are then attacked (PGD, 40 steps) and certified in the box of radius eps, clipped to [0, 1], in
float64 on one processor. All columns but those of "asked" are percent of the same images: "clean" and "pgd" what
keeps its class, "norms" what CROWN proves if loops are enclosed by norms alone, "crown" what it proves with boxes
of continuation, "slopes" what is proven once those that it leaves open are asked about again, with eight rounds of
refinement and slopes optimised; "boxes" are the samples that have such a box (others are affine, or known well
enough, or not proven).

"open" images are left by the attack and not proven by CROWN. Branch and bound is asked about all of them, or about
some drawn at random: "asked" are their number, then "proven", "counter-examples", and "undecided" when the seconds
(of the processor, not of the clock) were over. "complete" is the percentage of all images that are proven then,
"pgd and complete" what neither of the two attacks; both are missing where not all open images were asked about.
Milliseconds are of the processor, per image that was asked about. Lines with a "note" are of an earlier version.

Run: python -m benchmarks.robust.loops [--quick] [--images 200] [--models monotone-87,inf-40] [--columns complete]
Models, radii and columns that are not run keep what the file says of them.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import cpu_seconds, load, make_parser, one_thread, save
from wellposed.data import load_images
from wellposed.errors import MissingExtraError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, certification, certified, crown
from wellposed.robust.attacks import pgd
from wellposed.robust.certification import Verdict, branch_and_bound
from wellposed.training import fit

MODELS = tuple(f"{condition}-{n}" for n in (40, 87, 200) for condition in ("monotone", "spectral", "inf"))
EPSILONS, PART = (0.01, 0.02, 0.05), 20  # images that are bounded at once
METHODS = {"norms": Crown(continuation=False), "crown": Crown(), "slopes": Crown(rounds=8, slope_steps=20)}
Line = dict[str, Any]


def trained(name: str, folder: Path | None = None) -> ImplicitModel:
    """Trains a classifier, or reads one that an earlier run has left in a folder."""
    condition, states = name.split("-")
    data = load_images("mnist", "train")
    torch.manual_seed(0)
    model = ImplicitModel(
        784, 10, int(states), condition=condition, kappa=0.9, bias=True, feedthrough=False, on_failure="ignore"
    )
    file = None if folder is None else folder / f"{name}.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file))
    else:
        pairs = data.flat()[:20_000], data.labels[:20_000]
        loss = torch.nn.functional.cross_entropy
        fit(model, pairs, loss, epochs=4, optimizer=lambda p: torch.optim.Adam(p, 1e-3), seed=0, progress=False)
        if file is not None:
            torch.save(model.state_dict(), file)
    return model.double()


def _counted(form: ImplicitForm, box: Box, labels: Tensor, method: Crown) -> tuple[Tensor, float]:
    """Certifies all images, some at a time; returns which, and milliseconds an image."""
    certain, spent = [], 0.0
    for rows in torch.arange(len(labels)).split(PART):
        some = Box(box.lower[rows], box.upper[rows])
        seconds, held = cpu_seconds(lambda some=some, rows=rows: certified(form, some, labels[rows], method))
        certain, spent = [*certain, held], spent + seconds
    return torch.cat(certain), 1000 * spent / len(labels)


def attacked(model: ImplicitModel, u: Tensor, labels: Tensor, epsilon: float) -> tuple[Tensor, Line]:
    """Attacks all images; returns which keep their class."""
    with torch.no_grad():
        clean = model(u).argmax(1) == labels
    left = clean & ~pgd(model, u, labels, epsilon, steps=40).success
    return left, {"clean": _share(clean), "pgd": _share(left)}


def proven(form: ImplicitForm, box: Box, labels: Tensor, name: str, asked: Tensor) -> tuple[Tensor, Line]:
    """Certifies some images by bounds; returns which are proven."""
    boxes: list[Tensor] = []
    call, held, spent = crown.Continuation.__call__, torch.zeros_like(asked), 0.0
    with mock.patch.object(crown.Continuation, "__call__", lambda *given: boxes.append(call(*given)) or boxes[-1]):
        if bool(asked.any()):
            some = Box(box.lower[asked], box.upper[asked])
            held[asked], spent = _counted(form, some, labels[asked], METHODS[name])
    line: Line = {name: _share(held), f"{name} ms": round(spent, 1)}
    return held, line | ({"boxes": _share(torch.cat(boxes) > 1)} if name == "crown" else {})


def decided(
    form: ImplicitForm, box: Box, labels: Tensor, left: Tensor, held: Tensor, seconds: float, most: int
) -> Line:
    """Asks branch and bound about what is left and not proven, or about some of it drawn at random."""
    open_ = (left & ~held).nonzero()[:, 0]
    order = torch.randperm(len(open_), generator=torch.Generator().manual_seed(0))
    asked = open_[order[:most].sort().values]
    verdicts, spent = [], 0.0
    for index in asked.tolist():
        one = Box(box.lower[index : index + 1], box.upper[index : index + 1])
        ask = partial(branch_and_bound, form, one, labels[index : index + 1], seconds)
        with (
            mock.patch.object(certification, "monotonic", time.process_time),
            mock.patch.object(time, "monotonic", time.process_time),
        ):  # other processes must not use up the seconds
            took, status = cpu_seconds(lambda ask=ask: _status(ask))
        verdicts, spent = [*verdicts, status], spent + took
    line: Line = {"open": len(open_), "asked": len(asked), "seconds": seconds}
    line |= {name: verdicts.count(name.removesuffix("s")) for name in ("proven", "counter-examples", "undecided")}
    line |= {"complete ms": round(1000 * spent / max(1, len(asked)), 1)}
    if len(asked) == len(open_):
        share = 100 / len(labels)
        line["complete"] = round(_share(held) + share * line["proven"], 1)
        line["pgd and complete"] = round(_share(left) - share * line["counter-examples"], 1)
    return line


def _status(ask: Callable[[], list[Verdict]]) -> str:
    """Returns the verdict about one image; where a linear program has no solver, there is none."""
    try:
        return ask()[0].status
    except MissingExtraError:
        return "undecided"


def _share(marks: Tensor) -> float:
    return round(100 * float(marks.double().mean()), 1)


def main() -> None:
    """Measures everything and writes the result."""
    parser = make_parser(__doc__, __file__, quick="ten images of one model at one radius", table="print the table")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--columns", default=",".join((*METHODS, "complete")))
    parser.add_argument("--seconds", type=float, default=10.0, help="for branch and bound of one image")
    parser.add_argument("--most", type=int, default=10**6, help="images that branch and bound is asked about")
    parser.add_argument("--forms", type=Path, help="a folder in which trained models are left")
    options = parser.parse_args()
    if options.table:
        for line in load(options)["lines"]:
            print(line)
        return
    one_thread()
    count = 10 if options.quick else options.images
    test = load_images("mnist", "test")
    u, labels = test.flat().double()[:count], test.labels[:count]
    for name in options.models.split(",")[: 1 if options.quick else None]:
        model = trained(name, options.forms)
        form = model.form(detach=True)
        for epsilon in options.epsilons[: 1 if options.quick else None]:
            box, columns = Box.around(u, epsilon), options.columns.split(",")
            left, new = attacked(model, u, labels, epsilon)
            held = torch.zeros_like(left)
            for method in METHODS:
                if method in columns or (method == "crown" and "complete" in columns):
                    asked = left & ~held if method == "slopes" else torch.ones_like(left)
                    which, more = proven(form, box, labels, method, asked)
                    held, new = held | which, new | more
                    new |= {"slopes": _share(held)} if method == "slopes" else {}
            if "complete" in columns:
                new |= decided(form, box, labels, left, held, options.seconds, options.most)
            if bool((held & ~left).any()):
                raise AssertionError("an attack changes a class that was proven")
            print({"model": name, "epsilon": epsilon, **new}, flush=True)
            _save(options, count, {"model": name, "epsilon": epsilon, "images": count}, new)


def _save(options: Any, count: int, about: Line, new: Line) -> None:
    """Adds columns to a line of the file, or replaces them; a line about other images or of before goes."""
    exists = not options.quick and (options.out or options.result).exists()
    lines = load(options)["lines"] if exists else []
    keys = [(name, epsilon) for name in MODELS for epsilon in EPSILONS]
    same = [line for line in lines if (line["model"], line["epsilon"]) == (about["model"], about["epsilon"])]
    old = same[0] if same and same[0].get("images") == count and "note" not in same[0] else {}
    if "asked" in new:
        old = {name: value for name, value in old.items() if name not in ("complete", "pgd and complete")}
    lines = [line for line in lines if line not in same]
    lines = sorted(
        [*lines, {**old, **about, **new}], key=lambda line: keys.index((line["model"], line["epsilon"]))
    )
    save(options, lines=lines)


if __name__ == "__main__":
    main()
