"""PPO with a critic in a run: values and gradient against float64, micro-batches, resume, warm-up, what it explains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiences import dry_update, hugging_face, naive_sequences, of_samples
from mantissa.base.errors import MantissaError
from mantissa.rl import resume
from mantissa.rl.assemble import Parts
from mantissa.rl.experience import Scored
from mantissa.rl.learner import weigh
from mantissa.rl.terms.critic import Critic
from mantissa.runs.directory import RunDirectory
from small_run import configure, contents, stopped

Train = Callable[..., RunDirectory]
GAE = "algorithm={advantage: gae, loss: ppo_clip, critic: {lr: 1.0e-3, lam: 0.9}}"
FP32 = ("precision=fp32", "warm_start=null", "optimizer.updates_per_batch=1", GAE)


def drawn(parts: Parts) -> Scored:
    """Scored and weighed completions, under a value model whose output is not 0."""
    critic = parts.learner.term(Critic)
    with torch.no_grad():
        critic.model.value.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(4))
        critic.model.value.bias.fill_(0.1)
    result = parts.sampler.sample(parts.task.split("train", 5), 4, parts.sampler.params(6, 1.0), 0, 0, "test")
    experience = of_samples(result, [float(number % 3 == 0) for number in range(len(result))])
    experience = experience.with_learner(*parts.learner.score(experience))
    return weigh(experience.having(**critic.score(experience)), parts.learner.algorithm)


def test_values_and_gradient_are_those_of_float64(made: Callable[..., Parts], tmp_path: Path) -> None:
    parts = made(*FP32, "optimizer.max_grad_norm=.inf")
    critic = parts.learner.term(Critic)
    critic.take(parts.learner.weights)
    experience = drawn(parts)
    oracle: Any = hugging_face(parts, tmp_path / "hf")
    weight, bias = (x.detach().double().clone().requires_grad_() for x in critic.model.value.parameters())
    values, seen = [], []
    for row, (states, _, _) in enumerate(naive_sequences(oracle, experience)):
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        values.append(states[prompt - 1 : length - 1] @ weight[0] + bias)
        seen.append(experience.column("value_BR")[row, : length - prompt])
    flat = torch.cat(values)
    np.testing.assert_allclose(torch.cat(seen).double(), flat.detach(), atol=1e-5)
    target = experience.column("target_BR")[experience.mask_BR].double()
    (0.5 * (flat - target).square().mean()).backward()  # at the old values the clip holds nothing

    found: dict[str, torch.Tensor] = {}

    def run(backward: Callable[[float], Any]) -> Any:
        critic.step.optimizer.zero_grad(set_to_none=True)
        backward(1.0)
        found.update({name: p.grad for name, p in critic.step.parameters.items() if p.grad is not None})
        from mantissa.training import StepOutcome

        return StepOutcome("stepped", 0, 1.0, 1.0, 0.0, 0.0)

    critic.step.run = run  # type: ignore[method-assign]
    critic.learn(experience, [experience.rows])
    np.testing.assert_allclose(found["value.weight"].double(), weight.grad, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(found["value.bias"].double(), bias.grad, atol=1e-5, rtol=1e-4)
    for name, parameter in oracle.named_parameters():
        if parameter.grad is not None and f"body.{name}" in found:
            np.testing.assert_allclose(
                found[f"body.{name}"].double(), parameter.grad, atol=1e-5, rtol=1e-3, err_msg=name
            )


def test_the_split_into_micro_batches_does_not_show(made: Callable[..., Parts]) -> None:
    grown = []
    for more in ((), ("optimizer.micro_batch_tokens=20",)):
        parts = made(*FP32, *more)
        critic = parts.learner.term(Critic)
        critic.take(parts.learner.weights)
        experience = drawn(parts)
        policy = dry_update(parts.learner, experience)[0]
        row = critic.learn(experience, [experience.rows])
        grown.append((policy, critic.weights, row))
    for one, other in zip(*(each[:2] for each in grown), strict=True):
        for name, tensor in one.items():
            np.testing.assert_allclose(other[name], tensor, atol=2e-5, rtol=1e-3, err_msg=name)
    assert abs(grown[0][2]["critic/loss"] - grown[1][2]["critic/loss"]) < 1e-5


def test_resumed_it_has_the_same_bits(train: Train, tmp_path: Path) -> None:
    run = train("precision=fp16", "loss_scaling={growth_interval: 2, initial: 1048576, retries: 30}",
                "warm_start.steps=6", "warm_start.evaluate_every=6", "task.reward=prefix", GAE)  # fmt: skip
    names = {path.name for path in (run.path / "checkpoints" / "step-2").iterdir()}
    assert {"critic.safetensors", "critic_optimizer.safetensors"} <= names
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)
    rows = run.metrics.read()
    assert rows[0]["critic/value"] == 0
    assert rows[-1]["critic/value"] != 0
    assert all("critic/grad_norm" in row for row in rows)


def test_beside_adapters_it_has_every_weight_of_its_own(train: Train, tmp_path: Path) -> None:
    """It begins as the merged policy and trains whole; resumed it has the same bits."""
    run = train("precision=fp16", "warm_start.steps=6", "warm_start.evaluate_every=6", "task.reward=prefix", GAE,
                "model.lora={rank: 2, alpha: 4}", "optimizer.lr=1e-3")  # fmt: skip
    before, after = (load_file(run.path / "checkpoints" / f"step-{n}" / "critic.safetensors") for n in (2, 4))
    assert not any("lora" in name for name in before)
    assert all(not torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(run.path)


def test_it_begins_as_the_merged_policy(made: Callable[..., Parts]) -> None:
    parts = made(*FP32, "model.lora={rank: 2, alpha: 4}")
    learner = parts.learner
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if "lora" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    critic = learner.term(Critic)
    critic.take(learner.weights)
    for name, weight in critic.weights.items():
        if name.startswith("body."):
            assert torch.equal(weight, learner.weights[name.removeprefix("body.")]), name
            assert not torch.equal(weight, torch.zeros_like(weight))


def test_in_its_warm_up_the_policy_stands_still(train: Train) -> None:
    quick = ("steps=3", "precision=fp32", "warm_start.steps=6", "warm_start.evaluate_every=6", "evaluation=null")
    quick += ("task.reward=prefix",)
    rows = train(*quick, GAE, "algorithm.critic.warmup=2").metrics.read()
    assert [row["optim/updates"] for row in rows] == [0, 0, 2]
    assert rows[0]["critic/loss"] > 0


def test_exact_kernels_and_one_sample_a_prompt(train: Train) -> None:
    quick = ("steps=2", "warm_start.steps=6", "warm_start.evaluate_every=6", "evaluation=null", "task.reward=prefix")
    rows = train(*quick, "precision={preset: bf16, kernels: exact}", GAE, "rollout.samples=1").metrics.read()
    assert all(row["exact/mismatched_tokens"] == 0 for row in rows)
    assert all(row["critic/skipped"] == 0 for row in rows)


def test_the_value_model_comes_to_explain_what_is_earned(train: Train) -> None:
    rows = train(
        "steps=24", "precision=bf16", "task.reward=prefix", "evaluation=null", "checkpoint.every=24",
        "rollout.prompts=16", "algorithm={advantage: gae, loss: ppo_clip, critic: {lr: 5.0e-3, warmup: 24}}",
    ).metrics.read()  # fmt: skip
    explained = [row["critic/explained"] for row in rows]
    assert sum(explained[-4:]) / 4 > sum(explained[:2]) / 2 + 0.1, explained


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(MantissaError, match=r"critic is the value model of advantage=gae: set algorithm\.critic"):
        configure("algorithm.advantage=gae")
    with pytest.raises(MantissaError, match="leave it out, or set advantage=gae"):
        configure("algorithm.critic={lr: 1.0e-3}")
    with pytest.raises(MantissaError, match=r"knows no reward of a response that kl\.where=reward could lower"):
        configure(
            "algorithm={advantage: gae, critic: {lr: 1.0e-3}, reference: {}, kl: {where: reward, coefficient: 1}}"
        )
