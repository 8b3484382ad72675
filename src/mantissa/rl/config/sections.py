"""The sections of a run's configuration. Fields say what they do and what follows from it.

Unknown keys are errors, and so are keys that would do nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from mantissa.algorithms.advantages import AdvantageKind, TokenAdvantageKind
from mantissa.algorithms.correction import CorrectionConfig
from mantissa.algorithms.gae import CriticConfig
from mantissa.algorithms.losses import LOSSES, LossConfig, PPOClipConfig
from mantissa.algorithms.losses.base import AggregationKind
from mantissa.algorithms.reference import KLConfig, ReferenceConfig
from mantissa.base.config import Config, Refusals
from mantissa.base.errors import MantissaError
from mantissa.kernels import Emulation
from mantissa.model import Replay
from mantissa.precision import NumberFormat
from mantissa.training import AutoScaler, LossScaler, Moments, ScalerConfig, scaler_for
from mantissa.training.optimizer import Masters


class EntropyConfig(Config):
    """A bonus on the policy's entropy, with its gradient: ``loss - coefficient * sum scale * H``.

    H in nats is that of the whole distribution after each prefix, at the temperature of the log-probs. Every token in
    the loss has it, whatever its advantage, unweighted by the correction, which is the published form (arXiv
    1602.01783).
    """

    coefficient: float = Field(gt=0, description="Loss that one nat takes off, 1e-3 for example.")


class AlgorithmConfig(Config):
    """What is maximised, and how the gap between rollout and learner is corrected."""

    advantage: AdvantageKind | TokenAdvantageKind = Field(
        "dr_grpo",
        description="grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline or gdpo; grpo where flowrl has none; "
        "of each token: distillation (log-prob of algorithm.reference less the policy's), gae.",
    )
    loss: LossConfig = Field(
        PPOClipConfig(),
        description="The policy loss and its parameters: a name, its fields, or package.module:function of one's own.",
    )
    aggregation: AggregationKind = Field(
        "token_mean",
        description="How token losses become one number; seq_mean_token_mean where gspo or flowrl is given none.",
    )
    aggregation_length: float | None = Field(
        None, gt=0, description="Length that seq_mean_token_sum_norm divides by; rollout.max_tokens where not given."
    )
    correction: CorrectionConfig = Field(
        CorrectionConfig(), description="A preset's name (none, token_tis, icepop, sequence_mis, ...) or its fields."
    )
    reference: ReferenceConfig | None = Field(
        None, description="{} for a frozen one; by itself it is measured only. null: there is none."
    )
    kl: KLConfig | None = Field(None, description="A penalty on the distance from the reference; null: none.")

    critic: CriticConfig | None = Field(None, description="The value model of advantage=gae; null: there is none.")
    entropy: EntropyConfig | None = Field(None, description="A bonus on the policy's entropy; null: none.")

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {"kind": "ppo_clip"} | value
        if isinstance(value, str) and ":" in value:
            return {"kind": "custom", "function": value}
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _what_the_loss_stands_for(cls, values: Any) -> Any:
        """What a loss is by its definition where the recipe gives none: a mean over sequences, an advantage."""
        if not isinstance(values, dict):
            return values
        loss = values.get("loss")
        kind = loss.get("kind") if isinstance(loss, dict) else getattr(loss, "kind", loss)
        implied = LOSSES[kind].implies if isinstance(kind, str) and kind in LOSSES else {}
        return {**implied, **values}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for refused, why in self._refusals():
            if refused:
                raise ValueError(why)
        return self

    def _refusals(self) -> Refusals:
        yield (
            self.aggregation_length is not None and self.aggregation != "seq_mean_token_sum_norm",
            f"aggregation_length does nothing with aggregation={self.aggregation}; leave it out",
        )
        yield from self.loss.refusals(self)
        yield (
            self.kl is not None and self.kl.ratio and self.loss.weighs_itself,
            f"algorithm.kl.ratio with loss={self.loss.kind}, whose weights are already of the current policy: the same "
            "ratio twice; set kl.ratio=false",
        )
        yield (
            self.correction.mask_negative_above is not None and self.loss.every_completion,
            f"correction.mask_negative_above goes by the advantage's sign, and loss={self.loss.kind} pulls whatever it "
            "is; leave it out",
        )
        yield (
            (self.advantage == "gae") != (self.critic is not None),
            "algorithm.critic is the value model of advantage=gae: "
            + ("set algorithm.critic={lr: 1.0e-5}" if self.critic is None else "leave it out, or set advantage=gae"),
        )
        yield (
            self.advantage == "distillation" and self.reference is None,
            "advantage=distillation needs a teacher; set algorithm.reference={path: FOLDER}",
        )
        if self.of_tokens:
            yield (
                not self.loss.by_token,
                f"advantage={self.advantage} is of each token, and loss={self.loss.kind} takes those of responses; "
                "use ppo_clip, dapo, reinforce, cispo, sapo, dppo or one of your own",
            )
            yield (
                self.kl is not None and self.kl.where == "reward",
                f"advantage={self.advantage} knows no reward of a response that kl.where=reward could lower; set "
                "kl.where=loss",
            )
            yield (
                self.correction.mask_negative_above is not None,
                f"correction.mask_negative_above goes by a response's advantage, and advantage={self.advantage} is of "
                "each token; leave it out",
            )
        yield (
            self.advantage == "gdpo" and self.kl is not None and self.kl.where == "reward",
            "advantage=gdpo with kl.where=reward: each reward is normalised by itself, and a penalty off their sum is "
            "none of them; set kl.where=loss",
        )
        yield (
            self.kl is not None and self.reference is None,
            "algorithm.kl is the distance from a reference policy, and there is none; set algorithm.reference={}",
        )

    @property
    def of_tokens(self) -> bool:
        """Whether each token has an advantage of its own."""
        return self.advantage in get_args(TokenAdvantageKind)

    @property
    def every_completion(self) -> bool:
        """Whether a completion whose advantage is zero has a gradient all the same: reference or entropy pulls."""
        pulled = self.entropy is not None or (self.kl is not None and self.kl.where == "loss")
        return self.loss.every_completion or pulled


class DynamicConfig(Config):
    """Train on ``rollout.prompts`` groups with a gradient: drop those whose rewards are all equal and sample further.

    That is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). Whether a group is dropped is judged by the
    verifier's rewards, before an overlong penalty, and also after it where there is one.
    """

    batch_prompts: int | None = Field(
        None, ge=1, description="Prompts sampled at a time; rollout.prompts where not given."
    )
    max_generation_batches: int = Field(10, ge=1, description="Times that a step samples batch_prompts at most.")
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

    With ``top_k`` or ``top_p`` they are of the tokens that those kept, on both sides: what each token was chosen from
    is kept with it, and the learner (and a reference) renormalise over that.
    """

    prompts: int = Field(64, ge=1, description="Prompts a step.")
    samples: int = Field(8, ge=1, description="Completions of each prompt: its group.")
    max_tokens: int = Field(ge=1, description="Longest response, the stop token included.")
    temperature: float = Field(1.0, gt=0, description="Divides the logits, for the rollout and the learner alike.")
    top_k: int = Field(0, ge=0, description="Draws from the k most probable tokens; 0: off. The learner as well.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draws from the fewest tokens of this probability; 1: off. The learner as well."
    )
    support: Literal["kept", "ignored"] = Field(
        "kept",
        description="ignored: the learner's log-probs are over all tokens, off by log of the kept mass; to compare.",
    )
    stop: tuple[str, ...] = Field((), description="Strings that end a completion, besides the end token.")
    slots: int = Field(256, ge=1, description="Rows decoded together; a finished row is refilled from the queue.")
    engine: Literal["native", "vllm", "emulated", "transformers"] = Field(
        "native",
        description="vllm: in processes of its own, its kernels' gap measured; needs vllm installed. emulated: our "
        "own, with a serving engine's roundings. transformers: any causal language model of transformers by its own "
        "code, on both sides; with precision.kernels=exact adopted (docs/exactness.md).",
    )
    emulate: Emulation | None = Field(
        None, description="Only with engine=emulated: serving (what null stands for there), or switches by name."
    )
    vllm: VllmConfig = Field(VllmConfig(), description="Only with engine=vllm; has defaults.")
    dynamic: DynamicConfig | None = Field(None, description="None: every group sampled is trained on.")
    overlong: OverlongConfig | None = Field(None, description="None: length costs nothing.")
    replay_routing: Replay | None = Field(
        None,
        description="Of a policy with mixtures of experts: ids lets the learner take the rollout's experts, by its "
        "own weights of them; weights takes the rollout's weights too. None: the learner chooses for itself.",
    )
    max_policy_lag: int = Field(
        0,
        ge=0,
        description="Optimiser steps that completions may be older than the learner; 0 samples and learns in turn.",
    )

    @model_validator(mode="before")
    @classmethod
    def _emulates_something(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("engine") == "emulated" and values.get("emulate") is None:
            return values | {"emulate": "serving"}
        return values

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.dynamic is not None and self.samples < 2:
            raise ValueError("dynamic drops groups whose rewards are all equal, so samples=1 drops all; use 2 or more")
        if self.overlong is not None and self.overlong.buffer >= self.max_tokens:
            raise ValueError(
                f"overlong.buffer={self.overlong.buffer}: expected less than max_tokens={self.max_tokens}, or every "
                "response would be too long"
            )
        if self.support == "ignored" and not self.top_k and self.top_p == 1:
            raise ValueError("support=ignored does nothing without top_k or top_p; leave it out")
        if self.engine != "vllm" and self.vllm != VllmConfig():
            raise ValueError(f"vllm does nothing with engine={self.engine}; leave it out, or set engine=vllm")
        if self.engine != "emulated" and self.emulate is not None:
            raise ValueError(f"emulate does nothing with engine={self.engine}; leave it out, or set engine=emulated")
        return self


class WarmStartConfig(Config):
    """Supervised steps on the task's own solutions before RL, in the learner's precision."""

    steps: int = Field(400, ge=1, description="Optimiser steps at most.")
    batch: int = Field(64, ge=1, description="Solved problems a step.")
    lr: float = Field(1e-3, gt=0, description="Learning rate after a warm-up of 20 steps.")
    target_accuracy: float = Field(
        1.0, gt=0, le=1, description="Stop once sampled accuracy on held-out problems reaches this."
    )
    evaluate_every: int = Field(20, ge=1, description="Steps between evaluations of that accuracy.")
    problems: int = Field(64, ge=1, description="Held-out problems in each evaluation, sampled once each.")


class PerfectibleConfig(Config):
    """Keep only prompts on which the starting policy sometimes succeeds (arXiv 2510.26788, the sanity test)."""

    samples: int = Field(40, ge=2, description="Samples of each training prompt.")
    low: float = Field(0.2, ge=0, le=1, description="Smallest success rate that is kept.")
    high: float = Field(0.8, ge=0, le=1, description="Largest success rate that is kept.")


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW."""

    lr: float = Field(gt=0, description="Learning rate after the warm-up.")
    warmup: int = Field(0, ge=0, description="Updates over which the rate rises linearly.")
    decay: Literal["none", "linear"] = Field("none", description="linear: the rate falls to zero at the last step.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.999), description="Adam's decay rates, 0 or more and below 1.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon, in fp32 (1e-8 is 0 in fp16).")
    masters: Masters = Field(
        "fp32", description="bf16_nearest, bf16_stochastic, bf16_kahan: bf16 weights (docs/precision.md)."
    )
    moments: Moments = Field("fp32", description="8bit: in blocks of 256, by torchao; small tensors stay fp32.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay of matrices; norms and biases have none.")
    max_grad_norm: float = Field(
        1.0, gt=0, allow_inf_nan=True, description="Clip bound on the unscaled gradient; .inf never clips."
    )
    adaptive_clip: float | None = Field(
        None,
        gt=0,
        description="Bounds each unit's gradient by this share of its weights' norm, before max_grad_norm and but for "
        "an output head of its own (arXiv 2102.06171; 0.01 is usual); null: off.",
    )
    updates_per_batch: int = Field(1, ge=1, description="Optimiser steps on each batch; 1 is on-policy.")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="Padded tokens a forward holds; memory only, the gradient does not depend on it."
    )


class LossScalingConfig(ScalerConfig):
    """Loss scaling of an fp16 learner; see ``ScalerConfig`` and ``AutoScaler``."""

    rule: Literal["dynamic", "auto"] = Field(
        "dynamic", description="dynamic: torch's. auto: from the gradients' observed range, without the growth keys."
    )

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        for key in ("backoff_factor", "growth_factor", "growth_interval"):  # a run writes defaults too
            if self.rule == "auto" and getattr(self, key) != type(self).model_fields[key].default:
                raise MantissaError(f"loss_scaling.{key} does nothing with loss_scaling.rule=auto; leave it out")
        return self

    def scaler(self, fmt: NumberFormat) -> LossScaler:
        """A scaler at its first scale, or one that scales by 1 where ``fmt`` needs none."""
        return AutoScaler(self) if self.rule == "auto" and fmt.needs_loss_scaling else scaler_for(self, fmt)


class EvaluationConfig(Config):
    """Held-out problems, greedy and by the mean of k samples."""

    every: int = Field(20, ge=1, description="Steps between evaluations; the last step is always evaluated.")
    problems: int = Field(128, ge=1, description="Held-out problems.")
    samples: int = Field(4, ge=0, description="k of avg@k, at rollout.temperature; 0 evaluates greedily only.")


class CheckpointConfig(Config):
    """All-or-nothing checkpoints, from which a killed run continues bit for bit."""

    every: int = Field(10, ge=1, description="Steps between checkpoints; the last step always has one.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")


class GradingConfig(Config):
    """Limits on verifiers."""

    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Wall clock for one sample, which loses its reward beyond it; also for one call of a batched "
        "function, whose samples are then graded one by one.",
    )
    workers: int = Field(2, ge=1, le=4096, description="Processes for verifiers that may hang.")
    memory_gib: float = Field(4.0, gt=0, description="Address space of each of these processes.")
