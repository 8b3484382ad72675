"""How often the doctor is right on dumps that transformers' models made, by family: a confusion matrix.

    python benchmarks/doctor_held_out.py                                 # families held out of the choice of thresholds
    python benchmarks/doctor_held_out.py --families llama,qwen2,mixtral  # those on which they were
    python benchmarks/doctor_held_out.py --families smollm2 --prompts 16 --length 40

Every mistake of ``doctor_mistakes.py`` on each side, blind. What is asked of an answer:

- *right*: it names the mistake, alone or together with the one that log-probs cannot tell it from;
- *half*: of two mistakes it names one;
- *undecided*: it says that there is more than noise and not what, or ``too_large`` with its list of causes;
- *said*: it says healthy, and the mistake is smaller than what it says would have been seen;
- *too small*: it says healthy, and the mistake's size of u is below twice the healthy one's of this family and format;
- *wrong*: it names another mistake, or calls one healthy that it says it would have seen, or a healthy dump a fault.

"Strictly wrong" counts *said* as wrong too, as before it was said.

Expected before any dump of a held-out family was diagnosed (gemma2, phi3, olmoe, gpt-neox, starcoder2, qwen2-moe, each
trained for a minute; SmolLM2): right, half, undecided or said >= 97% of the mistakes that are not too small, wrong <=
1%, healthy called healthy >= 99%, named right >= 75%, strictly wrong <= 6%. Intervals are over families: one model's
dumps are alike. Rows go to results/doctor_held_out.jsonl.

    python benchmarks/doctor_held_out.py --partial          # a quarter of the sequences, by how much larger they are

Expected of the partial ones: found (``some_sequences``) in 95% of trials from twice the healthy size on, in at most 5%
at the healthy size.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_mistakes import Case, by_weights, cases, noisier
from doctor_strangers import HELD_OUT, TUNED, Family, dump, plain, roll, scores, swapped
from rows import append

from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine

RESULTS = "doctor_held_out.jsonl"


def names_of(found: Diagnosis) -> tuple[str, ...]:
    """What the answer names: the fault and what it cannot be told from, with a second fault as ``first+second``."""
    if found.fault is None:
        return ()
    named = (found.fault.name, *found.fault.also)
    return named if found.second is None else (*named, f"{found.fault.name}+{found.second.name}")


def outcome(case: Case, found: Diagnosis, healthy_size: float, size: float) -> str:
    """The answer's kind, as above. ``size``: of u in the dump, over every token that both sides scored."""
    stated = next((each.detectable for each in found.findings if each.name == "too_large"), None) or 0.0
    named = names_of(found)
    if not case.right:
        return "wrong" if named else {Verdict.HEALTHY: "right", Verdict.LARGE: "wrong"}.get(found.verdict, "undecided")
    if set(named) & set(case.right):
        return "right"
    if set(named) & {each for one in case.right for each in one.split("+")}:
        return "half"
    if named and found.verdict is Verdict.FAULT:
        return "wrong"
    if found.verdict is Verdict.HEALTHY:
        return "too small" if size < 2 * healthy_size else "said" if size < stated else "wrong"
    return "undecided"


def diagnosed(sequences: list[Scored], temperature: float, name: str) -> Diagnosis:
    settings = Settings(temperature, rollout_format=name, learner_format=name)
    return examine(Dump("plain", Path("blind"), sequences, settings))


def of_family(every: Sequence[Case], family: str, name: str) -> Iterator[dict[str, Any]]:
    """A row for each mistake and side."""
    healthy = 0.0
    for case in every:
        for side, sequences in (("learner", case.sequences), ("rollout", swapped(case.sequences))):
            started = time.perf_counter()
            found = diagnosed(sequences, case.temperature, name)
            seconds = time.perf_counter() - started
            size = float(found.figures["u_rms"])
            healthy = size if case.name == "healthy" and side == "learner" else healthy
            yield {"family": family, "held_out": family not in TUNED, "format": name, "kind": case.name, "side": side,
                   "right": list(case.right), "named": list(names_of(found)), "verdict": found.verdict.value,
                   "outcome": outcome(case, found, healthy, size), "u_rms": size, "sequences": len(sequences),
                   "seconds": round(seconds, 2), "headline": found.headline[:240]}  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """(share, low, high) of: mistakes named right, right or undecided, wrong, strictly wrong; healthy called so. The
    interval is the bootstrap's over families, 2.5% to 97.5%."""
    families = sorted({row["family"] for row in rows})
    draw = np.random.default_rng(0)

    def shares(given: Sequence[str]) -> Any:
        faults, healthy = np.zeros(5), np.zeros(2)
        for family in given:
            for row in (each for each in rows if each["family"] == family):
                if not row["right"]:
                    healthy += [row["outcome"] == "right", 1]
                elif row["outcome"] != "too small":
                    kind = row["outcome"]
                    decided = kind in ("right", "half", "undecided", "said")
                    faults += [kind == "right", decided, kind == "wrong", kind in ("wrong", "said"), 1]
        return np.array([*(faults[:4] / max(faults[4], 1)), healthy[0] / max(healthy[1], 1)])

    value = shares(families)
    drawn = np.stack([shares(draw.choice(families, len(families)).tolist()) for _ in range(500)])
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    names = ("named right", "right or undecided", "wrong", "strictly wrong", "healthy called healthy")
    return {name: (float(value[k]), float(low[k]), float(high[k])) for k, name in enumerate(names)}


def made(family: str, name: str, options: argparse.Namespace) -> list[Case]:
    """The family's dumps; from ``--dumps`` where they were kept there."""
    kept = None if options.dumps is None else Path(options.dumps) / f"{family}-{name}.pkl"
    if kept is not None and kept.is_file():
        return pickle.loads(kept.read_bytes())
    found = list(cases(Family(family, name, options.seed, options.prompts, options.samples, options.length)))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def partial(family: Family, trials: int) -> Iterator[dict[str, Any]]:
    """How often a quarter of the sequences is found, by the size of u in them over the healthy one.

    The quarter is scored with weights that are noisier by as much as gives that size; which sequences, is drawn anew.
    """
    rolled = roll(family)
    healthy = scores(family, rolled, {"": plain})[""]
    noise = 0.05
    base = size_of(dump(rolled, healthy))
    moved = size_of(dump(rolled, by_weights(family, rolled, noisier(noise)), healthy))
    draw = np.random.default_rng(5)
    for factor in (1.0, 1.5, 2.0, 3.0, 5.0):
        strength = noise * base * np.sqrt(factor**2 - 1) / max(moved, 1e-9)
        other = by_weights(family, rolled, noisier(strength)) if factor > 1 else healthy
        named = []
        for _ in range(trials):
            bad = draw.permutation(len(healthy)) < len(healthy) // 4
            rows = dump(rolled, [o if b else y for o, y, b in zip(other, healthy, bad, strict=True)])
            named.append(names_of(diagnosed(rows, 1.0, family.format)))
        yield {"family": family.name, "held_out": family.name not in TUNED, "format": family.format,
               "asked": factor, "times": size_of(dump(rolled, other)) / base, "trials": trials,
               "sequences": len(healthy), "found": sum("some_sequences" in each for each in named),
               "other": sum(bool(each) and "some_sequences" not in each for each in named)}  # fmt: skip


def size_of(sequences: list[Scored]) -> float:
    """Root mean square of u."""
    return float(diagnosed(sequences, 1.0, "bf16").figures["u_rms"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(HELD_OUT))
    parser.add_argument("--formats", default="bf16,fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--dumps", help="a folder where dumps are kept between runs (pickles of this script's own)")
    parser.add_argument("--run", default="", help="a name for these rows, such as the first run on held-out families")
    parser.add_argument("--partial", action="store_true", help="a quarter of the sequences, by size")
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.partial:
        for name in options.families.split(","):
            for number_format in options.formats.split(","):
                size = (options.seed, options.prompts, options.samples, options.length)
                for row in partial(Family(name, number_format, *size), options.trials):
                    append(RESULTS, [{"benchmark": "doctor_partial", "run": options.run} | row], "cpu")
                    print(f"{name} {number_format} {row['times']:.2f}: {row['found']} of {row['trials']}", flush=True)
        return
    every: list[dict[str, Any]] = []
    for family in options.families.split(","):
        for name in options.formats.split(","):
            for row in of_family(made(family, name, options), family, name):
                append(
                    RESULTS, [{"benchmark": "doctor_held_out", "run": options.run, "seed": options.seed} | row], "cpu"
                )
                every.append(row)
                if row["outcome"] != "right":
                    print(
                        f"{family} {name} {row['side']} {row['kind']}: {row['outcome']}; {row['headline'][:140]}",
                        flush=True,
                    )
    for name, (value, low, high) in summary(every).items():
        print(f"{name}: {value:.1%} ({low:.1%} to {high:.1%} over families)")


if __name__ == "__main__":
    main()
