"""Write results/README.md, and the table in README.md, from the newest row of each measurement. Nothing is typed.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
Row = dict[str, Any]
# What tells two measurements apart; of those that agree in all of these the newest (the last in its file) counts.
KEYS = (
    "benchmark", "case", "pair", "contender", "engine", "requested", "active", "kernels", "metric", "hidden", "layers",
    "tokens", "parameters", "threads", "busy_processes", "training_device", "device", "precision", "seed",
)  # fmt: skip
HEAD = """# Results

Written by `python benchmarks/tables.py` from the rows in this folder: the newest of each. Value, then quartiles or
range in brackets. The machine is shared, so ratios (taken within a round) say more than times.
"""


def newest() -> list[Row]:
    latest: dict[tuple[Any, ...], Row] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            latest[tuple(row.get(key) for key in KEYS)] = row
    return list(latest.values())


def number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if unit == "ratio" else f"{text} {unit}"


def cell(row: Row) -> str:
    low, high = row.get("quartile_low", row.get("min")), row.get("quartile_high", row.get("max"))
    text = number(row["value"], row["unit"])
    return text if low is None else f"{text} ({number(low, 'ratio')}..{number(high, 'ratio')})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in rows) + "\n"


def peak_of(rows: Sequence[Row], device: str, threads: int) -> float | None:
    """The machine's matmul peak for this many threads, GFLOP/s."""
    peaks = (r for r in rows if r["benchmark"] == "peak" and r["contender"] == "square")
    return next((r["value"] for r in peaks if (r["device"], r["threads"]) == (device, threads)), None)


def rl_step(rows: Sequence[Row], work: str) -> str:
    """One line a contender and thread count: time, ratio to TRL, share of the peak, phases, what bounds it."""
    mine = [r for r in rows if r["benchmark"] == "rl_step" and r.get("work", "small") == work]
    lines = []
    groups = sorted({(r["threads"], r["device"], r["contender"]) for r in mine})
    for threads, device, contender in groups:
        by = {
            r["metric"]: r for r in mine if (r["threads"], r["device"], r["contender"]) == (threads, device, contender)
        }
        peak = peak_of(rows, device, threads)
        share = f"{by['product_gflops']['value'] / peak:.0%}" if peak else "?"
        phases = ("rollout", "learner_logp", "update", "sync")
        split = ", ".join(f"{p} {by[f'{p}_seconds']['value']:.2f}" for p in phases if f"{p}_seconds" in by)
        ratio = cell(by["time_over_trl_fp32"]) if "time_over_trl_fp32" in by else "1"
        ops = by["time_in_matmul"]["ops"] if "time_in_matmul" in by else {}
        bounds = ", ".join(f"{op.removeprefix('aten::')} {part:.0%}" for op, part in ops.items())
        active = f"{by['step_seconds']['active']} {by['step_seconds']['kernels']}"
        memory = f"{by['peak_memory']['value'] / 1e9:.2f} GB" if "peak_memory" in by else ""
        lines.append([str(threads), contender, active, cell(by["step_seconds"]), ratio, share, memory, split, bounds])
    header = ("threads", "contender", "active", "one step", "x TRL fp32", "share of matmul peak", "peak memory",
              "phases, s", "ops")  # fmt: skip
    return table(header, lines) if lines else ""


def generic(rows: Sequence[Row], benchmarks: Sequence[str], columns: Sequence[str]) -> str:
    """One line a row, with ``columns`` of it that any row has."""
    mine = [r for r in rows if r["benchmark"] in benchmarks]
    shown = [c for c in columns if any(c in r for r in mine)]
    lines = [[*(str(r.get(c, "")) for c in shown), r["metric"].replace("_", " "), cell(r)] for r in mine]
    return table([*(c.replace("_", " ") for c in shown), "metric", "value"], lines)


def demo_runs(rows: Sequence[Row]) -> str:
    """One line a run of the demo: what was learned, in which time, and the gap over the first ten steps."""
    lines = []
    for r in rows:
        if r["benchmark"] != "demo_runs":
            continue
        learned = f"{r['accuracy_first']:.2f} → {r['accuracy_last_10']:.3f}"
        gap = [f"{r[f'gap_{name}']:.1e}" for name in ("abs_logp_diff_mean", "k3", "seq_log_ratio_std")]
        time = f"{r['rl_seconds']:.0f} s, {r['threads']} thread{'s' * (r['threads'] > 1)}"
        step = str(r["first_step_at_0.95"])
        lines.append([r["precision"], str(r["seed"]), learned, step, time, *gap, f"{r['gap_equal_fraction']:.0%}"])
    header = ("learner/rollout", "seed", "training accuracy", "0.95 at step", "RL time", "mean abs log-prob difference",
              "k3", "std of sequence log-ratio", "tokens equal to the last bit")  # fmt: skip
    return table(header, lines)


def smollm2_runs(rows: Sequence[Row]) -> str:
    """One line a run of the pretrained model: accuracy, completions that ended by themselves, time and gap."""
    lines = []
    for r in rows:
        if r["benchmark"] != "smollm2_runs":
            continue
        last = next(r[name] for name in r if name.startswith("accuracy_last_"))
        phases = ", ".join(f"{name} {r['phase_seconds'][name]:.1f}" for name in ("rollout", "learner_logp", "update"))
        heldout = [f"{r[name]:.2f}" for name in ("greedy_heldout", "avg_heldout")]
        stopped = f"{r['stopped_first']:.0%} → {r['stopped_last']:.0%}"
        run = f"{r['steps']} steps, {r['rl_seconds'] / 60:.0f} min, {r['threads']} thread{'s' * (r['threads'] > 1)}"
        learned, gap = f"{r['accuracy_first']:.2f} → {last:.3f}", f"{r['gap_abs_logp_diff_mean']:.1e}"
        lines.append(
            [r["precision"], str(r["seed"]), learned, *heldout, stopped, run, phases, gap, f"{r['gap_k3']:.1e}"]
        )
    header = ("learner/rollout", "seed", "training accuracy", "held out, greedy", "held out, mean of 4",
              "ended with the end token", "run", "median s of a step",
              "mean abs log-prob difference", "k3")  # fmt: skip
    return table(header, lines)


def gap(rows: Sequence[Row]) -> str:
    """One line a pair of formats, the newest of it, in the command's order: each figure with its interval."""
    from mantissa.bench.options import PAIRS
    from mantissa.runs.gap_page import TITLES, figure_text

    newest = {r["pair"]: r for r in rows if r["benchmark"] == "gap"}
    lines = []
    for r in sorted(newest.values(), key=lambda r: PAIRS.index(r["pair"])):
        figures = (figure_text(r, name) for name in TITLES)
        lines.append([r["pair"], *(f"{value} ({interval})" for value, interval in figures)])
    return table(("learner/rollout", *(title.replace("|", "\\|") for title in TITLES.values())), lines)


README_PAIRS = ("fp32+serving", "fp16+serving", "bf16+serving", "fp8", "bf16/fp8", "exact")


def short_gap(rows: Sequence[Row]) -> str:
    """The README's: the pairs that show the range, and three figures of each."""
    from mantissa.runs.gap_page import figure_text

    newest = {r["pair"]: r for r in rows if r["benchmark"] == "gap"}
    lines = []
    for pair in README_PAIRS:
        mean, interval = figure_text(newest[pair], "abs_logp_diff_mean")
        others = (figure_text(newest[pair], name)[0] for name in ("seq_log_ratio_std", "phantom_clip_fraction"))
        lines.append([f"`{pair}`", f"{mean} ({interval})", *others])
    return table(("learner/rollout", "mean \\|Δ log-prob\\|", "spread over a sequence", "clipped"), lines)


def auto_scale(rows: Sequence[Row]) -> str:
    """One line a kind of gradients, one column a rule: skipped steps / fraction of gradients flushed to zero."""
    mine = {(r["case"], r["contender"], r["metric"]): r["value"] for r in rows if r["benchmark"] == "auto_scale"}
    cases, rules = (list(dict.fromkeys(key[i] for key in mine)) for i in (0, 1))
    lines = [
        [
            case,
            *(
                f"{mine[case, rule, 'skipped_steps']:.1f} / {mine[case, rule, 'flushed_fraction']:.2%}"
                for rule in rules
            ),
        ]
        for case in cases
    ]
    return table(["gradients", *rules], lines)


def write_between(path: Path, mark: str, content: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->`` in ``path``."""
    before, opening, rest = path.read_text().partition(f"<!-- {mark} -->\n")
    _, closing, after = rest.partition(f"<!-- /{mark} -->")
    if not opening or not closing:
        raise SystemExit(f"{path} has no place marked {mark}")
    path.write_text(before + opening + content + closing + after)


COMMON = ("case", "contender", "engine", "requested", "active", "kernels", "hidden", "tokens", "threads")
SECTIONS: tuple[tuple[str, Callable[[Sequence[Row]], str], set[str]], ...] = (
    ("One RL step against TRL: 64 prompts of 16 tokens x 8 samples x 24 tokens, hidden 128, 4 layers",
     lambda r: rl_step(r, "small"), {"rl_step"}),
    ("One RL step of SmolLM2-135M against TRL: 4 prompts of 48 tokens x 8 samples x 24 tokens",
     lambda r: rl_step(r, "pretrained"), {"rl_step"}),
    ("The gap of SmolLM2-135M-Instruct in each pair of formats, 95% intervals: 32 prompts, 32 tokens", gap, {"gap"}),
    ("Runs of the demo; the gap is the mean over the first ten steps", demo_runs, {"demo_runs"}),
    ("RL on SmolLM2-135M-Instruct, weights from a 4-bit grid: one-digit sums and differences", smollm2_runs,
     {"smollm2_runs"}),
    ("Matmul peak and memory bandwidth", lambda r: generic(r, ["peak"], ("contender", "threads")), {"peak"}),
    ("Rollout against transformers' generate", lambda r: generic(r, ["rollout_vs_generate"], COMMON),
     {"rollout_vs_generate"}),
    ("Sampling from SmolLM2-135M against transformers' generate",
     lambda r: generic(r, ["decode_pretrained"], COMMON), {"decode_pretrained"}),
    ("A simulated training step against fp32", lambda r: generic(r, ["simulated_step"], COMMON), {"simulated_step"}),
    ("A CPU's own bf16 and simulated bf16 against fp32: training steps, prefill and decoding",
     lambda r: generic(r, ["native_bf16"], ("case", "requested", "kernels", "threads")),
     {"native_bf16"}),
    ("Sampling from SmolLM2-135M beside transformers and vLLM: seconds and memory",
     lambda r: generic(r, ["native_beside"], ("case", "contender", "threads")), {"native_beside"}),
    ("A training step with simulated fp8 products against fp32", lambda r: generic(r, ["fp8_step"], COMMON),
     {"fp8_step"}),
    ("Exact kernels against fast ones: 64 prompts of 16 tokens x 8 samples x 24 tokens, sampled, scored and trained on "
     "once; every log-prob compared", lambda r: generic(r, ["exact_cost"], COMMON), {"exact_cost"}),
    ("PrecisionTrainer against plain torch AMP, computing alike: one step",
     lambda r: generic(r, ["amp_overhead"], (*COMMON, "parameters")), {"amp_overhead"}),
    ("fp16's loss against fp32's where the best is 0.25; batches lost to overflow under a heavy-tailed loss",
     lambda r: generic(r, ["amp_loss"], (*COMMON, "seeds")), {"amp_loss"}),
    ("Rules of loss scaling, 10,000 fp16 steps without retry: skipped steps / gradients flushed to zero, means of 5 "
     "seeds", auto_scale, {"auto_scale"}),
    ("The demo's memory; import time beyond torch's own", lambda r: generic(r, ["demo", "import"], ("contender",)),
     {"demo", "import"}),
    ("Keeping freed memory", lambda r: generic(r, ["allocator"], ("contender", "requested", "threads")), {"allocator"}),
    ("Threads that wait, alone and beside busy processes (4 cores)",
     lambda r: generic(r, ["waiting"], ("busy_processes", "threads", "contender")), {"waiting"}),
    ("On a GPU", lambda r: generic(r, ["gpu_step", "gpu_demo"], (*COMMON, "device")), {"gpu_step", "gpu_demo"}),
    ("Sizes on a GPU", lambda r: generic(r, ["gpu_sizes"], ("parameters", *COMMON, "device")), {"gpu_sizes"}),
)  # fmt: skip


def main() -> None:
    rows = newest()
    text = HEAD
    for title, make, names in SECTIONS:
        mine = [r for r in rows if r["benchmark"] in names]
        if mine and (content := make(rows)):
            devices = ", ".join(sorted({r["device"] for r in mine}))
            text += f"\n## {title}\n\nDevice: {devices}. torch {mine[-1]['torch']}.\n\n{content}"
    (RESULTS / "README.md").write_text(text)
    write_between(ROOT / "README.md", "gap", short_gap(rows))
    print(RESULTS / "README.md")


if __name__ == "__main__":
    main()
