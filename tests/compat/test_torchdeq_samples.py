"""Programs as a user of torchdeq writes them, run by our calls, and by torchdeq's where it is installed.

After the quick start and the sample of torchdeq's own pages, and the way its zoo of models calls it: sequences
with dropout and corrections, implicit representations, graphs, several scales, flow. Every program is a function
of the library; what it returns is the same under both.
"""

import argparse
import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellposed.compat.torchdeq as ours

NAMES = [
    "VariationalDropToken1d",
    "VariationalDropToken2d",
    "VariationalDropToken3d",
    "VariationalDropout",
    "VariationalDropout1d",
    "VariationalDropout2d",
    "VariationalDropout3d",
    "add_deq_args",
    "apply_norm",
    "fp_correction",
    "get_deq",
    "get_solver",
    "jac_reg",
    "mem_gc",
    "mixed_init",
    "power_method",
    "register_deq",
    "register_norm",
    "register_norm_module",
    "register_solver",
    "register_weight_func",
    "remove_norm",
    "reset_deq",
    "reset_dropout",
    "reset_norm",
    "solver_stat_from_final_step",
]
IN_MODULES = {
    "core": ("DEQBase", "DEQIndexing", "DEQSliced", "get_deq", "register_deq", "reset_deq"),
    "dropout": ("VariationalDropout", "VariationalDropToken3d", "reset_dropout"),
    "grad": ("backward_factory",),
    "loss": ("fp_correction", "jac_reg", "power_method", "register_weight_func"),
    "norm": ("apply_norm", "register_norm", "register_norm_module", "remove_norm", "reset_norm"),
    "solver": ("anderson_solver", "broyden_solver", "fixed_point_iter", "get_solver", "simple_fixed_point_iter"),
    "utils": ("add_deq_args", "mem_gc", "mixed_init"),
    "utils.arg_utils": ("add_deq_args",),
    "utils.config": ("DEQConfig",),
    "utils.mem": ("mem_gc",),
}


def parsed(library, *words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    library.add_deq_args(parser)
    return parser.parse_args(words)


def effective(model):
    """The weights that layers apply, whatever norm they are under."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)]
    return [layer.weight.detach().clone() for layer in layers]


def quick_start(library):
    """Three tensors, one equilibrium."""
    deq = library.get_deq(parsed(library, "--f_tol", "1e-10", "--f_max_iter", "100", "--ift"))
    weight = torch.tensor(0.4, requires_grad=True)

    def fn(a, b, c):
        return torch.tanh(weight * c.mean(1, keepdim=True) + 1), weight * torch.sin(a), weight * b.repeat(1, 2) - 1

    z_out, info = deq(fn, (torch.zeros(5, 1), torch.zeros(5, 1), torch.zeros(5, 2)))
    a, b, c = z_out[-1]
    (a.sum() + b.sum() + c.sum()).backward()
    return [a.detach(), b.detach(), c.detach(), weight.grad], info


class Func(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z, x):
        return 0.5 * torch.tanh(self.out(torch.relu(self.linear(z))) + x)


class Demo(nn.Module):
    """The sample of the first pages: a norm, its reset, a function that holds the input."""

    def __init__(self, library, args):
        super().__init__()
        self.library, self.deq_func = library, Func()
        library.apply_norm(self.deq_func, args=args)
        self.deq = library.get_deq(args)

    def forward(self, x, z0):
        self.library.reset_norm(self.deq_func)
        return self.deq(lambda z: self.deq_func(z, x), z0)


def get_started(library, *words):
    torch.manual_seed(0)
    args = parsed(library, "--f_tol", "1e-9", "--f_max_iter", "100", "--b_max_iter", "100", *words)
    injection, deq, decoder = nn.Linear(3, 8), Demo(library, args), nn.Linear(8, 1)
    modules = nn.ModuleList([injection, deq, decoder]).double()
    optimiser = torch.optim.SGD(modules.parameters(), lr=args.lr)
    x, y = torch.randn(3, 16, 3).double(), torch.randn(3, 16, 1).double()
    losses, info = [], {}
    for inputs, targets in zip(x, y, strict=True):
        z_out, info = deq(injection(inputs), torch.randn(16, 8).double())
        loss = F.mse_loss(decoder(z_out[-1]), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    library.reset_norm(deq.deq_func)
    return [torch.stack(losses), *effective(deq), *effective(decoder)], info


def sequence(library):
    """A cell with convolutions over time, weight norm, corrections of several states and a Jacobian penalty."""
    torch.manual_seed(0)
    args = parsed(
        library, "--core", "indexing", "--n_states", "3", "--grad", "2", "--tau", "0.8", "--f_max_iter", "12"
    )
    func = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 1))
    drop = library.dropout.VariationalDropout1d(dropout=0.0, token_first=False)
    library.apply_norm(func, args=args)
    deq, u = library.get_deq(args, f_tol=1e-14, **QUIET.get(library, {})), torch.randn(2, 4, 6)
    library.reset_deq(func)

    def deq_func(z):
        return 0.3 * drop(func(z)) + u

    z_out, info = deq(deq_func, torch.zeros(2, 4, 6))
    loss = library.fp_correction(F.l1_loss, (z_out, torch.zeros(2, 4, 6)), gamma=args.gamma)
    torch.manual_seed(1)
    penalty = library.jac_reg(deq_func(z_out[-1]), z_out[-1])
    (loss + args.jac_loss_weight * penalty + 0.1 * penalty).backward()
    gradients = sorted((p.grad.flatten() for p in func.parameters()), key=lambda g: (len(g), float(g.sum())))
    return [torch.stack([z.detach() for z in z_out]), loss.detach(), penalty.detach(), *gradients], info


def representation(library):
    """No solver at all, ``f_max_iter=0``, then few steps; the number of steps is averaged for a log."""
    torch.manual_seed(0)
    func, u = Func().double(), torch.randn(4, 8).double()
    deq = library.get_deq({"norm_type": "none", "grad": 3, "sup_loc": [1, 2], "f_tol": 1e-9, "f_max_iter": 60})
    results = []
    for steps in ({"f_max_iter": 0}, {}):
        z_out, info = deq(lambda z: func(z, u), torch.zeros(4, 8).double(), solver_kwargs=steps)
        results += [torch.stack([z.detach() for z in z_out])]
        assert isinstance(info["nstep"].mean().item(), float)
    return results, info


class Graph(nn.Module):
    def __init__(self, library, args):
        super().__init__()
        self.library = library
        self.W, self.Omega = nn.Parameter(torch.rand(3, 3) - 0.5), nn.Parameter(torch.rand(3, 2) - 0.5)
        library.norm.apply_norm(self, args=args)
        self.deq = library.get_deq(args)

    def forward(self, adjacency, features):
        self.library.norm.reset_norm(self)
        weight, offset = self.W, self.Omega @ features
        z_out, info = self.deq(lambda z: torch.relu(weight @ z @ adjacency + offset), offset)
        return z_out[-1], info


def graph(library):
    """Parameters of a module of one's own under a norm; a state whose rows are features."""
    torch.manual_seed(0)
    for norm in ("weight_norm", "spectral_norm"):
        library.norm.register_norm_module(Graph, norm, names=["W", "Omega"], dims=[0, 0])
    args = parsed(
        library, "--norm_target_norm", "0.5", "--norm_no_scale", "--f_tol", "1e-9", "--f_max_iter", "200"
    )
    model = Graph(library, args).double()
    adjacency = torch.softmax(torch.randn(5, 5), 0).double()
    z, info = model(adjacency, torch.randn(2, 5).double())
    z.sum().backward()
    return [z.detach(), model.W.detach()], info


def scales(library):
    """Two scales of an image, a checkpointed block, Broyden's method backwards and forwards."""
    torch.manual_seed(0)
    fine, coarse = (nn.Conv2d(2, 2, 3, padding=1).double() for _ in range(2))
    library.apply_norm(nn.ModuleList([fine, coarse]), "weight_norm", target_norm=0.5, learn_scale=False)
    options = {"f_max_iter": 80, "b_max_iter": 80, "f_tol": 1e-9, "b_tol": 1e-10, "ift": True}
    deq, u = library.get_deq(f_solver="broyden", b_solver="broyden", **options), torch.randn(2, 2, 4, 4).double()

    def fn(a, b):
        up = F.interpolate(b, scale_factor=2)
        return torch.tanh(library.mem_gc(fine, (0.4 * a + 0.4 * up,)) + u), 0.5 * torch.tanh(
            coarse(b) + F.avg_pool2d(a, 2)
        )

    z_out, info = deq(fn, [torch.zeros(2, 2, 4, 4).double(), torch.zeros(2, 2, 2, 2).double()])
    (z_out[-1][0].square().sum() + z_out[-1][1].sum()).backward()
    return [z_out[-1][0].detach(), z_out[-1][1].detach(), fine.bias.grad, coarse.bias.grad], info


def flow(library):
    """A hidden state and coordinates, several states, a writer for the backward pass, the spectral radius."""
    torch.manual_seed(0)
    cell, written = nn.GRUCell(2, 4).double(), []
    options = {"f_max_iter": 200, "f_tol": 1e-9, "b_tol": 1e-10, "b_max_iter": 60}
    deq = library.get_deq(n_states=2, ift=True, **options, **QUIET.get(library, {}))

    def func(h, c):
        return cell(c, h), 0.5 * c + 0.1 * h[:, :2] + 0.2

    start = (torch.zeros(3, 4).double(), torch.zeros(3, 2).double())
    z_out, _ = deq(func, start, backward_writer=written.append)
    assert len(z_out) == 2
    z_out[-1][1].sum().backward()
    assert len(written) == 1 and float(written[0]["abs_lowest"].max()) < 1e-9
    deq.eval()
    states, info = deq(func, start, sradius_mode=True)
    return [states[-1][0], z_out[-1][1].detach(), cell.weight_hh.grad], info


QUIET = {ours: {"on_failure": "ignore"}}  # states on the way are no failure, and torchdeq never tells of one
SAMPLES = {
    "quick start": quick_start,
    "get started": get_started,
    "get started, implicit": lambda library: get_started(library, "--ift", "--f_solver", "anderson"),
    "get started, no norm": lambda library: get_started(
        library, "--norm_type", "none", "--b_solver", "anderson", "--hook_ift"
    ),
    "get started, clipped": lambda library: get_started(library, "--norm_clip", "--norm_no_scale"),
    "sequence": sequence,
    "representation": representation,
    "graph": graph,
    "scales": scales,
    "flow": flow,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_run(name):
    values, info = SAMPLES[name](ours)
    assert all(value.isfinite().all() for value in values)
    assert set(info) >= {"abs_lowest", "rel_lowest", "abs_trace", "rel_trace", "nstep", "sradius", "solution"}
    assert info["nstep"].is_floating_point()


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_agree_with_torchdeq(name):
    theirs = pytest.importorskip("torchdeq", reason="torchdeq is not installed here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchdeq
        expected, _ = SAMPLES[name](theirs)
    found, _ = SAMPLES[name](ours)
    for ours_value, their_value in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_value, their_value.to(ours_value.dtype), atol=2e-6, rtol=1e-5)


def test_every_call_is_there():
    assert [name for name in NAMES if not callable(getattr(ours, name, None))] == []
    for module, names in IN_MODULES.items():
        part = importlib.import_module(f"wellposed.compat.torchdeq.{module}")
        assert [name for name in names if not callable(getattr(part, name, None))] == []
    theirs = pytest.importorskip("torchdeq", reason="torchdeq is not installed here")
    public = [name for name in dir(theirs) if callable(getattr(theirs, name)) and not name.startswith("_")]
    assert sorted(public) == sorted(NAMES)
