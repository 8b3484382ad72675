"""One step of RL, in five calls: collect, score, weigh, learn, publish. Read ``Steps.step`` first.

    batch   = collect(step)     prompts -> completions -> rewards
    scored  = score(batch)      log-probs of the learner before its update, and of the reference
    weighed = weigh(scored)     advantages, correction weights, which tokens count
    update  = learn(weighed)    micro-batches -> loss -> step, retry or skip
    publish(...)                weights to the engine, metrics, completions, checkpoint, screen

Probes observe between weighing and learning, and change no bit of what is learned.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from mantissa.algorithms import values
from mantissa.base.errors import MantissaError
from mantissa.base.files import Reserve, is_full
from mantissa.guard.watch import RunGuard
from mantissa.mismatch.metrics import gap_metrics
from mantissa.precision.numerics import masked_mean
from mantissa.rl.assemble import Parts
from mantissa.rl.collect.batch import Batch
from mantissa.rl.collect.source import SyncSource
from mantissa.rl.config.run import RunConfig
from mantissa.rl.exact.check import Exactness
from mantissa.rl.exact.twin import EngineShare
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Update
from mantissa.rl.objective import weigh
from mantissa.rl.probes import Diagnose, Flushed, KeptMass, Lag, Probe, Refresh
from mantissa.rl.score import OnTokenLogits
from mantissa.rollout.types import CopyingEngine
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.metrics import undeclared
from mantissa.runs.trackers import Trackers
from mantissa.tasks import Problem

_SAID = {  # of a step's long phases, on the screen
    "rollout": "sampling",
    "learner_logp": "scoring",
    "reference_logp": "scoring by the reference",
    "update": "learning",
    "eval": "evaluating",
}
_SILENT = 3  # first steps without any advantage after which it is said
MOST_REJECTED = 0.5  # of a step's tokens, beyond which it is said what a correction leaves out


class Steps(ABC):
    """The steps of one run: its parts, its folder, its screen."""

    def __init__(self, config: RunConfig, parts: Parts, run: RunDirectory, trackers: Trackers, live: Live) -> None:
        self.config, self.parts, self.run, self.trackers, self.live = config, parts, run, trackers, live
        self.learner, self.sampler, self.reference = parts.learner, parts.sampler, parts.reference
        self.ranks = parts.ranks
        self.params = self.sampler.params_of(config.rollout)
        self.heldout: Sequence[Problem] = parts.task.split("heldout")
        self.position = 0  # prompts sampled for the steps taken
        self.silent = 0  # the step up to which every advantage was 0, from the first on
        self.rejecting = False  # whether a correction has left out most of a step, and it was said
        self.source: SyncSource
        self.exactness: Exactness | None = None
        self.guard: RunGuard | None = None
        if config.guard is not None:
            both = dict.fromkeys((config.precision.train, config.precision.rollout))
            self.guard = RunGuard(config.guard, run.path, "/".join(both), parts.ranks, live.note)
            self.learner.step.on_nonfinite = "skip"  # what becomes of it is then the guard's decision
            if self.learner.critic is not None:
                self.learner.critic.step.on_nonfinite = "skip"
        self.fell_back = False  # whether the run goes on in another format, from the checkpoint that says so
        self.probes = self._probes()
        self.room = Reserve(run.checkpoints, f"{run.checkpoints}, where room for the next checkpoint is kept")
        self._seconds: dict[str, float] = {}
        self._started: float | None = None  # when the present step was, its first try
        self._at = 0  # the present step

    def _probes(self) -> list[Probe]:
        """What observes the steps of this run."""
        config, parts, learner = self.config, self.parts, self.learner
        probes: list[Probe] = [Lag(learner, config.rollout.max_policy_lag)]
        if config.precision.kernels == "exact":
            made_of = learner, parts.sampler, self.reference, parts.replan
            self.exactness = Exactness(config, *made_of, self.run.path, self.live.note)
            probes.append(self.exactness)
        if parts.twin is not None:
            how = config.rollout.temperature, config.optimizer.micro_batch_tokens, parts.ranks
            engine = cast(CopyingEngine, parts.sampler.engine)  # a twin is made for such engines alone
            probes.append(EngineShare(engine, parts.twin, *how))
        if self.reference is not None:
            probes.append(Refresh(self.reference, learner))
        if self.params.truncates and config.rollout.support == "kept":
            probes.append(KeptMass(learner))
        if config.doctor is not None:
            probes.append(Diagnose(config, learner, self.run, self.live.note))
        return [*probes, Flushed(learner)]

    @abstractmethod
    def _save(self, step: int) -> None:
        """Write a checkpoint of the state after ``step``."""

    @abstractmethod
    def _hold_room(self, step: int) -> None:
        """Hold room on the disk for the next checkpoint."""

    def step(self, step: int) -> None:
        """One step of RL: collect, score, weigh, learn, publish. Probes observe it before anything is learned."""
        batch = self._collect(step)  # prompts -> completions -> rewards
        scored = self._score(step, self._experience(batch))  # log-probs: the learner's and the reference's
        weighed = weigh(scored, self.config.algorithm)  # advantages, correction weights, which tokens count
        observed = self._observe(step, weighed)
        update = self._learn(step, weighed)  # micro-batches -> loss -> step, retry or skip
        for probe in self.probes:
            observed |= probe.learned(step)
        self._publish(step, batch, weighed, update, observed)  # weights, metrics, completions, checkpoint, screen

    def _collect(self, step: int) -> Batch:
        """The step's graded completions."""
        self._at, self._started = step, self._started or time.perf_counter()
        with self._timed("rollout"):
            batch = self.source.take(step)
        if self.config.steps_behind:
            self._seconds["background"] = sum(batch.seconds.values())
        else:
            self._seconds |= batch.seconds
        return batch

    def _experience(self, batch: Batch) -> Experience:
        """As tensors; without what each token was drawn from, where the recipe asks to see what that does."""
        experience = batch.experience(self.parts.device)
        return replace(experience, support=None) if self.config.rollout.support == "ignored" else experience

    def _score(self, step: int, experience: Experience) -> Experience:
        """With the log-probs of the learner before its update, and of the reference where there is one."""
        exact = self.exactness
        if exact is not None and not exact.due(step):  # what the rollout delivered is the learner's, to the last bit
            experience = experience.with_learner(experience.rollout_logp_BR, None)
        else:
            with self._timed("learner_logp"):
                looks = [look for probe in self.probes if (look := probe.look(experience)) is not None]
                experience = experience.with_learner(*self.learner.score(experience, _all(looks)))
        if (critic := self.learner.critic) is not None:
            with self._timed("critic"):
                experience = replace(experience, value_BR=critic.score(experience))
        if self.reference is None:
            return experience
        with self._timed("reference_logp"):
            return replace(experience, ref_logp_BR=self.reference.score(experience))

    def _observe(self, step: int, experience: Experience) -> dict[str, float]:
        """What the probes see of a weighed batch; one may stop the run, or have the step sampled again."""
        observed: dict[str, float] = {}
        for probe in self.probes:
            if probe.due(step):
                with self._timed(probe.phase):
                    observed |= probe.observe(step, experience)
        return observed

    def _learn(self, step: int, experience: Experience) -> Update:
        with self._timed("update"):
            return self.learner.learn(experience, step)

    def _publish(
        self, step: int, batch: Batch, experience: Experience, update: Update, observed: dict[str, float]
    ) -> None:
        """Hand the weights over and write everything down; then the guard decides, and a checkpoint may be due."""
        config, last = self.config, step == self.config.steps
        self.position = batch.position
        row: dict[str, Any] = {"step": step, "rollout/version": batch.version, **observed, **batch.metrics}
        row |= self._learner_metrics(experience, update)
        row["advantage/silent_steps"] = self._silence(step, row)
        self._warn_of_rejection(step, row)
        if config.evaluation and (step % config.evaluation.every == 0 or last):
            with self._timed("eval"), self.source.engine(self.learner.weights, self.learner.version):
                row |= self._evaluate(step)
        with self._timed("sync"):  # after the evaluation, which would wait for the batch that this begins
            self.source.hand_over(step, self.learner.weights, self.learner.version)
        row |= self._clock(batch, update.trained_tokens)
        row |= {} if self.guard is None else {"precision/format": self.guard.format}
        assert not undeclared(row), f"metrics that the catalogue does not declare: {undeclared(row)}"
        self._write(
            step,
            lambda: self.run.write_rollouts(step, _rollout_rows(batch, experience)),
            lambda: self.run.append_metrics(row),  # before the checkpoint: a resume forgets rows after it, can add none
            lambda: self.trackers.log(step, row),
        )
        self.live.step(row)
        if self.guard is not None and self.guard.judge(row):
            self.fell_back = True
            if self.ranks.rank0:
                self.guard.fall_back(self.run.checkpoints, step, self.position, config.checkpoint.keep)
            return
        if step % config.checkpoint.every == 0 or last:
            with self._timed("checkpoint"):  # appears in the next step's row
                self._save(step)
        self._hold_room(step)

    def _write(self, step: int, *writes: Callable[[], object]) -> None:
        """Write a step down. Where the disk is full, into the room that is held, with a checkpoint of this step; the
        run then ends with the error."""
        full: MantissaError | None = None
        for write in writes:
            try:
                write()
            except MantissaError as error:
                if full is not None or not is_full(error) or not self.room.release():
                    raise
                full = error
                write()
        if full is not None:
            self._save(step)
            raise MantissaError(f"{full}; step {step} is kept: --resume goes on after it") from full

    def _learner_metrics(self, experience: Experience, update: Update) -> dict[str, float]:
        step, mask_BR = self.learner.step, experience.mask_BR
        row = {name: float(value) for name, value in values(update.tallies).items()}
        if experience.entropy_BR is not None:  # scored: what was not measured is not logged
            gap = gap_metrics(experience.rollout_logp_BR, experience.old_logp, mask_BR)
            row |= {name: float(value) for name, value in gap.items()}
            if self.learner.router_flips is not None:
                row["gap/router_flips"] = self.learner.router_flips
            row["policy/entropy"] = float(masked_mean(experience.entropy_BR.double(), mask_BR))
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

    def _silence(self, step: int, row: dict[str, float]) -> int:
        """Steps of a run that has had no advantage yet, this one included; said once they are some."""
        if self.silent < step - 1 or row["advantage/abs_max"] != 0:
            return 0
        self.silent = step
        if step == min(_SILENT, self.config.steps):
            self.live.note(
                f"warning: no advantage in the first {step} steps: within each group the rewards are all equal (mean "
                f"{row['reward/mean']:g}), and from that nothing is learned; look at the completions' rewards, and "
                "begin where the policy sometimes succeeds (warm_start, an easier task, perfectible)"
            )
        return step

    def _warn_of_rejection(self, step: int, row: dict[str, float]) -> None:
        """Said once in a run: what is left of such a step is little, and chosen by the gap."""
        share = left_out(row)
        if share <= MOST_REJECTED or self.rejecting:
            return
        self.rejecting = True
        self.live.note(
            f"warning: the correction left {share:.0%} of step {step}'s tokens out of the loss, so what is learnt from "
            "is chosen by the gap; bounds on a sequence's mean are for long responses (these have "
            f"{row['length/mean']:.0f} tokens on average): widen them (algorithm.correction.reject_low, reject_high, "
            "mask_low, mask_high), or weigh tokens instead (algorithm.correction=token_tis)"
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        evaluation = self.config.evaluation
        assert evaluation is not None
        problems = self.heldout[: evaluation.problems]
        seed, greedy = self.config.seed, replace(self.params, temperature=0.0)
        version = self.learner.version
        row = {"eval/greedy_accuracy": self.sampler.accuracy(problems, 1, greedy, version, seed, "greedy", step)}
        if evaluation.samples:
            row["eval/avg_at_k"] = self.sampler.accuracy(
                problems, evaluation.samples, self.params, version, seed, "avg@k", step
            )
        return row

    @contextmanager
    def _timed(self, phase: str | None) -> Iterator[None]:
        """Counts what is done in it as ``phase``; as nothing of its own where that is None. Of what takes long, the
        screen says that it is at work."""
        if phase is None:
            yield
            return
        if phase in _SAID:
            self.live.doing(_SAID[phase], self._at)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.parts.device.type == "cuda":
                torch.cuda.synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def _clock(self, batch: Batch, trained_tokens: int) -> dict[str, float]:
        """Where the step's time went; the clock starts anew."""
        assert self._started is not None
        row = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        row["time/step"] = time.perf_counter() - self._started
        if batch.seconds:  # none where a resume read the batch from its checkpoint
            row["rate/rollout_tokens_per_s"] = batch.metrics["rollout/tokens"] / batch.seconds["rollout"]
        row["rate/learner_tokens_per_s"] = trained_tokens / self._seconds["update"]
        self._seconds, self._started = {}, None
        return row


def _all(looks: Sequence[OnTokenLogits]) -> OnTokenLogits | None:
    """All of them as one; None where there is none."""

    def look(*seen: torch.Tensor) -> None:
        for each in looks:
            each(*seen)

    return look if looks else None


def left_out(row: Mapping[str, Any]) -> float:
    """The share of a step's tokens that a correction took out of the loss, by rejection or by mask."""
    return max(row.get(f"correction/{how}_token_fraction", 0.0) for how in ("rejected", "masked"))


def _rollout_rows(batch: Batch, experience: Experience) -> list[dict[str, Any]]:
    """One row a completion, as ``runs.directory.rollout_schema`` declares."""
    assert experience.advantage_B is not None, "weigh the experience first"
    learner_logp_BR = None if experience.entropy_BR is None else experience.old_logp.cpu()  # None: not scored
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
                "learner_logp": None if learner_logp_BR is None else learner_logp_BR[index, :length].tolist(),
            }
        )
    return rows
