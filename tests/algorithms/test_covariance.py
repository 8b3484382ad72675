"""clip_cov and kl_cov: who is chosen, by scalar math; the loss and its gradient; and what verl chooses and computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mantissa.algorithms import ClipCovConfig, KLCovConfig
from mantissa.precision import values

B, T = 6, 7


def make(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    old = -normal(B, T).abs()
    mask = torch.rand(B, T, generator=draw) > 0.3
    return {
        "logp_BT": old + 0.3 * normal(B, T), "old_logp_BT": old, "advantage": 2 * normal(B), "mask_BT": mask,
        "weight_BT": normal(B, T).abs(), "scale_BT": normal(B, T).abs(),
    }  # fmt: skip


def covariances(batch: dict[str, Tensor]) -> dict[tuple[int, int], float]:
    places = [tuple(place) for place in batch["mask_BT"].nonzero().tolist()]
    logps = [batch["old_logp_BT"][place].item() for place in places]
    advantages = [batch["advantage"][place[0]].item() for place in places]
    a, m = math.fsum(advantages) / len(places), math.fsum(logps) / len(places)
    return {place: (x - a) * (y - m) for place, x, y in zip(places, advantages, logps, strict=True)}


def choice(config: ClipCovConfig | KLCovConfig, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return config.select(batch["old_logp_BT"], batch["advantage"], batch["mask_BT"], draw)


@pytest.mark.parametrize("seed", range(5))
def test_the_highest_covariances_are_held_and_some_between_the_bounds_are_left_out(seed: int) -> None:
    batch = make(seed)
    of = covariances(batch)
    chosen = choice(KLCovConfig(share=0.2), batch)
    most = max(int(0.2 * len(of)), 1)
    assert {tuple(p) for p in chosen.nonzero().tolist()} == set(sorted(of, key=lambda p: -of[p])[:most])
    eligible = {place for place, value in of.items() if 0.1 < value < 1.0}
    some = ClipCovConfig(share=0.05, low=0.1, high=1.0)
    drawn = [{tuple(p) for p in choice(some, batch, key).nonzero().tolist()} for key in range(20)]
    assert all(each <= eligible and len(each) == min(max(int(0.05 * len(of)), 1), len(eligible)) for each in drawn)
    assert len(set(map(frozenset, drawn))) > 1
    assert {tuple(p) for p in choice(ClipCovConfig(share=1.0, low=0.1, high=1.0), batch).nonzero().tolist()} == eligible
    assert not choice(ClipCovConfig(low=1e6, high=2e6), batch).any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("config", [ClipCovConfig(share=1.0, low=0.1, high=1.0), KLCovConfig(share=0.3)])
def test_value_and_gradient_are_those_of_scalar_math(config: ClipCovConfig | KLCovConfig, seed: int) -> None:
    batch = make(seed)
    chosen = choice(config, batch)
    logp = batch["logp_BT"].clone().requires_grad_()
    loss, tallies = config.loss(**(batch | {"logp_BT": logp}), chosen_BT=chosen)
    loss.backward()
    expected, gradient = 0.0, torch.zeros(B, T, dtype=torch.float64)
    for i, t in batch["mask_BT"].nonzero().tolist():
        x, a = (batch["logp_BT"][i, t] - batch["old_logp_BT"][i, t]).item(), batch["advantage"][i].item()
        factor, ratio = (batch["scale_BT"][i, t] * batch["weight_BT"][i, t]).item(), math.exp(x)
        if isinstance(config, KLCovConfig):
            expected += factor * (config.coefficient * abs(x) * bool(chosen[i, t]) - ratio * a)
            gradient[i, t] = factor * (config.coefficient * math.copysign(1, x) * bool(chosen[i, t]) - ratio * a)
        elif not chosen[i, t]:
            bound = min(max(ratio, 0.8), 1.2)
            expected -= factor * min(ratio * a, bound * a)
            gradient[i, t] = -factor * ratio * a * (ratio * a <= bound * a)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-12, atol=1e-14)
    share = values(tallies)["policy/selected_fraction"].item()
    assert share == pytest.approx(int(chosen.sum()) / int(batch["mask_BT"].sum()))
    assert share > 0


@pytest.mark.parametrize("config", [ClipCovConfig(share=0.3, low=0.1, high=1.0), KLCovConfig(share=0.3)])
def test_the_gradient_is_that_of_finite_differences(config: ClipCovConfig | KLCovConfig) -> None:
    batch = make(11)
    chosen = choice(config, batch)
    assert chosen.any()

    def loss(logp_BT: Tensor) -> Tensor:
        return config.loss(**(batch | {"logp_BT": logp_BT}), chosen_BT=chosen)[0]

    assert torch.autograd.gradcheck(loss, batch["logp_BT"].clone().requires_grad_())
