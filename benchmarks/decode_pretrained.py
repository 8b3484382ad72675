"""Sampling from a pretrained model: the native engine against transformers' ``generate``, prefill and decode apart.

``FOLDER``: a Hugging Face model, such as SmolLM2-135M's. ``rows`` completions of 12 tokens after prompts of 48, the end
token ignored; with ``--samples 8`` each prompt has eight of them, as in RL: the engine computes it once. Both get the
same weights and prompts; ``generate`` returns tokens, the engine log-probs too. A round is all contenders in turn, each
once with one new token (prefill) and once with all; decode is the difference. Ratios are medians over the rounds, of
seconds and of processor seconds: with ``--threads 1`` on a busy machine the second is the steadier. Rows:
results/decode_pretrained.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from runner import Row, Rows, case
from workers import middle, turns

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

    def phases(run: Sample) -> dict[str, float]:
        first, whole = timed(run, 1, rows), timed(run, NEW, rows)
        times = {f"{phase} {key}": t[key] for phase, t in (("prefill", first), ("all", whole)) for key in t}
        return times | {f"decode {key}": whole[key] - first[key] for key in whole}

    return turns(contenders, 1, rounds, phases)


@case(rounds=1, rows=(4,), samples=2, precisions=("fp32",))
def decode_pretrained(
    folder: Path, threads: int = 2, rounds: int = 5, rows: Sequence[int] = (16, 64), samples: int = 1,
    precisions: Sequence[str] = ("fp32", "fp16", "bf16"),
) -> Rows:  # fmt: skip
    transformers.logging.set_verbosity_error()
    keep_freed_memory()  # as ``mantissa`` itself has it
    model = load_model(folder)
    for count in rows:
        contenders = {"transformers": hugging_face(folder, count, samples)}
        about: dict[str, Row] = {"transformers": {"requested": "fp32", "active": "fp32"}}
        for precision in precisions:
            contenders[precision], active = native(model, count, samples, precision)
            about[precision] = {"requested": precision, **active}
        found = measure(contenders, count, rounds)
        what = f"{count} rows, {count // samples} prompts of {PROMPT}, {NEW} new tokens"
        facts: Row = {"case": what, "hidden": model.config.hidden_size, "rounds": rounds}
        yield [
            facts | {"contender": name} | about[name] | row
            for name, mine in found.items()
            for row in compared(mine, found["transformers"])
        ]


def compared(mine: list[dict[str, float]], base: list[dict[str, float]]) -> Iterator[Row]:
    """Each phase's seconds, and the base's over them."""
    for key in mine[0]:
        values = [each[key] for each in mine]
        ratios = [one[key] / value for one, value in zip(base, values, strict=True)]
        for metric, unit, numbers in (("", "s", values), (", transformers' over it", "ratio", ratios)):
            yield {"metric": key + metric, "unit": unit, **middle(numbers)}
