"""The loop: take graded completions, measure the gap, learn, hand over the weights, write everything down.

Steps count from 1. A checkpoint ``step-N`` holds the state after step N; ``step-0`` is the state after the warm start.
Resuming reads the newest, forgets what was logged after it, and repeats those steps: every draw is a function of the
seed and the position, so they come out the same, bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mantissa.algorithms import values
from mantissa.bounds import boundary, count, number
from mantissa.errors import MantissaError
from mantissa.mismatch import gap_metrics
from mantissa.model import save_model
from mantissa.rl.adapters import FrozenBase
from mantissa.rl.assemble import Parts
from mantissa.rl.asynchronous import Ahead, InTurn, Source, lag_metrics
from mantissa.rl.batches import Batch, Collector, pack, unpack
from mantissa.rl.config import RunConfig
from mantissa.rl.exactness import Exactness
from mantissa.rl.experience import Experience
from mantissa.rl.guarded import RunGuard
from mantissa.rl.learner import Update
from mantissa.rl.warm_start import warm_start
from mantissa.rollout import NativeEngine
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.metrics import undeclared
from mantissa.runs.trackers import Trackers
from mantissa.tasks import Problem
from mantissa.tensors import check_tensors
from mantissa.training import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps

_SILENT = 3  # first steps without any advantage after which it is said
_PROBE_EVERY = 10  # steps between measurements of flushed gradients: each costs a forward and backward of 8 completions


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
        self.ahead: list[Batch] = []  # batches of later steps that a checkpoint held
        self.source: Source
        self.exactness: Exactness | None = None
        if config.policy.kernels == "exact":
            assert isinstance(parts.sampler.engine, NativeEngine)
            # A sum of gradients must not depend on whether its step was checked.
            self.learner.reuse_scoring = (config.policy.check_every or 1) == 1
            others = [] if self.reference is None else [self.reference.kernels]
            self.exactness = Exactness(
                config.policy, parts.learner, parts.sampler.engine, run, live.note, config.steps, parts.replan, others
            )
        self.guard: RunGuard | None = None
        if config.guard is not None:
            self.guard = RunGuard(config, run, parts.ranks, live.note)
            self.learner.step.on_nonfinite = "skip"  # what becomes of it is then the guard's decision
        self.fell_back = False  # whether the run goes on in another format, from the checkpoint that says so
        self._seconds: dict[str, float] = {}

    def go(self) -> bool:
        """Run to the end: from the newest checkpoint, or from the beginning. False: the guard fell back on the way, and
        the newest checkpoint is to be gone on from in another format."""
        saved = self.ranks.broadcast(saved_steps(self._checkpoints))  # rank 0 may be about to write one
        step = self._restore(saved[-1]) if saved else self._begin()
        self.source = self._source()
        self.source.start(step, self.learner.weights, self.learner.version, self.ahead)
        try:
            while step < self.config.steps and not self.fell_back:
                step += 1
                self._step(step)
        finally:
            self.source.close()
        if self.fell_back:
            return False
        weights = self.ranks.whole(self.learner.weights) if self.ranks.sharded else None
        if self.ranks.rank0:
            self.base.export()
            save_model(self.parts.model, self.parts.tokenizer, self.run.policy_path, weights=weights)
        return True

    def _source(self) -> Source:
        """Where batches come from, at the position after the last that was sampled."""
        config, engine = self.config, self.sampler.engine
        collector = Collector(self.sampler, self.train, self.kept, config.rollout, self.params, config.seed)
        collector.position = self.ahead[-1].position if self.ahead else self.position
        if config.steps_behind == 0:
            return InTurn(collector, engine)
        return Ahead(collector, engine, config.steps_behind, config.steps, self.parts.device)

    # the beginning, and beginning again

    def _begin(self) -> int:
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
                warm_start(
                    self.learner,
                    self.sampler,
                    self.parts.task.split("warm_start"),
                    self.heldout[: config.warm_start.problems],
                    config.warm_start,
                    self.parts.new_scaler(),
                    self.params,
                    self.parts.device,
                    report,
                )
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
        rates = sampled.success_rates(self.sampler.grade(sampled))
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

    def _restore(self, step: int) -> int:
        checkpoint = load_checkpoint(self._checkpoints, step)
        with boundary(
            f"checkpoint step-{step}", "it is damaged, or of another run; delete it to go on from an earlier"
        ):
            self._take(checkpoint)
        self.run.rewind(checkpoint.step)
        rows = self.run.read_metrics()
        self.silent = int(rows[-1].get("advantage/silent_steps", 0)) if rows else 0
        if self.guard is not None:
            self.guard.restore(checkpoint.step, checkpoint.state.get("guard", {}), rows)
        self.live.note(f"resumed after step {checkpoint.step}")
        if not checkpoint.checked:
            self.live.note(f"checkpoint step-{step} was written without digests: its files are taken as they are")
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
        guard = {} if self.guard is None else {"guard": self.guard.saving(step)}
        self.ranks.check_alike(self.learner.trained)
        trained = self.ranks.whole(self.learner.trained)
        optimizer = self.ranks.whole(self.learner.step.optimizer_tensors())
        if not self.ranks.rank0:
            return
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
        checkpoint = Checkpoint(step, trained, optimizer, state, more)
        spare = () if self.guard is None else (self.guard.good,)
        save_checkpoint(self._checkpoints, checkpoint, self.config.checkpoint.keep, spare)

    @property
    def _checkpoints(self) -> Any:
        return self.run.checkpoint_path(0).parent

    # one step

    def _step(self, step: int) -> None:
        config, started = self.config, time.perf_counter()
        version = self.learner.version
        collected = None
        while collected is None:
            collected = self._collect(step)
        batch, experience, measured = collected
        completions = [completion for group in batch.sampled.groups for completion in group]
        lag = lag_metrics(completions, version, config.rollout.max_policy_lag)
        if self.parts.share is not None and self.parts.share.due(step):
            with self._timed("engine_share"):  # before the sync: by the weights that sampled
                measured |= self.parts.share.measure(experience, batch.version)
        if self.reference is not None:
            with self._timed("reference_logp"):
                experience = experience.with_reference(self.reference.score(experience.sequences))
        with self._timed("update"):
            update = self.learner.update(experience, step, probe=step % _PROBE_EVERY == 1)
        if self.exactness is not None:
            measured |= self.exactness.updated()
        self.position = batch.position
        row: dict[str, Any] = {"step": step, "rollout/version": batch.version, **lag, **measured, **batch.metrics}
        if self.reference is not None:
            row["reference/version"] = self.reference.version  # of the one that this step was held to
            self.reference.follow(self.learner.weights, self.learner.version)
            row["reference/refreshes"] = self.reference.refreshes
        row |= self._learner_metrics(experience, update)
        row["advantage/silent_steps"] = self._silence(step, row)
        last = step == config.steps
        if config.evaluation and (step % config.evaluation.every == 0 or last):
            with self._timed("eval"), self.source.engine(self.learner.weights, self.learner.version):
                row |= self._evaluate(step)
        with self._timed("sync"):  # after the evaluation, which would wait for the batch that this begins
            self.source.hand_over(step, self.learner.weights, self.learner.version)
        self.run.write_rollouts(step, _rollout_rows(batch, experience, update))
        row |= self._clock(started, batch, update.trained_tokens)
        row |= {} if self.guard is None else {"precision/format": self.guard.format}
        assert not undeclared(row), f"metrics that the catalogue does not declare: {undeclared(row)}"
        self.run.append_metrics(row)  # before the checkpoint: a resume forgets rows after it, and can add none
        self.trackers.log(step, row)
        self.live.step(row)
        self._seconds = {}
        if self.guard is not None and self.guard.judge(row):
            self.fell_back = True
            if self.ranks.rank0:
                self.guard.fall_back(self._checkpoints, step, self.position, self.config.checkpoint.keep)
            return
        if step % config.checkpoint.every == 0 or last:
            with self._timed("checkpoint"):  # appears in the next step's row
                self._save(step)

    def _collect(self, step: int) -> tuple[Batch, Experience, dict[str, float]] | None:
        """The step's batch, scored and checked; None where exact kernels were planned anew: to be called again."""
        with self._timed("rollout"):
            batch = self.source.take(step)
        if self.config.steps_behind:
            self._seconds["background"] = sum(batch.seconds.values())
        else:
            self._seconds |= batch.seconds
        rewards = [reward.value for reward in batch.rewards]
        experience = Experience.build(batch.sampled.prompts, batch.sampled.groups, rewards, self.parts.device)
        if self.exactness is not None and not self.exactness.due(step):
            # The promise, used: these are the learner's own, to the last bit.
            return batch, experience.with_learner(experience.rollout_logp_BR, None), {}
        with self._timed("learner_logp"):
            look = None if self.exactness is None else self.exactness.look(experience)
            experience = experience.with_learner(*self.learner.score(experience.sequences, look))
        measured = {} if self.exactness is None else self.exactness.check(step, experience)
        if measured is None:
            self.source.again(self.position)
            return None
        return batch, experience, measured

    def _learner_metrics(self, experience: Experience, update: Update) -> dict[str, float]:
        sequences, step = experience.sequences, self.learner.step
        assert experience.old_logp_BR is not None
        row = {name: float(value) for name, value in values(update.tallies).items()}
        if experience.entropy_BR is not None:  # scored: what was not measured is not logged
            gap = gap_metrics(experience.rollout_logp_BR, experience.old_logp_BR, sequences.mask_BR)
            row |= {name: float(value) for name, value in gap.items()}
            row["policy/entropy"] = float(experience.entropy_BR[sequences.mask_BR].double().mean())
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
        if update.flushed_fraction is not None:
            row["precision/flushed_fraction"] = update.flushed_fraction
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
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.parts.device.type == "cuda":
                torch.cuda.synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def _clock(self, started: float, batch: Batch, trained_tokens: int) -> dict[str, float]:
        row = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        row["time/step"] = time.perf_counter() - started
        if batch.seconds:  # none where a resume read the batch from its checkpoint
            row["rate/rollout_tokens_per_s"] = batch.metrics["rollout/tokens"] / batch.seconds["rollout"]
        row["rate/learner_tokens_per_s"] = trained_tokens / self._seconds["update"]
        return row


def _rollout_rows(batch: Batch, experience: Experience, update: Update) -> list[dict[str, Any]]:
    """One row a completion, as ``runs.directory.rollout_schema`` declares."""
    sampled, rewards = batch.sampled, batch.rewards
    assert experience.old_logp_BR is not None
    learner_logp = None if experience.entropy_BR is None else experience.old_logp_BR.cpu()  # None: not scored
    rows: list[dict[str, Any]] = []
    for problem, group in zip(sampled.problems, sampled.groups, strict=True):
        for sample, completion in enumerate(group):
            index, reward = len(rows), rewards[len(rows)]
            length = len(completion.tokens)
            rows.append(
                {
                    "step": batch.step,
                    "problem_id": problem.id,
                    "sample": sample,
                    "prompt": problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1].content,
                    "completion": sampled.texts[index],
                    "answer": problem.answer,
                    "reward": reward.value,
                    "correct": reward.correct,
                    "error": reward.error,
                    "finish_reason": completion.finish_reason,
                    "policy_version": completion.policy_version,
                    "length": length,
                    "advantage": float(update.advantage_B[index]),
                    "tokens": list(completion.tokens),
                    "rollout_logp": completion.logp_T.tolist(),
                    "learner_logp": None if learner_logp is None else learner_logp[index, :length].tolist(),
                }
            )
    return rows
