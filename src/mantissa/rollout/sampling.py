"""Sampling: what is asked of an engine, what it answers, and how a token is drawn.

From logits to a token and its log-probability all is pure functions of tensors. Log-probs are fp32 and under the
distribution actually sampled from, that is after temperature, top-k and top-p.

Legend: B rows, V vocabulary, T response tokens.

Order: logits / temperature, top-k, top-p, renormalisation, then the inverse of the cumulative distribution at one
uniform number. Precision: logits come in fp32; probabilities are an fp32 softmax; their running sum is float64. In
fp32 the sum over 150,000 tokens is wrong by 1e-5 and depends on the order a device adds in, and ``u * total`` can
round up to ``total``, which no token's sum exceeds: the last token would then be drawn whatever its probability.

The log-probability is the kernels' ``token_logprob``, the learner's own function, on the same logits and temperature.
Where a filter is active the tokens it drops have logits of -inf first, which is the renormalisation.

Ties are decided, not left to a library: the smaller token id counts as the more probable one.

One uniform number for each (seed, sample, position), which depends on nothing else: not on batch mates, the order of
requests or the device. It is a hash by SplitMix64's finaliser m (``base/seeds.py``), applied in a chain:

    key(seed, sample)   = m(m(seed + g) + (sample + 1) g)
    word(key, position) = m(m(key + (position + 1) g) xor key)
    uniform             = (floor(word / 2^12) + 1/2) / 2^52,        g = 0x9E3779B97F4A7C15, everything modulo 2^64

For a fixed key the inner m walks through a SplitMix64 sequence; the xor with the key before the outer m makes two keys
whose sequences meet go apart again. The uniform has 52 random bits and lies strictly between 0 and 1, so neither log(u)
nor a comparison with a total can degenerate; it is float64, because fp32 could not tell apart events rarer than 2^-24.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.seeds import GOLDEN, mix, shift_right, signed
from mantissa.precision import token_logprob
from mantissa.rollout.support import MostProbable, Support

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature=0`` is greedy. ``top_k=0`` and ``top_p=1`` switch those filters off.

    Order: logits / temperature, then top-k, then top-p (the smallest set of tokens, most probable first, whose mass
    reaches ``top_p``), then renormalisation over what is kept. A completion ends with a stop token (kept as its last
    token), with a stop string (the tokens up to the one that completes it are kept), or at ``max_tokens``.
    ``most_probable``: how many of the most probable tokens are kept with each, where it is drawn; 0: none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    most_probable: int = 0

    @property
    def truncates(self) -> bool:
        """Whether a filter is on."""
        return self.top_k > 0 or self.top_p < 1

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens}: expected at least 1"),
            (self.temperature >= 0, f"temperature={self.temperature}: expected 0 (greedy) or more"),
            (self.top_k >= 0, f"top_k={self.top_k}: expected 0 (off) or more"),
            (0 < self.top_p <= 1, f"top_p={self.top_p}: expected more than 0 and at most 1"),
            (all(self.stop), "stop: an empty string would stop every completion at once; leave it out"),
        )
        for good, message in checks:
            if not good:
                raise MantissaError(message)


@dataclass(frozen=True)
class Request:
    """One prompt, to be sampled ``samples`` times. Sample i draws from its own generator, keyed by (seed, i)."""

    prompt_tokens: tuple[int, ...]
    seed: int
    samples: int = 1


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    ``tokens``: the response's token ids, a stop token included. ``logp_T``: fp32, CPU, under the distribution sampled
    from. ``policy_version``: the weights that sampled it. ``finish_reason``: ``stop``, ``length`` (truncated) or, where
    the engine was interrupted, ``abort``: then with the tokens that it had by then, perhaps none.
    ``key``: of the uniforms that its tokens were drawn by (``sampling.py``); None where another engine drew them.
    ``experts_SLK``: of a policy with mixtures of experts, those that each position passed, prompt and response but the
    last token (S), in each of L mixtures, the most probable first (int16, CPU); ``expert_weights_SLK``: their weights
    (fp32). None where the engine does not tell.
    ``support``: what top-k and top-p left to choose from at each token (``support.py``); None without them.
    ``most_probable``: as many of the sampler's most probable tokens as were asked for; None where none were.

    An empty response may leave what is of its tokens None also where others of its batch have it.
    """

    tokens: tuple[int, ...]
    logp_T: Tensor
    finish_reason: FinishReason
    policy_version: int
    key: int | None = None
    experts_SLK: Tensor | None = None
    expert_weights_SLK: Tensor | None = None
    support: Support | None = None
    most_probable: MostProbable | None = None


def stream_keys(seeds: Sequence[int], samples: Sequence[int]) -> Tensor:
    """The key of each (seed, sample): int64, shape B. Seeds are any integers, taken modulo 2^64."""
    seeds_B = torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64)
    samples_B = torch.tensor(samples, dtype=torch.int64)
    return mix(mix(seeds_B + GOLDEN) + (samples_B + 1) * GOLDEN)


def request_keys(requests: Sequence[Request]) -> Tensor:
    """The key of each sample of each request, in order."""
    jobs = [(request.seed, sample) for request in requests for sample in range(request.samples)]
    return stream_keys([seed for seed, _ in jobs], [sample for _, sample in jobs])


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """The uniform of each key at each position: float64 in (0, 1), shape of the two int64 inputs, broadcast."""
    word = mix(mix(keys_B + (positions_B + 1) * GOLDEN) ^ keys_B)
    return (shift_right(word, 12).double() + 0.5) * 2.0**-52  # exact: 52 bits and a half fit a float64's 53


LogProb = Callable[[Tensor, Tensor, float], Tensor]


def sample(
    logits_BV: Tensor,
    params: SamplingParams,
    uniform_B: Tensor,
    logprob: LogProb = token_logprob,
    forced_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row. Returns tokens (int64, B) and their log-probs (fp32, B) under the distribution drawn from.

    ``logits_BV``: fp32. ``uniform_B``: float64 in (0, 1). With ``temperature=0`` the most probable token is taken; the
    distribution is then a point mass and the log-prob is 0. A token of probability zero is never returned.
    ``logprob``: the kernels' ``token_logprob``. A row that holds NaN or +inf has a log-prob that is not finite: the
    caller must look. ``forced_B``: tokens to take in place of those drawn, in a replay; -1 where there is none.
    """
    if params.temperature == 0:
        best_B, tokens_B = logits_BV.max(dim=-1)
        return _taken(tokens_B, forced_B), best_B - best_B  # log 1 = 0; not finite where the best logit is not
    kept_BV = filter_logits(logits_BV, params)
    tokens_B = _taken(draw(probabilities(kept_BV, params.temperature), uniform_B), forced_B)
    return tokens_B, logprob(kept_BV, tokens_B, params.temperature)


def _taken(drawn_B: Tensor, forced_B: Tensor | None) -> Tensor:
    return drawn_B if forced_B is None else torch.where(forced_B < 0, drawn_B, forced_B)


def filter_logits(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """``logits_BV`` with -inf for every token that top-k or top-p drops; the same tensor where neither is active.

    Top-k keeps the k largest. Top-p then keeps the fewest tokens, largest first, whose mass under the softmax of what
    top-k kept is at least ``top_p``: a token stays while the mass before it is less than ``top_p``. The most probable
    token always stays. Equal logits rank by token id, smaller first.
    """
    vocabulary = logits_BV.shape[-1]
    limit = params.top_k if 0 < params.top_k < vocabulary else vocabulary
    if params.temperature == 0 or (limit == vocabulary and params.top_p >= 1.0):
        return logits_BV  # greedy, the most probable token is taken, and that always stays
    ranked_BV, order_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    drop_BV = torch.zeros_like(order_BV, dtype=torch.bool)
    drop_BV[:, limit:] = True
    if params.top_p < 1.0:
        scaled_BV = ranked_BV[:, :limit].double() / params.temperature
        mass_BV = torch.softmax(scaled_BV, dim=-1).cumsum(dim=-1)
        drop_BV[:, 1:limit] = mass_BV[:, :-1] >= params.top_p
    return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter_(-1, order_BV, drop_BV), float("-inf"))


_BLOCK = 128  # tokens that are added up before one of them is looked for


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose running sum of probability exceeds ``u * total``. int64, B.

    A token of probability zero does not raise the sum, so it is never the first to exceed anything; holding the
    threshold below the total makes sure that some token exceeds it. All sums are float64: of blocks of tokens first,
    and then inside the block that exceeds. A running sum over the whole vocabulary takes twice to four times as long,
    and holds a float64 for every token.
    """
    vocabulary = probabilities_BV.shape[-1]
    blocks = vocabulary // _BLOCK
    sums_BC = probabilities_BV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).sum(-1, dtype=torch.float64)
    if vocabulary % _BLOCK:
        rest_B1 = probabilities_BV[:, blocks * _BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
        sums_BC = torch.cat((sums_BC, rest_B1), dim=-1)
    running_BC = sums_BC.cumsum(-1)
    block_B, beyond_B = _first_above(running_BC, uniform_B * running_BC[:, -1])
    tokens_BK = block_B.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=block_B.device)
    inside_BK = probabilities_BV.gather(-1, tokens_BK.clamp(max=vocabulary - 1)).double()
    inside_BK = inside_BK.masked_fill_(tokens_BK >= vocabulary, 0.0)
    token_B, _ = _first_above(inside_BK.cumsum(-1), beyond_B)
    return (block_B * _BLOCK + token_B).clamp_(max=vocabulary - 1)


def _first_above(sums_BC: Tensor, threshold_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first of each row's running sums that is above the threshold, and the threshold less the sum before it.

    The threshold is held below the last sum. A row of NaN exceeds nothing; its answer stays a valid index.
    """
    last_B = sums_BC[:, -1]
    threshold_B = torch.minimum(threshold_B, torch.nextafter(last_B, torch.zeros_like(last_B)))
    first_B1 = torch.searchsorted(sums_BC, threshold_B.unsqueeze(-1), right=True).clamp_(max=sums_BC.shape[-1] - 1)
    before_B1 = sums_BC.gather(-1, (first_B1 - 1).clamp_(min=0)).masked_fill_(first_B1 == 0, 0.0)
    return first_B1.squeeze(-1), threshold_B - before_B1.squeeze(-1)


def probabilities(logits_BV: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), fp32; shape of the logits."""
    return torch.softmax(logits_BV if temperature == 1.0 else logits_BV / temperature, dim=-1)
