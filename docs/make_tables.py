"""Write the tables of the documentation's pages from the code and from the measured rows. Nothing is typed twice.

Run ``python docs/make_tables.py``; it fills what stands between ``<!-- name -->`` and ``<!-- /name -->`` in each page.
A test holds pages and code together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables_check
import tables_doctor
import tables_trainer
import tables_verl
from measured import Row, marks
from measured import rows as _rows
from tables import table

DOCS = Path(__file__).resolve().parent


def filled(text: str, page: str) -> str:
    """``text`` with every table of that page made anew."""
    for mark, make in TABLES[page].items():
        pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"{page} has no place marked {mark}")
        made = make()
        text = pattern.sub(lambda found, made=made: f"{found[1]}\n{made}\n\n{found[2]}", text)
    return text


# guide.md


def formats() -> str:
    """The formats that a role can have."""
    from mantissa.precision import BF16, FP16, FP32

    def power(value: float) -> str:
        return f"2^{round(math.log2(value))}"

    lines = [
        [
            f"`{f.name}`",
            str(f.mantissa_bits + 1),
            f"{f.epsilon / 2:.2g}",
            f"{f.largest:.3g}" if f.largest > 1e6 else f"{f.largest:g}",
            power(f.smallest_normal),
            power(f.smallest_subnormal),
            "yes" if f.needs_loss_scaling else "no",
        ]
        for f in (FP32, BF16, FP16)
    ]
    header = ("format", "significant bits", "largest relative rounding error", "largest value", "smallest normal",
              "smallest above 0", "loss scaling")  # fmt: skip
    return table(header, lines)


def native_bf16() -> str:
    """A CPU's own bf16 beside simulated bf16, over fp32's time; newest rows of each processor."""
    newest: dict[tuple[str, str], dict[str, Row]] = {}
    for row in _rows("native_bf16"):
        if row["requested"] == "bf16":
            place = row["case"], f"{row['device']}, threads: {row['threads']}"
            newest.setdefault(place, {})[row["kernels"]] = row
    lines = [
        [what, device, *(f"{rows[kernels]['value']:.2f}" for kernels in ("simulated", "native"))]
        for (what, device), rows in newest.items()
    ]
    return table(["of fp32's time", "measured on", "bf16 simulated", "the processor's own bf16"], lines)


def decode_formats() -> str:
    """A decode step in each format of a rollout: the newest row of each, rows and processor."""
    newest = {(row["device"], row["threads"], row["case"], row["contender"]): row for row in _rows("decode_formats")}
    lines = [
        [name, row["kernels"], what.removeprefix("decode, ").partition(" of ")[0], f"{row['milliseconds']:.1f}",
         f"{row['value']:.2f} ({row['quartile_low']:.2f} to {row['quartile_high']:.2f})",
         f"{device}, threads: {threads}"]
        for (device, threads, what, name), row in newest.items()
    ]  # fmt: skip
    return table(["rollout", "kernels", "at a time", "step (ms)", "of bf16's", "measured on"], lines)


def native_beside() -> str:
    """Sampling beside transformers, vLLM and llama.cpp: the newest row of each contender, rows and processor."""
    newest: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in _rows("native_beside"):
        place = f"{row['device']}, threads: {row['threads']}"
        newest.setdefault((place, row["case"], row["contender"]), {})[row["metric"]] = row
    lines = []
    for (place, case, contender), by in sorted(
        newest.items(), key=lambda item: (item[0][0], int(item[0][1].split()[0]))
    ):
        clock = "processor_seconds" if place.endswith("threads: 1") else "seconds"  # other work does not count
        step, prefill = (by[f"{what} {clock}"] for what in ("decode step", "prefill"))
        ratio = by[f"decode step {clock} over ours, fp32"]
        spread = f"{ratio['value']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        cells = (f"{step['value'] * 1e3:.1f}", spread, f"{prefill['value']:.2f}", f"{by['bytes']['value'] / 2**20:.0f}")
        lines.append([case.partition(",")[0], contender, *cells, place, str(step["rounds"])])
    header = (
        "at a time",
        "whose, format",
        "decode step (ms)",
        "of our fp32's",
        "prefill (s)",
        "MiB",
        "measured on",
        "rounds",
    )
    return table(header, lines)


_COSTS = {"sample seconds": ("sampling, s", 1), "train seconds": ("training, s", 1),
          "sample peak_bytes": ("sampling, MiB", 2**20), "train peak_bytes": ("training, MiB", 2**20),
          "rl rank_seconds": ("a rank's part of a step, s", 1),
          "rl rank peak_bytes": ("a rank, MiB", 2**20)}  # fmt: skip


def cost() -> str:
    """What a step costs as its work grows: the newest row of each axis and measure."""
    newest = {(row["case"], row["metric"]): row for row in _rows("cost")}
    lines = []
    for (grows, metric), row in newest.items():
        said, unit = _COSTS[metric]
        measured = (row["measured"][place] / unit for place in (0, -1))
        ends = (f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in measured)
        sizes = f"{row['sizes'][0]:,} to {row['sizes'][-1]:,}"
        lines.append([grows, sizes, said, " to ".join(ends), f"{row['value']:.2f}", f"{row['last']:.2f}"])
    return table(("what grows", "from, to", "of", "measured", "exponent", "of the two largest"), lines)


def native_limit() -> str:
    """Where decode and prefill spend their time, and their share of the limit: the newest row of each."""
    newest = {(row["threads"], row["case"], row["contender"]): row for row in _rows("native_limit")}
    lines = []
    for (threads, case, contender), row in newest.items():
        products, attention = (row["parts"][f"products {of}"] for of in ("with weights", "of attention"))
        rest = max(0.0, row["value"] - products - attention)  # the parts were seen under the profiler, in other calls
        cells = (f"{1e3 * seconds:.1f}" for seconds in (row["value"], products, attention, rest))
        share = f"{row['limit'] / row['value']:.0%} of its {row['limited_by']}"
        lines.append([case, contender, *cells, share, f"{row['device']}, threads: {threads}"])
    parts = ("products with weights", "of attention", "the rest")
    return table(["", "format", "all (ms)", *parts, "share of the limit", "measured on"], lines)


def gpu_exact() -> str:
    """Exact kernels on a GPU: log-probs equal to the bit, fast and exact, and what they cost; the newest of each."""
    found: dict[str, dict[tuple[str, str], Any]] = {}
    for row in _rows("gpu_exact"):
        found.setdefault(row["requested"], {})[row["metric"], row["kernels"]] = row
    lines = []
    for fmt, of in found.items():
        equal = [of.get(("equal_log_probs", kernels)) for kernels in ("native", "exact native")]
        cost = [of.get((f"{what}_seconds_over_fast", "exact native")) for what in ("train_step", "decode")]
        if not any((*equal, *cost)):
            continue
        cells = [f"{row['value']:.1%} of {row['compared']:,}" if row else "" for row in equal]
        cells += [f"{row['value']:.2f}" if row else "" for row in cost]
        lines.append([fmt, *cells])
    return table(["", "equal, fast", "equal, exact", "step, exact over fast", "decode, exact over fast"], lines)


def gap_formats() -> str:
    """The gap of each format on SmolLM2, against a learner in bf16 and against one in the same format; newest rows."""
    rows = {row["pair"]: row for row in _rows("gap_formats")}
    names = [pair.removeprefix("bf16/") for pair in rows if pair.startswith("bf16/")]
    lines = [["bf16", "", "", *_gap_cells(rows["bf16"])]]
    lines += [[name, *_gap_cells(rows[f"bf16/{name}"])[:2], *_gap_cells(rows[name])] for name in names]
    lines += [[pair, "", "", *_gap_cells(row)] for pair, row in rows.items() if pair.endswith("+exact")]
    return table(
        ["rollout", "learner in bf16: mean |d|", "k3", "the same format (QAT): mean |d|", "k3", "equal"], lines
    )


def gap_experts() -> str:
    """The same on a small mixture of experts: in all layers, and in its routed experts alone."""
    rows = {row["pair"]: row for row in _rows("gap_experts")}
    names = [pair.removesuffix("-experts") for pair in rows if pair.endswith("-experts") and "/" not in pair]
    lines = []
    for name in names:
        pairs = (f"bf16/{name}", f"bf16/{name}-experts", name, f"{name}-experts")
        lines.append([name, *(_gap_cells(rows[pair])[0] for pair in pairs)])
    head = ("all layers, learner in bf16", "routed experts, learner in bf16", "all layers, QAT", "routed experts, QAT")
    return table(["rollout", *head], lines)


def _gap_cells(row: Row) -> list[str]:
    mean, low, high = (row[f"abs_logp_diff_mean{end}"] for end in ("", "_low", "_high"))
    return [f"{mean:.3f} ({low:.3f} to {high:.3f})", f"{row['k3_kl']:.4f}", f"{row['equal_fraction']:.0%}"]


def _adopted(benchmark: str, gpu: bool = False) -> list[Row]:
    rows = [row for row in _rows("adopt", lost=gpu) if row["benchmark"] == benchmark]
    return [row for row in rows if row["device"].startswith("NVIDIA") == gpu]


def adopt_families() -> str:
    """Log-probs of each family that differ, adopted and by transformers' own; the newest row of each format."""
    newest = {(row["case"], row["requested"]): row for row in _adopted("adopt_families") if "requested" in row}
    formats = ("fp32", "bf16", "fp16")
    lines = []
    for name in dict.fromkeys(name for name, _ in newest):
        found = [newest[name, fmt] for fmt in formats]
        total = f"{sum(row['different'] for row in found):,} of {sum(row['compared'] for row in found):,}"
        lines.append([f"`{name}`", total, *(f"{row['value']:.0%}" for row in found)])
    return table(["family", "different, adopted", *(f"transformers' own, {fmt}" for fmt in formats)], lines)


def adopt_refused() -> str:
    """The reason that each family is refused with."""
    newest = {row["case"]: row for row in _adopted("adopt_families")}
    lines = [[f"`{name}`", row["why"]] for name, row in newest.items() if row["metric"] == "refused"]
    return table(["family", "because"], lines)


PARTS = ("forward", "step", "generate")


def adopt_cost() -> str:
    """Time of an adopted model over transformers' own; the newest row of each model, format and number of threads."""
    newest = {(row["model"], row["requested"], row["threads"], row["case"]): row for row in _adopted("adopt_cost")}
    lines = []
    for model, fmt, threads in dict.fromkeys(key[:3] for key in newest):
        cells = [_quartiles(newest[model, fmt, threads, part]) for part in PARTS]
        lines.append([model, fmt, str(threads), *cells])
    return table(["model", "format", "threads", *PARTS], lines)


def adopt_gpu() -> str:
    """The same on a GPU, by format, with what was compared there."""
    families, lines = _adopted("adopt_families", gpu=True), []
    newest = {(row["requested"], row["case"]): row for row in _adopted("adopt_cost", gpu=True)}
    for fmt in ("fp32", "bf16", "fp16"):
        found = [row for row in families if row["requested"] == fmt]
        total = f"{sum(row['different'] for row in found):,} of {sum(row['compared'] for row in found):,}"
        cost = [newest.get((fmt, part)) for part in PARTS]
        cells = [f"{_quartiles(row)}{marks([row])}" if row else "" for row in cost]
        lines.append([fmt, str(len(found) or ""), total + marks(found) if found else "", *cells])
    return table(["format", "families", "different, adopted", *PARTS], lines)


def exact_cost() -> str:
    """What exact kernels cost over fast ones, by the newest row of each format and size."""
    rows = [r for r in _rows("exact_cost") if r["metric"] == "time_over_fast"]
    newest = {(r["hidden"], r["requested"], r["case"]): r for r in rows}
    header = ("hidden size", "precision", "rollout", "learner's scoring", "update", "whole step", "rounds")
    lines = []
    for hidden, name in dict.fromkeys((hidden, name) for hidden, name, _ in sorted(newest)):
        parts = [newest[hidden, name, case] for case in ("rollout", "score", "update", "step")]
        lines.append([str(hidden), name, *map(_quartiles, parts), str(parts[-1]["rounds"])])
    return table(header, lines)


def _quartiles(row: Row) -> str:
    return f"{row['value']:.2f} ({row['quartile_low']:.2f} to {row['quartile_high']:.2f})"


_DRIFT = {
    "t3, start right, steady": "steady",
    "t3, start right, up": "gradients grow",
    "t3, start right, down": "gradients shrink",
    "t3, start low, steady": "steady, first scale too low",
}


def scales() -> str:
    """Loss-scale rules on gradients with heavy tails: skipped steps and flushed gradients, means over the seeds."""
    newest = {(r["case"], r["contender"], r["metric"]): r["value"] for r in _rows("auto_scale")}
    contenders = ("dynamic 400", "dynamic 2000", "auto")
    lines = [
        [said]
        + [f"{newest[case, c, 'skipped_steps']:.1f}, {newest[case, c, 'flushed_fraction']:.2%}" for c in contenders]
        for case, said in _DRIFT.items()
    ]
    return table(("gradients (Student's t, 3 degrees of freedom)", *contenders), lines)


def _amp(case: str) -> dict[tuple[str, str, str], dict[str, Row]]:
    """The newest rows of the comparison with torch's AMP: (contender, format, kernels) -> metric -> row."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in _rows("amp_loss"):
        if row["case"] == case:
            found.setdefault((row.get("contender", ""), row["active"], row["kernels"]), {})[row["metric"]] = row
    return found


def _spread(row: Row, digits: int) -> str:
    return f"{row['value']:.{digits}f} ({row['min']:.{digits}f} to {row['max']:.{digits}f})"


def lost() -> str:
    """What each policy loses where gradients overflow again and again."""
    lines = [
        [
            contender,
            kernels,
            _spread(by["batches_lost_per_run"], 1),
            _spread(by["steps_retried_per_run"], 1),
            _spread(by["final_loss"], 4),
        ]
        for (contender, _, kernels), by in _amp("overflow").items()
    ]
    return table(("trainer", "fp16 kernels", "batches lost a run", "steps retried a run", "final loss"), lines)


# gap.md


def gap_figures() -> str:
    """What each column of ``mantissa gap`` is."""
    from mantissa.mismatch.tables import GAP_FIGURES
    from mantissa.runs.gap_page import TITLES

    lines = [[TITLES[f.name], f"`{f.name}`", f.formula, f.unit] for f in GAP_FIGURES]
    return table(("column", "in the rows", "formula", "unit"), lines)


def measured_gap() -> str:
    """The newest row of each default pair, in the command's order: figures, and their intervals below them."""
    from mantissa.bench.options import PAIRS
    from mantissa.runs.gap_page import TITLES, figure_text

    newest = {r["pair"]: r for r in _rows("gap") if r["pair"] in PAIRS}
    names = [name for name in TITLES if name != "log_ratio_slope"]  # a thousand tokens know too little of it
    lines = []
    for pair, row in sorted(newest.items(), key=lambda each: PAIRS.index(each[0])):
        cells = [
            [text.replace("e-", "e&#8209;") for text in figure_text(row, name)] for name in names
        ]  # not broken there
        lines.append([f"`{pair}`", *(f"{value}<br>{interval}" for value, interval in cells), f"{row['tokens']:,}"])
    return table(("learner/rollout", *(TITLES[name] for name in names), "tokens"), lines)


def _newest_of(kind: str) -> dict[tuple[str, str], dict[str, Row]]:
    """By format and switches, the newest row of each ``kind`` of measurement: by our engine, or on vLLM."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in _rows("emulated", lost=True):
        on = "vllm" if "explained" in row or row["engine"].startswith("vLLM") else "own"
        if on == kind:
            found.setdefault((row["requested"], row["head"]), {})[row["switches"]] = row
    return found


def switches() -> str:
    """How far each switch alone takes a log-prob from the learner's, and how much of vLLM's difference it explains."""
    own, vllm = ({fmt: rows for (fmt, _), rows in _newest_of(kind).items()} for kind in ("own", "vllm"))
    lines = []
    for name in own["bf16"]:
        said = "sampled with all on" if name == "emulated" else f"`{name}`"
        sizes = [f"{own[fmt][name]['abs_logp_diff_mean']:#.2g}{marks([own[fmt][name]])}" for fmt in ("bf16", "fp16")]
        on_vllm = [vllm[fmt].get(name, {}) for fmt in ("bf16", "fp16")]
        shares = [f"{row[key]:.0%}{marks([row])}" if key in row else "" for key in ("explained", "projected")
                  for row in on_vllm]  # fmt: skip
        lines.append([said, *sizes, *shares])
    itself = [next(row for row in vllm[fmt].values() if row["metric"] == "gap") for fmt in ("bf16", "fp16")]
    sizes = [f"{row['abs_logp_diff_mean']:#.2g}{marks([row])}" for row in itself]
    lines.append(["vLLM itself", *sizes, "", "", "", ""])
    header = ("switch", "mean \\|Δ\\|, bf16", "fp16", "of vLLM's explained, bf16", "fp16", "projected, bf16", "fp16")
    return table([each.replace("\\|", "|") for each in header], lines)


# figures.md, guide.md


def _share(value: float, low: float, high: float) -> str:
    return f"{value:.0%}<br>{low:.0%}..{high:.0%}"


def causes(metric: str) -> str:
    """The newest row of each cause, or of each hypothesis on its own, by format and largest share first."""
    newest = {(r["pair"], r["name"]): r for r in _rows("substitution") if r["metric"] == metric}
    rows = sorted(newest.values(), key=lambda r: (r["pair"], r["name"] == "unexplained", -r["share"]))
    if metric == "cause":
        lines = [[r["pair"], r["name"], _share(r["share"], r["low"], r["high"]), r["note"]] for r in rows]
        return table(("format", "cause", "share of the squared gap", "note"), lines)

    def shown(pair: str, name: str) -> str:
        r = newest.get((pair, name))
        return "" if r is None else f"{r['share']:.1%}<br>{r['share_low']:.1%}..{r['share_high']:.1%}"

    names = list(dict.fromkeys(r["name"] for r in rows))[:6]
    pairs = sorted({r["pair"] for r in rows})
    return table(("hypothesis", *pairs), [[name, *(shown(pair, name) for pair in pairs)] for name in names])


def tuned() -> str:
    """The newest row of each set, by base and budget."""
    newest = {(r["base"], r["budget"], r["set"]): r for r in _rows("tune", lost=True) if "set" in r and "note" not in r}
    lines = []
    for (base, budget, name), r in newest.items():
        measured = f"{r['measured']:.4f}<br>{r['measured_low']:.4f}..{r['measured_high']:.4f}" if r["measured"] else "0"
        share = [f"{r[key]:.0%}" for key in ("fp8_share", "bytes_saved")]
        within = "yes" if r["within"] else "no"
        lines.append([f"{base}, {budget:g}{marks([r])}", name, *share, f"{r['chosen_on']:.4f}", measured, within])
    header = ("half, budget", "set", "in fp8", "bytes less", "on the half that chose", "on the other half", "within")
    return table(header, lines)


# findings.md


def origins() -> str:
    """What is known of the code behind each finding's figures."""
    from make_figures import origins as found

    header = ("finding", "figures", "rows", "with a hash of the source", "marked as with edits",
              "commit not in history †", "figures of two commits ‡")  # fmt: skip
    return table(header, found())


# evolution.md: under load


def soak_sizes() -> str:
    """The newest load, by size of job."""
    newest = {row["case"]: row for row in _rows("soak") if row["case"] != "load"}
    lines = [
        [
            f"`{name}`",
            *(f"{row[f'{part}_s']:#.2g} s".replace(". s", " s") for part in ("latency", "evolve", "store", "train")),
            f"{row['speed_up']:.2f} ({row['speed_up_low']:.2f} to {row['speed_up_high']:.2f})",
            f"{row['loss_over_fp32_max']:.2%}",
        ]
        for name, row in newest.items()
    ]
    header = ("size", "a job, median", "evolve", "store", "train", "fp16's speed, fp32 is 1", "loss within fp32's")
    return table(header, lines)


# waltz.md

_WALTZ = {
    "start": "after the warm start",
    "fp16-decay": "the recipe: fp16, rate falling to 0",
    "bf16-decay": "the same in bf16",
    "fp32-decay": "the same in fp32",
    "joint": "constant rate, fp32",
    "fp16": "constant rate, fp16",
    "bf16": "constant rate, bf16 (two seeds)",
    "frozen": "constant rate, fp32, feedback policy frozen throughout",
    "ungated": "constant rate, fp32, improvement counts without right labels",
}


def waltz() -> str:
    """What two policies have learned in each form, seed by seed."""
    newest = {(row["form"], row["seed"]): row for row in _rows("waltz", lost=True)}
    lines = []
    for form, said in _WALTZ.items():
        mine = [row for (of, _), row in sorted(newest.items()) if of == form]
        rates = [[row["rates"][name] for row in mine] for name in ("attack_success", "over_refusal", "label_accuracy")]
        greedy = [row["greedy_right"] for row in mine]
        marked = [[f"{value:.2f}{marks([row])}" for value, row in zip(values, mine, strict=True)]
                  for values in (*rates, greedy)]  # fmt: skip
        lines.append([said, *map(", ".join, marked)])
    return table(("form", "attack success", "over-refusal", "labels right", "right by greedy policies"), lines)


# usage.md

# The page that explains a command; those without one are explained by --help and this page.
COMMAND_PAGES = {
    "recipes": "recipes.md", "train": "recipes.md", "lab": "lab.md", "bench": "guide.md", "gap": "gap.md",
    "doctor": "doctor.md", "metrics": "metrics.md", "precision": "guide.md", "tune": "guide.md",
    "guard": "production.md", "fitness": "guide.md", "weights": "proof.md", "certify": "proof.md", "tokens": "proof.md",
    "launch": "cluster.md", "check": "check.md", "check-verl": "cluster.md", "serve": "vllm.md",
    "evolve": "evolution.md",
    "worldmodel": "evolution.md", "sample": "models.md", "demo": "rl.md", "replay": "exactness.md",
}  # fmt: skip


def commands() -> str:
    """Every command, in the groups of ``--help`` and ``mantissa more``, with its first line of help and its page."""
    from mantissa.cli import GROUPS, MORE

    lines = []
    for group, said in (GROUPS | MORE).items():
        for i, (name, line) in enumerate(said.items()):
            page = COMMAND_PAGES.get(name)
            linked = f"[`mantissa {name}`]({page})" if page else f"`mantissa {name}`"
            lines.append(["" if i else group, linked, line])
    return table(("to", "command", "what it does"), lines)


# proof.md


def statements() -> str:
    """The fields of a certificate that a check does not compute again."""
    from mantissa.bench.certificate import STATEMENTS

    return table(("field", "it says"), [[f"`{name}`", said] for name, said in STATEMENTS.items()])


def borders() -> str:
    """What lies where tokens part."""
    from mantissa.model.turns import MEANINGS

    return table(("border", "what happens there"), [[str(border), said] for border, said in MEANINGS.items()])


# evolution.md


def _genesis(benchmark: str) -> list[Row]:
    return [row for row in _rows("genesis") if row["benchmark"] == benchmark]


def predicted() -> str:
    """How well the world model predicts, by seed and format: the newest row of each."""
    newest = {(row["seed"], row["requested"]): row for row in _genesis("worldmodel")}
    lines = [
        [str(seed), f"`{name}`", f"{r['auroc']:.3f}", f"{r['counting_auroc']:.3f}",
         f"{r['gain']:+.3f} ({r['gain_low']:.3f} to {r['gain_high']:.3f})", f"{r['brier']:.3f}", f"{r['ece']:.3f}",
         f"{r['overflow_rate']:.1%}"]
        for (seed, name), r in sorted(newest.items())
    ]  # fmt: skip
    return table(("seed", "format", "AUROC", "by counting", "gain (95%)", "Brier", "ECE", "overflow"), lines)


def profiles() -> str:
    """fp16 beside fp32 in each profile: the newest row of each."""
    newest = {row["profile"]: row for row in _genesis("evolution_profile")}
    lines = [
        [name, f"{r['solved']} of {r['tasks']}", f"{r['held_out']:.2f}", str(r["trajectories"]),
         f"{r['fp16_loss'] / r['fp32_loss']:.4f}", f"{r['overflow']:.1%}", f"{r['time_over_fp32']:.2f}"]
        for name, r in newest.items()
    ]  # fmt: skip
    header = ("profile", "tasks solved", "held-out tests", "trajectories", "fp16/fp32 loss", "overflow",
              "fp16/fp32 time")  # fmt: skip
    return table(header, lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    **tables_check.TABLES,
    **tables_doctor.TABLES,
    **tables_trainer.TABLES,
    **tables_verl.TABLES,
    "guide.md": {"formats": formats, "scales": scales, "lost": lost, "tuned": tuned},
    "exactness.md": {
        "exact_cost": exact_cost,
        "gpu_exact": gpu_exact,
        "adopt_cost": adopt_cost,
        "adopt_gpu": adopt_gpu,
    },
    "gap.md": {"figures": gap_figures, "measured": measured_gap, "switches": switches},
    "proof.md": {"statements": statements, "borders": borders},
    "precision.md": {"gap_formats": gap_formats, "gap_experts": gap_experts},
    "figures.md": {
        "native_bf16": native_bf16,
        "decode_formats": decode_formats,
        "native_beside": native_beside,
        "native_limit": native_limit,
        "cost": cost,
        "adopt_families": adopt_families,
        "adopt_refused": adopt_refused,
        "causes": lambda: causes("cause"),
        "alone": lambda: causes("alone"),
        "soak": soak_sizes,
        "waltz": waltz,
    },
    "findings.md": {"origins": origins},
    "usage.md": {"commands": commands},
    "evolution.md": {"profiles": profiles, "predicted": predicted},
}


def main() -> None:
    for page in TABLES:
        path = DOCS / page
        path.write_text(filled(path.read_text(), page))
    (DOCS / "alerts.yml").write_text(tables_trainer.alert_rules())


if __name__ == "__main__":
    main()
