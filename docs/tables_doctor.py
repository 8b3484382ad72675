"""The tables of the page about the doctor: from its signatures and facts, and from the rows of its runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from make_figures import held_out
from measured import Row
from measured import rows as _rows
from tables import table


def doctor_signatures() -> str:
    """The signatures' names and meanings, in their order."""
    from mantissa.doctor.facts import facts
    from mantissa.doctor.signatures import SIGNATURES

    faults = facts().faults
    return table(
        ["signature", "the answer", "what it means"],
        [[f"`{name}`", faults[name].title, faults[name].means] for name in SIGNATURES],
    )


def doctor_usual() -> str:
    """The healthy size of each format."""
    from mantissa.mismatch.usual import USUAL

    rows = [[name, f"{u.size:g}", f"{u.bound:g}", u.source] for name, u in USUAL.items()]
    return table(["format", "size of u", "too large beyond", "source"], rows)


def asked() -> list[Row]:
    """The sixth run's rows, one a diagnosis; healthy dumps of ``doctor_many`` as the others. Where a mixture was asked
    twice, the dump that says so."""
    many: list[Row] = held_out("doctor_many")
    mixtures = {row["family"] for row in many if row["experts"]}
    once = [row for row in many if row["experts"] or row["family"] not in mixtures]
    told = {"healthy noise": "right", "not known": "undecided"}
    return [*held_out(), *(row | {"right": [], "outcome": told.get(row["verdict"], "wrong")} for row in once)]


def _of_smollm2() -> list[Row]:
    return [row for row in _rows("doctor_held_out") if row["run"] == "sixth" and row["family"] == "smollm2"]


def _outcomes(rows: Sequence[Row]) -> list[str]:
    """Counts: named right, undecided or half, said, wrong, too small; and healthy ones called so."""
    faults = [row["outcome"] for row in rows if row["right"]]
    healthy = [row["outcome"] for row in rows if not row["right"]]
    kinds = (["right"], ["half", "undecided"], ["said"], ["wrong"], ["too small"])
    return [
        *(str(sum(each in kind for each in faults)) for kind in kinds),
        f"{healthy.count('right')} of {len(healthy)}",
    ]


def shares(rows: Sequence[Row]) -> dict[str, str]:
    """Shares over the families of ``rows``, with the bootstrap's intervals over families."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from doctor_cases import summary

    return {name: f"{value:.1%} ({low:.1%}..{high:.1%})" for name, (value, low, high) in summary(rows).items()}


def doctor_summary() -> str:
    """Shares of the held-out families, and what had been expected."""
    expected = {"named right": ">= 70%", "right or undecided": ">= 95%", "wrong": "<= 1%", "strictly wrong": "<= 6%",
                "healthy called healthy": ">= 99% dense"}  # fmt: skip
    rows = asked()
    parts = [rows, *([row for row in rows if bool(row["experts"]) is experts] for experts in (False, True))]
    found = [shares(part) for part in parts]
    lines = [[name, *(part[name] for part in found), expected[name]] for name in expected]
    return table(["", "all", "dense", "mixtures that say so", "expected"], lines)


def doctor_families() -> str:
    """By held-out family: what became of the mistakes and of the healthy dumps."""
    rows, lines = asked(), []
    mixtures = {row["family"] for row in rows if row["experts"]}
    families = sorted({row["family"] for row in rows}, key=lambda family: (family in mixtures, family))
    for family, own in [*((f, [row for row in rows if row["family"] == f]) for f in families),
                        ("smollm2", _of_smollm2())]:  # fmt: skip
        *faults, healthy = _outcomes(own)
        cells = faults if any(row["right"] for row in own) else [""] * 5
        lines.append([f"`{family}`{', experts' if family in mixtures else ''}", *cells, healthy])
    names = ["family", "right", "undecided, or half", "said", "wrong", "too small", "healthy called so"]
    return table(names, lines)


def doctor_held_out() -> str:
    """Of the held-out dense families: kinds that were once called wrong or not right in two of three, and what they
    were called."""
    rows, lines = [row for row in asked() if not row["experts"] and "kind" in row], []
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    odd = []
    for kind in kinds:
        of = [row["outcome"] for row in rows if row["kind"] == kind]
        if "wrong" in of or of.count("right") < 2 / 3 * len(of):
            odd.append(kind)
    for kind in odd:
        own, called = [row for row in rows if row["kind"] == kind], dict[str, int]()
        for row in own:
            healthy, fault = row["verdict"] == "healthy noise", row["verdict"] == "a fault"
            name = " or ".join(row["named"]) if fault else "healthy" if healthy else "not known"
            called[name] = called.get(name, 0) + 1
        told = ", ".join(f"{name} {count}" for name, count in sorted(called.items(), key=lambda item: -item[1]))
        lines.append([kind, told, str(sum(row["outcome"] == "wrong" for row in own))])
    rest = [row["outcome"] for row in rows if row["kind"] not in odd]
    others = f"the {len(kinds) - len(odd)} other kinds"
    return table(["put in", "called", "wrong"], [*lines, [others, f"right {rest.count('right')} of {len(rest)}", "0"]])


def doctor_partial() -> str:
    """How often a quarter of the sequences is found, by how much larger they are; models with experts apart."""
    cells: dict[tuple[str, int, int], dict[tuple[str, float], list[Row]]] = {}
    for row in _held_out_power():
        if abs(row["times"] / row["asked"] - 1) > 0.25:
            continue  # this model could not be made so much noisier and no more
        kind = "with experts" if "moe" in row["family"] else "without"
        of = cells.setdefault((kind, row["sequences"], row["tokens"]), {})
        of.setdefault((row["kind"], row["asked"]), []).append(row)
    asked = [("", 1.0), ("noisier", 1.5), ("noisier", 2.0), ("adapter", 2.0), ("noisier", 3.0)]
    lines = []
    for (experts, sequences, tokens), own in sorted(cells.items(), reverse=True):
        line = [experts, f"{sequences} x {tokens}"]
        for key in asked:
            found = own.get(key, [])
            line.append(f"{sum(r['found'] for r in found)} of {sum(r['trials'] for r in found)}" if found else "")
        lines.append(line)
    names = ["experts", "sequences x tokens", "not larger", "about 1.5x", "about 2x", "2x, an adapter", "about 3x"]
    return table(names, lines)


def _held_out_power() -> list[Row]:
    """The third run's first row of each model, size and factor."""
    keys, rows = ("model", "format", "kind", "asked", "sequences", "tokens"), dict[tuple[Any, ...], Row]()
    for row in _rows("doctor_held_out"):
        if row["benchmark"] == "doctor_power" and row["run"] == "third":
            rows.setdefault(tuple(row[key] for key in keys), row)
    return list(rows.values())


def doctor_healthy() -> str:
    """Healthy gaps by other programs, their learner in each format: how many dumps and halves were called healthy."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in _rows("doctor_healthy"):
        rows[tuple(row[name] for name in ("program", "model", "format", "learner", "seed"))] = row
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows.values():
        groups.setdefault((f"{row['program']} {row['version']}".strip(), row["format"]), []).append(row)
    lines = []
    for (program, name), each in sorted(groups.items()):
        sizes = [row["u_rms"] for row in each]
        learners = ", ".join(dict.fromkeys(row["learner"] for row in each))
        whole = [row["verdict"] for row in each]
        halves, right, open_ = (sum(row[key] for row in each) for key in ("trials", "right", "undecided"))
        lines.append([program, ", ".join(sorted({row["model"] for row in each})), name, learners,
                      f"{min(sizes):.2g} to {max(sizes):.2g}", f"{whole.count('healthy noise')} of {len(whole)}",
                      f"{right} of {halves}", f"{open_}", f"{halves - right - open_}"])  # fmt: skip
    return table(["program", "model", "rollout", "learner", "size of u", "dumps healthy", "halves healthy",
                  "halves not known", "halves wrong"], lines)  # fmt: skip


def _said(row: Row) -> str:
    beside = ", ".join(f"`{each}`" for each in row.get("beside", ()))
    return f"`{row['fault']}`" if row["fault"] else f"no fault{f'; beside it {beside}' if beside else ''}"


def doctor_jobs() -> str:
    """What was expected of each real job's log, and what each look said."""
    looks = {look: list[Row]() for look in ("first", "mended", "other seeds")}
    for row in _rows("doctor_jobs"):
        looks[row["look"]].append(row)
    after, fresh = ({row["job"]: row for row in looks[look]} for look in ("mended", "other seeds"))
    healthy = [row for row in looks["first"] if row["healthy"]]
    counts = [f"{sum(not each['fault'] for each in rows)} of {len(rows)}"
              for rows in (healthy, *([each[row["job"]] for row in healthy] for each in (after, fresh)))]  # fmt: skip
    lines = [
        [
            f"{len(healthy)} healthy",
            "no fault",
            f"none in {counts[0]}",
            "yes",
            *(f"none in {each}" for each in counts[1:]),
        ]
    ]
    for row in looks["first"]:
        if not row["healthy"]:
            expected = " or ".join(f"`{each}`" for each in row["expected"]) or "no fault"
            said, *then = (_said(each) for each in (row, after[row["job"]], fresh[row["job"]]))
            lines.append([row["job"], expected, said, "yes" if row["held"] else "**no**", *then])
    return table(["job", "expected", "said first", "held", "said when mended", "of other seeds"], lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "doctor.md": {
        "doctor_usual": doctor_usual,
        "doctor_summary": doctor_summary,
    },
    "doctor-figures.md": {
        "doctor_signatures": doctor_signatures,
        "doctor_families": doctor_families,
        "doctor_held_out": doctor_held_out,
        "doctor_partial": doctor_partial,
        "doctor_healthy": doctor_healthy,
        "doctor_jobs": doctor_jobs,
    },
}
