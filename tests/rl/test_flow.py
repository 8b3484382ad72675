"""FlowRL in the learner: gradients of policy and head against transformers in float64, and the head's whole life."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiences import gradients, learned, sampled
from mantissa.algorithms import values
from mantissa.model import load_model, save_model
from mantissa.model.partition import kept_units
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.rl.objective import PREFIX, Flow, weigh
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint

FLOWRL = ("algorithm.reference={}", "algorithm.loss=flowrl", "optimizer.updates_per_batch=1")
BETA = 3.0


@pytest.fixture
def build(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Parts]:
    """Parts of the small recipe with flowrl, with weights large enough to have opinions, and a reference of them."""

    def make(*overrides: str) -> Parts:
        parts = parts_of(configure(*FLOWRL, "model.fresh.initializer_range=0.2", *overrides))
        parts.sampler.engine.sync(parts.learner.weights, 0)
        assert parts.reference is not None
        parts.reference.take(parts.learner.weights, 0)
        return parts

    return make


def head_of(learner: Learner) -> Flow:
    assert learner.flow is not None
    return learner.flow


def naive_head(weights: dict[str, Tensor], state_E: Tensor, key: Tensor, dropout: float) -> Tensor:
    """log Z, written out: two blocks of Linear, GELU, LayerNorm, Dropout, then Linear to 1."""
    x = state_E
    for block in (0, 1):
        name = f"blocks.{block}."
        x = x @ weights[name + "weight"].t() + weights[name + "bias"]
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        x = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
        x = x * weights[name + "norm_weight"] + weights[name + "norm_bias"]
        x = x * kept_units(key[None], block, len(x), dropout)[0] / (1 - dropout)
    return (weights["weight"] @ x + weights["bias"]).squeeze()


def naive_loss(
    model: Any, head: dict[str, Tensor], experience: Experience, keys: Tensor, dropout: float, corrected: str
) -> Tensor:
    """mean_i w_i * (log Z + mean logp - beta * r_hat - mean logp_ref)^2, one unpadded sequence at a time."""
    groups: dict[int, list[float]] = {}
    for group, reward in zip(experience.group_B.tolist(), experience.reward_B.tolist(), strict=True):
        groups.setdefault(group, []).append(reward)
    total, rows = torch.zeros((), dtype=torch.float64), len(experience)
    for row in range(rows):
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        tokens = experience.tokens_BT[row, :length]
        states = model.model(tokens[None]).last_hidden_state[0]
        distribution = model.lm_head(states).log_softmax(-1)
        logp = torch.stack([distribution[i - 1, tokens[i]] for i in range(prompt, length)])
        count = length - prompt
        reward = float(experience.reward_B[row])
        rewards = groups[int(experience.group_B[row])]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        r_hat = (reward - mean) / (std + 1e-6)
        log_z = naive_head(head, states[:prompt].mean(0), keys[row], dropout)
        assert experience.ref_logp_BR is not None
        delta = log_z + logp.mean() - BETA * r_hat - experience.ref_logp_BR[row, :count].double().mean()
        gap = [float(logp[j].detach()) - float(experience.rollout_logp_BR[row, j]) for j in range(count)]
        whole = math.exp(sum(gap))
        weight = {
            "none": 1.0,
            "token_tis": sum(min(math.exp(g), 2.0) for g in gap) / count,
            "sequence_mis": whole if whole <= 3.0 else 0.0,
        }[corrected]
        total = total + weight * delta.square() / rows
    return total


@pytest.mark.parametrize(
    ("corrected", "dropout", "detach"),
    [("none", 0.1, False), ("token_tis", 0.0, False), ("sequence_mis", 0.5, False), ("token_tis", 0.1, True)],
)
def test_gradients_of_policy_and_head_are_those_of_a_hand_written_loss_whatever_the_split(
    build: Callable[..., Parts], tmp_path: Path, corrected: str, dropout: float, detach: bool
) -> None:
    from transformers import AutoModelForCausalLM

    loss = f"{{kind: flowrl, beta: {BETA}, partition_dropout: {dropout}, detach_partition: {str(detach).lower()}}}"
    options = ("precision=fp32", f"algorithm.loss={loss}", f"algorithm.correction={corrected}")
    parts = build(*options)
    experience = sampled(parts, reference=True)
    save_model(parts.model, parts.tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    flow = head_of(parts.learner)
    head = {name: weight.double().requires_grad_() for name, weight in flow.weights.items()}
    keys = flow.keys(experience.group_B, 1)
    naive_loss(model, head, experience, keys, dropout, corrected).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    if detach:  # log Z's gradient stops at the state: that of a constant
        model.zero_grad()
        frozen = {name: weight.detach() for name, weight in head.items()}
        naive_loss(_Detached(model), frozen, experience, keys, dropout, corrected).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
    expected |= {PREFIX + name: weight.grad for name, weight in head.items()}
    for tokens in (1, 25, 16384):  # a row a micro-batch, some, everything at once (and then the scoring's own graph)
        learner = build(*options, f"optimizer.micro_batch_tokens={tokens}").learner
        scored = experience if tokens < 16384 else experience.with_learner(*learner.score(experience))
        found = gradients(learner, scored)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient.double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
            assert error < 3e-5, f"{tokens}, {name}: relative error {float(error):.1e}"


class _Detached:
    """The oracle whose prompt states carry no gradient into log Z: states through ``model``, log-probs as ever."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.lm_head = lambda states: model.lm_head(states.attached)

    def model(self, tokens: Tensor) -> Any:
        found = self._model.model(tokens)
        states = found.last_hidden_state
        detached = states.detach()[0].as_subclass(_States)
        detached.attached = states[0]  # type: ignore[attr-defined]
        return type("Out", (), {"last_hidden_state": [detached]})


class _States(Tensor):
    """Detached states that remember the ones with a gradient."""


def test_every_completion_counts_also_without_an_advantage(build: Callable[..., Parts]) -> None:
    parts = build("precision=fp32")
    experience = sampled(parts, reference=True)
    assert bool((experience.reward_B[-4:] == 1).all())
    update = learned(parts.learner, experience)
    assert bool((weigh(experience, parts.learner.algorithm).weighed[0][-4:] == 0).all())
    assert update.trained_tokens == int(experience.mask_BR.sum())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_scorings_graph_gives_the_update_of_a_forward_of_its_own(
    build: Callable[..., Parts], precision: str
) -> None:
    weights, options = [], (f"precision={precision}", "optimizer.eps=1e-3")
    for forget in (False, True):
        parts = build(*options)
        experience = sampled(parts, reference=True)
        assert parts.learner._kept is not None
        if forget:
            parts.learner._kept = None
        learned(parts.learner, experience)
        weights.append(parts.learner.weights | head_of(parts.learner).weights)
    tolerance = {"fp32": 1e-7, "fp16": 3e-5, "bf16": 3e-4}[precision]  # gradients of half are summed in another order
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=tolerance)


def test_a_retry_drops_the_same_units(build: Callable[..., Parts]) -> None:
    """Overflow, and again at a lower scale: the bits of a run whose first scale was that one."""
    learners, outcomes = [], []
    scale = 2.0**40
    for _ in range(2):
        parts = build("precision=fp16", f"loss_scaling={{initial: {scale}, retries: 60}}")
        experience = sampled(parts, reference=True)
        parts.learner._kept = None
        outcomes.append(learned(parts.learner, experience).outcomes[0])
        learners.append(parts.learner)
        scale = outcomes[0].scale
    assert [outcome.kind for outcome in outcomes] == ["retried", "stepped"]
    for one, other in ((learners[0].weights, learners[1].weights), *[[head_of(m).weights for m in learners]]):
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_dropout_is_named_by_seed_step_and_group(build: Callable[..., Parts]) -> None:
    flow = head_of(build().learner)
    group_B = torch.tensor([4, 4, 0, 7, 0])
    keys = flow.keys(group_B, 1)
    assert keys[0] == keys[1]
    assert keys[2] == keys[4]
    assert len(set(keys.tolist())) == 3
    assert torch.equal(flow.keys(group_B.flip(0), 1).flip(0), keys)
    assert not bool((flow.keys(group_B, 2) == keys).any())
    assert not bool((head_of(build("seed=1").learner).keys(group_B, 1) == keys).any())


def test_the_head_has_its_own_rate_and_no_decay(build: Callable[..., Parts]) -> None:
    """Adam's first step is the rate itself for each weight whose gradient is far above eps."""
    loss = "algorithm.loss={kind: flowrl, partition_lr: 0.02}"
    parts = build("precision=fp32", loss, "optimizer.lr=1e-3", "optimizer.weight_decay=0.5", "optimizer.eps=1e-12")
    learner = parts.learner
    before = {name: p.detach().clone() for name, p in learner.step.parameters.items()}
    outcome = learned(learner, sampled(parts, reference=True)).outcomes[0]
    assert outcome.lr == 1e-3
    for name, old in before.items():
        moved = (learner.step.parameters[name].detach() - old).abs()
        rate = 0.02 if name.startswith(PREFIX) else 1e-3
        decay = 0.0 if name.startswith(PREFIX) or old.dim() < 2 else 0.5 * rate * float(old.abs().max())
        assert 0.9 * rate < float(moved.max()) < 1.01 * rate + decay, name


def test_the_head_is_fp32_in_every_precision(build: Callable[..., Parts]) -> None:
    for precision in ("fp16", "bf16", "bf16-train-fp16-rollout", "fp8"):
        parts = build(f"precision={precision}")
        learner = parts.learner
        learned(learner, sampled(parts, reference=True))
        assert {weight.dtype for weight in head_of(learner).weights.values()} == {torch.float32}
        moments = {n: t for n, t in learner.step.optimizer_tensors().items() if n.startswith(PREFIX)}
        assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
        assert any(name.endswith("exp_avg") for name in moments)


def test_the_policy_moves_towards_the_reference_tilted_by_the_reward(build: Callable[..., Parts]) -> None:
    """The same batch again and again: |delta| falls, and what was rewarded is now likelier than what was not."""
    parts = build(
        "precision=fp32", "algorithm.loss={kind: flowrl, beta: 0.5, partition_dropout: 0}", "optimizer.lr=3e-3"
    )
    learner, experience = parts.learner, sampled(parts, reference=True)
    deltas = []
    for step in range(1, 61):
        scored = experience.with_learner(*learner.score(experience))
        update = learned(learner, scored, step)
        deltas.append(float(values(update.tallies)["flowrl/delta_abs_mean"]))
    assert deltas[-1] < 0.35 * deltas[0]
    logp_BR, _ = learner.score(experience)
    assert experience.ref_logp_BR is not None
    mask = experience.mask_BR
    tilt_B = torch.where(mask, logp_BR - experience.ref_logp_BR, 0.0).sum(1) / mask.sum(1)
    for start in range(0, 16, 4):  # groups with both kinds of reward
        group, reward = tilt_B[start : start + 4], experience.reward_B[start : start + 4]
        if len(set(reward.tolist())) == 2:
            assert float(group[reward == 1].mean()) > float(group[reward == 0].mean()) + 0.3


@pytest.fixture
def trained(train: Callable[..., RunDirectory]) -> Callable[..., RunDirectory]:
    quick = ("steps=2", "warm_start.steps=4", "warm_start.evaluate_every=4", "task.reward=prefix")
    return lambda *overrides: train(*FLOWRL, *quick, *overrides)


def test_the_head_is_in_checkpoints_and_nowhere_else(trained: Callable[..., RunDirectory]) -> None:
    from safetensors.torch import load_file

    run = trained("precision=bf16")
    checkpoint = load_checkpoint(run.checkpoint_path(0).parent)
    assert checkpoint.more.keys() == {"partition", "reference"}
    assert checkpoint.more["partition"]["blocks.0.weight"].shape == (32, 32)
    exported = [name for path in run.policy_path.glob("*.safetensors") for name in load_file(path)]
    assert set(exported) == set(checkpoint.policy)
    assert not [name for name in exported if "partition" in name or "blocks" in name]
    assert {path.name for path in run.policy_path.iterdir()} == {
        path.name for path in run.policy_path.iterdir() if "partition" not in path.name
    }
    assert set(dict(load_model(run.policy_path).named_parameters())) == set(exported)
    moments = {name for name in checkpoint.optimizer if name.startswith(PREFIX)}
    assert len(moments) == 3 * len(checkpoint.more["partition"])
    # it starts from the seed, and it has learnt
    fresh = Flow(32, _config(), 0, torch.device("cpu")).weights
    stored = checkpoint.more["partition"]
    assert any(not torch.equal(weight, stored[name]) for name, weight in fresh.items())
    at_start = load_checkpoint(run.checkpoint_path(0).parent, 0) if 0 in run.checkpoint_steps() else None
    assert at_start is None or all(torch.equal(at_start.more["partition"][n], w) for n, w in fresh.items())


def _config() -> Any:
    from mantissa.algorithms import FlowRLConfig

    return FlowRLConfig()


@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("fp32", ()),
        ("bf16", ("algorithm.correction=sequence_mis", "algorithm.loss.importance=sequence")),
        ("fp16", ("algorithm.correction=icepop", "optimizer.updates_per_batch=2")),
        ("bf16-train-fp16-rollout", ("algorithm.correction=geometric", "precision.reference=fp16")),
        ("fp16", ("algorithm.correction=bypass", "algorithm.loss.importance=token", "optimizer.micro_batch_tokens=64")),
    ],
)
def test_a_run_in_every_precision_measures_itself(
    trained: Callable[..., RunDirectory], precision: str, more: tuple[str, ...]
) -> None:
    run = trained(f"precision={precision}", *more)
    updates, skipped = 2 if "optimizer.updates_per_batch=2" in more else 1, 0.0
    for row in run.read_metrics():
        skipped += row["precision/skipped"]  # fp16: these gradients are hundreds of times those of a clipped ratio
        assert [name for name, value in row.items() if not math.isfinite(value)] == []
        assert row["flowrl/nonfinite"] == row["reference/nonfinite"] == row["policy/nonfinite"] == 0
        assert row["optim/updates"] + skipped == updates * row["step"]  # all-equal rewards included
        assert row["flowrl/delta_abs_mean"] > 0
    first, last = run.read_metrics()
    exact = "precision.reference=fp16" not in more
    assert (first["reference/kl"] == 0) == exact  # the learner's own format: equal to the last bit
    assert last["reference/k3_kl"] > 0


def test_gelu_and_norm_of_the_oracle_are_torchs() -> None:
    """The hand-written head above is the network that its formula names."""
    x = torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), F.gelu(x))
    torch.testing.assert_close((x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5), F.layer_norm(x, (8,)))
