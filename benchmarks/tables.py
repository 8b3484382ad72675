"""Write results/README.md, and the table in README.md, from the newest row of each measurement. Nothing is typed.

python benchmarks/tables.py
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from measured import marks  # noqa: E402
from runner import first_sentence, found  # noqa: E402

RESULTS = ROOT / "results"
BENCHMARKS = Path(__file__).resolve().parent
Row = dict[str, Any]
# What tells two measurements apart; of those that agree in all of these the newest (the last in its file) counts.
KEYS = (
    "benchmark", "case", "pair", "contender", "engine", "requested", "active", "kernels", "metric", "hidden", "layers",
    "tokens", "parameters", "threads", "busy_processes", "training_device", "device", "precision", "seed",
)  # fmt: skip
HEAD = """# Results

Every figure in these pages comes from a row in this folder (`results/`): one measurement, with its device, threads,
versions and commit. A file is written by the case of its name (`python benchmarks/run.py NAME`), this page by
`python benchmarks/tables.py`. First the files; then tables that no other page has, of the newest row of each
measurement: value, and quartiles or range in brackets. The machine is shared, so ratios (taken within a round) say more
than times, and times are left out where there is a ratio. Behind † is a commit that is not in the history, or none
([why](../docs/findings.md#where-the-rows-come-from)).

"""


# Files that are not named after the case which writes them.
CASES = {"gap_formats": "gap", "gap_experts": "gap", "smollm2_runs": "demo_runs"}

OF_TESTS = {  # what writes them
    "hostile_inputs": "../tests/fuzz/inputs.py",
    "kills": "../tests/kills.py",
    "verl_kills": "../tests/verl_kills.py",
}


def index() -> str:
    """One line a file: what it holds, by its case's first sentence, how many rows, and the newest's commit."""
    lines, cases = [], found()
    for path in sorted(RESULTS.glob("*.jsonl")):
        name = CASES.get(path.stem, path.stem)
        source = BENCHMARKS / OF_TESTS.get(path.stem, f"{name}.py")
        said = ast.get_docstring(ast.parse(source.read_text())) if source.is_file() else None
        said = cases[name][2] if name in cases else first_sentence(said or path.stem)
        what = said.replace("``", "`")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        commit = f"{rows[-1].get('commit', '')[:7]}{marks(rows[-1:])}"
        lines.append([f"`{path.name}`", what, str(len(rows)), commit])
    labs = len(list((RESULTS / "lab").glob("*.jsonl")))
    lines.append(["`lab/*.jsonl`", f"{labs} experiments, a row a cell: `mantissa lab lab/NAME.yaml`", "", ""])
    return table(("file", "what", "rows", "newest's commit"), lines)


def newest() -> list[Row]:
    latest: dict[tuple[str, ...], Row] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = {"benchmark": path.stem} | json.loads(line)
            latest[tuple(str(row.get(key)) for key in KEYS)] = row
    return list(latest.values())


def number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if unit == "ratio" else f"{text} {unit}"


def cell(row: Row) -> str:
    low, high = row.get("quartile_low", row.get("min")), row.get("quartile_high", row.get("max"))
    text = number(row["value"], row["unit"])
    return text if low is None or high is None else f"{text} ({number(low, 'ratio')}..{number(high, 'ratio')})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in rows) + "\n"


def peak_of(rows: Sequence[Row], device: str, threads: int) -> float | None:
    """The machine's matmul peak for this many threads, GFLOP/s."""
    peaks = (r for r in rows if r["benchmark"] == "peak" and r["contender"] == "square")
    return next((r["value"] for r in peaks if (r["device"], r["threads"]) == (device, threads)), None)


def rl_step(rows: Sequence[Row], work: str) -> str:
    """One line a contender and thread count: time, ratio to TRL, share of the peak, phases."""
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
        active = f"{by['step_seconds']['active']} {by['step_seconds']['kernels']}"
        memory = f"{by['peak_memory']['value'] / 1e9:.2f} GB" if "peak_memory" in by else ""
        lines.append([str(threads), contender, active, cell(by["step_seconds"]), ratio, share, memory, split])
    header = ("threads", "contender", "active", "one step", "x TRL fp32", "share of matmul peak", "peak memory",
              "phases, s")  # fmt: skip
    return table(header, lines) if lines else ""


def generic(rows: Sequence[Row], benchmarks: Sequence[str], columns: Sequence[str]) -> str:
    """One line a row, with ``columns`` of it that any row has; where there are ratios, those alone."""
    mine = [r for r in rows if r["benchmark"] in benchmarks]
    if any(r["unit"] == "ratio" for r in mine):
        mine = [r for r in mine if r["unit"] == "ratio"]
    shown = [c for c in columns if any(c in r for r in mine)]
    lines = [[*(str(r.get(c, "")) for c in shown), r["metric"].replace("_", " "), cell(r)] for r in mine]
    return table([*(c.replace("_", " ") for c in shown), "metric", "value"], lines)


def decoding(rows: Sequence[Row]) -> str:
    """One line a case and format: transformers' time over ours, for the prompts, for the tokens, in all."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for r in (r for r in rows if r["benchmark"] == "decode_pretrained"):
        name = r["metric"].replace("_", " ")
        if r["contender"] != "transformers" and r["unit"] == "ratio":
            found.setdefault((r["case"], f"{r['active']} {r['kernels']}"), {})[name] = cell(r)
    parts = ("prefill", "decode", "all")
    lines = [[*what, *(by[f"{part} seconds, transformers' over it"] for part in parts)] for what, by in found.items()]
    return table(("case", "engine", "prefill", "decode", "all"), lines)


# Where a cost may grow faster than its work, why.
WHY = {"length": "every token attends to all before it: the scores of attention grow with the square of the length"}


def cost(rows: Sequence[Row]) -> str:
    """One line for each thing that grows: the exponents of time and memory, of all sizes and of the last two."""
    mine = {(r["case"], r["metric"]): r for r in rows if r["benchmark"] == "cost"}
    lines, reasons, metrics = [], [], list(dict.fromkeys(metric for _, metric in mine))
    for case_ in dict.fromkeys(case_ for case_, _ in mine):
        of = {metric: r for (which, metric), r in mine.items() if which == case_}
        sizes = ", ".join(f"{x:,.0f}" for x in next(iter(of.values()))["sizes"])
        exponents = (f"{r['value']:.2f} ({r['last']:.2f})" if (r := of.get(m)) else "" for m in metrics)
        lines.append([case_, sizes, *exponents])
        if worse := [metric for metric, r in of.items() if r["last"] > 1.1]:
            reasons.append(f"Worse than linear by {case_} ({', '.join(worse)}): {WHY.get(case_, 'why is not known')}.")
    header = ("what grows", "sizes", *(metric.replace("_", " ") for metric in metrics))
    base = next(iter(mine.values()))["base"]
    said = f"Exponents of all sizes, in brackets of the two largest; the others are at {base}.\n\n"
    return said + table(header, lines) + "".join(f"\n{reason}\n" for reason in reasons)


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
    """One line a run of the pretrained model: accuracy in training and on held-out problems, and the gap."""
    lines = []
    for r in rows:
        if r["benchmark"] != "smollm2_runs":
            continue
        last = next(r[name] for name in r if name.startswith("accuracy_last_"))
        heldout = [f"{r[name]:.2f}" for name in ("greedy_heldout", "avg_heldout")]
        learned, gap = f"{r['accuracy_first']:.2f} → {last:.3f}", f"{r['gap_abs_logp_diff_mean']:.1e}"
        lines.append([f"{r['precision']}{marks([r])}", str(r["seed"]), str(r["steps"]), learned, *heldout, gap])
    header = ("learner/rollout", "seed", "steps", "training accuracy", "held out, greedy", "held out, mean of 4",
              "mean abs log-prob difference")  # fmt: skip
    return table(header, lines)


def short_gap(rows: Sequence[Row]) -> str:
    """The README's: the pairs that ``mantissa gap`` measures by default, and three figures of each."""
    from mantissa.bench.options import PAIRS
    from mantissa.runs.gap_page import figure_text

    newest = {r["pair"]: r for r in rows if r["benchmark"] == "gap"}
    lines = []
    for pair in PAIRS:
        mean, interval = figure_text(newest[pair], "abs_logp_diff_mean")
        others = (figure_text(newest[pair], name)[0] for name in ("seq_log_ratio_std", "phantom_clip_fraction"))
        lines.append([f"`{pair}`", f"{mean} ({interval})", *others])
    return table(("learner/rollout", "mean \\|Δ log-prob\\|", "spread over a sequence", "clipped"), lines)


def write_between(path: Path, mark: str, content: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->`` in ``path``."""
    before, opening, rest = path.read_text().partition(f"<!-- {mark} -->\n")
    _, closing, after = rest.partition(f"<!-- /{mark} -->")
    if not opening or not closing:
        raise SystemExit(f"{path} has no place marked {mark}")
    path.write_text(before + opening + content + closing + after)


COMMON = ("case", "contender", "engine", "active", "hidden", "threads")
SECTIONS: tuple[tuple[str, Callable[[Sequence[Row]], str], set[str]], ...] = (
    ("One RL step against TRL: 64 prompts of 16 tokens x 8 samples x 24 tokens, hidden 128, 4 layers",
     lambda r: rl_step(r, "small"), {"rl_step"}),
    ("One RL step of SmolLM2-135M against TRL: 4 prompts of 48 tokens x 8 samples x 24 tokens",
     lambda r: rl_step(r, "pretrained"), {"rl_step"}),
    ("Runs of the demo; the gap is the mean over the first ten steps", demo_runs, {"demo_runs"}),
    ("RL on SmolLM2-135M-Instruct, weights from a 4-bit grid: one-digit sums and differences", smollm2_runs,
     {"smollm2_runs"}),
    ("Matmul peak and memory bandwidth", lambda r: generic(r, ["peak"], ("contender", "threads")), {"peak"}),
    ("Rollout against transformers' generate", lambda r: generic(r, ["rollout_vs_generate"], COMMON),
     {"rollout_vs_generate"}),
    ("Sampling from SmolLM2-135M: transformers' time over the native engine's", decoding, {"decode_pretrained"}),
    ("A simulated training step against fp32", lambda r: generic(r, ["simulated_step"], COMMON), {"simulated_step"}),
    ("A training step with simulated fp8 products against fp32", lambda r: generic(r, ["fp8_step"], COMMON),
     {"fp8_step"}),
    ("The demo's memory; import time beyond torch's own", lambda r: generic(r, ["demo", "import"], ("contender",)),
     {"demo", "import"}),
    ("Cost as work grows: a step on one thread, 4 layers, fp32", cost, {"cost"}),
    ("Keeping freed memory", lambda r: generic(r, ["allocator"], ("contender", "requested", "threads")), {"allocator"}),
    ("Threads that wait, alone and beside busy processes (4 cores)",
     lambda r: generic(r, ["waiting"], ("busy_processes", "threads", "contender")), {"waiting"}),
    ("On a GPU", lambda r: generic(r, ["gpu_step", "gpu_demo"], (*COMMON, "device")), {"gpu_step", "gpu_demo"}),
    ("Sizes on a GPU", lambda r: generic(r, ["gpu_sizes"], ("parameters", *COMMON, "device")), {"gpu_sizes"}),
)  # fmt: skip


def main() -> None:
    rows = newest()
    text = HEAD + index()
    for title, make, names in SECTIONS:
        mine = [r for r in rows if r["benchmark"] in names]
        if mine and (content := make(rows)):
            devices = ", ".join(sorted({r["device"] for r in mine}))
            text += f"\n## {title}\n\nDevice: {devices}. torch {mine[-1]['torch']}.\n\n{content}"
    for path in (RESULTS / "README.md", ROOT / "docs" / "results.md"):  # the same page, for the checkout and the site
        path.write_text(text)
    write_between(ROOT / "README.md", "gap", short_gap(rows))
    print(RESULTS / "README.md")


if __name__ == "__main__":
    main()
