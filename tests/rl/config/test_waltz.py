"""WaltzRL's rewards against the formula, stage by stage, and what stands where a recipe is silent."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.rl import RunConfig, make_config
from mantissa.rl.config.waltz import WaltzConfig, feedback_config, published
from small_run import recipe

GAME: dict[str, Any] = {
    **recipe(),
    "task": {"kind": "requests"},
    "rollout": {"max_tokens": 8},
    "algorithm": {},
    "optimizer": {},
}


def configure(waltz: dict[str, Any], **others: Any) -> RunConfig:
    return make_config(GAME | others | {"waltz": waltz}, "test")


@pytest.mark.parametrize("gate", [True, False])
def test_a_feedback_earns_what_the_formula_says_in_either_stage(gate: bool) -> None:
    waltz = WaltzConfig(conversation_frozen=3, alpha=0.75, label=0.5, label_later=0.25, gamma=0.125, gate=gate)
    for direction, label, whole, step in itertools.product((-1, 0, 1), (0, 1), (0, 1), (3, 4)):
        weight = Fraction(1, 2) if step == 3 else Fraction(1, 4)
        improved = direction * label if gate else direction
        expected = Fraction(3, 4) * improved + weight * label + Fraction(1, 8) * whole
        assert waltz.feedback_reward(float(direction), bool(label), bool(whole), step) == float(expected)


def test_the_published_values_stand_where_nothing_is_given() -> None:
    config = configure({})
    waltz, algorithm = config.waltz, config.algorithm
    assert waltz is not None
    assert (waltz.rounds, waltz.alpha, waltz.gamma, waltz.label_later, waltz.gate) == (1, 0.65, 0.1, 0, True)
    assert (config.rollout.prompts, config.rollout.samples, config.optimizer.lr) == (32, 1, 5e-7)
    assert (algorithm.advantage, algorithm.loss.kind) == ("reinforce_pp", "ppo_clip")
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.2)  # type: ignore[union-attr]
    assert algorithm.kl is not None
    assert (algorithm.kl.where, algorithm.kl.coefficient) == ("reward", 0.01)
    given = published({"algorithm": {"kl": {"coefficient": 1.0}}, "optimizer": {"lr": 1.0}, "steps": 3})
    assert given["algorithm"]["kl"] == {"where": "reward", "estimator": "k1", "coefficient": 1.0}
    assert (given["optimizer"], given["steps"]) == ({"lr": 1.0}, 3)


def test_the_feedback_policy_has_the_recipes_settings_but_for_its_own() -> None:
    other = {"precision": "bf16", "loss_scaling": None, "rollout": {"max_tokens": 40}, "optimizer": {"lr": 1e-3}}
    config = configure({"feedback": other}, loss_scaling={"initial": 8.0})
    mine = feedback_config(config)
    assert (mine.precision.train, mine.rollout.max_tokens, mine.optimizer.lr) == ("bf16", 40, 1e-3)
    assert (mine.rollout.prompts, mine.model, mine.task) == (32, config.model, config.task)
    assert (mine.waltz, mine.loss_scaling, mine.evaluation) == (None, None, None)
    assert mine.seed != config.seed  # its draws are its own


@pytest.mark.parametrize(
    ("waltz", "others", "said"),
    [
        ({"feedback": {"steps": 3}}, {}, "waltz: feedback.steps is no setting of one policy"),
        ({"feedback": {"rollout": {"prompts": 3}}}, {}, "waltz: feedback.rollout.prompts is the game's own"),
        ({"feedback": {"optimizer": {"lr": -1}}}, {}, "waltz.feedback.optimizer.lr: Input should be greater than 0"),
        ({"feedback": {"precision": "bf16"}}, {"loss_scaling": {}}, "waltz.feedback: loss_scaling does nothing for"),
        ({"label": 1}, {}, "waltz: label is lambda of the first stage, which"),
        ({"label_later": 1, "conversation_frozen": 4}, {}, "waltz.label_later=1 does nothing in steps=4"),
        ({"review": "{problem}"}, {}, "waltz: review lacks {answer}"),
        ({"judge": {}}, {}, "waltz.judge: expected exactly one of function and server"),
        ({"judge": {"server": "file:///etc/passwd", "model": "x"}}, {}, "expected a base URL"),
        ({"judge": {"server": "http://127.0.0.1:1/v1"}}, {}, "a server needs model"),
        ({"judge": {"function": "a:b", "model": "x"}}, {}, "model and api_key_env do nothing without a server"),
        ({"rounds": 0}, {}, "waltz.rounds: input should be greater than or equal to 1"),
        ({}, {"nproc": 2}, "waltz with nproc=2: both policies learn in one process"),
        ({}, {"guard": {}}, "waltz with guard: it takes one policy back"),
        ({}, {"perfectible": {}}, "waltz with perfectible"),
        ({}, {"algorithm": {"advantage": "grpo"}}, "waltz with algorithm.advantage=grpo"),
        ({}, {"rollout": {"max_tokens": 8, "max_policy_lag": 1}}, "waltz with rollout.max_policy_lag"),
        ({}, {"rollout": {"max_tokens": 8, "engine": "vllm"}}, "waltz with rollout.engine=vllm"),
        ({}, {"rollout": {"max_tokens": 8, "overlong": {"buffer": 2}}}, "waltz with rollout.overlong"),
        ({}, {"task": {"kind": "chain"}}, "waltz with task.kind=chain: its problems have no labels"),
        ({}, {"task": {"kind": "dataset", "files": "x.jsonl"}}, "set waltz.judge.function or waltz.judge.server"),
        (
            {"judge": {"function": "a:b"}},
            {"task": {"kind": "requests", "reward": {"function": "a:b"}}},
            "waltz with task.reward",
        ),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(
    waltz: dict[str, Any], others: dict[str, Any], said: str
) -> None:

    with pytest.raises(MantissaError) as refused:
        configure(waltz, **others)
    assert said in str(refused.value)
