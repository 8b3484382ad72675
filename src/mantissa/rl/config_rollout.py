"""The configuration's section on sampling: how much, how, by which engine, and what becomes of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mantissa.config_base import Config


class DynamicConfig(Config):
    """Train on ``rollout.prompts`` groups with a gradient: drop those whose rewards are all equal and sample further.

    That is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). Whether a group is dropped is judged by the
    verifier's rewards, before an overlong penalty, and also after it where there is one.
    """

    batch_prompts: int | None = Field(
        None, ge=1, description="Prompts sampled at a time; rollout.prompts where not given."
    )
    max_generation_batches: int = Field(
        10, ge=1, description="Times that a step samples batch_prompts prompts at most."
    )
    when_exhausted: Literal["error", "continue"] = Field(
        "error", description="After that many: stop with an error, or go on with the groups there are."
    )


class OverlongConfig(Config):
    """Reward less what a response is too long: min(0, -(length - (max_tokens - buffer)) / buffer * factor).

    That is DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4). Advantages see it, accuracy does not.
    """

    buffer: int = Field(ge=1, description="Tokens before rollout.max_tokens over which the penalty grows.")
    factor: float = Field(1.0, gt=0, description="The penalty of a response of max_tokens tokens.")


class VllmConfig(Config):
    """How vLLM runs where it is the engine; ``docs/vllm.md``."""

    server: str | None = Field(
        None, description="URL of one that mantissa serve started, held by one run at a time; null starts one here."
    )
    timeout_s: float = Field(3600.0, gt=0, description="Silence of a server after which the run stops.")
    sleep: bool = Field(
        False, description="Give its memory back to the learner between rollouts; on a GPU, where both must fit."
    )
    share_every: int = Field(
        1, ge=0, description="Steps between measurements of its share of the gap, each a forward more; 0: never."
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.server is None and self.timeout_s != type(self).model_fields["timeout_s"].default:
            raise ValueError("timeout_s does nothing without a server; leave it out")
        return self


class RolloutConfig(Config):
    """How each step samples. Log-probs are under softmax(logits / temperature), on both sides.

    There is no top-k or top-p here: the learner cannot renormalise over a set that only the sampler knows, so its
    log-probs would be of another distribution. ``mantissa sample`` and evaluation have no learner and may filter.
    """

    prompts: int = Field(64, ge=1, description="Prompts a step.")
    samples: int = Field(8, ge=1, description="Completions of each prompt: its group.")
    max_tokens: int = Field(ge=1, description="Longest response, the stop token included.")
    temperature: float = Field(1.0, gt=0, description="Divides the logits, for the rollout and the learner alike.")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion, besides the end token.")
    slots: int = Field(256, ge=1, description="Rows decoded together; a finished row is refilled from the queue.")
    engine: Literal["native", "vllm"] = Field(
        "native", description="vllm: in processes of its own, its kernels' gap measured; needs vllm installed."
    )
    vllm: VllmConfig = Field(VllmConfig(), description="Only with engine=vllm; has defaults.")
    dynamic: DynamicConfig | None = Field(None, description="None: every group sampled is trained on.")
    overlong: OverlongConfig | None = Field(None, description="None: length costs nothing.")
    max_policy_lag: int = Field(
        0,
        ge=0,
        description="Optimiser steps that completions may be older than the learner; 0 samples and learns in turn.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.dynamic is not None and self.samples < 2:
            raise ValueError("dynamic drops groups whose rewards are all equal, so samples=1 drops all; use 2 or more")
        if self.overlong is not None and self.overlong.buffer >= self.max_tokens:
            raise ValueError(
                f"overlong.buffer={self.overlong.buffer}: expected less than max_tokens={self.max_tokens}, or every "
                "response would be too long"
            )
        if self.engine == "native" and self.vllm != VllmConfig():
            raise ValueError("vllm does nothing with engine=native; leave it out, or set engine=vllm")
        return self
