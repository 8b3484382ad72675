"""Policy losses: values against loops of scalar math, gradients against their closed forms and finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mantissa.algorithms import (
    LOSSES,
    CISPOConfig,
    DAPOConfig,
    DPPOConfig,
    GMPOConfig,
    GSPOConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from mantissa.algorithms.losses.base import TokenLoss, of_each_token
from mantissa.precision import values

INF, NAN = float("inf"), float("nan")
CONFIGS = (
    ReinforceConfig(),
    PPOClipConfig(),
    PPOClipConfig(clip_low=0.1, clip_high=0.28),
    DAPOConfig(),
    DAPOConfig(dual_clip=1.5),
    DAPOConfig(dual_clip=INF),
    GSPOConfig(),
    GSPOConfig(clip_low=0.1, clip_high=0.2),
    CISPOConfig(),
    CISPOConfig(clip_low=0.2),
    GMPOConfig(),
    GMPOConfig(clip_low=0.1, clip_high=0.2),
    SAPOConfig(),
    SAPOConfig(tau_positive=0.5, tau_negative=3.0),
    DPPOConfig(),
    DPPOConfig(divergence="kl"),
    DPPOConfig(divergence="kl", clip_low=1e-3, clip_high=0.01, truncate_at=1.1),
)
UNCLIPPED = (ReinforceConfig, SAPOConfig)
Batch = dict[str, Tensor]


def make_batch(seed: int, spread: float = 0.3, dtype: torch.dtype = torch.float64) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    old_BT = -normal(4, 5).abs()
    mask_BT = torch.rand(4, 5, generator=random) > 0.3
    mask_BT[seed % 4] = False
    return {
        "logp_BT": old_BT + spread * normal(4, 5),
        "old_logp_BT": old_BT,
        "advantage": normal(4),
        "mask_BT": mask_BT,
        "weight_BT": normal(4, 5).abs(),
        "scale_BT": normal(4, 5).abs(),
    }


def loss_and_gradient(batch: Batch, config: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logp_BT = batch["logp_BT"].clone().requires_grad_()
    loss, metrics = config.loss(**(batch | {"logp_BT": logp_BT}))
    loss.backward()
    assert logp_BT.grad is not None
    return loss.detach(), logp_BT.grad, values(metrics)


def bounded(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def of_token(config: Any, logp: float, old: float, a: float) -> tuple[float, float, bool]:
    """Minus the loss of a token without weight and scale, its derivative by logp, and whether a bound holds it."""
    ratio, inside = math.exp(bounded(logp - old)), abs(logp - old) <= 20
    if isinstance(config, SAPOConfig):
        tau = config.tau_positive if a > 0 else config.tau_negative
        s = tau * (ratio - 1)
        gate = 1 / (1 + math.exp(-s)) if s > -700 else 0.0
        return 4 / tau * gate * a, 4 * gate * (1 - gate) * ratio * a * inside, False
    if isinstance(config, DPPOConfig):
        p, q = math.exp(logp), math.exp(old)
        moved = abs(p - q)
        if config.divergence == "kl":
            other_p, other_q = max(1 - p, 0.0), max(1 - q, 0.0)
            moved = q * (old - logp) + other_q * math.log((other_q + 1e-8) / (other_p + 1e-8))
        dropped = (p > q and moved > config.clip_high) if a > 0 else (p <= q and moved > config.clip_low)
        factor = 0.0 if dropped else min(ratio, config.truncate_at) * a
        return factor * logp, factor, dropped or ratio > config.truncate_at
    if isinstance(config, ReinforceConfig):
        return a * logp, a, False
    assert isinstance(config, CISPOConfig)
    factor = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return factor * a * logp, factor * a, factor != ratio


def of_gmpo(config: GMPOConfig, log_ratios: list[float], a: float) -> tuple[float, list[bool]]:
    """Geometric mean of the clipped ratios of a sequence, and which tokens are held."""
    held = [x > config.clip_high if a > 0 else x < -config.clip_low if a < 0 else False for x in log_ratios]
    clipped = [
        min(max(x, -config.clip_low), config.clip_high) if h else x for x, h in zip(log_ratios, held, strict=True)
    ]
    return math.fsum(clipped) / max(len(clipped), 1), held


def oracle(batch: Batch, config: Any) -> tuple[float, list[list[float]], int]:
    """Loss, its gradient by hand, and how many tokens the bound holds; the gradient of a ratio is the ratio."""
    loss, held_tokens = 0.0, 0
    gradient = [[0.0] * batch["mask_BT"].shape[1] for _ in range(batch["mask_BT"].shape[0])]
    for i, row in enumerate(batch["mask_BT"].tolist()):
        a = batch["advantage"][i].item()
        here = [t for t, valid in enumerate(row) if valid]
        log_ratios = [batch["logp_BT"][i, t].item() - batch["old_logp_BT"][i, t].item() for t in here]
        for t, log_ratio in zip(here, log_ratios, strict=True):
            logp, weight, scale = (batch[name][i, t].item() for name in ("logp_BT", "weight_BT", "scale_BT"))
            if isinstance(config, GSPOConfig):
                log_ratio = math.fsum(log_ratios) / len(log_ratios)
            ratio, inside = math.exp(bounded(log_ratio)), abs(log_ratio) <= 20
            if isinstance(config, ReinforceConfig | CISPOConfig | SAPOConfig | DPPOConfig):
                value, slope, held = of_token(config, logp, batch["old_logp_BT"][i, t].item(), a)
                loss -= scale * weight * value
                gradient[i][t] = -scale * weight * slope
                held_tokens += held
                continue
            if isinstance(config, GMPOConfig):
                mean, every = of_gmpo(config, log_ratios, a)
                loss -= scale * weight * math.exp(bounded(mean)) * a
                held_tokens += every[here.index(t)]
                if not every[here.index(t)] and abs(mean) <= 20:
                    gradient[i][t] = -scale * weight * math.exp(mean) * a
                continue
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            value, held = min(ratio * a, clipped * a), clipped * a < ratio * a
            if isinstance(config, DAPOConfig) and a < 0 and value < config.dual_clip * a:
                value, held = config.dual_clip * a, True
            loss -= scale * weight * value
            held_tokens += held
            if not held and inside:
                gradient[i][t] = -scale * weight * a * ratio
    return loss, gradient, held_tokens


def test_every_loss_by_the_token_is_among_the_cases() -> None:
    by_token = {kind for kind, loss in LOSSES.items() if issubclass(loss, TokenLoss)}
    assert by_token - {"custom"} == {c.kind for c in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 40.0]))
def test_value_and_gradient_are_those_of_scalar_math(config: Any, seed: int, spread: float) -> None:
    batch = make_batch(seed, spread)
    loss, gradient, metrics = loss_and_gradient(batch, config)
    expected, by_hand, clipped = oracle(batch, config)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert metrics["policy/loss"].item() == loss.item()
    if not isinstance(config, UNCLIPPED):
        assert metrics["policy/clip_fraction"].item() == pytest.approx(clipped / batch["mask_BT"].sum().item())
    else:
        assert "policy/clip_fraction" not in metrics


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_gradient_is_that_of_finite_differences(config: Any) -> None:
    """Of what each loss differentiates: a detached factor, and gspo's and gmpo's sequence, stay where they are."""
    batch, step = make_batch(7, 0.2), 1e-6
    if isinstance(config, GSPOConfig | GMPOConfig):  # a sequence's own loss, of one weight and one scale
        batch |= {name: batch[name][:, :1].expand(4, 5) for name in ("weight_BT", "scale_BT")}
    _, gradient, _ = loss_and_gradient(batch, config)
    for i, t in itertools.product(range(4), range(5)):
        moved = []
        for sign in (1, -1):
            logp_BT = batch["logp_BT"].clone()
            logp_BT[i, t] += sign * step
            if isinstance(config, CISPOConfig | DPPOConfig):  # their factor is detached: by the loss's linear part
                fixed = batch["logp_BT"]
                here = config.loss(**batch)[0]
                unit = config.loss(
                    **(
                        batch
                        | {
                            "weight_BT": torch.zeros_like(fixed).index_put(
                                (torch.tensor([i]), torch.tensor([t])), batch["weight_BT"][i, t]
                            )
                        }
                    )
                )[0]
                moved.append(here + unit * sign * step / fixed[i, t] if batch["mask_BT"][i, t] else here)
            else:
                moved.append(config.loss(**(batch | {"logp_BT": logp_BT}))[0])
        measured = ((moved[0] - moved[1]) / (2 * step)).item()
        assert measured == pytest.approx(gradient[i, t].item(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_is_the_papers_geometric_mean(seed: int) -> None:
    """One term a sequence of one weight and one scale, written with torch's own autograd."""
    batch, config = make_batch(seed), GMPOConfig(clip_low=0.1, clip_high=0.2)
    batch |= {name: batch[name][:, :1].expand(4, 5) for name in ("weight_BT", "scale_BT")}
    leaf = batch["logp_BT"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(batch["mask_BT"]):
        if mask.any():
            x, a = (leaf[i] - batch["old_logp_BT"][i])[mask], batch["advantage"][i]
            c = torch.minimum(a.sign() * x, a.sign() * x.clamp(-0.1, 0.2)) * a.sign()
            total = total - batch["weight_BT"][i, 0] * batch["scale_BT"][i, 0] * mask.sum() * c.mean().exp() * a
    total.backward()
    loss, gradient, _ = loss_and_gradient(batch, config)
    torch.testing.assert_close((loss, gradient), (total.detach(), leaf.grad), rtol=1e-12, atol=1e-15)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("seed", range(4))
def test_gspo_is_the_papers_clipped_ratio_of_the_sequence(seed: int) -> None:
    """Section 4.1's own form, one term a sequence of one weight and one scale: the same value and gradient."""
    batch, config = make_batch(seed), GSPOConfig(clip_low=0.1, clip_high=0.2)
    batch |= {name: batch[name][:, :1].expand(4, 5) for name in ("weight_BT", "scale_BT")}
    leaf = batch["logp_BT"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(batch["mask_BT"]):
        if mask.any():
            s, a = (leaf[i] - batch["old_logp_BT"][i])[mask].mean().exp(), batch["advantage"][i]
            term = torch.min(s * a, s.clamp(1 - config.clip_low, 1 + config.clip_high) * a)
            total = total - batch["weight_BT"][i, 0] * batch["scale_BT"][i, 0] * mask.sum() * term
    total.backward()
    loss, gradient, _ = loss_and_gradient(batch, config)
    torch.testing.assert_close((loss, gradient), (total.detach(), leaf.grad), rtol=1e-12, atol=1e-15)
    assert gradient.abs().sum() > 0


def test_gspo_clips_sequences_by_a_mean_that_fp32_would_blur() -> None:
    """Gaps of 3.5e-4 in log-probs of -20, whose fp32 spacing is 1.9e-6: the band from 3e-4 to 4e-4 still decides."""
    old = torch.full((1, 4096), -20.0)
    logp = (old + 3.5e-4).requires_grad_()
    true_gap = (logp.detach().double() - old.double()).mean().item()
    assert 3e-4 < true_gap < 4e-4
    one = torch.ones(1, 4096)
    loss, metrics = GSPOConfig().loss(logp, old, torch.ones(1), one.bool(), one, one / 4096)
    assert loss.item() == pytest.approx(-math.exp(true_gap), rel=1.2e-7)
    assert values(metrics)["policy/clip_fraction"].item() == 0.0
    tighter = GSPOConfig(clip_high=3e-4).loss(logp, old, torch.ones(1), one.bool(), one, one / 4096)[1]
    assert values(tighter)["policy/clip_fraction"].item() == 1.0


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "gradient"),
    [
        (PPOClipConfig, 1.5, 1.0, 0.0),  # already likelier by more than the clip allows
        (PPOClipConfig, 1.5, -1.0, 1.5),  # likelier although bad: pushed back with its full ratio
        (PPOClipConfig, 0.5, 1.0, -0.5),  # rarer although good: pulled back
        (PPOClipConfig, 0.5, -1.0, 0.0),  # already rarer
        (PPOClipConfig, 1.1, 1.0, -1.1),
        (PPOClipConfig, 0.9, -1.0, 0.9),
        (DAPOConfig, 1.25, 1.0, -1.25),  # clips higher
        (DAPOConfig, 1.3, 1.0, 0.0),
        (DAPOConfig, 0.5, -1.0, 0.0),
        (DAPOConfig, 9.0, -1.0, 9.0),  # and twice
        (DAPOConfig, 11.0, -1.0, 0.0),
        (CISPOConfig, 3.0, 1.0, -1.28),  # bounds the weight and keeps the gradient
        (CISPOConfig, 0.1, 1.0, -0.1),
        (GMPOConfig, 1.6, 1.0, 0.0),  # log 1.6 is 0.47
        (GMPOConfig, 1.4, 1.0, -1.4),
        (GMPOConfig, 1.6, -1.0, 1.6),
        (SAPOConfig, 1.0, 1.0, -1.0),
    ],
)
def test_a_bound_holds_only_what_has_gone_far(kind: Any, ratio: float, advantage: float, gradient: float) -> None:
    one = torch.ones(1, 1)
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, _ = kind().loss(logp, 0 * one, torch.tensor([advantage]), one.bool(), one, one)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize(("gap", "sign"), [(25.0, 1.0), (-25.0, -1.0), (100.0, -1.0), (-1e30, 1.0), (1e30, 1.0)])
@pytest.mark.parametrize("kind", [PPOClipConfig, DAPOConfig, GSPOConfig, GMPOConfig, SAPOConfig])
def test_extreme_ratios_stay_finite_in_fp32(gap: float, sign: float, kind: Any) -> None:
    one = torch.ones(1, 1)
    logp = torch.tensor([[gap]], requires_grad=True)
    loss, metrics = kind().loss(logp, 0 * one, torch.tensor([sign]), one.bool(), one, one)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad is not None
    assert logp.grad.item() == 0.0
    measured = values(metrics)
    assert measured["policy/ratio_max"].item() == pytest.approx(math.exp(math.copysign(20, gap)))
    assert measured["policy/kl_old"].isfinite()


def test_drift_is_measured_where_fp32_would_see_noise() -> None:
    """Ratios of 1 +- 1e-7: the k3 estimate is 5e-15 or so, and fp32 arithmetic gives 2e-8."""
    batch = make_batch(2, 0.0, torch.float32) | {"mask_BT": torch.ones(4, 5, dtype=torch.bool)}
    batch["logp_BT"] = torch.nextafter(batch["old_logp_BT"], torch.zeros(()))
    log_ratio = (batch["logp_BT"].double() - batch["old_logp_BT"].double()).flatten().tolist()
    # (x^2)/2 + (x^3)/6 is r - 1 - log r to 1e-14 of itself at this size
    expected = math.fsum(x * x / 2 + x**3 / 6 for x in log_ratio) / 20
    assert 0 < expected < 1e-13
    measured = loss_and_gradient(batch, PPOClipConfig())[2]
    # expm1(x) - x in float64 has an absolute error of 1e-16 * x
    assert measured["policy/kl_old"].item() == pytest.approx(expected, rel=1e-6, abs=0)
    assert measured["policy/ratio_mean"].item() == pytest.approx(1 + math.fsum(log_ratio) / 20, abs=1e-14)


@pytest.mark.parametrize("bad", [NAN, -INF, INF])
def test_a_valid_log_prob_that_is_not_finite_is_counted_and_not_repaired(bad: float) -> None:
    one = torch.ones(1, 3)
    logp = torch.tensor([[-1.0, bad, -2.0]])
    loss, metrics = ReinforceConfig().loss(logp, -one, torch.ones(1), one.bool(), one, one)
    assert not loss.isfinite()
    measured = values(metrics)
    assert measured["policy/nonfinite"].item() == 1
    assert measured["policy/ratio_mean"].item() == pytest.approx((1 + math.exp(-1)) / 2)
    assert measured["policy/kl_old"].isfinite()
    assert measured["policy/ratio_max"].item() == 1.0


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_clamp_makes_a_finite_loss_of_a_log_prob_that_is_not(config: Any) -> None:
    for name, bad in itertools.product(("logp_BT", "old_logp_BT"), (NAN, INF, -INF)):
        batch = make_batch(5)
        row, token = batch["mask_BT"].nonzero()[0].tolist()
        batch[name][row, token] = bad
        loss, _, measured = loss_and_gradient(batch, config)
        unread = isinstance(config, ReinforceConfig) and name == "old_logp_BT"
        assert bool(loss.isfinite()) == unread
        assert measured["policy/nonfinite"].item() == 1


def test_a_lower_clip_is_no_more_than_all_of_the_ratio() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        PPOClipConfig(clip_low=1.5)


@pytest.mark.parametrize("by_token", [False, True])
def test_a_formula_of_tokens_is_given_zeros_where_masked(by_token: bool) -> None:
    """In the loss and where only the clip is asked for, whatever lies under the mask."""
    seen: list[tuple[Tensor, ...]] = []

    class Watching(PPOClipConfig):
        def of_tokens(self, *given: Tensor) -> tuple[Tensor, Tensor | None]:
            seen.append(given)
            return super().of_tokens(*given)

    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 5, generator=draw) > 0.4
    logp, old, weight, scale = (1 + torch.rand(4, 5, generator=draw) for _ in range(4))
    advantage = 1 + torch.rand((4, 5) if by_token else (4,), generator=draw)
    Watching().loss(logp, old, advantage, mask, weight, scale)
    each = of_each_token(advantage, mask)
    Watching().clipped(torch.where(mask, logp, 0.0), torch.where(mask, old, 0.0), each, mask)
    assert len(seen) == 2
    for *floats, given_mask in seen:
        assert torch.equal(given_mask, mask)
        for x in floats:
            assert bool(x[mask].all())
            assert not bool(x[~mask].any())
        expected = advantage if by_token else advantage[:, None].expand(4, 5)
        assert torch.equal(floats[2][mask], expected[mask])
