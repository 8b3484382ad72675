"""Tokens per second of the native engine against transformers' ``generate``: same weights, same prompts, interleaved.

Every sample runs to the same number of new tokens, so both do the same work; ``generate`` returns tokens only, the
engine log-probs too. ``ragged`` is the exception: a stop token ends samples early, and ``generate`` gets the prompts in
batches of the engine's slots. Rounds are interleaved (A, B, C, A, B, C, ...) because the machine may be shared; the
ratio is the median of the rounds' ratios. Rows are appended to results/rollout_vs_generate.jsonl.

``cases``: indices of the sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from runner import Row, Rows, case
from workers import middle, turns

from mantissa.kernels import probe, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    qk_norm=True,
    initializer_range=0.08,
)
PAD = 0


@dataclass(frozen=True)
class Size:
    """``prompts`` prompts, each sampled ``samples`` times, ``new_tokens`` long; ``stop``: token 1 ends a sample."""

    name: str
    prompts: int
    samples: int
    new_tokens: int
    slots: int
    stop: bool = False

    def requests(self) -> list[Request]:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(12, 21, (self.prompts,), generator=generator).tolist()
        return [
            Request(tuple(torch.randint(2, CONFIG.vocab_size, (n,), generator=generator).tolist()), i, self.samples)
            for i, n in enumerate(lengths)
        ]


SIZES = (
    Size("256 prompts x 1 x 64 tokens", 256, 1, 64, 256),
    Size("64 prompts x 8 x 24 tokens", 64, 8, 24, 512),
    Size("ragged: 512 prompts x 1, at most 128 tokens, 128 slots", 512, 1, 128, 128, stop=True),
    Size("tiny: 2 prompts x 2 x 4 tokens", 2, 2, 4, 4),
)


def hugging_face(weights: dict[str, torch.Tensor], size: Size, device: str) -> Callable[[], int]:
    config = transformers.Qwen3Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_hidden_layers,
        num_attention_heads=CONFIG.num_attention_heads,
        num_key_value_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.rms_norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config).eval().to(device)
    model.load_state_dict(weights)
    requests = size.requests()
    arguments: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": size.new_tokens,
        "num_return_sequences": size.samples,
        "pad_token_id": PAD,
        "eos_token_id": 1 if size.stop else None,
    }

    def run() -> int:
        produced = 0
        step = max(1, size.slots // size.samples)
        for start in range(0, len(requests), step):
            part = requests[start : start + step]
            longest = max(len(r.prompt_tokens) for r in part)
            padded = [[PAD] * (longest - len(r.prompt_tokens)) + list(r.prompt_tokens) for r in part]
            tokens = torch.tensor(padded, device=device)
            with torch.no_grad():
                out = model.generate(input_ids=tokens, attention_mask=(tokens != PAD).long(), **arguments)
            response = out[:, longest:]
            if size.stop:  # tokens up to and with the stop token
                ended = (response == 1).long().cumsum(-1) - (response == 1).long()
                produced += int((ended == 0).sum())
            else:
                produced += response.numel()
        return produced

    return run


def native(weights: dict[str, torch.Tensor], size: Size, precision: str, device: str) -> tuple[Callable[[], int], Row]:
    resolved = resolve(PrecisionPolicy.parse(precision), device)
    kernels = rollout_kernels(resolved)
    probe(kernels, device)  # a row whose precision did not engage is refused
    engine = NativeEngine(
        CONFIG, kernels, kv_format=resolved.kv_cache.active, slots=size.slots, max_length=256, device=device
    )
    engine.sync(weights, 0)
    requests = size.requests()
    params = SamplingParams(max_tokens=size.new_tokens, stop_token_ids=(1,) if size.stop else ())

    def run() -> int:
        groups = engine.generate(requests, params, 0)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run, {"active": resolved.rollout.active.name, "kernels": str(resolved.rollout.backend)}


def interleaved(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contender in each round, after one round of warm-up."""

    def rate(run: Callable[[], int]) -> float:
        start = time.perf_counter()
        produced = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return produced / (time.perf_counter() - start)

    return turns(contenders, 1, rounds, rate)


@case(rounds=1, cases=(3,))
def rollout_vs_generate(
    threads: int = 2, rounds: int = 5, device: Literal["cpu", "cuda"] = "cpu", cases: Sequence[int] = (0, 1, 2)
) -> Rows:
    transformers.logging.set_verbosity_error()
    weights = dict(Decoder(CONFIG).initialize(torch.Generator().manual_seed(1)).state_dict())
    for size in (SIZES[i] for i in cases):
        contenders = {"transformers": hugging_face(weights, size, device)}
        facts: dict[str, Row] = {"transformers": {"engine": "transformers", "requested": "fp32", "active": "fp32"}}
        for precision in ("fp32", "fp16", "bf16"):
            contenders[precision], active = native(weights, size, precision, device)
            facts[precision] = {"engine": "native", "requested": precision} | active
        rates = interleaved(contenders, rounds)
        about: Row = {"case": size.name, "rounds": rounds, "transformers": transformers.__version__}
        for name, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates["transformers"], strict=True)]
            yield about | facts[name] | {"metric": "throughput", "unit": "tokens/s"} | middle(values)
            if name != "transformers":
                yield about | facts[name] | {"metric": "speedup over transformers", "unit": "ratio"} | middle(ratios)
