"""The doctor's first line: one sentence for each answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import dumps
from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.words import first_line, inferred

HEALTHY = dumps.healthy(prompts=16, samples=4, length=30)


def answer(sequences: list, **settings: object) -> tuple[Dump, Diagnosis]:
    dump = Dump("plain", Path("x"), sequences, Settings(**settings))
    return dump, examine(dump)


def test_each_answer_is_one_sentence() -> None:
    equal = [replace(each, learner_logp=each.rollout_logp) for each in HEALTHY]
    ended = [replace(each, learner_logp=each.learner_logp * np.log2(np.e)) for each in HEALTHY]
    expected = [
        (HEALTHY, Verdict.HEALTHY, "Healthy: the two sides differ by rounding alone."),
        (equal, Verdict.HEALTHY, "Both sides are equal: exact kernels do that, and so does a copy of one side."),
        (HEALTHY[:3], Verdict.UNKNOWN, "I cannot tell: 90 tokens of 3 sequences are too few."),
        (ended, Verdict.FAULT, "Something is wrong: one side's logarithm has another base."),
    ]
    for sequences, verdict, said in expected:
        _, found = answer(sequences, rollout_format="bf16", learner_format="bf16")
        assert found.verdict is verdict, found.headline
        assert first_line(found).startswith(said)
        assert "\n" not in first_line(found)
    large = replace(found, verdict=Verdict.LARGE, fault=None)
    assert first_line(large).startswith("Something is wrong, and these numbers do not say what")
    two = first_line(replace(found, second=found.fault))
    assert (
        two == "Two things are wrong: one side's logarithm has another base; and one side's logarithm has another base."
    )


def test_a_dump_that_names_nothing_is_told_what_was_inferred() -> None:
    dump, found = answer(HEALTHY)
    said = inferred(dump, found, None)
    assert said[0] == "this is the plain schema, by its fields"
    assert said[1].startswith("no number format is named: judged as bf16, and a size of u of 0.05")
    assert said[1].endswith("is that of bf16")
    assert said[2] == "no temperature is named"
    dump, found = answer(HEALTHY, rollout_format="bf16", temperature=1.0)
    assert inferred(dump, found, "plain") == []
    small = [replace(each, learner_logp=each.rollout_logp + (each.learner_logp - each.rollout_logp) / 5)
             for each in HEALTHY]  # fmt: skip
    dump, found = answer(small)
    assert inferred(dump, found, "plain")[0].endswith("is that of fp16")
