"""Counted draws: published words, places that do not depend on each other, and their distribution."""

import math

import pytest
import torch

from wellposed.models.noise import MASK, SIGNAL, STATE, draw_seed, normals, philox

# The known answers that Salmon et al. publish for Philox-4x32-10: counter, key, words.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEED = 1 << 62 | 123_456_789_012_345


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_known_answers(counter, key, words):
    found = philox(tuple(torch.tensor(word) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("count", [1, 4, 101])
def test_normals_of_chosen_samples_are_those_of_all(count):
    samples = torch.cat([torch.arange(300), torch.tensor([2**31 - 1])])
    whole, chosen = normals(SEED, samples, 7, SIGNAL, 101), torch.tensor([300, 2, 17])
    assert torch.equal(normals(SEED, samples[chosen], 7, SIGNAL, count), whole[chosen, :count])
    short = normals(SEED, samples, 7, SIGNAL, count, torch.float32)
    assert torch.equal(short, whole[:, :count].float())


def test_moments_and_neighbours():
    # Standard errors of N = 4e5 draws: 1/sqrt(N) of the mean and correlations, sqrt(2/N), sqrt(15/N), sqrt(96/N).
    draws = torch.stack([normals(SEED, torch.arange(500), step, STATE, 80) for step in range(10)]).double()
    error = draws.numel() ** -0.5
    for power, (mean, spread) in enumerate([(0, 1), (1, 2**0.5), (0, 15**0.5), (3, 96**0.5)], start=1):
        assert abs(float(draws.pow(power).mean()) - mean) < 4 * spread * error
    for dim in range(3):  # steps, samples, states
        pairs = draws.narrow(dim, 1, draws.shape[dim] - 1) * draws.narrow(dim, 0, draws.shape[dim] - 1)
        assert abs(float(pairs.mean())) < 4 * error * 1.1
    other = normals(SEED, torch.arange(500), 0, SIGNAL, 80)
    assert abs(float((other * draws[0]).mean())) < 4 / math.sqrt(other.numel())


def test_seeds_come_from_the_generator():
    first, second = (torch.Generator().manual_seed(0) for _ in range(2))
    seeds = [draw_seed(first) for _ in range(3)]
    assert seeds == [draw_seed(second) for _ in range(3)] and len(set(seeds)) == 3
    assert all(seed.bit_length() == 63 for seed in seeds)
