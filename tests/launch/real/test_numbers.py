"""The exported configuration, run through verl's own functions, gives Mantissa's own numbers: the loss, its gradient.

Both in float64, on one batch whose log-probs differ more than any run's. Legend: B sequences, T response positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.algorithms import advantage, aggregation_scale, correction, gae, kl_loss, value_loss
from mantissa.launch import Plan
from mantissa.precision import values
from mantissa.rl import RunConfig
from mantissa.rl.batch import overlong_penalty

pytestmark = pytest.mark.verl
GROUPS = (0, 0, 0, 1, 1, 1, 2, 2)
LENGTHS = (9, 4, 7, 1, 9, 6, 3, 8)


class Batch:
    """Log-probs of one batch under rollout, old, current and reference policy, and its rewards."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)

        self.mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        self.rollout = -noise(1.0).abs() - 1.8
        self.old = self.rollout + noise(0.6)
        self.theta = (self.old + noise(0.3)).requires_grad_()
        assert max(self.old.max(), self.theta.max()) < 0  # else they were no log-probs, which dppo's KL asks for
        self.ref = self.old + noise(0.2)
        self.reward = torch.tensor([1.0, -1, 1, -1, -1, -1, 1, -1], dtype=torch.float64)
        self.group = torch.tensor(GROUPS)

    def gradient(self, loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, self.theta)
        return found


@pytest.fixture
def batch() -> Batch:
    return Batch()


@pytest.fixture
def told(
    planned: Callable[..., Plan], compose: Callable[[Sequence[str]], Any], verl_version: str
) -> Callable[..., Any]:
    """verl's configuration for the recipe with ``key=value`` applied."""
    return lambda *features: compose([str(one) for one in planned(*features, version=verl_version).overrides])


def verl_weights(tree: Any, batch: Batch) -> tuple[Tensor | None, Tensor]:
    """Weights and mask as verl's trainer makes them before the update; with bypass it leaves them alone."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    settings = tree.algorithm.rollout_correction
    if settings.bypass_mode:
        return None, batch.mask.double()
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.old,
        rollout_log_prob=batch.rollout,
        response_mask=batch.mask.double(),
        **{name: settings[name] for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize",
                                             "rollout_rs", "rollout_rs_threshold")},
    )  # fmt: skip
    return (None if weights is None else weights.batch["rollout_is_weights"]), mask


def verl_loss(tree: Any, batch: Batch, advantage_B: Tensor) -> Tensor:
    """The loss as ``verl.workers.utils.losses.ppo_loss`` makes it, on one rank that has the whole batch."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(tree.actor_rollout_ref.actor)
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(batch.mask.sum()),
        global_batch_size=len(LENGTHS),
        loss_scale_factor=actor.loss_scale_factor,
    )
    weights, mask = verl_weights(tree, batch)
    old = batch.rollout if tree.algorithm.rollout_correction.bypass_mode else batch.old
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=batch.theta,
        advantages=advantage_B[:, None] * batch.mask,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights,
    )
    return loss


def our_loss(config: RunConfig, batch: Batch, advantage_B: Tensor) -> Tensor:
    """Mantissa's loss, but for one thing: what is rejected stays in the denominator, as the exporter says of verl."""
    algorithm = config.algorithm
    current = algorithm.loss.kind == "reinforce"  # whose weights are of the current policy
    logp = batch.theta.detach() if current else batch.old
    weight, valid, _ = correction(logp, batch.rollout, batch.mask, algorithm.correction)
    if algorithm.correction.bypass:
        _, valid, _ = correction(batch.theta.detach(), batch.rollout, batch.mask, algorithm.correction)
    length = algorithm.aggregation_length or config.rollout.max_tokens
    constant = length if algorithm.aggregation == "seq_mean_token_sum_norm" else None
    scale = aggregation_scale(batch.mask, algorithm.aggregation, constant, dtype=torch.float64)
    old = batch.rollout if algorithm.correction.bypass else batch.old
    loss, _ = algorithm.loss.loss(batch.theta, old, advantage_B, valid, weight, scale)
    return loss


FEATURES = [
    ("algorithm.correction=none",),
    ("algorithm.correction=token_tis",),
    ("algorithm.correction=sequence_tis",),
    ("algorithm.correction=icepop",),
    ("algorithm.correction=token_mis",),
    ("algorithm.correction=sequence_mis",),
    ("algorithm.correction=token_tis_normalized",),
    ("algorithm.correction=sequence_is",),
    ("algorithm.correction={reject_unit: token, reject_by: k1, reject_low: 0.8, reject_high: 1.9}",),
    ("algorithm.correction={reject_unit: token, reject_by: k1, reject_high: 1.3}",),
    ("algorithm.correction={reject_unit: sequence_mean, reject_by: k1, reject_low: 0.9, reject_high: 1.4}",),
    ("algorithm.correction={reject_unit: sequence_sum, reject_by: k1, reject_low: 0.05, reject_high: 4}",),
    ("algorithm.correction={reject_unit: sequence_mean, reject_by: k3, reject_high: 0.2}",),
    ("algorithm.correction={reject_unit: sequence_max, reject_by: k2, reject_high: 0.9}",),
    ("algorithm.correction=bypass",),
    ("algorithm.correction={bypass: true, reject_unit: sequence_mean, reject_by: k3, reject_high: 0.12}",),
    ("algorithm.loss=dapo", "algorithm.loss.dual_clip=1.1"),
    ("algorithm.loss=dapo", "algorithm.loss.dual_clip=.inf", "algorithm.correction=icepop"),
    ("algorithm.loss=cispo", "algorithm.correction=token_tis"),
    ("algorithm.loss=cispo", "algorithm.loss.clip_low=0.1", "algorithm.correction=icepop"),
    ("algorithm.loss=gspo", "algorithm.correction=sequence_mis"),
    ("algorithm.loss=gmpo", "algorithm.correction=sequence_tis"),
    ("algorithm.loss={kind: gmpo, clip_low: 0.05, clip_high: 0.1}", "algorithm.correction=none"),
    ("algorithm.loss=sapo", "algorithm.correction=token_tis"),
    ("algorithm.loss=sapo", "algorithm.loss.tau_negative=3", "algorithm.correction=none"),
    ("algorithm.loss=dppo", "algorithm.loss.clip_low=0.02", "algorithm.correction=token_tis"),
    ("algorithm.loss={kind: dppo, divergence: kl, clip_low: 1e-3, truncate_at: 1.2}", "algorithm.correction=none"),
    ("algorithm.loss=reinforce", "algorithm.correction=sequence_is"),
    ("algorithm.loss=reinforce", "algorithm.correction=token_mis"),
    ("algorithm.aggregation=seq_mean_token_mean", "algorithm.advantage=rloo"),
    ("algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.advantage=dr_grpo"),
    ("algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.aggregation_length=7"),
]  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(features))
def test_verl_s_loss_and_gradient_are_ours(
    features: tuple[str, ...], told: Callable[..., Any], recipe: Callable[..., RunConfig], batch: Batch
) -> None:
    config = recipe(*features)
    advantage_B, _ = advantage(batch.reward, batch.group, config.algorithm.advantage)
    theirs = verl_loss(told(*features), batch, advantage_B)
    ours = our_loss(config, batch, advantage_B)
    # verl adds 1e-8 to a sequence's length
    torch.testing.assert_close(theirs, ours, rtol=2e-8, atol=1e-12)
    torch.testing.assert_close(batch.gradient(theirs), batch.gradient(ours), rtol=2e-8, atol=1e-12)


def test_the_features_differ_from_one_another(recipe: Callable[..., RunConfig], batch: Batch) -> None:
    """So that agreement on each is agreement about it: no two corrections of one loss come to one number."""
    losses = []
    for features in FEATURES[:14]:
        config = recipe(*features)
        advantage_B, _ = advantage(batch.reward, batch.group, config.algorithm.advantage)
        losses.append(round(our_loss(config, batch, advantage_B).item(), 9))
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(
    "loss",
    ["{kind: kl_cov, share: 0.3}", "{kind: clip_cov, share: 1, low: 0.05, high: 0.8}"],
)
def test_verl_chooses_the_tokens_that_we_choose_and_has_our_loss(
    loss: str, told: Callable[..., Any], recipe: Callable[..., RunConfig], batch: Batch
) -> None:
    """Near enough to old that the order of covariances is one; verl's random draw is of all that are eligible."""
    features = (f"algorithm.loss={loss}", "algorithm.correction=token_tis")
    config = recipe(*features)
    batch.theta = (batch.old + 1e-6 * torch.sin(torch.arange(72.0, dtype=torch.float64)).view(8, 9)).requires_grad_()
    advantage_B, _ = advantage(batch.reward, batch.group, config.algorithm.advantage)
    theirs = verl_loss(told(*features), batch, advantage_B)
    weight, valid, _ = correction(batch.old, batch.rollout, batch.mask, config.algorithm.correction)
    scale = aggregation_scale(batch.mask, "token_mean", dtype=torch.float64)
    chosen = config.algorithm.loss.select(batch.old, advantage_B, valid, torch.Generator().manual_seed(0))
    assert 0 < int(chosen.sum()) < int(valid.sum())
    ours, _ = config.algorithm.loss.loss(batch.theta, batch.old, advantage_B, valid, weight, scale, chosen_BT=chosen)
    torch.testing.assert_close(theirs, ours, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(batch.gradient(theirs), batch.gradient(ours), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_verl_s_advantages_are_ours(kind: str, told: Callable[..., Any], batch: Batch) -> None:
    import numpy as np
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    tree = told(f"algorithm.advantage={kind}")
    rewards = torch.zeros_like(batch.rollout)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = batch.reward
    more = {} if kind == "rloo" else {"norm_adv_by_std_in_grpo": tree.algorithm.norm_adv_by_std_in_grpo}
    theirs, _ = get_adv_estimator_fn(tree.algorithm.adv_estimator)(
        token_level_rewards=rewards, response_mask=batch.mask.double(), index=np.array(GROUPS), **more
    )
    ours, _ = advantage(batch.reward, batch.group, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(theirs, ours[:, None] * batch.mask, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_verl_s_kl_is_ours(
    estimator: str, told: Callable[..., Any], recipe: Callable[..., RunConfig], batch: Batch
) -> None:
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    features = ("algorithm.reference={}", f"algorithm.kl={{coefficient: 0.3, estimator: {estimator}}}",
                "algorithm.correction=none")  # fmt: skip
    actor, kl = told(*features).actor_rollout_ref.actor, recipe(*features).algorithm.kl
    assert kl is not None
    estimate = kl_penalty(batch.theta, batch.ref, actor.kl_loss_type)
    theirs = actor.kl_loss_coef * agg_loss(estimate, batch.mask.double(), actor.loss_agg_mode)
    scale = aggregation_scale(batch.mask, "token_mean", dtype=torch.float64)
    ours, _ = kl_loss(batch.theta, batch.ref, batch.mask, torch.ones_like(scale), scale, kl)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(batch.gradient(theirs), batch.gradient(ours))


def test_a_bypass_without_its_copy_rejects_nothing(told: Callable[..., Any], batch: Batch, verl_version: str) -> None:
    """The trap that the exporter steps around: 0.9's trainer never looks at ``rollout_rs`` beside ``bypass_mode``."""
    from pathlib import Path

    import verl

    trainer = Path(verl.__file__).parent / "trainer" / "ppo" / "v1" / "trainer_base.py"
    if verl_version == "0.8.0":
        assert not trainer.exists()
        return
    assert "bypass_mode" in trainer.read_text()
    assert "apply_bypass_mode" not in trainer.read_text()
    tree = told("algorithm.correction={bypass: true, reject_unit: token, reject_by: k3, reject_high: 0.01}")
    assert tree.actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_rs == "token_k3"
    assert tree.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode"


@pytest.mark.parametrize("length", [1, 800, 896, 897, 1000, 1023, 1024])
@pytest.mark.parametrize("right", [True, False])
def test_verl_grades_and_punishes_length_as_we_do(
    length: int, right: bool, told: Callable[..., Any], recipe: Callable[..., RunConfig]
) -> None:
    """Through verl's own reward manager, which loads our function by the exported path."""
    import asyncio

    import numpy as np
    from tensordict import TensorDict
    from verl.trainer.ppo.reward import load_reward_manager

    from verl import DataProto

    features = ("rollout.overlong={buffer: 128, factor: 0.5}",)
    text = "so it is. Answer: 42" if right else "so it is. Answer: 41"

    class Tokenizer:
        def decode(self, ids: Tensor, skip_special_tokens: bool = True) -> str:
            assert len(ids) == length
            return text

    manager = load_reward_manager(told(*features), Tokenizer())
    mask = (torch.arange(1024) < length).long()[None]
    batch = TensorDict({"responses": torch.zeros(1, 1024, dtype=torch.long), "attention_mask": mask}, batch_size=1)
    row = {
        "data_source": "math_dapo",
        "reward_model": {"ground_truth": "42", "style": "rule"},
        "extra_info": {"index": 0},
    }
    data = DataProto(batch=batch, non_tensor_batch={key: np.array([value], dtype=object) for key, value in row.items()})
    result = manager.loop.run_until_complete(manager.run_single(data))
    manager.loop.close()
    asyncio.set_event_loop(None)
    config = recipe(*features)
    wanted = (1.0 if right else -1.0) + overlong_penalty(length, 1024, config.rollout.overlong)
    assert float(result["reward_score"]) == pytest.approx(wanted, abs=1e-6)
    assert result["reward_extra_info"]["acc"] == float(right)
    assert result["reward_extra_info"]["grading_error"] == 0.0


@pytest.mark.usefixtures("verl_folder")
def test_gdpo_is_verls() -> None:
    """verl's final normalisation is over tokens, with 1e-8 under the root: responses of one length, that taken out."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

    draw = torch.Generator().manual_seed(0)
    groups = torch.arange(24) // 4
    terms = torch.randint(0, 3, (24, 3), generator=draw).double()
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    mask = torch.ones(24, 5)
    extra = {f"r{k}": terms[:, k].numpy() for k in range(3)}
    config = OmegaConf.create({"gdpo_reward_keys": list(extra), "gdpo_reward_weights": weights.tolist()})
    batch = {"prompts": torch.zeros(24, 2), "attention_mask": torch.ones(24, 7, dtype=torch.int64)}
    zeros = torch.zeros(24, 5, dtype=torch.float64)
    theirs, _ = compute_gdpo_outcome_advantage(
        zeros, mask, groups.numpy(), config=config, non_tensor_batch=extra, batch=batch
    )
    ours, _ = advantage((terms * weights).sum(1), groups, "gdpo", terms, weights.expand(24, 3))
    one = sum(weights[k] * advantage(terms[:, k].contiguous(), groups, "grpo")[0] for k in range(3))
    over_tokens = one[:, None].expand(24, 5).flatten()
    theirs_once_more = theirs[:, 0].double() * (over_tokens.var(correction=1) + 1e-8).sqrt()
    torch.testing.assert_close(theirs_once_more, ours * (one.std(correction=1) + 1e-6), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("verl_folder")
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.9)])
def test_gae_and_the_value_loss_are_verls(gamma: float, lam: float) -> None:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss

    draw = torch.Generator().manual_seed(5)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    reward, old, new = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((8,), mask.shape, mask.shape)
    )
    rewards = torch.zeros_like(old)
    rewards[torch.arange(8), torch.tensor(LENGTHS) - 1] = reward
    theirs, returns = compute_gae_advantage_return(rewards, old, mask.double(), gamma, lam)
    ours, target, _ = gae(reward, old, mask, gamma, lam)
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(target[mask], returns[mask], rtol=1e-8, atol=1e-8)
    value = new.clone().requires_grad_()
    loss, held = compute_value_loss(value, returns, old, mask.double(), 0.5)
    (expected,) = torch.autograd.grad(loss, value)
    own, metrics = value_loss(value, old, target, mask, aggregation_scale(mask, "token_mean", dtype=torch.float64), 0.5)
    torch.testing.assert_close(own, loss, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.autograd.grad(own, value)[0], expected, rtol=1e-8, atol=1e-8)
    assert abs(float(values(metrics)["critic/clip_fraction"]) - float(held)) < 1e-6
