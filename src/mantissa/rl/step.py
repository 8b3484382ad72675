"""One step of RL, in five calls: collect, score, weigh, learn, publish. Read ``take_step`` first.

    batch   = collect(step)     prompts -> completions -> rewards
    scored  = score(batch)      log-probs of the learner before its update, and of the reference
    weighed = weigh(scored)     advantages, correction weights, which tokens count
    update  = learn(weighed)    micro-batches -> loss -> step, retry or skip
    publish(...)                weights to the engine, metrics, completions, screen

Probes observe between weighing and learning, and change no bit of what is learned. Then the step is settled: the guard
may take the run back, or a checkpoint is due. The loop of them is ``session.go``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.files import is_full
from mantissa.mismatch.metrics import gap_metrics
from mantissa.precision import masked_mean, values
from mantissa.rl.batch import Batch
from mantissa.rl.config.sections import EvaluationConfig
from mantissa.rl.experience import Experience, Scored, Weighed
from mantissa.rl.learner import Update, weigh
from mantissa.rl.run import Run, hold_room, save, warn
from mantissa.rl.score import OnTokenLogits
from mantissa.runs.catalogue import undeclared

_SILENT = 3  # first steps without any advantage after which it is said
Row = dict[str, Any]
Evaluate = Callable[[Run, EvaluationConfig, int], Row]


def take_step(run: Run, step: int, *, learns: bool = True, evaluate: Evaluate | None = None) -> Row:
    """One step of RL: collect, score, weigh, learn, publish; returns its row. Probes observe it before anything is
    learned.

    ``learns``: False where the policy only plays along. ``evaluate``: what is measured of it, if not ``accuracy``.
    """
    batch = collect(run, step)  # prompts -> completions -> rewards
    scored = score(run, step, experience_of(run, batch))  # log-probs: the learner's and the reference's
    weighed = weigh(scored, run.config.algorithm)  # advantages, correction weights, which tokens count
    observed = observe(run, step, weighed)
    update = learn(run, step, weighed, learns)  # micro-batches -> loss -> step, retry or skip
    for probe in run.probes:
        observed |= probe.learned(step)
    return publish(run, step, batch, weighed, update, observed, evaluate or accuracy)  # weights, metrics, screen


def collect(run: Run, step: int) -> Batch:
    """The step's graded completions."""
    run.at, run.started = step, run.started or time.perf_counter()
    with run.timed("rollout"):
        batch = run.source.take(step)
    if run.config.steps_behind:
        run.seconds["background"] = sum(batch.seconds.values())
    else:
        run.seconds |= batch.seconds
    return batch


def experience_of(run: Run, batch: Batch) -> Experience:
    """As tensors; without what each token was drawn from, where the recipe asks to see what that does."""
    experience = batch.experience(run.parts.device)
    return replace(experience, support=()) if run.config.rollout.support == "ignored" else experience


def score(run: Run, step: int, experience: Experience) -> Scored:
    """With the log-probs of the learner before its update, and what its terms say of the batch."""
    exact = run.exactness
    if exact is not None and not exact.due(step):  # what the rollout delivered is the learner's, to the last bit
        scored = experience.with_learner(experience.rollout_logp_BR)
    else:
        with run.timed("learner_logp"):
            looks = [look for probe in run.probes if (look := probe.look(experience)) is not None]
            scored = experience.with_learner(*run.learner.score(experience, _all(looks)))
    for term in run.learner.terms:
        with run.timed(term.phase):
            scored = scored.having(**term.score(scored))
    return scored


def observe(run: Run, step: int, experience: Weighed) -> dict[str, float]:
    """What the probes see of a weighed batch; one may stop the run, or have the step sampled again."""
    observed: dict[str, float] = {}
    for probe in run.probes:
        if probe.due(step):
            with run.timed(probe.phase):
                observed |= probe.observe(step, experience)
    return observed


def learn(run: Run, step: int, experience: Weighed, learns: bool) -> Update:
    """The update of the weights, or none where the policy only plays along."""
    verify = None if run.exactness is None else run.exactness.verify
    with run.timed("update"):
        return run.learner.learn(experience, step, verify) if learns else Update((), experience.tallies, 0)


def publish(
    run: Run,
    step: int,
    batch: Batch,
    experience: Weighed,
    update: Update,
    observed: dict[str, float],
    evaluate: Evaluate,
) -> Row:
    """Hand the weights over and write everything down."""
    config, last = run.config, step == run.config.steps
    run.position = batch.position
    row: dict[str, Any] = {"step": step, "rollout/version": batch.version, **observed, **batch.metrics}
    row |= _learner_metrics(run, experience, update)
    row["advantage/silent_steps"] = _silence(run, step, row)
    warn(run, step, row)
    if config.evaluation and (step % config.evaluation.every == 0 or last):
        with run.timed("eval"), run.source.engine(run.learner.weights, run.learner.version):
            row |= evaluate(run, config.evaluation, step)
    with run.timed("sync"):  # after the evaluation, which would wait for the batch that this begins
        run.source.hand_over(step, run.learner.weights, run.learner.version)
    row |= _clock(run, batch, update.trained_tokens)
    row |= {} if run.guard is None else {"precision/format": run.guard.format}
    assert not undeclared(row), f"metrics that the catalogue does not declare: {undeclared(row)}"
    _write(
        run,
        step,
        lambda: run.folder.write_rollouts(step, _rollout_rows(batch, experience)),
        lambda: run.folder.metrics.append(row),  # before the checkpoint: a resume forgets rows after it, can add none
        lambda: run.trackers.log(step, row),
    )
    run.live.step(row)
    return row


def accuracy(run: Run, evaluation: EvaluationConfig, step: int) -> Row:
    """Of held-out problems, by the present policy: greedy, and sampled where the recipe asks."""
    problems = run.heldout[: evaluation.problems]
    seed, greedy = run.config.seed, replace(run.params, temperature=0.0)
    version = run.learner.version
    row = {"eval/greedy_accuracy": run.sampler.accuracy(problems, 1, greedy, version, seed, "greedy", step)}
    if evaluation.samples:
        row["eval/avg_at_k"] = run.sampler.accuracy(
            problems, evaluation.samples, run.params, version, seed, "avg@k", step
        )
    return row


def settle(run: Run, step: int, row: Row) -> None:
    """After a step: the guard decides, and a checkpoint may be due."""
    config = run.config
    if run.guard is not None and run.guard.judge(row):
        run.fell_back = True
        if run.ranks.rank0:
            run.guard.fall_back(run.folder.checkpoints, step, run.position, config.checkpoint.keep)
        return
    if step % config.checkpoint.every == 0 or step == config.steps:
        with run.timed("checkpoint"):  # appears in the next step's row
            save(run, step)
    hold_room(run, step)


def _write(run: Run, step: int, *writes: Callable[[], object]) -> None:
    """Write a step down. Where the disk is full, into the room that is held, with a checkpoint of this step; the
    run then ends with the error."""
    full: MantissaError | None = None
    for write in writes:
        try:
            write()
        except MantissaError as error:
            if full is not None or not is_full(error) or not run.room.release():
                raise
            full = error
            write()
    if full is not None:
        save(run, step)
        raise MantissaError(f"{full}; step {step} is kept: --resume goes on after it") from full


def _learner_metrics(run: Run, experience: Weighed, update: Update) -> dict[str, float]:
    step, mask_BR = run.learner.step, experience.mask_BR
    row = {name: float(value) for name, value in values(update.tallies).items()}
    if experience.by_learner:  # what was not measured is not logged
        gap = gap_metrics(experience.rollout_logp_BR, experience.old_logp_BR, mask_BR)
        row |= {name: float(value) for name, value in gap.items()}
        if run.learner.router_flips is not None:
            row["gap/router_flips"] = run.learner.router_flips
        row["policy/entropy"] = float(masked_mean(experience.column("entropy_BR").double(), mask_BR))
    row |= update.beside
    outcomes = update.outcomes
    applied = [outcome for outcome in outcomes if outcome.applied]
    row["precision/loss_scale"] = step.scaler.scale
    row["precision/overflows"] = sum(outcome.overflows for outcome in outcomes)
    row["precision/retries"] = sum(outcome.retries for outcome in outcomes)
    row["precision/skipped"] = sum(not outcome.applied for outcome in outcomes)
    row["optim/updates"] = step.updates
    if applied:
        row["optim/grad_norm"] = sum(outcome.grad_norm for outcome in applied) / len(applied)
        row["optim/lr"] = applied[-1].lr
        clipped = [outcome.clipped for outcome in applied if outcome.clipped is not None]
        row |= {"optim/clipped_fraction": sum(clipped) / len(clipped)} if clipped else {}
        row["precision/max_scaled_grad"] = max(outcome.max_scaled_grad for outcome in applied)
    return row


def _silence(run: Run, step: int, row: dict[str, float]) -> int:
    """Steps of a run that has had no advantage yet, this one included; said once they are some."""
    if run.silent < step - 1 or row["advantage/abs_max"] != 0:
        return 0
    run.silent = step
    if step == min(_SILENT, run.config.steps):
        run.live.note(
            f"warning: no advantage in the first {step} steps: within each group the rewards are all equal (mean "
            f"{row['reward/mean']:g}), and from that nothing is learned; look at the completions' rewards, and "
            "begin where the policy sometimes succeeds (warm_start, an easier task, perfectible)"
        )
    return step


def _clock(run: Run, batch: Batch, trained_tokens: int) -> dict[str, float]:
    """Where the step's time went; the clock starts anew."""
    row = {f"time/{phase}": seconds for phase, seconds in run.seconds.items()}
    row["time/step"] = time.perf_counter() - run.started
    if batch.seconds:  # none where a resume read the batch from its checkpoint
        row["rate/rollout_tokens_per_s"] = batch.metrics["rollout/tokens"] / batch.seconds["rollout"]
    row["rate/learner_tokens_per_s"] = trained_tokens / run.seconds["update"]
    run.seconds, run.started = {}, 0.0
    return row


def _all(looks: Sequence[OnTokenLogits]) -> OnTokenLogits | None:
    """All of them as one; None where there is none."""

    def look(*seen: torch.Tensor) -> None:
        for each in looks:
            each(*seen)

    return look if looks else None


def _rollout_rows(batch: Batch, experience: Weighed) -> list[dict[str, Any]]:
    """One row a completion, as ``runs.directory.rollout_schema`` declares."""
    learner_logp_BR = experience.old_logp_BR.cpu()
    rows: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}  # completions of each group so far
    for index, (sample, reward) in enumerate(zip(batch.samples, batch.rewards, strict=True)):
        problem, completion, number = sample.problem, sample.completion, numbers.get(sample.group, 0)
        numbers[sample.group] = number + 1
        length = len(completion.tokens)
        rows.append(
            {
                "step": batch.step,
                "problem_id": problem.id,
                "sample": number,
                "prompt": problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1].content,
                "completion": sample.text,
                "answer": problem.answer,
                "reward": reward.value,
                "correct": reward.correct,
                "error": reward.error,
                "finish_reason": completion.finish_reason,
                "policy_version": completion.policy_version,
                "length": length,
                "advantage": float(experience.advantage_B[index]),
                "tokens": list(completion.tokens),
                "rollout_logp": completion.logp_T.tolist(),
                "learner_logp": learner_logp_BR[index, :length].tolist() if experience.by_learner else None,
            }
        )
    return rows
