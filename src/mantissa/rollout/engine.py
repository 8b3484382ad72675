"""The native rollout engine: our decoder, our kernels, a cache, continuous batching, and weights that are checked.

The engine owns a rounded copy of the learner's weights. ``sync`` rounds each fp32 master once and stores the result in
the kernels' dtype (native kernels: the half dtype itself; simulated kernels: fp32 values on the grid), so the rollout
multiplies exactly the values that the learner multiplies: its ``kernels.weight(master)`` is the same rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mantissa.errors import MantissaError, nearest
from mantissa.kernels import Kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import NumberFormat, round_to_format
from mantissa.rollout.cache import KVCache
from mantissa.rollout.generation import EngineStats, Generation
from mantissa.rollout.types import Completion, Request, SamplingParams


class NativeEngine:
    """A ``RolloutEngine`` in this process.

    ``kv_format``: the grid that keys and values are rounded to before anything attends to them, in prefill and decode
    alike. ``slots``: rows decoded at a time. ``max_length``: prompt and response tokens of one sample together.
    ``decode_text``: token ids to text, needed for stop strings only. ``stats`` describes the last ``generate``.
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
    ) -> None:
        if slots < 1 or max_length < 2:
            raise MantissaError(f"slots={slots}, max_length={max_length}: expected at least 1 slot and 2 tokens")
        if max_length > config.max_position_embeddings:
            raise MantissaError(
                f"max_length={max_length}: the model has {config.max_position_embeddings} positions; lower max_length"
            )
        self.config, self.kernels, self.kv_format = config, kernels, kv_format
        self.slots, self.max_length = slots, max_length
        self.device = torch.device(device)
        self.stats = EngineStats()
        self._decode_text = decode_text
        with torch.device("meta"):  # no memory and no random initial values that sync would overwrite
            model = Decoder(config).requires_grad_(False)
        self.model = model.to(kernels.dtype).to_empty(device=self.device)
        self._poison()
        self._version = -1
        self._cache = KVCache(config, slots, kernels.dtype, self.device)

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync`` and after one that failed."""
        return self._version

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load fp32 masters by name, rounded once, and stamp them ``version``. See ``RolloutEngine.sync``.

        A master beyond the format's largest value would become inf and is an error, as is one that is not finite.
        """
        if version < 0:
            raise ValueError(f"policy version {version}: expected 0 or more")
        self._version = -1  # from here on the engine refuses to generate, until every check has passed
        self._poison()
        self._check_names(weights)
        names, peaks = [], []
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                master = weights[name].detach().to(self.device)
                rounded = round_to_format(master, self.kernels.format)
                parameter.copy_(rounded)
                names.append(name)
                # The largest magnitude of the master and of what is now stored; NaN wins a maximum, so one that was
                # not written shows. One transfer to the host for all tensors.
                peaks.append(torch.stack((master.abs().amax(), parameter.float().abs().amax())))
            peaks_N2 = torch.stack(peaks).cpu()
        for name, (master_peak, stored_peak) in zip(names, peaks_N2.tolist(), strict=True):
            self._check_peak(name, master_peak, stored_peak)
        self._version = version

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. See ``RolloutEngine.generate``.

        A sample depends on its prompt, its seed and its index, and on nothing else but the order of sums inside the
        device's matrix products: batch mates, slots and the order of requests do not enter.
        """
        if self._version < 0:
            raise MantissaError("the rollout engine holds no weights (or its last sync failed): call sync first")
        if version != self._version:
            raise MantissaError(f"policy version {version} was asked for, {self._version} is loaded: call sync first")
        self._check_requests(requests, params)
        self._cache.restart()
        generation = Generation(
            self.model,
            self.kernels,
            self.kv_format,
            self._cache,
            self.slots,
            self.device,
            requests,
            params,
            version,
            self._decode_text,
        )
        finished = False
        try:
            with torch.no_grad():
                completions = generation.run()
            finished = True
        finally:
            if not finished:
                self._cache.clear()  # non-finite keys and values must not outlive the call that made them
            self.stats = generation.stats()
        return completions

    def _poison(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def _check_names(self, weights: Mapping[str, Tensor]) -> None:
        expected = dict(self.model.named_parameters())
        for name in expected:
            if name not in weights:
                raise MantissaError(f"sync: weight {name} is missing{nearest(name, weights)}; send every parameter")
        for name, master in weights.items():
            if name not in expected:
                tied = "; the head is tied to the embedding and is not sent" if name == "lm_head.weight" else ""
                raise MantissaError(f"sync: unknown weight {name}{tied or nearest(name, expected)}")
            if master.shape != expected[name].shape:
                raise MantissaError(
                    f"sync: weight {name} has shape {tuple(master.shape)}, expected {tuple(expected[name].shape)}"
                )
            if master.dtype != torch.float32:
                raise MantissaError(
                    f"sync: weight {name} is {master.dtype}, expected the fp32 master: a second rounding changes values"
                )

    def _check_peak(self, name: str, master_peak: float, stored_peak: float) -> None:
        fmt = self.kernels.format
        if not _finite(master_peak):
            raise MantissaError(f"sync: weight {name} holds {master_peak}: expected finite values; training diverged")
        if _finite(stored_peak):
            return
        if stored_peak != stored_peak:
            raise MantissaError(f"sync: weight {name} was not written in full: NaN is left after the copy")
        raise MantissaError(
            f"sync: weight {name} holds {master_peak:g}, which {fmt} cannot (largest {fmt.largest:g}): use bf16 or fp32"
        )

    def _check_requests(self, requests: Sequence[Request], params: SamplingParams) -> None:
        vocabulary = self.config.vocab_size
        if params.stop and self._decode_text is None:
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
            if len(prompt) + params.max_tokens > self.max_length:
                raise MantissaError(
                    f"request {index}: {len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed "
                    f"max_length={self.max_length}; shorten the prompt, lower max_tokens or raise max_length"
                )


def _finite(x: float) -> bool:
    return x - x == 0.0
