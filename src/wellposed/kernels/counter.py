"""Normal numbers that are functions of a seed and of places: Philox-4x32-10 and the Box-Muller transform.

A draw is named by its seed, its sample, its step, its site in the step and its number there, so that it does not
matter in which order and how often it is computed, on which device and for which samples at once.

Reference: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by in every round
ROUNDS, MASK = 10, 0xFFFFFFFF
INPUT, STATE, SIGNAL, SITES = range(4)  # where noise enters; a site is SITES times its number in a step and this

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(generator: torch.Generator | None) -> int:
    """Returns a seed, one draw of a generator; torch's own if None. All seeds have 63 bits.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> draw_seed(generator) == draw_seed(generator)
        False
    """
    device = None if generator is None else generator.device
    return 1 << 62 | int(torch.randint(1 << 62, (), generator=generator, device=device))


def philox(counter: Words, seed: int) -> Words:
    """Returns four words of 32 bits for every counter of four, in the integers of int64 tensors.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), 0)]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    low, high = seed & MASK, seed >> 32
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wraps; the bits are those of the product
        a, c = (second >> 32 & MASK) ^ b ^ low, (first >> 32 & MASK) ^ d ^ high
        b, d = second & MASK, first & MASK
        low, high = (low + WEYL[0]) & MASK, (high + WEYL[1]) & MASK
    return a, b, c, d


def normals(
    seed: int, samples: Tensor, step: int, site: int, count: int, dtype: torch.dtype = torch.float64
) -> Tensor:  # (B, count)
    """Returns standard normal numbers of some samples at one site of one step.

    Words ``w`` give uniform numbers ``(w + 1/2) / 2^32`` for radii and ``w / 2^32`` for angles, so that nothing
    lies beyond 6.8 standard deviations. Computed in float64 and then rounded.

    Args:
        seed: below 2^64.
        samples: numbers of the samples, ``(B,)``.
        step, site: when and where.
        count: how many a sample.
        dtype: of the result.

    Example:
        >>> all_of_them = normals(1, torch.arange(5), 0, STATE, 6)
        >>> torch.equal(all_of_them[3:, :2], normals(1, torch.arange(3, 5), 0, STATE, 2))
        True
    """
    number = torch.arange((count + 3) // 4, device=samples.device)
    when, where = torch.full_like(number, step), torch.full_like(number, site)
    a, b, c, d = philox((number, when, samples[:, None], where), seed)
    pairs = [part for radius, angle in ((a, b), (c, d)) for part in _box_muller(radius, angle)]
    return torch.stack(pairs, dim=-1).flatten(1)[:, :count].to(dtype)


def _box_muller(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    size = (-2 * torch.log((radius.double() + 0.5) / 2**32)).sqrt()
    turn = angle.double() * (2 * math.pi / 2**32)
    return size * torch.cos(turn), size * torch.sin(turn)
