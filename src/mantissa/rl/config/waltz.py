"""Two policies that learn from one game: WaltzRL's rewards and settings (arXiv 2510.08240).

A conversation policy answers a request, a feedback policy says what is wrong with the answer, and where it says that
something is, the conversation policy answers once more. With R_c(answer) = 1 where the answer is neither unsafe nor an
over-refusal (the judge's word), else 0, the feedback on answer t earns

    R_dir   = R_c(answer t+1) - R_c(answer t), 0 where there is no next answer      (dynamic improvement, -1, 0 or 1)
    R_label = 1 where both of its labels are the judge's, else 0
    R_format = 1 where it is the JSON object that was asked for, whole, else 0

    R_f = alpha R_dir R_label + lambda R_label + gamma R_format

An improvement that came by chance, of feedback that was wrong, so earns nothing; ``gate: false`` is R_f without that
product. lambda is for the first stage, in which the conversation policy does not learn yet: in the second it is 0, and
labels count only through what they improve. The conversation policy learns from each dialogue's first answer (type A)
and from its last, where feedback led to one (type B), each with its own R_c.

The published advantage is R less the KL terms from a token on, normalised over the policy's batch. Here all of a
response's KL terms are taken off: those before a token do not depend on it, so the gradient is the same on average.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, model_validator

from mantissa.base.config import Config, Refusals
from mantissa.base.seeds import derive_seed
from mantissa.tasks import DatasetConfig, RequestsConfig
from mantissa.tasks.requests import JudgeConfig

OF_A_POLICY = ("model", "precision", "loss_scaling", "warm_start", "rollout", "algorithm", "optimizer")
_OF_A_ROLLOUT = ("max_tokens", "temperature", "top_k", "top_p", "slots", "stop")
_WHOLE = ("model", "precision", "loss_scaling")  # replaced; of the others what is given is changed


class WaltzConfig(Config):
    """Two policies trained together, the recipe's own as the conversation policy (`docs/waltz.md`). Beside this section
    rollout.prompts is 32, rollout.samples 1, optimizer.lr 5e-7 and algorithm that of the paper where not given.
    """

    rounds: int = Field(1, ge=1, le=8, description="Feedbacks that a dialogue may have.")
    conversation_frozen: int = Field(
        0, ge=0, description="Steps from the start in which the conversation policy does not learn: the first stage."
    )
    feedback_frozen: int = Field(0, ge=0, description="The same of the feedback policy.")
    alpha: float = Field(0.65, ge=0, description="Weight of the improvement that feedback brought.")
    label: float | None = Field(
        None, ge=0, description="lambda in the first stage, the weight of right labels; 0.65, of ours, where not given."
    )
    label_later: float = Field(0.0, ge=0, description="lambda after the first stage.")
    gamma: float = Field(0.1, ge=0, description="Weight of a whole JSON object.")
    gate: bool = Field(True, description="Improvement counts only where both labels are right.")
    judge: JudgeConfig | None = Field(None, description="Who judges answers; null: the rules of the task requests.")
    review: str | None = Field(
        None, description="What the feedback policy reads, with {problem} and {answer}; the task's own where null."
    )
    revise: str | None = Field(
        None, description="What follows an answer to be given again, with {feedback}; the task's own where null."
    )
    feedback: dict[str, Any] = Field(
        {},
        description="What the feedback policy has otherwise: model, precision and loss_scaling as a whole; keys of "
        "warm_start, rollout (max_tokens, temperature, slots), algorithm and optimizer.",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> WaltzConfig:
        for name, places in {"review": ("{problem}", "{answer}"), "revise": ("{feedback}",)}.items():
            text = getattr(self, name)
            missing = [place for place in places if text is not None and place not in text]
            if missing:
                raise ValueError(f"{name} lacks {missing[0]}, the place where that text goes")
        if self.label is not None and self.conversation_frozen == 0:
            raise ValueError(
                "label is lambda of the first stage, which conversation_frozen=0 leaves out; leave it out too"
            )
        odd = [name for name in self.feedback if name not in OF_A_POLICY]
        if odd:
            raise ValueError(f"feedback.{odd[0]} is no setting of one policy: expected {', '.join(OF_A_POLICY)}")
        rollout = self.feedback.get("rollout", {})
        odd = [name for name in rollout if name not in _OF_A_ROLLOUT] if isinstance(rollout, dict) else []
        if odd:
            raise ValueError(f"feedback.rollout.{odd[0]} is the game's own; expected {', '.join(_OF_A_ROLLOUT)}")
        return self

    def learns(self, conversation: bool, step: int) -> bool:
        """Whether that policy learns in ``step``, counted from 1."""
        return step > (self.conversation_frozen if conversation else self.feedback_frozen)

    def feedback_reward(self, improvement: float, label: bool, whole: bool, step: int) -> float:
        """R_f of one feedback, with the weights of the stage that ``step`` is in."""
        first = 0.65 if self.label is None else self.label
        weight = first if step <= self.conversation_frozen else self.label_later
        gated = improvement * label if self.gate else improvement
        return self.alpha * gated + weight * label + self.gamma * whole

    def of_feedback(self, values: dict[str, Any]) -> dict[str, Any]:
        """A recipe's plain values as the feedback policy has them; the section ``waltz`` is not among them."""
        mine = {name: value for name, value in values.items() if name != "waltz"}
        whole = {name: value for name, value in self.feedback.items() if name in _WHOLE}
        return _under(mine, self.feedback) | whole


def published(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with what the paper has in the places of keys that are not given."""
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.01}
    defaults = {
        "rollout": {"prompts": 32, "samples": 1},
        "optimizer": {"lr": 5e-7},
        "algorithm": {"advantage": "reinforce_pp", "loss": {"kind": "ppo_clip"}, "reference": {}, "kl": kl},
    }
    return _under(defaults, values)


def _under(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, ``above`` where they have the same key; mappings of the same key likewise."""
    both = dict(below)
    for name, value in above.items():
        mappings = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = _under(both[name], value) if mappings else value
    return both


def feedback_config(config: Any) -> Any:
    """The ``RunConfig`` of the feedback policy, of one that has a section ``waltz``."""
    values = config.waltz.of_feedback(config.model_dump(mode="json", exclude_unset=True))
    mine = {"name": f"{config.name}-feedback", "seed": derive_seed(config.seed, "feedback"), "evaluation": None}
    return type(config).model_validate(values | mine)


def check_feedback(config: Any) -> None:
    """The feedback policy's settings make a run too; ``ValueError`` where they do not."""
    try:
        feedback_config(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(("waltz.feedback", *map(str, first["loc"])))
        raise ValueError(f"{at}: {first['msg'].removeprefix('Value error, ')}") from None


def waltz_refusals(config: Any) -> Refusals:
    """What does not go together with a second policy."""
    waltz, rollout, task = config.waltz, config.rollout, config.task
    reward = getattr(task, "reward", None) is not None
    adapters, fresh = config.model.lora is not None, config.model.fresh is not None
    refusals = (
        (config.nproc > 1, f"nproc={config.nproc}: both policies learn in one process; set nproc=1"),
        (rollout.engine != "native", f"rollout.engine={rollout.engine}: nobody has tried two of them; use native"),
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
            f"waltz.label_later={waltz.label_later:g} does nothing in steps={config.steps}: they are all of the first "
            f"stage, which has waltz.conversation_frozen={waltz.conversation_frozen}; set that below steps, or "
            "waltz.label_later=0",
        ),
        (
            adapters and fresh and config.warm_start is not None,
            "model.fresh with model.lora: its warm start trains the base, and two warm starts would make two; start "
            "from model.path, or leave lora out",
        ),
    )
    for refused, why in refusals:
        yield refused, f"waltz with {why}"
