"""The models on a CUDA device; run with -m gpu."""

import copy

import pytest
import torch
from deq_cells import Cell
from torch import nn

from wellposed import DEQ, ImplicitModel, ImplicitRNN, MultiscaleDEQ, fit
from wellposed.equilibrium import SOLVERS
from wellposed.errors import ConvergenceWarning
from wellposed.models import VariationalDropout, fixed_steps, spectral_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def close(there, here, tolerance=1e-3):
    torch.testing.assert_close(there.cpu(), here, rtol=tolerance, atol=tolerance)


def test_sequences_agree_with_the_cpu():
    rnn = ImplicitRNN(3, 8, 16, num_layers=2, bidirectional=True, out_features=2, batch_first=True)
    s, lengths = torch.randn(32, 12, 3), torch.randint(1, 13, (32,))
    twin = copy.deepcopy(rnn).cuda()
    here, there = rnn(s, lengths=lengths), twin(s.cuda(), lengths=lengths)
    for a, b in zip(there, here, strict=True):
        close(a, b)
    here[0].sum().backward()
    there[0].sum().backward()
    for a, b in zip(twin.parameters(), rnn.parameters(), strict=True):
        if b.grad is not None:
            close(a.grad, b.grad)
    assert not twin.equilibria(s.cuda(), lengths=lengths).failed.any()


@pytest.mark.parametrize("solver", SOLVERS.factories)
@pytest.mark.parametrize("precision", [None, torch.float16, torch.bfloat16])
def test_cells_with_every_solver_and_precision(solver, precision):
    cell = spectral_norm(Cell(VariationalDropout(0.1), width=64, inputs=16), 0.9)
    deq, u = DEQ(cell, state_shape=64, solver=solver).cuda(), torch.randn(100, 16, device="cuda")
    with torch.autocast("cuda", precision, enabled=precision is not None):
        found = deq.equilibrium(u)
    found.value.sum().backward()
    assert found.converged.all() and found.adjoint.converged.all()
    assert all(p.grad.isfinite().all() for p in deq.parameters())


def test_compiled_and_fixed_step_forms():
    deq, u = DEQ(Cell(), state_shape=4).cuda().eval(), torch.randn(20, 3, device="cuda")
    close(torch.compile(deq)(u), deq(u).cpu())
    close(fixed_steps(deq, 40)(u), deq(u).cpu())


def test_multiscale_at_published_size_trains_a_step():
    model = MultiscaleDEQ(3, 10, on_failure="ignore").cuda()
    images, labels = torch.randn(24, 3, 32, 32, device="cuda"), torch.randint(0, 10, (24,), device="cuda")
    nn.functional.cross_entropy(model(images), labels).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_training_resumes_on_the_device(tmp_path):
    u = torch.randn(64, 4)
    data = (u, u.sum(1, keepdim=True).relu())

    def train(epochs, **options):
        torch.manual_seed(0)
        model = ImplicitModel(4, 1, 8)
        history = fit(
            model,
            data,
            nn.functional.mse_loss,
            epochs=epochs,
            device="cuda",
            batch_size=16,
            progress=False,
            **options,
        )
        return model, history

    whole, expected = train(4)
    train(2, checkpoint=tmp_path / "run.ckpt")
    again, history = train(4, checkpoint=tmp_path / "run.ckpt")
    close(history.train_loss, expected.train_loss, 1e-6)
    close(again.B.detach(), whole.B.detach().cpu(), 1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["C", "D", "last hidden state"])
def test_outputs_that_are_not_finite_are_reported(where, grad):
    sequence = where == "last hidden state"
    model = (ImplicitRNN(3, 4, 8) if sequence else ImplicitModel(3, 2, 8)).cuda()
    cell = model.cell(0) if sequence else model
    u = torch.ones(1, 5, 3).cuda() if sequence else torch.ones(5, 3).cuda()
    with torch.set_grad_enabled(grad):
        model(u)
        with torch.no_grad():
            (cell.D if where == "D" else cell.C)[0, 0] = torch.nan
        with pytest.warns(ConvergenceWarning, match="5 of 5 samples have NaN or infinite outputs"):
            model(u)
