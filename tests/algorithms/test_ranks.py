"""One optimiser batch in micro-batches, on one rank or more: the sum of their gradients is the gradient of the batch.

The correction judges rows by themselves; the weight of each token in the loss is of the whole batch, and sliced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.algorithms import (
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DPPOConfig,
    FlowRLConfig,
    GMPOConfig,
    GSPOConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
    advantage,
    aggregation_scale,
    correction,
    importance_weights,
)
from mantissa.precision import merge, token_logprob, values

B, T, V, GROUPS = 9, 6, 5, 3
AGGREGATIONS = (("token_mean", None), ("seq_mean_token_mean", None), ("seq_mean_token_sum_norm", float(T)))
LOSSES = (
    ReinforceConfig(), PPOClipConfig(), DAPOConfig(), GSPOConfig(), CISPOConfig(), GMPOConfig(), SAPOConfig(),
    DPPOConfig(), DPPOConfig(divergence="kl"), FlowRLConfig(beta=2.0),
    FlowRLConfig(beta=2.0, importance="token"), FlowRLConfig(beta=2.0, importance="sequence"),
)  # fmt: skip
CORRECTIONS = ("none", "token_tis", "sequence_mis", "sequence_rejection", "k3_rejection_token_tis")
Data = dict[str, Tensor]


def make_batch(seed: int) -> Data:
    """Rows of three groups in order; some rows are empty, and one has a log-prob that is not a number."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old_BTV, tokens_BT = normal(B, T, V), torch.randint(0, V, (B, T), generator=random)
    rollout_BT = token_logprob(old_BTV + 0.3 * normal(B, T, V), tokens_BT)
    rollout_BT[seed % B, 0] = float("nan")
    return {
        "old_BTV": old_BTV,
        "tokens_BT": tokens_BT,
        "mask_BT": torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=random),
        "rollout_BT": rollout_BT,
        "ref_BT": token_logprob(old_BTV + 0.3 * normal(B, T, V), tokens_BT),
        "state_B": normal(B),
        "reward_B": torch.randint(0, 2, (B,), generator=random).double(),
        "group_B": torch.arange(B) * GROUPS // B,
    }


def backward(data: Data, scale_BT: Tensor, config: Any, corrected: CorrectionConfig) -> tuple[Tensor, Tensor, Any]:
    """One rank: loss, gradient and tallies of its rows. Two parameters: a shift of all logits, and log Z's slope."""
    draw = torch.Generator().manual_seed(0)
    theta_V = (0.3 * torch.randn(V, generator=draw, dtype=torch.float64)).requires_grad_()
    slope = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    old_BT = token_logprob(data["old_BTV"], data["tokens_BT"])
    logp_BT = token_logprob(data["old_BTV"] + theta_V, data["tokens_BT"])
    valid_BT, weight_BT, advantage_B = data["valid_BT"], data["weight_BT"], data["advantage"]
    if isinstance(config, FlowRLConfig):
        log_z_B = slope * data["state_B"]
        more = {"ref_logp_BT": data["ref_BT"], "log_z_B": log_z_B}
        loss, tallies = config.loss(logp_BT, old_BT, advantage_B, valid_BT, weight_BT, scale_BT, **more)
    else:
        if isinstance(config, ReinforceConfig):  # as in training
            weight_BT, _ = importance_weights(
                logp_BT.detach(), data["rollout_BT"], data["mask_BT"], valid_BT, corrected
            )
        loss, tallies = config.loss(logp_BT, old_BT, advantage_B, valid_BT, weight_BT, scale_BT)
    of_theta, of_slope = torch.autograd.grad(loss, (theta_V, slope), allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat([of_theta, of_slope]), tallies


def in_parts(
    batch: Data, shares: list[Tensor], config: Any, corrected: CorrectionConfig, kind: Any, constant: float | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient and metrics summed over micro-batches, whatever the ranks that have them."""
    old_BT = token_logprob(batch["old_BTV"], batch["tokens_BT"])
    apart = [
        correction(*(x[rows] for x in (old_BT, batch["rollout_BT"], batch["mask_BT"])), corrected) for rows in shares
    ]
    order = torch.cat(shares).argsort()
    batch |= {"weight_BT": torch.cat([w for w, _, _ in apart])[order]}
    batch |= {"valid_BT": torch.cat([valid for _, valid, _ in apart])[order]}
    scale_BT = aggregation_scale(batch["valid_BT"], kind, constant, dtype=torch.float64)
    parts = [backward({n: x[rows] for n, x in batch.items()}, scale_BT[rows], config, corrected) for rows in shares]
    losses, gradients, metrics = zip(*parts, strict=True)
    every = merge([of_loss | of_weights for of_loss, (_, _, of_weights) in zip(metrics, apart, strict=True)])
    return torch.stack(losses).sum(), torch.stack(gradients).sum(0), values(every)


def assert_same(apart: tuple[Any, ...], whole: tuple[Any, ...]) -> None:
    torch.testing.assert_close(apart[0], whole[0], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(apart[1], whole[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(apart[2], whole[2], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("config", LOSSES, ids=str)
@settings(deadline=None, max_examples=8)
@given(
    aggregation=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, B), max_size=2),
    preset=st.sampled_from(CORRECTIONS),
    idle=st.booleans(),
)
def test_micro_batches_sum_to_the_gradient_of_one(
    config: Any, aggregation: tuple[str, float | None], seed: int, cuts: list[int], preset: str, idle: bool
) -> None:
    """However the batch is cut, in any order: the same loss, gradient and metrics, of the correction too."""
    batch, corrected = make_batch(seed), CorrectionConfig.model_validate(preset)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    shares = list(order.tensor_split(sorted(cuts)))  # of unequal sizes, some without a row
    if idle:  # the first rank's rows have no token that counts
        batch["mask_BT"][shares[0]] = False
    batch["advantage"], _ = advantage(batch["reward_B"], batch["group_B"], "grpo")
    whole = in_parts(batch, [torch.arange(B)], config, corrected, *aggregation)
    assert_same(in_parts(batch, shares, config, corrected, *aggregation), whole)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_ranks_with_whole_groups_make_their_own_advantages(kind: Any) -> None:
    batch = make_batch(4)
    whole, tallies = advantage(batch["reward_B"], batch["group_B"], kind)
    shares = [torch.arange(3), torch.arange(3, B)]
    apart = [advantage(batch["reward_B"][rows], batch["group_B"][rows], kind) for rows in shares]
    assert whole.abs().max() > 0.1
    assert torch.equal(torch.cat([part[0] for part in apart]), whole)
    torch.testing.assert_close(values(merge([part[1] for part in apart])), values(tallies), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("kind", "constant"), AGGREGATIONS)
def test_on_average_sequence_weights_undo_the_gap(kind: str, constant: float | None) -> None:
    """The reason for all of it: sampled from the rollout and weighted, the gradient is the learner's own.

    Every sequence of two tokens over two words is enumerated and weighted by its probability under the rollout; the
    expectation of the weighted REINFORCE gradient is then the derivative of the learner's expected reward.
    """
    rollout = torch.log_softmax(torch.tensor([0.3, -0.4], dtype=torch.float64), 0)
    reward_22 = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    theta = torch.tensor([0.1, 0.9], dtype=torch.float64, requires_grad=True)
    learner = torch.log_softmax(theta, 0)
    expected_reward = (learner[:, None] + learner[None, :]).exp().mul(reward_22).sum()
    truth = torch.autograd.grad(expected_reward, theta)[0]

    words = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    log_words = torch.log_softmax(theta, 0)[words]
    rollout_BT = rollout[words]
    mask_BT = torch.ones(4, 2, dtype=torch.bool)
    sequence_is = CorrectionConfig.model_validate("sequence_is")
    weight_BT, valid_BT, _ = correction(log_words.detach(), rollout_BT, mask_BT, sequence_is)
    scale_BT = aggregation_scale(valid_BT, kind, constant, dtype=torch.float64)
    share = scale_BT[0, 0]  # all lengths are equal, so every aggregation is a constant here
    probability_BT = rollout_BT.sum(-1, keepdim=True).exp().expand(4, 2)
    loss, _ = ReinforceConfig().loss(
        log_words, log_words.detach(), reward_22.flatten(), valid_BT, weight_BT, scale_BT / share * probability_BT
    )
    torch.testing.assert_close(-torch.autograd.grad(loss, theta)[0], truth, rtol=1e-12, atol=1e-14)
