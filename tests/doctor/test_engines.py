"""What engines do to one side is named: fillers, words ruled out, places that move, weights that change on the way.

Dumps of transformers' GPT-2, whose rollout and learner are forwards of it; nothing of them is computed by the package.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dumps
from mantissa.doctor.diagnosis import Basis, Diagnosis, Open, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.evidence import without
from mantissa.doctor.examine import examine
from mantissa.doctor.signatures import SIGNATURES
from mantissa.doctor.words import first_line

WORDS, LENGTH, ROWS = 120, 30, 48
END = 7
Array = np.ndarray
Law = Callable[[torch.Tensor, int], torch.Tensor]


class Policy:
    """A GPT-2 of 24 features, as sure of some words as a trained one; the rollout is rounded to bf16 at the logits."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(11)
        shape = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "initializer_range": 0.3}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, tie_word_embeddings=False, **shape)).eval()
        with torch.no_grad():
            probe = self.model(torch.arange(40).view(2, 20)).logits
            self.model.lm_head.weight *= 2.0 / probe.std()
            self.model.transformer.wpe.weight *= 0.05  # a trained one says nearly the same one place further
        draw = torch.Generator().manual_seed(2)
        prompts = torch.randint(10, WORDS, (ROWS // 2, 8), generator=draw)
        self.prompts = prompts.repeat_interleave(2, 0)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(ids).logits.float()

    def rollout(self, law: Law = lambda z, at: z, seed: int = 0) -> tuple[torch.Tensor, Array]:
        """Tokens [ROWS, LENGTH] and their log-probs under ``law``."""
        draw, ids, found = torch.Generator().manual_seed(seed), self.prompts, []
        for at in range(LENGTH):
            z = law(self.logits(ids)[:, -1] + 0.02 * torch.randn(ROWS, WORDS, generator=draw), at)
            logp = z.log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=draw)
            ids = torch.cat([ids, token], 1)
            found.append(logp.gather(1, token))
        return ids[:, 8:], torch.cat(found, 1).double().numpy()

    def learner(self, tokens: torch.Tensor) -> Array:
        ids = torch.cat([self.prompts, tokens], 1)
        logp = self.logits(ids)[:, 7:-1].log_softmax(-1)
        return logp.gather(2, tokens[:, :, None])[:, :, 0].double().numpy()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy()


@pytest.fixture(scope="module")
def healthy(policy: Policy) -> list[Scored]:
    tokens, x = policy.rollout()
    return scored(policy, tokens, x, policy.learner(tokens))


def scored(policy: Policy, tokens: torch.Tensor, x: Array, y: Array) -> list[Scored]:
    """Each sequence ends at the end token, and after 16 tokens or more."""
    made = []
    for row, ids in enumerate(tokens.tolist()):
        n = next((k + 1 for k, token in enumerate(ids) if token == END and k >= 15), LENGTH - row % 5)
        whole = np.array([*policy.prompts[row].tolist(), *ids[:n]])
        made.append(Scored(whole, 8, x[row, :n], y[row, :n], np.ones(n, bool), group=row // 2))
    return made


def asked(sequences: list[Scored], **settings: Any) -> Diagnosis:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return examine(dumps.dump_of(sequences, **({"rollout_format": "bf16", "learner_format": "bf16"} | settings)))


def swapped(sequences: list[Scored]) -> list[Scored]:
    return [dataclasses.replace(s, rollout_logp=s.learner_logp, learner_logp=s.rollout_logp) for s in sequences]


def named(found: Diagnosis) -> str:
    return found.fault.name if found.fault is not None else found.verdict.name


def test_the_healthy_one_is_healthy(healthy: list[Scored]) -> None:
    assert asked(healthy).verdict is Verdict.HEALTHY


# what stands in place of a log-prob


def filled(sequences: list[Scored], value: float, share: float = 0.04, both: bool = False) -> tuple[list[Scored], int]:
    draw, made, count = np.random.default_rng(4), [], 0
    for each in sequences:
        at = draw.random(len(each.mask)) < share
        count += int(at.sum())
        x, y = (np.where(at & put, value, side)
                for side, put in ((each.rollout_logp, both), (each.learner_logp, True)))  # fmt: skip
        made.append(dataclasses.replace(each, rollout_logp=x, learner_logp=y))
    return made, count


FILLERS = [-9999.0, -1e9, -100.0, -50.0, float(np.log(np.float32(1e-12))), float(np.finfo(np.float32).min), -1e38]


@pytest.mark.parametrize("value", FILLERS)
@pytest.mark.parametrize("side", ["rollout", "learner"])
def test_a_filler_is_named_and_the_rest_judged_without_it(value: float, side: str, healthy: list[Scored]) -> None:
    rows, count = filled(healthy, value)
    found = asked(rows if side == "learner" else swapped(rows))
    assert named(found) == "unscored", found.headline
    assert found.verdict is Verdict.FAULT
    (one,) = found.fillers
    assert (one.side, one.low, one.high, one.tokens) == (side, value, value, count)
    first = rows[one.sequence]
    assert first.learner_logp[one.position] == value
    assert (first.learner_logp[: one.position] != value).all()
    assert f"the {side} has {value:g} at {count} tokens" in found.headline
    assert found.figures["tokens"] == sum(len(s.mask) for s in rows) - count
    assert found.figures["u_rms"] < 0.16
    assert "size of u of the other tokens" in " ".join(found.remarks)
    assert "expert" not in found.headline + first_line(found)


def test_few_fillers_and_last_ones_and_those_of_both_sides(healthy: list[Scored]) -> None:
    last = [dataclasses.replace(s, rollout_logp=np.append(s.rollout_logp[:-1], -9999.0)) for s in healthy]
    assert named(asked(last)) == "end_token"
    two = [s if n > 1 else dataclasses.replace(s, rollout_logp=np.append(-1e9, s.rollout_logp[1:]))
           for n, s in enumerate(healthy)]  # fmt: skip
    assert named(asked(two)) == "unscored"
    neither = asked(filled(healthy, -9999.0, both=True)[0])
    assert neither.verdict is Verdict.HEALTHY
    assert "not compared: the rollout has -9999" in " ".join(neither.remarks)


def test_a_second_fault_is_seen_beside_fillers(healthy: list[Scored]) -> None:
    rows = [dataclasses.replace(s, rollout_logp=s.rollout_logp / np.log(2)) for s in healthy]
    found = asked(filled(rows, -9999.0)[0])
    assert [each and each.name for each in (found.fault, found.second)] == ["unscored", "units"]


def test_what_a_softmax_gives_is_no_filler(healthy: list[Scored]) -> None:
    """A token that a context draws again has one value each time, and a coarse grid has many of one value."""
    again = [dataclasses.replace(s, group=n) for n, s in enumerate(healthy) for _ in range(8)]
    far = [dataclasses.replace(s, learner_logp=s.learner_logp * 4) for s in again]
    for rows in (again, far):
        assert not asked(rows).fillers
    coarse = [dataclasses.replace(s, learner_logp=np.round(np.roll(s.learner_logp, 1) * 6, 0)) for s in healthy]
    assert not asked(coarse).fillers


@pytest.mark.parametrize("seed", range(6))
def test_no_finite_number_makes_numpy_warn(seed: int, healthy: list[Scored]) -> None:
    draw, made = np.random.default_rng(seed), []
    for each in healthy:
        x, y = each.rollout_logp.copy(), each.learner_logp.copy()
        for side in (x, y):
            at = draw.random(len(side)) < (0.02, 0.5, 1.0)[seed % 3]
            side[at] = draw.choice((-1.0, 1.0) if seed > 2 else (-1.0,), at.sum()) * 10.0 ** draw.uniform(-40, 300)
        made.append(dataclasses.replace(each, rollout_logp=x, learner_logp=y))
    assert asked(made).verdict is not Verdict.HEALTHY


def test_the_model_scores_no_filler(healthy: list[Scored]) -> None:
    rows, count = filled(healthy, -9999.0)
    left = without(dumps.dump_of(rows))
    assert sum(int(np.isnan(s.learner_logp).sum()) for s in left.sequences) == count
    assert min(float(np.nanmin(s.learner_logp)) for s in left.sequences) > -100


# laws of one side


def ruled(policy: Policy, law: Law, seed: int = 0) -> list[Scored]:
    tokens, x = policy.rollout(law, seed)
    return scored(policy, tokens, x, policy.learner(tokens))


def banned(ids: list[int]) -> Law:
    return lambda z, at: z.index_fill(1, torch.tensor(ids), -torch.inf)


def grammar(z: torch.Tensor, at: int) -> torch.Tensor:
    allowed = torch.arange(at % 4, WORDS, 2)
    return z if at % 5 else torch.full_like(z, -torch.inf).index_copy(1, allowed, z[:, allowed])


LAWS: dict[str, Law] = {
    "five words": banned([20, 33, 46, 71, 99]),
    "allowed": banned([k for k in range(WORDS) if k % 3 == 0]),
    "grammar": grammar,
    "a bias of -100": lambda z, at: z.index_add(1, torch.arange(40, 52), torch.full((len(z), 12), -100.0)),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("other", [False, True])
def test_words_that_one_side_rules_out_are_no_other_weights(name: str, other: bool, policy: Policy) -> None:
    rows = ruled(policy, LAWS[name])
    found = asked(swapped(rows) if other else rows)
    assert named(found) == "support", found.headline
    assert "weights" not in (found.fault.also if found.fault else ())
    assert "same_words" in found.remedies
    d = np.concatenate([s.learner_logp - s.rollout_logp for s in rows])
    assert (d[np.abs(d) > 0.3] < 0).all()  # what the name says: no error of weights has one sign alone


@pytest.mark.parametrize("least", [6, 12])
def test_an_end_that_may_not_come_yet(least: int, policy: Policy) -> None:
    likely = lambda z: z.index_add(1, torch.tensor([END]), torch.full((len(z), 1), 3.0))  # noqa: E731
    kept = policy.logits
    try:
        policy.logits = lambda ids: likely(kept(ids).flatten(0, 1)).view(*ids.shape, WORDS)  # type: ignore[method-assign]
        rows = ruled(policy, lambda z, at: banned([END])(z, at) if at < least else z)
    finally:
        policy.logits = kept  # type: ignore[method-assign]
    found = asked(rows)
    assert named(found) == "min_tokens", found.headline
    assert f"of the first {least} tokens" in found.headline


@pytest.mark.parametrize("by", [4.0, -2.0])
def test_a_bias_on_some_words(by: float, policy: Policy) -> None:
    drawn = policy.rollout()[0].flatten().bincount(minlength=WORDS).argsort(descending=True).tolist()
    ids = drawn[8:9] if by > 0 else drawn[:6]
    rows = ruled(policy, lambda z, at: z.index_add(1, torch.tensor(ids), torch.full((len(z), len(ids)), by)))
    found = asked(rows)
    assert named(found) == "logit_bias", found.headline
    assert any(str(each) in found.headline for each in ids)


def test_other_weights_are_not_one_sided(policy: Policy) -> None:
    tokens, x = policy.rollout()
    draw = torch.Generator().manual_seed(5)
    kept = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    try:
        with torch.no_grad():
            for p in policy.model.parameters():
                p += 0.15 * p.std(correction=0) * torch.randn(p.shape, generator=draw)
        rows = scored(policy, tokens, x, policy.learner(tokens))
    finally:
        policy.model.load_state_dict(kept, strict=False)
    found = asked(rows)
    assert found.verdict in (Verdict.FAULT, Verdict.LARGE)
    assert named(found) in ("weights", "too_large"), found.headline


# what changes within a sequence


@pytest.mark.parametrize("by", [1, -1])
def test_tokens_that_were_encoded_again(by: int, policy: Policy) -> None:
    tokens, x = policy.rollout()
    draw, again = np.random.default_rng(8), tokens.clone()
    odd = draw.permutation(ROWS)[:15]
    for row in odd:
        at, ids = int(draw.integers(3, 10)), tokens[row].tolist()
        new = draw.integers(10, WORDS, 2).tolist()
        other = ids[:at] + (new + ids[at + 1 :] if by > 0 else new[:1] + ids[at + 2 :] + [END])
        again[row] = torch.tensor(other[:LENGTH])
    found = asked(scored(policy, tokens, x, policy.learner(again)))
    assert named(found) == "moved_from", found.headline
    assert f"moved by {by:+d}" in found.headline
    assert "same_tokens" in found.remedies
    assert named(asked(swapped(scored(policy, tokens, x, policy.learner(again))))) == "moved_from"


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("size", [0.05, 0.1])
def test_weights_that_change_while_a_sequence_is_sampled(newer: bool, size: float, policy: Policy) -> None:
    tokens, x = policy.rollout()
    y, draw = policy.learner(tokens), torch.Generator().manual_seed(5)
    kept = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    try:
        with torch.no_grad():
            for p in policy.model.parameters():
                p += size * p.std(correction=0) * torch.randn(p.shape, generator=draw)
        other = policy.learner(tokens)
    finally:
        policy.model.load_state_dict(kept, strict=False)
    at = torch.randint(2, LENGTH, (ROWS, 1), generator=draw).numpy()
    before = np.arange(LENGTH) < at
    found = asked(scored(policy, tokens, x, np.where(before == newer, other, y)))
    assert named(found) == "mid_sequence", found.headline
    assert found.verdict is Verdict.FAULT
    assert found.remedies[0] == "whole_sequences"


# experts


def test_experts_are_spoken_of_where_something_says_that_there_are_some(healthy: list[Scored]) -> None:
    draw = np.random.default_rng(1)
    rows = [dataclasses.replace(s, learner_logp=np.minimum(
        s.learner_logp + 3.0 * (draw.random(len(s.mask)) < 0.02) * draw.choice((-1, 1), len(s.mask)), -1e-3))
        for s in healthy]  # fmt: skip
    silent, dense, mixture = (asked(rows, experts=said) for said in (None, False, True))
    for found in (silent, dense):
        assert "expert" not in first_line(found) + found.headline + " ".join(found.remarks), found.headline
        assert "expert" not in " ".join(each.said + each.name for each in found.findings)
        assert not {"replay_routing", "fp32_router"} & set(found.remedies)
    assert silent.verdict is Verdict.UNKNOWN
    assert Open.EXPERTS in [each.kind for each in silent.unknown]
    assert dense.verdict in (Verdict.FAULT, Verdict.LARGE)
    assert not any("expert" in each.said for each in dense.unknown)
    assert mixture.verdict is Verdict.HEALTHY
    assert mixture.basis is Basis.ROUTERS


# many tests at once


def test_the_level_is_shared_by_all_tests(monkeypatch: pytest.MonkeyPatch, healthy: list[Scored]) -> None:
    """The smallest p of n tests is found below 0.05 / n and not above it; then all below 0.05 are named."""
    from mantissa.doctor.evidence import Evidence
    from mantissa.doctor.signatures import findings

    e = Evidence.of(dumps.dump_of(healthy), 0.16)
    tried = len(findings(e))
    assert tried == len(SIGNATURES) - 1  # one of two names of the same test

    def found(smallest: float) -> set[str]:
        with monkeypatch.context() as patch:
            for number, name in enumerate(list(SIGNATURES)):
                patch.setitem(SIGNATURES, name, _given(name, smallest if number == 3 else 0.04 if number == 5 else 0.9))
            return {each.name for each in findings(e) if each.found}

    names = list(SIGNATURES)
    assert found(1.02 * 0.05 / tried) == set()
    assert found(0.98 * 0.05 / tried) == {names[3], names[5]}
    assert found(0.04) == set()  # below the level by itself, and one of many


@pytest.mark.parametrize("tests", [1, 7, 31])
def test_what_is_detectable_is_so_at_the_shared_level(tests: int) -> None:
    """Found with probability 0.95 by the 1 - 0.05 / tests quantile of Student's t (scipy's, of 19 degrees)."""
    from scipy import stats

    from mantissa.doctor import sample

    values, unit = np.random.default_rng(2).normal(0.4, 1, 20), np.arange(20)
    sums = sample.sums_by(unit, values, np.ones(20))
    found = sample.tested(sums, lambda s: s[..., 0] / s[..., 1], 0.1, tests)
    reach = stats.t.ppf(1 - 0.05 / tests, 19) + stats.t.ppf(0.95, 19)
    assert found.detectable == pytest.approx(0.1 + reach * stats.sem(values))
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0.1, alternative="greater").pvalue)  # before it


def _given(name: str, p: float) -> Any:
    from mantissa.doctor.diagnosis import Finding

    return lambda e, tests: Finding(name, False, p, 1.0, "", None, "")
