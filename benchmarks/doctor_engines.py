"""Whether the doctor names what engines and trainers do to one side: fillers, tokens encoded again, words ruled out,
an update while a sequence is sampled.

    python benchmarks/doctor_engines.py --models gpt-neox:bf16,llama:fp32,stablelm:bf16/fp32,starcoder2+text:bf16

Dumps of transformers' small models (``doctor_strangers.py``), blind. Each case says which signatures name it; a healthy
one must be called so. Expected before the tests that name them were written: every filler named, with its value and
count; of the others nine of ten named; no dump named after experts, of which none has any; every fault with a verdict
of a fault or too large (exit code 1); every healthy dump healthy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_mistakes import _weights, by_weights, noisier
from doctor_strangers import Array, Family, Rolled, dump, plain, roll, scores
from rows import append
from torch import Tensor

from mantissa.doctor.diagnosis import Verdict
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine

RESULTS = "doctor_engines.jsonl"
SIZES = (0, 24, 2, 32)  # seed, prompts, samples, length


@dataclass(frozen=True)
class Case:
    """``right``: the signatures that name it; empty: healthy."""

    name: str
    right: tuple[str, ...]
    sequences: list[Scored]


def cases(family: Family, learner: Family | None = None) -> Iterator[Case]:
    """Every case of one model. ``learner``: the same model in another format."""
    scoring = learner or family
    rolled = roll(family)
    healthy = scores(scoring, rolled, {"": plain})[""]
    yield Case("healthy", (), dump(rolled, healthy))
    yield from _fillers(rolled, healthy)
    yield from _encoded_again(scoring, rolled, healthy)
    yield from _ruled_out(family, scoring)
    yield from _updated(scoring, rolled, healthy)


def _fillers(rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    draw = np.random.default_rng(5)

    def filled(value: float, where: Callable[[int], Array], both: bool = False) -> list[Scored]:
        rows = dump(rolled, healthy)
        found = []
        for row in rows:
            at = where(len(row.mask))
            x, y = row.rollout_logp.copy(), row.learner_logp.copy()
            x[at] = value
            if both:
                y[at] = value
            found.append(replace(row, rollout_logp=x, learner_logp=y))
        return found

    def span(n: int) -> Array:
        start = int(draw.integers(1, n - 6))
        return np.arange(start, start + 5) if draw.random() < 0.4 else np.arange(0)

    def scattered(n: int) -> Array:
        return np.flatnonzero(draw.random(n) < 0.03)

    yield Case("-9999 in spans", ("unscored",), filled(-9999.0, span))
    yield Case("-1e9 here and there", ("unscored",), filled(-1e9, scattered))
    yield Case("-100 in spans", ("unscored",), filled(-100.0, span))
    yield Case("the lowest fp32 here and there", ("unscored",), filled(float(np.finfo(np.float32).min), scattered))
    yield Case("-1e38 at first tokens", ("unscored",), filled(-1e38, lambda n: np.arange(int(draw.random() < 0.5))))
    yield Case("log 1e-10 in spans", ("unscored",), filled(float(np.log(np.float32(1e-10))), span))
    yield Case("-9999 at last tokens", ("end_token",), filled(-9999.0, lambda n: np.array([n - 1])))
    yield Case("-9999 on both sides", (), filled(-9999.0, span, both=True))


def _encoded_again(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    """A text that is encoded again has, from a token on, one token more or less."""
    words = family.model.config.vocab_size

    def made(by: int, share: float) -> list[Scored]:
        draw = np.random.default_rng(11 + by)
        responses = []
        for r in rolled.responses:
            at, new = int(draw.integers(3, max(4, len(r) - 8))), draw.integers(3, words, 2).tolist()
            other = r[:at] + new[: 1 if by < 0 else 2] + r[at + (2 if by < 0 else 1) :]
            responses.append([*other, 2][: len(r)] if draw.random() < share else r)
        again = scores(family, replace(rolled, responses=responses), {"": plain})[""]
        same = [a == b for a, b in zip(responses, rolled.responses, strict=True)]
        return dump(rolled, [y if own else z for y, z, own in zip(healthy, again, same, strict=True)])

    yield Case("one token more from a place on, in a quarter", ("moved_from",), made(1, 0.27))
    yield Case("one token less from a place on, in half", ("moved_from",), made(-1, 0.5))


def _probable(family: Family, rolled: Rolled, count: int) -> Tensor:
    """The ids that were drawn most."""
    drawn = torch.tensor([token for row in rolled.responses for token in row])
    return torch.bincount(drawn, minlength=family.model.config.vocab_size).argsort(descending=True)[:count]


def _ruled_out(family: Family, scoring: Family) -> Iterator[Case]:
    words, usual = family.model.config.vocab_size, _probable(family, roll(family), 12)

    def without(ids: Tensor, by: float = -torch.inf) -> Callable[[Tensor, int], Tensor]:
        return lambda z, at: z.index_fill(1, ids, by) if by == -torch.inf else z.index_add(
            1, ids, torch.full((len(z), len(ids)), by))  # fmt: skip

    def only(ids: Tensor) -> Callable[[Tensor, int], Tensor]:
        kept = torch.full((words,), -torch.inf).index_fill(0, ids, 0.0)
        return lambda z, at: z + kept

    def guided(z: Tensor, at: int) -> Tensor:
        return z if at % 3 else only(torch.arange(at * 7 % 100, words, 3))(z, at)

    def of(law: Callable[[Tensor, int], Tensor], end: int = 2) -> list[Scored]:
        rolled = roll(family, seed=3, law=law, end=end)
        return dump(rolled, scores(scoring, rolled, {"": plain})[""])

    end = int(usual[0])

    def at_least(n: int) -> Callable[[Tensor, int], Tensor]:
        return lambda z, at: without(torch.tensor([end]))(z, at) if at < n else z

    ruled = ("support",)
    yield Case("min_tokens 8", ("min_tokens",), of(at_least(8), end))
    yield Case("min_tokens 14", ("min_tokens",), of(at_least(14), end))
    yield Case("five usual words banned", ruled, of(without(usual[1:6])))
    yield Case("two less usual words banned", ruled, of(without(usual[8:10])))
    yield Case("a twentieth of the words banned", ruled, of(without(torch.arange(7, words, 20))))
    yield Case("a fifth of the words allowed", ruled, of(only(torch.arange(3, words, 5))))
    yield Case("guided at every third token", ruled, of(guided))
    yield Case("logit bias of -100 on eight words", ruled, of(without(usual[2:10], -100.0)))
    yield Case("logit bias of +4 on one word", ("logit_bias",), of(without(usual[3:4], 4.0)))
    yield Case("logit bias of -3 on six words", ("logit_bias", *ruled), of(without(usual[1:7], -3.0)))


def _updated(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[Case]:
    """Weights are exchanged while sequences are sampled, at a token of each one's own; keys and values of the old."""
    for strength in (0.03, 0.1):
        newer = by_weights(family, rolled, noisier(strength))
        draw = np.random.default_rng(23)
        places = [int(draw.integers(0, 2 * len(r))) for r in rolled.responses]  # half of the sequences end before
        mixed = [np.concatenate([y[:at], z[at:]]) for y, z, at in zip(healthy, newer, places, strict=True)]
        yield Case(f"an update of {strength:g} on the way, scored by the older", ("mid_sequence",),
                   dump(rolled, healthy, mixed))  # fmt: skip
        with _weights(family, noisier(strength)):
            second = roll(family, seed=8)
            own = scores(family, second, {"": plain})[""]
        older = scores(family, second, {"": plain})[""]
        places = [int(draw.integers(0, len(r))) for r in second.responses]
        mixed = [np.concatenate([z[:at], x[at:]]) for z, x, at in zip(older, second.logps, places, strict=True)]
        yield Case(
            f"an update of {strength:g} on the way, scored by the newer", ("mid_sequence",), dump(second, own, mixed)
        )


def answers(every: Sequence[Case], formats: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    for case in every:
        settings = Settings(1.0, rollout_format=formats[0], learner_format=formats[1])
        found = examine(Dump("plain", Path("blind"), case.sequences, settings))
        named = [] if found.fault is None else [found.fault.name, *found.fault.also]
        right = found.verdict is Verdict.HEALTHY if not case.right else bool(set(named) & set(case.right))
        fault = found.verdict in (Verdict.FAULT, Verdict.LARGE)
        yield {"kind": case.name, "right": right, "named": named, "verdict": found.verdict.value,
               "exit": int(fault), "u_rms": float(found.figures["u_rms"]),
               "experts": "expert" in found.headline + " ".join(found.remarks),
               "headline": found.headline[:240]}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-neox:bf16,llama:fp32,stablelm:bf16/fp32,starcoder2+text:bf16")
    parser.add_argument("--dumps", help="a folder where dumps are kept between runs (pickles of this script's own)")
    parser.add_argument("--run", default="", help="a name for these rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for each in options.models.split(","):
        name, _, formats = each.partition(":")
        rolled, _, scored = formats.partition("/")
        for row in answers(made(name, rolled, scored or rolled, options.dumps), (rolled, scored or rolled)):
            row = {"benchmark": "doctor_engines", "run": options.run, "model": name, "formats": formats} | row
            rows.append(row)
            print(f"{each} {row['kind']}: {'right' if row['right'] else 'NOT'} {row['named']} {row['headline'][:150]}",
                  flush=True)  # fmt: skip
    if options.run:
        append(RESULTS, rows, "cpu")
    faults = [row for row in rows if row["kind"] not in ("healthy", "-9999 on both sides")]
    healthy = [row for row in rows if row not in faults]
    print(
        f"named right: {sum(row['right'] for row in faults)} of {len(faults)}; as a fault: "
        f"{sum(row['exit'] for row in faults)}; healthy: {sum(row['right'] for row in healthy)} of {len(healthy)}; "
        f"of experts: {sum(row['experts'] for row in rows)}"
    )


def made(name: str, rolled: str, scored: str, folder: str | None) -> list[Case]:
    """The model's cases; from ``folder`` where they were kept there."""
    import pickle

    kept = None if folder is None else Path(folder) / f"{name}-{rolled}-{scored}.pkl"
    if kept is not None and kept.is_file():
        return list(pickle.loads(kept.read_bytes()))
    learner = None if scored == rolled else Family(name, scored, *SIZES)
    found = list(cases(Family(name, rolled, *SIZES), learner))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


if __name__ == "__main__":
    main()
