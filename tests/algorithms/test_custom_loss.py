"""A loss of one's own: a copy of ppo_clip is ppo_clip, and each clause of the contract has one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mantissa.algorithms import CustomLossConfig, PPOClipConfig
from mantissa.base.errors import MantissaError
from mantissa.precision import values
from mantissa.rl.config.sections import AlgorithmConfig

CALLS = [0]


def clip(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    ratio = (logp - old).exp()
    plain, bound = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
    return -weight * torch.minimum(plain, bound), (bound < plain).detach()


def constant(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -weight * advantage * old


def unweighted(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -advantage * logp


def summed(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return (-weight * advantage * logp).sum()


def narrow(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return (-weight * advantage * logp).float()


def infinite(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -weight * advantage * logp / 0


def across(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -weight * (advantage - advantage.mean(0, keepdim=True)) * logp


def padded(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -weight * advantage * logp / mask.shape[1]


def in_place(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return -weight * advantage.mul_(2) * logp


def random(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    CALLS[0] += 1
    return -weight * advantage * logp * CALLS[0]


def four(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    return -weight * advantage * logp


def held_is_float(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -weight * advantage * logp, logp


number = 3


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def named(function: Callable[..., object] | str) -> CustomLossConfig:
    name = function if isinstance(function, str) else function.__name__
    return CustomLossConfig(function=f"test_custom_loss:{name}")


def test_a_copy_of_ppo_clip_is_ppo_clip() -> None:
    config, draw = named(clip), torch.Generator().manual_seed(0)
    config.prepare()
    old = -torch.rand(4, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=draw) > 0.3
    weight, scale = (torch.rand(4, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    advantage = torch.randn(4, generator=draw, dtype=torch.float64)
    both = []
    for each in (config, PPOClipConfig()):
        logp = (old + 0.3 * torch.sin(torch.arange(20, dtype=torch.float64)).view(4, 5)).requires_grad_()
        loss, tallies = each.loss(logp, old, advantage, mask, weight, scale)
        loss.backward()
        both.append((loss.detach(), logp.grad, values(tallies)))
    torch.testing.assert_close(both[0], both[1], rtol=1e-13, atol=1e-15)
    assert both[0][2]["policy/clip_fraction"] > 0


def test_a_recipe_names_it_and_gives_it_what_a_loss_has() -> None:
    algorithm = AlgorithmConfig.model_validate({"loss": "my.losses:clipped", "aggregation": "seq_mean_token_mean"})
    assert isinstance(algorithm.loss, CustomLossConfig)
    assert algorithm.loss.function == "my.losses:clipped"
    assert algorithm.loss.verl_mode is None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (constant, "no gradient for logp"),
        (unweighted, "does not depend on weight"),
        (summed, r"returned torch.float64 of shape \(\): expected the loss of each token"),
        (narrow, "returned torch.float32"),
        (infinite, "not finite"),
        (across, "looks at other sequences"),
        (padded, "changes with padding"),
        (in_place, "changes its arguments in place"),
        (random, "another answer for the same arguments"),
        (four, "raised TypeError: .*five tensors"),
        (held_is_float, "second value that is no bool tensor"),
        ("missing", "has no 'missing'"),
        ("number", "has a int, not a function"),
    ],
)
def test_each_clause_of_the_contract(function: Callable[..., object] | str, said: str) -> None:
    with pytest.raises(MantissaError, match=f"^loss test_custom_loss:.*{said}"):
        named(function).prepare()


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(MantissaError, match="loss nowhere_at_all:f: cannot import nowhere_at_all"):
        CustomLossConfig(function="nowhere_at_all:f").prepare()
