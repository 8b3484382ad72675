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

from mantissa.doctor.consult import consult
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.sides import Weights
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


def headline(sequences: list[Scored], model: Decoder, versions: dict[str, Weights] | None = None,
             said: list[str] | None = None) -> str:  # fmt: skip
    dump = Dump("plain", Path("blind"), sequences, Settings(1.0, rollout_format="fp32", learner_format="fp32"))
    say = (lambda line: None) if said is None else said.append
    found = consult(dump, examine(dump), model, versions or {}, say=say).diagnosis
    assert not found.decided or first_line(found) == f"Something is wrong: {found.decided}."
    assert not found.decided or found.decided in found.headline or "is not this model" in found.decided
    return found.headline


DECIDED = {
    "BOS missing": "the prompt without its first token in the learner",
    "prompt cut in half": "the prompt without its first half in the learner",
    "responses' positions moved by 3": "positions of responses moved by +3 in the learner",
    "rope theta 100 times": "a rope_theta 100 times as large in the learner",
}
AT_FAULT = {
    "dropout left on": "or it is random (dropout: score twice)",
    "weights not synced": "are not this model's",
    "adapter on the head missing": "are not this model's",
}
DRAWN = "top-p 0.9 drawn, log-probs of the whole law"


@pytest.mark.parametrize("name", DECIDED)
def test_the_model_decides_which_cause_it_was(name: str, made: dict[str, Any], model: Decoder) -> None:
    said = headline(made[name].sequences, model)
    assert DECIDED[name] in said, said
    swapped = headline(doctor_strangers.swapped(made[name].sequences), model)
    assert DECIDED[name].replace("learner", "rollout") in swapped, swapped


@pytest.mark.parametrize("name", AT_FAULT)
def test_where_no_cause_is_known_the_side_at_fault_is(name: str, made: dict[str, Any], model: Decoder) -> None:
    said = headline(made[name].sequences, model)
    assert "a fault in the learner: the rollout's log-probs come back" in said, said
    assert AT_FAULT[name] in said, said


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
    for rows, side in ((made[name].sequences, "learner"), (doctor_strangers.swapped(made[name].sequences), "rollout")):
        lines: list[str] = []
        said = headline(rows, model, versions, lines)
        assert f"weights of older in the {side} makes 100%" in said, said
        assert sum("scoring" in line for line in lines) == 2, lines  # as declared, and with these weights


def test_a_first_token_that_one_side_has_twice(family: Any, model: Decoder) -> None:
    rolled = doctor_strangers.roll(family)
    twice = [prompt[:1] + prompt for prompt in rolled.prompts]
    learner = doctor_strangers.scores(family, rolled, {"": doctor_strangers.plain}, prompts=twice)[""]
    said = headline(doctor_strangers.dump(rolled, learner), model)
    assert "the prompt with its first token twice in the learner" in said, said


def test_a_soft_cap_or_a_temperature(made: dict[str, Any], family: Any, model: Decoder) -> None:
    rolled = doctor_strangers.roll(family)

    def capped(z: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return doctor_strangers.plain(15 * torch.tanh(z / 15), tokens, before)

    dumped = doctor_strangers.dump(rolled, doctor_strangers.scores(family, rolled, {"": capped})[""])
    assert "logits soft-capped at 15 in the learner" in headline(dumped, model)


def test_samples_of_a_cut_law_are_seen_though_log_probs_agree(made: dict[str, Any], model: Decoder) -> None:
    said = headline(made[DRAWN].sequences, model)
    assert "samples are not of their law" in said, said
    whole = headline(made["healthy"].sequences, model)
    assert whole.startswith("healthy noise"), whole


def test_noise_decides_nothing(made: dict[str, Any], model: Decoder) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for s in made["healthy"].sequences:
        odds = s.learner_logp - np.log(-np.expm1(s.learner_logp)) + draw.normal(0, 0.5, len(s.mask))
        rows.append(replace(s, learner_logp=-np.logaddexp(0, -odds)))
    assert "the rollout's log-probs come back" in (said := headline(rows, model)), said
