"""The drop-in: low precision for any torch loop, with loss scaling that loses nothing.

    trainer = PrecisionTrainer(model, optimizer, precision="fp16")
    for batch in loader:
        outcome = trainer.step(batch, loss_fn)

The model stays fp32: its parameters are the master weights, and every forward computes on copies of them in the format
(``kernels.autocast``: the GPU's own arithmetic, or on a CPU values that are really rounded, forward and backward). The
loss is fp32. One optimiser step (``OptimizerStep``) scales, unscales, looks for overflow, clips, steps or repeats; the
reinforcement-learning loop uses the same one.

To repeat a batch after an overflow is to repeat it exactly: torch's generators (dropout) and the model's buffers (a
batch norm's statistics) are put back. A batch that is given up leaves the buffers as they were, too. ``loss_fn`` is
called again; what else it changes is its own affair.

Micro-batches: with ``accumulate=n`` the optimiser's turn comes at every n-th batch, gradients are averaged over ranks
only then, and after an overflow all n are repeated. Batches count by ``weight``: over the n micro-batches and all
ranks, the gradient is

    sum_i w_i grad L_i / sum_i w_i

so uneven last batches (w_i = size of the batch / usual size) are averaged by sample, not by rank. A rank without a
batch passes None and takes part with weight 0; ``batches`` does that.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.base.bounds import boundary, count
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.ranks import Ranks, forget_unsent, shard_like, synchronising, unwrapped, whole
from mantissa.dropin.checks import (
    check_accumulate,
    check_goes_on,
    check_loss,
    check_optimizer,
    check_options,
    check_scheduler,
    checked_weight,
)
from mantissa.dropin.environment import switched_off
from mantissa.dropin.window import Micro, MixedPrecision, RetryWindow, device_of, flush_probe, take_over
from mantissa.guard import GuardConfig
from mantissa.guard.watch import Watch
from mantissa.precision import FP32
from mantissa.training import checkpoint
from mantissa.training.clipping import adaptive_clip_
from mantissa.training.optimizer import COMPENSATION, Masters, check_masters
from mantissa.training.scaler import LossScaler, ScalerConfig
from mantissa.training.step import OptimizerStep, StepOutcome

LossFunction = Callable[[nn.Module, Any], Tensor]


class PrecisionTrainer:
    """Train ``model`` with ``optimizer`` in ``precision`` (``fp32`` | ``bf16`` | ``fp16``); in fp32 for fp16 where
    the environment or ``.env`` says ``ENABLE_FP16_TRAINING=false``.

    - ``backend``: ``auto`` is native on CUDA and on a CPU simulated (bf16, fp16); ``native``, ``simulated`` insist.
    - ``fallback``: where the device lacks the format's arithmetic, ``error`` refuses and ``warn`` uses fp32.
    - ``scale``: ``dynamic`` (torch's rule), ``auto`` (from the gradients' observed range), a number (fixed), or a
      ``ScalerConfig``. The rules are for fp16 alone.
    - ``retries``: backward passes repeated on one batch after an overflow; 4, or the ``ScalerConfig``'s.
    - ``accumulate``: micro-batches to an optimiser step.
    - ``max_grad_norm``: bound on the unscaled Euclidean norm. ``adaptive_clip``: factor of adaptive gradient clipping.
    - ``masters``: ``fp32``, or weights of bf16's values, ``bf16_stochastic`` or ``bf16_kahan``
      (``training/optimizer.py``): the model's are rounded at once. Not with fp16.
    - ``scheduler``: stepped after each update that was applied, and only then; without arguments, so that
      ``ReduceLROnPlateau`` is its owner's to step.
    - ``on_nonfinite``: ``stop`` raises on a non-finite gradient that no lower scale cures, naming the module where it
      began; ``skip`` gives the batch up. Without it: ``skip`` under a guard, whose decision it then is, else ``stop``.
    - ``detect_anomaly``: that error also names the forward's line, by autograd's anomaly mode; free until then.
    - ``probe_every``: at every n-th optimiser step, measure on its last batch which fraction of the gradients the
      format flushes to zero (two more passes; 0: never).
    - ``run_dir``: a folder for ``metrics.jsonl``, a row an optimiser step. ``guard``: thresholds that decide when the
      run leaves this precision; needs ``run_dir``, where it keeps a last good checkpoint, written every ``good_every``
      updates that it finds healthy.
    - ``say``: called on rank 0 with the line that tells the precision and its reason.

    Attributes: ``precision`` (requested, active, backend, reason), ``evidence`` (the probe's findings), ``steps``
    (optimiser steps attempted), ``updates`` (applied), ``skipped``, ``retried``, ``batches_seen``, ``ranks``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str = "fp16",
        *,
        backend: Literal["auto", "native", "simulated"] = "auto",
        fallback: Literal["error", "warn"] = "error",
        scale: Literal["dynamic", "auto"] | float | ScalerConfig = "dynamic",
        retries: int | None = None,
        accumulate: int = 1,
        max_grad_norm: float = float("inf"),
        adaptive_clip: float | None = None,
        masters: Masters = "fp32",
        scheduler: Any = None,
        on_nonfinite: Literal["stop", "skip"] | None = None,
        detect_anomaly: bool = False,
        probe_every: int = 0,
        run_dir: Path | str | None = None,
        guard: GuardConfig | None = None,
        good_every: int = 50,
        say: Callable[[str], None] = print,
    ) -> None:
        on_nonfinite = on_nonfinite or ("stop" if guard is None else "skip")
        check_optimizer(optimizer)
        check_scheduler(scheduler, optimizer)
        check_options(
            model, accumulate=accumulate, max_grad_norm=max_grad_norm, adaptive_clip=adaptive_clip,
            on_nonfinite=on_nonfinite, probe_every=probe_every, good_every=good_every,
        )  # fmt: skip
        self._model, self._optimizer = model, optimizer
        self._scheduler, self._accumulate = scheduler, accumulate
        self.ranks = Ranks.of(model)
        self.probe_every = probe_every
        self.flushed_fraction: float | None = None
        self.say = say if self.ranks.rank0 else lambda line: None
        self.device = device_of(model)
        options: dict[str, Any] = {"backend": backend, "fallback": fallback, "scale": scale, "retries": retries}
        self._settled = partial(MixedPrecision.of, device=self.device, say=self.say, **options)
        if precision == "fp16" and switched_off():
            self.say("precision: ENABLE_FP16_TRAINING is off: training in fp32, not in fp16")
            precision = "fp32"
        settled = self._settled(precision=precision)
        self._window = RetryWindow(
            model, optimizer, settled, detect_anomaly=detect_anomaly, max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite, masters=masters,
        )  # fmt: skip
        if masters != "fp32":
            self.say(f"masters: {masters}: {self.optimizer_step.masters.reason}")
        self._take(settled)
        if adaptive_clip is not None:
            self.optimizer_step.clip = lambda: adaptive_clip_(self.optimizer_step.parameters.values(), adaptive_clip)
        self.steps = 0
        self.retried = 0
        self.batches_seen = 0
        self._last: tuple[Any, LossFunction] | None = None
        if guard is not None and run_dir is None:
            raise MantissaError("PrecisionTrainer(guard=...) needs run_dir: its decisions and checkpoints live there")
        self._watch = None if run_dir is None else Watch(run_dir, guard, good_every, self.ranks, self.say)
        self._began = 0.0

    def use(self, precision: str) -> None:
        """Compute in ``precision`` from the next step on, with a fresh scaler; checked by the probe and told.

        Refused while gradients accumulate: they have the scale of the precision before.
        """
        self.check_closed(f"use({precision!r})")
        self._switch(precision)

    def _switch(self, precision: str) -> None:
        settled = self._settled(precision=precision)
        check_masters(self.optimizer_step.masters.kind, settled.role.active)
        self._take(settled)

    def check_closed(self, what: str) -> None:
        """Refuse ``what`` while micro-batches wait for the optimiser's turn."""
        if self.accumulated:
            raise MantissaError(
                f"{what} with {self.accumulated} of {self.accumulate} micro-batches accumulated, whose gradients it "
                "would not fit: do it after the optimiser's turn, or call flush() or abandon() first"
            )

    def _take(self, settled: MixedPrecision) -> None:
        self._in_use = settled
        self.precision, self.autocast, self.evidence = settled.role, settled.autocast, settled.evidence
        self.optimizer_step.format, self.optimizer_step.scaler = settled.role.active, settled.scaler

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def scheduler(self) -> Any:
        """Stepped after each update; another one is checked as the first was."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        check_scheduler(scheduler, self.optimizer)
        self._scheduler = scheduler

    @property
    def accumulate(self) -> int:
        """Micro-batches to an optimiser step; to be changed between two of them."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, accumulate: int) -> None:
        check_accumulate(self.model, accumulate, self.probe_every)
        self.check_closed(f"accumulate={accumulate}")
        self._accumulate = accumulate

    @property
    def optimizer_step(self) -> OptimizerStep:
        return self._window.step

    @property
    def latest(self) -> StepOutcome | None:
        """The outcome of the last optimiser step."""
        return self._window.outcome

    @property
    def scaler(self) -> LossScaler:
        return self.optimizer_step.scaler

    @property
    def updates(self) -> int:
        return self.optimizer_step.updates

    @property
    def skipped(self) -> int:
        return self.optimizer_step.skipped

    @property
    def accumulated(self) -> int:
        """Micro-batches that wait for the optimiser's turn."""
        return len(self._window.micros)

    def forward(self) -> AbstractContextManager[None]:
        """The context in which the model computes as it does in training; for evaluation (add ``torch.no_grad()``)."""
        return self.autocast.forward()

    def step(self, batch: Any, loss_fn: LossFunction, weight: float = 1.0) -> StepOutcome:
        """Learn from one batch: ``loss_fn(model, batch)`` is its mean loss, a scalar.

        ``weight``: what the batch counts for, 1 for one of the usual size. ``batch`` None: this rank has none left and
        takes part with weight 0 (on the last one it had, for the other ranks wait for its part of every exchange).
        The outcome is ``accumulated`` until the window of ``accumulate`` batches is full, and then ``stepped``,
        ``retried`` or ``skipped``. An exception leaves no gradients and no open window behind.
        """
        if batch is None:
            if self._last is None:
                raise MantissaError(
                    "step(None, ...): this rank has had no batch yet, so it has nothing to take part with"
                )
            (batch, loss_fn), weight = self._last, 0.0
        else:
            weight = checked_weight("step", weight)
            self._last = (batch, loss_fn)
            self.batches_seen += 1
        self._open()

        def loss_of() -> Tensor:
            return loss_fn(self.model, batch)

        def compute(scale: float, last: bool) -> Tensor:
            with synchronising(self.model, last):
                with self.autocast.forward():
                    loss = loss_of()
                check_loss(loss)
                loss = loss.float()  # the loss and its scale are fp32, whatever the model returned
                self._backward(loss, scale, weight)
            return loss

        return self._learn(Micro(compute, weight), loss_of)

    def flush(self) -> StepOutcome | None:
        """Take the optimiser's turn with the window as it is, at the end of the data; None where it is empty.

        On several ranks call it on all. The window is computed again, as a whole: none of its gradients was exchanged.
        """
        if not self.accumulated:
            return None
        repeatable = all(micro.repeatable for micro in self._window.micros)
        with on_failure(self.abandon):
            if not repeatable and not self.ranks.alone:
                raise MantissaError(
                    "flush() cannot compute batches of forward_loss() again, and on several ranks their gradients "
                    "were not exchanged; use step(), or a number of batches that accumulate divides"
                )
            if repeatable:
                forget_unsent(self.model)
            return self._turn(afresh=repeatable)

    def forward_loss(self, batch: Any, loss_fn: LossFunction) -> Tensor:
        """The loss of a batch with its graph, fp32: the first half of ``step``, for loops that call backward apart."""
        self._open()
        with synchronising(self.model, self._is_last), self.autocast.forward():
            loss = loss_fn(self.model, batch)
        check_loss(loss)
        return loss.float()  # the loss and its scale are fp32, whatever the model returned

    def backward_step(self, loss: Tensor, weight: float = 1.0) -> StepOutcome:
        """Learn from what ``forward_loss`` gave: the second half of ``step``. As the forward cannot be repeated from
        here, an overflow is never retried: the outcome is ``accumulated``, ``stepped`` or ``skipped``."""
        check_loss(loss)
        weight = checked_weight("backward_step", weight)
        if self.accumulated:
            self._window.go_on()
        else:
            self.optimizer.zero_grad(set_to_none=True)  # what came between forward and backward is not this loss's
        self.batches_seen += 1

        def compute(scale: float, last: bool) -> Tensor:
            with synchronising(self.model, last):
                self._backward(loss, scale, weight)
            return loss

        return self._learn(Micro(compute, weight, repeatable=False))

    def abandon(self) -> None:
        """Forget the open window: its gradients, and what its forwards did to the buffers."""
        self._window.abandon()
        self.model.zero_grad(set_to_none=True)
        forget_unsent(self.model)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of ``loader``; None where this rank's are used up and another rank's are not."""
        iterator, end = iter(loader), object()
        while True:
            batch = next(iterator, end)
            if self.ranks.max_of(float(batch is not end)) == 0.0:
                return
            yield None if batch is end else batch

    def save_checkpoint(
        self,
        path: Path | str,
        extra: Mapping[str, Any] | None = None,
        open_window: Literal["error", "leave out"] = "error",
    ) -> Path:
        """Write everything that going on needs to the file ``path``, atomically; what was there is kept beside it as
        ``<path>.previous``. ``extra``: plain values and tensors of the caller's (the data's position, an epoch).
        ``open_window``: what to do where gradients are accumulated, which no checkpoint holds.

        On several ranks call it on all; rank 0 writes. Tensors are whole, so any number of processes can load it.
        """
        if self.accumulated and open_window == "error":
            raise MantissaError(
                f"cannot save with {self.accumulated} of {self.accumulate} micro-batches accumulated: gradients are "
                "not part of a checkpoint; save after the optimiser's turn, or call flush() first"
            )
        state = self._state(extra)
        self.ranks.agreed(lambda: checkpoint.write_file(path, state) if self.ranks.rank0 else None)
        return Path(path)

    def load_checkpoint(self, path: Path | str, or_previous: bool = False) -> dict[str, Any]:
        """Go on from ``path`` bit for bit; returns the ``extra`` that was saved. Reads old layouts too.

        ``or_previous``: where the file is missing or damaged, take the one before it, and say so. Otherwise, and where
        it does not fit the model, ``MantissaError``, with nothing changed. Collective, as ``save_checkpoint``.
        """
        state = checkpoint.read_file(path, or_previous)
        if state["problem"] is not None:
            self.say(f"checkpoint: {state['problem']}; going on from {state['read_from']}")
        with boundary("checkpoint", "it is damaged; load another one"):
            was = (state["precision"] or {}).get("active")
        before = self._in_use
        with on_failure(lambda: self._take(before)):
            if self._watch is not None and was == self._watch.to != self.precision.active.name:
                self.say(f"guard: this run fell back to {was} before: going on in {was}")
                self._switch(was)
            extra = self._restore(state)
        if self._watch is not None:
            self._watch.resumed(self.steps, self.updates)
        return extra

    def stats(self) -> dict[str, Any]:
        """What happened so far. ``overflow_rate`` is skipped / attempted optimiser steps."""
        latest, role = self.latest, self.precision
        return {
            "steps": self.steps,
            "updates": self.updates,
            "skipped": self.skipped,
            "retried": self.retried,
            "overflow_rate": self.skipped / self.steps if self.steps else 0.0,
            "batches_seen": self.batches_seen,
            "accumulated": self.accumulated,
            "loss_scale": self.scaler.scale,
            "grad_norm": latest.grad_norm if latest else None,
            "clipped_fraction": latest.clipped if latest else None,
            "max_scaled_grad": latest.max_scaled_grad if latest else None,
            "flushed_fraction": self.flushed_fraction,
            "precision_requested": role.requested,
            "precision_active": role.active.name,
            "backend": role.backend,
            "reason": role.reason,
            "device": str(self.device),
            "rank": self.ranks.rank,
            "world_size": self.ranks.world,
        }

    # one optimiser step

    def _open(self) -> None:
        """Before a forward: where it is a window's first, keep what it will change."""
        if self.accumulated:
            self._window.go_on()
            return
        self._window.begin()
        check_goes_on(self.scheduler, self.optimizer)
        if self._watch is not None:
            self._watch.check_new(self.steps)
            if self._watch.needs_good:  # there must be something to fall back to
                self._save_good(self._watch)
            self._began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)  # gradients from elsewhere have another scale

    @property
    def _is_last(self) -> bool:
        """Whether the next micro-batch fills the window."""
        return self.accumulated + 1 >= self.accumulate

    def _backward(self, loss: Tensor, scale: float, weight: float) -> None:
        with self.autocast.backward():
            (loss * (scale * weight / self.accumulate)).backward()

    def _learn(self, micro: Micro, loss_of: Callable[[], Tensor] | None = None) -> StepOutcome:
        """Take one more micro-batch, and where it fills the window the optimiser's turn. ``loss_of``: for the probe."""
        full = self._is_last
        self._window.micros.append(micro)
        with on_failure(self.abandon):
            if full:
                self._probe(loss_of, micro.weight)
                return self._turn()
            micro.run(self._window.scale(), last=False)
            return StepOutcome("accumulated", 0, float("nan"), self.scaler.scale, float("nan"), 0.0, micro.loss)

    def _turn(self, afresh: bool = False) -> StepOutcome:
        weight = sum(micro.weight for micro in self._window.micros)
        total = self.ranks.sum_of(weight)
        if total == 0:
            raise MantissaError("every batch of this optimiser step has weight 0: there is nothing to learn from")
        share = self.accumulate * self.ranks.world / total  # 1 where every weight is 1
        outcome = self._window.close(share, afresh)
        self.steps += 1
        self.retried += outcome.kind == "retried"
        if outcome.applied and self.scheduler is not None:
            self.scheduler.step()  # after the counts, which are right where an owner's schedule raises
        if self._watch is not None:
            self._log(self._watch, outcome, weight, total)
        return outcome

    def _probe(self, loss_of: Callable[[], Tensor] | None, weight: float) -> None:
        due = loss_of is not None and self.probe_every > 0 and (self.steps + 1) % self.probe_every == 0
        self.flushed_fraction = None
        if due and loss_of is not None and self.precision.active is not FP32:
            factor = self.scaler.scale * (weight or 1.0) / self.accumulate
            self.flushed_fraction = flush_probe(self.model, loss_of, self.autocast, factor, self.device)

    # the run directory and its guard

    def _log(self, watch: Watch, outcome: StepOutcome, weight: float, total: float) -> None:
        """Write the step's row, judge it, and do what was decided. ``weight``: this rank's of the step's ``total``."""
        seconds = time.perf_counter() - self._began
        mean = 0.0 if outcome.loss is None or weight == 0 else float(outcome.loss) * weight / total
        more = {"optim/clipped_fraction": outcome.clipped, "precision/flushed_fraction": self.flushed_fraction}
        row = {
            "step": self.steps,
            "train/loss": self.ranks.sum_of(mean),
            "precision/format": self.precision.active.name,
            **outcome.row(),
            "optim/lr": outcome.lr,
            "optim/updates": self.updates,
            "time/step": seconds,
            **{name: value for name, value in more.items() if value is not None},
        }
        if watch.record(row):
            self._restore_learning(checkpoint.read_file(watch.good_path, or_previous=True))
            self._switch(watch.to)
            self.say(f"guard: step {self.steps}: back to update {self.updates}, and on in {self.precision.active}")
            self._save_good(watch)
        elif outcome.applied and watch.good_is_due(self.updates):
            self._save_good(watch)

    def _save_good(self, watch: Watch) -> None:
        self.save_checkpoint(watch.good_path)
        watch.good_at = self.updates

    # checkpoints

    def _state(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Everything that going on needs, with whole tensors on the CPU. Collective; all ranks get the same."""
        self.optimizer_step.follow()
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        active, masters = self.precision.active.name, self.optimizer_step.masters
        return {
            "model_state_dict": dict(whole(unwrapped(self.model).state_dict())),
            "optimizer_state_dict": whole(self.optimizer.state_dict()),
            "masters": {"kind": masters.kind, COMPENSATION: whole(masters.compensation)},
            "scheduler_state_dict": None if self.scheduler is None else whole(self.scheduler.state_dict()),
            "training_steps": self.steps,
            "overflow_steps": self.skipped,
            "counters": {"updates": self.updates, "retried": self.retried, "batches_seen": self.batches_seen},
            "fp16_active": active == "fp16",
            "precision": {"requested": self.precision.requested, "active": active},
            "scaler_state_dict": self.scaler.state_dict(),
            "generators": self.ranks.gather(generators),
            "extra": dict(extra or {}),
        }

    def _restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from ``state``; returns its ``extra``. Everything is checked before anything is changed. Collective.

        The number of processes may differ from when it was written; ranks that were not there then keep their own
        generators, and are told of.
        """
        with boundary("checkpoint", "it is damaged, or of another kind of trainer; load another one"):
            counters = {"training_steps": state["training_steps"], "overflow_steps": state["overflow_steps"]}
            counters |= {name: state["counters"][name] for name in ("retried", "batches_seen")}
            numbers = [count(value, f"checkpoint: {name}") for name, value in counters.items()]
            scaler = state["scaler_state_dict"] or {}
            if set(scaler) == set(self.scaler.state_dict()):
                copy.copy(self.scaler).load_state_dict(scaler)
            for saved in state["generators"]:
                torch.Generator().set_state(saved["cpu"])
            extra, _ = dict(state["extra"]), dict(state["precision"] or {})
        self._restore_learning(state)
        was = (state["precision"] or {}).get("active", "fp16" if state["fp16_active"] else "fp32")
        take_over(self.scaler, state["scaler_state_dict"], was, self.precision, self.say)
        self.steps, self.optimizer_step.skipped, self.retried, self.batches_seen = numbers
        self._restore_generators(state["generators"])
        return extra

    def _restore_learning(self, state: Mapping[str, Any]) -> None:
        """Put back what was learnt: weights, optimiser, schedule, count of updates; checked before it is changed.

        Attempts, the scaler and the generators go on: what a fall back needs. Collective.
        """
        self.optimizer_step.follow()
        model, masters = unwrapped(self.model), self.optimizer_step.masters
        present, saved, schedule = model.state_dict(), state["model_state_dict"], state["scheduler_state_dict"]
        with boundary("checkpoint", "it is damaged, or of another model or optimiser; load another one"):
            checkpoint.check_model(present, saved, dict(model.named_parameters()))
            checkpoint.check_optimizer(self.optimizer, state["optimizer_state_dict"])
            kept = state.get("masters", {"kind": "fp32", COMPENSATION: {}})  # older files have none
            masters.check_kind(kept["kind"])
            compensation = masters.checked(kept[COMPENSATION])
            if self.scheduler is not None and schedule is not None:
                checkpoint.check_like(self.scheduler.state_dict(), schedule, "scheduler")
            updates = count(state["counters"]["updates"], "checkpoint: updates")
        self.abandon()  # first: it may put buffers back
        model.load_state_dict({
            name: shard_like(saved[name].to(value.dtype), value) if isinstance(value, Tensor) else saved[name]
            for name, value in present.items()
        })  # fmt: skip
        self.optimizer.load_state_dict(checkpoint.sharded(state["optimizer_state_dict"], self.optimizer))
        if self.scheduler is not None and schedule is not None:
            self.scheduler.load_state_dict(schedule)
        self.optimizer_step.updates, masters.compensation = updates, compensation

    def _restore_generators(self, saved: list[dict[str, Tensor]]) -> None:
        """Those of this rank, where it was there when they were saved."""
        if self.ranks.rank < len(saved):
            torch.set_rng_state(saved[self.ranks.rank]["cpu"])
            if self.device.type == "cuda" and "cuda" in saved[self.ranks.rank]:
                torch.cuda.set_rng_state(saved[self.ranks.rank]["cuda"], self.device)
        if saved and len(saved) != self.ranks.world:
            self.say(
                f"checkpoint: written by {len(saved)} processes, read by {self.ranks.world}: weights, optimiser and "
                "scaler are the same; generators are those of the ranks that were there, and the data is yours to "
                "divide again"
            )
