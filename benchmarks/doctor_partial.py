"""From which size on the doctor finds a fault of a quarter of the sequences: by sequences and tokens.

    python benchmarks/doctor_partial.py                                  # families held out of the choice of thresholds
    python benchmarks/doctor_partial.py --models llama:bf16,olmoe:bf16   # those on which they were chosen

The quarter, drawn anew in each trial, is scored with weights that are noisier (or have an adapter that they should not
have) by as much as makes its size of u 1.5, 2 or 3 times the healthy one; ``times`` is what came out. Rows go to
results/doctor_held_out.jsonl.

Expected before any dump of a held-out family was diagnosed: of 128 sequences of 32 tokens without experts, a quarter
that is twice as large is found in 95% of trials; nothing is found in a healthy dump in 99%. With experts, whose single
tokens make most of the healthy size, from 4 times on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from doctor_held_out import diagnosed, names_of
from doctor_mistakes import adapter, by_weights, noisier
from doctor_strangers import TUNED, Array, Family, Rolled, dump, plain, roll, scores
from rows import append

RESULTS = "doctor_held_out.jsonl"
MODELS = ("mistral:bf16", "stablelm:bf16", "exaone4:fp16", "granitemoe:bf16")
SIZES = ((32, 32), (64, 32), (128, 16), (128, 32), (128, 64), (128, 128), (256, 32), (256, 128), (512, 32), (512, 256))
FACTORS = (("noisier", 1.5), ("noisier", 2.0), ("adapter", 2.0), ("noisier", 3.0))


def of_model(name: str, number_format: str, most: tuple[int, int], trials: int) -> Iterator[dict[str, Any]]:
    """Rows for each size up to ``most`` sequences and tokens, and each factor."""
    family = Family(name, number_format, 0, most[0] // 4, 4, most[1])
    rolled = roll(family)
    healthy = scores(family, rolled, {"": plain})[""]
    base = size_of(rolled.logps, healthy)
    others = [
        ("", 1.0, healthy),
        *((kind, asked, larger(family, rolled, base, kind, asked)) for kind, asked in FACTORS),
    ]
    for sequences, tokens in SIZES:
        if sequences > most[0] or tokens > most[1]:
            continue
        for kind, asked, other in others:
            found, else_ = tried(rolled, healthy, other, number_format, (sequences, tokens), trials)
            yield {"family": name.split("+")[0].split("@")[0], "model": name, "held_out": name not in TUNED,
                   "format": number_format, "kind": kind, "asked": asked, "times": size_of(rolled.logps, other) / base,
                   "sequences": sequences, "tokens": tokens, "trials": trials, "found": found,
                   "else": else_}  # fmt: skip


def larger(family: Family, rolled: Rolled, base: float, kind: str, asked: float) -> list[Array]:
    """Log-probs of weights that are off by as much as makes the size ``asked`` times ``base``, in four steps."""
    made, strength, best = (noisier, adapter)[kind == "adapter"], 0.003, None
    for _ in range(4):
        found = by_weights(family, rolled, made(strength))
        times = size_of(rolled.logps, found) / base
        if best is None or abs(np.log(times / asked)) < abs(np.log(best[0] / asked)):
            best = times, found
        strength *= float(np.clip(np.sqrt((asked**2 - 1) / max(times**2 - 1, 0.02)), 0.1, 10))
    assert best is not None
    return best[1]


def tried(
    rolled: Rolled, healthy: list[Array], other: list[Array], name: str, size: tuple[int, int], trials: int
) -> tuple[int, int]:
    """(times that some sequences are named, times that it is something else or nothing is known), of ``trials``."""
    draw, found, else_ = np.random.default_rng(5), 0, 0
    for _ in range(trials):
        some = np.sort(draw.permutation(len(healthy))[: size[0]])
        bad = draw.permutation(size[0]) < size[0] // 4
        cut = [rolled.responses[n][: size[1]] for n in some], [rolled.logps[n][: size[1]] for n in some]
        part = Rolled([rolled.prompts[n] for n in some], *cut, [rolled.groups[n] for n in some])
        learner = [(other if b else healthy)[n][: size[1]] for n, b in zip(some, bad, strict=True)]
        answer = diagnosed(dump(part, learner), 1.0, (name, name))
        named = "some_sequences" in names_of(answer)
        found, else_ = found + named, else_ + (not named and answer.verdict.value != "healthy noise")
    return found, else_


def size_of(rollout: list[Array], learner: list[Array]) -> float:
    """Root mean square of u over uncertain tokens."""
    x, y = np.concatenate(rollout), np.concatenate(learner)
    uncertain = -np.expm1(np.minimum(np.minimum(x, y), 0))
    u = ((y - x) / np.maximum(uncertain, 1e-9))[uncertain > 0.01]
    return float(np.sqrt(np.square(u).mean()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="FAMILY:FORMAT, with commas between")
    parser.add_argument("--sequences", type=int, default=256, help="at most")
    parser.add_argument("--tokens", type=int, default=128, help="at most")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--run", default="", help="a name for these rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for each in options.models.split(","):
        for row in of_model(*each.split(":"), (options.sequences, options.tokens), options.trials):
            append(RESULTS, [{"benchmark": "doctor_power", "run": options.run} | row], "cpu")
            print(f"{each} {row['sequences']} x {row['tokens']}, {row['kind']} {row['times']:.2f}x: {row['found']} of "
                  f"{row['trials']}, else {row['else']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
