"""Safe numerics against float64 and numpy, at the extremes where the naive forms break, gradients included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mantissa.precision import clamped_log_ratio, entropy, kl_estimate, masked_mean, masked_sum, token_logprob

INF = math.inf


def logits_and_tokens(
    scale: float = 3.0, shape: tuple[int, ...] = (3, 5), vocabulary: int = 23
) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, vocabulary) * scale, torch.randint(0, vocabulary, shape)


def oracle_logprobs(logits: Tensor, temperature: float = 1.0) -> np.ndarray:
    """log softmax in numpy's extended precision."""
    x = logits.detach().double().numpy().astype(np.longdouble) / np.longdouble(temperature)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ---- token_logprob


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 1e2, 1e4])
def test_token_logprob_is_right_relative_to_its_own_size_not_to_the_logits(scale: float, temperature: float) -> None:
    logits, tokens = logits_and_tokens(scale)
    got = token_logprob(logits, tokens, temperature)
    scaled = logits / temperature  # the one rounding that is the caller's
    expected = np.take_along_axis(oracle_logprobs(scaled), tokens.unsqueeze(-1).numpy(), -1)[..., 0]
    np.testing.assert_allclose(got.numpy(), expected.astype(np.float64), rtol=4e-7, atol=4e-7)


def test_token_logprob_of_large_logits_close_together() -> None:
    logits = torch.tensor([[1e4, 1e4 + 0.25, 1e4 - 0.75]])
    expected = oracle_logprobs(logits)
    got = torch.cat([token_logprob(logits, torch.tensor([t])) for t in range(3)])
    np.testing.assert_allclose(got.numpy(), expected[0].astype(np.float64), rtol=2e-7)
    naive = logits[0] - logits.logsumexp(-1)  # what it replaces: off by the rounding of 1e4
    assert np.abs(naive.numpy() - expected[0]).max() > 1e-4


def test_token_logprob_does_not_underflow_and_takes_minus_inf() -> None:
    logits = torch.tensor([[0.0, -1e4, -INF, 1e4]], requires_grad=True)
    values = [token_logprob(logits, torch.tensor([t])) for t in range(4)]
    assert [v.item() for v in values] == [-1e4, -2e4, -INF, 0.0]
    (grad,) = torch.autograd.grad(values[0].sum(), logits)
    assert grad.tolist() == [[1.0, 0.0, 0.0, -1.0]]
    filtered = torch.tensor([[1.0, -INF, 2.0]], requires_grad=True)  # as top-k leaves them
    (grad,) = torch.autograd.grad(token_logprob(filtered, torch.tensor([0])).sum(), filtered)
    p = math.exp(1) / (math.exp(1) + math.exp(2))
    torch.testing.assert_close(grad, torch.tensor([[1 - p, 0.0, p - 1]]))


def test_token_logprob_gradient_is_onehot_minus_softmax_over_temperature() -> None:
    logits, tokens = logits_and_tokens()
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(token_logprob(logits, tokens, 0.7).sum(), logits)
    p = np.exp(oracle_logprobs(logits, 0.7)).astype(np.float64)
    expected = (np.eye(23)[tokens.numpy()] - p) / 0.7
    np.testing.assert_allclose(grad.numpy(), expected, atol=5e-7)


def test_token_logprob_of_a_row_does_not_depend_on_its_batch() -> None:
    logits, tokens = logits_and_tokens(4.0, (37,), 151)
    together = token_logprob(logits, tokens, 0.9)
    alone = torch.cat([token_logprob(logits[i : i + 1], tokens[i : i + 1], 0.9) for i in range(37)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_token_logprob_refuses_half_logits(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"fp32 or float64 logits, not {dtype}"):
        token_logprob(torch.zeros(1, 2, dtype=dtype), torch.tensor([0]))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_token_logprob_refuses_a_temperature_without_a_density(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprob(torch.zeros(1, 2), torch.tensor([0]), temperature)


# ---- entropy


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_entropy_against_numpy(temperature: float) -> None:
    logits, _ = logits_and_tokens()
    logp = oracle_logprobs(logits, temperature)
    expected = -(np.exp(logp) * logp).sum(-1).astype(np.float64)
    np.testing.assert_allclose(entropy(logits, temperature).numpy(), expected, rtol=1e-6, atol=1e-6)


def test_entropy_and_its_gradient_survive_filtered_and_underflowing_tokens() -> None:
    logits = torch.tensor([[1.0, -INF, 2.0, -1e4], [1e4, -1e4, 0.0, 0.0]], requires_grad=True)
    value = entropy(logits)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    kept = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    p = torch.softmax(kept, -1)
    expected = -(p * p.log()).sum()
    (expected_grad,) = torch.autograd.grad(expected, kept)
    np.testing.assert_allclose(value.detach().numpy(), [expected.item(), 0.0], rtol=1e-6)
    np.testing.assert_allclose(grad[0].numpy(), [expected_grad[0], 0.0, expected_grad[1], 0.0], rtol=1e-5, atol=1e-8)
    assert grad[1].tolist() == [0.0, 0.0, 0.0, 0.0]


# ---- masked sums


@pytest.mark.parametrize("dim", [None, 0, -1])
def test_masked_sum_and_mean_against_numpy_ignore_what_is_masked(dim: int | None) -> None:
    x = torch.randn(6, 9)
    mask = torch.rand(6, 9) > 0.4
    mask[2], mask[:, 3] = False, False  # an empty row and an empty column
    poison = torch.tensor([INF, -INF, math.nan]).repeat(18).view(6, 9)
    dirty = torch.where(mask, x, poison).requires_grad_()
    clean = np.where(mask.numpy(), x.double().numpy(), 0.0)
    count = mask.numpy().sum(dim)
    total, mean = masked_sum(dirty, mask, dim), masked_mean(dirty, mask, dim)
    np.testing.assert_allclose(total.detach().numpy(), clean.sum(dim), atol=2e-6)
    np.testing.assert_allclose(mean.detach().numpy(), clean.sum(dim) / np.maximum(count, 1), atol=1e-6)
    (grad,) = torch.autograd.grad(mean.sum(), dirty)
    share = 1 / np.maximum(count, 1)
    full = np.broadcast_to(share[:, None] if dim == -1 else share, (6, 9))
    np.testing.assert_allclose(grad.numpy(), np.where(mask.numpy(), full, 0.0), rtol=1e-6)


def test_masked_sum_lets_an_unmasked_nan_through() -> None:
    x = torch.tensor([1.0, math.nan])
    assert masked_sum(x, torch.tensor([True, True])).isnan()
    assert masked_mean(x, torch.tensor([True, False])).item() == 1.0
    assert masked_mean(x, torch.tensor([False, False])).item() == 0.0


# ---- clamped_log_ratio


def test_clamped_log_ratio_bounds_the_ratio_and_its_gradient() -> None:
    logp = torch.tensor([-1.0, -50.0, -0.5, 0.0, -INF], requires_grad=True)
    other = torch.tensor([-1.5, -1.0, -80.0, -20.0, -1.0])
    out = clamped_log_ratio(logp, other)
    assert out.tolist() == [0.5, -20.0, 20.0, 20.0, -20.0]
    ratio = out.exp()
    assert bool(ratio.isfinite().all())
    assert ratio.max().item() == pytest.approx(4.851652e8, rel=1e-6)
    (grad,) = torch.autograd.grad(ratio.sum(), logp)
    assert grad[1].item() == grad[2].item() == grad[4].item() == 0.0
    assert grad[0].item() == pytest.approx(math.exp(0.5), rel=1e-6)


# ---- kl_estimate

LOG_RATIOS = torch.cat([s * torch.logspace(-8, math.log10(20), 400) for s in (1, -1)] + [torch.zeros(1)])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_against_extended_precision(kind: str) -> None:
    x = LOG_RATIOS.double().numpy().astype(np.longdouble)
    small = np.abs(x) < 1e-2
    k3 = np.where(small, x**2 * (1 / 2 + x / 6 + x**2 / 24 + x**3 / 120 + x**4 / 720), np.exp(x) - 1 - x)
    expected = {"k1": -x, "k2": x * x / 2, "k3": k3}[kind].astype(np.float64)
    np.testing.assert_allclose(kl_estimate(LOG_RATIOS, kind).numpy(), expected, rtol=2e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradients(kind: str) -> None:
    x = LOG_RATIOS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kl_estimate(x, kind).sum(), x)  # type: ignore[arg-type]
    wide = LOG_RATIOS.double().numpy()
    expected = {"k1": -np.ones_like(wide), "k2": wide, "k3": np.expm1(wide)}[kind]
    np.testing.assert_allclose(grad.numpy(), expected, rtol=3e-7)
