"""The counter-based generator: against Python integers, for uniformity, and for independence of its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mantissa.rollout.sampling import stream_keys, uniforms
from mantissa.splitmix import GOLDEN, mix
from naive_engine import reference_uniform


def table(seeds: range, samples: range, positions: range) -> np.ndarray:
    """Uniforms of every (seed, sample, position)."""
    pairs = [(seed, sample) for seed in seeds for sample in samples]
    keys = stream_keys([seed for seed, _ in pairs], [sample for _, sample in pairs])
    u = uniforms(keys.unsqueeze(1), torch.arange(positions.start, positions.stop).unsqueeze(0))
    return u.numpy().reshape(len(seeds), len(samples), len(positions))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 + 5, -(2**63)])
def test_equals_the_same_hash_in_python_integers(seed: int) -> None:
    keys = stream_keys([seed] * 3, [0, 1, 1000])
    for position in (0, 1, 63, 100_000):
        got = uniforms(keys, torch.full((3,), position)).tolist()
        assert got == [reference_uniform(seed, sample, position) for sample in (0, 1, 1000)]


def test_published_splitmix64_sequence() -> None:
    """The mixing function alone, against the first words of SplitMix64 from state 0, as published."""
    words = mix(torch.arange(1, 4) * GOLDEN).tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "samples", "positions"])
def test_uniform_and_uncorrelated_along_each_axis(axis: int) -> None:
    """Chi-square of 64 bins, and of pairs of neighbours in 16 x 16 bins: both within 5 sigma of their mean."""
    u = table(range(40), range(40), range(40))
    assert 0.0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1.0
    observed = np.bincount((u.ravel() * 64).astype(int), minlength=64)
    expected = u.size / 64
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi2 - 63) < 5 * np.sqrt(2 * 63)

    first, second = (np.delete(u, drop, axis=axis) for drop in (-1, 0))
    pairs = np.bincount((first.ravel() * 16).astype(int) * 16 + (second.ravel() * 16).astype(int), minlength=256)
    expected = first.size / 256
    chi2 = ((pairs - expected) ** 2 / expected).sum()
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(first.size)


def test_low_bits_are_as_good_as_high_ones() -> None:
    """Each of the 52 bits is set half of the time: 5 sigma."""
    u = table(range(10), range(10), range(200)).ravel()
    bits = (u * 2.0**52).astype(np.int64)
    for bit in range(52):
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size), bit


def test_no_two_streams_meet() -> None:
    u = table(range(30), range(30), range(50))
    assert len(np.unique(u)) == u.size
