"""The native rollout engine: our decoder, our kernels, a cache, continuous batching, and weights that are checked.

The engine owns a copy of the learner's weights (``model/copies.py``). ``sync`` rounds or quantises each fp32 master
once, so the rollout multiplies exactly the values that the learner multiplies, whose kernels do the same to the same
masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import Kernels, Traced
from mantissa.model import CopiedPolicy, ModelConfig
from mantissa.precision import NumberFormat
from mantissa.rollout.generation import Generation, KVCache
from mantissa.rollout.sampling import request_keys
from mantissa.rollout.types import Completion, Request, SamplingParams, check_requests, check_version


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
