"""The KL to the reference in the learner: in the loss, in the reward, and measured, each against formulas by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from experiences import dry_update, learned, of_samples
from mantissa.algorithms import values
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.objective import weigh


@pytest.fixture
def build(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Parts]:
    def make(*overrides: str) -> Parts:
        options = ("precision=fp32", "optimizer.updates_per_batch=1", "model.fresh.initializer_range=0.2")
        parts = parts_of(configure(*options, "algorithm={reference: {}}", *overrides))
        parts.sampler.engine.sync(parts.learner.weights, 0)
        return parts

    return make


def sampled(parts: Parts) -> Experience:
    """Real completions, rewards of 0 and 1 (the last group's equal), a reference half a nat off."""
    result = parts.sampler.sample(parts.task.split("train", 4), 4, parts.sampler.params(6, 1.0), 0, 0, "test")
    draw = torch.Generator().manual_seed(1)
    rewards = [*torch.randint(0, 2, (12,), generator=draw).tolist(), 1, 1, 1, 1]
    experience = of_samples(result, rewards)
    experience = experience.with_learner(*parts.learner.score(experience))
    mask, old = experience.mask_BR, experience.old_logp_BR
    assert old is not None
    return replace(experience, ref_logp_BR=torch.where(mask, old + 0.5 * torch.randn(mask.shape, generator=draw), 0.0))


def log_r(experience: Experience, row: int) -> list[float]:
    """logp_ref - logp of a completion's tokens."""
    assert experience.old_logp_BR is not None
    assert experience.ref_logp_BR is not None
    count = int(experience.mask_BR[row].sum())
    return (experience.ref_logp_BR[row, :count].double() - experience.old_logp_BR[row, :count].double()).tolist()


ESTIMATE: dict[str, Callable[[float], float]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
SLOPE: dict[str, Callable[[float], float]] = {  # by logp, of which log r is minus that
    "k1": lambda x: 1.0,
    "k2": lambda x: -x,
    "k3": lambda x: 1 - math.exp(x),
}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_the_loss_it_adds_its_gradient_to_every_completions(build: Callable[..., Parts], kind: str) -> None:
    """By the chain rule in float64: d loss / d logp of each token is -A + coefficient * slope, over the token count."""
    kl = f"algorithm.kl={{where: loss, estimator: {kind}, coefficient: 0.7}}"
    parts = build(kl)
    experience = sampled(parts)
    sequences = experience
    tokens = int(sequences.mask_BR.sum())
    slopes = []
    for row in range(16):
        group = experience.reward_B[row - row % 4 : row - row % 4 + 4].tolist()
        advantage = float(experience.reward_B[row]) - sum(group) / 4
        slopes += [(-advantage + 0.7 * SLOPE[kind](x)) / tokens for x in log_r(experience, row)]
    logp_N = parts.learner.logp(sequences, parts.learner.kernels)
    expected = dict(
        zip(
            dict(parts.model.named_parameters()),
            torch.autograd.grad(logp_N, list(parts.model.parameters()), torch.tensor(slopes)),
            strict=True,
        )
    )
    for budget in (1, 25, 16384):
        learner = build(kl, f"optimizer.micro_batch_tokens={budget}").learner
        found, update = dry_update(learner, experience)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 2e-5, f"{budget}, {name}: {float(error):.1e}"
        penalty = sum(0.7 * ESTIMATE[kind](x) / tokens for row in range(16) for x in log_r(experience, row))
        tallies = values(update.tallies)
        assert float(tallies["reference/penalty"]) == pytest.approx(penalty, rel=1e-5)
        assert update.trained_tokens == tokens  # the group without an advantage too


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo"])
def test_in_the_reward_it_comes_before_the_advantages(build: Callable[..., Parts], kind: str, advantage: str) -> None:
    parts = build(
        f"algorithm.kl={{where: reward, estimator: {kind}, coefficient: 0.2}}", f"algorithm.advantage={advantage}"
    )
    experience = sampled(parts)
    taken = [0.2 * sum(ESTIMATE[kind](x) for x in log_r(experience, row)) for row in range(16)]
    shaped = [float(r) - t for r, t in zip(experience.reward_B, taken, strict=True)]
    _, update = dry_update(parts.learner, experience)
    advantage_B, *_ = weigh(experience, parts.learner.algorithm).weighed
    for row in range(16):
        group = shaped[row - row % 4 : row - row % 4 + 4]
        expected = shaped[row] - sum(group) / 4
        expected *= 4 / 3 if advantage == "rloo" else 1
        assert float(advantage_B[row]) == pytest.approx(expected, abs=2e-6)
    tallies = {name: float(value) for name, value in values(update.tallies).items()}
    assert tallies["reference/penalty"] == pytest.approx(sum(taken), rel=1e-5)
    assert tallies["advantage/degenerate_group_fraction"] == 0  # equal rewards, but not equally near the reference
    assert tallies["reward/mean"] == pytest.approx(float(experience.reward_B.mean()))  # the task's, not the shaped one


def test_alone_a_reference_is_measured_and_changes_nothing(build: Callable[..., Parts]) -> None:
    parts = build()
    experience = sampled(parts)
    plain = replace(experience, ref_logp_BR=None)
    with_it, update = dry_update(parts.learner, experience)
    without, bare = dry_update(build().learner, plain)
    assert all(torch.equal(gradient, without[name]) for name, gradient in with_it.items())
    every = [x for row in range(16) for x in log_r(experience, row)]
    tallies = {name: float(value) for name, value in values(update.tallies).items()}
    assert tallies["reference/kl"] == pytest.approx(-sum(every) / len(every), rel=1e-9)
    assert tallies["reference/k3_kl"] == pytest.approx(sum(ESTIMATE["k3"](x) for x in every) / len(every), rel=1e-9)
    assert not [name for name in bare.tallies if name.startswith("reference/")]


def test_what_is_reported_is_of_the_weights_before_the_update(build: Callable[..., Parts]) -> None:
    """With the penalty in the loss and two updates, the second one's own distance is another: not the one reported."""
    parts = build("algorithm.kl.coefficient=0.1", "optimizer.updates_per_batch=2", "optimizer.lr=0.05")
    experience = sampled(parts)
    update = learned(parts.learner, experience)
    every = [x for row in range(16) for x in log_r(experience, row)]
    assert float(values(update.tallies)["reference/kl"]) == pytest.approx(-sum(every) / len(every), rel=1e-9)
