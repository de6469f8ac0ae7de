"""Bounds of outputs: how wide, how fast, and how many images they certify, beside what an attack reaches.

An MLP with biases (784-64-32-16-10 on FashionMNIST where WELLPOSED_DATA has it, else 64-64-32-16-10 on digits) is
trained for a few epochs; two random models with loops (200 and 1 000 states) follow. Widths are means over the
outputs of a few test images in the box of radius eps, clipped to [0, 1]; "pgd" is what projected gradients reach,
an inner bound of every width. All in float64 on one processor. Printed after each table is the width of refined
bounds over that with optimised slopes, and over the triangle LP's where that is solved.

Run: python -m benchmarks.robust.bounds [--quick]
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import cpu_seconds, make_parser, one_thread, save
from benchmarks.problems import images, trained_mlp
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.robust import Box, Crown, MethodError, certified_accuracy, output_bounds, sensitivity

EPSILONS, CERTIFIED_EPSILONS, WIDTH_IMAGES, CERTIFIED_IMAGES = (0.002, 0.01, 0.05), (0.002, 0.01), 8, 200
METHODS: dict[str, Any] = {
    "norm": "norm",
    "box": "box",
    "l2": "l2",
    "interval": "interval",
    "crown, one pass": Crown(rounds=0),
    "crown, refined": Crown(rounds=3),
    "crown, slopes optimised": Crown(rounds=3, slope_steps=20),
}
PROGRAMS: dict[str, Any] = {"lp as printed": "lp", "triangle lp": "triangle"}
REFINED = "crown, refined"


def attack(form: ImplicitForm, box: Box, objective: Callable[[Tensor], Tensor], steps: int = 40) -> Tensor:
    """Maximises one number a sample by projected sign gradients; returns the best inputs."""
    u, radius = box.center.clone(), (box.upper - box.lower) / 2
    best, top = u.clone(), torch.full(u.shape[:1], -torch.inf, dtype=u.dtype)
    for step in range(steps):
        u = u.detach().requires_grad_()
        value = objective(form(u))
        (gradient,) = torch.autograd.grad(value.sum(), u)
        better = value.detach() > top
        best, top = torch.where(better[:, None], u.detach(), best), torch.where(better, value.detach(), top)
        rate = radius * max(0.05, 1 - step / steps)
        u = (u.detach() + rate * gradient.sign()).clamp(box.lower, box.upper)
    return best


def reached(form: ImplicitForm, box: Box) -> float:
    """Returns the mean distance between the largest and smallest outputs that an attack finds."""
    widths = []
    for k in range(form.sizes[2]):
        high = form(attack(form, box, lambda y, k=k: y[:, k]))[:, k]
        low = form(attack(form, box, lambda y, k=k: -y[:, k]))[:, k]
        widths.append((high - low).mean())
    return float(torch.stack(widths).mean())


@torch.no_grad()
def measured(form: ImplicitForm, box: Box, method: Any) -> dict[str, Any]:
    """Returns the mean width of a method and its processor time per image, the second of two calls."""
    try:
        output_bounds(form, box, method)
    except (MethodError, IllPosedError) as error:
        return {"width": None, "ms": None, "why": str(error).splitlines()[0]}
    spent, bounds = cpu_seconds(lambda: output_bounds(form, box, method))
    return {"width": round(float(bounds.width.mean()), 5), "ms": round(1000 * spent / len(box), 2)}


def table(
    name: str, form: ImplicitForm, u: Tensor, epsilons: tuple[float, ...], programs: bool = True
) -> list[dict[str, Any]]:
    """Measures all methods on some images; linear programs too if asked for."""
    lines = []
    for epsilon in epsilons:
        box = Box.around(u, epsilon)
        methods = {**METHODS, **(PROGRAMS if programs else {})}
        rows = {method: measured(form, box, given) for method, given in methods.items()}
        rows["pgd (inner)"] = {"width": round(reached(form, box), 5), "ms": None}
        for other in ("crown, slopes optimised", "triangle lp"):
            if other in rows:
                ratio = round(rows[REFINED]["width"] / rows[other]["width"], 4)
                rows[f"refined over {other}"] = {"width": ratio, "ms": None}
        for method, row in rows.items():
            lines.append({"model": name, "epsilon": epsilon, "method": method, **row})
            print(lines[-1], flush=True)
    return lines


def certificates(
    form: ImplicitForm, u: Tensor, labels: Tensor, epsilons: tuple[float, ...]
) -> list[dict[str, Any]]:
    """Counts how many images keep their class for certain, and under attack."""
    lines = []
    for epsilon in epsilons:
        box = Box.around(u, epsilon)
        row: dict[str, Any] = {"epsilon": epsilon}
        for method in ("box", "interval", "crown, refined", "crown, slopes optimised"):
            spent, share = cpu_seconds(partial(certified_accuracy, form, box, labels, METHODS[method]))
            row[method], row[f"{method}, ms"] = round(100 * share, 2), round(1000 * spent / len(u), 2)
        row["attacked"] = round(100 * attacked_accuracy(form, box, labels), 2)
        row["clean"] = round(100 * float((form(u).argmax(1) == labels).double().mean()), 2)
        print(row, flush=True)
        lines.append(row)
    return lines


def attacked_accuracy(form: ImplicitForm, box: Box, labels: Tensor) -> float:
    """Returns the share of images that keep their class under the attack on the largest margin."""
    own = torch.nn.functional.one_hot(labels, form.sizes[2]).bool()

    def margin(y: Tensor) -> Tensor:
        return y.masked_fill(own, -torch.inf).amax(1) - y[own]

    correct = form(attack(form, box, margin)).argmax(1) == labels
    return float((correct & (form(box.center).argmax(1) == labels)).double().mean())


def looped(n: int, p: int, kappa: float, seed: int) -> ImplicitForm:
    """Builds a random model with loops, ``|A|_inf = kappa``."""
    generator = torch.Generator().manual_seed(seed)
    A, B, C = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, n), (n, p), (10, n)))
    bias = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return ImplicitForm(kappa * A / A.abs().sum(1, keepdim=True), B / p**0.5, C / n**0.5, bias=bias)


def sensitivities(n: int, p: int, kappa: float) -> dict[str, Any]:
    """Times the sensitivity matrix against the iteration for all inputs at once, 003 section 4.2, to 1e-6."""
    form = looped(n, p, kappa, 1)
    sensitivity(form)
    ours, S = cpu_seconds(lambda: sensitivity(form))
    A, B, C = (getattr(form, name).to_dense().abs() for name in "ABC")

    def iterated() -> tuple[Tensor, int]:
        states, change, steps = B, 1.0, 0
        while change > 1e-6:
            following = A @ states + B
            change, states = float((following - states).abs().max() / following.max()), following
            steps += 1
        return states, steps

    theirs, (states, steps) = cpu_seconds(iterated)
    gap = float(((S - C @ states).abs() / S).max())
    line = {"n": n, "p": p, "kappa": kappa, "ours_s": round(ours, 4), "iteration_s": round(theirs, 3)}
    return {**line, "steps": steps, "ratio": round(theirs / ours, 1), "largest_relative_gap": gap}


def main() -> None:
    """Measures everything and writes the result."""
    quick = "one radius, two images for widths, ten for certificates, small loops"
    options = make_parser(__doc__, __file__, quick=quick).parse_args()
    one_thread()
    (train, name), (test, _) = images("train"), images("test")
    network = trained_mlp(train).double()
    epsilons, radii = ((0.01,), (0.01,)) if options.quick else (EPSILONS, CERTIFIED_EPSILONS)
    some, many = (2, 10) if options.quick else (WIDTH_IMAGES, CERTIFIED_IMAGES)
    small, large = (20, 100) if options.quick else (200, 1000)  # states of the loops
    u, labels = test.flat().double()[:many], test.labels[:many]
    form, p = to_implicit(network, (u.shape[1],)), u.shape[1]
    lines = table("mlp", form, u[:some], epsilons)
    lines += table(f"loops, n={small}", looped(small, p, 0.95, 0), u[:some], (0.01,))
    lines += table(f"loops, n={large}", looped(large, p, 0.95, 0), u[:2], (0.01,), programs=False)
    numbers = {"certified": certificates(form, u, labels, radii), "sensitivity": sensitivities(large, p, 0.99)}
    print(numbers["sensitivity"])
    save(options, data=name, widths=lines, **numbers)


if __name__ == "__main__":
    main()
