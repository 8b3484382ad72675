"""KL to the reference: values by loops, and what each estimator's gradient does, by enumerating every outcome."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mantissa.algorithms import KLConfig, aggregation_scale, kl_loss, kl_reward
from mantissa.base.errors import MantissaError
from mantissa.precision import values

NAN, INF = float("nan"), float("inf")
KINDS = ("k1", "k2", "k3")
B, T = 5, 4


def make_batch(seed: int, spread: float = 0.3) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logp = -torch.randn(B, T, generator=random, dtype=torch.float64).abs()
    mask = torch.rand(B, T, generator=random) > 0.3
    return {
        "logp_BT": logp,
        "ref_logp_BT": logp + spread * torch.randn(B, T, generator=random, dtype=torch.float64),
        "mask_BT": mask,
        "weight_BT": torch.rand(B, T, generator=random, dtype=torch.float64),
        "scale_BT": aggregation_scale(mask, "token_mean", dtype=torch.float64),
    }


def by_hand(kind: str, log_r: float) -> tuple[float, float]:
    """The estimate, and its derivative by logp (of which log r is minus that)."""
    if kind == "k1":
        return -log_r, 1.0
    if kind == "k2":
        return log_r**2 / 2, -log_r
    x = min(log_r, 20.0)
    return math.expm1(x) - x, -math.expm1(x) if log_r <= 20 else 0.0


def config(kind: str, where: str = "loss") -> KLConfig:
    return KLConfig(where=where, estimator=kind, coefficient=0.25)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-6, 0.3, 15.0]))
def test_the_loss_and_its_gradient_are_those_of_scalar_math(kind: str, seed: int, spread: float) -> None:
    batch = make_batch(seed, spread)
    logp = batch["logp_BT"].clone().requires_grad_()
    loss, tallies = kl_loss(**(batch | {"logp_BT": logp}), config=config(kind))
    loss.backward()
    expected, gradient = 0.0, [[0.0] * T for _ in range(B)]
    for i, t in batch["mask_BT"].nonzero().tolist():
        log_r = batch["ref_logp_BT"][i, t].item() - batch["logp_BT"][i, t].item()
        value, slope = by_hand(kind, log_r)
        factor = 0.25 * batch["scale_BT"][i, t].item() * batch["weight_BT"][i, t].item()
        expected += factor * value
        gradient[i][t] = factor * slope
    assert loss.item() == pytest.approx(expected, rel=1e-8, abs=1e-22)
    torch.testing.assert_close(logp.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=1e-16)
    assert values(tallies)["reference/penalty"].item() == loss.item()
    mask = batch["mask_BT"]
    log_r = (batch["ref_logp_BT"] - batch["logp_BT"])[mask].tolist()
    k1 = -math.fsum(log_r) / max(len(log_r), 1)
    assert values(tallies)["reference/kl"].item() == pytest.approx(k1, rel=1e-9, abs=2e-15 * spread)
    k3 = math.fsum(by_hand("k3", x)[0] for x in log_r) / max(len(log_r), 1)
    assert values(tallies)["reference/k3_kl"].item() == pytest.approx(k3, rel=1e-9, abs=1e-25)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_in_the_reward_it_is_the_sum_over_the_response(kind: str, seed: int) -> None:
    batch = make_batch(seed)
    reward = torch.arange(B, dtype=torch.float64)
    shaped, tallies = kl_reward(reward, batch["logp_BT"], batch["ref_logp_BT"], batch["mask_BT"], config(kind))
    taken = 0.0
    for i in range(B):
        here = batch["mask_BT"][i].nonzero().flatten().tolist()
        log_r = [(batch["ref_logp_BT"][i, t] - batch["logp_BT"][i, t]).item() for t in here]
        penalty = 0.25 * math.fsum(by_hand(kind, x)[0] for x in log_r)
        taken += penalty
        assert shaped[i].item() == pytest.approx(i - penalty, rel=1e-12, abs=1e-14)
    assert values(tallies)["reference/penalty"].item() == pytest.approx(taken, rel=1e-11, abs=1e-14)


def test_missing_or_broken_reference_log_probs_do_not_pass_unseen() -> None:
    batch: dict[str, Any] = make_batch(1)
    with pytest.raises(MantissaError, match="reference policy's log-probs and got none"):
        kl_loss(**(batch | {"ref_logp_BT": None}), config=config("k3"))
    with pytest.raises(MantissaError, match="reference policy's log-probs and got none"):
        kl_reward(torch.zeros(B), batch["logp_BT"], None, batch["mask_BT"], config("k1"))
    row, column = batch["mask_BT"].nonzero()[0].tolist()
    batch["ref_logp_BT"][row, column] = -INF
    loss, tallies = kl_loss(**batch, config=config("k2"))
    assert not loss.isfinite()
    measured = values(tallies)
    assert measured["reference/nonfinite"].item() == 1
    assert measured["reference/kl"].isfinite()
    assert measured["reference/k3_kl"].isfinite()


@pytest.mark.parametrize("kind", ["k1", "k3"])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_with_the_ratio_it_is_scalar_math_with_the_ratios_own_gradient(kind: str, seed: int) -> None:
    batch = make_batch(seed)
    old = batch["logp_BT"] + 0.2 * torch.sin(torch.arange(B * T, dtype=torch.float64)).view(B, T)
    logp = batch["logp_BT"].clone().requires_grad_()
    asked = KLConfig(estimator=kind, coefficient=0.25, ratio=True)
    loss, _ = kl_loss(**(batch | {"logp_BT": logp}), config=asked, old_logp_BT=old)
    loss.backward()
    expected, gradient = 0.0, [[0.0] * T for _ in range(B)]
    for i, t in batch["mask_BT"].nonzero().tolist():
        here = batch["logp_BT"][i, t].item()
        value, slope = by_hand(kind, batch["ref_logp_BT"][i, t].item() - here)
        ratio = math.exp(here - old[i, t].item())
        factor = 0.25 * batch["scale_BT"][i, t].item() * batch["weight_BT"][i, t].item()
        expected += factor * ratio * value
        gradient[i][t] = factor * ratio * (value + slope)
    assert loss.item() == pytest.approx(expected, rel=1e-8, abs=1e-22)
    torch.testing.assert_close(logp.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-8, atol=1e-15)
    with pytest.raises(MantissaError, match="whose log-probs are missing"):
        kl_loss(**batch, config=asked)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_with_the_ratio_its_expectation_is_the_kl_and_its_gradient_also_off_policy(kind: str) -> None:
    """Every token of a vocabulary by its probability under old: value and gradient are those of KL(theta || ref)."""
    draw = torch.Generator().manual_seed(4)
    theta, old, ref = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    theta.requires_grad_()
    p, q, r = theta.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    truth = (p.exp() * (p - r)).sum()
    wanted = torch.autograd.grad(truth, theta, retain_graph=True)[0]
    every = torch.ones(1, 6, dtype=torch.bool)
    asked = KLConfig(estimator=kind, coefficient=1.0, ratio=True)  # type: ignore[arg-type]
    loss, _ = kl_loss(p[None], r[None], every, torch.ones(1, 6, dtype=torch.float64), q.exp()[None], asked, q[None])
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fields", [{"where": "reward", "estimator": "k1"}, {"estimator": "k2"}])
def test_a_ratio_without_a_use_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"kl\.ratio"):
        KLConfig(coefficient=1.0, ratio=True, **fields)


@pytest.mark.parametrize("fields", [{"coefficient": 0.0}, {"coefficient": -1.0}, {}, {"coefficient": 1, "kind": "k1"}])
def test_a_penalty_has_a_positive_coefficient(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KLConfig(**fields)
