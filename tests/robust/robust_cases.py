"""Forms to bound, points to try, and slow references written with dense matrices."""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds as Ends
from scipy.optimize import LinearConstraint, milp
from torch import Tensor, nn

from wellposed.convert import to_implicit
from wellposed.convex import fit_states, record_states
from wellposed.forms import Block, Dense, ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Ball, Box, SparseBox, Uncertainty
from wellposed.robust.attacks import autoattack, pgd

F64 = torch.float64


def looped(n: int, activation: str = "relu", kappa: float = 0.9, p: int = 4, q: int = 3) -> ImplicitForm:
    """A dense loop with ``|A|_inf = kappa``, a feedthrough and biases."""
    A = torch.randn(n, n, dtype=F64)
    return ImplicitForm(
        kappa * A / A.abs().sum(1, keepdim=True),
        torch.randn(n, p, dtype=F64),
        torch.randn(q, n, dtype=F64),
        0.3 * torch.randn(q, p, dtype=F64),
        0.3 * torch.randn(n, dtype=F64),
        activation,
        output_bias=torch.randn(q, dtype=F64),
    )


def triangular(activation: str = "relu", sizes: tuple[int, ...] = (4, 8, 6, 3)) -> ImplicitForm:
    """A feed-forward network whose form is one strictly triangular matrix, gains far above one."""
    form = to_implicit(mlp(sizes, activation), sizes[:1])
    return form.replaced(A=form.A.to_dense(), B=form.B.to_dense(), C=form.C.to_dense(), activation=activation,
                         labels=None)  # fmt: skip


def mlp(sizes: tuple[int, ...] = (4, 8, 6, 3), activation: str = "relu") -> nn.Sequential:
    """A network with biases, in float64."""
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "leaky_relu(0.1)": lambda: nn.LeakyReLU(0.1)}
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), kinds[activation]()]
    network = nn.Sequential(*layers[:-1]).double()
    with torch.no_grad():
        for layer in network:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(2)
    return network


def cnn(pool: bool = True) -> nn.Sequential:
    """A small convolutional network for 1 x 6 x 6 images."""
    between = nn.MaxPool2d(2) if pool else nn.AvgPool2d(2)
    first, second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 2)
    return nn.Sequential(first, nn.ReLU(), between, second, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()


def two_loops() -> ImplicitForm:
    """Two loops, one after the other, with different activations, and a block between them."""
    sizes = (5, 4, 6)
    A = {
        (0, 0): _scaled(5, 5, 0.8),
        (0, 1): _scaled(5, 4, 3.0),
        (1, 2): _scaled(4, 6, 2.0),
        (2, 2): _scaled(6, 6, 0.7),
    }
    B = Block(sizes, (3,), {(2, 0): _scaled(6, 3, 2.0), (0, 0): _scaled(5, 3, 1.0)})
    C, phi = torch.randn(2, 15, dtype=F64), ["tanh", "relu", "relu"]
    return ImplicitForm(Block(sizes, sizes, A, F64), B, C, activation=phi)


def _scaled(m: int, n: int, norm: float) -> Dense:
    return Dense(norm * nn.functional.normalize(torch.randn(m, n, dtype=F64), p=1))


FORMS = {
    "relu loop": lambda: looped(9),
    "leaky loop": lambda: looped(8, "leaky_relu(0.1)"),
    "tanh loop": lambda: looped(8, "tanh", 0.95),
    "sigmoid loop": lambda: looped(8, "sigmoid", 1.5),
    "hardtanh loop": lambda: looped(8, "hardtanh"),
    "gelu loop": lambda: looped(8, "gelu", 0.7),
    "sorting loop": lambda: looped(8, "group_sort(2)"),
    "triangular": triangular,
    "tanh layers": lambda: to_implicit(mlp(activation="tanh"), (4,)),
    "relu layers": lambda: to_implicit(mlp(), (4,)),
    "two loops": two_loops,
    "pooling network": lambda: to_implicit(cnn(), (1, 6, 6)),
    "averaging network": lambda: to_implicit(cnn(False), (1, 6, 6)),
}


def exact(form: ImplicitForm, u: Tensor) -> tuple[Tensor, Tensor]:
    """States and outputs in float64, solved far beyond what is compared."""
    wide = form.to(F64)
    x = wide.equilibrium(u.to(F64), max_steps=2000).value
    y = wide.C.apply(x) + wide.D.apply(u.to(F64))
    return x, y if wide.output_bias is None else y + wide.output_bias


def exact_maximum(form: ImplicitForm, box: Box, states: Any, inputs: Any, large: float = 100.0) -> float:
    """The largest ``states' x + inputs' u`` of a ReLU form over a box, by a mixed-integer program.

    It knows no bound of a state but a large number. Once the pattern of positive states is found the program is
    solved again for that pattern, without the tolerance of integers.
    """
    A, B = form.A.to_dense().numpy(), form.B.to_dense().numpy()
    (n, p), b = B.shape, np.zeros(len(B)) if form.bias is None else form.bias.numpy()
    relu = np.concatenate(
        [np.full(size, phi.name == "relu") for phi, size in zip(form.activations, form.partition, strict=True)]
    )
    eye, none = np.eye(n), np.zeros((n, n))
    above = np.hstack([eye - A, -B, none])  # x - z >= 0
    below = np.hstack([eye - A, -B, large * eye])  # x - z <= large (1 - d)
    small = np.hstack([eye, np.zeros((n, p)), -large * eye])  # x <= large d
    rules = [LinearConstraint(above, b, np.inf), LinearConstraint(below, -np.inf, b + large)]
    rules.append(LinearConstraint(small, -np.inf, 0))
    least = np.where(relu, 0.0, 1.0)  # of d: an affine state has x = z
    low = np.concatenate([np.where(relu, 0.0, -large), box.lower[0].numpy(), least])
    high = np.concatenate([np.full(n, large), box.upper[0].numpy(), np.ones(n)])
    cost = -np.concatenate([states, inputs, np.zeros(n)])
    whole = np.concatenate([np.zeros(n + p), np.ones(n)])
    pattern = milp(cost, constraints=rules, bounds=Ends(low, high), integrality=whole).x[n + p :].round()
    low[n + p :], high[n + p :] = pattern, pattern
    found = milp(cost, constraints=rules, bounds=Ends(low, high))
    assert found.success
    return float(-found.fun)


def climb(form: ImplicitForm, inputs: Uncertainty, direction: Tensor, steps: int = 3) -> Tensor:
    """Extreme points of a set that make ``direction' y`` large: where the linearised output is largest."""
    u = inputs.center
    for _ in range(steps):
        u = u.detach().requires_grad_()
        (slope,) = torch.autograd.grad((form(u) * direction).sum(), u)
        slope = slope.masked_fill(slope == 0, 1e-30)  # at zero the support has several slopes, whose sum is none
        slope = slope.detach()[:, None].requires_grad_()
        (u,) = torch.autograd.grad(inputs.support(slope).sum(), slope)
        u = u[:, 0]
    return inputs.center + (1 - 1e-6) * (u - inputs.center)


def points(form: ImplicitForm, inputs: Uncertainty, count: int = 30) -> Tensor:  # (count', B, p)
    """Random, extreme and attacking points of a set."""
    rows = torch.eye(form.sizes[2], dtype=form.dtype)[:2]
    attacks = [climb(form, inputs, sign * row) for row in rows for sign in (1, -1)]
    found = torch.stack(attacks)
    if isinstance(inputs, Ball):  # rounding puts points of its surface outside, by an eps or so
        found = inputs.center + (found - inputs.center) * (1 - 8 * torch.finfo(form.dtype).eps)
    return torch.cat([inputs.sample(count), found])


def trained(seed: int, network: nn.Module) -> tuple[nn.Module, Tensor]:
    """Trains a network on classes that a few inputs decide."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(128, 4, generator=generator, dtype=F64)
    target = (3 * u[:, 0] * (0.5 + u[:, 1])).long().clamp(max=2)
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(u), target).backward()
        optimiser.step()
    return network.eval().requires_grad_(False), u


def trained_loop(seed: int, activation: str = "relu") -> ImplicitForm:
    """An implicit model that was trained."""
    torch.manual_seed(seed)
    model = ImplicitModel(4, 3, 9, bias=True, activation=activation).double()
    return trained(seed, model)[0].form()


def trained_layers(seed: int) -> ImplicitForm:
    """A network that was trained and converted."""
    torch.manual_seed(seed)
    return to_implicit(trained(seed, mlp((4, 10, 8, 3)))[0], (4,))


def sparsified(seed: int, **options: Any) -> ImplicitForm:
    """A model with few weights that was fitted to the states of a trained network."""
    torch.manual_seed(seed)
    network, u = trained(seed, mlp((4, 10, 8, 3)))
    model, report = fit_states(record_states(network, u.split(64)), **options)
    assert float((model.form().A.to_dense() == 0).double().mean()) > 0.4, report
    return model.form().to(F64)


def converted(seed: int, pool: bool) -> ImplicitForm:
    """A convolutional network that was converted."""
    torch.manual_seed(seed)
    return to_implicit(cnn(pool), (1, 6, 6))


MODELS: dict[str, Callable[[int], ImplicitForm]] = {
    **{f"random: {name}": (lambda seed, make=make: make()) for name, make in FORMS.items()},
    "random: wide loop": lambda seed: looped(40, kappa=0.99),
    "random: deep": lambda seed: triangular(sizes=(4, 9, 9, 9, 9, 3)),
    "trained: loop": trained_loop,
    "trained: tanh loop": partial(trained_loop, activation="tanh"),
    "trained: layers": trained_layers,
    "converted: pooling": partial(converted, pool=True),
    "converted: averaging": partial(converted, pool=False),
    "sparsified: few weights": partial(sparsified, kappa=0.95, target_sparsity=0.7),
    "sparsified: every state": partial(sparsified, kappa=0.9, support="full", objective="lasso", strength=0.05),
}


@lru_cache(maxsize=64)
def model_of(name: str, seed: int) -> ImplicitForm:
    """A model of that name, made once."""
    torch.manual_seed(seed)
    return MODELS[name](seed)


def tried(
    form: ImplicitForm, inputs: Uncertainty, u: Tensor, eps: float, number: int, count: int = 32
) -> dict[str, Tensor]:
    """Points of a set with where they come from: drawn, extreme, and found by attacks on the class."""
    drawn = inputs.sample(count)
    rows = torch.eye(form.sizes[2], dtype=form.dtype)
    climbed = torch.stack([climb(form, inputs, sign * row) for row in rows[:2] for sign in (1, -1)])
    target = form(u).argmax(1)
    options = {"norm": "2"} if isinstance(inputs, Ball) else {}
    options |= {"count": inputs.k} if isinstance(inputs, SparseBox) else {}
    found = pgd(form, u, target, eps, steps=10, restarts=1, seed=number, **options).inputs
    points = {"vertices": drawn[::2], "drawn": drawn[1::2], "gradients": climbed, "pgd": found[None]}
    if isinstance(inputs, Box):
        little = {"attacks": ("apgd-ce", "square"), "steps": 6, "square_queries": 10}
        points["autoattack"] = autoattack(form, u, target, eps, seed=number, **little).inputs[None]
    return {kind: part.flatten(2) for kind, part in points.items()}


def answers(form: ImplicitForm, points: Tensor) -> Tensor:  # (count, B, p) -> (count, B, q)
    """Outputs at equilibria that were solved to the last digits, as a fitted C may multiply an error by 1e4."""
    wide, u = form.to(F64), points.flatten(0, 1).to(F64)
    x, drive = exact(form, u)[0], wide.B.apply(u) + (0.0 if wide.bias is None else wide.bias)
    for _ in range(300):
        pieces = (wide.A.apply(x) + drive).split(wide.partition, dim=1)
        x = torch.cat([phi.function(z) for phi, z in zip(wide.activations, pieces, strict=True)], dim=1)
    y = wide.C.apply(x) + wide.D.apply(u) + (0.0 if wide.output_bias is None else wide.output_bias)
    return y.view(*points.shape[:2], -1)


def corners(lower: Tensor, upper: Tensor) -> Tensor:  # (p,) -> (2^p, p)
    """All corners of a box."""
    return torch.stack([torch.stack(list(ends)) for ends in product(*zip(lower, upper, strict=True))])


def sparse_corners(center: Tensor, lower: Tensor, upper: Tensor, k: int) -> Tensor:
    """All points with k entries at an end and the others at the center."""
    found = []
    for chosen in combinations(range(len(center)), k):
        for ends in product(*((lower[j], center[j], upper[j]) for j in chosen)):
            point = center.clone()
            point[list(chosen)] = torch.stack(ends)
            found.append(point)
    return torch.stack(found)


def dense_layers(network: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """The weights and biases of a network."""
    return [(m.weight.detach(), m.bias.detach()) for m in network if isinstance(m, nn.Linear)]


def propagated(layers: list, lower: Tensor, upper: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Interval bound propagation through ReLU layers, by positive and negative parts: all pre-activations."""
    found = []
    for number, (W, b) in enumerate(layers):
        if number:
            lower, upper = lower.clamp(min=0), upper.clamp(min=0)
        positive, negative = W.clamp(min=0), W.clamp(max=0)
        lower, upper = positive @ lower + negative @ upper + b, positive @ upper + negative @ lower + b
        found.append((lower, upper))
    return found


def crown_reference(layers: list, lower: Tensor, upper: Tensor) -> list[tuple[Tensor, Tensor]]:
    """CROWN of a ReLU network for one input box, every intermediate bound by its own backward pass: all layers.

    Units that intervals show to be always on or off are left at their interval, the others take the tighter bound.
    """
    known: list[tuple[Tensor, Tensor]] = []
    for depth in range(1, len(layers) + 1):
        below = -_backward(layers[:depth], known, lower, upper, -1)
        above = _backward(layers[:depth], known, lower, upper, 1)
        ends = (lower, upper) if depth == 1 else tuple(end.clamp(min=0) for end in known[-1])
        W, b = layers[depth - 1]
        low = W.clamp(min=0) @ ends[0] + W.clamp(max=0) @ ends[1] + b
        high = W.clamp(min=0) @ ends[1] + W.clamp(max=0) @ ends[0] + b
        open_ = ((low < 0) & (high > 0)) | torch.tensor(depth == len(layers))
        known.append((torch.where(open_, low.maximum(below), low), torch.where(open_, high.minimum(above), high)))
    return known


def _backward(
    layers: list, known: list, lower: Tensor, upper: Tensor, sign: int, alphas: list[Tensor] | None = None
) -> Tensor:
    W, b = layers[-1]
    coefficients, constant = sign * W, sign * b
    for depth in reversed(range(len(layers) - 1)):
        (W, b), (low, high) = layers[depth], known[depth]
        active, dead = low >= 0, high <= 0
        above = torch.where(active, 1.0, torch.where(dead, 0.0, high / (high - low)))
        free = (high > -low).to(low) if alphas is None else alphas[depth].clamp(0, 1)
        below = torch.where(active, 1.0, torch.where(dead, 0.0, free))
        intercept = torch.where(active | dead, 0.0, -low * high / (high - low))
        constant = constant + coefficients.clamp(min=0) @ intercept
        slopes = torch.where(coefficients > 0, above, below) * coefficients
        coefficients, constant = slopes @ W, constant + slopes @ b
    return coefficients.clamp(min=0) @ upper + coefficients.clamp(max=0) @ lower + constant


def alpha_crown_reference(layers: list, lower: Tensor, upper: Tensor, steps: int = 150) -> tuple[Tensor, Tensor]:
    """CROWN with the lower slope of every unstable unit optimised by Adam for every bound of every output.

    Intermediate bounds are those of CROWN. The best value of all steps is kept, bound by bound.
    """
    known = crown_reference(layers, lower, upper)
    ends = []
    for sign in (-1, 1):
        start = [(high > -low).to(low).expand(len(layers[-1][0]), -1) for low, high in known[:-1]]
        alphas = [part.clone().requires_grad_() for part in start]
        optimiser = torch.optim.Adam(alphas, 0.1)
        best = torch.full_like(known[-1][0], torch.inf)
        for step in range(steps):
            value = _backward(layers, known, lower, upper, sign, alphas)
            best = torch.minimum(best, value.detach())
            optimiser.zero_grad()
            value.sum().backward()
            optimiser.step()
            optimiser.param_groups[0]["lr"] = 0.1 * 0.98**step
            with torch.no_grad():
                for part in alphas:
                    part.clamp_(0, 1)
        ends.append(sign * best)
    return ends[0], ends[1]
