"""Sampling from a pretrained model: the native engine against transformers' ``generate``, prefill and decode apart.

    python benchmarks/decode_pretrained.py FOLDER [--threads 2] [--rounds 5] [--rows 16 64] [--samples 1]

``FOLDER``: a Hugging Face model, such as SmolLM2-135M's. ``rows`` completions of 12 tokens after prompts of 48, the end
token ignored; with ``--samples 8`` each prompt has eight of them, as in RL: the engine computes it once. Both get the
same weights and prompts; ``generate`` returns tokens, the engine log-probs too. A round is all contenders in turn, each
once with one new token (prefill) and once with all; decode is the difference. Ratios are medians over the rounds, of
seconds and of processor seconds: with ``--threads 1`` on a busy machine the second is the steadier. Rows:
results/decode_pretrained.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rows import append

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import probe, resolve, rollout_kernels
from mantissa.model import Decoder, load_model
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams

PROMPT, NEW = 48, 12
Sample = Callable[[int], int]


def prompts(rows: int, samples: int, words: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(words // 2, (PROMPT,), generator=generator).tolist()) for _ in range(rows // samples)]


def hugging_face(folder: Path, rows: int, samples: int) -> Sample:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(prompts(rows, samples, model.config.vocab_size))

    def run(new: int) -> int:
        with torch.no_grad():
            out = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                max_new_tokens=new,
                num_return_sequences=samples,
                eos_token_id=None,
                pad_token_id=0,
            )
        return int(out[:, PROMPT:].numel())

    return run


def native(model: Decoder, rows: int, samples: int, precision: str | PrecisionPolicy) -> tuple[Sample, dict[str, str]]:
    policy = precision if isinstance(precision, PrecisionPolicy) else PrecisionPolicy.parse(precision)
    resolved = resolve(policy, "cpu")
    kernels = rollout_kernels(resolved)
    probe(kernels, "cpu")  # a row whose precision did not engage is refused
    cache = resolved.kv_cache.active
    engine = NativeEngine(model.config, kernels, kv_format=cache, slots=rows, max_length=PROMPT + NEW)
    engine.sync(dict(model.state_dict()), 0)
    asked = [Request(prompt, i, samples) for i, prompt in enumerate(prompts(rows, samples, model.config.vocab_size))]

    def run(new: int) -> int:
        groups = engine.generate(asked, SamplingParams(max_tokens=new), 0)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run, {"active": resolved.rollout.active.name, "kernels": str(resolved.rollout.backend)}


def timed(run: Sample, new: int, rows: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    assert run(new) == rows * new
    return {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - cpu}


def measure(contenders: dict[str, Sample], rows: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """For each contender and round, seconds by phase: ``prefill``, ``decode``, ``all``; after one round of warm-up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, run in contenders.items():
            first, whole = timed(run, 1, rows), timed(run, NEW, rows)
            if index:
                times = {f"{phase} {key}": t[key] for phase, t in (("prefill", first), ("all", whole)) for key in t}
                times |= {f"decode {key}": whole[key] - first[key] for key in whole}
                found[name].append(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--precisions", nargs="*", default=["fp32", "fp16", "bf16"])
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    keep_freed_memory()  # as ``mantissa`` itself has it
    model, samples = load_model(arguments.folder), arguments.samples
    results: list[dict[str, Any]] = []
    for rows in arguments.rows:
        contenders = {"transformers": hugging_face(arguments.folder, rows, samples)}
        about: dict[str, dict[str, Any]] = {"transformers": {"requested": "fp32", "active": "fp32"}}
        for precision in arguments.precisions:
            contenders[precision], active = native(model, rows, samples, precision)
            about[precision] = {"requested": precision, **active}
        found = measure(contenders, rows, arguments.rounds)
        for name, rounds in found.items():
            case = f"{rows} rows, {rows // samples} prompts of {PROMPT}, {NEW} new tokens"
            facts = {"benchmark": "decode_pretrained", "case": case, "contender": name, **about[name]}
            facts |= {"hidden": model.config.hidden_size, "rounds": arguments.rounds}
            for key in rounds[0]:
                ratios = [base[key] / mine[key] for base, mine in zip(found["transformers"], rounds, strict=True)]
                values = [mine[key] for mine in rounds]
                for metric, unit, numbers in (("", "s", values), (", transformers' over it", "ratio", ratios)):
                    spread = {"value": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}
                    results.append(facts | {"metric": key + metric, "unit": unit, **spread})
                middle, ratio = statistics.median(values), statistics.median(ratios)
                print(f"{rows:>3} rows {name:<13}{key:<26}{middle:>8.3f} s  x{ratio:.2f}", flush=True)
    if not arguments.dry:
        print(append("decode_pretrained.jsonl", results, "cpu"))


if __name__ == "__main__":
    main()
