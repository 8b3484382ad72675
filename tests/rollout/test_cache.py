"""The packed cache against a dictionary of rows, under random growth, shrinkage, admission and moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mantissa.model import ModelConfig
from mantissa.rollout.generation import KVCache

LAYERS, HEADS, SIZE, SLOTS = 2, 2, 4, 5
CONFIG = ModelConfig("llama", 8, 16, 8, LAYERS, 4, HEADS, SIZE)


def random_prompts(generator: torch.Generator, prompts: int, length: int) -> torch.Tensor:
    return torch.randn(2, LAYERS, prompts, HEADS, length, SIZE, generator=generator)


def check(cache: KVCache, rows: dict[int, list[torch.Tensor]], count: int) -> None:
    """Every position of every row in use is what was written last, in both blocks of every layer."""
    for layer in range(LAYERS):
        for which, block in enumerate(cache._views_NKSD[2 * layer : 2 * layer + 2]):
            assert block.isfinite().all()
            for row in range(count):
                written = torch.stack([kv[which, layer] for kv in rows[row]], dim=1)
                assert torch.equal(block[row, :, : written.shape[1]], written)


@pytest.mark.parametrize("seed", range(2))
def test_equals_a_dictionary_of_rows(seed: int) -> None:
    generator, draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    cache = KVCache(CONFIG, SLOTS, torch.float32, torch.device("cpu"))
    rows: dict[int, list[torch.Tensor]] = {}
    packings = set()
    for _ in range(80):
        count, action = len(rows), draw.choice(["admit", "append", "append", "append", "finish"])
        if action == "admit" and count < SLOTS:
            lengths = draw.integers(1, 40, size=2)
            kv = random_prompts(generator, 2, int(lengths.max()))
            prompt = int(draw.integers(2))
            longest = max([int(lengths.max()), *(len(row) + 1 for row in rows.values())])
            cache.fit(longest, count + 1)
            cache.admit(torch.tensor([count]), kv, torch.tensor([prompt]))
            rows[count] = [kv[:, :, prompt, :, position] for position in range(int(lengths[prompt]))]
        elif action == "append" and count:
            for _ in range(int(draw.integers(1, 20))):
                positions = torch.tensor([len(rows[row]) for row in range(count)])
                cache.fit(int(positions.max()) + 1, count)
                places = cache.places(positions)
                step = random_prompts(generator, count, 1)
                for layer in range(LAYERS):
                    keys, values = cache.append(layer, step[0, layer], step[1, layer], places)
                    assert keys.shape == values.shape == (count, HEADS, cache.length, SIZE)
                    assert keys.is_contiguous()  # packed: what a step reads lies in one piece
                for row in range(count):
                    rows[row].append(step[:, :, row, :, 0])
        elif action == "finish" and count:
            leaving = int(draw.integers(count))
            if leaving != count - 1:
                cache.move(torch.tensor([count - 1]), torch.tensor([leaving]))
                rows[leaving] = rows[count - 1]
            del rows[count - 1]
        check(cache, rows, len(rows))
        packings.add(cache.length)
    assert len(packings) > 3


def test_packing_follows_the_longest_row() -> None:
    cache = KVCache(CONFIG, SLOTS, torch.float32, torch.device("cpu"))
    lengths = []
    for wanted in (1, 16, 17, 100, 90, 80, 60, 3):
        cache.fit(wanted, 1)
        lengths.append(cache.length)
    assert lengths == [16, 16, 32, 112, 112, 80, 80, 16]


def test_memory_is_used_again() -> None:
    """Once every block has been as long as the longest, growing again allocates nothing."""
    cache = KVCache(CONFIG, SLOTS, torch.float32, torch.device("cpu"))
    for length in (16, 64, 128, 16, 128):
        cache.fit(length, SLOTS)
    before = {flat.data_ptr() for flat in [*cache._flat, cache._spare]}
    for length in (16, 64, 128, 32, 100):
        cache.fit(length, SLOTS)
    assert {flat.data_ptr() for flat in [*cache._flat, cache._spare]} == before


def test_clear_forgets_what_was_not_finite() -> None:
    cache = KVCache(CONFIG, SLOTS, torch.float32, torch.device("cpu"))
    cache.fit(16, 1)
    cache.admit(torch.tensor([0]), torch.full((2, LAYERS, 1, HEADS, 3, SIZE), float("inf")), torch.tensor([0]))
    cache.clear()
    cache.fit(16, 1)
    check(cache, {0: [torch.zeros(2, LAYERS, HEADS, SIZE)] * 16}, 1)


def test_a_restart_packs_as_a_new_cache_does_and_keeps_the_memory() -> None:
    """Otherwise the width that attention sums over would depend on what was sampled before."""
    cache = KVCache(CONFIG, 3, torch.float32, torch.device("cpu"))
    cache.fit(60, 2)
    cache.fit(50, 2)
    assert cache.length == 64  # 50 is too near to be packed for
    cache.restart()
    cache.fit(50, 0)
    assert cache.length == 64
    addresses = {flat.data_ptr() for flat in (*cache._flat, cache._spare)}
    cache.restart()
    cache.fit(41, 0)
    assert cache.length == 48
    assert {flat.data_ptr() for flat in cache._flat} <= addresses
