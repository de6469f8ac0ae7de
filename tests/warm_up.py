"""Small work for which every family of compiled kernels is compiled, or read from the cache on the disk."""

import torch

from wellposed import ImplicitModel, ImplicitRNN


def train_model(dtype: torch.dtype) -> None:
    model = ImplicitModel(4, 2, 8).to(dtype)
    model(torch.randn(3, 4, dtype=dtype)).sum().backward()


def train_recurrent(dtype: torch.dtype) -> None:
    rnn = ImplicitRNN(4, 2, 6, batch_first=True).to(dtype)
    rnn(torch.randn(3, 5, 4, dtype=dtype))[0].sum().backward()


def run_sparse_model(dtype: torch.dtype) -> None:
    A = 0.01 * (torch.rand(80, 80) < 0.05).to(dtype)
    model = ImplicitModel.from_matrices(A, torch.ones(80, 3, dtype=dtype), torch.ones(1, 80, dtype=dtype))
    with torch.no_grad():
        model(torch.randn(40, 3, dtype=dtype))


WORK = [
    (work, dtype)
    for work in (train_recurrent, train_model, run_sparse_model)
    for dtype in (torch.float32, torch.float64)
]


def compile_share(number: int, count: int) -> None:
    """Does the share of one of `count` processes; what the others have compiled is read from the disk later."""
    for work, dtype in WORK[number::count]:
        work(dtype)
