"""A small regression problem and models for it, shared by the tests of training."""

import torch

from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel

QUIET = {"progress": False}


def implicit():
    return ImplicitModel(4, 1, 6, kappa=0.8)


def problem(samples=53, seed=0, dtype=torch.float64):
    u = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return u, u.sum(1, keepdim=True).relu()


def seeded(factory, seed):
    return Ensemble.of(factory, [seed]).member(0).double()
