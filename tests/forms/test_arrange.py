import pytest
import torch
from composed_forms import DOUBLE, KINDS, dense, evaluate, inputs, loop, pooled, same, same_forms
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed import ImplicitForm
from wellposed.errors import InputError
from wellposed.forms import Block, Dense, Sparse, add, block_triangular, permute, permute_states, series

kinds = st.sampled_from(sorted(KINDS))


def is_triangular(form, strictly=False):
    return all(i < j if strictly else i <= j for i, j in form.blocks[0].parts)


@given(kinds, kinds, st.randoms(use_true_random=False), st.integers(0, 1000))
@settings(max_examples=15)
def test_order_of_blocks_does_not_matter(first, second, random, seed):
    form = add(KINDS[first](3, 2, seed), KINDS[second](3, 2, seed + 50), dense(3, 2, seed + 100))
    order = list(range(len(form.partition)))
    random.shuffle(order)
    moved, u = permute(form, order), inputs(form)
    same(evaluate(moved, u), evaluate(form, u))
    assert moved.partition == tuple(form.partition[k] for k in order)
    assert moved.certificate().value == form.certificate().value
    back = permute(moved, [order.index(k) for k in range(len(order))])
    same_forms(back, form, atol=0.0)


@given(kinds, st.integers(0, 1000))
@settings(max_examples=15)
def test_order_of_states_does_not_matter(kind, seed):
    form = add(KINDS[kind](3, 2, seed), dense(3, 2, seed + 50))
    if any(not phi.componentwise for phi in form.activations):
        form = dense(3, 2, seed)
    order = torch.randperm(form.sizes[0], generator=torch.Generator().manual_seed(seed))
    moved, u = permute_states(form, order), inputs(form)
    A, B, C = (getattr(form, name).to_dense() for name in "ABC")
    assert torch.equal(moved.A.to_dense(), A[order][:, order]) and torch.equal(moved.B.to_dense(), B[order])
    assert torch.equal(moved.C.to_dense(), C[:, order])
    same(evaluate(moved, u), evaluate(form, u))


def test_one_block_stays_one_block():
    form, order = loop(3, 2, 0), torch.tensor([4, 2, 0, 1, 3])
    moved = permute_states(form, order)
    assert moved.partition == (5,) and isinstance(moved.blocks[0].part(0, 0), Dense)
    assert torch.equal(moved.bias, form.bias[order])
    assert moved.certificate().value == pytest.approx(form.certificate().value, rel=1e-14)


def test_windows_move_as_a_whole():
    form, u = pooled(3, 2, 0), torch.randn(4, 3, dtype=DOUBLE)  # 3 windows of 2, then 6 states of ReLU
    order = [4, 5, 0, 1, 2, 3, 11, 10, 9, 8, 7, 6]
    same(permute_states(form, order)(u), form(u))
    assert permute_states(form, order).partition == (6, 6)
    assert permute_states(form, [4, 5, 11, 0, 1, 2, 3, 10, 9, 8, 7, 6]).partition == (2, 1, 4, 5)
    for broken in ([5, 4], [3, 4], [4]):
        rest = [k for k in range(12) if k not in broken]
        with pytest.raises(InputError, match="windows of 2 states"):
            permute_states(form, [*broken, *rest])


def test_orders_must_be_permutations():
    form = dense(3, 2, 0)
    with pytest.raises(InputError, match="each of the 2 blocks once"):
        permute(form, [0, 0])
    with pytest.raises(InputError, match="each of the 7 states once"):
        permute_states(form, [0, 1, 2, 3, 4, 5, 5])
    with pytest.raises(InputError, match="each of the 7 states once"):
        permute_states(form, range(6))


@pytest.mark.parametrize("sparse", [True, False])
@given(st.integers(0, 1000))
@settings(max_examples=15)
def test_hidden_layers_are_found(sparse, seed):
    generator = torch.Generator().manual_seed(seed)
    layers, n = 5, 20
    level = torch.randint(layers, (n,), generator=generator)
    A = torch.randn(n, n, dtype=DOUBLE, generator=generator) * (level[:, None] > level)  # of lower levels only
    A = A * (torch.rand(n, n, generator=generator) < 0.5)
    B, C = (
        torch.randn(n, 3, dtype=DOUBLE, generator=generator),
        torch.randn(2, n, dtype=DOUBLE, generator=generator),
    )
    form = ImplicitForm(Sparse(A.to_sparse()) if sparse else A, B, C, bias=B[:, 0], labels=["all"])
    layered, u = block_triangular(form), inputs(form)
    assert is_triangular(layered, strictly=True) and not layered.order.loops
    assert len(layered.partition) <= layers and layered.sizes == form.sizes
    same(layered(u), evaluate(form, u))
    count = len(layered.partition)
    assert layered.labels == (("all",) if count == 1 else tuple(f"all[{k}]" for k in reversed(range(count))))


def test_loops_are_cut_out():
    A = torch.zeros(7, 7, dtype=DOUBLE)
    A[0, 1] = A[1, 0] = 0.5  # a loop of two
    A[2, 0] = A[3, 2] = 1.5  # a chain behind it
    A[4, 4] = -0.5  # a loop of one
    A[5, 6] = 1.0  # apart
    form = ImplicitForm(A, torch.randn(7, 3, dtype=DOUBLE), torch.randn(2, 7, dtype=DOUBLE), activation="tanh")
    layered, u = block_triangular(form), inputs(form)
    assert is_triangular(layered)
    assert sorted(system.A.shape[0] for system in layered.order.loops) == [1, 2]
    assert sorted(layered.partition) == [1, 1, 1, 2, 2]  # 6, 4, 3, then 2 with 5, and the loop of 0 and 1
    same(evaluate(layered, u), evaluate(form, u))
    same_forms(block_triangular(layered), layered, atol=0.0)


def test_loops_across_blocks_and_windows():
    inner, outer = 0.2 * torch.rand(6, 4, dtype=DOUBLE), 0.2 * torch.rand(4, 6, dtype=DOUBLE)
    inner[:3], outer[:, :3] = 0, 0  # the first window of three neither reads nor is read
    own = torch.zeros(6, 6, dtype=DOUBLE)
    own[0, 4] = 0.1  # but for a state of the second window
    A = Block((6, 4), (6, 4), {(0, 1): Dense(inner), (1, 0): Dense(outer), (0, 0): Dense(own)})
    B, C = torch.randn(10, 3, dtype=DOUBLE), torch.randn(2, 10, dtype=DOUBLE)
    form = ImplicitForm(A, B, C, activation=["group_sort(3)", "tanh"], labels=["sort", "tanh"])
    layered, u = block_triangular(form), inputs(form)
    assert layered.partition[0] == 3 and sorted(layered.partition[1:]) == [3, 4]
    assert layered.labels[0] == "sort[1]" and set(layered.labels[1:]) == {"sort[0]", "tanh"}
    assert [system.A.shape[0] for system in layered.order.loops] == [7]
    same(evaluate(layered, u), evaluate(form, u))


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_networks_become_triangular_again(kind):
    form = series(KINDS[kind](3, 2, 0), dense(2, 3, 1), pooled(3, 2, 2))
    order = [int(k) for k in torch.randperm(len(form.partition))]
    layered, u = block_triangular(permute(form, order)), inputs(form)
    assert is_triangular(layered, strictly=not layered.order.loops)
    assert len(layered.order.loops) == (kind in ("loop", "low_rank"))
    same(evaluate(layered, u), evaluate(form, u))
    assert layered.labels[0] == "pool"
    if kind != "sparse":  # whose states are split
        same_forms(block_triangular(form), form, atol=0.0)


def test_float32_keeps_every_bit():
    form = add(dense(3, 2, 0), pooled(3, 2, 0)).to(torch.float32)
    moved = permute(form, (2, 0, 3, 1))
    u = torch.randn(4, 3)
    torch.testing.assert_close(moved(u), form(u), rtol=1e-6, atol=1e-6)
    assert moved.dtype == torch.float32
