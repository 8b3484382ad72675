"""Positions to randomness: a slice of the endless stream is what the whole stream holds there, epoch by epoch."""

from __future__ import annotations

import hashlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.rl.seeds import derive_seed, generator, stream_slice


@settings(deadline=None)
@given(population=st.integers(1, 40), start=st.integers(0, 200), count=st.integers(0, 100), seed=st.integers(0, 9))
def test_any_slice_is_the_long_streams(population: int, start: int, count: int, seed: int) -> None:
    epochs = -(-(start + count) // population) if start + count else 0
    long: list[int] = []
    for epoch in range(epochs):  # an independent writing of the stream: whole epochs, one after another
        digest = hashlib.sha256(f"{seed}/prompts/{epoch}".encode()).digest()
        shuffled = torch.randperm(
            population, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
        )
        long += shuffled.tolist()
    assert stream_slice(population, start, count, seed, "prompts") == long[start : start + count]


def test_each_epoch_holds_everything_once_in_an_order_of_its_own() -> None:
    stream = stream_slice(50, 0, 200, 3, "prompts")
    epochs = [stream[i : i + 50] for i in range(0, 200, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_purposes_and_seeds_have_streams_of_their_own() -> None:
    names = [(0, "prompts"), (1, "prompts"), (0, "update"), (0, "prompts", 0), (0, 0, "prompts")]
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert all(0 <= derive_seed(*name) < 2**63 for name in names)
    draws = {tuple(torch.randint(1000, (4,), generator=generator(*name)).tolist()) for name in names}
    assert len(draws) == len(names)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, "rollout", 1) == 8911054625556009685
