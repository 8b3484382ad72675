"""How many of several hundred healthy dumps the doctor calls healthy, by family of models.

    python benchmarks/doctor_many.py                                     # families held out of the choice of thresholds
    python benchmarks/doctor_many.py --families llama,olmoe --dumps 10   # those on which they were chosen

A dump is of a model of its own (``doctor_strangers.py``; its weights, its prompts and how they are sampled are drawn
anew): a decode loop with a cache in one format, and whole sequences scored in the same or in another. Interval: the
bootstrap's over families. Rows go to results/doctor_held_out.jsonl.

Mixtures of experts are asked twice, with a dump that says so (``experts``) and one that does not. What is expected of
them is in ``doctor_held_out.py``.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_strangers import HELD_OUT, MIXTURES, TUNED, Family, dump, plain, roll, scores
from rows import append

from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine

RESULTS = "doctor_held_out.jsonl"
_FORMATS = (("bf16", "bf16"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"),
            ("fp32", "bf16"), ("fp16", "bf16"))  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """How a dump is made. ``formats``: of the rollout and of the learner."""

    family: str
    seed: int
    formats: tuple[str, str]
    temperature: float
    prompts: int
    samples: int
    length: int


def drawn(family: str, number: int) -> Drawn:
    """The family's dump of that number."""
    draw = np.random.default_rng([zlib.crc32(family.encode()), number])
    prompts, samples = ((32, 4), (64, 2), (16, 8), (16, 4), (48, 1))[int(draw.integers(5))]
    return Drawn(
        f"{family}@2" if draw.random() < 0.25 else family,
        100 + number,
        _FORMATS[int(draw.integers(len(_FORMATS)))],
        (0.7, 1.0, 1.0, 1.3)[int(draw.integers(4))],
        prompts,
        samples,
        (16, 32, 48, 64)[int(draw.integers(4))],
    )


def made(how: Drawn) -> Dump:
    size = (how.seed, how.prompts, how.samples, how.length)
    family = Family(how.family, how.formats[0], *size)
    rolled = roll(family, how.temperature)
    other = family if how.formats[0] == how.formats[1] else Family(how.family, how.formats[1], *size)
    learner = scores(other, rolled, {"": lambda z, t, b: plain(z / how.temperature, t, b)})[""]
    settings = Settings(how.temperature, rollout_format=how.formats[0], learner_format=how.formats[1])
    return Dump("plain", Path("blind"), dump(rolled, learner), settings)


def row(how: Drawn, sequences: Sequence[Scored], found: Diagnosis, experts: bool | None) -> dict[str, Any]:
    family = how.family.split("@")[0]
    named = () if found.fault is None else (found.fault.name, *found.fault.also)
    return {"benchmark": "doctor_many", "family": family, "held_out": family not in TUNED, "model": how.family,
            "formats": list(how.formats), "temperature": how.temperature, "length": how.length, "seed": how.seed,
            "sequences": len(sequences), "tokens": found.figures["tokens"], "u_rms": found.figures["u_rms"],
            "verdict": found.verdict.value, "named": list(named), "right": found.verdict.value == "healthy noise",
            "experts": experts, "headline": found.headline[:240]}  # fmt: skip


def of_family(family: str, numbers: Sequence[int], mixture: bool = False) -> Iterator[dict[str, Any]]:
    """``mixture``: each dump is asked a second time, and says that its policy routes to experts."""
    for number in numbers:
        how = drawn(family, number)
        dumped = made(how)
        yield row(how, dumped.sequences, examine(dumped), None)
        if mixture:
            said = replace(dumped, settings=replace(dumped.settings, experts=True))
            yield row(how, said.sequences, examine(said), True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(HELD_OUT))
    parser.add_argument("--dumps", type=int, default=30, help="of each family")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--run", default="", help="a name for these rows")
    parser.add_argument("--experts", action="store_true", help="with and without saying so (of those held out anyway)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    right: dict[str, list[bool]] = {}
    for family in options.families.split(","):
        for each in of_family(family, range(options.first, options.first + options.dumps),
                              options.experts or family in MIXTURES):  # fmt: skip
            append(RESULTS, [{"run": options.run} | each], "cpu")
            right.setdefault(family, []).append(each["right"])
            if not each["right"]:
                model = each["model"] + " that says experts" * bool(each["experts"])
                print(f"{model} {'/'.join(each['formats'])} {each['seed']}: {each['headline']}", flush=True)
    every = [each for own in right.values() for each in own]
    print(f"{sum(every)} of {len(every)} called healthy")


if __name__ == "__main__":
    main()
