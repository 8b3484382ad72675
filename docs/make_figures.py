"""Fill the figures that stand in sentences of the README and of the pages, from the measured rows; find the others.

A figure stands between ``<!--=QUERY-->`` and ``<!--/-->``. A query is a name of ``FIGURES`` or what ``measured.py``
describes. Run ``python docs/make_figures.py`` after new rows; a test holds pages and rows together.

A number that looks measured and is not (a setting, a definition, what somebody else published) stands in backquotes or
between ``<!--given: BY WHAT-->`` and ``<!--/-->``. ``bare`` finds what is neither, and a test refuses it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

from measured import TWO, answer, field, is_lost, marks, over_seeds, rows, select, shown, used_by

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PLACE = re.compile(r"(<!--=(.+?)-->)(.*?)(<!--/-->)", re.S)
_PARTS = {6: "a sixth", 7: "a seventh", 8: "an eighth", 9: "a ninth"}


def _newest(pair: str, name: str) -> float:
    return float(field(select("gap", {"pair": pair})[-1], name))


def _ratio_by_length(kind: str) -> Callable[[], str]:
    """bf16's mean |d| over fp16's at 16, 64 and 256 tokens, means over seeds of the ratio within each."""

    def text() -> str:
        ratios = []
        for length in (16, 64, 256):
            fine, coarse = (
                over_seeds("lab/gap", {"cell": f"{fmt}{kind}+max_tokens={length}"}, "final.abs_logp_diff_mean")
                for fmt in ("fp16", "bf16")
            )
            ratios.append(sum(coarse[seed] / fine[seed] for seed in fine) / len(fine))
        return ", ".join(shown(ratio, ".1f") for ratio in ratios)

    return text


def _over_vllm(length: int, figure: str = "abs_logp_diff_mean") -> str:
    """How far a figure of the gap is above vLLM's with the emulated habits, in bf16: the mean |d| if none is named."""
    name = f"final.{figure}"
    ours, theirs = (
        over_seeds("lab/gap", {"cell": f"bf16-{kind}+max_tokens={length}"}, name) for kind in ("serving", "vllm")
    )
    return shown(sum(ours.values()) / sum(theirs.values()) - 1, ".0%")


def _begins() -> str:
    """The spread of the sequence log-ratio over the first steps of the runs with a rollout of 2 bits at 1e-3."""
    first = [
        row["curves"]["gap/seq_log_ratio_std"]["value"][0]
        for lab in ("rate", "advantage", "habits")
        for row in select(f"lab/{lab}", {})
        if "e8m2" in row["cell"] and "exact" not in row["cell"] and not row["cell"].endswith("lr=0.0003")
    ]
    return f"{min(first):.1f} to {max(first):.1f}"


# Of each lab, the cells that are siblings: an fp32 learner beside a rollout of 2 bits with nothing done about the gap,
# at a rate of 3e-4 or 1e-3. advantage's plain dr_grpo is rate's run again and is not counted twice.
_GAP_ALONE = {
    "rate": r"e8m2\+lr=.*",
    "advantage": r"(?!advantage=dr_grpo\+e8m2$).*\+e8m2(-serving)?",
    "habits": r"e8m2-.*",
}
_GAP_MENDED = {"rate": r"(e8m2-tis|exact-e8m2)\+lr=.*"}
_BROKEN = 0.5  # of what was learned: runs end below 0.48 or above 0.84


def _broken(cells: dict[str, str], interval: bool = True) -> str:
    """How many of these runs learned less than half, of how many, with Wilson's interval of the share."""
    from mantissa.runs.groups import wilson

    found = [
        row["accuracy_fp32"]
        for lab, pattern in cells.items()
        for row in select("final_policy", {"lab": lab})
        if re.fullmatch(pattern, row["cell"])
    ]
    count, n = sum(value < _BROKEN for value in found), len(found)
    low, high = wilson(count / n, n)
    return f"{count} of {n}" + (f" ({low:.0%} to {high:.0%})" if interval else "")


def _kernels_alone() -> str:
    """The most that another kernel alone moved a run of the lab clipping: the same cell and seed before and after."""
    after, before = (
        over_seeds(file, {"cell": "bf16"}, "final.mean length/mean") for file in ("lab/clipping", "clipping_replaced")
    )
    return shown(max(abs(after[seed] - value) for seed, value in before.items()), ".2f")


_DIFFERENCE = re.compile(r"(?:paired|bounds) .*|brake-.*")


def _differences() -> list[str]:
    """The intervals of differences that the page of findings shows, each once."""
    page = (ROOT / "docs" / "findings.md").read_text()
    return [query for query in dict.fromkeys(found[2] for found in _PLACE.finditer(page)) if _DIFFERENCE.match(query)]


def origins() -> list[list[str]]:
    """Of each finding: how many figures in sentences, of how many rows, and what is known of the code behind them."""
    page = (ROOT / "docs" / "findings.md").read_text()
    begins = [*re.finditer(r"^## (\d+)\. ", page, re.M)]
    lines = []
    for begin, after in zip(begins, [*(found.start() for found in begins[1:]), len(page)], strict=True):
        in_table = re.search(rf"^\| \[{begin[1]}\]\(.*$", page, re.M)
        text = page[begin.start() : after] + (in_table[0] if in_table else "")
        queries = list(dict.fromkeys(found[2] for found in _PLACE.finditer(text)))
        made = [used_by(lambda query=query: figure(query)) for query in queries]
        used = {id(row): row for _, rows_of in made for row in rows_of}
        rows_used = used.values()
        edited = sum("-" in (row.get("commit") or "") for row in rows_used)
        hashed = sum(row.get("source") is not None for row in rows_used)
        lost, two = sum(map(is_lost, rows_used)), sum(text.endswith(TWO) for text, _ in made)
        lines.append([begin[1], *(str(n) for n in (len(queries), len(used), hashed, edited, lost, two))])
    return lines


def _brake(labs: tuple[str, ...]) -> Callable[[], str]:
    """bf16/bf16's mean length less that of the same bf16 with exact kernels, over the seeds of several labs."""

    def text() -> str:
        from mantissa.runs.groups import over_seeds as interval

        off = []
        for lab in labs:
            ours, theirs = (
                over_seeds(f"lab/{lab}", {"cell": cell}, "final.mean length/mean") for cell in ("bf16", "exact-bf16")
            )
            off += [value - theirs[seed] for seed, value in ours.items()]
        found = interval(off)
        return f"{found.value:+.2f} ({found.low:+.2f}..{found.high:+.2f})"

    return text


def _habits(fmt: str) -> str:
    """Least and largest mean |d| that one habit inside the layers makes."""
    names = "norm|rope|products|attention|activation"
    where = {"requested": fmt, "switches": names, "metric": "switch", "engine": "emulated"}
    sizes = [row["abs_logp_diff_mean"] for row in select("emulated", where)]
    return f"{shown(min(sizes), '#.2g')} to {shown(max(sizes), '#.2g')}"


def held_out(benchmark: str = "doctor_held_out") -> list[dict[str, object]]:
    """The sixth held-out run's rows. SmolLM2 is in none of them: the usual sizes are its own."""
    run = {"run": "sixth", "benchmark": benchmark}
    return [row for row in select("doctor_held_out", run) if row["held_out"] and row["family"] != "smollm2"]


def _told(name: str) -> str:
    """A share of the held-out run, as the doctor's page has it."""
    held_out()  # noted as what it is made of, for the shares are kept
    return _shares()[name]


@functools.cache
def _shares() -> dict[str, str]:
    from tables_doctor import asked, shares

    return shares(asked())


def _within_seeds(lab: str, control: str) -> str:
    """The largest distance of any fp32, fp16 or bf16 pair from the control, in any seed, of what was learned."""
    learned: dict[str, dict[int, float]] = {}
    for row in select("final_policy", {"lab": lab}):
        if "e8m2" not in row["cell"]:
            learned.setdefault(row["cell"], {})[row["seed"]] = row["accuracy_fp32"]
    base = learned[control]
    return shown(max(abs(value - base[seed]) for cell in learned.values() for seed, value in cell.items()), ".3f")


def _kept() -> str:
    """The gap's newest rows: how many log-probs of ``exact`` are equal, of how many."""
    row = select("gap", {"pair": "exact"})[-1]
    return f"{row['tokens'] - row['differing']:,} of {row['tokens']:,}"


def _cut(cell: str) -> str:
    """Of all tokens that a run trained on, those that the clip cut for the gap alone: least and largest over seeds."""
    shares = {}
    for row in select("lab/clipping", {"cell": cell}):
        cut, lengths = (row["curves"][name]["value"] for name in ("policy/phantom_clip_fraction", "length/mean"))
        shares[row["seed"]] = sum(c * n for c, n in zip(cut, lengths, strict=True)) / sum(lengths)
    return f"{shown(min(shares.values()), '.1%')} to {shown(max(shares.values()), '.1%')}"


def healthy(experts: bool, says: bool = True, formats: int | None = None) -> list[str]:
    """Verdicts on the held-out dumps without a fault: of mixtures of ``experts``, which say so or do not, or of others;
    of the two sides in so many ``formats``."""
    every = [*(row for row in held_out() if not row["right"]), *held_out("doctor_many")]
    mixtures = {row["family"] for row in every if row["experts"]}
    own = [
        row for row in every if (row["family"] in mixtures) == experts and bool(row["experts"]) == (experts and says)
    ]
    return [str(row["verdict"]) for row in own if formats in (None, _formats(row))]


def _again(outcome: str, **where: str) -> str:
    """Of the seventh run's mistakes large enough to be seen, how many have this outcome."""
    asked = select("doctor_held_out", {"run": "seventh", "benchmark": "doctor_held_out"} | where)
    told = [row["outcome"] for row in asked if row["right"] and row["outcome"] != "too small"]
    return f"{told.count(outcome)} of {len(told)}"


def _formats(row: Any) -> int:
    return len(set(row["formats"] if "formats" in row else row["format"].split("/")))


def _healthy(*what: Any) -> str:
    given = healthy(*what)
    return f"{given.count('healthy noise')} of {len(given)}"


def _grows(fmt: str) -> str:
    """The power of length that the spread of the sequence log-ratio grows like from 16 to 256 tokens, over seeds."""
    from mantissa.runs.groups import over_seeds as interval

    short, long = (
        over_seeds("lab/gap", {"cell": f"{fmt}+max_tokens={n}"}, "final.seq_log_ratio_std") for n in (16, 256)
    )
    found = interval([math.log(long[seed] / short[seed]) / math.log(16) for seed in short])
    return f"{found.value:.2f} ({found.low:.2f}..{found.high:.2f})"


def _minus_kl(pair: str) -> str:
    """-1,000 times k3 at 256 tokens, the mean over seeds: the slope of the sequence log-ratio if nothing drifts."""
    found = over_seeds("lab/gap", {"cell": f"{pair}+max_tokens=256"}, "final.k3_kl").values()
    return shown(-1000 * sum(found) / len(found), ".0f")


def _bits(coarse: str, fine: str) -> str:
    """By how much the gap grows with each mantissa bit that a rollout loses, at 256 tokens, over seeds."""
    from mantissa.runs.groups import over_seeds as interval

    name, end = "final.abs_logp_diff_mean", "+max_tokens=256"
    low, high = (over_seeds("lab/gap", {"cell": f"fp32-{one}{end}"}, name) for one in (fine, coarse))
    found = interval([math.sqrt(high[seed] / low[seed]) for seed in low])
    return f"{found.value:.2f} ({found.low:.2f}..{found.high:.2f})"


def _waltz_power() -> str:
    """The difference that five paired seeds see four times in five, at the spread of fp16's less bf16's attack success:
    (t of the test at 5% + t of 80%) s / sqrt(n), Student's with n - 1 degrees of freedom."""
    both = {"form": "fp16-decay|bf16-decay"}
    ours, theirs = (
        over_seeds("waltz", {"form": f"{fmt}-decay"}, "rates.attack_success", lost=True) for fmt in ("fp16", "bf16")
    )
    off = [value - theirs[seed] for seed, value in ours.items()]
    assert len(off) == 5
    mark = marks(select("waltz", both, lost=True))
    return shown((2.776 + 0.941) * stdev(off) / math.sqrt(5), ".2f") + mark


def _exact_logprobs() -> str:
    """What ``benchmarks/exact_logprobs.py`` has compared, all rows together."""
    compared, different = (sum(row[key] for row in rows("exact_logprobs")) for key in ("compared", "different"))
    formats = ", ".join(dict.fromkeys(row["requested"] for row in rows("exact_logprobs")))
    return f"{compared:,} log-probs of SmolLM2-135M ({formats}; 1 and 2 threads; AVX2, AVX-512), {different} different"


def _verl(kind: str) -> dict[str, Any]:
    """The newest row of one kind of verl's jobs."""
    return select("verl", {"kind": kind})[-1]


def _verl_run() -> str:
    curves = _verl("run")["curves"]
    return f"{sum(curves['unlike']):.0f} of {sum(curves['compared']):,.0f}"


def _verl_gate() -> tuple[str, str]:
    """Of the newest job of each fault: faults that the first look after them saw; healthy steps with an alarm."""
    newest = {(row["fault"], row["look"], row.get("seed", 0)): row for row in select("verl_gate", {})}
    first, healthy = [], []
    for (_, look, _), row in newest.items():
        if look == "both":
            for name, seen in row["seen"].items():
                if name == "healthy":
                    healthy.append((seen["weights"] + seen["logprobs"], seen["looks"]))
                else:
                    first.append((seen["weights"], seen["looks"]))
        elif row["injected"] is not None:  # a step's batch is looked at before its sync
            first.append((int(row["seen"] == row["injected"] + (row["by"] == "logprobs")), 1))
    seen_of, alarms_of = ([sum(column) for column in zip(*pairs, strict=True)] for pairs in (first, healthy))
    return " of ".join(map(str, seen_of)), " of ".join(map(str, alarms_of))


def _native_step() -> str:
    """A training step on a CPU's own bf16, of fp32's time: least and largest of the newest row of each size."""
    newest = {
        (row["case"], row["device"]): row["value"]
        for row in select("native_bf16", {"requested": "bf16", "kernels": "native"})
        if row["case"].startswith("training step")
    }
    return f"{min(newest.values()):.2f} to {max(newest.values()):.2f}"


def _first_use(name: str) -> str:
    """Of the newest first use that has it: a download in MB, or a time."""
    value = next(row[name] for row in reversed(rows("first_use")) if name in row)
    return f"{value / 1e6:.0f} MB" if name.endswith("_bytes") else _duration(value)


def _demo_too() -> str:
    """The demo's part of the sentence, where a first use was measured as far as that."""
    measured = any("demo_processor_seconds" in row for row in rows("first_use"))
    return f", and the demo takes {_first_use('demo_processor_seconds')}" if measured else ""


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


FIGURES: dict[str, Callable[[], str]] = {
    "waltz-power": _waltz_power,
    "exact_logprobs": _exact_logprobs,
    "verl-run-unlike": _verl_run,
    "verl-gate-first": lambda: _verl_gate()[0],
    "verl-gate-alarms": lambda: _verl_gate()[1],
    "verl-vllm-verdict": lambda: " and ".join(dict.fromkeys(_verl("vllm-mantissa-bf16")["verdicts"])),
    "verl-vllm-size": lambda: f"{_verl('vllm-mantissa-bf16')['size_of_u']:.1g}",
    "native-step": _native_step,
    "package-download": lambda: _first_use("package_bytes"),
    "model-download": lambda: _first_use("model_bytes"),
    "install-time": lambda: _first_use("install_processor_seconds"),
    "demo-too": _demo_too,
    "fp16-of-bf16": lambda: _PARTS[
        round(_newest("bf16+serving", "abs_logp_diff_mean") / _newest("fp16+serving", "abs_logp_diff_mean"))
    ],
    "exact-equal": _kept,
    "gap-tokens": lambda: shown(sum({row["pair"]: row["tokens"] for row in rows("gap")}.values()), ",d"),
    "bf16-over-fp16-vllm": _ratio_by_length("-vllm"),
    "bf16-over-fp16-serving": _ratio_by_length("-serving"),
    "bf16-over-fp16-plain": _ratio_by_length(""),
    "over-vllm-64": lambda: _over_vllm(64),
    "over-vllm-256": lambda: _over_vllm(256),
    "over-vllm-256-k3": lambda: _over_vllm(256, "k3_kl"),
    "begins-2-bits": _begins,
    "brake-first": _brake(("clipping", "pace")),
    "brake-second": _brake(("pace2",)),
    "brake-all": _brake(("clipping", "pace", "pace2")),
    "habits-bf16": lambda: _habits("bf16"),
    "habits-fp16": lambda: _habits("fp16"),
    "doctor-named": lambda: _told("named right"),
    "doctor-again-wrong": lambda: _again("wrong"),
    "doctor-again-part": lambda: _again("right", experts="None", kind="a quarter of rows of other weights"),
    "doctor-healthy": lambda: _healthy(False),
    "doctor-healthy-one-format": lambda: _healthy(True, True, 1),
    "doctor-healthy-two-formats": lambda: _healthy(True, True, 2),
    "doctor-healthy-unsaid": lambda: _healthy(True, False),
    "broken-gap": lambda: _broken(_GAP_ALONE),
    "broken-no-gap": lambda: _broken(_GAP_MENDED),
    "kernels-alone": _kernels_alone,
    "differences": lambda: str(len(_differences())),
    "by-chance": lambda: shown(0.05 * len(_differences()), ".1f"),
    "cut-fp32-bf16": lambda: _cut("fp32-bf16"),
    "grows-fp16-vllm": lambda: _grows("fp16-vllm"),
    "grows-bf16-vllm": lambda: _grows("bf16-vllm"),
    "kl-bf16-fp8": lambda: _minus_kl("bf16-fp8"),
    "a-bit-7-to-5": lambda: _bits("e8m5", "bf16"),
    "a-bit-5-to-3": lambda: _bits("e8m3", "e8m5"),
    "doctor-wrong": lambda: _told("wrong"),
    "doctor-families": lambda: str(len({row["family"] for row in held_out()})),
    "doctor-faults": lambda: str(sum(bool(r["right"]) and r["outcome"] != "too small" for r in held_out())),
    "matrix-within": lambda: _within_seeds("matrix", "train=fp32+rollout=fp32"),
}


def figure(query: str) -> str:
    """The text of one figure."""
    return FIGURES[query]() if query in FIGURES else answer(query)


# README.md is read as it stands, so its figures have no marks: what stands between the two texts is the query's figure.
README = (
    ("fp16's is", "fp16-of-bf16", "of bf16's"),
    ("they download", "package-download", ", and"),
    (", and", "model-download", "of a real model"),
    ("SmolLM2-135M-Instruct,", "gap{pair=bf16+serving}.prompts", "prompts"),
    ("Measured on", "gap{pair=bf16+serving}.device", ", one thread"),
)


def readme(text: str, show: Callable[[str], str] | None = None) -> str:
    """README.md with every figure of ``README`` made anew, or with what ``show`` makes of its query."""
    for before, query, after in README:
        ends = (r"\s+".join(map(re.escape, each.split())) for each in (before, after))
        pattern = re.compile(r"({}\s+)([^|]+?)(\s*{})".format(*ends))
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"README.md: expected one figure between {before!r} and {after!r}")
        text = pattern.sub(lambda found, query=query: found[1] + (show or figure)(query) + found[3], text)
    return text


def figured(text: str, page: str) -> str:
    """``text`` with every figure made anew, marked or README.md's; ``SystemExit`` names a mark that nothing makes."""
    if page == "README.md":
        text = readme(text)

    def made(found: re.Match[str]) -> str:
        try:
            return found[1] + figure(found[2]) + found[4]
        except SystemExit as error:
            raise SystemExit(f"{page}: {error}") from None

    return _PLACE.sub(made, text)


# What is no sentence, in this order: code, tables and figures that rows make, given figures, other comments, links.
_NO_SENTENCE = tuple(
    re.compile(pattern, re.M | re.S)
    for pattern in (
        r"^ *```.*?^ *```$",
        r"<!-- ([\w-]+) -->.*?<!-- /\1 -->",
        r"<!--=.+?-->.*?<!--/-->",
        r"<!--given: [^>]*\w[^>]*-->.*?<!--/-->",
        r"<!--.*?-->",
        r"(?<=\n\n)(?:    [^\n]*(?:\n|\Z)|\n(?=    ))+",
        r"``[^\n]+?``|`[^`\n]+(?:\n[^`\n]+)?`",
        r"\]\([^)]*\)|<https?://[^>]*>",
        r"\b95%\s(?:Student's\s)?intervals?\b|\b[Ii]ntervals?\s(?:is|are)\s95%",
        r"\bApache-2\.0\b",
        r"(?<![\w.])v?\d+\.\d+\.\d+\w*",
        r"\barXiv[: ]\s*\d{4}\.\d{4,5}",
        r"\b(?:torch|[Pp]ython|vLLM|verl|TRL|[Tt]ransformers|Linux|oneDNN|MKL|Ray|CUDA|PyPI|kernels? before|version|"
        r"Apache|Triton|peft|numpy|Zen|Qwen|Llama) \d+(?:\.\d+)+(?:,? (?:or|and|to) \d+(?:\.\d+)+)*(?!\d|%)",
    )
)
_UNITS = r"(?:µs|us|ms|s|min|h|seconds?|minutes?|hours?|[KMGT]i?B|kB|nats|times)\b"
_FIGURE = re.compile(
    r"(?<![\w.^`])[-+]?"
    rf"(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+(?=\s?%)|\d+(?= ?{_UNITS}|x\b))"
)


def bare(text: str) -> list[str]:
    """The numbers in sentences that look measured and that no mark makes: those with a point, a comma, an exponent, a
    percent sign or a unit. Counts, years and versions are not."""
    for pattern in _NO_SENTENCE:
        text = pattern.sub(lambda found: "\n" * found[0].count("\n") or " ", text)
    return [f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]}" for found in _FIGURE.finditer(text)]


def main() -> None:
    for path in PAGES:
        path.write_text(figured(path.read_text(), path.name))


if __name__ == "__main__":
    main()
