"""What every function here has in common: nothing under a mask matters, nothing valid is nothing, and only the policy
(and FlowRL's log Z) receives a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.algorithms import (
    CORRECTION_PRESETS,
    CISPOConfig,
    DAPOConfig,
    DPPOConfig,
    FlowRLConfig,
    GMPOConfig,
    GSPOConfig,
    KLConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
    aggregation_scale,
    correction,
    kl_loss,
    kl_reward,
)
from mantissa.precision import values

NAN, INF = float("nan"), float("inf")
B, T = 6, 5
Batch = dict[str, Tensor]
Function = Callable[[Batch], tuple[Any, ...]]  # tensors, and a dictionary of tallies at the end


def of_policy(config: Any) -> Function:
    names = ("logp_BT", "old_logp_BT", "advantage", "mask_BT", "weight_BT", "scale_BT")
    return lambda batch: config.loss(*(batch[name] for name in names))


def of_flowrl(config: FlowRLConfig) -> Function:
    names = ("logp_BT", "old_logp_BT", "advantage", "mask_BT", "weight_BT", "scale_BT", "ref_logp_BT", "log_z_B")
    return lambda batch: config.loss(**{name: batch[name] for name in names})


def of_parts(config: Any) -> Function:
    names = ("logp_BT", "old_logp_BT", "rollout_logp_BT", "advantage", "mask_BT", "mask_BT")
    return lambda batch: (config.ratio_parts(*(batch[name] for name in names)),)


def of_kl(kind: Any) -> Function:
    names = ("logp_BT", "ref_logp_BT", "mask_BT", "weight_BT", "scale_BT")
    return lambda batch: kl_loss(*(batch[name] for name in names), KLConfig(estimator=kind, coefficient=0.5))


def of_reward(kind: Any) -> Function:
    names, config = ("logp_BT", "ref_logp_BT", "mask_BT"), KLConfig(where="reward", estimator=kind, coefficient=0.5)
    return lambda b: kl_reward(torch.zeros(len(b["mask_BT"])), *(b[name] for name in names), config)


LOSSES: tuple[Any, ...] = (
    ReinforceConfig(), PPOClipConfig(), DAPOConfig(dual_clip=1.5), GSPOConfig(), CISPOConfig(), GMPOConfig(),
    SAPOConfig(), DPPOConfig(divergence="kl"),
)  # fmt: skip
FLOWRL = tuple(FlowRLConfig(importance=importance) for importance in ("sequence", "geometric", "token"))
FUNCTIONS: dict[str, Function] = {
    **{config.kind: of_policy(config) for config in LOSSES},
    **{f"flowrl {config.importance}": of_flowrl(config) for config in FLOWRL},
    **{f"parts of {config.kind} {i}": of_parts(config) for i, config in enumerate((*LOSSES[1:], *FLOWRL))},
    **{f"{kind} in the loss": of_kl(kind) for kind in ("k1", "k2", "k3")},
    **{f"{kind} in the reward": of_reward(kind) for kind in ("k1", "k2", "k3")},
    **{
        f"correction {name}": lambda b, c=config: correction(b["logp_BT"], b["rollout_logp_BT"], b["mask_BT"], c)
        for name, config in CORRECTION_PRESETS.items()
    },
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def run(name: str, batch: Batch) -> list[Tensor]:
    """What the function gives, the gradients of its first result where it has any, and the values of its tallies."""
    leaves = {
        k: x.clone().requires_grad_() if x.is_floating_point() and k != "scale_BT" else x for k, x in batch.items()
    }
    with torch.autograd.set_detect_anomaly(True):  # no step backward makes a NaN, not even one dropped later
        *out, tallies = FUNCTIONS[name](leaves)
        if out and out[0].requires_grad:
            out[0].backward()
    received = {k for k, x in leaves.items() if x.grad is not None}
    has_gradient = name.startswith("flowrl") or "loss" in name or name in {config.kind for config in LOSSES}
    assert received == ({"logp_BT"} | ({"log_z_B"} if "flowrl" in name else set()) if has_gradient else set())
    gradients = [leaves[k].grad for k in sorted(received)]
    return [*(x.detach() for x in out), *gradients, *values(tallies).values()]  # type: ignore[list-item]


def make_batch(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old_BT = -normal(B, T).abs()
    mask_BT = torch.rand(B, T, generator=random) > 0.3
    mask_BT[seed % B] = False
    logps = {f"{name}logp_BT": old_BT + 0.5 * normal(B, T) for name in ("", "ref_", "rollout_")}
    rows = {"advantage": normal(B), "log_z_B": normal(B)}
    scale_BT = aggregation_scale(mask_BT, "seq_mean_token_mean", dtype=torch.float64)
    weight_BT = normal(B, T).abs()
    return {**logps, **rows, "old_logp_BT": old_BT, "mask_BT": mask_BT, "weight_BT": weight_BT, "scale_BT": scale_BT}


@functions
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10_000), garbage=st.permutations([NAN, INF, -INF, 3e38, -3e38, NAN, INF, -INF]))
def test_what_lies_under_the_mask_never_matters(name: str, seed: int, garbage: list[float]) -> None:
    batch = make_batch(seed)
    mask_BT, clean = batch["mask_BT"], run(name, batch)
    dirty = {
        k: x if k == "mask_BT" else torch.where(mask_BT if k.endswith("BT") else mask_BT.any(-1), x, bad)
        for (k, x), bad in zip(batch.items(), [*garbage, NAN], strict=False)
    }
    for got, want in zip(run(name, dirty), clean, strict=True):
        assert torch.equal(got, want)
    for result in clean:  # weights and gradients are zero there
        assert result.shape != mask_BT.shape or not result[~mask_BT].any()
    wider = {
        k: torch.nn.functional.pad(x, (0, 2), value=NAN if x.is_floating_point() else 0) if k.endswith("BT") else x
        for k, x in batch.items()
    }
    for got, want in zip(run(name, wider), clean, strict=True):  # the same sums, in another order
        torch.testing.assert_close(got[:, :T] if want.dim() == 2 else got, want, rtol=1e-12, atol=1e-14)


@functions
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_nothing_valid_is_nothing(name: str, shape: tuple[int, int]) -> None:
    batch = {k: torch.full(shape if k.endswith("BT") else shape[:1], NAN) for k in make_batch(0)}
    for result in run(name, batch | {"mask_BT": torch.zeros(shape, dtype=torch.bool)}):
        assert not result.any()  # and no NaN, which would be true
