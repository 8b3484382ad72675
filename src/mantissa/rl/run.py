"""One run: what it is made of and where it stands, and what of that a checkpoint keeps.

Steps count from 1. A checkpoint ``step-N`` holds the state after step N; ``step-0`` is the state after the warm start.
Resuming reads the newest, forgets what was logged after it, and repeats those steps: every draw is a function of the
seed and the position, so they come out the same, bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from mantissa.base.bounds import boundary, count, number
from mantissa.base.errors import MantissaError
from mantissa.base.files import Reserve
from mantissa.base.tensors import check_tensors
from mantissa.guard.watch import RunGuard
from mantissa.model import Decoder
from mantissa.rl.ahead import pack, unpack
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import Batch, SyncSource
from mantissa.rl.config.run import RunConfig
from mantissa.rl.policy import FrozenBase
from mantissa.rl.probes import Diagnose, EngineShare, Exactness, Flushed, KeptMass, Lag, Probe, Refresh
from mantissa.rollout.engine import CopyingEngine
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live, Trackers
from mantissa.tasks import Problem
from mantissa.training import Checkpoint, load_weights, save_checkpoint

_SAID = {  # of a step's long phases, on the screen
    "rollout": "sampling",
    "learner_logp": "scoring",
    "reference_logp": "scoring by the reference",
    "update": "learning",
    "eval": "evaluating",
}
MOST_REJECTED = 0.5  # of a step's tokens, beyond which it is said what a correction leaves out
_BESIDE_BYTES = 1 << 16  # of a checkpoint's room, for what is not tensors


class Run:
    """A run on its way. ``source``: where its batches come from, once it is open."""

    source: SyncSource

    def __init__(self, config: RunConfig, parts: Parts, folder: RunDirectory, trackers: Trackers, live: Live) -> None:
        self.config, self.parts, self.folder, self.trackers, self.live = config, parts, folder, trackers, live
        self.learner, self.sampler, self.reference = parts.learner, parts.sampler, parts.reference
        self.ranks = parts.ranks
        self.params = self.sampler.params_of(config.rollout)
        self.train: Sequence[Problem] = parts.task.split("train")
        self.heldout: Sequence[Problem] = parts.task.split("heldout")
        # Of a policy that is no decoder of ours it asks for adapters alone, and there are none.
        self.base = FrozenBase(config.model, cast("Decoder", parts.model), parts.tokenizer, folder)
        self.kept: list[int] = []  # indices of the training problems in use
        self.ahead: list[Batch] = []  # batches of later steps that a checkpoint held
        self.position = 0  # prompts sampled for the steps taken
        self.silent = 0  # the step up to which every advantage was 0, from the first on
        self.rejecting = False  # whether a correction has left out most of a step, and it was said
        self.exactness: Exactness | None = None
        self.guard: RunGuard | None = None
        if config.guard is not None:
            both = dict.fromkeys((config.precision.train, config.precision.rollout))
            self.guard = RunGuard(config.guard, folder.path, "/".join(both), parts.ranks, live.note)
        self.fell_back = False  # whether the run goes on in another format, from the checkpoint that says so
        self.probes = self._probes()
        self.room = Reserve(folder.checkpoints, f"{folder.checkpoints}, where room for the next checkpoint is kept")
        self.seconds: dict[str, float] = {}  # of the present step, by phase
        self.started = 0.0  # when the present step was, its first try; 0: not yet
        self.at = 0  # the present step

    def _probes(self) -> list[Probe]:
        """What observes the steps of this run."""
        config, parts, learner = self.config, self.parts, self.learner
        probes: list[Probe] = [Lag(learner, config.rollout.max_policy_lag)]
        if config.precision.kernels == "exact":
            made_of = learner, parts.sampler, self.reference, parts.replan
            self.exactness = Exactness(config, *made_of, self.folder.path, self.live.note)
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
            probes.append(Diagnose(config, config.doctor.every, learner, self.folder, self.live.note))
        return [*probes, Flushed(learner)]

    @contextmanager
    def timed(self, phase: str | None) -> Iterator[None]:
        """Counts what is done in it as ``phase``; as nothing of its own where that is None. Of what takes long, the
        screen says that it is at work."""
        if phase is None:
            yield
            return
        if phase in _SAID:
            self.live.doing(_SAID[phase], self.at)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.parts.device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what a checkpoint belongs to: the recipe's model, task and seed, and the training problems."""
        chosen = self.config.model_dump(mode="json", include={"model", "task", "seed"}, exclude_defaults=True)
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode())
        for problem in self.train:
            digest.update(f"{problem.id}\0{problem.answer}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


# a checkpoint: what it holds, written, and put back


def checkpoint_of(run: Run, step: int) -> Checkpoint | None:
    """All that a resume needs, on rank 0; collective."""
    guard = {} if run.guard is None else {"guard": run.guard.saving(step)}
    run.ranks.check_alike(run.learner.trained)
    for term in run.learner.terms:
        run.ranks.check_alike(term.alike)
    more = {name: run.ranks.whole(tensors) for name, tensors in run.learner.beside.items()}
    trained = run.ranks.whole(run.learner.trained)
    optimizer = run.ranks.whole(run.learner.step.optimizer_tensors())
    if not run.ranks.rank0:
        return None
    state = {"step": run.learner.step.state_dict(), "kept": run.kept, "position": run.position}
    state |= {"fingerprint": run.fingerprint, "rows": run.folder.record(step)}
    state |= run.base.state() | guard
    if run.exactness is not None and run.exactness.replans:
        state["exact"] = run.exactness.kernels[0].plan.way
    for term in run.learner.terms:
        state |= term.state
    state["ahead"] = []
    if later := run.source.pending(step) if step else ():
        more["ahead"], state["ahead"] = pack(later)
    return Checkpoint(step, trained, optimizer, state, more)


def save(run: Run, step: int) -> None:
    """Write the checkpoint of the state after ``step``."""
    made = checkpoint_of(run, step)
    if made is not None:
        spare = () if run.guard is None else (run.guard.good,)
        save_checkpoint(run.folder.checkpoints, made, run.config.checkpoint.keep, spare)


def hold_room(run: Run, step: int) -> None:
    """Hold room on the disk for a checkpoint of the state as it is, so that a disk that fills costs no step.

    In a run of one process: of several the others would have to take part where it is needed.
    """
    if not run.ranks.alone or step >= run.config.steps:
        return
    parts = [run.learner.trained, run.learner.step.optimizer_tensors(), *run.learner.beside.values()]
    tensors = [tensor for part in parts for tensor in part.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # beside them: a header's line for each, the plain state, and batches: the step's own, and those sampled ahead
    rollout = run.config.rollout
    batch = rollout.prompts * rollout.samples * (16 * rollout.max_tokens + 256)
    size += 256 * len(tensors) + 16 * len(run.kept) + (1 + run.config.steps_behind) * batch
    run.room.hold(size + _BESIDE_BYTES)


def restore(run: Run, checkpoint: Checkpoint) -> int:
    """Go on from a checkpoint; returns its step."""
    with boundary(
        f"checkpoint step-{checkpoint.step}", "it is damaged, or of another run; delete it to go on from an earlier"
    ):
        _take(run, checkpoint)
        gone = run.folder.require_whole(checkpoint.step, checkpoint.state.get("rows"))
    run.folder.rewind(checkpoint.step)
    rows = run.folder.metrics.read()
    with boundary(run.folder.path / "metrics.jsonl", "restore the file"):
        run.silent = int(rows[-1].get("advantage/silent_steps", 0)) if rows else 0
        run.rejecting = any(left_out(row) > MOST_REJECTED for row in rows)
    if run.guard is not None:
        run.guard.restore(checkpoint.step, checkpoint.state.get("guard", {}), rows)
    run.live.note(f"resumed after step {checkpoint.step} of {run.config.steps}")
    for said in gone:
        run.live.note(f"warning: {said}; the policy is the same without it, and what is shown of the run is not")
    if not checkpoint.checked:
        name = f"checkpoint step-{checkpoint.step}"
        run.live.note(f"{name} was written without digests: its files are taken as they are")
    return checkpoint.step


def _take(run: Run, checkpoint: Checkpoint) -> None:
    """Put a checkpoint back. Plain values first, then what has a check of its own: nothing is half put back."""
    state, problems = checkpoint.state, len(run.train)
    if state.get("fingerprint", run.fingerprint) != run.fingerprint:
        raise MantissaError(
            f"checkpoint step-{checkpoint.step} is of a run with another model, task or seed; put this run's back"
        )
    kept, position = state["kept"], state.get("position", checkpoint.step * run.config.rollout.prompts)
    if not kept or not all(number(index, 0, problems - 1, whole=True) for index in kept):
        raise MantissaError(f"checkpoint's kept prompts are not all among the task's {problems}; it is damaged")
    run.position, run.kept = count(position, "checkpoint's position"), list(kept)
    words, later = run.parts.model.config.vocab_size, state.get("ahead")
    run.ahead = unpack(checkpoint.more.get("ahead", {}), later, run.train, run.sampler, words) if later else []
    check_tensors(run.learner.trained, checkpoint.policy, "checkpoint")
    if run.exactness is not None and "exact" in state:
        run.exactness.use(state["exact"])
    run.base.restore(state)
    run.learner.step.load_optimizer_tensors(checkpoint.optimizer)
    run.learner.step.load_state_dict(state["step"])
    for term in run.learner.terms:
        term.load(checkpoint)
    load_weights(run.learner.trained, checkpoint.policy)


def warn(run: Run, step: int, row: dict[str, float]) -> None:
    """What a step's numbers warn of: no answer that can be read in the first, much that was rejected."""
    if step == 1 and row.get("reward/no_answer_fraction") == 1:
        run.live.note(
            "warning: no completion of the first step has an answer that the verifier can read, so all count as wrong: "
            "ask for \\boxed{} or <answer></answer> in the prompt (task.template), let answers end before "
            f"rollout.max_tokens ({row['length/truncated_fraction']:.0%} were cut off), or set task.verifier"
        )
    share = left_out(row)
    if share <= MOST_REJECTED or run.rejecting:
        return
    run.rejecting = True  # said once: what is left of such a step is little, and chosen by the gap
    run.live.note(
        f"warning: the correction left {share:.0%} of step {step}'s tokens out of the loss, so what is learnt from "
        "is chosen by the gap; bounds on a sequence's mean are for long responses (these have "
        f"{row['length/mean']:.0f} tokens on average): widen them (algorithm.correction.reject_low, reject_high, "
        "mask_low, mask_high), or weigh tokens instead (algorithm.correction=token_tis)"
    )


def left_out(row: Mapping[str, Any]) -> float:
    """The share of a step's tokens that a correction took out of the loss, by rejection or by mask."""
    return max(row.get(f"correction/{how}_token_fraction", 0.0) for how in ("rejected", "masked"))
