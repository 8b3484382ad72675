"""Jobs of verl's own trainer with and without the plugin, two steps each; a row a job in results/verl.jsonl.

    python benchmarks/run.py verl_jobs              # every kind but vllm, suite; in the environment of make test-verl
    python benchmarks/run.py verl_jobs mantissa-fp16 overhead
    python benchmarks/run.py verl_jobs vllm-bf16 ...    # in that of make test-verl-vllm
    python benchmarks/run.py verl_jobs run              # 24 steps, for the picture
    python benchmarks/run.py verl_jobs suite-launch suite-jobs suite-ray    # make test-verl: each part's seconds
    python benchmarks/run.py verl_picture               # docs/images/verl.svg, from the rows

The model is a Qwen3 of two layers (tests/support/verl_job.py), or of the family that a kind names, so seconds are of
verl's machinery, not of arithmetic.
``overhead``: one optimiser step of verl's ``fsdp2`` and of ``mantissa_fsdp2`` in fp32 on one batch, in turn.
``spikes``: four batches whose loss is 256 times too large for fp16, on each engine; verl's scaler is as on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import ROOT
from runner import Rows, among, case

sys.path.insert(0, str(ROOT / "tests" / "support"))

from verl_engine_worker import see
from verl_job import ACTOR, REF, ROLLOUT, VLLM, Job, run_job

FREE = f"{ACTOR}.fsdp_config.mixed_precision"
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIZE = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", "+trainer.gate=warn")
NO_PREFIX_CACHE = f"{ROLLOUT}.enable_prefix_caching=False"
FLOWRL = (
    f"{ACTOR}.policy_loss.loss_mode=flowrl", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0",
)  # fmt: skip


def fsdp(strategy: str, name: str, *more: str) -> tuple[list[str], dict[str, Any]]:
    """verl's engine or ours over it, and transformers' generation."""
    given = [f"{ACTOR}.strategy={strategy}", f"{FREE}.param_dtype={name}", f"{ROLLOUT}.dtype={TORCH[name]}", *more]
    return given, {"external_lib": "verl_test_parts"}


def ours(name: str, *more: str, options: str = "", rollout: str = "mantissa") -> tuple[list[str], dict[str, Any]]:
    """Our learner; exact with our engine."""
    kernels = ",kernels:exact" if rollout == "mantissa" else ""
    free = f"+{FREE}={{precision:{{train:{name},rollout:{name}{kernels}}},length:32{options}}}"
    given = [f"{ACTOR}.strategy=mantissa", free, f"{ROLLOUT}.dtype={TORCH[name]}", *more]
    return given, {"external_lib": "mantissa.verl.plugin", "rollout": rollout}


def of_family(family: str, name: str) -> tuple[list[str], dict[str, Any]]:
    """The same for a model that only transformers knows."""
    given, more = ours(name)
    return given, {**more, "family": family}


KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    **{f"fsdp2-{name}": fsdp("fsdp2", name) for name in TORCH},
    **{f"mantissa_fsdp2-{name}": fsdp("mantissa_fsdp2", name) for name in TORCH},
    **{f"mantissa-{name}": ours(name) for name in TORCH},
    "mantissa-olmo2-bf16": of_family("olmo2", "bf16"),
    "flowrl-mantissa_fsdp2-fp16": fsdp("mantissa_fsdp2", "fp16", *FLOWRL, f"+{FREE}.flowrl={{}}"),
    "flowrl-mantissa-fp16": ours("fp16", *FLOWRL, f"{REF}.fsdp_config.dtype=float16", options=",flowrl:{}"),
    **{f"vllm-mantissa-{name}": ours(name, *VLLM, NO_PREFIX_CACHE, rollout="vllm") for name in TORCH},
    "vllm-mantissa_fsdp2-bf16": fsdp("mantissa_fsdp2", "bf16", *VLLM, NO_PREFIX_CACHE),
}
KINDS["vllm-mantissa_fsdp2-bf16"][1]["rollout"] = "vllm"


PARTS = ("suite-launch", "suite-jobs", "suite-ray")
KNOWN = (*KINDS, "overhead", "spikes", "run", *PARTS)
NOT_VLLMS = tuple(name for name in KNOWN if not name.startswith(("vllm", "suite")))


def of_job(kind: str, job: Job) -> dict[str, Any]:
    """What a job's metrics say."""
    values = job.metrics.values()
    name = kind.rsplit("-", 1)[-1]
    found: dict[str, Any] = {
        "requested": name,
        "active": name,
        "steps": len(job.metrics),
        "job_seconds": job.seconds,
        "step_seconds": sum(row["timing_s/step"] for row in values),
        "nan_norms": sum(not math.isfinite(row["actor/grad_norm"]) for row in values),
        "probs_diff_max": max(row["training/rollout_probs_diff_max"] for row in values),
        "size_of_u": max(
            (row["mantissa/gate_size_of_u"] for row in values if "mantissa/gate_size_of_u" in row), default=None
        ),
        "gate_faults": sum(row.get("mantissa/gate_fault", 0) for row in values),
    }
    for key in ("logprobs_compared", "logprobs_unlike_rollout", "logprobs_unlike_old", "retried", "skipped"):
        if any(f"actor/mantissa/{key}" in row for row in values):
            found[key] = sum(row.get(f"actor/mantissa/{key}", 0) for row in values)
    pages = sorted((job.folder / "checkpoints" / "doctor").glob("step-*/doctor.json"))
    seen = [json.loads(page.read_text()) for page in pages]
    found["verdicts"] = [each["verdict"] for each in seen]
    found["tokens"] = sum(each["figures"]["tokens"] for each in seen)
    found["unlike"] = sum(round(each["figures"]["tokens"] * (1 - each["figures"]["equal"])) for each in seen)
    return found


def of_run(folder: Path) -> dict[str, Any]:
    """24 steps in fp16 whose scale doubles every third one until it overflows, with the gate on; metrics by step."""
    given, named = ours("fp16", *SIZE, options=",loss_scaling:{growth_interval:3,initial:262144.0}")
    steps = 24
    job = run_job(folder, *given, "trainer.save_freq=100", steps=steps, seconds=1200, **named)
    names = {
        "reward": "critic/rewards/mean", "loss_scale": "actor/mantissa/loss_scale", "retried": "actor/mantissa/retried",
        "lost_so_far": "actor/mantissa/lost_so_far", "size_of_u": "mantissa/gate_size_of_u",
        "unlike": "actor/mantissa/logprobs_unlike_rollout", "compared": "actor/mantissa/logprobs_compared",
        "grad_norm": "actor/grad_norm",
    }  # fmt: skip
    curves = {short: [job.metrics[step].get(name) for step in sorted(job.metrics)] for short, name in names.items()}
    return {"requested": "fp16", "active": "fp16", "steps": steps, "job_seconds": job.seconds, "curves": curves}


def of_suite(part: str) -> dict[str, Any]:
    """A part of ``make test-verl``, which must pass: its seconds, by test too, and the machine's load meanwhile."""
    begun, text, target = time.monotonic(), "", part.replace("suite", "test-verl")
    given = os.environ | {"PYTEST_ADDOPTS": "--durations=25"}
    with subprocess.Popen(["make", target], cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) as suite:
        for line in suite.stdout or ():
            print(line, end="", flush=True)
            text += line
    if suite.returncode:
        raise SystemExit(f"make {target}: exit status {suite.returncode}; of tests that fail no row is kept")
    return {
        "suite_seconds": time.monotonic() - begun,
        "processors": os.cpu_count(),
        "load": os.getloadavg()[2],
    } | summary(text)


def summary(text: str) -> dict[str, Any]:
    """Of what a run of pytest printed: tests passed, and seconds of the slowest tests."""
    passed = re.search(r"^(?:=+ )?(\d+) passed", text, re.MULTILINE)
    slowest = re.findall(r"^([\d.]+)s call +(.+)$", text, re.MULTILINE)
    return {
        "passed": int(passed[1]) if passed else 0,
        "slowest": {name: float(seconds) for seconds, name in sorted(slowest, key=lambda each: -float(each[0]))[:25]},
    }


def measured(kind: str, folder: Path) -> dict[str, Any]:
    """The row of one kind, without its stamp."""
    if kind == "overhead":
        seen = see("overhead", folder)
        ratios = [one / base for one, base in zip(seen["mantissa_fsdp2"][10:], seen["fsdp2"][10:], strict=True)]
        from steps import spread

        return {"metric": "step_time_over_fsdp2", "same_bits": seen["same bits"], **spread(ratios)}
    if kind == "spikes":
        seen = see("spikes", folder)
        lost = {who: sum(step["changed"] == 0 for step in seen[who]) for who in ("verl", "ours", "mantissa")}
        return {"batches": {who: len(seen[who]) for who in lost}, "lost": lost, "requested": "fp16", "active": "fp16"}
    if kind == "run":
        return of_run(folder)
    if kind in PARTS:
        return of_suite(kind)
    given, named = KINDS[kind]
    more = {"head_dim": 32, "seconds": 1200} if kind.startswith("vllm") else {}
    return of_job(kind, run_job(folder, *given, *SIZE, **named, **more))


@case("verl")
def verl_jobs(kinds: Sequence[str] = NOT_VLLMS, /) -> Rows:
    among(kinds, KNOWN)
    about = {"benchmark": "verl", "verl": importlib.metadata.version("verl"), "ray": importlib.metadata.version("ray")}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix=f"verl-{kind}-") as folder:
            yield about | {"kind": kind} | measured(kind, Path(folder))


@case("verl")
def verl_picture() -> Rows:
    """The picture docs/images/verl.svg: what a job's log says by step, from the rows that there are."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mantissa"
    import matplotlib.pyplot as plt

    found = [json.loads(line) for line in (ROOT / "results" / "verl.jsonl").read_text().splitlines()]
    curves = next(row for row in reversed(found) if row["kind"] == "run")["curves"]
    steps = range(1, len(curves["reward"]) + 1)
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    panels[0].plot(steps, curves["reward"], color="#2a6fdb", linewidth=1.6)
    panels[0].set_title("critic/rewards/mean", fontsize=9)
    panels[1].plot(steps, curves["loss_scale"], color="#3b3b3b", linewidth=1.6, drawstyle="steps-mid")
    again = [(step, scale) for step, scale, r in zip(steps, curves["loss_scale"], curves["retried"], strict=True) if r]
    if again:
        panels[1].plot(*zip(*again, strict=True), "o", color="#c2453d", markersize=4)
        panels[1].annotate("red: overflowed, the same\nbatch repeated lower", (0.4, 0.06), fontsize=7,
                           xycoords="axes fraction", color="#c2453d")  # fmt: skip
    panels[1].set_yscale("log", base=2)
    panels[1].set_title("actor/mantissa/loss_scale", fontsize=9)
    panels[2].plot(steps, curves["unlike"], color="#c2453d", linewidth=1.6)
    panels[2].set_ylim(-1, max(10, *curves["unlike"]))
    lost, compared = curves["lost_so_far"][-1], sum(curves["compared"])
    panels[2].annotate(f"of {compared:,.0f} compared;\nbatches lost: {lost:.0f}", (0.05, 0.75), fontsize=8,
                       xycoords="axes fraction")  # fmt: skip
    panels[2].set_title("actor/mantissa/logprobs_unlike_rollout", fontsize=9)
    for panel in panels:
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "images" / "verl.svg", metadata={"Date": None})
    return iter(())
