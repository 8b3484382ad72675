"""The warm start learns from solutions, stops where it should, and is a function of the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.warm_start import warm_start

Rows = list[dict[str, Any]]
# Running sums mod 2 of up to four digits, and a policy that learns them in a second.
LEARNABLE = (
    "task.max_digits=4",
    "task.modulus=2",
    "task.warm_start_size=4096",
    "model.fresh.hidden_size=64",
    "model.fresh.heads=4",
    "warm_start.lr=5e-3",
    "warm_start.batch=64",
    "warm_start.problems=32",
)


@pytest.fixture
def warm(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Any]:
    """Runs the small recipe's warm start; returns the parts after it and the rows it reported."""

    def run(*overrides: str) -> tuple[Parts, Rows]:
        config = configure(*overrides)
        parts, rows = parts_of(config), []
        assert config.warm_start is not None
        warm_start(parts, config.warm_start, parts.sampler.params(6, 1.0), rows.append)
        return parts, rows

    return run


def test_it_learns_and_evaluates_when_asked(warm: Callable[..., Any]) -> None:
    parts, rows = warm(*LEARNABLE, "warm_start.steps=210", "warm_start.evaluate_every=100")
    assert [row["step"] for row in rows] == [100, 200, 210]
    assert rows[0]["warm_start/loss"] > 2 * rows[-1]["warm_start/loss"]
    assert rows[-1]["warm_start/accuracy"] > rows[0]["warm_start/accuracy"] + 0.1
    assert parts.learner.version == 0  # the warm start's updates are not RL's, nor is its optimiser
    assert parts.learner.step.optimizer_tensors() == {}


def test_it_stops_at_the_target(warm: Callable[..., Any]) -> None:
    _, rows = warm(*LEARNABLE, "warm_start.steps=300", "warm_start.target_accuracy=0.3", "warm_start.evaluate_every=10")
    accuracies = [row["warm_start/accuracy"] for row in rows]
    assert accuracies[-1] >= 0.3
    assert rows[-1]["step"] < 300
    assert all(accuracy < 0.3 for accuracy in accuracies[:-1])


def test_the_first_loss_is_that_of_a_uniform_guess_and_a_plain_loop(
    warm: Callable[..., Any], configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]
) -> None:
    _, rows = warm("precision=fp32", "warm_start.steps=1")
    parts = parts_of(configure("precision=fp32"))
    from mantissa.rl.seeds import stream_slice

    solved, letters = parts.task.split("warm_start"), parts.task.alphabet
    assert letters is not None
    logps: list[torch.Tensor] = []
    for index in stream_slice(len(solved), 0, 32, 0, "warm_start"):
        prompt = [letters.index(c) + 2 for c in str(solved[index].prompt)]
        answer = [letters.index(c) + 2 for c in str(solved[index].solution)] + [1]
        hidden = parts.model(torch.tensor([prompt + answer]), parts.learner.kernels)
        distribution = parts.model.logits(hidden[0], parts.learner.kernels).double().log_softmax(-1)
        logps += [distribution[len(prompt) + j - 1, token] for j, token in enumerate(answer)]
    assert rows[0]["warm_start/loss"] == pytest.approx(-float(torch.stack(logps).detach().mean()), rel=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_others(warm: Callable[..., Any]) -> None:
    short = ("warm_start.steps=8", "warm_start.evaluate_every=4", "optimizer.micro_batch_tokens=64")
    (first, rows), (again, same) = warm(*short), warm(*short)
    other, _ = warm(*short, "seed=1")
    assert rows == same
    assert all(torch.equal(weight, again.learner.weights[name]) for name, weight in first.learner.weights.items())
    assert any(not torch.equal(weight, other.learner.weights[n]) for n, weight in first.learner.weights.items())
