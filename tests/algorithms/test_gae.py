"""GAE and the value loss against sums written out, in float64, finite differences, and whole against parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mantissa.algorithms import aggregation_scale, gae, value_loss
from mantissa.precision import merge, values

LENGTHS = (5, 1, 3, 4)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask, of unequal lengths; what is masked is no number."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    value = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    return torch.randn(4, generator=draw, dtype=torch.float64), torch.where(mask, value, torch.nan), mask


def by_sums(reward: float, value: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), the definition, one token at a time."""
    n = len(value)
    following = [*value[1:], 0.0]
    delta = [(reward if t == n - 1 else 0.0) + gamma * following[t] - value[t] for t in range(n)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.7, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_targets_are_those_of_the_definition(gamma: float, lam: float, seed: int) -> None:
    reward, value, mask = batch(seed)
    advantage, target, metrics = gae(reward, value, mask, gamma, lam)
    raw = [by_sums(float(r), v[m].tolist(), gamma, lam) for r, v, m in zip(reward, value, mask, strict=True)]
    flat = [a for row in raw for a in row]
    mean = math.fsum(flat) / len(flat)
    spread = math.fsum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
    for row, each in enumerate(raw):
        for t, a in enumerate(each):
            assert float(advantage[row, t]) == pytest.approx((a - mean) / math.sqrt(spread + 1e-8), abs=1e-12)
            assert float(target[row, t]) == pytest.approx(a + float(value[row, t]), abs=1e-12)
    assert float(advantage[~mask].abs().sum()) == float(target[~mask].abs().sum()) == 0
    if (gamma, lam) == (1.0, 1.0):  # what is still earned, whatever the values
        assert torch.allclose(target[mask], reward[:, None].expand(4, 5)[mask])
    assert float(values(metrics)["critic/value"]) == pytest.approx(float(value[mask].mean()))


def test_a_reward_that_is_not_a_number_is_not_hidden() -> None:
    reward, value, mask = batch()
    reward[1] = torch.nan
    assert not bool(gae(reward, value, mask, 1.0, 1.0)[0][mask].isfinite().any())


@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_the_value_loss_and_its_gradient(clip: float) -> None:
    _, old, mask = batch(1)
    draw = torch.Generator().manual_seed(2)
    target = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    value = (old.nan_to_num() + 0.3 * torch.randn(4, 5, generator=draw, dtype=torch.float64)).requires_grad_()
    scale = aggregation_scale(mask, "token_mean", dtype=torch.float64)
    loss, metrics = value_loss(value, old, target, mask, scale, clip)
    (gradient,) = torch.autograd.grad(loss, value)

    def of(v: list[list[float]]) -> tuple[float, int]:
        total, held = 0.0, 0
        for row, column in mask.nonzero().tolist():
            x, before, aim = v[row][column], float(old[row, column]), float(target[row, column])
            bounded = min(max(x, before - clip), before + clip)
            held += (bounded - aim) ** 2 > (x - aim) ** 2
            total += 0.5 * max((x - aim) ** 2, (bounded - aim) ** 2) / sum(LENGTHS)
        return total, held

    at = value.tolist()
    expected, held = of(at)
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    assert float(values(metrics)["critic/clip_fraction"]) == pytest.approx(held / sum(LENGTHS))
    assert (held > 0) == (clip < 1)
    for row in range(4):
        for column in range(5):
            up, down = (
                of([[x + (sign * 1e-6 if (i, j) == (row, column) else 0) for j, x in enumerate(line)]
                    for i, line in enumerate(at)])[0]
                for sign in (1, -1)
            )  # fmt: skip
            assert float(gradient[row, column]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_losses_of_parts_add_up() -> None:
    _, old, mask = batch(3)
    target, value = torch.ones(4, 5, dtype=torch.float64), old.nan_to_num() + 0.1
    scale = aggregation_scale(mask, "seq_mean_token_mean", dtype=torch.float64)
    whole, tallies = value_loss(value, old, target, mask, scale, 0.05)
    parts = [value_loss(*(x[rows] for x in (value, old, target, mask, scale)), 0.05) for rows in ([0, 3], [1], [2])]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(values(merge([found for _, found in parts])), values(tallies))
