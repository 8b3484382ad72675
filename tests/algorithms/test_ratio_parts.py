"""Alpha, beta and the clipping that beta alone causes, against loops of scalar math in float64, and any split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.algorithms import (
    CISPOConfig,
    DAPOConfig,
    FlowRLConfig,
    GMPOConfig,
    GSPOConfig,
    PPOClipConfig,
    ReinforceConfig,
)
from mantissa.precision import values

B, T, NAN, INF = 7, 6, float("nan"), float("inf")
PHANTOM = "policy/phantom_clip_fraction"
CONFIGS: tuple[Any, ...] = (
    PPOClipConfig(),
    PPOClipConfig(clip_low=0.05, clip_high=0.4),
    DAPOConfig(dual_clip=1.3),
    DAPOConfig(),
    GSPOConfig(clip_low=0.1, clip_high=0.1),
    CISPOConfig(),
    CISPOConfig(clip_low=0.1),
    GMPOConfig(clip_low=0.1, clip_high=0.1),
    *(FlowRLConfig(importance=importance) for importance in ("token", "geometric", "sequence")),
)
Batch = dict[str, Tensor]


def make_batch(seed: int, alpha: float = 0.2, beta: float = 0.2, bad: float | None = None) -> Batch:
    """Some rows empty, some tokens rejected; with ``bad`` one log-prob of each kind is that."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    rollout_BT = -normal(B, T).abs()
    old_BT = rollout_BT + beta * normal(B, T)
    mask_BT = torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=random)
    mask_BT[seed % B] = True
    batch = {
        "logp_BT": old_BT + alpha * normal(B, T),
        "old_logp_BT": old_BT,
        "rollout_logp_BT": rollout_BT,
        "advantage": normal(B),
        "mask_BT": mask_BT,
        "valid_BT": mask_BT & (torch.rand(B, T, generator=random) > 0.2),
    }
    for column, name in enumerate(("logp_BT", "old_logp_BT", "rollout_logp_BT")):
        batch[name][(seed + column) % B, column] = batch[name][(seed + column) % B, column] if bad is None else bad
    return batch


def cut(config: Any, x: float, a: float) -> bool:
    """The table of ``ratio_parts``, one token (or one sequence) at a time."""
    ratio = math.exp(min(max(x, -20.0), 20.0))
    if isinstance(config, FlowRLConfig):
        return not config.bounds[0] <= ratio <= config.bounds[1]
    if isinstance(config, CISPOConfig):
        return ratio > 1 + config.clip_high or ratio < 1 - config.clip_low
    if isinstance(config, GMPOConfig):
        return x > config.clip_high if a > 0 else x < -config.clip_low
    if isinstance(config, DAPOConfig) and a < 0 and ratio > config.dual_clip:
        return True
    return (a > 0 and ratio > 1 + config.clip_high) or (a < 0 and ratio < 1 - config.clip_low)


def oracle(batch: Batch, config: Any) -> dict[str, float]:
    alphas, betas, phantoms = [], [], []
    for i in range(B):
        here: list[tuple[float, float]] = []
        whole = True
        for t in range(T):
            logp, old, rollout = (batch[n][i, t].item() for n in ("logp_BT", "old_logp_BT", "rollout_logp_BT"))
            finite = all(map(math.isfinite, (logp, old, rollout)))
            if batch["mask_BT"][i, t] and finite:
                alphas.append(logp - old)
                betas.append(old - rollout)
            if batch["valid_BT"][i, t]:
                whole = whole and finite
                here += [(logp - old, logp - rollout)] if finite else []
        a = batch["advantage"][i].item()
        by_sequence = isinstance(config, GSPOConfig) or getattr(config, "importance", "token") != "token"
        if by_sequence and here:
            size = 1 if getattr(config, "importance", "") == "sequence" else len(here)
            moved, all_of_it = (math.fsum(pair[k] for pair in here) / size for k in (0, 1))
            here = [(moved, all_of_it)] * (len(here) if whole else 0)
        phantoms += [cut(config, both, a) and not cut(config, moved, a) for moved, both in here]
    named = {"alpha_mean": alphas, "beta_mean": betas}
    named |= {"alpha_abs_mean": list(map(abs, alphas)), "beta_abs_mean": list(map(abs, betas))}
    means = {f"policy/{name}": math.fsum(of) / max(len(of), 1) for name, of in named.items()}
    return means | {PHANTOM: sum(phantoms) / max(len(phantoms), 1)}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    alpha=st.sampled_from([0.0, 0.2, 30.0]),
    beta=st.sampled_from([1e-9, 0.2, 30.0]),
    bad=st.sampled_from([None, NAN, INF, -INF]),
)
def test_they_are_those_of_scalar_math(config: Any, seed: int, alpha: float, beta: float, bad: float | None) -> None:
    batch = make_batch(seed, alpha, beta, bad)
    expected = oracle(batch, config)
    measured = values(config.ratio_parts(**batch))
    assert {name: value.item() for name, value in measured.items()} == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_the_cases_above_have_phantoms() -> None:
    for config in CONFIGS:
        found = [oracle(make_batch(seed), config)[PHANTOM] for seed in range(5)]
        assert 0.01 < sum(found) / 5 < 0.9, config


@pytest.mark.parametrize("config", [c for c in CONFIGS if not isinstance(c, FlowRLConfig)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_anything_is_learned_bypass_cuts_the_phantoms_and_nothing_else(config: Any, dtype: torch.dtype) -> None:
    """Of one batch the loss's own count, with the rollout below its ratio, is the fraction that the metric foretold."""
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in make_batch(3, alpha=0.0).items()}
    one = torch.ones(B, T, dtype=dtype)
    logp, a, valid = batch["logp_BT"], batch["advantage"], batch["valid_BT"]
    phantom = values(config.ratio_parts(**batch))[PHANTOM]
    for anchor, clipped in (("rollout_logp_BT", phantom.item()), ("old_logp_BT", 0.0)):
        tallies = config.loss(logp, batch[anchor], a, valid, one, one)[1]
        assert values(tallies)["policy/clip_fraction"].item() == clipped
    assert phantom > 0


def test_without_a_clip_there_is_no_such_fraction() -> None:
    assert PHANTOM not in ReinforceConfig().ratio_parts(**make_batch(0))
