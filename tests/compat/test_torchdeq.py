"""What torchdeq 0.1.0 computes is computed here, by its calls; compared with torchdeq where that is installed."""

import argparse

import pytest
import torch

from wellposed.compat.torchdeq import (
    VariationalDropout1d,
    VariationalDropout2d,
    VariationalDropout3d,
    VariationalDropToken1d,
    VariationalDropToken2d,
    VariationalDropToken3d,
    apply_norm,
    fp_correction,
    get_deq,
    get_solver,
    jac_reg,
    mem_gc,
    mixed_init,
    power_method,
    register_deq,
    register_norm,
    register_norm_module,
    register_solver,
    register_weight_func,
    remove_norm,
    reset_deq,
    reset_norm,
    solver_stat_from_final_step,
)
from wellposed.compat.torchdeq.grad import backward_factory
from wellposed.compat.torchdeq.utils.config import DEQConfig
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
    z = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    _, found = power_method(z @ matrix, z)
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
    assert get_deq({"grad": 3}).options.grad_steps == (3,)
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
        (lambda: get_deq(n_states=3, grad=[1, 2]), InputError, "2 numbers for 3 states"),
        (lambda: get_deq(grad=0), InputError, "at least 1"),
        (lambda: get_deq(sup_gap=2), InputError, "sup_gap"),
        (lambda: get_deq(sup_loc=[2]), InputError, "sup_loc"),
        (lambda: get_deq(grad=[1, 2]), InputError, "grad"),
        (lambda: get_deq("anderson"), InputError, "dict or an argparse"),
        (lambda: _call(m=3), TypeError, "unknown option 'm'"),
        (lambda: _call(solver="simple_fixed_point_iter", return_final=True), TypeError, "return_final"),
        (lambda: _call(solver="broyden", ls=True), InputError, "line search"),
        (lambda: _call(max_iter=3), TypeError, "did you mean 'f_max_iter'"),
        (lambda: apply_norm(torch.nn.Linear(2, 2), "layer_norm"), UnknownNameError, "weight_norm"),
        (lambda: apply_norm(torch.nn.Linear(2, 2), norm_clips=True), TypeError, "did you mean 'norm_clip'"),
        (lambda: get_solver("newton"), UnknownNameError, "broyden"),
        (lambda: register_solver("newton", 3), InputError, "function"),
        (lambda: register_deq("mine", 3), InputError, "class"),
        (lambda: register_norm("mine", torch.nn.Linear), InputError, "apply"),
        (lambda: register_norm_module(torch.nn.Linear, "mine"), UnknownNameError, "weight_norm"),
        (lambda: register_weight_func("mine", 3), InputError, "function"),
        (lambda: fp_correction(torch.dist, (1, 2), "expo"), UnknownNameError, "exp"),
        (lambda: jac_reg(torch.ones(1), torch.ones(1), vecs=0), InputError, "vecs"),
        (lambda: VariationalDropout2d(0.5)(torch.ones(2, 3)), InputError, "4 dimensions"),
        (lambda: backward_factory("ift"), InputError, "b_solver"),
        (lambda: backward_factory(0), InputError, "at least 1"),
    ],
)
def test_what_is_not_understood_is_refused(call, kind, complaint):
    with pytest.raises(kind, match=complaint):
        call()


def _call(solver="fixed_point_iter", **options):
    return get_deq(f_solver=solver)(torch.cos, torch.zeros(1, 1), solver_kwargs=options)


def test_the_backward_solve_is_known(problem):
    deq = get_deq(ift=True, f_tol=1e-8, f_max_iter=100, b_max_iter=100)
    z_out, info = deq(problem.f, problem.z0)
    assert deq.solution.converged.all() and deq.solution.adjoint is None
    z_out[-1].sum().backward()
    assert deq.solution.adjoint.converged.all() and info["solution"] is deq.solution


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
    assert torch.linalg.matrix_norm(model["cell"].weight, 2) <= 0.7 + 1e-6
    assert not torch.nn.utils.parametrize.is_parametrized(model["embedding"])
    remove_norm(model)
    assert sorted(model.state_dict()) == ["cell.bias", "cell.weight", "embedding.bias", "embedding.weight"]
    apply_norm(model, prefix_filter_out=["cell"])
    assert torch.nn.utils.parametrize.is_parametrized(model["embedding"])
    apply_norm(model, "none")


STATES = [
    {"n_states": 3},
    {"n_states": 4, "grad": [1, 2, 3, 1], "tau": 0.5},
    {"indexing": [2, 5]},
    {"indexing": [3], "ift": True, "b_tol": 1e-12, "b_max_iter": 200},
    {"grad": 6, "sup_gap": 2},
    {"grad": 4, "sup_loc": [1, 3]},
    {"n_states": 2, "grad": 2, "sup_loc": [1]},
]


@pytest.mark.parametrize("core", ["sliced", "indexing"])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_states_on_the_way_are_those_of_torchdeq(problem, core, options):
    theirs = pytest.importorskip("torchdeq", reason="torchdeq is not installed here")
    settings = {"core": core, "f_tol": 1e-15, "f_max_iter": 10, **options}
    found = []
    for library, quiet in ((theirs.get_deq, {}), (get_deq, {"on_failure": "ignore"})):
        problem.u.grad = None
        if "indexing" in options and library is not get_deq:  # it reads them from a config only
            deq = library(argparse.Namespace(**settings))
        else:
            deq = library(**settings, **quiet)
        z_out, _ = deq(problem.f, problem.z0)
        sum((k + 1) * z.square().sum() for k, z in enumerate(z_out)).backward()
        found.append((torch.stack(z_out).detach(), problem.u.grad))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-8, rtol=0)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-4 if "ift" in options else 1e-8, rtol=0)


@pytest.mark.parametrize("core", ["sliced", "indexing"])
def test_there_are_as_many_states_as_asked_for(problem, core):
    for options, count in (
        ({"n_states": 3}, 3),
        ({"indexing": [2, 30]}, 3),
        ({"n_states": 3, "f_max_iter": 0}, 3),
    ):
        z_out, _ = get_deq(core=core, f_tol=0.5, on_failure="ignore", **options)(problem.f, problem.z0)
        assert len(z_out) == count and all(z.requires_grad for z in z_out)
    z_out, _ = get_deq(core=core, n_states=3, f_max_iter=300, f_tol=1e-10).eval()(problem.f, problem.z0)
    assert len(z_out) == 1


def test_no_steps_and_a_fraction_of_steps(problem):
    z_out, info = get_deq(f_max_iter=0)(problem.f, problem.z0)
    torch.testing.assert_close(z_out[-1], problem.f(problem.z0))
    assert (info["nstep"] == 0).all() and info["nstep"].is_floating_point()
    z_out, info = get_deq(f_solver="simple_fixed_point_iter")(problem.f, problem.z0, {"f_max_iter": 3.0})
    assert (info["nstep"] == 3).all()


def test_solvers_as_functions():
    for name in SOLVERS:
        z, states, info = get_solver(name)(torch.cos, torch.tensor(0.3, dtype=torch.float64), indexing=[2])
        assert z.shape == () and len(states) == 1 and abs(float(z) - 0.7390851) < 2e-3 and len(info["nstep"]) == 1
    z, _, _ = get_solver("anderson")(torch.cos, torch.zeros(3), tol=1e-6, lam=1e-4, tau=0.9, m=3)
    torch.testing.assert_close(z, torch.full((3,), 0.7390851), atol=1e-5, rtol=0)
    _, _, info = get_solver("fixed_point_iter")(torch.cos, torch.zeros(3), max_iter=9, tol=1.0, return_final=True)
    assert (info["nstep"] == 9).all()


def test_registered_solvers_solve_forward_and_backward(problem):
    calls = []

    def plain(func, x0, max_iter=50, tol=1e-3, stop_mode="abs", indexing=None, **options):
        calls.append(options)
        for _ in range(max_iter):
            x0 = func(x0)
        return x0, [], {"steps": max_iter}

    register_solver("plain", plain)
    deq = get_deq(f_solver="plain", b_solver="plain", f_max_iter=200, b_max_iter=200, ift=True)
    z_out, info = deq(problem.f, problem.z0, solver_kwargs={"colour": "red"})
    torch.testing.assert_close(z_out[-1], problem.solution(), atol=1e-9, rtol=0)
    z_out[-1].sum().backward()
    torch.testing.assert_close(problem.u.grad, problem.gradient(), atol=1e-8, rtol=0)
    assert info["steps"] == 200 and calls == [{"colour": "red"}, {}]


def test_registered_cores_norms_and_weights():
    class Mine(torch.nn.Module):
        def __init__(self, args):
            super().__init__()
            self.colour = args.get("colour", "blue")

    class Half:
        _target_modules = {torch.nn.Linear: ("weight", 0)}  # noqa: RUF012

        @classmethod
        def apply(cls, module, deq_args=None, by=2.0):
            module.weight.data /= by
            return cls()

        def __call__(self, module):
            module.resets = getattr(module, "resets", 0) + 1

        def remove(self, module):
            module.weight.data.zero_()

    register_deq("mine", Mine)
    assert get_deq(core="mine", colour="red").colour == "red"
    register_norm("half", Half)
    layer = torch.nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    apply_norm(layer, "half", by=4.0)
    reset_norm(layer)
    assert torch.equal(layer.weight, before / 4) and layer.resets == 1
    remove_norm(layer)
    assert not layer.weight.any()
    register_weight_func("last", lambda n, k: float(k == n - 1))
    loss, single = fp_correction(
        lambda z: z.sum(), ([torch.ones(2), torch.ones(3)],), "last", return_loss_values=True
    )
    assert float(loss) == 3 and single == [2.0, 3.0]


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize(
    "options", [{}, {"norm_no_scale": True, "norm_target_norm": 0.4}, {"norm_clip": True, "norm_clip_value": 0.3}]
)
def test_norms_are_those_of_torchdeq(kind, options):
    theirs = pytest.importorskip("torchdeq", reason="torchdeq is not installed here")
    models = []
    for library in (theirs, None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ConvTranspose2d(4, 2, 2), torch.nn.Flatten(), torch.nn.Linear(72, 5)
        )
        (library.apply_norm if library else apply_norm)(model, kind, args=dict(options))
        for _ in range(1000 if library and kind == "spectral_norm" else 1):  # of the power iteration
            (library.reset_norm if library else reset_norm)(model)
        models.append(model)
    for first, second in zip(*models, strict=True):
        if hasattr(first, "weight"):
            torch.testing.assert_close(second.weight, first.weight, atol=1e-5, rtol=1e-5)
    u = torch.randn(2, 3, 7, 7)
    torch.testing.assert_close(models[1](u), models[0](u), atol=1e-5, rtol=1e-4)
    state = {name: value + 0.01 for name, value in models[0].state_dict().items() if not name.endswith("_u")}
    missing, unexpected = models[1].load_state_dict(state, strict=False)
    assert not missing and not unexpected


def test_spectral_norms_follow_the_weights():
    layer = torch.nn.Linear(6, 4).double()
    apply_norm(layer, "spectral_norm", norm_target_norm=0.8)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(2):
        layer(torch.ones(3, 6).double()).square().sum().backward()
        optimiser.step()
    scale, weight = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    torch.testing.assert_close(layer.weight, scale * weight / torch.linalg.matrix_norm(weight, 2))
    exact = torch.autograd.grad((scale * weight / torch.linalg.matrix_norm(weight, 2)).sin().sum(), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(layer.weight.sin().sum(), weight)[0], exact)


def test_dropout_drops_features_or_positions():
    for dims, (feature, token) in enumerate(
        [
            (VariationalDropout1d, VariationalDropToken1d),
            (VariationalDropout2d, VariationalDropToken2d),
            (VariationalDropout3d, VariationalDropToken3d),
        ],
        start=1,
    ):
        for first in (True, False):
            u = torch.ones(2, *[5] * dims, 7) if first else torch.ones(2, 7, *[5] * dims)
            axis = -1 if first else 1
            assert (feature(0.5, token_first=first)(u).movedim(axis, 1).flatten(2).std(-1) == 0).all()
            assert (token(0.5, token_first=first)(u).movedim(axis, -1).std(-1) == 0).all()
    layer = VariationalDropout1d(0.5)
    first = layer(torch.ones(4, 5, 40))
    assert torch.equal(layer(torch.ones(4, 5, 40)), first) and set(first.unique().tolist()) == {0.0, 2.0}
    with pytest.raises(InputError, match="reset_deq"):
        layer(torch.ones(3, 5, 40))
    reset_deq(layer)
    assert layer(torch.ones(3, 5, 40)).shape == (3, 5, 40) and layer.eval()(first) is first


def test_small_functions():
    torch.manual_seed(0)
    start = mixed_init((50, 50))
    assert 0.4 < float((start == 0).float().mean()) < 0.6 and start.std() > 0.5
    z = torch.randn(3, 4, requires_grad=True)
    matrix = torch.randn(4, 4)
    estimate = jac_reg(z @ matrix, z, vecs=4000)
    torch.testing.assert_close(estimate, matrix.square().sum() / 4, rtol=0.1, atol=0)
    layer = torch.nn.Linear(4, 4)
    plain = torch.autograd.grad(layer(z).square().sum(), [z, *layer.parameters()])
    again = torch.autograd.grad(mem_gc(layer, (z,)).square().sum(), [z, *layer.parameters()])
    torch.testing.assert_close(again, plain)
    info = solver_stat_from_final_step([torch.zeros(2, 3), torch.zeros(2)], [torch.ones(2, 3), torch.ones(2)], 5)
    assert info["abs_lowest"].tolist() == [2.0, 2.0] and info["nstep"].tolist() == [5.0, 5.0]


def test_any_object_with_attributes_is_a_config(problem):
    class Settings:
        def __init__(self):
            self.f_solver, self.learning_rate = "anderson", 0.1

    assert get_deq(Settings()).options.f_solver == get_deq(DEQConfig(Settings())).options.f_solver == "anderson"
