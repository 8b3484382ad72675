"""One step a batch: the scoring's forward serves the update, to the same weights, and only where it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from experiences import experience_of, learned
from mantissa.algorithms import values
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner, Update

Build = Callable[..., Learner]


@pytest.fixture
def learner(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Build:
    def build(*overrides: str) -> Learner:
        base = ("optimizer.updates_per_batch=1", "model.fresh.initializer_range=0.2", "model.fresh.layers=1")
        return parts_of(configure(*base, *overrides)).learner

    return build


def experience(alive: int = 10, seed: int = 5) -> Experience:
    """Twelve completions in groups of two; ``alive`` of them have an advantage. Tokens below 10."""
    from mantissa.rollout.types import Completion

    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(2, 10, (count,), generator=draw).tolist()

    prompts = [tokens(2, 5) for _ in range(6)]
    groups = []
    for _ in prompts:
        drawn = [tokens(1, 6) for _ in range(2)]
        groups.append([Completion(tuple(t), torch.full((len(t),), -2.0), "length", 0) for t in drawn])
    rewards = [float(i % 2) if i < alive else 1.0 for i in range(12)]
    return experience_of(prompts, groups, rewards)


def learn(learner: Learner, forget: bool, batch: Experience | None = None) -> tuple[Update, dict[str, Tensor], int]:
    """Score and update; the weights, and how many forwards the update did."""
    scored = batch or experience()
    scored = scored.with_learner(*learner.score(scored))
    if forget:
        learner._kept = None
    return update_counted(learner, scored)


def update_counted(learner: Learner, scored: Experience) -> tuple[Update, dict[str, Tensor], int]:
    calls: list[Any] = []
    forward = learner.forward

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return forward(*arguments)

    learner.forward = counted  # type: ignore[method-assign]
    update = learned(learner, scored)
    return update, {n: p.detach().clone() for n, p in learner.model.named_parameters()}, len(calls)


def assert_same_weights(got: dict[str, Tensor], want: dict[str, Tensor], atol: float) -> None:
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_the_update_is_that_of_a_forward_of_its_own(learner: Build, loss: str) -> None:
    options = ("precision=fp32", f"algorithm.loss={loss}", "optimizer.eps=1e-3")  # eps: Adam divides by what is noise
    before = {n: p.detach().clone() for n, p in learner(*options).model.named_parameters()}
    kept, got, forwards = learn(learner(*options), forget=False)
    alone, want, own_forwards = learn(learner(*options), forget=True)
    assert (forwards, own_forwards) == (0, 1)
    assert kept.outcomes[0].grad_norm == pytest.approx(alone.outcomes[0].grad_norm, rel=1e-5)
    assert_same_weights(got, want, 1e-7)
    assert max(float((got[n] - before[n]).abs().max()) for n in before) > 1e-5  # there was something to compare
    figures = [{n: float(v) for n, v in values(update.tallies).items()} for update in (kept, alone)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6)


def test_an_overflow_is_retried_with_a_forward_of_its_own(learner: Build) -> None:
    options = ("precision=fp16", "loss_scaling={initial: 1.0e+9, retries: 30}", "optimizer.eps=1e-3")
    kept, got, forwards = learn(learner(*options), forget=False)
    alone, want, own_forwards = learn(learner(*options), forget=True)
    assert kept.outcomes[0].kind == "retried"
    assert kept.outcomes[0].overflows == alone.outcomes[0].overflows == forwards == own_forwards - 1
    assert_same_weights(got, want, 1e-5)  # the graph served a try that overflowed; the rest is the same forward


@pytest.mark.parametrize(
    ("overrides", "alive"),
    [(("optimizer.updates_per_batch=2",), 10), (("optimizer.micro_batch_tokens=20",), 10), ((), 8)],
    ids=["two updates", "several micro-batches", "two thirds alive"],
)
def test_it_is_not_used_where_it_does_not_pay(learner: Build, overrides: tuple[str, ...], alive: int) -> None:
    _, _, forwards = learn(learner("precision=fp32", *overrides), forget=False, batch=experience(alive))
    assert forwards >= 1


def test_a_graph_of_other_weights_or_another_batch_is_not_used(learner: Build) -> None:
    mine = learner("precision=fp32")
    first, second = experience(seed=5), experience(seed=6)
    first = first.with_learner(*mine.score(first))
    second = second.with_learner(*mine.score(second))
    assert update_counted(mine, first)[2] == 1  # the graph is of ``second``
    other = learner("precision=fp32")
    first = first.with_learner(*other.score(first))
    other.step.updates += 1  # as if a step had been taken since
    assert update_counted(other, first)[2] == 1


def test_scores_carry_no_gradient_and_the_graph_is_let_go(learner: Build) -> None:
    mine = learner("precision=fp32")
    scored = experience()
    logp_BR, entropy_BR = mine.score(scored)
    assert mine._kept is not None
    assert mine._kept.logp_BR.requires_grad
    assert torch.equal(mine._kept.logp_BR.detach(), logp_BR)
    assert not logp_BR.requires_grad
    assert not entropy_BR.requires_grad
    learned(mine, scored.with_learner(logp_BR, entropy_BR))
    assert mine._kept is None
