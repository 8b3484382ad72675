"""What goes into a rollout engine and what comes out: the contract that every engine keeps.

Legend: T response tokens. Log-probs are fp32 and under the distribution actually sampled from, that is after
temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.model import CopiedPolicy
from mantissa.rollout.most_probable import MostProbable
from mantissa.rollout.support import Support

T = TypeVar("T")
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


def told(
    completions: Sequence[Completion], what: str, pick: Callable[[Completion], T | None], nothing: Callable[[T], T]
) -> list[T] | None:
    """What an engine tells of each completion, by ``pick``; None where it tells it of none.

    ``nothing``: of an empty response of which it is not told, given another's. ``MantissaError``, with its name
    ``what``, where some responses with tokens have it and others do not: whoever took it for none would score those
    that have it otherwise.
    """
    found = [pick(completion) for completion in completions]
    example = next((value for value in found if value is not None), None)
    if example is None:
        return None
    silent = sum(value is None and bool(each.tokens) for value, each in zip(found, completions, strict=True))
    if silent:
        raise MantissaError(
            f"the rollout engine told {what} of some completions and not of {silent} of {len(found)} in the same "
            "batch: expected all or none; mend the engine"
        )
    return [nothing(example) if value is None else value for value in found]


def supports(completions: Sequence[Completion]) -> list[Support] | None:
    """``told`` of what each token was drawn from."""
    return told(completions, "what tokens were drawn from", lambda each: each.support, lambda _: Support.of([]))


def most_probable(completions: Sequence[Completion]) -> list[MostProbable] | None:
    """``told`` of the sampler's most probable tokens."""
    return told(completions, "the most probable tokens", lambda each: each.most_probable, MostProbable.nothing_like)


class RolloutEngine(Protocol):
    """Anything that can sample: our native engine, or another behind the same contract.

    ``release``: which program samples, and its version; empty for this package's own. ``evidence``: what it was seen to
    do at its start; empty where the kernels are this package's, which are probed. ``format_name``: what it computes in.
    """

    release: str
    evidence: str

    @property
    def format_name(self) -> str: ...

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync``."""
        ...

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load the learner's master weights, rounded once to the rollout's format, and stamp them ``version``.

        Fails closed: the destination is filled with NaN first and checked after; a missing, unknown, misshapen or
        non-finite tensor is an error that names it, and the engine then refuses to generate.
        """
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. ``version`` must be the one loaded."""
        ...

    def pause(self) -> None:
        """Nothing is sampled until the next ``sync``: give memory back to the learner, where that was asked for."""
        ...

    def close(self) -> None:
        """End the processes of an engine that has some."""
        ...


class CopyingEngine(RolloutEngine, Protocol):
    """A foreign engine whose weights this package keeps too, so that its share of the gap can be measured.

    ``copies``: the weights as they were sent, in this package's decoder; of the version ``copied_version`` (-1: none).
    """

    copies: CopiedPolicy
    copied_version: int


def check_version(asked: int, loaded: int) -> None:
    """Raise ``MantissaError`` unless the weights asked for are loaded. ``loaded``: -1 where none are."""
    if loaded < 0:
        raise MantissaError("the rollout engine holds no weights (or its last sync failed): call sync first")
    if asked != loaded:
        raise MantissaError(f"policy version {asked} was asked for, {loaded} is loaded: call sync first")


def check_requests(
    requests: Sequence[Request], params: SamplingParams, vocabulary: int, max_length: int, decodes: bool
) -> None:
    """Raise ``MantissaError`` at the first request that cannot be sampled as asked.

    ``vocabulary``: how many tokens there are. ``max_length``: prompt and response tokens of one sample together.
    ``decodes``: whether the engine can turn tokens into text, which stop strings need.
    """
    if params.stop and not decodes:
        raise MantissaError("stop strings need text: give the engine decode_text, or use stop_token_ids")
    for token in params.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise MantissaError(f"stop token {token}: the vocabulary is 0..{vocabulary - 1}")
    for index, request in enumerate(requests):
        prompt = request.prompt_tokens
        if not prompt:
            raise MantissaError(f"request {index}: the prompt is empty; give at least one token, such as BOS")
        if request.samples < 1:
            raise MantissaError(f"request {index}: samples={request.samples}, expected at least 1")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise MantissaError(f"request {index}: token {bad} is outside the vocabulary 0..{vocabulary - 1}")
        if len(prompt) + params.max_tokens > max_length:
            raise MantissaError(
                f"request {index}: {len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"max_length={max_length}; shorten the prompt, lower max_tokens or raise max_length"
            )
