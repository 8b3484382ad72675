"""Pairs that log-probs cannot tell apart are decided by the model: dumps by transformers, scored again by ours."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import doctor_mistakes
import doctor_strangers

from mantissa.doctor import words
from mantissa.doctor.consult import consult
from mantissa.doctor.diagnosis import Basis, CauseKind, Diagnosis, Verdict, Which
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.sides import Fed, Weights
from mantissa.doctor.words import first_line
from mantissa.model import Decoder, load_model


@pytest.fixture(scope="module")
def family() -> doctor_strangers.Family:
    return doctor_strangers.Family("llama", "fp32", prompts=16, samples=2, length=24)


@pytest.fixture(scope="module")
def model(family: doctor_strangers.Family, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama")
    family.model.save_pretrained(folder)
    return load_model(folder).requires_grad_(False)


@pytest.fixture(scope="module")
def made(family: doctor_strangers.Family) -> dict[str, Any]:
    wanted = set(DECIDED) | set(AT_FAULT) | {DRAWN, *OLDER}
    return {case.name: case for case in doctor_mistakes.cases(family, wanted.__contains__)}


def asked(sequences: list[Scored], model: Decoder, versions: dict[str, Weights] | None = None,
          said: list[str] | None = None) -> Diagnosis:  # fmt: skip
    dump = Dump("plain", Path("blind"), sequences, Settings(1.0, rollout_format="fp32", learner_format="fp32"))
    say = (lambda line: None) if said is None else said.append
    found = consult(dump, examine(dump), model, versions or {}, say=say).diagnosis
    if found.basis in (Basis.CAUSE, Basis.SIDE):
        assert found.verdict is Verdict.FAULT
        assert first_line(found) == f"Something is wrong: {words.decided(found)}."
    return found


def is_decided(found: Diagnosis, kind: CauseKind, side: Which, **change: Any) -> None:
    """By the model, for the cause that changes ``side`` so."""
    assert found.decided is not None, found.headline
    assert (found.basis, found.decided.kind, found.decided.side, found.side) == (Basis.CAUSE, kind, side, side)
    assert found.decided.name == words.cause(kind, side, change)
    assert found.decided.name in found.headline


DECIDED: dict[str, tuple[CauseKind, dict[str, Any]]] = {
    "BOS missing": (CauseKind.PROMPT, {"prompt": Fed.NO_FIRST}),
    "prompt cut in half": (CauseKind.PROMPT, {"prompt": Fed.NO_FIRST_HALF}),
    "responses' positions moved by 3": (CauseKind.POSITIONS, {"moved": 3}),
    "rope theta 100 times": (CauseKind.ROPE, {"theta": 100.0, "what": "100 times as large"}),
}
AT_FAULT = {
    "dropout left on": ("too_large",),
    "weights not synced": ("weights", "too_large"),
    "adapter on the head missing": ("weights", "too_large"),
}
DRAWN = "top-p 0.9 drawn, log-probs of the whole law"


@pytest.mark.parametrize("name", DECIDED)
def test_the_model_decides_which_cause_it_was(name: str, made: dict[str, Any], model: Decoder) -> None:
    kind, change = DECIDED[name]
    is_decided(asked(made[name].sequences, model), kind, "learner", **change)
    is_decided(asked(doctor_strangers.swapped(made[name].sequences), model), kind, "rollout", **change)


@pytest.mark.parametrize("name", AT_FAULT)
def test_where_no_cause_is_known_the_side_at_fault_is(name: str, made: dict[str, Any], model: Decoder) -> None:
    found = asked(made[name].sequences, model)
    assert (found.basis, found.side, found.decided) == (Basis.SIDE, "learner", None), found.headline
    assert found.fault is not None
    assert found.fault.name in AT_FAULT[name], found.headline


OLDER = {
    "weights not synced": doctor_mistakes.noisier(0.15),
    "stale by one update": lambda name, w: w + 1e-3 * doctor_mistakes._normal(name, w.shape).sign(),
}


@pytest.mark.parametrize("name", OLDER)
def test_the_other_weights_are_named_where_they_are_given(name: str, made: dict[str, Any], model: Decoder) -> None:
    family = doctor_strangers.Family("llama", "fp32", prompts=16, samples=2, length=24)
    changed = ((each, OLDER[name](each, p.detach())) for each, p in family.model.named_parameters())
    other = {each: w for each, w in changed if w is not None}
    versions = {"older": {**{each: p.detach() for each, p in model.named_parameters()}, **other}}
    swapped = doctor_strangers.swapped(made[name].sequences)
    both: tuple[tuple[list[Scored], Which], ...] = ((made[name].sequences, "learner"), (swapped, "rollout"))
    for rows, side in both:
        lines: list[str] = []
        found = asked(rows, model, versions, lines)
        is_decided(found, CauseKind.WEIGHTS, side, weights="older")
        assert found.decided is not None
        assert found.decided.share > 0.995
        assert sum("scoring" in line for line in lines) == 2, lines  # as declared, and with these weights


def test_a_first_token_that_one_side_has_twice(family: Any, model: Decoder) -> None:
    rolled = family.roll()
    twice = [prompt[:1] + prompt for prompt in rolled.prompts]
    learner = family.plain(rolled, prompts=twice)
    found = asked(doctor_strangers.dump(rolled, learner), model)
    is_decided(found, CauseKind.PROMPT, "learner", prompt=Fed.FIRST_TWICE)


def test_a_soft_cap_or_a_temperature(made: dict[str, Any], family: Any, model: Decoder) -> None:
    rolled = family.roll()

    def capped(z: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return doctor_strangers.plain(15 * torch.tanh(z / 15), tokens, before)

    dumped = doctor_strangers.dump(rolled, family.scores(rolled, {"": capped})[""])
    is_decided(asked(dumped, model), CauseKind.SOFT_CAP, "learner", cap=15.0)


def test_samples_of_a_cut_law_are_seen_though_log_probs_agree(made: dict[str, Any], model: Decoder) -> None:
    found = asked(made[DRAWN].sequences, model)
    assert (found.verdict, found.basis) == (Verdict.FAULT, Basis.SAMPLES), found.headline
    assert asked(made["healthy"].sequences, model).verdict is Verdict.HEALTHY


def test_noise_decides_nothing(made: dict[str, Any], model: Decoder) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for s in made["healthy"].sequences:
        odds = s.learner_logp - np.log(-np.expm1(s.learner_logp)) + draw.normal(0, 0.5, len(s.mask))
        rows.append(replace(s, learner_logp=-np.logaddexp(0, -odds)))
    found = asked(rows, model)
    assert (found.basis, found.side) == (Basis.SIDE, "learner"), found.headline
