"""Certified accuracy of classifiers with loops: what norms prove, what continuation proves, what an attack leaves.

`ImplicitModel` without feedthrough, with biases, kappa .9, under the conditions monotone, spectral and inf, is
trained on 20,000 images of MNIST for 4 epochs by Adam, without any robust training, in float32. The first images
of the test set are then attacked (PGD, 40 steps) and certified in the box of radius eps, clipped to [0, 1], in
float64 on one processor. All columns are percent of the same images: "clean" and "pgd" what keeps its class,
"norms" what CROWN proves if loops are enclosed by norms alone, "crown" what it proves with boxes of continuation,
"slopes" the same with eight rounds of refinement and slopes optimised; "boxes" are the samples that have such a
box (others are affine, or known well enough, or not proven). "complete" adds what branch and bound proves within
some seconds of what the attack leaves and "slopes" does not prove. Milliseconds are per image, for "complete" per
image that it was asked about.

Run: python -m benchmarks.robust.loops [--quick] [--images 100] [--models monotone-87,inf-40]
Models and radii that are not run keep what the file says of them.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import cpu_seconds, load, make_parser, one_thread, save
from wellposed.data import load_images
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Box, Crown, certified, crown
from wellposed.robust.attacks import pgd
from wellposed.robust.certification import branch_and_bound
from wellposed.training import fit

MODELS = ("monotone-40", "monotone-87", "spectral-40", "spectral-87", "inf-40", "inf-87")
EPSILONS, PART = (0.01, 0.02, 0.05), 20  # images that are bounded at once
METHODS = {"crown": Crown(), "slopes": Crown(rounds=8, slope_steps=20)}


def trained(name: str) -> ImplicitForm:
    """Trains a classifier."""
    condition, states = name.split("-")
    data = load_images("mnist", "train")
    torch.manual_seed(0)
    model = ImplicitModel(
        784, 10, int(states), condition=condition, kappa=0.9, bias=True, feedthrough=False, on_failure="ignore"
    )
    pairs = data.flat()[:20_000], data.labels[:20_000]
    loss = torch.nn.functional.cross_entropy
    fit(model, pairs, loss, epochs=4, optimizer=lambda p: torch.optim.Adam(p, 1e-3), seed=0, progress=False)
    with torch.no_grad():
        return model.double().form()


def _counted(form: ImplicitForm, box: Box, labels: Tensor, method: Crown) -> tuple[Tensor, float]:
    """Certifies all images, some at a time; returns which, and milliseconds an image."""
    certain, spent = [], 0.0
    for rows in torch.arange(len(labels)).split(PART):
        some = Box(box.lower[rows], box.upper[rows])
        seconds, held = cpu_seconds(lambda some=some, rows=rows: certified(form, some, labels[rows], method))
        certain, spent = [*certain, held], spent + seconds
    return torch.cat(certain), 1000 * spent / len(labels)


def row(form: ImplicitForm, u: Tensor, labels: Tensor, epsilon: float, seconds: float) -> dict[str, Any]:
    """Attacks and certifies."""
    box, line = Box.around(u, epsilon), {"epsilon": epsilon}
    clean = form.C.apply(form.equilibrium(u, on_failure="ignore", max_steps=2000).value).argmax(1) == labels
    attack = pgd(lambda v: _outputs(form, v), u, labels, epsilon, steps=40)
    left = clean & ~attack.success
    line |= {"clean": _share(clean), "pgd": _share(left)}
    with mock.patch.object(crown.Continuation, "why_not", return_value="switched off"):
        norms, spent = _counted(form, box, labels, Crown())
    line |= {"norms": _share(norms), "norms ms": round(spent, 1)}
    boxes: list[Tensor] = []
    call = crown.Continuation.__call__
    with mock.patch.object(crown.Continuation, "__call__", lambda *given: boxes.append(call(*given)) or boxes[-1]):
        held, spent = _counted(form, box, labels, METHODS["crown"])
    line |= {"boxes": _share(torch.cat(boxes) > 1), "crown": _share(held), "crown ms": round(spent, 1)}
    better, spent = _counted(form, box, labels, METHODS["slopes"])
    line |= {"slopes": _share(better), "slopes ms": round(spent, 1)}
    proven = norms | held | better
    open_ = (left & ~proven).nonzero()[:, 0]
    spent, verdicts = cpu_seconds(
        lambda: branch_and_bound(form, Box(box.lower[open_], box.upper[open_]), labels[open_], seconds)
    )
    for index, verdict in zip(open_.tolist(), verdicts, strict=True):
        proven[index] = verdict.status == "proven"
        left[index] = verdict.status != "counter-example"
    line |= {"complete": _share(proven), "complete ms": round(1000 * spent / max(1, len(open_)), 1)}
    line |= {"pgd and complete": _share(left)}
    if bool((proven & ~left).any()):
        raise AssertionError("an attack changes a class that was proven")
    return line


def _outputs(form: ImplicitForm, u: Tensor) -> Tensor:
    x = form.equilibrium(u, on_failure="ignore").value
    assert isinstance(x, Tensor)
    return form.C.apply(x)


def _share(marks: Tensor) -> float:
    return round(100 * float(marks.double().mean()), 1)


def main() -> None:
    """Measures everything and writes the result."""
    parser = make_parser(__doc__, __file__, quick="ten images of one model at one radius", table="print the table")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seconds", type=float, default=5.0, help="for branch and bound of one image")
    options = parser.parse_args()
    if options.table:
        for line in load(options)["lines"]:
            print(line)
        return
    one_thread()
    count = 10 if options.quick else options.images
    test = load_images("mnist", "test")
    u, labels = test.flat().double()[:count], test.labels[:count]
    chosen, lines = options.models.split(","), []
    if not options.quick and (options.out or options.result).exists():
        asked = {(name, epsilon) for name in chosen for epsilon in options.epsilons}
        lines = [line for line in load(options)["lines"] if (line["model"], line["epsilon"]) not in asked]
    for name in chosen[: 1 if options.quick else None]:
        form = trained(name)
        for epsilon in options.epsilons[: 1 if options.quick else None]:
            lines.append({"model": name, **row(form, u, labels, epsilon, options.seconds)})
            print(lines[-1], flush=True)
            save(options, images=count, seconds=options.seconds, lines=lines)


if __name__ == "__main__":
    main()
