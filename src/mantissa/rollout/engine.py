"""The contract that every rollout engine keeps, and the native one.

The native engine is our decoder, our kernels, a cache, continuous batching, and weights that are checked. It owns a
copy of the learner's weights (``model/copies.py``). ``sync`` rounds or quantises each fp32 master once, so the rollout
multiplies exactly the values that the learner multiplies, whose kernels do the same to the same masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import Kernels, Traced
from mantissa.model import CopiedPolicy, ModelConfig
from mantissa.precision import NumberFormat
from mantissa.rollout.generation import Generation, KVCache
from mantissa.rollout.sampling import Completion, Request, SamplingParams, request_keys


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


@dataclass(frozen=True)
class Call:
    """What one ``generate`` was asked, and what it answered.

    ``tokens``: the responses of all samples of all requests, in order; None for one that is not known.
    """

    requests: tuple[Request, ...]
    params: SamplingParams
    tokens: tuple[tuple[int, ...] | None, ...]

    @property
    def keys(self) -> list[int]:
        """The key of each sample's uniforms, in the order of ``tokens``."""
        return request_keys(self.requests).tolist()


class NativeEngine:
    """A ``RolloutEngine`` in this process.

    ``kv_format``: the grid that keys and values are rounded to before anything attends to them, in prefill and decode
    alike. ``slots``: rows decoded at a time. ``max_length``: prompt and response tokens of one sample together.
    ``decode_text``: token ids to text, needed for stop strings only. ``expert_weights``: completions of a policy with
    mixtures of experts say the weights of those that their positions passed, too.
    ``calls`` are those since the last ``sync``, where ``keeps_calls`` is set, so that each can be replayed.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        kv_format: NumberFormat,
        slots: int,
        max_length: int,
        device: torch.device | str = "cpu",
        decode_text: Callable[[Sequence[int]], str] | None = None,
        expert_weights: bool = False,
    ) -> None:
        if slots < 1 or max_length < 2:
            raise MantissaError(f"slots={slots}, max_length={max_length}: expected at least 1 slot and 2 tokens")
        if max_length > config.max_position_embeddings:
            raise MantissaError(
                f"max_length={max_length}: the model has {config.max_position_embeddings} positions; lower max_length"
            )
        self.release = self.evidence = ""
        self.config, self.kernels, self.kv_format = config, kernels, kv_format
        self.slots, self.max_length = slots, max_length
        self.device = torch.device(device)
        self.keeps_calls = False
        self.expert_weights = expert_weights
        self.interrupted: Callable[[], bool] = lambda: False  # asked before every step of ``generate``
        self.calls: list[Call] = []
        self._decode_text = decode_text
        self._copies = CopiedPolicy(config, kernels, self.device, "sync", pack=True)
        self.model = self._copies.decoder
        self._version = -1
        self._cache = KVCache(config, slots, kernels.dtype, self.device)

    @property
    def format_name(self) -> str:
        return self.kernels.format.name

    def pause(self) -> None:
        """Nothing to do: its weights are this process's."""

    def close(self) -> None:
        """Nothing to end."""

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync`` and after one that failed."""
        return self._version

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load fp32 masters by name, rounded or quantised once, and stamp them ``version``. See ``RolloutEngine.sync``.

        A master beyond the format's largest value would become inf and is an error, as is one that is not finite.
        """
        if version < 0:
            raise ValueError(f"policy version {version}: expected 0 or more")
        self._version = -1  # from here on the engine refuses to generate, until every check has passed
        self._copies.take(weights)
        self._version = version
        self.calls.clear()

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. See ``RolloutEngine.generate``.

        A sample depends on its prompt, its seed and its index, and on nothing else but the order of sums inside the
        device's matrix products: batch mates, slots and the order of requests do not enter.
        """
        check_version(version, self._version)
        check_requests(requests, params, self.config.vocab_size, self.max_length, self._decode_text is not None)
        results = self._run(requests, params, self.kernels)
        if self.keeps_calls:
            tokens = tuple(completion.tokens for completion in self._flat(results))
            self.calls.append(Call(tuple(requests), params, tokens))
        return results

    def again(self, call: Call, job: int) -> Completion:
        """Draw a call again, and return one of its samples: the same tokens, where the machine does not interfere."""
        return self._flat(self._run(call.requests, call.params, self.kernels))[job]

    def replay(self, call: Call, kernels: Traced, job: int) -> Completion:
        """Run a call again with ``kernels`` (this engine's, traced), noting what they give for one sample.

        Nothing is drawn where the call's tokens are known: they are taken, so every sample has the batch mates, the
        slot and the cache that it had. ``job``: the sample's number among all of the call, in order.
        """
        return self._flat(self._run(call.requests, call.params, kernels, job, call.tokens))[job]

    @staticmethod
    def _flat(results: list[list[Completion]]) -> list[Completion]:
        return [completion for group in results for completion in group]

    def _run(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        kernels: Kernels,
        watched: int | None = None,
        forced: Sequence[Sequence[int] | None] | None = None,
    ) -> list[list[Completion]]:
        self._cache.restart()
        setup = (self.model, kernels, self.kv_format, self._cache, requests, params, self._version, self._decode_text)
        generation = Generation(*setup, watched, forced, self.expert_weights, self.interrupted)
        try:
            with torch.no_grad():
                return generation.run()
        except BaseException:
            self._cache.clear()  # non-finite keys and values must not outlive the call that made them
            raise
