"""Sampling by our engine beside transformers' ``generate``: same weights, same prompts, in turn.

The engine returns log-probs too, ``generate`` tokens only. Ratios are medians of the rounds' own, because the machine
may be shared. What samples is a function of the number of new tokens that returns how many tokens came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from runner import Row, Rows, case
from workers import middle, turns

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import probe, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig, load_model
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams

Prompts = Sequence[Sequence[int]]
Sample = Callable[[int], int]


def engine_of(
    model: Decoder, precision: Any, slots: int, longest: int, device: str = "cpu", prove: bool = True
) -> tuple[NativeEngine, Row]:
    """Our engine in a precision, with the model's weights; and what is active. A row whose precision did not engage is
    refused where it must ``prove`` it."""
    policy = precision if isinstance(precision, PrecisionPolicy) else PrecisionPolicy.parse(precision)
    resolved = resolve(policy, device)
    kernels = rollout_kernels(resolved)
    if prove:
        probe(kernels, device)
    cache = resolved.kv_cache.active
    engine = NativeEngine(model.config, kernels, kv_format=cache, slots=slots, max_length=longest, device=device)
    engine.sync(dict(model.state_dict()), 0)
    return engine, {"active": resolved.rollout.active.name, "kernels": str(resolved.rollout.backend)}


def ours(engine: NativeEngine, prompts: Prompts, samples: int = 1, stop: Sequence[int] = ()) -> Sample:
    requests = [Request(tuple(prompt), i, samples) for i, prompt in enumerate(prompts)]

    def run(new: int) -> int:
        groups = engine.generate(requests, SamplingParams(max_tokens=new, stop_token_ids=tuple(stop)), engine.version)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run


def theirs(model: Any, prompts: Prompts, samples: int = 1, at_once: int = 1 << 30, stop: int | None = None) -> Sample:
    """``generate``, of at most so many sequences at once, padded on the left."""
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": samples, "pad_token_id": 0,
                           "eos_token_id": stop}  # fmt: skip

    def run(new: int) -> int:
        produced, step = 0, max(1, at_once // samples)
        for part in (prompts[start : start + step] for start in range(0, len(prompts), step)):
            longest = max(map(len, part))
            tokens, mask = (
                torch.tensor([[0] * (longest - len(each)) + list(each) for each in rows], device=model.device)
                for rows in (part, [[1] * len(each) for each in part])
            )
            with torch.no_grad():
                out = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=new, **how)[:, longest:]
            if stop is None:
                produced += out.numel()
            else:  # tokens up to and with the stop token
                ended = (out == stop).long().cumsum(-1) - (out == stop).long()
                produced += int((ended == 0).sum())
        return produced

    return run


# ---- a small decoder: tokens a second

CONFIG = ModelConfig("qwen3", 64, 128, 384, 4, 4, 2, 32, qk_norm=True, initializer_range=0.08)


class Size(NamedTuple):
    """``prompts`` prompts, each sampled ``samples`` times, ``new_tokens`` long; ``stop``: token 1 ends a sample."""

    name: str
    prompts: int
    samples: int
    new_tokens: int
    slots: int
    stop: bool = False

    def drawn(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(12, 21, (self.prompts,), generator=generator).tolist()
        return [torch.randint(2, CONFIG.vocab_size, (n,), generator=generator).tolist() for n in lengths]


SIZES = (
    Size("256 prompts x 1 x 64 tokens", 256, 1, 64, 256),
    Size("64 prompts x 8 x 24 tokens", 64, 8, 24, 512),
    Size("ragged: 512 prompts x 1, at most 128 tokens, 128 slots", 512, 1, 128, 128, stop=True),
    Size("tiny: 2 prompts x 2 x 4 tokens", 2, 2, 4, 4),
)


def in_transformers(model: Decoder) -> Any:
    """The same weights in transformers' own class."""
    import transformers

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")  # fmt: skip
    config = transformers.Qwen3Config(**{name: getattr(model.config, name) for name in names})
    made = transformers.Qwen3ForCausalLM(config).eval()
    made.load_state_dict(model.state_dict())
    return made


def rate(run: Callable[[], int]) -> float:
    """Tokens a second."""
    start = time.perf_counter()
    produced = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return produced / (time.perf_counter() - start)


@case(rounds=1, cases=(3,))
def rollout_vs_generate(
    threads: int = 2, rounds: int = 5, device: Literal["cpu", "cuda"] = "cpu", cases: Sequence[int] = (0, 1, 2)
) -> Rows:
    """Tokens per second of the native engine against transformers' ``generate``: same weights, same prompts,
    interleaved.

    Every sample runs to the same number of new tokens, so both do the same work. ``ragged`` is the exception: a stop
    token ends samples early, and ``generate`` gets the prompts in batches of the engine's slots. ``cases``: indices of
    the sizes.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(1))
    for size in (SIZES[i] for i in cases):
        contenders: dict[str, Callable[[], int]] = {}
        facts: dict[str, Row] = {"transformers": {"engine": "transformers", "requested": "fp32", "active": "fp32"}}
        other = theirs(
            in_transformers(model).to(device), size.drawn(), size.samples, size.slots, 1 if size.stop else None
        )
        contenders["transformers"] = partial(other, size.new_tokens)
        for precision in ("fp32", "fp16", "bf16"):
            engine, active = engine_of(model, precision, size.slots, 256, device)
            facts[precision] = {"engine": "native", "requested": precision} | active
            mine = ours(engine, size.drawn(), size.samples, (1,) if size.stop else ())
            contenders[precision] = partial(mine, size.new_tokens)
        rates = turns(contenders, 1, rounds, rate)
        about: Row = {"case": size.name, "rounds": rounds, "transformers": transformers.__version__}
        for name, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates["transformers"], strict=True)]
            yield about | facts[name] | {"metric": "throughput", "unit": "tokens/s"} | middle(values)
            if name != "transformers":
                yield about | facts[name] | {"metric": "speedup over transformers", "unit": "ratio"} | middle(ratios)


# ---- a pretrained one: prefill and decode

PROMPT, NEW = 48, 12


def random_prompts(rows: int, words: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(words // 2, (PROMPT,), generator=generator).tolist() for _ in range(rows)]


def native(
    model: Decoder, rows: int, samples: int, precision: str | PrecisionPolicy, new: int = NEW
) -> tuple[Sample, Row]:
    engine, active = engine_of(model, precision, rows, PROMPT + new)
    return ours(engine, random_prompts(rows // samples, model.config.vocab_size), samples), active


def phases_of(first: Mapping[str, float], whole: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, of one new token and of all."""
    times = {f"{phase} {key}": took[key] for phase, took in (("prefill", first), ("all", whole)) for key in took}
    return times | {f"decode {key}": whole[key] - first[key] for key in whole}


def timed(run: Sample, new: int) -> tuple[int, dict[str, float]]:
    """How many tokens came, in which seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    came = run(new)
    return came, {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - cpu}


def measure(contenders: dict[str, Sample], rows: int, rounds: int, new: int = NEW) -> dict[str, list[dict[str, float]]]:
    """For each contender and round, seconds by phase: ``prefill``, ``decode``, ``all``; after one round of warm-up."""

    def phases(run: Sample) -> dict[str, float]:
        (one, first), (all_, whole) = timed(run, 1), timed(run, new)
        assert (one, all_) == (rows, rows * new)
        return phases_of(first, whole)

    return turns(contenders, 1, rounds, phases)


@case(rounds=1, rows=(4,), samples=2, precisions=("fp32",))
def decode_pretrained(
    folder: Path, threads: int = 2, rounds: int = 5, rows: Sequence[int] = (16, 64), samples: int = 1,
    precisions: Sequence[str] = ("fp32", "fp16", "bf16"),
) -> Rows:  # fmt: skip
    """Sampling from a pretrained model: the native engine against transformers' ``generate``, prefill and decode apart.

    ``FOLDER``: a Hugging Face model, such as SmolLM2-135M's. ``rows`` completions of 12 tokens after prompts of 48, the
    end token ignored; with ``--samples 8`` each prompt has eight of them, as in RL: the engine computes it once. A
    round is all contenders in turn, each once with one new token (prefill) and once with all; decode is the difference.
    Ratios are of seconds and of processor seconds: with ``--threads 1`` on a busy machine the second is the steadier.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    keep_freed_memory()  # as ``mantissa`` itself has it
    model = load_model(folder)
    prompts = random_prompts(max(rows) // samples, model.config.vocab_size)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for count in rows:
        contenders = {"transformers": theirs(other, prompts[: count // samples], samples)}
        about: dict[str, Row] = {"transformers": {"requested": "fp32", "active": "fp32"}}
        for precision in precisions:
            contenders[precision], active = native(model, count, samples, precision)
            about[precision] = {"requested": precision} | active
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
