"""The loop: the steps of a run, begun, and begun again where it was stopped.

Steps count from 1. A checkpoint ``step-N`` holds the state after step N; ``step-0`` is the state after the warm start.
Resuming reads the newest, forgets what was logged after it, and repeats those steps: every draw is a function of the
seed and the position, so they come out the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mantissa.base.bounds import boundary, count, number
from mantissa.base.errors import MantissaError
from mantissa.base.tensors import check_tensors
from mantissa.model import save_model
from mantissa.rl.adapters import FrozenBase
from mantissa.rl.assemble import Parts
from mantissa.rl.collect.batch import Batch, Collector, pack, unpack
from mantissa.rl.collect.sampler import success_rates
from mantissa.rl.collect.source import AsyncSource, SyncSource
from mantissa.rl.config.run import RunConfig
from mantissa.rl.probes import SampleAgain
from mantissa.rl.step import MOST_REJECTED, Steps, left_out
from mantissa.rl.warm_start import warm_start
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.trackers import Trackers
from mantissa.tasks import Problem
from mantissa.training import (
    Checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    saved_steps,
)

_BESIDE_BYTES = 1 << 16  # of a checkpoint's room, for what is not tensors


class Loop(Steps):
    """A run from its beginning or a checkpoint to its end."""

    def __init__(self, config: RunConfig, parts: Parts, run: RunDirectory, trackers: Trackers, live: Live) -> None:
        super().__init__(config, parts, run, trackers, live)
        self.train: Sequence[Problem] = parts.task.split("train")
        self.base = FrozenBase(config.model, parts.model, parts.tokenizer, run)
        self.kept: list[int] = []
        self.ahead: list[Batch] = []  # batches of later steps that a checkpoint held

    def go(self) -> bool:
        """Run to the end: from the newest checkpoint, or from the beginning. False: the guard fell back on the way, and
        the newest checkpoint is to be gone on from in another format."""
        saved = self.ranks.broadcast(saved_steps(self.run.checkpoints))  # rank 0 may be about to write one
        step = self.restore(load_checkpoint(self.run.checkpoints, saved[-1])) if saved else self.begin()
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
        params = dataclasses.replace(self.params, most_probable=config.algorithm.loss.most_probable)
        collector = Collector(self.sampler, self.train, self.kept, config.rollout, params, config.seed)
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

            warm = config.warm_start
            self.live.note(
                f"warm start: at most {warm.steps:,} supervised steps, until accuracy {warm.target_accuracy:g}; "
                "warm_start.steps=N for fewer"
            )
            with self.base.warming():
                warm_start(self.parts, warm, self.params, report, self.live.doing)
        if self.ranks.rank0:
            self.base.keep()
        self.sampler.engine.sync(self.learner.weights, self.learner.version)
        if self.reference is not None and self.reference.teacher is None:
            self.reference.take(self.learner.weights, self.learner.version)
        if self.learner.critic is not None:
            self.learner.critic.take(self.learner.weights)
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
            self.rejecting = any(left_out(row) > MOST_REJECTED for row in rows)
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
            kept = {} if self.reference.teacher is not None else checkpoint.part("reference")
            self.reference.load(state["reference"], kept)
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
            save_checkpoint(self.run.checkpoints, checkpoint, self.config.checkpoint.keep, spare)

    def _hold_room(self, step: int) -> None:
        """Hold room on the disk for a checkpoint of the state as it is, so that a disk that fills costs no step.

        In a run of one process: of several the others would have to take part where it is needed.
        """
        if not self.ranks.alone or step >= self.config.steps:
            return
        parts = [self.learner.trained, self.learner.step.optimizer_tensors(), *self.learner.beside.values()]
        parts += [self.reference.kept] if self.reference is not None else []
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
        if self.learner.critic is not None:
            self.ranks.check_alike(self.learner.critic.weights)
        more = {name: self.ranks.whole(tensors) for name, tensors in self.learner.beside.items()}
        trained = self.ranks.whole(self.learner.trained)
        optimizer = self.ranks.whole(self.learner.step.optimizer_tensors())
        if not self.ranks.rank0:
            return None
        state = {"step": self.learner.step.state_dict(), "kept": self.kept, "position": self.position}
        state["fingerprint"] = self._fingerprint
        state |= self.base.state() | guard
        if self.exactness is not None and self.exactness.replans:
            state["exact"] = self.exactness.kernels[0].plan.way
        if self.learner.critic is not None:
            state["critic"] = self.learner.critic.state_dict()
        if self.reference is not None:
            state["reference"] = self.reference.state_dict()
            more |= {"reference": kept} if (kept := self.reference.kept) else {}
        sampled, state["ahead"] = pack(self.source.pending(step) if step else ())
        if sampled:
            more["ahead"] = sampled
        return Checkpoint(step, trained, optimizer, state, more)
