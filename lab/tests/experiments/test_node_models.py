"""Cells on nodes: their certificates hold, their equilibria are the answers, and depth means what it says."""

import pytest
import torch
from scipy.sparse import csgraph
from wellposed_lab.config import Choice
from wellposed_lab.experiments.beyond.graphs import ShortestPath
from wellposed_lab.experiments.beyond.inversion import LinearSystem, QuadraticProgram
from wellposed_lab.experiments.beyond.models import UNIT, NodeCell, PathCell, RelaxationCell, Tied, build

from wellposed.equilibrium.solution import Status
from wellposed.errors import InputError, UnknownNameError
from wellposed.models.path_independence import path_independence

GRAPHS = ShortestPath(nodes=10, test_samples=6, layers=(2, 4))


def disturbed(cell: NodeCell, size: float = 1.0) -> NodeCell:
    """The cell in float64 with random weights, far from where it starts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return cell.double()


def exact_paths(channels: int = 3) -> PathCell:
    """Bellman's equation: the discounts are exp(-h w), kappa included."""
    cell = PathCell(channels).double()
    with torch.no_grad():
        cell.slope.fill_(1.0)
        cell.offset.fill_(torch.tensor(0.99, dtype=torch.float64).log() / UNIT)
        cell.mixing.zero_()
        cell.input.fill_(1.0)
        cell.output.fill_(1 / channels)
    return cell


def exact_relaxation(linear: bool) -> RelaxationCell:
    """Projected gradient steps of size one, in one channel."""
    cell = RelaxationCell(1, linear=linear).double()
    with torch.no_grad():
        cell.leak.zero_()
        for parameter in (cell.gain, cell.input, cell.output):
            parameter.fill_(1.0)
    return cell


def rest_of(cell: NodeCell, u):
    found = Tied(cell, 1).as_deq().equilibrium(u)
    assert set(found.status.tolist()) <= {Status.CONVERGED, Status.STAGNATED}
    return cell.readout(found.value)


@torch.no_grad()
def test_bellmans_equation_is_among_the_cells_and_reaches_as_far_as_the_graph():
    for at in (4.0, 30.0, 150.0):  # states of the farthest nodes are many decades below that of the source
        u, y = GRAPHS.test(0, at)
        assert torch.allclose(rest_of(exact_paths(), u.double()), y.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LinearSystem, QuadraticProgram])
@torch.no_grad()
def test_relaxation_is_among_the_cells(kind):
    u, y = kind(features=5, test_samples=8).test(0, 50.0)
    assert torch.allclose(rest_of(exact_relaxation(kind is LinearSystem), u.double()), y.double(), atol=1e-4)


@pytest.mark.parametrize("average", [False, True])
@torch.no_grad()
def test_path_cells_contract_whatever_their_weights(average):
    u, _ = GRAPHS.test(0, 8.0)
    cell = disturbed(PathCell(4, kappa=0.9, average=average), 3.0)
    x, y = torch.randn(2, len(u), u.shape[1], 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = (cell(x, u.double()) - cell(y, u.double())).abs().amax((1, 2))
    assert (moved <= 0.9 * (x - y).abs().amax((1, 2)) + 1e-12).all() and "0.9" in cell.certificate()
    free = disturbed(PathCell(4, kappa=None, average=average), 3.0)
    assert (free(x, u.double()) - free(y, u.double())).abs().max() > (x - y).abs().max()


@pytest.mark.parametrize("linear", [False, True])
@torch.no_grad()
def test_relaxation_contracts_at_the_rate_it_says(linear):
    u, _ = LinearSystem(features=5, test_samples=8).test(0, 20.0)
    cell, u = disturbed(RelaxationCell(3, linear=linear)), u.double()
    rate = cell.rate(20.0)
    x, y = torch.randn(2, 8, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apart = (cell(x, u) - cell(y, u)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert (apart <= rate).all() and rate < 1 and "one equilibrium" in cell.certificate()
    leak, gain = cell.matrices()
    for matrix in u[:, :, :-1]:
        whole = torch.eye(15) - torch.kron(torch.eye(5), leak) - torch.kron(matrix, gain)
        values = torch.linalg.eigvalsh(whole)
        assert values[0] > -1e-6 and values[-1] <= rate + 1e-6
    assert values[-1] > 0.99 * rate
    assert "none" in RelaxationCell(2, capped=False).certificate()


@torch.no_grad()
def test_path_independence_follows_from_the_certificate():
    u, _ = QuadraticProgram(features=4, test_samples=5).test(0, 5.0)
    capped = Tied(disturbed(RelaxationCell(3), 0.3), 1).as_deq()
    assert path_independence(capped, u.double()).independent.all()
    loose = RelaxationCell(3, capped=False).double()
    loose.gain.mul_(-1)  # steps away from the answer
    lost = Tied(loose, 1).as_deq()
    lost.max_steps = 50
    assert not path_independence(lost, u.double(), starts=1).independent.any()


@torch.no_grad()
def test_a_sample_does_not_depend_on_its_batch():
    u, _ = GRAPHS.train(0)
    cell = disturbed(PathCell(4), 0.3)
    degrees = (u[:, :, :-1] > 0).sum(2).amax(1)
    few, many = int(degrees.argmin()), int(degrees.argmax())
    assert degrees[few] < degrees[many]
    together = rest_of(cell, u[[few, many]].double())
    assert torch.equal(together[:1], rest_of(cell, u[[few]].double()))


@pytest.mark.parametrize("task", ["shortest-path", "linear-system", "quadratic-program"])
def test_depth_is_the_number_of_steps(task):
    u = GRAPHS.test(0, 4.0)[0]
    torch.manual_seed(0)
    tied, untied = (build(task, 10, Choice.of(name, depth=3, channels=4)).eval() for name in ("tied", "untied"))
    with torch.no_grad():
        answers = tied.answers(u, (1, 3, 5))
        assert list(answers) == [1, 3, 5] and torch.equal(answers[3], tied(u))
        assert not torch.equal(answers[3], answers[5])
        for layer in untied.layers:
            layer.load_state_dict(tied.cell.state_dict())
        assert torch.allclose(untied(u), tied(u)) and list(untied.answers(u, (1, 5))) == [3]
    assert sum(p.numel() for p in untied.parameters()) == 3 * sum(p.numel() for p in tied.parameters())
    assert untied.as_deq() is None and untied.cell is None


@torch.no_grad()
def test_a_fixed_depth_sees_no_further():
    u, _ = GRAPHS.test(0, 9.0)
    answers = build("shortest-path", 10, Choice.of("tied", depth=4))(u)
    for graph, answer in zip(u, answers, strict=True):
        source = int(graph[:, -1].argmax())
        edges = torch.tensor(csgraph.dijkstra(graph[:, :-1].numpy(), indices=source, unweighted=True))
        reached = answer < answer.max()  # what is not reached has the largest answer
        assert torch.equal(reached, edges <= 3)  # the first step marks the source


def test_the_equilibrium_is_trained_by_the_implicit_function_theorem():
    u, y = LinearSystem(features=3, test_samples=4).test(0, 3.0)
    torch.manual_seed(0)
    model = build("linear-system", 3, Choice.of("equilibrium", channels=2)).double()
    model.deq.stop = None
    long = Tied(model.cell, 300)
    gradients = []
    for network in (model, long):
        model.cell.zero_grad()
        (network(u.double()) - y).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.cell.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-8) and gradients[0].abs().max() > 1e-3


def test_flat_networks_know_one_size_and_unknown_names_are_refused():
    flat = build("shortest-path", 10, Choice.of("mlp", width=8))
    assert flat.fits(torch.zeros(1, 10, 11)) and not flat.fits(torch.zeros(1, 12, 13))
    assert flat.answers(torch.zeros(1, 10, 11), (1, 2)) == {}
    with pytest.raises(UnknownNameError, match="did you mean 'tied'"):
        build("shortest-path", 10, Choice.of("tide"))
    with pytest.raises(UnknownNameError, match="linear-system"):
        build("linear-systm", 10, Choice.of("tied"))
    with pytest.raises(InputError, match="n \\+ 1"):
        PathCell(2)(torch.zeros(1, 3, 2), torch.zeros(1, 3, 3))
