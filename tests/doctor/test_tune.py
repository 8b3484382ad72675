"""The search for what may be fp8: against all sets in turn, in the recipe's own words, and on the command line."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.live import sampled
from mantissa.doctor.sides import Scores, Side
from mantissa.doctor.substitution import SERVING
from mantissa.doctor.tune import check, exclude_patterns, groups, tune
from mantissa.kernels import resolve
from mantissa.precision import Fp8Policy, PrecisionPolicy
from mantissa.rollout.vllm.worker import check_layers, quantization_config

POLICY = made.model()
FULL = 0.055  # about seq_std of everything in fp8


@pytest.fixture(scope="module")
def scores() -> Scores:
    return Scores(POLICY, made.texts(24))


def seq_std(scores: Scores, taken: set[str], rows: slice) -> float:
    """The figure from its words: each sequence by itself."""
    exclude = tuple(name for name in POLICY.projections if name not in taken and "layers" in name)
    whole = scores(Side("bf16")) - scores(Side("fp8", exclude=exclude))
    means = [whole[scores.of_sequence == b].mean() for b in range(len(scores.sequences))][rows]
    return float(np.std(means))


@pytest.mark.parametrize("budget", [0.01, pytest.param(0.03, marks=pytest.mark.variants)])
def test_the_set_keeps_the_budget_and_one_more_group_would_not(scores: Scores, budget: float) -> None:
    found = tune(scores, budget=budget, base="bf16", blocks=2)
    best, *others = found.rows
    taken = {name for group in best.taken for name in group.projections}
    assert best.chosen <= budget
    assert best.chosen == pytest.approx(seq_std(scores, taken, slice(0, None, 2)), rel=1e-6)
    assert best.measured.value == pytest.approx(seq_std(scores, taken, slice(1, None, 2)), rel=1e-6)
    assert best.measured.low < best.measured.value < best.measured.high
    assert best.within == (best.measured.value <= budget)
    alone = {group: max(mean - found.floor, 0.0) / group.parameters for group, mean in found.sensitivity.items()}
    order = sorted(alone, key=lambda group: (alone[group], found.sensitivity[group]))
    assert list(best.taken) == order[: len(best.taken)]
    more = {name for group in order[: len(best.taken) + 1] for name in group.projections}
    assert seq_std(scores, more, slice(0, None, 2)) > budget
    assert best.share >= max(row.share for row in others[:2])
    everything, nothing = others[2:]
    assert (everything.share, nothing.share) == (1.0, 0.0)
    engine = scores(Side("bf16")) - scores(Side("bf16", habits=frozenset(SERVING.items())))
    even = np.isin(scores.of_sequence, range(0, 24, 2))
    assert found.floor == pytest.approx(np.square(engine[even]).mean())
    assert budget < everything.chosen
    assert nothing.measured.value == pytest.approx(
        np.std([engine[scores.of_sequence == b].mean() for b in range(1, 24, 2)])
    )
    check(found, POLICY.projections)


def test_a_budget_for_everything_and_one_for_nothing(scores: Scores) -> None:
    everything, nothing = (tune(scores, budget=budget, base="bf16", blocks=1, figure="k3") for budget in (5.0, 1e-9))
    assert everything.rows[0].share == 1.0
    assert everything.exclude == ()
    assert everything.recipe() == {"precision": {"train": "bf16", "rollout": "fp8", "fp8": {"base": "bf16"}}}
    assert everything.vllm()["ignored_layers"] == ["lm_head"]
    assert nothing.rows[0].taken == ()
    assert nothing.recipe() == {"precision": {"train": "bf16", "rollout": "bf16"}}
    assert nothing.verl() == ["actor_rollout_ref.rollout.dtype=bfloat16"]
    for found in (everything, nothing):
        check(found, POLICY.projections)


@pytest.mark.parametrize("figure", ["seq_std", "k3"])
def test_the_learners_gap_is_the_rollouts_turned_round(scores: Scores, figure: Any) -> None:
    rollout, learner = (tune(scores, budget=5.0, base="bf16", blocks=1, figure=figure, role=role)
                        for role in ("rollout", "learner"))  # fmt: skip
    d = (scores(Side("fp8")) - scores(Side("bf16")))[np.isin(scores.of_sequence, range(1, 24, 2))]
    value = learner.rows[0].measured.value
    assert value == (pytest.approx((np.expm1(d) - d).mean()) if figure == "k3" else rollout.rows[0].measured.value)
    assert (value == rollout.rows[0].measured.value) == (figure == "seq_std")
    assert learner.rows[0].saved == 0.0
    assert learner.recipe() == {"precision": {"train": "fp8", "rollout": "bf16", "fp8": {"base": "bf16"}}}
    assert learner.verl() == ["actor_rollout_ref.rollout.dtype=bfloat16"]


def test_a_groups_bytes_are_counted_against_all_that_a_step_reads(scores: Scores) -> None:
    every = groups(POLICY, 2)
    weights = dict(POLICY.named_parameters())
    assert sum(group.parameters for group in every) == sum(
        weights[f"{name}.weight"].numel() for name in POLICY.projections if "layers" in name
    )
    read = 2 * sum(weight.numel() for name, weight in weights.items() if name != "model.embed_tokens.weight")
    full = tune(scores, budget=5.0, blocks=1).rows[0]
    assert full.saved == pytest.approx(sum(group.parameters for group in every) / read)


def test_a_group_is_one_product_of_an_engine() -> None:
    assert [group.kind for group in groups(POLICY, 1)] == ["qkv", "o", "gate_up", "down"]
    inside = {name.split("layers.1.")[1] for name in groups(POLICY, 2)[4].projections}
    assert inside == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}


def test_every_set_of_groups_is_said_exactly_by_its_patterns() -> None:
    every = groups(POLICY, 2)
    for count in range(1, len(every) + 1):
        for taken in itertools.combinations(every, count):
            policy = Fp8Policy(exclude=exclude_patterns(taken, every))
            names = {name for group in taken for name in group.projections}
            assert {name for name in POLICY.projections if policy.quantizes(name)} == names
    assert exclude_patterns(every[4:], every) == ("layers.0",)
    assert exclude_patterns([g for g in every if g.kind != "down"], every) == ("down_proj",)


def test_what_is_said_to_vllm_is_what_our_own_sync_says(scores: Scores) -> None:
    found = tune(scores, budget=0.02, base="bf16", blocks=2)
    policy = Fp8Policy(exclude=found.exclude)
    ours = quantization_config(POLICY.config, policy)
    theirs = found.vllm()
    assert set(theirs.pop("ignored_layers")) == set(ours.pop("modules_to_not_convert"))
    assert theirs == ours
    with pytest.raises(MantissaError, match="whole blocks"):  # and not that parts of one product are apart
        check_layers(POLICY.config, policy)
    assert resolve(PrecisionPolicy.parse(found.recipe()["precision"]), "cpu").rollout.fp8 == policy
    said = found.verl()[-1]
    assert "ignored_layers:[" in said
    assert all(name in said for name in found.kept())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.0}, "above 0"),
        ({"budget": float("nan")}, "above 0"),
        ({"budget": 1e9}, "at most 20"),
        ({"budget": 0.1, "blocks": 3}, "expected 1 to 2"),
        ({"budget": 0.1, "blocks": 0}, "expected 1 to 2"),
    ],
)
def test_what_cannot_be_tuned_is_refused(scores: Scores, options: Any, said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        tune(scores, **options)


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(MantissaError, match="expected 8 or more"):
        tune(Scores(POLICY, made.texts(7)), budget=1.0)


def test_sampled_sequences_hold_the_engines_log_probs() -> None:
    found = sampled(POLICY, [[1, 2, 3], [4, 5]], format="fp32", max_tokens=5, seed=3)
    assert [len(each.tokens) - each.prompt_length for each in found] == [5, 5]
    scores = Scores(POLICY, found)
    assert scores(Side("fp32")) == pytest.approx(scores.rollout, abs=1e-5)
