"""Sampling against a float64 distribution in numpy: log-probs, frequencies, filters, ties and the edges of the CDF.

And the counter-based uniforms: against Python integers, for uniformity, and for independence of their neighbours.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.base.seeds import GOLDEN, mix
from mantissa.precision import token_logprob
from mantissa.rollout.sampling import SamplingParams, draw, filter_logits, sample, stream_keys, uniforms
from naive_engine import reference_distribution, reference_uniform

FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.9},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_k": 1000},
]


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def grid(count: int) -> torch.Tensor:
    """Evenly spaced uniforms: drawing at each gives frequencies that are exact to 1 / count."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_frequencies_and_logp_equal_the_float64_distribution(fields: dict[str, float]) -> None:
    count, chosen = 20_000, params(**fields)
    logits_V = torch.randn(23, generator=torch.Generator().manual_seed(3)) * 2
    expected = reference_distribution(logits_V.numpy(), chosen)
    tokens, logp = sample(logits_V.expand(count, -1), chosen, grid(count))
    frequency = np.bincount(tokens.numpy(), minlength=23) / count
    # An inverse CDF on an even grid misses each probability by less than one grid cell at either end.
    np.testing.assert_allclose(frequency, expected, atol=2 / count)
    np.testing.assert_allclose(logp.exp().numpy(), expected[tokens.numpy()], rtol=2e-6)
    assert logp.dtype == torch.float32


def test_without_a_filter_the_logp_is_the_learners_function_bit_for_bit() -> None:
    logits = torch.randn(200, 50)
    for temperature in (1.0, 0.8):
        tokens, logp = sample(logits, params(temperature=temperature), grid(200))
        assert torch.equal(logp, token_logprob(logits, tokens, temperature))


def test_greedy_takes_the_first_of_equal_maxima_with_logp_zero() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    tokens, logp = sample(logits, params(temperature=0.0), grid(2))
    assert tokens.tolist() == [1, 0]
    assert logp.tolist() == [0.0, 0.0]


def test_ties_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = filter_logits(logits, params(top_k=2)).isfinite()
    assert kept.tolist() == [[False, True, True, False, False]]
    uniform_logits = torch.zeros(1, 8)
    # Each token has mass 1/8: three are needed to reach 3/8 (exactly representable), four to reach a little more.
    assert filter_logits(uniform_logits, params(top_p=0.375)).isfinite().sum() == 3
    kept = filter_logits(uniform_logits, params(top_p=0.376)).isfinite()
    assert kept.tolist() == [[True] * 4 + [False] * 4]


def test_top_p_is_a_share_of_what_top_k_kept() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: after top-k 2 they are 4/7 and 3/7, and 4/7 alone reaches 0.5."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert filter_logits(logits, params(top_k=2, top_p=0.5)).isfinite().sum() == 1
    assert filter_logits(logits, params(top_p=0.5)).isfinite().sum() == 2


@pytest.mark.parametrize("u", [2.0**-53, 1 - 2.0**-53])
def test_the_ends_of_the_cdf_never_draw_an_impossible_token(u: float) -> None:
    probabilities = torch.tensor([[0.0, 0.1, 0.2, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    tokens = draw(probabilities, torch.full((2,), u, dtype=torch.float64))
    assert tokens.tolist() == ([1, 3] if u < 0.5 else [4, 3])


def test_a_large_vocabulary_keeps_its_tail() -> None:
    """The fp32 running sum of 150,000 equal probabilities drifts by 1e-5, over a token's width; ours must not."""
    size = 150_000
    probabilities = torch.full((1, size), 1 / size)
    for token in (0, 1, 777, size // 2, size - 2, size - 1):
        middle = torch.tensor([(token + 0.5) / size], dtype=torch.float64)
        assert draw(probabilities, middle).item() == token


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 300, 1024])
def test_a_sum_in_blocks_draws_what_one_running_sum_does(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probabilities = torch.rand(400, vocabulary, generator=generator)
    probabilities[:, 1:] *= torch.rand(400, vocabulary - 1, generator=generator) < 0.05  # nearly all impossible
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    expected = (sums <= (uniform * sums[:, -1]).unsqueeze(-1)).sum(-1)
    drawn = draw(probabilities, uniform)
    assert torch.equal(drawn, expected)
    assert (probabilities.gather(-1, drawn.unsqueeze(-1)) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_show_in_the_logp(temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2], logits[1, 1] = float("nan"), float("inf")
    tokens, logp = sample(logits, params(temperature=temperature), grid(3))
    assert logp.isfinite().tolist() == [False, False, True]
    assert ((tokens >= 0) & (tokens < 4)).all()


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-200, 200, width=32), min_size=2, max_size=12),
    u=st.floats(0, 1, exclude_min=True, exclude_max=True),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1),
)
def test_a_drawn_token_always_has_its_probability(
    logits: list[float], u: float, temperature: float, top_k: int, top_p: float
) -> None:
    """Whatever the logits: the token was kept, its probability is positive, and its log-prob is the oracle's."""
    chosen = params(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logp = sample(torch.tensor([logits]), chosen, torch.tensor([u], dtype=torch.float64))
    kept = filter_logits(torch.tensor([logits]), chosen)[0].double()
    assert kept[tokens].isfinite().all()
    assert 0 < int(kept.isfinite().sum()) <= (top_k or len(logits))
    oracle = torch.log_softmax(kept / temperature, dim=-1)[tokens]
    assert logp.item() == pytest.approx(oracle.item(), abs=1e-5 + 1e-6 * abs(max(logits, key=abs)) / temperature)
    assert oracle.item() > -150  # fp32 weights below 1e-45 are zero and cannot be drawn


# uniforms


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 + 5, -(2**63)])
def test_equals_the_same_hash_in_python_integers(seed: int) -> None:
    keys = stream_keys([seed] * 3, [0, 1, 1000])
    for position in (0, 1, 63, 100_000):
        got = uniforms(keys, torch.full((3,), position)).tolist()
        assert got == [reference_uniform(seed, sample, position) for sample in (0, 1, 1000)]


def test_published_splitmix64_sequence() -> None:
    """The mixing function alone, against the first words of SplitMix64 from state 0, as published."""
    words = mix(torch.arange(1, 4) * GOLDEN).tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniform_and_uncorrelated_along_each_axis() -> None:
    """Chi-square of 64 bins, and of pairs of neighbours in 16 x 16 bins: all within 5 sigma of their mean."""
    seeds, samples = (x.flatten().tolist() for x in torch.meshgrid(*[torch.arange(40)] * 2, indexing="ij"))
    u = uniforms(stream_keys(seeds, samples).unsqueeze(1), torch.arange(40)).numpy().reshape(40, 40, 40)
    assert len(np.unique(u)) == u.size  # no two streams meet
    assert 0.0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1.0

    def chi_square(bins: np.ndarray, count: int) -> float:
        observed, expected = np.bincount(bins, minlength=count), bins.size / count
        return float(((observed - expected) ** 2 / expected).sum())

    assert abs(chi_square((u.ravel() * 64).astype(int), 64) - 63) < 5 * np.sqrt(2 * 63)
    for axis in range(3):  # seeds, samples, positions
        first, second = (np.delete(u, drop, axis=axis).ravel() for drop in (-1, 0))
        pairs = (first * 16).astype(int) * 16 + (second * 16).astype(int)
        assert abs(chi_square(pairs, 256) - 255) < 5 * np.sqrt(2 * 255)
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size)


@pytest.mark.parametrize("size", [16, 300, 5000, 50_000])
@pytest.mark.parametrize(("fields", "kept"), [({"top_k": 7}, 7), ({"top_p": 0.5}, None)])
def test_ties_rank_by_token_id_in_a_vocabulary_of_any_size(
    size: int, fields: dict[str, float], kept: int | None
) -> None:
    """Logits of five values, as coarse formats make: a sort of many values that need not be stable would mix them."""
    logits = torch.randint(0, 5, (3, size), generator=torch.Generator().manual_seed(size)).float() / 8
    found = filter_logits(logits, params(**fields)).isfinite()
    for row, alive in zip(logits.tolist(), found.tolist(), strict=True):
        ranked = sorted(range(size), key=lambda token: (-row[token], token))
        count = kept
        if count is None:
            mass = np.cumsum(np.exp(np.array([row[token] for token in ranked])))
            count = int(np.searchsorted(mass / mass[-1], fields["top_p"])) + 1
        assert [token for token in range(size) if alive[token]] == sorted(ranked[:count])
