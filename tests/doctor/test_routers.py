"""A mixture of experts whose routers disagree at a few tokens is healthy where the dump says it is one, and no fault
where it does not; what is wrong throughout is named beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dumps
from mantissa.base.errors import MantissaError
from mantissa.doctor.diagnosis import Basis, Diagnosis, Open, Verdict
from mantissa.doctor.dump import Scored, Settings, routes
from mantissa.doctor.examine import examine
from mantissa.doctor.facts import usual_of
from mantissa.doctor.readers import read_dump
from mantissa.doctor.words import first_line


def flown(share: float = 0.2, size: float = 2.0, seed: int = 0) -> list[Scored]:
    """Healthy but that in ``share`` of the sequences one token flies, and what follows it is somewhat larger."""
    draw, made = np.random.default_rng(seed), []
    for each in dumps.healthy(32, 4, 32, size=0.02, seed=seed):
        y, n = each.learner_logp.copy(), len(each.mask)
        if draw.random() < share:
            start = int(draw.integers(1, n - 1))
            y[start:] += draw.normal(0, 0.05, n - start)
            y[start] -= size
        made.append(dataclasses.replace(each, learner_logp=np.minimum(y, -1e-4)))
    return made


def asked(sequences: list[Scored], experts: bool | None) -> Diagnosis:
    return examine(dumps.dump_of(sequences, rollout_format="bf16", learner_format="bf16", experts=experts))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_mixture_that_says_so_is_healthy_and_no_fault_where_it_does_not(share: float) -> None:
    for seed in range(3):
        said = asked(flown(share, seed=seed), True)
        assert said.verdict is Verdict.HEALTHY, said.headline
        assert said.basis is Basis.ROUTERS
        assert "throughout would have been seen" in said.headline
        assert "routers" in first_line(said)
        unsaid = asked(flown(share, seed=seed), None)
        assert unsaid.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN), unsaid.headline
        assert unsaid.fault is None
        far = asked(flown(share, 6.0, seed), None)
        assert far.verdict is Verdict.UNKNOWN, far.headline
        assert "expert" not in far.headline
        assert Open.EXPERTS in [each.kind for each in far.unknown]
        assert asked(flown(share, 6.0, seed), True).verdict is Verdict.HEALTHY


def test_more_tokens_may_fly_where_the_others_are_noisier() -> None:
    """A fifth of the tokens flies: twice what mixtures of quiet tokens have, and usual beside noisier ones."""
    for size, verdict in ((0.02, Verdict.UNKNOWN), (0.08, Verdict.HEALTHY)):
        draw, made = np.random.default_rng(3), []
        for each in dumps.healthy(32, 4, 32, size=size, seed=3):
            some = draw.random(len(each.mask)) < 0.2
            y = each.learner_logp + some * draw.choice((-1.0, 1.0), len(some))
            made.append(dataclasses.replace(each, learner_logp=np.minimum(y, -1e-4)))
        found = asked(made, True)
        assert found.verdict is verdict, found.headline


def test_below_temperature_1_more_is_usual() -> None:
    formats = {"rollout_format": "bf16", "learner_format": "bf16"}
    one, half, two = (usual_of(Settings(temperature=t, **formats)) for t in (None, 0.5, 2.0))
    assert (half.size, half.bound) == (2 * one.size, 2 * one.bound)
    assert two == one


def test_experts_that_the_dump_records_say_it_too() -> None:
    rows = [dataclasses.replace(each, flipped=np.abs(each.learner_logp - each.rollout_logp) > 0.5) for each in flown()]
    assert asked(rows, None).verdict is Verdict.HEALTHY


def changed(change: Callable[[Scored], np.ndarray]) -> list[Scored]:
    return [dataclasses.replace(each, learner_logp=np.minimum(change(each), 0.0)) for each in flown()]


SHIFT = np.random.default_rng(6).normal(0, 0.3, 64)
FAULTS: dict[str, Callable[[Scored], np.ndarray]] = {
    "temperature": lambda s: s.learner_logp * 1.3,
    "shift": lambda s: np.roll(s.learner_logp, -1),
    "end_token": lambda s: s.learner_logp - 4.0 * (np.arange(len(s.mask)) == len(s.mask) - 1),
    "weights": lambda s: s.learner_logp + SHIFT[s.tokens[s.prompt_length :]],
    "unscored": lambda s: np.where(np.arange(len(s.mask)) % 5 == 2, 0.0, s.learner_logp),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_throughout_is_named_in_a_mixture(name: str) -> None:
    found = asked(changed(FAULTS[name]), True)
    assert found.fault is not None, found.headline
    assert name in (found.fault.name, *found.fault.also), found.headline


def test_more_than_routers_move_is_not_healthy() -> None:
    draw = np.random.default_rng(0)
    many = changed(lambda s: s.learner_logp - 2.0 * (draw.random(len(s.mask)) < 0.2))
    found = asked(many, True)
    assert found.verdict is Verdict.UNKNOWN, found.headline  # or routers that disagree more often than any known
    assert found.fault is None
    assert found.basis is Basis.FLIGHTS
    odd = iter(range(1000))
    engine = changed(lambda s: s.learner_logp + draw.normal(0, 1.5 * (next(odd) % 4 == 0), len(s.mask)))
    assert asked(engine, True).fault is not None  # every fourth: routers know no numbers
    hashed = iter(np.random.default_rng(1).permutation(128) < 32)
    some = changed(lambda s: s.learner_logp + draw.normal(0, 1.5 * next(hashed), len(s.mask)))
    assert asked(some, True).verdict in (Verdict.UNKNOWN, Verdict.FAULT)
    first = iter(range(1000))  # a sixteenth of the sequences, throughout: fewer tokens than routers move
    few = changed(lambda s: s.learner_logp + draw.normal(0, 2.0 * (next(first) % 16 == 0), len(s.mask)))
    assert asked(few, True).verdict is not Verdict.HEALTHY


@pytest.mark.parametrize(("size", "name"), [(0.5, "some_sequences"), (3.0, "some_sequences"), (8.0, "unrelated")])
def test_a_part_of_the_sequences_is_named_in_a_dump_that_says_nothing(size: float, name: str) -> None:
    draw = np.random.default_rng(2)
    part = iter(draw.permutation(128) < 32)
    rows = [dataclasses.replace(s, learner_logp=np.minimum(s.learner_logp + draw.normal(0, size * next(part) + 1e-9,
            len(s.mask)), -1e-4)) for s in dumps.healthy(32, 4, 32, size=0.02)]  # fmt: skip
    found = asked(rows, None)
    assert found.fault is not None, found.headline
    assert found.fault.name == name, found.headline
    assert "32 of 128 sequences" in found.headline


def test_the_fact_changes_nothing_for_a_gap_without_flights() -> None:
    calm = dumps.healthy(size=0.05)
    assert asked(calm, True).headline == asked(calm, None).headline
    large = dumps.healthy(size=0.45)
    assert asked(large, True).headline == asked(large, None).headline


def test_configurations_that_show_experts() -> None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        assert routes({name: 8}) is True
        assert routes(SimpleNamespace(**{name: 8})) is True
        assert routes({"text_config": {name: 8}}) is True
    for silent in ({}, {"num_local_experts": 1}, {"num_experts": None}, SimpleNamespace(hidden_size=4), None):
        assert routes(silent) is None
    for dense in ({"num_hidden_layers": 2}, {"n_layer": 2, "num_experts": 1}, {"text_config": {"num_layers": 2}}):
        assert routes(dense) is False


def test_a_plain_row_says_it_and_nonsense_is_refused(tmp_path: Path) -> None:
    path = dumps.write_plain(tmp_path / "d.jsonl", flown(), experts=True)
    assert read_dump(path).settings.experts is True
    rows = [json.loads(line) | {"experts": "many"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(MantissaError, match="experts is str 'many'"):
        read_dump(path)


def test_the_gate_takes_the_fact_and_verls_reads_it_from_the_models_folder(tmp_path: Path) -> None:
    from mantissa.doctor.gate import Gate

    for experts, verdict in ((True, Verdict.HEALTHY), (None, Verdict.UNKNOWN)):
        watch = Gate(on_fault="stop", sequences=64, say=lambda line: None)
        rows = flown(0.3, 6.0)
        prompts = [[*each.tokens[: each.prompt_length].tolist(), int(each.group or 0)] for each in rows]
        tables = [[each.tokens[each.prompt_length :] for each in rows], [each.mask for each in rows],
                  [each.rollout_logp for each in rows], [each.learner_logp for each in rows]]  # fmt: skip
        found = watch.check(0, prompts, *map(np.array, tables), rollout_format="bf16", learner_format="bf16",
                            experts=experts)  # fmt: skip
        assert found is not None
        assert found.verdict is verdict, found.headline
        assert not watch.stop
    from mantissa.verl.gate import _model

    assert _model(None) == (None, None)
    assert _model(str(tmp_path)) == (None, None)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    assert _model(str(tmp_path)) == (True, False)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8, "final_logit_softcapping": 30.0}')
    assert _model(str(tmp_path)) == (False, True)
