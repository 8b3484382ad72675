"""Each mistake is called by its name, a healthy gap by none, and a small sample is said to be small."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import dumps
import mantissa.doctor
from mantissa.doctor import facts, sample
from mantissa.doctor.diagnosis import Basis, Open, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.examine import examine, remedies_for
from mantissa.doctor.signatures import SIGNATURES

HEALTHY = dumps.healthy()
DRAW = np.random.default_rng(3)


def changed(both: Callable[[Scored], tuple[np.ndarray, np.ndarray]], sequences: list[Scored] = HEALTHY) -> list[Scored]:
    return [dataclasses.replace(s, rollout_logp=x, learner_logp=y) for s in sequences for x, y in [both(s)]]


def name_of(sequences: list[Scored], **settings: object) -> str:
    diagnosis = examine(dumps.dump_of(sequences, **settings))
    return diagnosis.fault.name if diagnosis.fault else diagnosis.verdict.name


def at(place: int, by: float) -> Callable[[Scored], tuple[np.ndarray, np.ndarray]]:
    def both(s: Scored) -> tuple[np.ndarray, np.ndarray]:
        learner = s.learner_logp.copy()
        learner[place] += by
        return s.rollout_logp, learner

    return both


def tempered(s: Scored) -> tuple[np.ndarray, np.ndarray]:
    """A law of three words at another temperature: log-odds of the token against the rest, doubled."""
    x, y = s.rollout_logp, s.learner_logp
    return x, -np.logaddexp(0, -1.4 * (y - np.log(-np.expm1(y))))


def moved(logp: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The log-prob with its log-odds moved."""
    return -np.logaddexp(0, -(logp - np.log(-np.expm1(logp)) - by))


def noisy(size: float) -> Callable[[Scored], tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(5)
    return lambda s: (s.rollout_logp, moved(s.learner_logp, draw.normal(0, size, len(s.mask))))


SHIFT = np.random.default_rng(6).normal(0, 0.1, 64)


def fading(logp: np.ndarray) -> np.ndarray:
    """Errors of the logit, one a context, that are largest where the response begins."""
    return 1.5 * np.sin(97 * logp) * np.exp(-np.arange(len(logp)) / 3)


def shuffled() -> list[Scored]:
    rows = [s.learner_logp for s in HEALTHY]
    stream = iter(rows[7:] + rows[:7])
    return changed(lambda s: (s.rollout_logp, next(stream)))


MISTAKES: dict[str, Callable[[], list[Scored]]] = {
    "shift": lambda: changed(lambda s: (s.rollout_logp, np.roll(s.learner_logp, -1))),
    "rows": shuffled,
    "temperature": lambda: changed(tempered),
    "support": lambda: changed(lambda s: (s.rollout_logp, s.learner_logp - DRAW.uniform(0, 0.5, len(s.mask)))),
    "end_token": lambda: changed(at(-1, -4.0)),
    "first_token": lambda: changed(at(0, -4.0)),
    "unscored": lambda: changed(lambda s: (s.rollout_logp, np.where(np.arange(16) % 5 == 2, 0.0, s.learner_logp))),
    "units": lambda: changed(lambda s: (s.rollout_logp / np.log(2), s.learner_logp)),
    "not_logprobs": lambda: changed(lambda s: (np.exp(s.rollout_logp), s.learner_logp)),
    "coarse_logprobs": lambda: changed(
        lambda s: (np.round(s.rollout_logp, 3), s.learner_logp), dumps.healthy(size=1e-4)
    ),
    "nondeterministic": lambda: changed(noisy(0.6)),
    "weights": lambda: changed(lambda s: (s.rollout_logp, moved(s.learner_logp, SHIFT[s.tokens[s.prompt_length :]]))),
    "prompt": lambda: changed(lambda s: (s.rollout_logp, moved(s.learner_logp, fading(s.rollout_logp)))),
    "cut_off": lambda: changed(lambda s: (s.rollout_logp, np.where(s.rollout_logp < -3, np.nan, s.learner_logp))),
    "after_sync": lambda: [
        dataclasses.replace(w if s.group % 2 else s, rollout_version=s.group % 2)  # type: ignore[operator]
        for s, w in zip(HEALTHY, changed(noisy(1.5)), strict=True)
    ],
    "stale": lambda: [
        dataclasses.replace(s, rollout_version=4 - s.group % 2, learner_version=4)  # type: ignore[operator]
        for n, s in enumerate([*HEALTHY, *dumps.healthy(size=0.6, seed=8)])
        if s.group % 2 == n // len(HEALTHY)  # type: ignore[operator]
    ],
    "some_sequences": lambda: [
        w if n % 8 == 0 else s for n, (s, w) in enumerate(zip(HEALTHY, changed(noisy(1.5)), strict=True))
    ],
    "position": lambda: changed(
        lambda s: (s.rollout_logp, moved(s.learner_logp, 0.02 * np.arange(32) * np.sin(97 * s.rollout_logp))),
        dumps.healthy(length=32),
    ),
    "too_large": lambda: dumps.healthy(size=0.45),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_called_by_its_name(name: str) -> None:
    diagnosis = examine(dumps.dump_of(MISTAKES[name](), rollout_format="bf16", learner_format="bf16"))
    assert diagnosis.fault is not None, diagnosis.headline
    assert diagnosis.fault.name == name, diagnosis.headline
    assert diagnosis.verdict is (Verdict.LARGE if name == "too_large" else Verdict.FAULT)
    assert remedies_for(diagnosis)


def test_logits_in_a_half_are_seen_by_their_grid() -> None:
    """z on the bf16 grid on one side; the other computes the same in fp32."""
    import torch

    draw = np.random.default_rng(0)
    made = []
    for group in range(12):
        z = draw.normal(0, 4, 40) + 6
        half = torch.tensor(z).bfloat16().double().numpy()
        x, y = (np.float32(each - np.logaddexp.reduce(each)).astype(float) for each in (half, z))
        for _ in range(6):
            token = int(draw.choice(40, p=np.exp(y) / np.exp(y).sum()))
            made.append(Scored(np.array([1, token]), 1, x[[token]], y[[token]], np.ones(1, bool), group=group))
    assert name_of(made, rollout_format="fp32", learner_format="fp32") == "half_logits"
    small = examine(dumps.dump_of(made, rollout_format="bf16"))  # usual in bf16, so it is a remark there
    assert small.verdict is Verdict.HEALTHY
    assert "logits are in a half" in small.remarks[0]


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.003, 0.05, 0.1])
def test_a_healthy_gap_is_called_healthy(size: float) -> None:
    for seed in range(3):
        assert name_of(dumps.healthy(size=size, seed=seed), rollout_format="bf16") == "HEALTHY"


def test_the_bound_is_that_of_the_formats() -> None:
    gap = dumps.healthy(size=0.07)
    assert name_of(gap, rollout_format="bf16", learner_format="fp16") == "HEALTHY"
    assert name_of(gap, rollout_format="float16") == "too_large"
    assert name_of(gap) == "HEALTHY"
    assert Open.FORMAT in [each.kind for each in examine(dumps.dump_of(gap)).unknown]
    assert name_of(dumps.healthy(size=0.45), rollout_format="fp8_e4m3", learner_format="bf16") == "HEALTHY"


def test_a_small_sample_is_said_to_be_small() -> None:
    diagnosis = examine(dumps.dump_of(HEALTHY[:10], rollout_format="bf16"))
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert diagnosis.basis is Basis.FEW
    assert (
        examine(dumps.dump_of([dataclasses.replace(s, mask=np.zeros(16, bool)) for s in HEALTHY])).verdict
        is Verdict.UNKNOWN
    )


def test_weights_that_are_known_to_be_older_are_no_fault() -> None:
    """Training that samples ahead: every sequence is one update behind, a little, and the dump says so."""
    formats = {"rollout_format": "bf16", "learner_format": "bf16"}
    moved_ = MISTAKES["weights"]()
    assert name_of(moved_, **formats) == "weights"
    known = [dataclasses.replace(s, rollout_version=4, learner_version=5) for s in moved_]
    assert name_of(known, **formats) == "HEALTHY"


def test_a_healthy_verdict_says_what_it_would_have_seen() -> None:
    said = examine(dumps.dump_of(HEALTHY, rollout_format="bf16")).headline
    found = re.search(r"a fault of ([\d.]+) throughout or ([\d.]+) in a quarter of the sequences would", said)
    assert found is not None, said
    throughout, quarter = map(float, found.groups())
    assert throughout < 0.4
    odd = changed(noisy(1.5 * quarter))  # of so much beyond a law's own unevenness
    mixed = [o if n % 4 == 1 else s for n, (s, o) in enumerate(zip(HEALTHY, odd, strict=True))]
    assert name_of(mixed, rollout_format="bf16") == "some_sequences"


def test_the_stated_power_holds() -> None:
    """At a size of the stated detectable one, 95% of samples show it; at the bound, at most the level."""
    detectable = next(f for f in examine(dumps.dump_of(HEALTHY)).findings if f.name == "too_large").detectable
    assert detectable is not None
    assert 0.16 < detectable < 0.9
    draws = [dumps.healthy(prompts=24, samples=2, length=8, size=detectable, seed=seed) for seed in range(10)]
    assert sum(name_of(each, rollout_format="bf16") != "HEALTHY" for each in draws) >= 9


def test_the_jackknife_of_a_mean_is_students_t() -> None:
    values, unit = np.random.default_rng(1).normal(0.3, 1, 40), np.arange(40)
    found = sample.tested(sample.sums_by(unit, values, np.ones(40)), lambda s: s[..., 0] / s[..., 1], 0.1, 1)
    expected = stats.ttest_1samp(values, 0.1, alternative="greater")
    assert found.p == pytest.approx(expected.pvalue)
    assert found.value == pytest.approx(values.mean())
    reach = (stats.t.ppf(0.95, 39) * 2) * stats.sem(values)
    assert found.detectable == pytest.approx(0.1 + reach)


def test_false_alarms_stay_within_the_level() -> None:
    """Units of correlated tokens at exactly the bound: the test of the mean rejects 5%, tokens as units far more."""
    draw, clustered = np.random.default_rng(2), 0
    for _ in range(400):
        values = np.repeat(draw.normal(0, 1, 20), 10) + draw.normal(0, 0.1, 200)
        unit = np.repeat(np.arange(20), 10)
        clustered += (
            sample.tested(sample.sums_by(unit, values, np.ones(200)), lambda s: s[..., 0] / s[..., 1], 0.0, 1).p < 0.05
        )
    assert clustered < 0.08 * 400


def test_whole_prompts_are_the_units_where_there_are_enough() -> None:
    assert sample.tokens_of(dumps.dump_of(HEALTHY))[0].units == 24
    assert sample.tokens_of(dumps.dump_of(HEALTHY[:12]))[0].units == 12  # three prompts: sequences


def test_the_size_of_u_is_that_of_the_logits_error() -> None:
    found = {
        size: sample.Tokens.telling.func(sample.tokens_of(dumps.dump_of(dumps.healthy(size=size)))[0]).u
        for size in (0.01, 0.1)
    }  # type: ignore[attr-defined]
    for size, u in found.items():
        assert 0.5 * size < np.sqrt(np.square(u).mean()) < 1.6 * size


@pytest.mark.parametrize(("learner", "advised"), [("fp32", True), ("bf16", False), (None, False)])
def test_two_formats_are_advised_against(learner: str | None, advised: bool) -> None:
    found = examine(dumps.dump_of(HEALTHY, rollout_format="bf16", learner_format=learner))
    assert found.verdict is Verdict.HEALTHY
    assert ("one_format" in found.remedies) == advised


@pytest.mark.parametrize(
    ("size", "fmt", "first", "said"),
    [
        (0.45, "bf16", "cache_format", "fp8 makes as much"),
        (1.2, "bf16", "sync_weights", "fp8 makes up to 0.6, so it is no precision"),
        (1.2, "fp8", "sync_weights", "no precision makes as much"),
    ],
)
def test_a_gap_without_a_shape_is_advised_on_by_its_size(size: float, fmt: str, first: str, said: str) -> None:
    found = examine(dumps.dump_of(dumps.healthy(size=size), rollout_format=fmt, learner_format=fmt))
    assert found.verdict is Verdict.LARGE, found.headline
    assert found.remedies[0] == first
    assert said in found.headline
    assert len(found.remedies) == 3


def test_every_signature_has_its_words_and_every_remedy_is_known() -> None:
    table = facts.facts()
    assert set(table.faults) == set(SIGNATURES)
    used = {name for fault in table.faults.values() for name in (*fault.remedies, *fault.larger)}
    used |= {name for cause in table.causes.values() for side in ("rollout", "learner") for name in cause.helps(side)}
    assert used | {"both_sides"} == set(table.remedies)  # of sides that are equal


def test_every_bound_of_a_signature_is_read() -> None:
    """By its name in the row: what nothing reads decides nothing."""
    code = "".join(path.read_text() for path in Path(mantissa.doctor.__file__).parent.glob("*.py"))
    bounds = {name for fault in facts.facts().faults.values() for name in fault.bounds}
    assert len(bounds) > 60
    assert not {name for name in bounds if f".{name}" not in code}


def test_the_doctor_does_not_know_the_faults_it_is_tried_on() -> None:
    for path in Path(mantissa.doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not any(word in name for name in names for word in ("faults", "confusion", "strangers")), path


@pytest.mark.parametrize("words", [1, 5000])
def test_another_prompt_is_alone_only_where_other_weights_would_have_been_seen(words: int) -> None:
    """The gap fades from where responses begin, and is new at every token: no weights. With so many words that none is
    drawn twice, the numbers cannot say so."""
    draw, made = np.random.default_rng(0), []
    for each in dumps.healthy(32, 4, 32, size=0.02, seed=0):
        fades = np.exp(-np.arange(len(each.mask)) / 12) * (1 - np.exp(each.learner_logp))
        y = each.learner_logp + 0.2 * draw.normal(size=len(fades)) * fades
        tokens = np.array(each.tokens) + 1000 * draw.integers(0, words, len(each.tokens))
        made.append(dataclasses.replace(each, tokens=tokens, learner_logp=np.minimum(y, -1e-4)))
    fault = examine(dumps.dump_of(made, rollout_format="bf16", learner_format="bf16")).fault
    assert fault is not None
    assert (fault.name, fault.also) == ("prompt", () if words == 1 else ("weights",))


@pytest.mark.parametrize(("base", "one"), [(2, "rollout"), (2, "learner"), (10, "rollout"), (10, "learner")])
def test_another_base_of_logarithms_is_named(base: int, one: str) -> None:
    """By its factor, on whichever side it is: ln 2 or ln 10, or their reciprocals."""
    by = {"rollout": 1.0, "learner": 1.0} | {one: 1 / np.log(base)}
    made = changed(lambda s: (s.rollout_logp * by["rollout"], s.learner_logp * by["learner"]))
    fault = examine(dumps.dump_of(made)).fault
    assert fault is not None
    assert fault.name == "units"
    factor = re.search(r"are (\S+) times the rollout's", fault.said)
    assert factor is not None
    assert float(factor[1]) == pytest.approx(by["learner"] / by["rollout"], rel=0.01)
    assert f", as with base {base} on one side" in fault.said
