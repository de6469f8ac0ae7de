"""Arithmetic units: exact where saturated, the formulas of their papers elsewhere."""

import pytest
import torch
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.nalu import INALU, NAC, NALU

from wellposed.errors import InputError

LARGE = 50.0


def saturate(accumulator, weight):
    """Sets the parameters such that W is exactly the given matrix of -1, 0 and 1."""
    with torch.no_grad():
        accumulator.tanh_weight.copy_(LARGE * weight)
        accumulator.sigmoid_weight.copy_(LARGE * (2 * weight.abs() - 1))


@pytest.mark.parametrize(
    ("kind", "count"), [(NAC, 2 * 510), (NALU, 3 * 510), (INALU, 4 * 510 + 11)], ids=lambda kind: str(kind)
)
def test_parameter_counts(kind, count):
    assert parameter_count(kind([50, 10, 1])) == count


@pytest.mark.parametrize("kind", [NAC, NALU, INALU])
def test_any_leading_shape(kind):
    assert kind([4, 3, 2])(torch.randn(2, 5, 4)).shape == (2, 5, 2)
    with pytest.raises(InputError, match="at least two positive integers"):
        kind([4])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_saturated_accumulators_add_and_subtract_exactly(sign):
    model = NAC([5, 2, 1])
    saturate(model.layers[0], torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0]]))
    saturate(model.layers[1], torch.tensor([[1.0, sign]]))
    u = torch.randint(-1000, 1000, (30, 5)).float()
    assert torch.equal(model(u)[:, 0], u[:, 0] + u[:, 1] + sign * (u[:, 3] + u[:, 4]))


def test_saturated_nalu_adds_and_multiplies():
    model, u = NALU([3, 1]), torch.rand(30, 3) + 0.5
    unit = model.layers[0]
    saturate(unit.accumulator, torch.tensor([[1.0, 0.0, -1.0]]))
    with torch.no_grad():
        unit.gate.weight.fill_(LARGE)
    assert torch.allclose(model(u), u[:, :1] - u[:, 2:])
    with torch.no_grad():
        unit.gate.weight.fill_(-LARGE)
    assert torch.allclose(model(u), u[:, :1] / u[:, 2:], rtol=1e-5)


def test_nalu_is_the_formula():
    model, u = NALU([4, 2]).double(), torch.randn(30, 4, dtype=torch.float64)
    unit = model.layers[0]
    weight = torch.tanh(unit.accumulator.tanh_weight) * torch.sigmoid(unit.accumulator.sigmoid_weight)
    gate = torch.sigmoid(u @ unit.gate.weight.mT)
    product = torch.exp(torch.log(u.abs() + 1e-7) @ weight.mT)
    assert torch.allclose(model(u), gate * (u @ weight.mT) + (1 - gate) * product)


def test_nalu_overflows_with_the_product_and_not_behind_a_closed_gate():
    model, u = NALU([50, 1]), torch.full((1, 50), 10.0)
    unit = model.layers[0]
    saturate(unit.accumulator, torch.ones(1, 50))
    with torch.no_grad():
        unit.gate.weight.fill_(1.0)  # the gate is exp(-500) from closed, the product 1e50
    assert model(u).item() == 500.0
    with torch.no_grad():
        unit.gate.weight.zero_()
    assert model(u).isinf().all()
    assert model.double()(u.double()).isfinite().all()


def test_inalu_is_the_formula():
    model, u = INALU([4, 2]).double(), torch.randn(30, 4, dtype=torch.float64)
    unit = model.layers[0]
    first, second = (
        torch.tanh(path.tanh_weight) * torch.sigmoid(path.sigmoid_weight) for path in (unit.sum, unit.product)
    )
    gate, expected = torch.sigmoid(unit.gate), torch.empty(30, 2, dtype=torch.float64)
    for b in range(30):
        for o in range(2):
            product = sign = torch.ones((), dtype=torch.float64)
            for i in range(4):
                product = product * u[b, i].abs() ** second[o, i]
                sign = sign * (u[b, i].sign() * second[o, i].abs() + 1 - second[o, i].abs())
            expected[b, o] = gate[o] * (first[o] @ u[b]) + (1 - gate[o]) * sign * product
    assert torch.allclose(model(u), expected)


def test_inalu_multiplies_negative_numbers_and_is_capped():
    model = INALU([3, 1])
    unit = model.layers[0]
    saturate(unit.product, torch.tensor([[1.0, 1.0, 0.0]]))
    with torch.no_grad():
        unit.gate.fill_(-LARGE)
    u = torch.tensor([[-2.0, 3.0, -9.0], [-2.0, -3.0, 1.0], [0.0, 5.0, 1.0], [1e10, 1e10, 1.0]])
    assert torch.allclose(model(u)[:3, 0], torch.tensor([-6.0, 6.0, 0.0]), atol=1e-5)
    assert torch.allclose(model(u)[3], torch.tensor(20.0).exp())


def test_penalty_is_zero_when_saturated():
    model = INALU([3, 2])
    assert 0.9 < model.penalty().item() < 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-20.0)
    assert model.penalty().item() == 0
    with torch.no_grad():
        model.layers[0].gate.fill_(5.0)  # 2 of 4 * 6 + 2 numbers, each 15 / 20
    assert model.penalty().item() == pytest.approx(0.75 * 2 / 26)
