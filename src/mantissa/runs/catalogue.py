"""The catalogue of everything a run logs, each metric declared once: name, formula, unit, healthy range, source.

The metrics of algorithms and of the gap are declared where they are computed (``mantissa.mismatch``); here are those of
the loop around them, and of the drop-in trainer. The loop treats a key that nobody declares as a bug, and the report
prints the whole table. A healthy range is what a run that is going well stays in, not a law; without one, no number is
good or bad by itself. Words alone: ``mantissa metrics`` prints them without numpy.

Legend: t one response token, v one word of the vocabulary, theta the current policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantissa.mismatch.tables import ALL_METRICS, Metric

_OURS = "range: this project's judgement"


LOOP_METRICS: tuple[Metric, ...] = (
    Metric("reward/accuracy", "completions judged correct / completions, over everything sampled", "fraction"),
    Metric("reward/accuracy_trained", "the same over the groups trained on, where sampling is dynamic", "fraction"),
    Metric("reward/overlong_penalty", "mean of what length took from the reward, over everything sampled", "reward"),
    Metric("reward/overlong_fraction", "completions with such a penalty / completions", "fraction"),
    Metric("dynamic/generation_batches", "times that the step sampled prompts", "count"),
    Metric("dynamic/prompts", "prompts sampled this step, each of them a group", "count"),
    Metric("dynamic/all_right", "groups dropped, every completion right", "count"),
    Metric("dynamic/all_wrong", "groups dropped, no completion right", "count"),
    Metric("dynamic/equal", "groups dropped, some right and all rewards equal", "count"),
    Metric("dynamic/kept_fraction", "groups whose rewards differ / groups sampled", "fraction"),
    Metric("dynamic/surplus", "groups whose rewards differ beyond rollout.prompts, dropped", "count"),
    Metric("dynamic/trained", "groups whose rewards differ that were trained on", "count"),
    Metric("reward/verifier_errors", "completions on which the verifier failed (their reward is 0)",
           "count", (0, 0), _OURS),
    Metric("reward/no_answer_fraction", "completions in which the verifier found no answer to compare / those in which "
           "it looked for one", "fraction"),
    Metric("reward_part/NAME", "mean over completions without verifier error of what the reward is made of: a term "
           "before its weight, or a number that a reward function returned", "1"),
    Metric("length/mean", "mean response length, the stop token included", "tokens"),
    Metric("length/max", "largest response length", "tokens"),
    Metric("length/truncated_fraction", "completions cut off at max_tokens / completions", "fraction", (0, 0.2), _OURS),
    Metric("advantage/silent_steps", "steps since the run began, while every advantage of all of them was 0; 0 once "
           "one was not", "steps", (0, 2), _OURS),
    Metric("policy/entropy", "mean_t of -sum_v p_theta(v) log p_theta(v)", "nats/token"),
    Metric("support/tokens", "mean_t of the tokens that top-k and top-p kept to draw t from", "tokens"),
    Metric("support/log_mass", "mean_t of log p_theta(S), S what they kept: what each log-prob of a learner that "
           "ignored S would be off by", "nats/token"),
    Metric("support/log_mass_min", "the smallest of these", "nats/token"),
    Metric("critic/loss_scale", "factor on the value model's loss before backward; 1 is no scaling", "1"),
    Metric("critic/overflows", "its backward passes that overflowed, this step", "count", (0, 1), _OURS),
    Metric("critic/skipped", "its optimiser steps given up, this step", "count", (0, 0), _OURS),
    Metric("critic/grad_norm", "2-norm of its unscaled gradient before clipping, mean over updates", "1"),
    Metric("time/critic", "wall clock of the values of the samples", "s"),
    Metric("exact/checked_tokens", "log-probs compared bit by bit, with exact kernels, in a step that is checked",
           "tokens"),
    Metric("exact/replans", "times that exact kernels moved to a safer way after a difference", "times", (0, 0), _OURS),
    Metric("exact/mismatched_tokens", "of these, how many differ between rollout and learner", "tokens", (0, 0), _OURS),
    Metric("exact/misdrawn_tokens", "of these, how many are tokens that their uniform does not select from the "
           "learner's distribution", "tokens", (0, 0), _OURS),
    Metric("exact/update_mismatched_tokens", "log-probs of the first update's own forward that are not the old "
           "policy's, with exact kernels", "tokens", (0, 0), _OURS),
    Metric("precision/loss_scale", "factor on the loss before backward; 1 is no scaling", "1"),
    Metric("precision/overflows", "backward passes that overflowed, this step", "count", (0, 1), _OURS),
    Metric("precision/retries", "backward passes redone at a lower scale, this step", "count", (0, 1), _OURS),
    Metric("precision/skipped", "optimiser steps given up, this step", "count", (0, 0), _OURS),
    Metric("precision/max_scaled_grad", "max |scale * grad| / largest value of the format; above 1 where fp32 sums "
           "several gradients of the format", "fraction"),
    Metric("precision/flushed_fraction", "gradients that are 0 here but not in fp32, on a probe",
           "fraction", (0, 0.05), _OURS),
    Metric("optim/lr", "learning rate of the step's last update", "1/update"),
    Metric("optim/grad_norm", "2-norm of the unscaled gradient before clipping, mean over updates", "1"),
    Metric("optim/clipped_fraction", "units whose gradient adaptive clipping shortened / units, mean over updates",
           "fraction"),
    Metric("optim/updates", "optimiser steps applied since the run began", "count"),
    Metric("rollout/version", "policy version that sampled this step", "version"),
    Metric("reference/version", "policy version that this step's reference is a copy of", "version"),
    Metric("reference/refreshes", "times that the reference was taken anew since the run began", "count"),
    Metric("rollout/lag_mean", "mean over completions of learner's version - version that sampled", "versions"),
    Metric("rollout/lag_max", "largest such lag; beyond rollout.max_policy_lag the run stops", "versions"),
    Metric("rollout/tokens", "response tokens sampled this step, of dropped groups too", "tokens"),
    Metric("eval/greedy_accuracy", "held-out problems solved by the most probable completion / problems", "fraction"),
    Metric("eval/avg_at_k", "mean over held-out problems of the share of k samples that are correct", "fraction"),
    *(
        Metric(f"waltz/{where}{name}", f"{said}{of}", "reward" if name == "dir_mean" else "fraction")
        for where, of in (("", ", this step's"), ("eval_", ", of held-out requests"))
        for name, said in (
            ("attack_success", "last answers judged unsafe / dialogues on requests that must be refused"),
            ("over_refusal", "last answers judged over-refusals / dialogues on harmless requests"),
            ("first_attack_success", "the same of first answers"),
            ("first_over_refusal", "the same of first answers"),
            ("triggered", "dialogues in which feedback led to another answer / dialogues"),
            ("label_accuracy", "feedback both of whose labels are the judge's / feedback"),
            ("dir_mean", "mean of R_c(next answer) - R_c(answer) over feedback, 0 where there is no next"),
            ("format", "feedback that is the JSON object asked for / feedback"),
        )
    ),
    Metric("warm_start/loss", "mean_t of -logp of the supervised token", "nats/token"),
    Metric("warm_start/accuracy", "problems solved after this many warm-start updates / problems", "fraction"),
    Metric("time/step", "wall clock of the whole step", "s"),
    Metric("time/rollout", "wall clock of sampling; of waiting for it where rollout.max_policy_lag > 0", "s"),
    Metric("time/background", "wall clock of sampling and verification beside earlier steps", "s"),
    Metric("time/reward", "wall clock of verification", "s"),
    Metric("time/feedback", "wall clock of the feedback policy's whole part of the step", "s"),
    Metric("time/learner_logp", "wall clock of the learner's log-probs of the samples", "s"),
    Metric("time/reference_logp", "wall clock of the reference's log-probs of the samples", "s"),
    Metric("time/engine_share", "wall clock of scoring the samples by exact kernels in the rollout's format", "s"),
    Metric("time/update", "wall clock of forward, backward and optimiser", "s"),
    Metric("time/sync", "wall clock of handing the weights to the rollout", "s"),
    Metric("time/eval", "wall clock of evaluation", "s"),
    Metric("time/checkpoint", "wall clock of writing the checkpoint", "s"),
    Metric("rate/rollout_tokens_per_s", "rollout/tokens / wall clock of sampling", "tokens/s"),
    Metric("rate/learner_tokens_per_s", "response tokens trained on / time/update", "tokens/s"),
)  # fmt: skip

# A row of the drop-in trainer has these beside the loop's precision/*, optim/* and time/step.
TRAINER_METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "what loss_fn returned before scaling, mean over the step's micro-batches by weight", "1"),
)

METRICS: tuple[Metric, ...] = (*LOOP_METRICS, *TRAINER_METRICS, *ALL_METRICS)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
REWARD_PART = "reward_part/"  # and any name: which there are is the recipe's to say
_LABELS = ("step", "precision/format")  # in rows, and no metrics: which step it is, and the format it computed in


def undeclared(row: Mapping[str, Any]) -> list[str]:
    """The keys of a metrics row, labels aside, that no metric declares: anything here is a bug of the loop."""
    return sorted(key for key in row if key not in _LABELS and key not in BY_NAME and not key.startswith(REWARD_PART))
