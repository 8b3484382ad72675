"""How often the doctor is right on dumps that transformers' models made, by family: a confusion matrix.

    python benchmarks/doctor_held_out.py                                 # families held out of the choice of thresholds
    python benchmarks/doctor_held_out.py --models llama:bf16,mixtral+text:fp16  # those on which they were
    python benchmarks/doctor_held_out.py --models smollm2:bf16 --prompts 16 --length 40

Every mistake of ``doctor_mistakes.py`` on each side, blind. What is asked of an answer:

- *right*: it names the mistake, alone or together with the one that log-probs cannot tell it from;
- *half*: of two mistakes it names one;
- *undecided*: it says that there is more than noise and not what, or ``too_large`` with its list of causes;
- *said*: it says healthy, and the mistake is smaller than what it says would have been seen;
- *too small*: it says healthy, and the mistake's size of u is below twice the healthy one's of this family and format;
- *wrong*: it names another mistake, or calls one healthy that it says it would have seen, or a healthy dump a fault.

"Strictly wrong" counts *said* as wrong too, as before it was said.

Expected of the sixth run, committed with the doctor that it is of and before any dump of its families was diagnosed
(``doctor_strangers.HELD_OUT``; in each family two sizes, one of them trained where it is ``+text``, fp32, fp16 and bf16
on both sides or one of them beside another; and SmolLM2, on which the usual sizes rest, so that it is reported apart):

- right, half, undecided or said >= 95% of the mistakes that are not too small, wrong <= 1%, named right >= 70% (less
  than the third run's, for mixtures and mixed formats are in it), strictly wrong <= 6%;
- healthy called healthy: dense >= 99% (of these dumps and of ``doctor_many.py``'s); mixtures that say so >= 98% in one
  format and >= 85% in two, and in no case a fault or too large; mixtures that do not say so: none a fault, <= 2% too
  large.

Intervals are over families: one model's dumps are alike. Nothing was changed after the first of its dumps. Rows go to
results/doctor_held_out.jsonl; the whole run is

    python benchmarks/doctor_many.py --run sixth --dumps 12
    python benchmarks/doctor_held_out.py --run sixth
    python benchmarks/doctor_held_out.py --run sixth --models smollm2:bf16/fp32 --prompts 16 --samples 3 --length 24

The sixth run showed that a quarter of the rows of other weights was "not known" in all of its dense families, which had
been named before. The seventh asks the mended doctor about the mistakes of classes of which only healthy dumps had been
diagnosed. Expected before it: as of the sixth, and a quarter of the rows named in nine of ten without experts.

    python benchmarks/doctor_held_out.py --run seventh --models \
        cwm+text:bf16,hyperclovax@2:fp16/fp32,diffllama:bf16,ministral@2:fp16,mellum@2:bf16,hyv3+text:bf16/fp32

    python benchmarks/doctor_partial.py         # a quarter of the sequences, by how much larger they are
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
from doctor_mistakes import Case, cases
from doctor_strangers import MIXTURES, TUNED, Family, swapped
from rows import append

from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine

RESULTS = "doctor_held_out.jsonl"
MODELS = ("phi+text:fp16", "phi@2:bf16/fp32", "minimax-m2+text:bf16", "minimax-m2@2:fp16/fp32",  # others: healthy alone
          "apertus+text:bf16", "apertus@2:fp32", "exaone-moe:bf16/fp32", "exaone-moe@2:fp16",
          "olmo3+text:fp16/fp32", "olmo3@2:bf16", "doge+text:bf16/fp32", "doge@2:fp16",
          "afmoe+text:fp16/fp32", "afmoe@2:bf16", "gpt-bigcode+text:fp32", "gpt-bigcode@2:bf16",
          "jais2:bf16", "jais2@2:fp16/fp32", "laguna:fp32", "laguna@2:bf16/fp32",
          "nanochat+text:bf16", "nanochat@2:bf16/fp32", "ministral3+text:fp16", "ministral3@2:fp32")  # fmt: skip


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


def diagnosed(
    sequences: list[Scored], temperature: float, formats: Sequence[str], experts: bool | None = None
) -> Diagnosis:
    """``formats``: of the rollout and of the learner."""
    settings = Settings(temperature, rollout_format=formats[0], learner_format=formats[1], experts=experts)
    return examine(Dump("plain", Path("blind"), sequences, settings))


def of_family(every: Sequence[Case], family: str, name: str, experts: bool | None = None) -> Iterator[dict[str, Any]]:
    """A row for each mistake and side. ``name``: the format; or the rollout's, a stroke, and the learner's."""
    healthy, (rolled, scored) = 0.0, formats_of(name)
    for case in every:
        for side, sequences, formats in (("learner", case.sequences, (rolled, scored)),
                                         ("rollout", swapped(case.sequences), (scored, rolled))):  # fmt: skip
            started = time.perf_counter()
            found = diagnosed(sequences, case.temperature, formats, experts)
            seconds = time.perf_counter() - started
            size = float(found.figures["u_rms"])
            healthy = size if case.name == "healthy" and side == "learner" else healthy
            model, family_of = family, family.split("+")[0].split("@")[0]
            yield {"family": family_of, "model": model, "held_out": family_of not in TUNED, "format": name,
                   "kind": case.name, "side": side, "experts": experts,
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


def formats_of(name: str) -> tuple[str, str]:
    rolled, _, scored = name.partition("/")
    return rolled, scored or rolled


def made(family: str, name: str, options: argparse.Namespace) -> list[Case]:
    """The family's dumps; from ``--dumps`` where they were kept there."""
    kept = None if options.dumps is None else Path(options.dumps) / f"{family}-{name.replace('/', '-')}.pkl"
    if kept is not None and kept.is_file():
        return pickle.loads(kept.read_bytes())
    size = (options.seed, options.prompts, options.samples, options.length)
    rolled, scored = formats_of(name)
    learner = None if scored == rolled else Family(family, scored, *size)
    found = list(cases(Family(family, rolled, *size), learner=learner))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default=",".join(MODELS), help="FAMILY:FORMAT or FAMILY:ROLLOUT/LEARNER, with commas between"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--dumps", help="a folder where dumps are kept between runs (pickles of this script's own)")
    parser.add_argument("--run", default="", help="a name for these rows, such as the first run on held-out families")
    parser.add_argument(
        "--experts", action="store_true", help="dumps say that they are of a mixture (held-out ones do)"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every: list[dict[str, Any]] = []
    for each in options.models.split(","):
        family, name = each.split(":")
        says = options.experts or family.split("+")[0].split("@")[0] in MIXTURES or None
        for row in of_family(made(family, name, options), family, name, says):
            append(RESULTS, [{"benchmark": "doctor_held_out", "run": options.run, "seed": options.seed} | row], "cpu")
            every.append(row)
            if row["outcome"] != "right":
                said = f"{row['side']} {row['kind']}: {row['outcome']}; {row['headline'][:140]}"
                print(f"{each} {said}", flush=True)
    for name, (value, low, high) in summary(every).items():
        print(f"{name}: {value:.1%} ({low:.1%} to {high:.1%} over families)")


if __name__ == "__main__":
    main()
