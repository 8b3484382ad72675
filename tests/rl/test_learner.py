"""The learner's steps: what moves it and what does not, retries, clipping, probes; and FlowRL's head in its whole life.

Gradients are in ``test_gradients.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experiences import gradients, learned, sampled
from mantissa.algorithms import FlowRLConfig
from mantissa.base.seeds import generator
from mantissa.mismatch.metrics import gap_metrics
from mantissa.model import load_model
from mantissa.precision import values
from mantissa.rl.assemble import Parts
from mantissa.rl.experience import Experience, Scored, Weighed
from mantissa.rl.learner import Learner, weigh
from mantissa.rl.probes import Flushed
from mantissa.rl.session import _supervised_step
from mantissa.rl.terms.critic import Critic
from mantissa.rl.terms.small import PREFIX, Flow, Partition
from mantissa.runs.directory import RunDirectory
from mantissa.training import StepOutcome, load_checkpoint
from small_run import QUICK

Build = Callable[..., Parts]
FLOWRL = ("algorithm.reference={}", "algorithm.loss=flowrl")


@pytest.fixture
def learn(made: Build) -> Build:
    """Parts of the small recipe, one optimiser step a batch, with weights large enough to have opinions."""
    return lambda *overrides: made("optimizer.updates_per_batch=1", *overrides)


def learner_advantages(experience: Scored) -> Tensor:
    """dr_grpo over groups of four."""
    reward = experience.reward_B.view(-1, 4)
    return (reward - reward.mean(1, keepdim=True)).flatten()


def test_a_batch_of_which_rejection_leaves_nothing_moves_nothing(learn: Build) -> None:
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


def with_empty(experience: Scored, rows: list[int], samples: int = 4) -> Scored:
    """The same completions, and none of a token in these rows."""
    mask_BR = experience.mask_BR.clone()
    mask_BR[rows] = False
    length_B = experience.prompt_length_B + mask_BR.sum(1)
    real_BT = torch.arange(experience.tokens_BT.shape[1]) < length_B.unsqueeze(1)
    logp_BR = torch.where(mask_BR, experience.rollout_logp_BR, 0.0)
    tokens_BT = torch.where(real_BT, experience.tokens_BT, 0)
    return dataclasses.replace(
        experience, tokens_BT=tokens_BT, length_B=length_B, mask_BR=mask_BR, rollout_logp_BR=logp_BR
    )


EMPTY = {"first of a group": [4], "last of a group": [7], "all of a group": [8, 9, 10, 11], "many": [0, 3, 4, 5, 6, 19]}
EVERY_LOSS = {
    "dapo": ("algorithm.loss=dapo",),
    "gspo": ("algorithm.loss=gspo",),
    "flowrl": FLOWRL,
    "reinforce": ("algorithm.loss=reinforce",),
    "norm": ("algorithm.aggregation=seq_mean_token_sum_norm",),
    "kl": ("algorithm.reference={}", "algorithm.kl={coefficient: 0.1}", "algorithm.entropy.coefficient=0.01"),
    "kl in the reward": ("algorithm.reference={}", "algorithm.kl={where: reward, estimator: k1, coefficient: 0.1}"),
    "sequence_mis": ("algorithm.correction=sequence_mis",),
    "gae": ("algorithm.advantage=gae", "algorithm.critic={lr: 1.0e-3}"),
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_empty_responses_add_nothing_and_change_no_other_gradient(learn: Build, name: str, empty: str) -> None:
    """They are of their group (their rewards count in its mean) and of nothing else: against the batch without them,
    with the advantages that they had a part in."""
    parts = learn("precision=fp32", *EVERY_LOSS[name])
    learner = parts.learner
    batch = with_empty(sampled(parts, reference=parts.reference is not None), EMPTY[empty])

    def scored(experience: Experience) -> Scored:
        scored = experience.with_learner(*learner.score(experience))
        for term in learner.terms:
            scored = scored.having(**term.score(scored))
        return scored

    whole = weigh(scored(batch), learner.algorithm)
    rest = torch.tensor([row for row in range(len(batch)) if row not in EMPTY[empty]])
    alone = scored(batch.select(rest))
    for field in ("old_logp_BR", "ref_logp_BR", "value_BR"):
        one, other = (getattr(each, field, each.columns.get(field)) for each in (whole, alone))
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            width = other.shape[1]
            torch.testing.assert_close(one[rest, :width], other, rtol=0, atol=1e-5)
            assert not bool(one[EMPTY[empty]].any())
    assert all(bool(torch.isfinite(tally.value())) for tally in whole.tallies.values())

    found = dry_run(learner, whole)
    expected = dry_run(learner, whole.select(rest))
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():  # sums in another order: off by a share of their terms
        most = 1e-5 * max(float(gradient.abs().max()), 0.1)
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=most, msg=parameter)


def dry_run(learner: Learner, weighed: Weighed) -> dict[str, Tensor]:
    """The gradients that the policy's optimiser step is handed of a weighed batch; no step is taken."""
    found: dict[str, Tensor] = {}

    def run(backward: Callable[[float], object]) -> StepOutcome:
        learner.step.optimizer.zero_grad(set_to_none=True)
        backward(1.0)
        found.update({n: p.grad.clone() for n, p in learner.step.parameters.items() if p.grad is not None})
        learner.step.optimizer.zero_grad(set_to_none=True)
        return StepOutcome("stepped", 0, 1.0, 1.0, 0.0, 0.0)

    terms, learner.terms = learner.terms, [term for term in learner.terms if not isinstance(term, Critic)]
    learner.step.run = run  # type: ignore[method-assign]
    update = learner.learn(weighed, 1)
    del learner.step.run
    learner.terms = terms
    assert all(bool(torch.isfinite(tally.value())) for tally in update.tallies.values())
    return found


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_a_batch_of_empty_responses_alone_moves_nothing_and_has_numbers(learn: Build, name: str) -> None:
    parts = learn("precision=fp32", "optimizer.weight_decay=0.1", *EVERY_LOSS[name])
    learner = parts.learner
    batch = with_empty(sampled(parts, reference=parts.reference is not None), list(range(20)))
    for experience in (batch, batch.select(torch.arange(20))):  # as wide as before, and of no width at all
        experience = experience.with_learner(*learner.score(experience))
        for term in learner.terms:
            experience = experience.having(**term.score(experience))
        weighed = weigh(experience, learner.algorithm)
        before = {n: weight.clone() for n, weight in learner.weights.items()}
        update = learner.learn(weighed, 1)
        assert update.outcomes == ()
        assert all(torch.equal(before[n], weight) for n, weight in learner.weights.items())
        assert all(bool(torch.isfinite(tally.value())) for tally in update.tallies.values())
        assert all(math.isfinite(value) for value in update.beside.values())
        numbers = gap_metrics(weighed.rollout_logp_BR, weighed.old_logp_BR, weighed.mask_BR)
        assert all(bool(value.isfinite()) for value in numbers.values())
        assert Flushed(learner).observe(1, weighed) == {}


@pytest.mark.parametrize(("corrected", "updates"), [("bypass", 1), ("bypass", 2), ("token_tis", 2)])
def test_a_step_tells_what_it_learned_from_what_the_kernels_differ_by(
    learn: Build, corrected: str, updates: int
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
        if (corrected, updates) == ("bypass", 1):  # the ratio is to the rollout, and the gap is still measured
            assert row["policy/ratio_mean"] == pytest.approx(float(beta.exp().mean()), rel=1e-5)
            assert row["correction/weight_std"] == 0.0
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


def test_a_batch_without_any_advantage_moves_nothing(learn: Build) -> None:
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


def test_several_updates_split_the_batch_and_each_has_its_own_denominator(learn: Build) -> None:
    parts = learn("precision=fp32", "optimizer.updates_per_batch=3")
    learner, experience = parts.learner, sampled(parts, gap=0.0)
    # By hand: the same rows in the same order, each part as a batch of its own with advantages of the whole.
    order = torch.randperm(20, generator=generator(0, "update", 4))
    sizes = [7, 7, 6]
    twin = learn("precision=fp32").learner
    advantage_B = learner_advantages(experience)
    for part in order.split(sizes):

        def backward(scale: float, rows: Tensor = part) -> None:
            sub = experience.select(rows)
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


def test_reinforce_weighs_by_the_current_policy_not_by_the_one_before(learn: Build) -> None:
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
    mean = float(values(update.tallies)["correction/weight_mean"])
    assert mean == pytest.approx(float(log_r[alive].exp().mean()), rel=1e-5)
    assert abs(mean - float(stale[alive].exp().mean())) > 1e-3


def test_what_is_reported_is_of_the_weights_before_the_update(learn: Build) -> None:
    """With the penalty in the loss and two updates, the second one's own distance is another: not the one reported."""
    kl = ("algorithm.reference={}", "algorithm.kl.coefficient=0.1", "optimizer.updates_per_batch=2")
    parts = learn("precision=fp32", *kl, "optimizer.lr=0.05")
    experience = sampled(parts, reference=True)
    update = learned(parts.learner, experience)
    apart = (experience.old_logp_BR.double() - experience.column("ref_logp_BR").double())[experience.mask_BR]
    assert float(values(update.tallies)["reference/kl"]) == pytest.approx(float(apart.mean()), rel=1e-9)


@pytest.mark.parametrize("options", [(), FLOWRL], ids=["ppo_clip", "flowrl"])
def test_an_overflow_is_retried_to_the_same_bits_as_a_lower_scale(learn: Build, options: tuple[str, ...]) -> None:
    """And with FlowRL's head, a retry drops the same units."""
    learners, outcomes, scale = [], [], 2.0**40  # fp16's largest is 2^16
    for _ in range(2):
        parts = learn("precision=fp16", *options, f"loss_scaling={{initial: {scale}, retries: 60}}")
        experience = sampled(parts, reference=bool(options))
        parts.learner._kept = None
        outcomes.append(learned(parts.learner, experience).outcomes[0])
        learners.append(parts.learner)
        scale = outcomes[0].scale
    assert [outcome.kind for outcome in outcomes] == ["retried", "stepped"]
    assert outcomes[0].scale == learners[0].step.scaler.scale == 2.0 ** (40 - outcomes[0].overflows)
    assert [learner.version for learner in learners] == [1, 1]
    one, other = (learner.step.parameters for learner in learners)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize("head", ["tied", "own"])
def test_adaptive_clipping_bounds_each_row_but_an_output_heads_own(learn: Build, head: str) -> None:
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


def test_a_nan_loss_with_finite_gradients_moves_nothing(learn: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of several micro-batches; and in the warm start, which has a loss of its own."""
    parts = learn("precision=fp16", "optimizer.micro_batch_tokens=30")
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
    assert len(calls) > 1
    monkeypatch.setattr(Learner, "logp", lambda self, *a: self.forward(*a).logp_N + math.nan)
    step = learner.optimizer_step(lambda update: 1e-2, parts.new_scaler())
    assert math.isnan(_supervised_step(learner, step, experience))
    assert (step.skipped, learner.version) == (1, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights.items())


def test_the_probe_leaves_no_trace(learn: Build) -> None:
    weights = []
    for probe in (False, True):
        parts = learn("precision=fp16", "loss_scaling.initial=1", "model.fresh.initializer_range=0.002")
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
    plain = learn("precision=fp32")
    assert plain.learner.flushed(weigh(sampled(plain), plain.learner.algorithm), 1) is None


def test_the_automatic_scale_uses_the_range_it_sees_and_resumes(learn: Build) -> None:
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


# FlowRL's head


def head_of(learner: Learner) -> Flow:
    return learner.term(Partition).flow


def test_dropout_is_named_by_seed_step_and_group(learn: Build) -> None:
    flow = head_of(learn(*FLOWRL).learner)
    group_B = torch.tensor([4, 4, 0, 7, 0])
    keys = flow.keys(group_B, 1)
    assert keys[0] == keys[1]
    assert keys[2] == keys[4]
    assert len(set(keys.tolist())) == 3
    assert torch.equal(flow.keys(group_B.flip(0), 1).flip(0), keys)
    assert not bool((flow.keys(group_B, 2) == keys).any())
    assert not bool((head_of(learn(*FLOWRL, "seed=1").learner).keys(group_B, 1) == keys).any())


def test_the_head_has_its_own_rate_and_no_decay(learn: Build) -> None:
    """Adam's first step is the rate itself for each weight whose gradient is far above eps."""
    loss = "algorithm.loss={kind: flowrl, partition_lr: 0.02}"
    parts = learn(
        "precision=fp32", *FLOWRL, loss, "optimizer.lr=1e-3", "optimizer.weight_decay=0.5", "optimizer.eps=1e-12"
    )
    learner = parts.learner
    before = {name: p.detach().clone() for name, p in learner.step.parameters.items()}
    outcome = learned(learner, sampled(parts, reference=True)).outcomes[0]
    assert outcome.lr == 1e-3
    for name, old in before.items():
        moved = (learner.step.parameters[name].detach() - old).abs()
        rate = 0.02 if name.startswith(PREFIX) else 1e-3
        decay = 0.0 if name.startswith(PREFIX) or old.dim() < 2 else 0.5 * rate * float(old.abs().max())
        assert 0.9 * rate < float(moved.max()) < 1.01 * rate + decay, name


@pytest.mark.parametrize(
    ("precision", "updates", "more"),
    [
        ("bf16", 1, ("algorithm.correction=sequence_mis", "algorithm.loss.importance=sequence")),
        ("fp16", 2, ("algorithm.correction=icepop",)),
        ("bf16-train-fp16-rollout", 1, ("algorithm.correction=bypass", "precision.reference=fp16")),
    ],
)
def test_a_run_with_a_head_measures_itself_and_keeps_it_in_checkpoints(
    train: Callable[..., RunDirectory], precision: str, updates: int, more: tuple[str, ...]
) -> None:
    run = train(*QUICK, *FLOWRL, f"precision={precision}", f"optimizer.updates_per_batch={updates}", *more)
    skipped = 0.0
    for row in run.metrics.read():
        skipped += row["precision/skipped"]  # fp16: these gradients are hundreds of times those of a clipped ratio
        assert [name for name, value in row.items() if not math.isfinite(value)] == []
        assert row["flowrl/nonfinite"] == row["reference/nonfinite"] == row["policy/nonfinite"] == 0
        assert row["optim/updates"] + skipped == updates * row["step"]  # all-equal rewards included
        assert row["flowrl/delta_abs_mean"] > 0
    first, last = run.metrics.read()
    assert (first["reference/kl"] == 0) == ("precision.reference=fp16" not in more)  # of the learner's own format
    assert last["reference/k3_kl"] > 0
    checkpoint = load_checkpoint(run.checkpoints)
    assert checkpoint.more.keys() == {"partition", "reference"}
    stored = checkpoint.more["partition"]
    fresh = Flow(32, FlowRLConfig().partition, 0, torch.device("cpu")).weights
    assert {n: w.shape for n, w in stored.items()} == {n: w.shape for n, w in fresh.items()}
    assert any(not torch.equal(weight, stored[name]) for name, weight in fresh.items())  # it has learnt
    exported = [name for path in run.policy_path.glob("*.safetensors") for name in load_file(path)]
    assert set(exported) == set(checkpoint.policy) == set(dict(load_model(run.policy_path).named_parameters()))
    assert not [path for path in run.policy_path.iterdir() if "partition" in path.name]
    moments = {name for name in checkpoint.optimizer if name.startswith(PREFIX)}
    assert len(moments) == 3 * len(stored)
    fp32 = [*stored.values(), *(checkpoint.optimizer[name] for name in moments)]
    assert {tensor.dtype for tensor in fp32} == {torch.float32}  # in every precision
