"""Attacks find known weaknesses, stay in their sets, and never contradict a certificate."""

import pytest
import torch
from attack_cases import F64, digits, linear, one_weak_entry, trained, worst_margin
from torch import nn

from wellposed.errors import InputError, UnknownNameError
from wellposed.forms import ImplicitForm
from wellposed.robust import Ball, Box, Relaxation, SparseBox, certified, margin_bounds
from wellposed.robust.attacks import (
    Attack,
    Threat,
    fgsm,
    jsma,
    lp_attack,
    noise_attack,
    pgd,
    ranked_attack,
    train_surrogate,
    transfer_attack,
)
from wellposed.robust.attacks.attack import margin
from wellposed.robust.attacks.other import salt_and_pepper


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def models():
    return {kind: trained(kind) for kind in ("implicit", "layers")}


def attacks(count=None):
    """Every attack with a radius, as functions of a model, inputs, targets and the radius."""
    found = {
        "fgsm": lambda m, u, y, e: fgsm(m, u, y, e, count=count),
        "pgd": lambda m, u, y, e: pgd(m, u, y, e, steps=10, count=count),
        "momentum": lambda m, u, y, e: pgd(m, u, y, e, steps=10, momentum=0.7, loss="cross_entropy", count=count),
        "lp": lambda m, u, y, e: lp_attack(m, u, y, e, count, goals=2),
        "printed": lambda m, u, y, e: lp_attack(m, u, y, e, count, goals=1, relaxation=Relaxation("lp")),
    }
    for ranking in ("sensitivity", "gradient", "random"):
        for values in ("uniform", "gradient"):
            found[f"{ranking} {values}"] = lambda m, u, y, e, r=ranking, v=values: ranked_attack(
                m, u, y, e, count, ranking=r, values=v, draws=3
            )
    if count is not None:
        found["jsma"] = lambda m, u, y, e: jsma(m, u, y, count, e)
    return found


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_fgsm_is_exact_on_two_linear_classes(norm):
    model, W, c = linear()
    u, target = torch.rand(8, 6, dtype=F64), torch.randint(2, (8,))
    found = fgsm(model, u, target, 0.1, norm=norm)
    direction = W[1 - target] - W[target]
    if norm == "inf":
        assert torch.equal(found.inputs, (u + 0.1 * direction.sign()).clamp(0, 1))
        assert torch.allclose(margin(found.outputs, target), worst_margin(W, c, u, target, 0.1))
    else:
        inside = u / 2 + 0.25
        found = fgsm(model, inside, target, 0.1, norm=norm)
        expected = inside + 0.1 * nn.functional.normalize(direction)
        assert torch.allclose(found.inputs, expected)


@pytest.mark.parametrize(("momentum", "loss"), [(0.0, "margin"), (0.8, "margin"), (0.0, "cross_entropy")])
def test_pgd_reaches_the_optimum_of_a_linear_model(momentum, loss):
    model, W, c = linear(q=2 if loss == "cross_entropy" else 4)
    u, target = torch.rand(10, 6, dtype=F64), torch.randint(len(W), (10,))
    u[0] = 0.0  # at the end of the valid range
    found = pgd(model, u, target, 0.1, momentum=momentum, loss=loss, restarts=10)
    worst = worst_margin(W, c, u, target, 0.1)
    reached = margin(found.outputs, target)
    broken = worst > 0
    assert (found.success == broken).all()
    assert torch.allclose(reached[~broken], worst[~broken])


def test_pgd_reaches_the_optimum_of_a_linear_model_in_a_ball():
    model, W, c = linear(q=4)
    u, target = 0.25 + torch.rand(10, 6, dtype=F64) / 2, torch.randint(4, (10,))
    found = pgd(model, u, target, 0.1, norm="2", restarts=10)
    rows = W[None] - W[target][:, None]
    lead = (rows @ u[:, :, None])[:, :, 0] + 0.1 * rows.norm(dim=2) + c[None] - c[target][:, None]
    worst = lead.scatter(1, target[:, None], -torch.inf).amax(1)
    assert (found.success == (worst > 0)).all() and not found.success.all()
    assert torch.allclose(margin(found.outputs, target)[worst < 0], worst[worst < 0])


def test_pgd_finds_what_one_step_does_not():
    """The gradient at the clean input leads away from the only hole, which lies beyond a kink."""
    weights, bias = torch.tensor([[1.0], [-4.0]], dtype=F64), torch.tensor([0.0, 1.2], dtype=F64)
    C = torch.tensor([[1.0, 0.0], [1.05, 2.0]], dtype=F64)  # of the units u and relu(1.2 - 4u)
    offset = torch.tensor([0.05, 0.0], dtype=F64)
    form = ImplicitForm(torch.zeros(2, 2, dtype=F64), weights, C, bias=bias, output_bias=offset)
    u, target = torch.tensor([[0.45]], dtype=F64), torch.tensor([0])
    assert form(u).argmax() == 0 and form(u - 0.2).argmax() == 1
    assert not fgsm(form, u, target, 0.25, loss="margin").success.any()
    assert not pgd(form, u, target, 0.25, restarts=0, steps=10).success.any()
    assert pgd(form, u, target, 0.25, restarts=10, steps=10).success.all()


def test_momentum_changes_the_way():
    model = trained("layers", epochs=1)
    u, y = digits("test", 20)
    plain, heavy = (pgd(model, u, y, 0.05, steps=5, restarts=0, momentum=m).inputs for m in (0.0, 0.9))
    assert not torch.equal(plain, heavy)


@pytest.mark.parametrize("ranking", ["sensitivity", "gradient"])
def test_rankings_find_the_weak_entry(ranking):
    form = one_weak_entry(weak=2)
    u = torch.full((4, 5), 0.7, dtype=F64)
    target = torch.zeros(4, dtype=torch.int64)
    found = ranked_attack(form, u, target, 1.0, 1, ranking=ranking, values="gradient")
    assert found.success.all()
    assert ((found.inputs != u).nonzero()[:, 1] == 2).all()
    control = [
        ranked_attack(form, u, target, 1.0, 1, ranking="random", values="gradient", seed=s) for s in range(20)
    ]
    share = torch.stack([one.success for one in control]).double().mean()
    assert 0.05 < share < 0.4  # one entry in five


def test_uniform_values_stay_within_epsilon_and_improve_with_draws():
    form, u = one_weak_entry(), torch.full((50, 5), 0.7, dtype=F64)
    target = torch.zeros(50, dtype=torch.int64)
    one, many = (ranked_attack(form, u, target, 0.3, 1, draws=draws) for draws in (1, 20))
    assert (many.inputs - u).abs().max() <= 0.3
    assert one.accuracy > many.accuracy
    assert many.queries.unique().tolist() == [21]


def test_known_sensitivity_matrix_is_used():
    form, u = one_weak_entry(weak=2), torch.full((1, 5), 0.7, dtype=F64)
    wrong = torch.eye(5, dtype=F64)[[4, 4]]
    found = ranked_attack(form, u, torch.tensor([0]), 1.0, 1, values="gradient", S=wrong)
    assert not found.success.any()
    with pytest.raises(InputError, match="S has the shape"):
        ranked_attack(form, u, torch.tensor([0]), 1.0, 1, S=wrong[:, :3])


def test_saliency_takes_the_telling_entries_first():
    form, u = one_weak_entry(weak=3), torch.full((2, 5), 0.7, dtype=F64)
    target = torch.zeros(2, dtype=torch.int64)
    found = jsma(form, u, target, 2)
    assert found.success.all()
    assert torch.equal(found.inputs != u, torch.tensor([[False, False, False, True, False]] * 2))


def test_saliency_needs_as_many_entries_as_the_weakness_has():
    """Class 0 has the mean of eight entries and class 1 the value 0.3; four must go from a half to zero."""
    model = nn.Linear(8, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.125] * 8, [0.0] * 8]))
        model.bias.copy_(torch.tensor([0.0, 0.3]))
    u, target = torch.full((1, 8), 0.5, dtype=F64), torch.tensor([0])
    assert not jsma(model, u, target, 3).success.any()
    found = jsma(model, u, target, 6)
    assert found.success.all() and (found.inputs != u).sum() == 4  # stops when the class has changed


def test_saliency_moves_an_entry_once():
    """The first entry always has the larger slope, up or down; the second is needed."""
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)
    bias = torch.tensor([0.0, -0.9, 0.0], dtype=F64)  # the units u0, relu(u0 - 0.9) and u1
    C = torch.tensor([[0.0, 0.0, 0.0], [1.0, -3.0, 0.5]], dtype=F64)
    offset = torch.tensor([1.0, 0.0], dtype=F64)
    form = ImplicitForm(torch.zeros(3, 3, dtype=F64), weights, C, bias=bias, output_bias=offset)
    u, target = torch.full((1, 2), 0.5, dtype=F64), torch.tensor([0])
    found = jsma(form, u, target, 2)
    assert found.success.all() and torch.equal(found.inputs, torch.ones(1, 2, dtype=F64))


@pytest.mark.parametrize("count", [None, 2])
def test_program_is_exact_on_an_affine_model(count):
    """With every unit active the relaxation is the model, so the attack finds the worst input of the set."""
    W = torch.randn(3, 6, dtype=F64)
    form = ImplicitForm(
        torch.zeros(6, 6, dtype=F64), torch.eye(6, dtype=F64), W, bias=torch.ones(6, dtype=F64),
        output_bias=-W.sum(1),
    )  # fmt: skip
    u, target = torch.rand(5, 6, dtype=F64), torch.randint(3, (5,))
    found = lp_attack(form, u, target, 0.1, count)
    inputs = Box.around(u, 0.1) if count is None else SparseBox(u, 0.1, count, 0.0, 1.0)
    rows = W[None] - W[target][:, None]
    worst = inputs.support(rows).scatter(1, target[:, None], -torch.inf).amax(1)
    assert torch.allclose(margin(found.outputs, target), worst, atol=1e-6)


def test_program_attacks_better_than_random_values(models):
    u, y = digits("test", 12)
    for model in models.values():
        program = lp_attack(model, u, y, 0.08, goals=3)
        random = ranked_attack(model, u, y, 0.08, draws=3)
        assert program.accuracy < random.accuracy


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", ["implicit", "layers"])
@pytest.mark.parametrize("count", [None, 5])
def test_no_attack_leaves_its_set_or_contradicts_a_certificate(models, kind, count):
    u, y = digits("test", 10)
    model, epsilon = models[kind], 0.06 if count is None else 0.5
    threat = Threat(u, epsilon, count=count)
    proven = certified(model, threat.set(), y)
    bounds = margin_bounds(model, threat.set(), y)
    assert 0 < proven.sum() < len(u) or count
    for name, attack in attacks(count).items():
        found = attack(model, u, y, epsilon)
        box = threat.set().box()
        flat = found.inputs.flatten(1)
        assert ((flat >= box.lower) & (flat <= box.upper)).all(), name
        assert ((flat != u).sum(1) <= (64 if count is None else count)).all(), name
        assert not (found.success & proven).any(), name
        lead = found.outputs - found.outputs.gather(1, y[:, None])
        assert bounds.contains(lead, 1e-4).all(), name
        with torch.no_grad():
            assert torch.equal(found.success, model(found.inputs).argmax(1) != y), name


def test_balls_hold_their_attacks(models):
    u, y = digits("test", 20)
    model, epsilon = models["layers"], 0.3
    for attack in (fgsm, pgd):
        found = attack(model, u, y, epsilon, norm="2")
        length = torch.linalg.vector_norm((found.inputs - u).double(), dim=1)
        assert (length <= epsilon).all() and length.max() > 0.9 * epsilon
        assert found.inputs.min() >= 0 and found.inputs.max() <= 1
        assert not (found.success & certified(model, Ball(u, epsilon), y)).any()
    assert found.success.sum() >= (model(u).argmax(1) != y).sum()


def test_exact_gradients_reach_further_than_noise(models):
    u, y = digits("test", 60)
    for model in models.values():
        assert pgd(model, u, y, 0.1).accuracy < fgsm(model, u, y, 0.1).accuracy + 0.02
        assert pgd(model, u, y, 0.1).accuracy < ranked_attack(model, u, y, 0.1).accuracy - 0.3


def test_surrogate_learns_from_answers_alone(models):
    model = models["implicit"]
    pool, _ = digits("train", 300)
    u, y = digits("test", 60)
    asked = []

    class Oracle(nn.Module):
        def forward(self, points):
            asked.append(len(points))
            assert not torch.is_grad_enabled() and not self.training
            return nn.functional.one_hot(model(points).argmax(1), 10).to(points)

    copy = train_surrogate(Oracle(), pool, rounds=2, epochs=30)
    assert sum(asked) == 600
    agreement = (copy(u).argmax(1) == model(u).argmax(1)).double().mean()
    assert agreement > 0.75
    found = transfer_attack(model, u, y, 0.15, copy)
    noise = ranked_attack(model, u, y, 0.15, values="uniform")
    assert found.accuracy < noise.accuracy - 0.2
    assert found.queries.unique().tolist() == [2]
    assert (found.inputs - u).abs().max() <= 0.15 + 1e-6


@pytest.mark.parametrize("noise", ["salt_and_pepper", "speckle"])
def test_noise_harms_more_at_higher_levels(models, noise):
    u, y = digits("test", 100)
    low, high = (noise_attack(models["layers"], u, y, noise, level) for level in (0.0, 0.9))
    assert torch.equal(low.inputs, u)
    assert high.accuracy < low.accuracy - 0.05
    assert high.inputs.min() >= 0 and high.inputs.max() <= 1


def test_no_share_of_salt_and_pepper_is_no_noise_where_zero_is_drawn():
    u = torch.full((10**5,), 0.5, dtype=torch.float16)  # in which one draw of 2,048 is zero
    assert torch.equal(salt_and_pepper(u, 0.0), u)


def test_speckle_leaves_black_pixels_black():
    u = torch.zeros(3, 4)
    found = noise_attack(nn.Linear(4, 2), u, torch.tensor([0, 1, 0]), "speckle", 2.0)
    assert torch.equal(found.inputs, u)


def test_mode_and_gradients_of_the_model_stay(models):
    model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)).train()
    model[1].eval()
    u, y = digits("test", 5)
    one, two = (pgd(model, u, y, 0.1, steps=3) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)  # dropout is off
    assert model.training and model[0].training and not model[1].training
    assert all(part.grad is None for part in model.parameters())


def test_images_keep_their_shape():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    u, y = torch.rand(4, 3, 2, 2), torch.randint(3, (4,))
    for attack in attacks(3).values():
        assert attack(model, u, y, 0.2).inputs.shape == u.shape


def test_joined_attacks_keep_every_success():
    u = torch.zeros(2, 1)
    one = Attack(u, torch.tensor([True, False]), torch.zeros(2, 2), torch.ones(2), "a", ("x",))
    two = Attack(u + 1, torch.tensor([True, True]), torch.ones(2, 2), torch.ones(2), "b")
    both = one.joined(two)
    assert both.inputs.flatten().tolist() == [0.0, 1.0] and both.accuracy == 0.0
    assert (both.name, both.notes) == ("a + b", ("x",)) and both.queries.tolist() == [2, 2]


def test_zero_gradients_are_told():
    dead = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with torch.no_grad():
        dead[0].bias.fill_(-10.0)
    found = pgd(dead, torch.rand(2, 3), torch.tensor([0, 1]), 0.1, steps=2)
    assert "2 of 2 samples have a zero gradient" in found.notes[0]


BAD = [
    (lambda u, y: {"target": y + 2}, "classes are 0 to 1"),
    (lambda u, y: {"target": y - 5}, "classes are 0 to 1"),
    (lambda u, y: {"target": y.double()}, "integer tensor"),
    (lambda u, y: {"u": u.index_fill(1, torch.tensor([0]), torch.nan)}, "NaN"),
    (lambda u, y: {"u": 255 * u}, "valid range"),
    (lambda u, y: {"epsilon": -0.1}, "not negative"),
    (lambda u, y: {"epsilon": float("nan")}, "not negative"),
]


@pytest.mark.parametrize(("change", "complaint"), BAD)
@pytest.mark.parametrize("attack", [fgsm, pgd, lp_attack, ranked_attack])
def test_bad_input_is_refused(attack, change, complaint):
    u, y = torch.rand(2, 6, dtype=F64), torch.tensor([0, 1])
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    given = {"u": u, "target": y, "epsilon": 0.1} | change(u, y)
    with pytest.raises(InputError, match=complaint):
        attack(model, **given)


def test_bad_options_are_refused():
    model, _, _ = linear()
    u, y = torch.rand(2, 6, dtype=F64), torch.tensor([0, 1])
    with pytest.raises(InputError, match="steps are at least 1"):
        pgd(model, u, y, 0.1, steps=0)
    with pytest.raises(InputError, match="norm is 'inf' or '2'"):
        fgsm(model, u, y, 0.1, norm="1")
    with pytest.raises(InputError, match="how many of 6 entries"):
        fgsm(model, u, y, 0.1, count=7)
    with pytest.raises(InputError, match="share of entries"):
        ranked_attack(model, u, y, 0.1, 1.5)
    with pytest.raises(UnknownNameError, match="unknown ranking"):
        ranked_attack(model, u, y, 0.1, ranking="colour")
    with pytest.raises(InputError, match="goal must differ"):
        jsma(model, u, y, 1, goal=y)
    with pytest.raises(InputError, match="classes are 0 to 1"):
        jsma(model, u, y, 1, goal=y + 7)
    with pytest.raises(UnknownNameError, match="did you mean 'speckle'"):
        noise_attack(model, u, y, "speckles", 0.1)
    with pytest.raises(InputError, match="NaN or infinite outputs"):
        pgd(lambda points: points[:, :2] * torch.nan, u, y, 0.1)
    with pytest.raises(InputError, match="one output a class"):
        pgd(nn.Linear(6, 1).double(), u, y, 0.1)
