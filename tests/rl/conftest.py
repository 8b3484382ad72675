"""A run small enough for tests: 27k parameters, seconds from start to report."""

from __future__ import annotations

from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "name": "small",
    "steps": 4,
    "device": "cpu",
    "precision": "fp16",
    "model": {
        "fresh": {
            "hidden_size": 32,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
            "intermediate_size": 64,
            "max_positions": 64,
        },
        "tokenizer": "characters",
    },
    "task": {
        "kind": "running_sum",
        "min_digits": 1,
        "max_digits": 3,
        "train_size": 200,
        "heldout_size": 32,
        "warm_start_size": 512,
    },
    "warm_start": {"steps": 40, "batch": 32, "lr": 3e-3, "evaluate_every": 20, "problems": 16},
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 6, "slots": 16},
    "algorithm": {"correction": "token_tis"},
    "optimizer": {"lr": 1e-3, "updates_per_batch": 2},
    "evaluation": {"every": 2, "problems": 16, "samples": 2},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def small() -> dict[str, Any]:
    """Plain values of a small run's recipe; a fresh copy."""
    import copy

    return copy.deepcopy(SMALL)
