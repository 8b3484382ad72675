"""How often the doctor is right: dumps of known kind, the doctor blind, by family of models.

An answer is

- *right*: it names the mistake, alone or together with the one that log-probs cannot tell it from;
- *half*: of two mistakes it names one;
- *undecided*: it says that there is more than noise and not what, or ``too_large`` with its list of causes;
- *said*: it says healthy, and the mistake is smaller than what it says would have been seen;
- *too small*: it says healthy, and the mistake's size of u is below twice the healthy one's of this family and format;
- *wrong*: it names another mistake, or calls one healthy that it says it would have seen, or a healthy dump a fault.

"Strictly wrong" counts *said* as wrong too, as before it was said. Intervals are the bootstrap's over families, for
one model's dumps are alike. ``--run`` names the rows of a run.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_mistakes import Case, adapter, at_temperature, cases, engine_cases, more_arrays, noisier, of_arrays
from doctor_ours import Ours
from doctor_strangers import HELD_OUT, MIXTURES, TUNED, Array, Family, Rolled, dump, swapped
from runner import Row, Rows, case

from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.runs import read_run

HEALTHY = "healthy"


def diagnosed(sequences: Sequence[Scored], how: Settings) -> Diagnosis:
    return examine(Dump("plain", Path("blind"), sequences, how))


def settings(temperature: float, formats: Sequence[str], experts: bool | None = None) -> Settings:
    """``formats``: of the rollout and of the learner."""
    return Settings(temperature, rollout_format=formats[0], learner_format=formats[1], experts=experts)


def names_of(found: Diagnosis) -> tuple[str, ...]:
    """What the answer names: the fault and what it cannot be told from, with a second fault as ``first+second``."""
    if found.fault is None:
        return ()
    named = (found.fault.name, *found.fault.also)
    return named if found.second is None else (*named, f"{found.fault.name}+{found.second.name}")


def outcome(right: Sequence[str], found: Diagnosis, healthy_size: float, size: float) -> str:
    """The answer's kind, as above. ``size``: of u in the dump, over every token that both sides scored."""
    stated = next((each.detectable for each in found.findings if each.name == "too_large"), None) or 0.0
    named = names_of(found)
    if not right:
        return "wrong" if named else {Verdict.HEALTHY: "right", Verdict.LARGE: "wrong"}.get(found.verdict, "undecided")
    if set(named) & set(right):
        return "right"
    if set(named) & {each for one in right for each in one.split("+")}:
        return "half"
    if named and found.verdict is Verdict.FAULT:
        return "wrong"
    if found.verdict is Verdict.HEALTHY:
        return "too small" if size < 2 * healthy_size else "said" if size < stated else "wrong"
    return "undecided"


def plain_name(model: str) -> str:
    """A family without its size and its training."""
    return model.split("+")[0].split("@")[0]


def answers(every: Sequence[Case], model: str, experts: bool | None, sides: Sequence[str]) -> Iterator[Row]:
    """A row for each case and side. ``model``: ``FAMILY:FORMAT`` or ``FAMILY:ROLLOUT/LEARNER``."""
    (family, formats), healthy = parsed(model), 0.0
    for one in every:
        for side in sides:
            sequences, of = (one.sequences, formats) if side == "learner" else (swapped(one.sequences), formats[::-1])
            started = time.perf_counter()
            found = diagnosed(sequences, settings(one.temperature, of, experts))
            seconds, size = time.perf_counter() - started, float(found.figures["u_rms"])
            healthy = size if (one.name, side) == (HEALTHY, "learner") else healthy
            yield {"family": plain_name(family), "model": family, "held_out": plain_name(family) not in TUNED,
                   "format": model.rpartition(":")[2], "kind": one.name, "side": side, "experts": experts,
                   "right": list(one.right), "named": list(names_of(found)), "verdict": found.verdict.value,
                   "outcome": outcome(one.right, found, healthy, size), "u_rms": size, "sequences": len(sequences),
                   "seconds": round(seconds, 2), "headline": found.headline[:240]}  # fmt: skip


def parsed(model: str) -> tuple[str, tuple[str, str]]:
    """The family, and the formats of rollout and learner."""
    family, _, name = model.rpartition(":")
    rolled, _, scored = name.partition("/")
    return family, (rolled, scored or rolled)


def made(kind: Callable[..., Iterator[Case]], model: str, size: Sequence[int], folder: str) -> list[Case]:
    """A model's dumps; from ``folder`` where they were kept there (pickles of this script's own)."""
    kept = Path(folder) / f"{model.replace(':', '-').replace('/', '-')}.pkl"
    if folder and kept.is_file():
        return list(pickle.loads(kept.read_bytes()))
    family, (rolled, scored) = parsed(model)
    learner = None if scored == rolled else Family(family, scored, *size)
    found = list(kind(Family(family, rolled, *size), learner=learner))
    if folder:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def summary(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
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


ASKED = ("phi+text:fp16", "phi@2:bf16/fp32", "minimax-m2+text:bf16", "minimax-m2@2:fp16/fp32",  # others: healthy alone
         "apertus+text:bf16", "apertus@2:fp32", "exaone-moe:bf16/fp32", "exaone-moe@2:fp16", "olmo3+text:fp16/fp32",
         "olmo3@2:bf16", "doge+text:bf16/fp32", "doge@2:fp16", "afmoe+text:fp16/fp32", "afmoe@2:bf16",
         "gpt-bigcode+text:fp32", "gpt-bigcode@2:bf16", "jais2:bf16", "jais2@2:fp16/fp32", "laguna:fp32",
         "laguna@2:bf16/fp32", "nanochat+text:bf16", "nanochat@2:bf16/fp32", "ministral3+text:fp16",
         "ministral3@2:fp32")  # fmt: skip


@case(models=["llama:fp32"], prompts=8, length=16)
def doctor_held_out(models: Sequence[str] = ASKED, seed: int = 0, prompts: int = 20, samples: int = 4, length: int = 32,
                    dumps: str = "", run: str = "", experts: bool = False, threads: int = 1) -> Rows:  # fmt: skip
    """How often the doctor is right on dumps that transformers' models made, by family: a confusion matrix.

    Every mistake of ``doctor_mistakes.py`` on each side. By default of families held out of the choice of thresholds,
    whose mixtures say so (``--experts``: all do). ``--dumps``: a folder where dumps are kept between runs.

    Expected of the sixth run, committed with the doctor that it is of and before any dump of its families was diagnosed
    (in each family two sizes, one of them trained where it is ``+text``, fp32, fp16 and bf16 on both sides or one of
    them beside another; and SmolLM2, on which the usual sizes rest, so that it is reported apart):

    - right, half, undecided or said >= 95% of the mistakes that are not too small, wrong <= 1%, named right >= 70%
      (less than the third run's, for mixtures and mixed formats are in it), strictly wrong <= 6%;
    - healthy called healthy: dense >= 99% (of these dumps and of doctor_many's); mixtures that say so >= 98% in one
      format and >= 85% in two, and in no case a fault or too large; mixtures that do not say so: none a fault, <= 2%
      too large.

    Nothing was changed after the first of its dumps. The whole run is

        doctor_many --run sixth --dumps 12
        doctor_held_out --run sixth
        doctor_held_out --run sixth --models smollm2:bf16/fp32 --prompts 16 --samples 3 --length 24

    The sixth run showed that a quarter of the rows of other weights was "not known" in all of its dense families, which
    had been named before. The seventh asks the mended doctor about the mistakes of classes of which only healthy dumps
    had been diagnosed. Expected before it: as of the sixth, and a quarter of the rows named in nine of ten without
    experts.

        doctor_held_out --run seventh --models cwm+text:bf16 hyperclovax@2:fp16/fp32 diffllama:bf16 ministral@2:fp16
            mellum@2:bf16 hyv3+text:bf16/fp32
    """
    every: list[Row] = []
    for model in models:
        says = experts or plain_name(parsed(model)[0]) in MIXTURES or None
        for row in answers(made(cases, model, (seed, prompts, samples, length), dumps), model, says,
                           ("learner", "rollout")):  # fmt: skip
            every.append(row)
            yield {"run": run, "seed": seed} | row
    for name, (value, low, high) in summary(every).items():
        print(f"{name}: {value:.1%} ({low:.1%} to {high:.1%} over families)")


@case(models=["llama:fp32"])
def doctor_engines(
    models: Sequence[str] = ("gpt-neox:bf16", "llama:fp32", "stablelm:bf16/fp32", "starcoder2+text:bf16"),
    dumps: str = "", run: str = "", threads: int = 1,
) -> Rows:  # fmt: skip
    """Whether the doctor names what engines and trainers do to one side: fillers, tokens encoded again, words ruled
    out, an update while a sequence is sampled.

    Expected before the tests that name them were written: every filler named, with its value and count; of the others
    nine of ten named; no dump named after experts, of which none has any; every fault with a verdict of a fault or too
    large; every healthy dump healthy.
    """
    rows: list[Row] = []
    for model in models:
        for row in answers(made(engine_cases, model, (0, 24, 2, 32), dumps), model, None, ("learner",)):
            rows.append(row)
            yield {"run": run} | row
    for what, own in (("faults", [r for r in rows if r["right"]]), ("healthy", [r for r in rows if not r["right"]])):
        right = sum(row["outcome"] == "right" for row in own)
        large = sum(row["verdict"] in (Verdict.FAULT.value, Verdict.LARGE.value) for row in own)
        print(f"{what}: {right} right of {len(own)}; a fault or too large: {large}; of experts: "
              f"{sum('expert' in row['headline'] for row in own)}")  # fmt: skip


# many healthy dumps

_FORMATS = (("bf16", "bf16"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"),
            ("fp32", "bf16"), ("fp16", "bf16"))  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """How a dump is made. ``formats``: of the rollout and of the learner; ``size``: seed, prompts, samples, length."""

    family: str
    formats: tuple[str, str]
    temperature: float
    size: tuple[int, int, int, int]


def drawn(family: str, number: int) -> Drawn:
    """The family's dump of that number."""
    draw = np.random.default_rng([zlib.crc32(family.encode()), number])
    prompts, samples = ((32, 4), (64, 2), (16, 8), (16, 4), (48, 1))[int(draw.integers(5))]
    name = f"{family}@2" if draw.random() < 0.25 else family
    formats = _FORMATS[int(draw.integers(len(_FORMATS)))]
    temperature = (0.7, 1.0, 1.0, 1.3)[int(draw.integers(4))]
    return Drawn(name, formats, temperature, (100 + number, prompts, samples, (16, 32, 48, 64)[int(draw.integers(4))]))


def healthy_dump(how: Drawn) -> list[Scored]:
    family = Family(how.family, how.formats[0], *how.size)
    rolled = family.roll(how.temperature)
    other = family if how.formats[0] == how.formats[1] else Family(how.family, how.formats[1], *how.size)
    return dump(rolled, other.scores(rolled, {"": at_temperature(how.temperature)})[""])


@case("doctor_held_out", families=["llama"], dumps=1)
def doctor_many(families: Sequence[str] = HELD_OUT, dumps: int = 30, first: int = 0, run: str = "",
                experts: bool = False, threads: int = 1) -> Rows:  # fmt: skip
    """How many of several hundred healthy dumps the doctor calls healthy, by family of models.

    A dump is of a model of its own (``doctor_strangers.py``; its weights, its prompts and how they are sampled are
    drawn anew): a decode loop with a cache in one format, and whole sequences scored in the same or in another.
    ``--dumps``: of each family, from number ``--first`` on. Mixtures of experts (or all, by ``--experts``) are asked
    twice, with a dump that says so and one that does not; what is expected of them is in doctor_held_out.
    """
    right: list[bool] = []
    for family in families:
        for number in range(first, first + dumps):
            how = drawn(family, number)
            sequences = healthy_dump(how)
            for says in (None, True) if experts or family in MIXTURES else (None,):
                found = diagnosed(sequences, settings(how.temperature, how.formats, says))
                named = () if found.fault is None else (found.fault.name, *found.fault.also)
                right.append(found.verdict is Verdict.HEALTHY)
                yield {"run": run, "family": family, "held_out": family not in TUNED, "model": how.family,
                       "formats": list(how.formats), "temperature": how.temperature, "length": how.size[3],
                       "seed": how.size[0], "sequences": len(sequences), "tokens": found.figures["tokens"],
                       "u_rms": found.figures["u_rms"], "verdict": found.verdict.value, "named": list(named),
                       "right": right[-1], "experts": says, "headline": found.headline[:240]}  # fmt: skip
    print(f"{sum(right)} of {len(right)} called healthy")


# a quarter of the sequences

SIZES = ((32, 32), (64, 32), (128, 16), (128, 32), (128, 64), (128, 128), (256, 32), (256, 128), (512, 32), (512, 256))
FACTORS = (("noisier", 1.5), ("noisier", 2.0), ("adapter", 2.0), ("noisier", 3.0))


def larger(family: Family, rolled: Rolled, base: float, kind: str, asked: float) -> list[Array]:
    """Log-probs of weights that are off by as much as makes the size ``asked`` times ``base``, in four steps."""
    change, strength, best = (noisier, adapter)[kind == "adapter"], 0.003, None
    for _ in range(4):
        found = family.under(rolled, change(strength))
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
        answer = diagnosed(dump(part, learner), settings(1.0, (name, name)))
        named = "some_sequences" in names_of(answer)
        found, else_ = found + named, else_ + (not named and answer.verdict is not Verdict.HEALTHY)
    return found, else_


def size_of(rollout: list[Array], learner: list[Array]) -> float:
    """Root mean square of u over uncertain tokens."""
    x, y = np.concatenate(rollout), np.concatenate(learner)
    uncertain = -np.expm1(np.minimum(np.minimum(x, y), 0))
    u = ((y - x) / np.maximum(uncertain, 1e-9))[uncertain > 0.01]
    return float(np.sqrt(np.square(u).mean()))


@case("doctor_held_out", models=["llama:bf16"], sequences=32, tokens=32, trials=1)
def doctor_partial(models: Sequence[str] = ("mistral:bf16", "stablelm:bf16", "exaone4:fp16", "granitemoe:bf16"),
                   sequences: int = 256, tokens: int = 128, trials: int = 20, run: str = "",
                   threads: int = 1) -> Rows:  # fmt: skip
    """From which size on the doctor finds a fault of a quarter of the sequences: by sequences and tokens.

    The quarter, drawn anew in each trial, is scored with weights that are noisier (or have an adapter that they should
    not have) by as much as makes its size of u 1.5, 2 or 3 times the healthy one; ``times`` is what came out. Sizes are
    at most ``--sequences`` and ``--tokens``.

    Expected before any dump of a held-out family was diagnosed: of 128 sequences of 32 tokens without experts, a
    quarter that is twice as large is found in 95% of trials; nothing is found in a healthy dump in 99%. With experts,
    whose single tokens make most of the healthy size, from 4 times on.
    """
    for model in models:
        name, (rolled_in, _) = parsed(model)
        family = Family(name, rolled_in, 0, sequences // 4, 4, tokens)
        rolled = family.roll()
        healthy = family.plain(rolled)
        base = size_of(rolled.logps, healthy)
        others = [("", 1.0, healthy), *((*how, larger(family, rolled, base, *how)) for how in FACTORS)]
        for size in (each for each in SIZES if each[0] <= sequences and each[1] <= tokens):
            for kind, asked, other in others:
                found, else_ = tried(rolled, healthy, other, rolled_in, size, trials)
                yield {"benchmark": "doctor_power", "run": run, "family": plain_name(name), "model": name,
                       "held_out": name not in TUNED, "format": rolled_in, "kind": kind, "asked": asked,
                       "times": size_of(rolled.logps, other) / base, "sequences": size[0], "tokens": size[1],
                       "trials": trials, "found": found, "else": else_}  # fmt: skip


# our own policies and finished runs


@case(formats=["fp16"], prompts=4, samples=2, max_tokens=6, only="rows")
def doctor_confusion(
    model: Sequence[str], runs: bool = False, formats: Sequence[str] = ("bf16", "fp16"), prompts: int = 64,
    samples: int = 8, max_tokens: int = 24, only: str = "",
) -> Rows:  # fmt: skip
    """How often the doctor is right: faults of known kind in real rollouts, the doctor blind, and a confusion matrix.

    MODEL: policies, sampled by our engine and scored by the learner's kernels, with every mistake of
    ``doctor_mistakes.py`` that does not want a model of transformers (``--only``: parts of names, with commas); or,
    with ``--runs``, finished runs, whose newest steps together get those of arrays.
    """
    torch.manual_seed(0)

    def wanted(name: str) -> bool:
        return any(part in name for part in only.split(","))

    for source in model:
        if runs:
            every, formats = of_run(Path(source), wanted)
        for fmt in formats:
            if not runs:
                every = list(cases(Ours(source, fmt, prompts, samples, max_tokens), wanted, more=True))
            for row in answers(every, f"{source}:{fmt}", None, ("learner", "rollout")):
                yield {"metric": "names", "source": source} | row


def of_run(path: Path, wanted: Callable[[str], bool]) -> tuple[list[Case], list[str]]:
    """Every three steps of a finished run are a healthy dump; and faults of arrays in its newest steps together. With
    its formats, of rollout and learner."""
    whole = read_run(path)
    rows, how, temperature = list(whole.sequences), whole.settings, whole.settings.temperature or 1.0
    step_of = [-1 if each.group is None else each.group // 1_000_000 for each in rows]
    parts = [
        [each for each, at in zip(rows, step_of, strict=True) if step - 2 <= at <= step]
        for step in sorted({step for step in step_of if step >= 0})[2:]
    ]  # one step is too few to tell
    every = [Case(HEALTHY, (), part, temperature) for part in (rows, *parts)]
    every += [Case(each.name, each.right, each.make(), temperature) for each in (*of_arrays(rows), *more_arrays(rows))
              if wanted(each.name)]  # fmt: skip
    return every, [f"{how.rollout_format}/{how.learner_format}"]
