"""What does not go together with a game of two policies: it would do nothing, or nobody has tried it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mantissa.tasks import DatasetConfig, RequestsConfig


def waltz_refusals(config: Any) -> Iterator[tuple[bool, str]]:
    """Whether each of these is so, and what to say then; ``config``: the ``RunConfig``, whose module imports this."""
    waltz, rollout, task = config.waltz, config.rollout, config.task
    reward = getattr(task, "reward", None) is not None
    adapters, fresh = config.model.lora is not None, config.model.fresh is not None
    refusals = (
        (config.nproc > 1, f"nproc={config.nproc}: both policies learn in one process; set nproc=1"),
        (rollout.engine == "vllm", "rollout.engine=vllm: nobody has tried two of them; use native"),
        (rollout.max_policy_lag > 0, "rollout.max_policy_lag: a dialogue is of both policies' newest weights; set 0"),
        (rollout.dynamic is not None, "rollout.dynamic: there are no groups here; leave it out"),
        (rollout.overlong is not None, "rollout.overlong: an answer's reward is the judge's word; leave it out"),
        (config.guard is not None, "guard: it takes one policy back, and here two belong together; leave it out"),
        (config.perfectible is not None, "perfectible: the game uses every prompt; leave it out"),
        (
            config.algorithm.advantage != "reinforce_pp",
            f"algorithm.advantage={config.algorithm.advantage}: answers after feedback have no group, each prompt is "
            "another; use reinforce_pp",
        ),
        (
            not isinstance(task, (RequestsConfig, DatasetConfig)),
            f"task.kind={task.kind}: its problems have no labels; use requests, or dataset with prompt and label",
        ),
        (reward, "task.reward: answers earn the judge's word, which waltz.judge names; leave it out"),
        (getattr(task, "verifier", None) is not None, "task.verifier: waltz.judge grades; leave it out"),
        (
            isinstance(task, DatasetConfig) and waltz.judge is None,
            "task.kind=dataset: rules judge the task requests alone; set waltz.judge.function or waltz.judge.server",
        ),
        (
            waltz.label_later > 0 and waltz.conversation_frozen >= config.steps,
            "waltz.label_later: all steps are of the first stage; leave it out",
        ),
        (
            adapters and fresh and config.warm_start is not None,
            "model.fresh with model.lora: its warm start trains the base, and two warm starts would make two; start "
            "from model.path, or leave lora out",
        ),
    )
    for refused, why in refusals:
        yield refused, f"waltz with {why}"
