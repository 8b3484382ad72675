"""Tokens per second of the native engine against transformers' ``generate``: same weights, same prompts, interleaved.

    python benchmarks/rollout_vs_generate.py --threads 2 --repeats 5

Every sample runs to the same number of new tokens, so both do the same work; ``generate`` returns tokens only, the
engine log-probs too. ``ragged`` is the exception: a stop token ends samples early, and ``generate`` gets the prompts in
batches of the engine's slots. Rounds are interleaved (A, B, C, A, B, C, ...) because the machine may be shared; the
ratio is the median of the rounds' ratios. Rows are appended to results/rollout_vs_generate.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mantissa.base.provenance import stamp
from mantissa.kernels import probe, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
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
class Case:
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


CASES = (
    Case("256 prompts x 1 x 64 tokens", 256, 1, 64, 256),
    Case("64 prompts x 8 x 24 tokens", 64, 8, 24, 512),
    Case("ragged: 512 prompts x 1, at most 128 tokens, 128 slots", 512, 1, 128, 128, stop=True),
)


def hugging_face(weights: dict[str, torch.Tensor], case: Case, device: str) -> Callable[[], int]:
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
    requests = case.requests()
    arguments: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": case.new_tokens,
        "num_return_sequences": case.samples,
        "pad_token_id": PAD,
        "eos_token_id": 1 if case.stop else None,
    }

    def run() -> int:
        produced = 0
        step = case.slots // case.samples
        for start in range(0, len(requests), step):
            part = requests[start : start + step]
            longest = max(len(r.prompt_tokens) for r in part)
            padded = [[PAD] * (longest - len(r.prompt_tokens)) + list(r.prompt_tokens) for r in part]
            tokens = torch.tensor(padded, device=device)
            with torch.no_grad():
                out = model.generate(input_ids=tokens, attention_mask=(tokens != PAD).long(), **arguments)
            response = out[:, longest:]
            if case.stop:  # tokens up to and with the stop token
                ended = (response == 1).long().cumsum(-1) - (response == 1).long()
                produced += int((ended == 0).sum())
            else:
                produced += response.numel()
        return produced

    return run


def native(weights: dict[str, torch.Tensor], case: Case, precision: str, device: str) -> tuple[Callable[[], int], str]:
    resolved = resolve(PrecisionPolicy.parse(precision), device)
    kernels = rollout_kernels(resolved)
    probe(kernels, device)  # a row whose precision did not engage is refused
    engine = NativeEngine(
        CONFIG, kernels, kv_format=resolved.kv_cache.active, slots=case.slots, max_length=256, device=device
    )
    engine.sync(weights, 0)
    requests = case.requests()
    params = SamplingParams(max_tokens=case.new_tokens, stop_token_ids=(1,) if case.stop else ())

    def run() -> int:
        groups = engine.generate(requests, params, 0)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run, f"{resolved.rollout.active} {resolved.rollout.backend}"


def interleaved(contenders: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each contender in each round, after one round of warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            produced = run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_index:
                rates[name].append(produced / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="indices of the cases")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "rollout_vs_generate.jsonl")
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    weights = dict(Decoder(CONFIG).initialize(torch.Generator().manual_seed(1)).state_dict())
    facts = stamp(args.device) | {"transformers": transformers.__version__}
    rows = []
    for case in (CASES[i] for i in args.cases):
        contenders, active = {"transformers": hugging_face(weights, case, args.device)}, {"transformers": "fp32 native"}
        for precision in ("fp32", "fp16", "bf16"):
            contenders[precision], active[precision] = native(weights, case, precision, args.device)
        rates = interleaved(contenders, args.repeats)
        print(f"\n{case.name}   ({facts['device']}, {args.threads} threads, {args.repeats} rounds)")
        print(f"{'engine':<14}{'active':<18}{'tokens/s median':>16}{'min':>9}{'max':>9}{'x transformers':>16}")
        for name, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates["transformers"], strict=True)]
            median, ratio = statistics.median(values), statistics.median(ratios)
            print(f"{name:<14}{active[name]:<18}{median:>16.0f}{min(values):>9.0f}{max(values):>9.0f}{ratio:>16.2f}")
            common = {
                "benchmark": "rollout_vs_generate",
                "case": case.name,
                "engine": "transformers" if name == "transformers" else "native",
                "requested": "fp32" if name == "transformers" else name,
                "active": active[name],
                "rounds": args.repeats,
                **facts,
            }
            spread = {"min": min(values), "max": max(values)}
            rows.append({**common, "metric": "throughput", "value": median, "unit": "tokens/s", **spread})
            if name != "transformers":
                spread = {"min": min(ratios), "max": max(ratios)}
                rows.append(
                    {**common, "metric": "speedup over transformers", "value": ratio, "unit": "ratio", **spread}
                )
    if not args.dry:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
