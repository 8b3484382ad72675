"""One optimiser batch, cut in any way: the same loss, the same gradient, the same metrics.

A small policy (a table of logits) stands in for the model, so that the gradient is one of parameters and accumulates
over micro-batches as in training.
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
    GSPOConfig,
    PPOClipConfig,
    ReinforceConfig,
    advantage,
    aggregation_scale,
    correction,
    merge,
    policy_loss,
    values,
)
from mantissa.precision.numerics import token_logprob

B, T, V = 8, 6, 5
AGGREGATIONS = (("token_mean", None), ("seq_mean_token_mean", None), ("seq_mean_token_sum_norm", float(T)))


def make_batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, T + 1, (B,), generator=random)
    old = torch.randn(B, T, V, generator=random, dtype=torch.float64)
    tokens_BT = torch.randint(0, V, (B, T), generator=random)
    rollout_BT = token_logprob(old + 0.3 * torch.randn(B, T, V, generator=random, dtype=torch.float64), tokens_BT)
    rollout_BT[seed % B, 0] = float("nan")
    return {
        "theta": torch.randn(V, generator=random, dtype=torch.float64),
        "old": old,
        "tokens_BT": tokens_BT,
        "mask_BT": torch.arange(T) < length_B.unsqueeze(-1),
        "rollout_BT": rollout_BT,
        "rewards_B": torch.randint(0, 2, (B,), generator=random).double(),
        "group_B": torch.randint(0, 3, (B,), generator=random),
    }


def step(
    batch: dict[str, Tensor], rows: list[Tensor], kind: str, constant: float | None, config: Any, correct: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One optimiser step as the loop makes it: whole-batch quantities once, then the micro-batches in ``rows``."""
    theta = batch["theta"].clone().requires_grad_()
    old_BT = token_logprob(batch["old"], batch["tokens_BT"])
    advantage_B, _ = advantage(batch["rewards_B"], batch["group_B"], "grpo")
    corrected = CorrectionConfig.model_validate(correct)
    weight_BT, valid_BT, _ = correction(old_BT, batch["rollout_BT"], batch["mask_BT"], corrected)
    scale_BT = aggregation_scale(valid_BT, kind, constant, dtype=torch.float64)
    total, tallies = torch.zeros((), dtype=torch.float64), []
    for row in rows:
        logp_BT = token_logprob(batch["old"][row] + theta, batch["tokens_BT"][row])
        loss, metrics = policy_loss(
            logp_BT, old_BT[row], advantage_B[row], valid_BT[row], weight_BT[row], scale_BT[row], config
        )
        loss.backward()
        total, tallies = total + loss.detach(), [*tallies, metrics]
        # The correction's tallies add up as well, when it is made for each micro-batch (a batch's mean cannot be).
        if not corrected.normalize:
            apart = correction(old_BT[row], batch["rollout_BT"][row], batch["mask_BT"][row], corrected)[2]
            tallies[-1] = tallies[-1] | apart
    assert theta.grad is not None
    return total, theta.grad, values(merge(tallies))


@pytest.mark.parametrize(("kind", "constant"), AGGREGATIONS)
@pytest.mark.parametrize(
    "config", [ReinforceConfig(), PPOClipConfig(), DAPOConfig(), GSPOConfig(), CISPOConfig()], ids=lambda c: c.kind
)
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(1, B - 1), unique=True, max_size=4),
    correct=st.sampled_from(
        ["none", "token_tis", "sequence_mis", "sequence_rejection", "k3_rejection_token_tis", "token_tis_normalized"]
    ),
)
def test_the_split_and_the_order_never_show(
    kind: str, constant: float | None, config: Any, seed: int, cuts: list[int], correct: str
) -> None:
    batch = make_batch(seed)
    whole = step(batch, [torch.arange(B)], kind, constant, config, correct)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    rows = list(order.tensor_split(sorted(cuts)))
    apart = step(batch, rows, kind, constant, config, correct)
    torch.testing.assert_close(apart[0], whole[0], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(apart[1], whole[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(apart[2], whole[2], rtol=1e-12, atol=1e-14)


def test_the_usual_mean_of_means_would_show_the_split() -> None:
    """What this design avoids: were each micro-batch normalised by itself, the gradient would depend on the cut."""
    batch = make_batch(1)
    lengths = batch["mask_BT"].sum(-1)
    assert lengths[:4].sum() != lengths[4:].sum()
    old_BT = token_logprob(batch["old"], batch["tokens_BT"])
    per_half = [old_BT[h][batch["mask_BT"][h]].mean() for h in (slice(0, 4), slice(4, 8))]
    assert not torch.isclose(sum(per_half) / 2, old_BT[batch["mask_BT"]].mean(), rtol=1e-3)


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
    loss, _ = policy_loss(
        log_words, log_words.detach(), reward_22.flatten(), valid_BT, weight_BT, scale_BT / share * probability_BT,
        ReinforceConfig(),
    )  # fmt: skip
    torch.testing.assert_close(-torch.autograd.grad(loss, theta)[0], truth, rtol=1e-12, atol=1e-14)
