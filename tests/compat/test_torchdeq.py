"""What torchdeq 0.1.0 computes is computed here, by its calls; compared with torchdeq where that is installed."""

import argparse

import pytest
import torch

from wellposed.compat.torchdeq import apply_norm, get_deq, remove_norm, reset_deq, reset_norm, spectral_radius
from wellposed.errors import ConvergenceWarning, InputError, UnknownNameError
from wellposed.models import VariationalDropout

SOLVERS = ("fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden")


class Problem:
    """``z = tanh(A z + u)`` with a solution by Newton's method and its derivative by a dense solve."""

    def __init__(self, size=6, batch=5):
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.A = (0.8 * A / A.abs().sum(1, keepdim=True)).requires_grad_()
        self.u = torch.randn(batch, size, generator=generator, dtype=torch.float64).requires_grad_()
        self.z0 = torch.zeros(batch, size, dtype=torch.float64)

    def f(self, z):
        return torch.tanh(z @ self.A.mT + self.u)

    def solution(self):
        z = self.z0
        with torch.no_grad():
            for _ in range(50):
                image = self.f(z)
                jacobian = (1 - image**2)[:, :, None] * self.A
                z = z - torch.linalg.solve(torch.eye(len(self.A)) - jacobian, (z - image)[..., None])[..., 0]
        return z

    def gradient(self):
        """Of ``z.sum()`` with respect to u."""
        z = self.solution()
        slope = 1 - self.f(z) ** 2
        system = torch.eye(len(self.A)) - slope[:, :, None] * self.A
        ones = torch.ones(*z.shape, 1, dtype=z.dtype)
        return slope * torch.linalg.solve(system.mT, ones)[..., 0]


@pytest.fixture
def problem():
    return Problem()


@pytest.mark.parametrize("solver", SOLVERS)
def test_solution(problem, solver):
    deq = get_deq(f_solver=solver, f_tol=1e-9, f_max_iter=200)
    z_out, info = deq(problem.f, problem.z0)
    assert isinstance(z_out, list) and len(z_out) == 1
    torch.testing.assert_close(z_out[-1], problem.solution(), atol=1e-7, rtol=0)
    assert info["abs_lowest"].shape == (5,) and info["abs_lowest"].max() < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("option", ["ift", "hook_ift"])
def test_implicit_gradient(problem, solver, option):
    options = {option: True, "b_solver": solver, "b_tol": 1e-10, "b_max_iter": 200}
    z_out, _ = get_deq(f_tol=1e-11, f_max_iter=300, **options)(problem.f, problem.z0)
    z_out[-1].sum().backward()
    torch.testing.assert_close(problem.u.grad, problem.gradient(), atol=1e-8, rtol=0)


@pytest.mark.parametrize(("grad", "tau"), [(1, 1.0), (3, 1.0), ([2], 0.5)])
def test_phantom_gradient(problem, grad, tau):
    z_out, _ = get_deq(f_tol=1e-12, f_max_iter=300, grad=grad, tau=tau)(problem.f, problem.z0)
    z_out[-1].sum().backward()
    found, problem.u.grad = problem.u.grad, None
    z = problem.solution()
    for _ in range(grad if isinstance(grad, int) else grad[0]):
        z = tau * problem.f(z) + (1 - tau) * z
    z.sum().backward()
    torch.testing.assert_close(found, problem.u.grad, atol=1e-9, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("options", [{}, {"ift": True}, {"grad": 4, "tau": 0.7}, {"core": "indexing"}])
def test_agrees_with_torchdeq(problem, solver, options):
    theirs = pytest.importorskip("torchdeq", reason="torchdeq is not installed here")
    settings = {"f_solver": solver, "f_tol": 1e-8, "f_max_iter": 60, "b_tol": 1e-10, "b_max_iter": 100, **options}
    found = []
    for library in (theirs.get_deq, get_deq):
        problem.u.grad = None
        z_out, info = library(**settings)(problem.f, problem.z0)
        z_out[-1].square().sum().backward()
        found.append((z_out[-1].detach(), problem.u.grad, info))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=0)
    assert set(found[0][2]) <= set(found[1][2]), "every entry of theirs is there"


def test_statistics(problem):
    _, info = get_deq(f_tol=1e-6)(problem.f, problem.z0)
    steps = info["nstep"]
    assert info["abs_trace"].shape == info["rel_trace"].shape == (5, int(steps.max()))
    z, first = problem.z0, []
    for _ in range(int(steps[0])):
        image = problem.f(z).detach()
        first.append((image - z).norm(dim=1)[0])
        z = image
    torch.testing.assert_close(info["abs_trace"][0, : int(steps[0])], torch.stack(first))
    assert (info["abs_trace"].amin(1) == info["abs_lowest"]).all() and (info["abs_lowest"] < 1e-6).all()
    assert info["solution"].converged.all()


def test_relative_mode_divides_by_the_size(problem):
    _, absolute = get_deq(f_tol=1e-3)(lambda z: 100 * problem.f(z / 100), problem.z0)
    _, relative = get_deq(f_tol=1e-3, f_stop_mode="rel")(lambda z: 100 * problem.f(z / 100), problem.z0)
    assert (relative["nstep"] < absolute["nstep"]).all()
    assert relative["rel_lowest"].max() < 1e-3 < relative["abs_lowest"].min()


def test_lists_of_tensors():
    deq = get_deq(f_tol=1e-10, f_max_iter=100)
    start = [torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)]
    z_out, _ = deq(lambda a, b: [0.5 * torch.cos(b[:, :2]), 0.5 * a.repeat(1, 2) + 1], start)
    a, b = z_out[-1]
    torch.testing.assert_close(a, 0.5 * torch.cos(b[:, :2]), atol=1e-9, rtol=0)
    torch.testing.assert_close(b, 0.5 * a.repeat(1, 2) + 1, atol=1e-9, rtol=0)


def test_eval_mode(problem):
    deq = get_deq(f_tol=1e-14, f_max_iter=3, eval_factor=2.0, f_solver="simple_fixed_point_iter").eval()
    z_out, _ = deq(problem.f, problem.z0)
    assert not z_out[-1].requires_grad
    z = problem.z0
    for _ in range(6):
        z = problem.f(z)
    torch.testing.assert_close(z_out[-1], z.detach())
    exact = get_deq(f_tol=1e-12, f_max_iter=300).eval()
    z_out, info = exact(problem.f, problem.z0, sradius_mode=True)
    slope = 1 - problem.f(z_out[-1]).detach() ** 2
    eigenvalues = torch.linalg.eigvals(slope[:, :, None] * problem.A.detach()).abs().amax(1)
    torch.testing.assert_close(info["sradius"], eigenvalues, rtol=0.05, atol=0)


def test_spectral_radius_of_a_symmetric_map():
    matrix = torch.diag(torch.tensor([0.9, -0.2, 0.1], dtype=torch.float64))
    found = spectral_radius(lambda z: z @ matrix, torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(found, torch.full((2,), 0.9, dtype=torch.float64))


def test_options_of_one_call(problem):
    deq = get_deq(f_solver="anderson", f_tol=1e-9)
    z_out, _ = deq(problem.f, problem.z0, solver_kwargs={"f_max_iter": 100, "m": 3, "tau": 0.9})
    torch.testing.assert_close(z_out[-1], problem.solution(), atol=1e-7, rtol=0)
    with pytest.warns(ConvergenceWarning):
        deq(problem.f, problem.z0, solver_kwargs={"f_max_iter": 2})


def test_a_command_line_may_hold_other_options(problem):
    args = argparse.Namespace(f_solver="broyden", f_tol=1e-9, learning_rate=0.1, jac_loss_weight=0.0)
    deq = get_deq(args, f_tol=1e-4)
    assert deq.options.f_solver == "broyden" and deq.options.f_tol == 1e-4
    assert get_deq({"grad": 3}).options.phantom_steps == 3
    with pytest.raises(TypeError, match="did you mean 'f_max_iter'"):
        get_deq(argparse.Namespace(f_maxiter=3))


@pytest.mark.parametrize(
    ("call", "kind", "complaint"),
    [
        (lambda: get_deq(f_max_iters=3), TypeError, "did you mean 'f_max_iter'"),
        (lambda: get_deq({"solver": "anderson"}), TypeError, "valid: .*f_solver"),
        (lambda: get_deq(f_solver="andersen"), UnknownNameError, "did you mean 'anderson'"),
        (lambda: get_deq(f_stop_mode="absolute"), UnknownNameError, "abs, rel"),
        (lambda: get_deq(core="slice"), UnknownNameError, "sliced"),
        (lambda: get_deq(n_states=3), InputError, "n_states=3 is not supported"),
        (lambda: get_deq(core="indexing", indexing=[3, 6]), InputError, "only the equilibrium"),
        (lambda: get_deq(sup_gap=2), InputError, "sup_gap"),
        (lambda: get_deq(sup_loc=[2]), InputError, "sup_loc"),
        (lambda: get_deq(grad=[1, 2]), InputError, "grad"),
        (lambda: get_deq("anderson"), InputError, "dict or an argparse"),
        (lambda: _call(m=3), TypeError, "unknown option 'm'"),
        (lambda: _call(solver="anderson", lam=1e-3), InputError, "ridge"),
        (lambda: _call(solver="broyden", ls=True), InputError, "line search"),
        (lambda: _call(return_final=True), InputError, "simple_fixed_point_iter"),
        (lambda: _call(max_iter=3), TypeError, "did you mean 'f_max_iter'"),
        (lambda: apply_norm(torch.nn.Linear(2, 2), "layer_norm"), UnknownNameError, "weight_norm"),
        (lambda: apply_norm(torch.nn.Linear(2, 2), norm_clip=True), TypeError, "norm_clip"),
    ],
)
def test_what_is_not_understood_is_refused(call, kind, complaint):
    with pytest.raises(kind, match=complaint):
        call()


def _call(solver="fixed_point_iter", **options):
    return get_deq(f_solver=solver)(torch.cos, torch.zeros(1, 1), solver_kwargs=options)


def test_backward_writer_is_refused_and_the_adjoint_known(problem):
    deq = get_deq(ift=True, f_tol=1e-8, f_max_iter=100, b_max_iter=100)
    with pytest.raises(InputError, match="adjoint"):
        deq(problem.f, problem.z0, backward_writer=print)
    z_out, _ = deq(problem.f, problem.z0)
    z_out[-1].sum().backward()
    assert deq.solution.adjoint.converged.all()


def test_samples_end_by_themselves(problem):
    together = get_deq(f_tol=1e-6)(problem.f, problem.z0)[1]["nstep"]
    deq, alone = get_deq(f_tol=1e-6), []
    for u in problem.u:
        alone.append(deq(lambda z, u=u: torch.tanh(z @ problem.A.mT + u), problem.z0[:1]))
    assert together.tolist() == [int(info["nstep"]) for _, info in alone]
    assert len(set(together.tolist())) > 1


def test_a_failure_is_reported():
    with pytest.warns(ConvergenceWarning):
        get_deq()(lambda z: 2 * z + 1, torch.zeros(2, 1))
    _, info = get_deq(on_failure="ignore")(lambda z: 2 * z + 1, torch.zeros(2, 1))
    assert not info["solution"].converged.any()


def test_masks_are_kept_until_the_next_reset():
    layer = VariationalDropout(0.5)
    model, u = torch.nn.Sequential(layer), torch.ones(3, 50)
    reset_deq(model)
    first = model(u)
    assert torch.equal(model(u), first)
    reset_deq(model)
    assert not torch.equal(model(u), first)


def test_norms():
    model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(4, 4), "cell": torch.nn.Linear(4, 4)})
    with torch.no_grad():
        model["cell"].weight.mul_(10)
    apply_norm(model, "spectral_norm", filter_out="embed", norm_target_norm=0.7)
    reset_norm(model)
    assert torch.linalg.matrix_norm(model["cell"].weight, 2) <= 0.7
    assert not torch.nn.utils.parametrize.is_parametrized(model["embedding"])
    remove_norm(model)
    assert sorted(model.state_dict()) == ["cell.bias", "cell.weight", "embedding.bias", "embedding.weight"]
    apply_norm(model, prefix_filter_out=["cell"])
    assert torch.nn.utils.parametrize.is_parametrized(model["embedding"])
    apply_norm(model, "none")
