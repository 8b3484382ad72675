"""Faults put into real jobs of verl's trainer under ``+trainer.gate=stop``: what stopped each, at which step.

    python benchmarks/run.py verl_gate                    # every fault, in the environment of make test-verl
    python benchmarks/run.py verl_gate sign expert        # these
    python benchmarks/run.py verl_gate --look logprobs    # servers hide their weights: log-probs alone
    python benchmarks/run.py verl_gate vllm-layer ...     # in that of make test-verl-vllm
    python benchmarks/run.py verl_gate turns              # faults in turn under gate=warn:1
    python benchmarks/run.py verl_gate long --seed 1      # 100 steps without one, of another policy and other sums

A row a job. The policy is of two layers and was first taught sums, so that its distributions are a trained one's; both
sides compute in fp16. A fault comes with the sync of step 1, after a look at a healthy batch, or is there from the
start: then for five looks. ``turns``: every other step of one job has a fault, the next of ``TURNS``, and each step is
looked at by weights and by log-probs; ``long``: no step has. The other rollout is transformers' generation
(tests/support/verl_hf_rollout.py), ours, or verl's own vLLM.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rows import ROOT
from runner import Rows, among, case

sys.path.insert(0, str(ROOT / "tests" / "support"))

from verl_job import ACTOR, MODEL, REF, ROLLOUT, VLLM, Job, make_inputs, run_job

FREE = f"{ACTOR}.fsdp_config.mixed_precision"
SIZE = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.temperature=0.7")
FSDP = (f"{ACTOR}.strategy=mantissa_fsdp2", f"{FREE}.param_dtype=fp16", f"{ROLLOUT}.dtype=float16")
LORA = (f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=all-linear", f"{MODEL}.lora.merge=True")
EXPERTS = MappingProxyType(
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
)
EQUAL = MappingProxyType({"num_key_value_heads": 4})  # then q and k have one shape
LINE = re.compile(r"MantissaError: (mantissa doctor: .*)")
STEP = re.compile(r"mantissa doctor: (after the sync of )?step (\d+)")


TURNS = ("bucket", "sign", "heads", "scaled", "layer", "asleep", "swapped", "stale")
ROUNDS, LONG = 3, 100  # of all of them; steps of the healthy job
AT_ONCE = tuple(
    f"{each}_micro_batch_size_per_gpu=64" for each in (f"{ACTOR}.ppo", f"{ROLLOUT}.log_prob", f"{REF}.log_prob")
)  # a batch in one forward, for a job of many steps


class Fault(NamedTuple):
    """``injected``: the step whose weights are the first that are wrong (0: from the start). ``weights``: what the gate
    must say of weights; None where they are right, and log-probs alone can tell."""

    what: str
    weights: str | None
    injected: int = 1
    server: str = ""  # its name there, if another
    family: str = "qwen3"
    fields: Mapping[str, Any] = MappingProxyType({})
    overrides: tuple[str, ...] = FSDP
    ranks: int = 1
    rollout: str = "hf_test"


FAULTS = {
    "healthy": Fault("nothing", "", server=" "),
    "healthy-experts": Fault("nothing, a mixture", "", server=" ", family="qwen2_moe", fields=EXPERTS),
    "sign": Fault("one layer's down_proj negated", "scaled: mlp.down_proj.weight of layer 1 (by -1)"),
    "scaled": Fault("one layer's down_proj times 1.01", "scaled: mlp.down_proj.weight of layer 0 (by 1.0"),
    "expert": Fault("one expert has another's matrix", "mlp.experts.down_proj", family="qwen2_moe", fields=EXPERTS),
    "heads": Fault("a layer's q and k changed places", "those of layers.0.self_attn.", fields=EQUAL),
    "bucket": Fault("a stale bucket: one layer's MLP", "stale: mlp.down_proj.weight of layer 1"),
    "layer": Fault("a stale layer", "stale: self_attn.q_proj.weight of layer 1"),
    "stale": Fault("every weight stale", "stale: "),
    "rank": Fault("one stale server of two", "server 2 of 2 does not have", ranks=2),
    "asleep": Fault("a matrix of zeros after sleep", "zero: mlp.down_proj.weight of layer 0"),
    "rope": Fault("rope theta 100 times as large", None, 0),
    "softcap": Fault("logits not capped at 30", None, 0, family="gemma2"),
    "temperature": Fault("log-probs from before the temperature", None, 0),
    "adapter": Fault("an adapter dropped (LoRA, merged)", None, server="stale", overrides=(*FSDP, *LORA)),
    **{
        f"vllm-{name}": Fault(f"verl's vLLM: {what}", said, overrides=(*FSDP, *VLLM), rollout="vllm")
        for name, what, said in (
            ("healthy", "nothing", ""),
            ("layer", "a stale layer", "stale: self_attn.q_proj.weight of layer 1"),
            ("sign", "one layer's down_proj negated", "scaled: mlp.down_proj.weight of layer 1 (by -1)"),
        )
    },
}  # fmt: skip


NOT_VLLMS = tuple(name for name in FAULTS if not name.startswith("vllm"))


def teach(folder: Path, family: str, fields: Mapping[str, Any], head_dim: int, seed: int = 0) -> None:
    """In the place of the job's random policy one that writes a sum out, to a loss of 0.4: its entropies are real."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    words, plain = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder).to_dict()
    same = {name: plain[name] for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "pad_token_id")}  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(same | {"head_dim": head_dim, **fields})))
    optimizer, draw = torch.optim.AdamW(model.parameters(), 3e-3), random.Random(seed)
    for _ in range(1500):
        rows = []
        for _ in range(32):
            a, b = draw.randrange(100), draw.randrange(100)
            begin, end = f"{a}+{b}=", f"{b}+{a}={a + b}"
            ids = [plain["bos_token_id"], *words.encode(begin, add_special_tokens=False)]
            rows.append((len(ids), [*ids, *words.encode(end, add_special_tokens=False), plain["eos_token_id"]]))
        width = max(len(ids) for _, ids in rows)
        tokens = torch.tensor([ids + [plain["pad_token_id"]] * (width - len(ids)) for _, ids in rows])
        labels = torch.tensor([[-100] * at + ids[at:] + [-100] * (width - len(ids)) for at, ids in rows])
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.4:
            break
    else:
        raise SystemExit(
            f"{family}: expected sums to be learned to a loss of 0.4 in 1500 steps; it is {float(loss):.2f}"
        )
    model.save_pretrained(folder)


def run(name: str, look: str, folder: Path) -> Job:
    """The job of a fault; ``look``: at ``weights`` too, or at ``logprobs`` alone."""
    fault = FAULTS[name]
    head_dim = 32 if fault.rollout == "vllm" else 16
    make_inputs(folder, head_dim)
    teach(folder / "model", fault.family, fault.fields, head_dim)
    environment = {"MANTISSA_TEST_FAULT": (fault.server or name.removeprefix("vllm-")).strip()}
    if look == "logprobs":
        environment["MANTISSA_TEST_HIDDEN"] = "1"
    return run_job(
        folder, *fault.overrides, *SIZE, "+trainer.gate=stop", steps=3 if fault.injected else 5,
        fails=False if fault.weights == "" else None, environment=environment, ranks=fault.ranks,
        rollout=fault.rollout, seconds=900,
    )  # fmt: skip


def of_job(name: str, look: str, job: Job) -> dict[str, Any]:
    """The row of a job: at which step it was stopped, by what, in which words."""
    fault = FAULTS[name]
    lines = LINE.findall(job.log)
    if job.code and not lines:
        raise SystemExit(f"{name}: the job ended by something else than the gate\n{job.log[-6000:]}")
    said = lines[0].partition(". Page: ")[0].partition(". trainer.gate=warn")[0] if lines else ""
    where = STEP.match(said)
    pages = sorted((job.folder / "checkpoints" / "doctor").glob("step-*/doctor.json"))
    seen = [json.loads(page.read_text()) for page in pages]
    by = None if where is None else "weights" if where[1] else "logprobs"
    expected = "weights" if look == "weights" and fault.weights else "logprobs"
    right = by is None if fault.weights == "" else by == expected
    if by == "weights":
        right = right and (fault.weights or "?") in said
    return {
        "fault": name, "what": fault.what, "look": look,
        "rollout": {"hf_test": "transformers"}.get(fault.rollout, fault.rollout), "family": fault.family,
        "injected": None if fault.weights == "" else fault.injected, "seen": None if where is None else int(where[2]),
        "by": by, "right": right, "named": _named(seen[-1]) if by == "logprobs" else None, "said": said,
        "size_of_u": [each["figures"]["u_rms"] for each in seen],
        "tokens": [each["figures"]["tokens"] for each in seen], "verdicts": [each["verdict"] for each in seen],
        "steps": len(job.metrics), "job_seconds": job.seconds, "requested": "fp16", "active": "fp16",
    }  # fmt: skip


def _named(page: dict[str, Any]) -> str | None:
    """The fault of a page, and what it was not told from."""
    also = [each["also"] for each in page["findings"] if each["name"] == page["fault"]]
    return " or ".join([page["fault"], *also[0]]) if also else None


def of_turns(name: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """The row of a job whose every step is looked at: how often each fault was seen, by weights and by log-probs.

    ``seed``: of the policy, and of the order of the sums.
    """
    make_inputs(folder)
    teach(folder / "model", "qwen3", EQUAL, 16, seed)
    turns = [each for fault in TURNS for each in ("", fault)] if name == "turns" else [""]
    job = run_job(
        folder, *FSDP, *SIZE, *AT_ONCE, "+trainer.gate=warn:1", f"{ACTOR}.optim.lr=3e-4", "trainer.save_freq=-1",
        "data.shuffle=True", f"data.seed={seed}", steps=steps,
        environment={"MANTISSA_TEST_FAULT": ",".join(turns)}, seconds=2700,
    )  # fmt: skip
    lost = {
        int(step) for step in re.findall(r"mantissa doctor: after the sync of step (\d+), the rollout does", job.log)
    }
    seen: dict[str, dict[str, Any]] = {}
    for step in sorted(job.metrics):
        of = seen.setdefault(turns[(step - 1) % len(turns)] or "healthy", {"looks": 0, "weights": 0, "logprobs": 0})
        page = json.loads((folder / "checkpoints" / "doctor" / f"step-{step}" / "doctor.json").read_text())
        found = bool(job.metrics[step]["mantissa/gate_fault"])
        of["looks"] += 1
        of["weights"] += step - 1 in lost
        of["logprobs"] += found
        of.setdefault("size_of_u", []).append(page["figures"]["u_rms"])
        of.setdefault("names", []).append(page["fault"] if found else None)
    return {
        "fault": name, "what": "faults in turn" if name == "turns" else "nothing", "look": "both", "seen": seen,
        "seed": seed,
        "rollout": "transformers", "family": "qwen3", "steps": len(job.metrics), "job_seconds": job.seconds,
        "sync_seconds": [job.metrics[step]["mantissa/sync_seconds"] for step in sorted(job.metrics)],
        "step_seconds": [job.metrics[step]["timing_s/step"] for step in sorted(job.metrics)],
        "requested": "fp16", "active": "fp16",
    }  # fmt: skip


@case()
def verl_gate(
    faults: Sequence[str] = NOT_VLLMS, /, look: Literal["weights", "logprobs"] = "weights", seed: int = 0,
    steps: int = LONG,
) -> Rows:  # fmt: skip
    several = {"turns": 2 * ROUNDS * len(TURNS), "long": steps}
    among(faults, (*FAULTS, *several))
    for name in faults:
        with tempfile.TemporaryDirectory(prefix="gate-jobs-") as folder:
            place = Path(folder)
            if name in several:
                row = of_turns(name, place, seed, several[name])
            else:
                row = of_job(name, look, run(name, look, place))
            if not row.get("right", True):
                print((place / "job.log").read_text()[-6000:], file=sys.stderr, flush=True)
        yield row
