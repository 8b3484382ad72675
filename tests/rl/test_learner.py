"""The learner against transformers in float64, sequence by sequence: log-probs, and the gradient of every loss.

The oracle shares no code with the learner: another implementation of the model, no padding, no micro-batches, formulas
written out per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiences import gradients, learned, sampled
from mantissa.model import save_model
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.rl.objective import weigh
from mantissa.rl.probes import Flushed
from mantissa.rl.warm_start import _supervised_step

ADVANTAGES: dict[str, Callable[[list[float]], list[float]]] = {
    "dr_grpo": lambda group: [r - sum(group) / len(group) for r in group],
    "grpo": lambda group: [(r - sum(group) / len(group)) / (float(torch.tensor(group).std()) + 1e-6) for r in group],
    "rloo": lambda group: [r - (sum(group) - r) / (len(group) - 1) for r in group],
}
ADVANTAGES["reinforce_pp"] = ADVANTAGES["grpo"]  # of the batch as one group
LOSSES = [
    ("ppo_clip", "token_mean", "dr_grpo", "token_tis"),
    ("ppo_clip", "seq_mean_token_mean", "grpo", "none"),
    ("ppo_clip", "seq_mean_token_sum_norm", "rloo", "icepop"),
    ("reinforce", "token_mean", "rloo", "sequence_is"),
    ("reinforce", "seq_mean_token_sum_norm", "dr_grpo", "sequence_mis"),
    ("reinforce", "token_mean", "reinforce_pp", "sequence_rejection"),
    ("dapo", "token_mean", "grpo", "sequence_rejection"),
    ("gspo", "seq_mean_token_mean", "grpo", "sequence_mis"),
    ("gspo", "seq_mean_token_mean", "grpo", "bypass"),
    ("cispo", "token_mean", "reinforce_pp", "token_tis"),
    ("cispo", "seq_mean_token_sum_norm", "dr_grpo", "bypass"),
    ("ppo_clip", "token_mean", "dr_grpo", "bypass"),
]


@pytest.fixture
def learn(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Parts]:
    """Parts of the small recipe, one optimiser step a batch, with weights large enough to have opinions."""

    def build(*overrides: str) -> Parts:
        parts = parts_of(configure("optimizer.updates_per_batch=1", "model.fresh.initializer_range=0.2", *overrides))
        parts.sampler.engine.sync(parts.learner.weights, 0)
        return parts

    return build


def oracle(parts: Parts, folder: Path) -> Any:
    """The same policy in transformers, in float64."""
    from transformers import AutoModelForCausalLM

    save_model(parts.model, parts.tokenizer, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def naive_logps(model: Any, experience: Experience, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of each completion's tokens, and entropies: one unpadded sequence at a time."""
    logps, entropies = [], []
    sequences = experience
    for row in range(len(sequences)):
        prompt, length = int(sequences.prompt_length_B[row]), int(sequences.length_B[row])
        tokens = sequences.tokens_BT[row, :length]
        distribution = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        logps.append(torch.stack([distribution[i - 1, tokens[i]] for i in range(prompt, length)]))
        entropies.append(-(distribution.exp() * distribution).sum(-1)[prompt - 1 : length - 1])
    return logps, entropies


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        error = (gradient.double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_loop_over_sequences(
    learn: Callable[..., Parts], tmp_path: Path, temperature: float
) -> None:
    parts = learn("precision=fp32", "optimizer.micro_batch_tokens=30", f"rollout.temperature={temperature}")
    experience = sampled(parts)
    with torch.no_grad():
        logps, entropies = naive_logps(oracle(parts, tmp_path / "hf"), experience, temperature)
    mask = experience.mask_BR
    assert experience.old_logp_BR is not None
    assert experience.entropy_BR is not None
    assert len({len(logp) for logp in logps}) > 1  # padded, and padding is 0
    assert (experience.old_logp_BR[~mask] == 0).all()
    assert (experience.entropy_BR[~mask] == 0).all()
    torch.testing.assert_close(experience.old_logp_BR[mask].double(), torch.cat(logps), rtol=0, atol=2e-6)
    torch.testing.assert_close(experience.entropy_BR[mask].double(), torch.cat(entropies), rtol=0, atol=4e-6)


def naive_term(loss: str, logp: Tensor, anchor: Tensor, j: int, a: float) -> Tensor:
    """Minus the loss of token j of a sequence, without weight and scale."""
    if loss == "reinforce":
        return a * logp[j]
    log_ratio = (logp - anchor).mean() if loss == "gspo" else logp[j] - anchor[j]
    ratio = log_ratio.exp()
    if loss == "cispo":
        return a * logp[j] * min(float(ratio.detach()), 1.28)
    low, high = {"ppo_clip": (0.8, 1.2), "dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}[loss]
    value = min(ratio * a, ratio.clamp(low, high) * a)
    return max(value, torch.tensor(10.0 * a, dtype=torch.float64)) if loss == "dapo" and a < 0 else value


def naive_loss(model: Any, experience: Experience, loss: str, aggregation: str, kind: str, corrected: str) -> Tensor:
    """The loss of a whole batch, written out token by token. theta is old, so but for bypass the ratio's value is 1."""
    logps, _ = naive_logps(model, experience)
    groups: dict[int, list[float]] = {}
    for group, reward in zip(experience.group_B.tolist(), experience.reward_B.tolist(), strict=True):
        groups.setdefault(0 if kind == "reinforce_pp" else group, []).append(reward)
    advantages = [a for group in groups.values() for a in ADVANTAGES[kind](group)]
    rollouts = [experience.rollout_logp_BR[row, : len(logp)].double() for row, logp in enumerate(logps)]
    products = [float((logp.detach() - x).sum().exp()) for logp, x in zip(logps, rollouts, strict=True)]
    kept = [corrected != "sequence_rejection" or 0.5 <= s <= 2.0 for s in products]
    assert corrected != "sequence_rejection" or len(set(kept)) == 2
    tokens = sum(len(logp) for logp, k in zip(logps, kept, strict=True) if k)
    total = torch.zeros((), dtype=torch.float64)
    for row, logp in enumerate(logps):
        s, anchor = products[row], rollouts[row] if corrected == "bypass" else logp.detach()
        for j in range(len(logp) if kept[row] else 0):
            r = math.exp(float(logp[j].detach() - rollouts[row][j]))
            weight = {
                "none": 1.0,
                "bypass": 1.0,
                "token_tis": min(r, 2.0),
                "icepop": r if 0.5 <= r <= 5.0 else 0.0,
                "sequence_is": s,
                "sequence_mis": s if s <= 3.0 else 0.0,
                "sequence_rejection": s,  # what is kept is at most 2 already
            }[corrected]
            scale = {
                "token_mean": 1 / tokens,
                "seq_mean_token_mean": 1 / (sum(kept) * len(logp)),
                "seq_mean_token_sum_norm": 1 / (sum(kept) * 6),
            }[aggregation]
            total = total - weight * scale * naive_term(loss, logp, anchor, j, advantages[row])
    return total


@pytest.mark.parametrize(("loss", "aggregation", "kind", "corrected"), LOSSES)
def test_the_gradient_is_that_of_a_hand_written_loss_whatever_the_split(
    learn: Callable[..., Parts], tmp_path: Path, loss: str, aggregation: str, kind: str, corrected: str
) -> None:
    algorithm = [
        f"algorithm.loss={loss}",
        f"algorithm.aggregation={aggregation}",
        f"algorithm.advantage={kind}",
        f"algorithm.correction={corrected}",
    ]
    parts = learn("precision=fp32", *algorithm)
    experience = sampled(parts)
    model = oracle(parts, tmp_path / "hf")
    naive_loss(model, experience, loss, aggregation, kind, corrected).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for tokens in (1, 25, 16384):  # a row a micro-batch, some, everything at once
        parts = learn("precision=fp32", *algorithm, f"optimizer.micro_batch_tokens={tokens}")
        close(gradients(parts.learner, experience), expected, 2e-5)


def test_completions_without_advantage_are_skipped_and_change_nothing(
    learn: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = learn("precision=fp32")
    experience = sampled(parts)
    widths: list[int] = []
    original = Learner.forward

    def counting(self: Learner, sequences: Any, kernels: Any) -> Any:
        widths.append(len(sequences))
        return original(self, sequences, kernels)

    monkeypatch.setattr(Learner, "forward", counting)
    skipped = gradients(parts.learner, experience)
    alive = sum(widths)
    # Now with every row in the pass: the same loss, by hand, over all rows at once.
    from mantissa.algorithms import advantage, aggregation_scale, correction, policy_loss

    advantage_B, _ = advantage(experience.reward_B, experience.group_B, "dr_grpo")
    assert 0 < alive == int((advantage_B != 0).sum()) < len(experience)
    old, mask = experience.old_logp_BR, experience.mask_BR
    assert old is not None
    weight, valid, _ = correction(old, experience.rollout_logp_BR, mask, parts.learner.algorithm.correction)
    logp_N = original(parts.learner, experience, parts.learner.kernels).logp_N
    logp = torch.zeros(mask.shape).index_put(mask.nonzero(as_tuple=True), logp_N)
    scale = aggregation_scale(valid, "token_mean")
    loss, _ = policy_loss(logp, old, advantage_B, valid, weight, scale, parts.learner.algorithm.loss)
    loss.backward()
    close(skipped, {n: p.grad for n, p in parts.model.named_parameters() if p.grad is not None}, 1e-5)


def test_a_batch_of_which_rejection_leaves_nothing_moves_nothing(learn: Callable[..., Parts]) -> None:
    """Half a nat a token is far beyond the geometric band: no gradient, so no step, and momentum stays where it is."""
    parts = learn("precision=fp32", "algorithm.correction=geometric", "optimizer.weight_decay=0.1")
    learner = parts.learner
    learned(learner, sampled(parts, gap=0.0))  # momentum now exists
    assert learner.version == 1
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    update = learned(learner, sampled(parts, gap=0.5), 2)
    assert update.outcomes == ()
    assert update.trained_tokens == 0
    assert float(update.tallies["correction/rejected_token_fraction"].value()) == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in learner.weights.items())


def test_with_bypass_the_ratio_is_to_the_rollout_and_the_gap_is_still_measured(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp32", "algorithm.correction=bypass", "optimizer.lr=1e-9")
    experience = sampled(parts, gap=0.1)
    mask = experience.mask_BR
    assert experience.old_logp_BR is not None
    update = learned(parts.learner, experience)
    alive = (learner_advantages(experience) != 0).unsqueeze(1) & mask
    log_r = (experience.old_logp_BR - experience.rollout_logp_BR)[alive].double()
    assert float(update.tallies["policy/ratio_mean"].value()) == pytest.approx(float(log_r.exp().mean()), rel=1e-6)
    assert float(log_r.abs().mean()) > 0.05
    assert float(update.tallies["correction/weight_std"].value()) == 0.0


@pytest.mark.parametrize("corrected", ["bypass", "token_tis"])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_tells_what_it_learned_from_what_the_kernels_differ_by(
    learn: Callable[..., Parts], corrected: str, updates: int
) -> None:
    """Of the rows that carry a gradient, however they are split: beta as it was given, alpha only after an update."""
    rows = []
    for tokens in (25, 16384):
        parts = learn(
            "precision=fp32", f"algorithm.correction={corrected}", "optimizer.lr=0.02",
            f"optimizer.updates_per_batch={updates}", f"optimizer.micro_batch_tokens={tokens}",
        )  # fmt: skip
        experience = sampled(parts, gap=0.2)
        before = experience.old_logp_BR
        assert before is not None
        rows.append({n: float(t.value()) for n, t in learned(parts.learner, experience).tallies.items()})
    alive = (learner_advantages(experience) != 0).unsqueeze(1) & experience.mask_BR
    beta = (before.double() - experience.rollout_logp_BR.double())[alive]
    for row in rows:
        assert row["policy/beta_mean"] == pytest.approx(float(beta.mean()), rel=1e-5)
        assert row["policy/beta_abs_mean"] == pytest.approx(float(beta.abs().mean()), rel=1e-6)
        alpha, phantom, clip = (
            row[f"policy/{n}"] for n in ("alpha_abs_mean", "phantom_clip_fraction", "clip_fraction")
        )
        assert alpha > 0.01 if updates > 1 else alpha < 1e-6
        assert phantom > 0.05
        if corrected == "bypass":
            assert phantom < clip if updates > 1 else phantom == clip  # some were cut for what was learned
        else:
            assert (clip > 0) == (updates > 1)
    assert rows[0] == pytest.approx(rows[1], rel=1e-3, abs=1e-5)


def test_a_batch_without_any_advantage_moves_nothing(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp16", "optimizer.weight_decay=0.1")
    learner, experience = parts.learner, sampled(parts)
    learned(learner, experience)  # momentum now exists
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    equal = dataclasses.replace(experience, reward_B=torch.ones_like(experience.reward_B))
    equal = equal.with_learner(*learner.score(equal))
    state = learner.step.state_dict()
    update = learned(learner, equal, 2)
    assert update.outcomes == ()
    assert update.trained_tokens == 0
    assert learner.flushed(weigh(equal, learner.algorithm), 2) is None
    assert learner.step.state_dict() == state
    assert all(torch.equal(before[name], weight) for name, weight in learner.weights.items())


def test_several_updates_split_the_batch_and_each_has_its_own_denominator(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp32", "optimizer.updates_per_batch=3")
    learner, experience = parts.learner, sampled(parts, gap=0.0)
    # By hand: the same rows in the same order, each part as a batch of its own with advantages of the whole.
    from mantissa.rl.seeds import generator

    order = torch.randperm(20, generator=generator(0, "update", 4))
    sizes = [7, 7, 6]
    twin = learn("precision=fp32").learner
    advantage_B = learner_advantages(experience)
    for part in order.split(sizes):

        def backward(scale: float, rows: Tensor = part) -> None:
            sub = experience.select(rows)
            assert experience.old_logp_BR is not None
            old = experience.old_logp_BR[rows][:, : sub.mask_BR.shape[1]][sub.mask_BR]
            logp = twin.logp(sub, twin.kernels)
            repeated = advantage_B[rows].repeat_interleave(sub.mask_BR.sum(1))
            ratio = (logp - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * repeated, clipped * repeated).mean()
            (loss * scale).backward()

        twin.step.run(backward)
    update = learned(learner, experience, 4)
    assert [outcome.kind for outcome in update.outcomes] == ["stepped"] * 3
    assert learner.version == 3
    moved = 0.0
    fresh = learn("precision=fp32").learner
    for name, weight in learner.weights.items():
        moved = max(moved, float((weight - fresh.weights[name]).abs().max()))
        torch.testing.assert_close(weight, twin.weights[name], rtol=0, atol=2e-5)
    assert moved > 1e-3


def learner_advantages(experience: Experience) -> Tensor:
    """dr_grpo over groups of four."""
    reward = experience.reward_B.view(-1, 4)
    return (reward - reward.mean(1, keepdim=True)).flatten()


def test_reinforce_weighs_by_the_current_policy_not_by_the_one_before(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp32", "algorithm.loss=reinforce", "algorithm.correction=sequence_is", "optimizer.lr=0.05")
    learner = parts.learner
    experience = sampled(parts, gap=0.1)
    learned(learner, experience)
    now, _ = learner.score(experience)
    mask = experience.mask_BR
    alive = learner_advantages(experience) != 0
    log_r = torch.where(mask, now - experience.rollout_logp_BR, 0.0).double().sum(1)
    stale = torch.where(mask, experience.old_logp_BR - experience.rollout_logp_BR, 0.0).double().sum(1)
    update = learned(learner, experience, 2)
    from mantissa.algorithms import values

    mean = float(values(update.tallies)["correction/weight_mean"])
    assert mean == pytest.approx(float(log_r[alive].exp().mean()), rel=1e-5)
    assert abs(mean - float(stale[alive].exp().mean())) > 1e-3


def test_an_overflow_is_retried_to_the_same_bits_as_a_lower_scale(learn: Callable[..., Parts]) -> None:
    runs = {}
    for initial in (2.0**40, 2.0**30):  # fp16's largest is 2^16: both overflow, the first one ten times more
        parts = learn("precision=fp16", f"loss_scaling.initial={initial}", "loss_scaling.retries=60")
        update = learned(parts.learner, sampled(parts))
        runs[initial] = (update.outcomes[0], parts.learner)
    (high, learner), (low, twin) = runs.values()
    assert high.kind == "retried"
    assert high.overflows == low.overflows + 10 > 10
    assert high.scale == low.scale == learner.step.scaler.scale == 2.0 ** (40 - high.overflows)
    assert learner.version == 1
    assert all(torch.equal(weight, twin.weights[name]) for name, weight in learner.weights.items())
    # and the same as had the scale that worked been the first
    direct = learn("precision=fp16", f"loss_scaling.initial={high.scale}")
    outcome = learned(direct.learner, sampled(direct)).outcomes[0]
    assert outcome.kind == "stepped"
    assert all(torch.equal(weight, direct.learner.weights[name]) for name, weight in learner.weights.items())


def test_a_batch_that_is_given_up_leaves_the_policy_and_its_version(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp16", "loss_scaling.initial=1e30", "loss_scaling.retries=2")
    before = {name: weight.clone() for name, weight in parts.learner.weights.items()}
    outcome = learned(parts.learner, sampled(parts)).outcomes[0]
    assert (outcome.kind, outcome.overflows, parts.learner.version, outcome.lr) == ("skipped", 3, 0, 0.0)
    assert parts.learner.step.optimizer_tensors() == {}
    assert all(torch.equal(before[name], weight) for name, weight in parts.learner.weights.items())


@pytest.mark.parametrize("head", ["tied", "own"])
def test_adaptive_clipping_bounds_each_row_but_an_output_heads_own(learn: Callable[..., Parts], head: str) -> None:
    options = ["optimizer.max_grad_norm=.inf", f"model.fresh.tie_embeddings={str(head == 'tied').lower()}"]
    plain = learn("precision=fp32", *options)
    experience = sampled(plain)
    whole = gradients(plain.learner, experience)
    learner = learn("precision=fp32", *options, "optimizer.adaptive_clip=0.05").learner
    seen: dict[str, Tensor] = {}
    found = dict(learner.model.named_parameters())
    learner.step.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: parameter.grad.clone() for name, parameter in found.items()})
    )
    masters = {name: parameter.detach().double() for name, parameter in plain.learner.model.named_parameters()}
    (outcome,) = learned(learner, experience).outcomes
    shortened, units = 0, 0
    for name, gradient in seen.items():
        if name.startswith("lm_head"):
            assert head == "own"
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-9)
            continue
        rows = (
            [(gradient, whole[name], masters[name])]
            if gradient.dim() == 1
            else zip(gradient, whole[name], masters[name], strict=True)
        )
        for ours, before, weight in rows:
            units += 1
            factor = 0.05 * max(float(weight.norm()), 1e-3) / max(float(before.double().norm()), 1e-30)
            shortened += factor < 1
            torch.testing.assert_close(ours, before * min(factor, 1.0), rtol=1e-3, atol=1e-7)
    assert 0 < outcome.clipped < 1
    assert outcome.clipped == pytest.approx(shortened / units, abs=2 / units)  # scored apart: a last bit may decide


@pytest.mark.parametrize("tokens", [30, 16384])
def test_a_nan_loss_with_finite_gradients_moves_nothing(
    learn: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """In one of several micro-batches, or in the only one; and in the warm start, which has a loss of its own."""
    parts = learn("precision=fp16", f"optimizer.micro_batch_tokens={tokens}")
    experience, learner = sampled(parts), parts.learner
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    original, calls = Learner._loss, []

    def poisoned(self: Learner, *arguments: Any) -> Any:
        loss, tallies = original(self, *arguments)
        calls.append(loss.detach())
        return loss + (math.nan if len(calls) == 1 else 0.0), tallies

    monkeypatch.setattr(Learner, "_loss", poisoned)
    (outcome,) = learned(learner, experience).outcomes
    assert (outcome.kind, outcome.overflows) == ("skipped", 1)
    assert (len(calls) > 1) == (tokens == 30)
    monkeypatch.setattr(Learner, "logp", lambda self, *a: self.forward(*a).logp_N + math.nan)
    step = learner.optimizer_step(lambda update: 1e-2, parts.new_scaler())
    assert math.isnan(_supervised_step(learner, step, experience))
    assert (step.skipped, learner.version) == (1, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights.items())


@pytest.mark.parametrize("loss", ["gspo", "flowrl", "ppo_clip"])
def test_an_unknown_log_prob_takes_its_sequence_from_a_loss_about_sequences(
    learn: Callable[..., Parts], loss: str
) -> None:
    """What is left of a sequence is another sequence: its ratio and its delta are not those of the whole."""
    reference = ["algorithm.reference={}"] if loss == "flowrl" else []
    parts = learn("precision=fp32", *reference, f"algorithm.loss={loss}", "algorithm.correction=token_tis")
    experience = sampled(parts)
    if parts.reference is not None:
        parts.reference.take(parts.learner.weights, 0)
        experience = dataclasses.replace(experience, ref_logp_BR=parts.reference.score(experience))
    row = int(experience.mask_BR.sum(1).argmax())
    found = []
    for tokens in (slice(0, 1), slice(None)):
        rollout = experience.rollout_logp_BR.clone()
        rollout[row, tokens] = torch.where(experience.mask_BR[row, tokens], math.nan, 0.0)
        found.append(gradients(parts.learner, dataclasses.replace(experience, rollout_logp_BR=rollout)))
    one, whole = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in found)
    assert bool(one.isfinite().all())
    assert bool((one - whole).norm() < 1e-4 * whole.norm()) == (loss != "ppo_clip")


def test_the_probe_leaves_no_trace(learn: Callable[..., Parts]) -> None:
    weights = []
    for probe in (False, True):
        parts = learn("precision=fp16", "loss_scaling.initial=1", "model.fresh.initializer_range=0.02")
        weighed = weigh(sampled(parts), parts.learner.algorithm)
        if probe:
            flushed = parts.learner.flushed(weighed, 1)
            measuring = Flushed(parts.learner)
            assert [step for step in range(1, 32) if measuring.due(step)] == [1, 11, 21, 31]
            assert measuring.observe(1, weighed) == {"precision/flushed_fraction": flushed}
        parts.learner.learn(weighed, 1)
        weights.append(parts.learner.weights)
    assert flushed is not None
    assert 0 < flushed < 1  # without a loss scale, fp16 flushes some of these gradients
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_fp32_has_nothing_to_probe(learn: Callable[..., Parts]) -> None:
    parts = learn("precision=fp32")
    assert parts.learner.flushed(weigh(sampled(parts), parts.learner.algorithm), 1) is None


def test_the_automatic_scale_uses_the_range_it_sees_and_resumes(learn: Callable[..., Parts]) -> None:
    """From a first scale of 1, one step shows the range; its state goes into the checkpoint through the one step."""
    parts = learn("precision=fp16", "loss_scaling={rule: auto, initial: 1.0}")
    step = parts.learner.step
    outcome = learned(parts.learner, sampled(parts)).outcomes[0]
    assert outcome.kind == "stepped"
    assert step.scaler.scale > 2.0**4
    assert outcome.max_scaled_grad * step.scaler.scale < 0.5  # and with room to spare
    twin = learn("precision=fp16", "loss_scaling={rule: auto, initial: 1.0}").learner.step
    twin.load_state_dict(step.state_dict())
    assert twin.scaler.state_dict() == step.scaler.state_dict()
    assert learn("precision=bf16").learner.step.scaler.scale == 1.0
