"""What every model does with numbers that are not finite, huge or tiny, and with other types, shapes and views."""

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wellposed import DEQ, ImplicitModel, ImplicitRNN, MultiscaleDEQ, Relative
from wellposed.convert import to_implicit
from wellposed.convex import RowFit, fit_states, record_states
from wellposed.equilibrium import Status
from wellposed.errors import ConvergenceWarning, IllPosedError, InputError, MapError
from wellposed.estimators import ImplicitClassifier, ImplicitRegressor
from wellposed.forms import ImplicitForm
from wellposed.robust import METHODS, Box, MethodError, certified, certified_accuracy, output_bounds, sensitivity

BAD = (math.nan, math.inf, -math.inf)
HALF = (torch.float16, torch.bfloat16)
REAL = (*HALF, torch.float32, torch.float64)
THREADS = 4


class Cell(nn.Module):
    """A contraction."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        nn.init.normal_(self.inner.weight, 0.0, 0.1)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + u)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))


def pyramid() -> MultiscaleDEQ:
    return MultiscaleDEQ(3, 5, channels=(4, 6), head_channels=(4, 6), groups=2, final_channels=8, max_steps=60)


def implicit(condition: str) -> Callable[[], ImplicitModel]:
    return lambda: ImplicitModel(3, 2, 6, condition=condition, bias=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"implicit, {name}": (implicit(name), (3,)) for name in ("inf", "weighted", "spectral", "mu", "monotone")},
    "implicit, triangular": (lambda: ImplicitModel(3, 2, 6, triangular=True), (3,)),
    "implicit, low rank": (lambda: ImplicitModel(3, 2, 6, rank=2), (3,)),
    "implicit, plain loop": (lambda: ImplicitModel(3, 2, 6, executor="reference"), (3,)),
    "recurrent": (lambda: ImplicitRNN(3, 5, 6, batch_first=True), (7, 3)),
    "equilibrium of a cell": (lambda: DEQ(Cell(), state_shape=(4,)), (4,)),
    "several scales": (pyramid, (3, 8, 8)),
}
WITH_FORMS = {
    **MODELS,
    "form, layers": (lambda: to_implicit(layers(), (3,)), (3,)),
    "form, loop": (lambda: ImplicitModel(3, 2, 6).form(), (3,)),
    "form, pooling": (
        lambda: to_implicit(
            nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (3, 8, 8)
        ),
        (3, 8, 8),
    ),
}


def made(name: str) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    """A model in evaluation mode, whose first result is its output, and the shape of one input."""
    make, shape = WITH_FORMS[name]
    model = make()
    if isinstance(model, nn.Module):
        model.eval()
    return model, shape


def output(model: Callable[..., Tensor], u: Tensor) -> Tensor:
    found = model(u)
    return found[0] if isinstance(found, tuple) else found


# numbers that are not finite


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", WITH_FORMS)
def test_inputs_that_are_not_finite_are_refused_with_their_place(name, bad):
    model, shape = made(name)
    u = torch.randn(2, *shape)
    u[1].view(-1)[-1] = bad
    with pytest.raises(InputError, match=r"must be finite; received 1 of \d+ .* first at"):
        output(model, u)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_are_no_numbers_are_never_silent(name):
    """Whatever NaN in a parameter does to the solve is said: by an error, a warning, or outputs that are NaN."""
    make, shape = MODELS[name]
    u = torch.randn(2, *shape)
    for place in [place for place, _ in make().named_parameters()]:
        model = make().eval()
        with torch.no_grad():
            parameter = dict(model.named_parameters())[place]
            parameter.view(-1)[parameter.shape[-1] - 1] = math.nan  # on no diagonal, and in no lower triangle
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                y = output(model, u)
            except InputError as refused:
                assert_about_numbers(str(refused))
                continue
        warned = any(issubclass(warning.category, ConvergenceWarning) for warning in said)
        assert warned or not y.isfinite().all(), place


def assert_about_numbers(text: str) -> None:
    assert "NaN" in text or "finite" in text


@pytest.mark.parametrize("condition", ["inf", "weighted", "spectral", "mu", "monotone"])
def test_no_certificate_and_a_status_where_a_matrix_is_not_finite(condition):
    model = implicit(condition)().eval()
    with torch.no_grad():
        model.state.raw[0, 0] = math.nan
    if condition in ("spectral", "monotone"):  # whose parametrisation decomposes the matrix
        with pytest.raises(InputError, match="NaN"):
            model.certificate()
        return
    assert not model.certificate().holds
    with pytest.warns(ConvergenceWarning):
        found = model.equilibrium(torch.randn(3, 3))
    assert found.failed.all() and (found.status == Status.NONFINITE).all()
    assert found.error_bound.isinf().all()


@pytest.mark.parametrize("place", ["A", "B", "C", "D", "bias", "output_bias"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_proven_of_a_form_that_is_not_finite(place, bad):
    parts = {"A": 0.1 * torch.eye(2), "B": torch.eye(2), "C": torch.eye(2), "D": torch.zeros(2, 2)}
    parts |= {"bias": torch.zeros(2), "output_bias": torch.zeros(2)}
    parts[place].view(-1)[-1] = bad
    form, box = ImplicitForm(**parts), Box.around(torch.rand(2, 2), 0.1)
    for method in METHODS:
        with pytest.raises(InputError, match=f"{place} of the form holds NaN or infinite"):
            output_bounds(form, box, method)
    with pytest.raises(InputError, match="nothing can be proven"):
        sensitivity(form)


def test_fits_and_estimators_refuse_what_is_not_finite():
    X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    for bad in BAD:
        spoiled = X.copy()
        spoiled[3, 1] = bad
        with pytest.raises(InputError, match="NaN"):
            RowFit().solve(torch.tensor(spoiled), torch.zeros(20, 1), torch.tensor(y)[:, None])
        with pytest.raises(InputError, match="finite"):
            record_states(layers(), [torch.tensor(spoiled).float()])
        for estimator in (ImplicitRegressor(max_epochs=1), ImplicitClassifier(max_epochs=1)):
            with pytest.raises(ValueError, match=r"NaN|infinity"):
                estimator.fit(spoiled, (y > 9).astype(int))
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            ImplicitRegressor(max_epochs=1).fit(X, spoiled[:, 1])


# near-critical matrices


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9, 1e-12])
def test_the_error_bound_is_true_however_near_a_matrix_is_to_critical(distance):
    entry = (1 - distance) / 4
    A, one = torch.full((4, 4), entry, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    model = ImplicitModel.from_matrices(A, one, one.mT)
    u = torch.tensor([[0.3], [1.0]], dtype=torch.float64)
    found = model.equilibrium(u)
    for k in range(2):
        exact = Fraction(float(u[k])) / (1 - 4 * Fraction(entry))  # all states are equal
        errors = [abs(Fraction(value) - exact) for value in found.value[k].tolist()]
        assert max(errors) <= Fraction(float(found.error_bound[k]))
    assert (
        found.error_bound.isfinite().all()
        and float((found.error_bound / found.value.detach().amax(1)).max()) < 1e-2
    )


def test_a_matrix_that_rounding_cannot_tell_from_critical_is_refused():
    for value in (1.0, math.nextafter(1.0, 0.0), 1.0 - 2.0**-52):
        A = torch.full((4, 4), value / 4, dtype=torch.float64)
        with pytest.raises(IllPosedError, match="nothing proves"):
            ImplicitModel.from_matrices(A, torch.ones(4, 1).double(), torch.ones(1, 4).double())
    with pytest.raises(InputError, match="choose 0 < kappa < 1"):
        ImplicitModel(3, 2, 6, kappa=1.0)


# sizes


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("condition", ["inf", "weighted", "spectral", "mu", "monotone"])
def test_relu_models_are_homogeneous_over_sixty_orders_of_magnitude(condition, scale, dtype):
    model = ImplicitModel(3, 2, 6, condition=condition, stop=Relative(atol=1e-37)).to(dtype)
    u = torch.randn(5, 3, dtype=dtype)
    expected, found = model(u), model(scale * u) / scale
    assert torch.allclose(found, expected, rtol=0, atol=2e-4 * float(expected.detach().abs().max()))


def test_the_default_rule_has_no_floor_and_zeros_end_at_once():
    model, u = ImplicitModel(3, 2, 6), 1e-30 * torch.randn(5, 3)
    found = model.equilibrium(u)
    exact = model.double().equilibrium(u.double())
    assert found.converged.all() and exact.converged.all()
    assert torch.allclose(found.value.double(), exact.value, rtol=0, atol=1e-5 * float(exact.value.max()))
    nothing = model.equilibrium(torch.zeros(5, 3).double(), exact.value * 1e30)
    assert nothing.converged.all() and int(nothing.steps.max()) == 1 and not nothing.value.any()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_for_inputs_of_any_size(method, scale):
    for form in (to_implicit(layers().double(), (3,)), ImplicitModel(3, 2, 6).double().form()):
        box = Box(-scale * torch.ones(1, 3, dtype=torch.float64), scale * torch.ones(1, 3, dtype=torch.float64))
        try:
            found = output_bounds(form, box, method)
        except MethodError:
            continue
        u = box.sample(50)[:, 0]
        assert found.contains(form(u), tolerance=1e-12 * scale).all() and found.width.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_bounds_that_overflow_are_infinite_and_never_nan(method):
    ring = ImplicitForm(torch.tensor([[0.0, 0.08142781], [12.280816, 0.0]]), torch.eye(2), 1e9 * torch.ones(1, 2))
    held = ImplicitForm(
        torch.tensor([[-1e192, 1e191], [0.07, -1e192]]).double(), torch.eye(2).double(), torch.ones(1, 2).double()
    )
    for form, size in ((ring, 1e20), (held, 1.0)):
        try:
            found = output_bounds(
                form, Box.around(torch.full((1, 2), size).to(form.dtype), 0.5 * size, None, None), method
            )
        except (InputError, IllPosedError):
            continue
        assert not found.lower.isnan().any() and not found.upper.isnan().any()
        assert (found.lower <= found.upper).all()


def test_a_state_that_overflows_is_reported():
    steep = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    nn.init.constant_(steep[0].weight, 2.0)
    model = ImplicitModel(3, 2, 6)
    nn.init.constant_(model.B, 2.0)
    for overflowing in (model, to_implicit(steep, (3,))):
        with pytest.warns(ConvergenceWarning, match=r"infinity|left the range"):
            overflowing(torch.full((1, 3), 3e38))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_estimators_learn_in_any_units(scale):
    X = np.random.default_rng(0).normal(size=(60, 3))
    options = {"max_epochs": 20, "random_state": 0, "early_stopping": False}
    plain = ImplicitRegressor(**options).fit(X, X.sum(1)).predict(X)
    scaled = ImplicitRegressor(**options).fit(scale * X, scale * X.sum(1)).predict(scale * X)
    assert np.allclose(scaled / scale, plain, atol=1e-3)


def test_rows_are_fitted_in_any_units():
    X, U = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    Z = X @ torch.randn(4, 3, dtype=torch.float64)
    plain = RowFit(kappa=0.7).solve(X, U, Z)
    for scale in (1e-30, 1e30):
        scaled = RowFit(kappa=0.7).solve(scale * X, scale * U, scale * Z)
        assert torch.allclose(scaled.weights, plain.weights, atol=1e-8)
        assert scaled.relative_gap.max() < 1e-8


# types


@pytest.mark.parametrize("name", WITH_FORMS)
def test_inputs_of_another_type_are_refused_or_promoted(name):
    model, shape = made(name)
    for dtype in (*HALF, torch.float64, torch.complex64, torch.int64, torch.bool):
        u = torch.randn(2, *shape).to(dtype)
        if name == "equilibrium of a cell" and dtype not in (torch.float64, torch.complex64):
            assert output(model, u).dtype == torch.float32  # torch promotes them inside the cell
            continue
        with pytest.raises((InputError, MapError), match=r"float64|convert one of them|real"):
            output(model, u)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", WITH_FORMS)
def test_models_of_every_real_type_agree(name, dtype):
    model, shape = made(name)
    u = torch.randn(3, *shape, dtype=torch.float64)
    short = model.to(dtype)
    y = output(short, u.to(dtype))
    assert y.dtype == dtype
    expected = output(short.to(torch.float64), u.to(dtype).double())
    tolerance = 60 * torch.finfo(dtype).eps * (1 + float(expected.abs().max()))
    assert torch.allclose(
        y.double(), expected, rtol=0, atol=max(tolerance, 2e-4 if dtype == torch.float32 else 1e-6)
    )


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("name", WITH_FORMS)
def test_complex_models_are_refused(name):
    make, shape = WITH_FORMS[name]
    with pytest.raises(InputError, match=r"real|convert one of them"):
        output(make().to(torch.complex64), torch.randn(2, *shape, dtype=torch.complex64))


def test_forms_of_whole_numbers_and_complex_rows_are_refused():
    with pytest.raises(InputError, match="floating point"):
        to_implicit(layers(), (3,)).to(torch.int64)
    X = torch.randn(9, 2, dtype=torch.complex64)
    with pytest.raises(InputError, match="real"):
        RowFit().solve(X, X, X)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", METHODS)
def test_bounds_in_half_precision_hold(method, dtype):
    forms = [to_implicit(layers(), (3,)), ImplicitModel(3, 2, 6, kappa=0.8).form()]
    for form in (form.to(dtype) for form in forms):
        try:
            found = output_bounds(form, box := Box.around(torch.rand(4, 3).to(dtype), 0.1), method)
        except MethodError:
            continue
        wide = form.to(torch.float64)
        y = wide(box.sample(40).double().flatten(0, 1)).view(40, 4, 2)
        exact = found.lower.double(), found.upper.double()
        assert ((y >= exact[0] - 1e-9) & (y <= exact[1] + 1e-9)).all() and found.width.isfinite().all()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int64, bool, object])
def test_estimators_take_what_numpy_can_convert(kind):
    X = np.random.default_rng(0).integers(0, 2, size=(20, 3)).astype(kind)
    assert ImplicitRegressor(max_epochs=1).fit(X, np.arange(20.0)).predict(X).shape == (20,)
    with pytest.raises(ValueError, match="Complex"):
        ImplicitRegressor(max_epochs=1).fit(X.astype(np.complex64), np.arange(20.0))


# batches


@pytest.mark.parametrize("name", WITH_FORMS)
def test_empty_batches_give_empty_outputs_and_zero_gradients(name):
    model, shape = made(name)
    y = output(model, torch.randn(0, *shape))
    assert len(y) == 0 and y.shape[1:] == output(model, torch.randn(2, *shape)).shape[1:]
    if isinstance(model, nn.Module):
        y.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", WITH_FORMS)
def test_a_sample_alone_is_the_sample_in_its_batch(name):
    model, shape = made(name)
    u = torch.randn(3, *shape)
    assert torch.allclose(output(model, u[1:2]), output(model, u)[1:2], atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bounds_of_no_samples_are_no_bounds(method):
    for form in (to_implicit(layers(), (3,)), ImplicitModel(3, 2, 6).form()):
        box, none = Box.around(torch.rand(0, 3), 0.1), torch.zeros(0, dtype=torch.int64)
        assert output_bounds(form, box, method).upper.shape == (0, 2)
        assert certified(form, box, none, method).shape == (0,)
        with pytest.raises(InputError, match="no samples"):
            certified_accuracy(form, box, none, method)
        one = Box.around(torch.rand(1, 3), 0.1)
        try:
            found = output_bounds(form, one, method)
        except MethodError:
            continue
        assert found.contains(form(one.center), 1e-6).all()


def test_a_fit_needs_a_sample():
    for data in ([], [torch.zeros(0, 3)]):
        with pytest.raises(InputError, match="nothing"):
            record_states(layers(), data)
    states = record_states(layers(), [torch.zeros(0, 3), torch.randn(5, 3)])
    assert states.samples == 5
    with pytest.raises(ValueError, match="0 sample"):
        ImplicitRegressor().fit(np.zeros((0, 3)), np.zeros(0))


# views


def views(u: Tensor) -> dict[str, Tensor]:
    """The same numbers in other layouts."""
    double = torch.stack([u, torch.zeros_like(u)], dim=-1)
    padded = torch.nn.functional.pad(u, (2, 3))
    return {
        "every other number": double[..., 0],
        "a window": padded[..., 2:-3],
        "transposed": u.transpose(0, -1).contiguous().transpose(0, -1),
        "from a flipped array": torch.from_numpy(np.ascontiguousarray(u.numpy()[::-1])[::-1].copy()),
        **({"channels last": u.contiguous(memory_format=torch.channels_last)} if u.dim() == 4 else {}),
    }


@pytest.mark.parametrize("name", WITH_FORMS)
def test_layouts_change_neither_outputs_nor_gradients(name):
    model, shape = made(name)
    u = torch.randn(3, *shape)

    def both(given: Tensor) -> tuple[Tensor, Tensor]:
        given = given.detach().requires_grad_()
        y = output(model, given)
        return y.detach(), torch.autograd.grad(y.square().sum(), given)[0]

    expected = both(u)
    for kind, view in views(u).items():
        for one, other in zip(both(view), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-3), kind
    row = u[:1].expand(3, *shape)  # one sample in memory
    assert torch.allclose(output(model, row), output(model, u[:1].repeat(3, *[1] * len(shape))), atol=1e-5)


def test_bounds_and_fits_of_views():
    form, u = ImplicitModel(3, 2, 6).form(), torch.rand(3, 3)
    for view in views(u).values():
        assert torch.equal(
            output_bounds(form, Box.around(view, 0.1)).upper, output_bounds(form, Box.around(u, 0.1)).upper
        )
    X, Z = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    plain = RowFit(kappa=0.7).solve(X, X[:, :1], Z).weights
    for view, target in zip(views(X).values(), views(Z).values(), strict=True):
        assert torch.allclose(RowFit(kappa=0.7).solve(view, view[:, :1], target).weights, plain, atol=1e-12)
    data = np.random.default_rng(0).normal(size=(20, 3))
    model = ImplicitRegressor(max_epochs=1, random_state=0).fit(data, data.sum(1))
    assert np.allclose(model.predict(np.asfortranarray(data)[::-1])[::-1], model.predict(data), atol=1e-6)


# threads


def together(work: Callable[[int], object], count: int = 2 * THREADS) -> list:
    """Does pieces of work in several threads at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.parametrize("name", WITH_FORMS)
def test_threads_share_a_model(name):
    model, shape = made(name)
    inputs = [torch.randn(2 + k % 3, *shape) for k in range(2 * THREADS)]
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []

    def work(k: int) -> tuple[Tensor, ...]:
        u = inputs[k].clone().requires_grad_()
        y = output(model, u)
        gradients = torch.autograd.grad(y.square().sum(), [u, *parameters], allow_unused=True)
        return y.detach(), *(g for g in gradients if g is not None)

    for found, expected in zip(together(work), map(work, range(2 * THREADS)), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6 * (1 + float(other.abs().max())))


@pytest.mark.parametrize("method", METHODS)
def test_threads_ask_for_bounds_of_one_form(method):
    form = to_implicit(layers(), (3,)) if method in ("optimised", "best") else ImplicitModel(3, 2, 6).form()
    boxes = [Box.around(torch.rand(2, 3), 0.05) for _ in range(THREADS)]
    expected = [output_bounds(form, box, method) for box in boxes]
    found_together = together(lambda k: output_bounds(form, boxes[k], method), THREADS)
    for found, alone in zip(found_together, expected, strict=True):
        assert torch.equal(found.lower, alone.lower) and torch.equal(found.upper, alone.upper)


def test_threads_fit_rows_and_predict():
    network, u = layers(), torch.randn(50, 3)
    states = record_states(network, [u])
    expected = fit_states(states, kappa=0.9)[0]
    for model, _ in together(lambda k: fit_states(states, kappa=0.9), THREADS):
        assert torch.equal(model.A, expected.A) and torch.equal(model.B, expected.B)
    X = u.numpy()
    fitted = ImplicitRegressor(max_epochs=2, random_state=0).fit(X, X.sum(1))
    alone = fitted.predict(X)
    assert all(np.array_equal(found, alone) for found in together(lambda k: fitted.predict(X), 8))
