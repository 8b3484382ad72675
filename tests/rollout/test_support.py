"""What a truncating sampler keeps of each token, against sets made one token after the other, and hostile ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mantissa.kernels import NativeKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import FP32
from mantissa.rollout import NativeEngine, Request, SamplingParams
from mantissa.rollout.support import Support, encode, truncated

WORDS = 70  # of a vocabulary; three words of 32 bits


def kept(seed: int, rows: int, share: float, vocabulary: int = WORDS) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, vocabulary, generator=draw) < share
    mask[torch.arange(rows), torch.randint(vocabulary, (rows,), generator=draw)] = True
    return mask


def test_supports_come_back_narrow_and_wide_ones_alike() -> None:
    mask = torch.cat([kept(0, 20, 0.0), kept(1, 20, 0.05), kept(2, 20, 0.5), torch.ones(1, WORDS, dtype=torch.bool)])
    support = Support.of(encode(mask))
    assert torch.equal(support.mask(0, 61, WORDS), mask)
    assert torch.equal(support.mask(17, 44, WORDS), mask[17:44])
    assert support.mask(9, 9, WORDS).shape == (0, WORDS)
    assert torch.equal(support.sizes(WORDS), mask.sum(1))
    assert int(support.counts.max()) == 3  # never more than the bitmap
    assert support.words[:3].tolist() == [int(row.nonzero()[0]) for row in mask[:3]]  # one id a token
    parts = support.split([1, 0, 60])
    assert [len(part) for part in parts] == [1, 0, 60]
    joined = Support.join(parts)
    assert torch.equal(joined.words, support.words)
    assert torch.equal(joined.counts, support.counts)


def test_a_support_takes_no_more_than_its_ids_or_a_bit_a_word() -> None:
    vocabulary = 49152
    narrow = Support.of(encode(kept(0, 8, 20 / vocabulary, vocabulary)))
    wide = Support.of(encode(kept(0, 8, 0.9, vocabulary)))
    assert 4 * len(narrow.words) < 8 * 200
    assert 4 * len(wide.words) == 8 * vocabulary / 8


@pytest.mark.parametrize("vocabulary", [7, 31, 32, 33, 64])
def test_small_vocabularies(vocabulary: int) -> None:
    mask = kept(3, 40, 0.3, vocabulary)
    support = Support.of(encode(mask))
    assert torch.equal(support.mask(0, 40, vocabulary), mask)
    assert torch.equal(support.sizes(vocabulary), mask.sum(1))


def test_what_a_file_may_hold_in_the_place_of_supports() -> None:
    mask = kept(4, 6, 0.01)
    good, tokens = Support.of(encode(mask)), [int(row.nonzero()[0]) for row in mask]
    assert good.fits(tokens, WORDS)
    assert Support.of([]).fits([], WORDS)
    other = list(tokens)
    other[2] = int((~mask[2]).nonzero()[0])
    for words, counts, asked in (
        (good.words, good.counts, other),  # a token that its support does not hold
        (good.words, good.counts[:-1], tokens),
        (good.words[:-1], good.counts, tokens),
        (good.words.long(), good.counts, tokens),
        (good.words, good.counts.long(), tokens),
        (torch.full_like(good.words, WORDS), good.counts, tokens),
        (torch.full_like(good.words, -1), good.counts, tokens),
        (good.words, torch.full_like(good.counts, -1), tokens),
        (torch.zeros(0, dtype=torch.int32), torch.zeros_like(good.counts), tokens),
        (torch.zeros(24, dtype=torch.int32), torch.full_like(good.counts, 4), tokens),
    ):
        assert not Support(words, counts).fits(asked, WORDS)


def nucleus(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """By its definition, in float64, one token after the other; equal logits rank by id."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or len(logits)]
    weights = np.exp(logits[ranked] - logits[ranked].max())
    mass, chosen = 0.0, set()
    for token, weight in zip(ranked, weights / weights.sum(), strict=True):
        if chosen and mass >= top_p:
            break
        chosen.add(token)
        mass += weight
    return chosen


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(0, 0.7, 1.0), (5, 1.0, 0.6), (9, 0.8, 1.3)])
def test_an_engine_keeps_what_it_drew_from(top_k: int, top_p: float, temperature: float) -> None:
    """Of every token, whatever slot it moved through, and log-probs renormalised over just that."""
    torch.manual_seed(0)
    config = ModelConfig(
        family="qwen3",
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    model = Decoder(config).initialize(torch.Generator().manual_seed(0))
    engine = NativeEngine(config, NativeKernels(FP32), kv_format=FP32, slots=3, max_length=20)
    engine.sync(dict(model.named_parameters()), 0)
    requests = [Request(tuple(range(1 + number, 4 + 2 * number)), number, 2) for number in range(4)]
    params = SamplingParams(8, temperature, top_k, top_p, stop_token_ids=(0, 1, 2, 3))
    groups = engine.generate(requests, params, 0)
    lengths = set()
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            assert completion.support is not None
            lengths.add(len(completion.tokens))
            tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
            with torch.no_grad():
                logits = model.logits(model(tokens, NativeKernels(FP32)), NativeKernels(FP32))[0].double()
            for place, token in enumerate(completion.tokens):
                row = logits[len(request.prompt_tokens) - 1 + place].numpy() / temperature
                support = completion.support.mask(place, place + 1, 60)[0].nonzero().flatten().tolist()
                assert set(support) == nucleus(row, top_k, top_p)
                assert token in support
                expected = row[token] - np.log(np.exp(row[support] - row.max()).sum()) - row.max()
                assert abs(float(completion.logp_T[place]) - expected) < 1e-4
    assert len(lengths) > 1  # rows were moved about
    (greedy,) = engine.generate(requests[:1], SamplingParams(3, 0.0, top_k, top_p), 0)
    assert greedy[0].support is None


def test_no_filter_keeps_nothing_beside_the_tokens() -> None:
    config = ModelConfig(
        family="qwen3",
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = Decoder(config).initialize(torch.Generator().manual_seed(0))
    engine = NativeEngine(config, NativeKernels(FP32), kv_format=FP32, slots=2, max_length=8)
    engine.sync(dict(model.named_parameters()), 0)
    for params in (SamplingParams(3), SamplingParams(3, top_k=12), SamplingParams(3, top_k=99)):
        assert engine.generate([Request((1,), 0, 2)], params, 0)[0][0].support is None


def test_truncated_logits_have_the_gradient_of_the_renormalised_log_prob() -> None:
    """Against finite differences of ``x_t - log sum_S exp x``, in float64."""
    mask = kept(5, 6, 0.2)
    token = mask.float().argmax(1)
    logits = torch.randn(6, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def of(x: Tensor) -> Tensor:
        return torch.log_softmax(truncated(x, mask), -1).gather(1, token.unsqueeze(1)).squeeze(1)

    def naive(x: np.ndarray) -> list[float]:
        return [
            float(x[row, t] - np.log(sum(np.exp(x[row, v]) for v in range(WORDS) if mask[row, v])))
            for row, t in enumerate(token.tolist())
        ]

    np.testing.assert_allclose(of(logits).detach().numpy(), naive(logits.detach().numpy()), rtol=1e-12)
    of(logits).sum().backward()
    for row, column in ((0, int(token[0])), (1, 3), (2, 40), (5, 69)):
        step = np.zeros((6, WORDS))
        step[row, column] = 1e-6
        up, down = (sum(naive(logits.detach().numpy() + sign * step)) for sign in (1, -1))
        assert logits.grad is not None
        assert abs(float(logits.grad[row, column]) - (up - down) / 2e-6) < 1e-7
