"""The loop: collect, score, weigh, learn, publish, and begin again where a run was stopped.

Steps count from 1. A checkpoint ``step-N`` holds the state after step N; ``step-0`` is the state after the warm start.
Resuming reads the newest, forgets what was logged after it, and repeats those steps: every draw is a function of the
seed and the position, so they come out the same, bit for bit.

The warm start: supervised steps on the task's own solutions, so that RL begins with a policy that sometimes succeeds.
It runs in the learner's precision through the same optimiser step as RL, with an optimiser and a scaler of its own that
end with it. Everything in it is a function of the seed, so a run killed during its warm start begins it again and
arrives at the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mantissa.algorithms import aggregation_scale, values
from mantissa.bounds import boundary, count, number
from mantissa.errors import MantissaError
from mantissa.files import Reserve, is_full
from mantissa.mismatch import gap_metrics
from mantissa.model import save_model
from mantissa.precision.numerics import masked_sum
from mantissa.rl.adapters import FrozenBase
from mantissa.rl.assemble import Parts
from mantissa.rl.collect import AsyncSource, Batch, Collector, Sampler, SyncSource, pack, rest, success_rates, unpack
from mantissa.rl.config import RunConfig, WarmStartConfig
from mantissa.rl.experience import Experience, Sequences
from mantissa.rl.guarded import RunGuard
from mantissa.rl.learner import Learner, Update, weigh
from mantissa.rl.probes import Diagnose, EngineShare, Exactness, Flushed, Lag, Probe, Refresh, SampleAgain
from mantissa.rl.seeds import stream_slice
from mantissa.rollout import SamplingParams, VllmEngine
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.metrics import undeclared
from mantissa.runs.trackers import Trackers
from mantissa.tasks import Problem
from mantissa.tensors import check_tensors
from mantissa.training import (
    Checkpoint,
    OptimizerStep,
    learning_rate,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    saved_steps,
)

_LR_WARMUP = 20
_BESIDE_BYTES = 1 << 16  # of a checkpoint's room, for what is not tensors
_SILENT = 3  # first steps without any advantage after which it is said
_MOST_REJECTED = 0.5  # of a step's tokens, beyond which it is said what a correction leaves out


class Loop:
    """One run: its parts, its folder, its screen."""

    def __init__(self, config: RunConfig, parts: Parts, run: RunDirectory, trackers: Trackers, live: Live) -> None:
        self.config, self.parts, self.run, self.trackers, self.live = config, parts, run, trackers, live
        self.learner, self.sampler, self.reference = parts.learner, parts.sampler, parts.reference
        self.ranks = parts.ranks
        rollout = config.rollout
        self.params = self.sampler.params(rollout.max_tokens, rollout.temperature, rollout.stop)
        self.train: Sequence[Problem] = parts.task.split("train")
        self.heldout: Sequence[Problem] = parts.task.split("heldout")
        self.base = FrozenBase(config.model, parts.model, parts.tokenizer, run)
        self.kept: list[int] = []
        self.position = 0  # prompts sampled for the steps taken
        self.silent = 0  # the step up to which every advantage was 0, from the first on
        self.rejecting = False  # whether a correction has left out most of a step, and it was said
        self.ahead: list[Batch] = []  # batches of later steps that a checkpoint held
        self.source: SyncSource
        self.exactness: Exactness | None = None
        self.guard: RunGuard | None = None
        if config.guard is not None:
            self.guard = RunGuard(config, run, parts.ranks, live.note)
            self.learner.step.on_nonfinite = "skip"  # what becomes of it is then the guard's decision
        self.fell_back = False  # whether the run goes on in another format, from the checkpoint that says so
        self.probes = self._probes()
        self.room = Reserve(self._checkpoints, f"{self._checkpoints}, where room for the next checkpoint is kept")
        self._seconds: dict[str, float] = {}
        self._started: float | None = None  # when the present step was, its first try

    def _probes(self) -> list[Probe]:
        """What observes the steps of this run."""
        config, parts, learner = self.config, self.parts, self.learner
        probes: list[Probe] = [Lag(learner, config.rollout.max_policy_lag)]
        if config.precision_policy.kernels == "exact":
            self.exactness = Exactness(config, parts, self.run, self.live.note)
            probes.append(self.exactness)
        if parts.twin is not None and isinstance(parts.sampler.engine, VllmEngine):
            how = config.rollout.temperature, config.optimizer.micro_batch_tokens, parts.ranks
            probes.append(EngineShare(parts.sampler.engine, parts.twin, *how))
        if self.reference is not None:
            probes.append(Refresh(self.reference, learner))
        if config.doctor is not None:
            probes.append(Diagnose(config, learner, self.run, self.live.note))
        return [*probes, Flushed(learner)]

    def go(self) -> bool:
        """Run to the end: from the newest checkpoint, or from the beginning. False: the guard fell back on the way, and
        the newest checkpoint is to be gone on from in another format."""
        saved = self.ranks.broadcast(saved_steps(self._checkpoints))  # rank 0 may be about to write one
        step = self.restore(load_checkpoint(self._checkpoints, saved[-1])) if saved else self.begin()
        self.open(step)
        try:
            while step < self.config.steps and not self.fell_back:
                try:
                    self.step(step + 1)
                except SampleAgain:
                    self.source.again(self.position)
                else:
                    step += 1
        finally:
            self.source.close()
            self.room.release()
        if self.fell_back:
            return False
        self.export()
        return True

    def open(self, step: int) -> None:
        """Make ready for the step after ``step``."""
        self.source = self._source()
        self.source.start(step, self.learner.weights, self.learner.version, self.ahead)
        self._hold_room(step)

    def export(self) -> None:
        """Write the policy as it now is into the run's folder."""
        weights = self.ranks.whole(self.learner.weights) if self.ranks.sharded else None
        if self.ranks.rank0:
            self.base.export()
            save_model(self.parts.model, self.parts.tokenizer, self.run.policy_path, weights=weights)

    def _source(self) -> SyncSource:
        """Where batches come from, at the position after the last that was sampled."""
        config, engine = self.config, self.sampler.engine
        collector = Collector(self.sampler, self.train, self.kept, config.rollout, self.params, config.seed)
        collector.position = self.ahead[-1].position if self.ahead else self.position
        if config.steps_behind == 0:
            return SyncSource(collector, engine)
        return AsyncSource(collector, engine, config.steps_behind, config.steps, self.parts.device)

    # the beginning, and beginning again

    def begin(self) -> int:
        """The run's beginning, the warm start included; returns step 0."""
        self.run.rewind(0)
        if self.guard is not None:
            self.guard.restore(0, {}, [])
        self.run.truncate_warm_start(-1)
        config = self.config
        if config.warm_start is not None:

            def report(row: dict[str, Any]) -> None:
                self.run.append_warm_start(row)
                self.live.note(
                    f"warm start {row['step']:>4}   loss {row['warm_start/loss']:.3f}   "
                    f"accuracy {row['warm_start/accuracy']:.3f}"
                )

            with self.base.warming():
                warm_start(self.parts, config.warm_start, self.params, report)
        if self.ranks.rank0:
            self.base.keep()
        self.sampler.engine.sync(self.learner.weights, self.learner.version)
        if self.reference is not None:
            self.reference.take(self.learner.weights, self.learner.version)
        self.kept = self._perfectible()
        self._save(0)
        return 0

    def _perfectible(self) -> list[int]:
        """Indices of the training problems to use: all, or those the policy solves sometimes."""
        every = list(range(len(self.train)))
        filter_ = self.config.perfectible
        if filter_ is None:
            return every
        sampled = self.sampler.sample(
            self.train, filter_.samples, self.params, self.learner.version, self.config.seed, "perfectible"
        )
        rates = success_rates(sampled, self.sampler.grade(sampled))
        kept = [index for index in every if filter_.low <= rates[index] <= filter_.high]
        self.live.note(
            f"perfectible: kept {len(kept)} of {len(every)} prompts with success rate in "
            f"[{filter_.low}, {filter_.high}] over {filter_.samples} samples (mean rate {sum(rates) / len(rates):.3f})"
        )
        if not kept:
            raise MantissaError(
                f"perfectible: no training prompt has a success rate in [{filter_.low}, {filter_.high}] "
                f"(mean {sum(rates) / len(rates):.3f}); warm-start to another accuracy, or set perfectible=null"
            )
        return kept

    def restore(self, checkpoint: Checkpoint) -> int:
        """Go on from a checkpoint; returns its step."""
        with boundary(
            f"checkpoint step-{checkpoint.step}", "it is damaged, or of another run; delete it to go on from an earlier"
        ):
            self._take(checkpoint)
        self.run.rewind(checkpoint.step)
        rows = self.run.read_metrics()
        with boundary(self.run.path / "metrics.jsonl", "restore the file"):
            self.silent = int(rows[-1].get("advantage/silent_steps", 0)) if rows else 0
            self.rejecting = any(_left_out(row) > _MOST_REJECTED for row in rows)
        if self.guard is not None:
            self.guard.restore(checkpoint.step, checkpoint.state.get("guard", {}), rows)
        self.live.note(f"resumed after step {checkpoint.step}")
        if not checkpoint.checked:
            name = f"checkpoint step-{checkpoint.step}"
            self.live.note(f"{name} was written without digests: its files are taken as they are")
        return checkpoint.step

    def _take(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint back. Plain values first, then what has a check of its own: nothing is half put back."""
        state, problems = checkpoint.state, len(self.train)
        if state.get("fingerprint", self._fingerprint) != self._fingerprint:
            raise MantissaError(
                f"checkpoint step-{checkpoint.step} is of a run with another model, task or seed; put this run's back"
            )
        kept, position = state["kept"], state.get("position", checkpoint.step * self.config.rollout.prompts)
        if not kept or not all(number(index, 0, problems - 1, whole=True) for index in kept):
            raise MantissaError(f"checkpoint's kept prompts are not all among the task's {problems}; it is damaged")
        self.position, self.kept = count(position, "checkpoint's position"), list(kept)
        ahead = checkpoint.more.get("ahead", {})
        self.ahead = unpack(ahead, state.get("ahead", ()), self.train, self.sampler, self.parts.model.config.vocab_size)
        check_tensors(self.learner.trained, checkpoint.policy, "checkpoint")
        if self.exactness is not None and "exact" in state:
            self.exactness.use(state["exact"])
        self.base.restore(state)
        self.learner.step.load_optimizer_tensors(checkpoint.optimizer)
        self.learner.step.load_state_dict(state["step"])
        self.learner.load_beside(checkpoint)
        if self.reference is not None:
            self.reference.load(state["reference"], checkpoint.part("reference"))
        load_weights(self.learner.trained, checkpoint.policy)

    @functools.cached_property
    def _fingerprint(self) -> str:
        """SHA-256 of what a checkpoint belongs to: the recipe's model, task and seed, and the training problems."""
        chosen = self.config.model_dump(mode="json", include={"model", "task", "seed"}, exclude_defaults=True)
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode())
        for problem in self.train:
            digest.update(f"{problem.id}\0{problem.answer}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _save(self, step: int) -> None:
        checkpoint = self.checkpoint(step)
        if checkpoint is not None:
            spare = () if self.guard is None else (self.guard.good,)
            save_checkpoint(self._checkpoints, checkpoint, self.config.checkpoint.keep, spare)

    def _hold_room(self, step: int) -> None:
        """Hold room on the disk for a checkpoint of the state as it is, so that a disk that fills costs no step.

        In a run of one process: of several the others would have to take part where it is needed.
        """
        if not self.ranks.alone or step >= self.config.steps:
            return
        parts = [self.learner.trained, self.learner.step.optimizer_tensors(), *self.learner.beside.values()]
        parts += [self.reference.weights] if self.reference is not None else []
        tensors = [tensor for part in parts for tensor in part.values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # beside them: a header's line for each, the plain state, and batches: the step's own, and those sampled ahead
        rollout = self.config.rollout
        batch = rollout.prompts * rollout.samples * (16 * rollout.max_tokens + 256)
        size += 256 * len(tensors) + 16 * len(self.kept) + (1 + self.config.steps_behind) * batch
        self.room.hold(size + _BESIDE_BYTES)

    def checkpoint(self, step: int) -> Checkpoint | None:
        """All that a resume needs, on rank 0; collective."""
        guard = {} if self.guard is None else {"guard": self.guard.saving(step)}
        self.ranks.check_alike(self.learner.trained)
        trained = self.ranks.whole(self.learner.trained)
        optimizer = self.ranks.whole(self.learner.step.optimizer_tensors())
        if not self.ranks.rank0:
            return None
        state = {"step": self.learner.step.state_dict(), "kept": self.kept, "position": self.position}
        state["fingerprint"] = self._fingerprint
        state |= self.base.state() | guard
        if self.exactness is not None and self.exactness.replans:
            state["exact"] = self.exactness.kernels[0].plan.way
        more = self.learner.beside
        if self.reference is not None:
            state["reference"], more["reference"] = self.reference.state_dict(), self.reference.weights
        sampled, state["ahead"] = pack(self.source.pending(step) if step else ())
        if sampled:
            more["ahead"] = sampled
        return Checkpoint(step, trained, optimizer, state, more)

    @property
    def _checkpoints(self) -> Any:
        return self.run.checkpoint_path(0).parent

    # one step

    def step(self, step: int) -> None:
        """One step of RL: collect, score, weigh, learn, publish. Probes observe it before anything is learned."""
        batch = self._collect(step)  # prompts -> completions -> rewards
        scored = self._score(step, batch.experience(self.parts.device))  # log-probs: the learner's and the reference's
        weighed = weigh(scored, self.config.algorithm)  # advantages, correction weights, which tokens count
        observed = self._observe(step, weighed)
        update = self._learn(step, weighed)  # micro-batches -> loss -> step, retry or skip
        for probe in self.probes:
            observed |= probe.learned(step)
        self._publish(step, batch, weighed, update, observed)  # weights, metrics, completions, checkpoint, screen

    def _collect(self, step: int) -> Batch:
        """The step's graded completions."""
        self._started = self._started or time.perf_counter()
        with self._timed("rollout"):
            batch = self.source.take(step)
        if self.config.steps_behind:
            self._seconds["background"] = sum(batch.seconds.values())
        else:
            self._seconds |= batch.seconds
        return batch

    def _score(self, step: int, experience: Experience) -> Experience:
        """With the log-probs of the learner before its update, and of the reference where there is one."""
        exact = self.exactness
        if exact is not None and not exact.due(step):  # what the rollout delivered is the learner's, to the last bit
            experience = experience.with_learner(experience.rollout_logp_BR, None)
        else:
            with self._timed("learner_logp"):
                look = None if exact is None else exact.look(experience)
                experience = experience.with_learner(*self.learner.score(experience, look))
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
                self.guard.fall_back(self._checkpoints, step, self.position, config.checkpoint.keep)
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
            row["policy/entropy"] = float(experience.entropy_BR[mask_BR].double().mean())
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
        share = _left_out(row)
        if share <= _MOST_REJECTED or self.rejecting:
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
        rollout, seed = self.config.rollout, self.config.seed
        greedy = self.sampler.params(rollout.max_tokens, 0.0, rollout.stop)
        version = self.learner.version
        row = {"eval/greedy_accuracy": self.sampler.accuracy(problems, 1, greedy, version, seed, "greedy", step)}
        if evaluation.samples:
            row["eval/avg_at_k"] = self.sampler.accuracy(
                problems, evaluation.samples, self.params, version, seed, "avg@k", step
            )
        return row

    @contextmanager
    def _timed(self, phase: str | None) -> Iterator[None]:
        """Counts what is done in it as ``phase``; as nothing of its own where that is None."""
        if phase is None:
            yield
            return
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


def _left_out(row: Mapping[str, Any]) -> float:
    """The share of a step's tokens that a correction took out of the loss, by rejection or by mask."""
    return max(row.get(f"correction/{how}_token_fraction", 0.0) for how in ("rejected", "masked"))


def _rollout_rows(batch: Batch, experience: Experience) -> list[dict[str, Any]]:
    """One row a completion, as ``runs.directory.rollout_schema`` declares."""
    advantage_B, *_ = experience.weighed
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
                "advantage": float(advantage_B[index]),
                "tokens": list(completion.tokens),
                "rollout_logp": completion.logp_T.tolist(),
                "learner_logp": None if learner_logp_BR is None else learner_logp_BR[index, :length].tolist(),
            }
        )
    return rows


# The warm start


def warm_start(
    parts: Parts, config: WarmStartConfig, params: SamplingParams, report: Callable[[dict[str, Any]], None]
) -> None:
    """Train on the task's solutions until ``config.steps``, or until sampled accuracy reaches the target.

    ``report`` receives ``{"step", "warm_start/loss", "warm_start/accuracy"}`` after each evaluation.
    Every problem of the split has a solution: ``assemble`` has seen to that.
    """
    learner, sampler = parts.learner, parts.sampler
    solved, heldout = parts.task.split("warm_start"), parts.task.split("heldout")[: config.problems]
    optimizer_step = learner.optimizer_step(
        learning_rate(config.lr, _LR_WARMUP), parts.new_scaler(), purpose="warm start"
    )
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        indices = stream_slice(len(solved), (step - 1) * config.batch, config.batch, learner.seed, "warm_start")
        sequences = _sequences([solved[index] for index in indices], sampler, parts.device)
        losses.append(_supervised_step(learner, optimizer_step, sequences))
        if step % config.evaluate_every == 0 or step == config.steps:
            sampler.engine.sync(learner.weights, learner.version)
            accuracy = sampler.accuracy(
                heldout, 1, params, learner.version, learner.seed, "warm_start evaluation", step
            )
            rest(sampler.engine)
            report({"step": step, "warm_start/loss": sum(losses) / len(losses), "warm_start/accuracy": accuracy})
            losses.clear()
            if accuracy >= config.target_accuracy:
                return


def _sequences(problems: Sequence[Problem], sampler: Sampler, device: torch.device) -> Sequences:
    """Each prompt with its solution and an end token."""
    end = sampler.tokenizer.eos_ids[0]
    responses = []
    for problem in problems:
        assert problem.solution is not None, f"problem {problem.id} has no solution"
        responses.append([*sampler.tokenizer.encode(problem.solution), end])
    return Sequences.build([sampler.encode(problem) for problem in problems], responses, device)


def _supervised_step(learner: Learner, step: OptimizerStep, sequences: Sequences) -> float:
    """One step on -mean_t logp; returns that loss."""
    scale_BR, ranks = aggregation_scale(sequences.mask_BR, "token_mean"), learner.ranks
    rows = sequences.rows
    parts = sequences.micro_batches(rows, learner.config.micro_batch_tokens, ranks)
    losses: list[torch.Tensor] = []

    def backward(scale: float) -> torch.Tensor:
        losses.clear()
        for part_rows in parts:
            part = sequences.select(part_rows if len(part_rows) else rows[:1])
            logp_N = learner.logp(part, learner.kernels)
            if len(part_rows):
                weight_N = scale_BR[part_rows, : part.mask_BR.shape[1]][part.mask_BR]
            else:
                weight_N = torch.zeros_like(logp_N)  # only there for the exchange with other ranks
            loss = -masked_sum(logp_N * weight_N, torch.ones_like(logp_N, dtype=torch.bool))
            losses.append(loss.detach())
            (loss * scale).backward()
        ranks.sum_gradients(step.parameters.values())
        return torch.stack(losses).sum()

    step.run(backward)
    return ranks.sum_of(float(torch.stack(losses).sum()))
