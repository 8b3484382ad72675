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

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.kernels import autocast_for, probe_autocast
from mantissa.precision import FP32
from mantissa.ranks import Ranks, is_fsdp
from mantissa.training import trainer_state
from mantissa.training.checks import (
    anomaly,
    check_loss,
    check_options,
    check_place,
    device_of,
    first_nonfinite,
    flush_probe,
    named_parameters,
    precision_line,
    resolved_role,
)
from mantissa.training.distributed import forget_unsent, synchronising, until_all_end, unwrapped
from mantissa.training.guard_config import GuardConfig
from mantissa.training.scaler import LossScaler, ScalerConfig, scaler_for
from mantissa.training.step import Backward, OptimizerStep, StepOutcome, adaptive_clip_
from mantissa.training.trainer_state import OpenWindow
from mantissa.training.watch import watch_for
from mantissa.training.window import Keeper, LossFunction, Micro, mean_loss


class PrecisionTrainer:
    """Train ``model`` with ``optimizer`` in ``precision`` (``fp32`` | ``bf16`` | ``fp16``).

    - ``backend``: ``auto`` is native on CUDA and on a CPU simulated (bf16, fp16); ``native``, ``simulated`` insist.
    - ``fallback``: where the device lacks the format's arithmetic, ``error`` refuses and ``warn`` uses fp32.
    - ``scale``: ``dynamic`` (torch's rule), ``auto`` (from the gradients' observed range), a number (fixed), or a
      ``ScalerConfig``. The rules are for fp16 alone.
    - ``retries``: backward passes repeated on one batch after an overflow; 4, or the ``ScalerConfig``'s.
    - ``accumulate``: micro-batches to an optimiser step.
    - ``max_grad_norm``: bound on the unscaled Euclidean norm. ``adaptive_clip``: factor of adaptive gradient clipping.
    - ``scheduler``: stepped after each update that was applied, and only then.
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
        scheduler: Any = None,
        on_nonfinite: Literal["stop", "skip"] | None = None,
        detect_anomaly: bool = False,
        probe_every: int = 0,
        run_dir: Path | str | None = None,
        guard: GuardConfig | None = None,
        good_every: int = 50,
        say: Callable[[str], None] = print,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        on_nonfinite = on_nonfinite or ("stop" if guard is None else "skip")
        self.accumulate = check_options(
            accumulate, max_grad_norm, adaptive_clip, on_nonfinite, probe_every, is_fsdp(model)
        )
        self.ranks = Ranks.of(model)
        self.detect_anomaly = detect_anomaly
        self.probe_every = probe_every
        self.flushed_fraction: float | None = None
        self.say = say if self.ranks.rank == 0 else lambda line: None
        self.device = device_of(model)
        self._resolve = partial(resolved_role, backend=backend, fallback=fallback, device=self.device)
        self._new_scaler = partial(scaler_for, scale, retries=retries)
        named = named_parameters(model, optimizer)
        clip = None if adaptive_clip is None else partial(adaptive_clip_, named.values(), adaptive_clip)
        self.optimizer_step = OptimizerStep(
            named,
            optimizer,
            LossScaler.disabled(),  # of no precision yet: ``_use`` sets both
            FP32,
            None,
            max_grad_norm,
            self._diagnose,
            clip=clip,
            on_nonfinite=on_nonfinite,
            ranks=self.ranks,
        )
        self.use(precision)
        self.steps = 0
        self.retried = 0
        self.batches_seen = 0
        self._window: list[Micro] = []
        self._keeper = Keeper(model, self.device)
        self._last: tuple[Any, LossFunction] | None = None
        self.latest: StepOutcome | None = None
        self._watch = watch_for(self, run_dir, guard, good_every)

    def use(self, precision: str) -> None:
        """Compute in ``precision`` from the next step on, with a fresh scaler; checked by the probe and told."""
        role = self._resolve(precision)
        self.autocast = autocast_for(role, self.device)
        self.evidence = probe_autocast(self.autocast, self.device)
        self.precision = role
        self.optimizer_step.format = role.active
        self.optimizer_step.scaler = self._new_scaler(fmt=role.active)
        self.say(precision_line(role))

    @property
    def scaler(self) -> LossScaler:
        return self.optimizer_step.scaler

    @property
    def updates(self) -> int:
        return self.optimizer_step.updates

    @property
    def skipped(self) -> int:
        return self.optimizer_step.skipped

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
            micro = Micro(*self._last, 0.0)
        else:
            if not weight >= 0 or weight == float("inf"):
                raise MantissaError(f"step(weight={weight}): expected a finite number, 0 or more")
            self._last = (batch, loss_fn)
            micro = Micro(batch, loss_fn, float(weight))
            self.batches_seen += 1
        self._open()
        self._window.append(micro)
        try:
            if len(self._window) < self.accumulate:
                self._add(micro, self.scaler.scale, last=False)
                return self._waiting(micro.loss)
            self._probe(micro)
            return self._close(pending=[micro])
        except BaseException:
            self.abandon()
            raise

    def flush(self) -> StepOutcome | None:
        """Take the optimiser's turn with the window as it is, at the end of the data; None where it is empty.

        On several ranks call it on all. The window is computed again, as a whole: none of its gradients was exchanged.
        """
        if not self._window:
            return None
        window = self._window
        try:
            if any(micro.loss_fn is None for micro in window):
                if self.ranks.world > 1:
                    raise MantissaError(
                        "flush() cannot compute batches of forward_loss() again, and on several ranks their gradients "
                        "were not exchanged; use step(), or a number of batches that accumulate divides"
                    )
                return self._turn(lambda scale: mean_loss(window), accumulated=True, repeatable=False)
            forget_unsent(self.model)
            return self._close(pending=None)
        except BaseException:
            self.abandon()
            raise

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
        last = self._is_last
        if not self._window:
            self.optimizer.zero_grad(set_to_none=True)  # what came between forward and backward is not this loss's
        self.batches_seen += 1
        self._window.append(Micro(None, None, weight, loss.detach()))

        def backward(scale: float) -> Tensor:
            with synchronising(self.model, last), self.autocast.backward():
                (loss * (scale * weight / self.accumulate)).backward()
            return mean_loss(self._window)

        try:
            if last:
                return self._turn(backward, accumulated=True, repeatable=False)
            backward(self.scaler.scale)
            return self._waiting(loss.detach())
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget the open window: its gradients, and what its forwards did to the buffers."""
        if self._window:
            self._keeper.restore_buffers()
        self._window = []
        self.model.zero_grad(set_to_none=True)
        forget_unsent(self.model)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of ``loader``; None where this rank's are used up and another rank's are not."""
        return until_all_end(loader, self.ranks)

    @property
    def accumulated(self) -> int:
        """Micro-batches that wait for the optimiser's turn."""
        return len(self._window)

    def save_checkpoint(
        self, path: Path | str, extra: Mapping[str, Any] | None = None, open_window: OpenWindow = "error"
    ) -> Path:
        """Write everything that going on needs to the file ``path``, atomically; what was there is kept beside it as
        ``<path>.previous``. ``extra``: plain values and tensors of the caller's (the data's position, an epoch).
        ``open_window``: what to do where gradients are accumulated, which no checkpoint holds.

        On several ranks call it on all; rank 0 writes. Tensors are whole, so any number of processes can load it.
        """
        state = trainer_state.state_of(self, extra, open_window)
        failure: MantissaError | None = None
        if self.ranks.rank == 0:
            try:
                trainer_state.write(path, state)
            except MantissaError as error:
                failure = error
        if self.ranks.max_of(0.0 if failure is None else 1.0) > 0:  # no rank waits for a file that will not come
            raise failure or MantissaError(f"rank 0 could not write the checkpoint {path}; see its message")
        return Path(path)

    def load_checkpoint(self, path: Path | str, or_previous: bool = False) -> dict[str, Any]:
        """Go on from ``path`` bit for bit; returns the ``extra`` that was saved. Reads old layouts too.

        ``or_previous``: where the file is missing or damaged, take the one before it, and say so. Otherwise, and where
        it does not fit the model, ``MantissaError``, with nothing changed. Collective, as ``save_checkpoint``.
        """
        state = trainer_state.read(path, or_previous)
        if state["problem"] is not None:
            self.say(f"checkpoint: {state['problem']}; going on from {state['read_from']}")
        if self._watch is not None:
            self._watch.resuming(state)
        extra = trainer_state.restore(self, state)
        if self._watch is not None:
            self._watch.resumed()
        return extra

    def stats(self) -> dict[str, Any]:
        """What happened so far. ``overflow_rate`` is skipped / attempted optimiser steps."""
        return trainer_state.stats_of(self)

    def _open(self) -> None:
        """Before a forward: where it is a window's first, keep what it will change."""
        if self._window:
            return
        check_place(self.model, self.device)
        if self._watch is not None:
            self._watch.begin()
        self._keeper.remember()
        self.optimizer.zero_grad(set_to_none=True)  # gradients from elsewhere have another scale

    @property
    def _is_last(self) -> bool:
        """Whether the next micro-batch fills the window."""
        return len(self._window) + 1 >= self.accumulate

    def _waiting(self, loss: Tensor | None) -> StepOutcome:
        return StepOutcome("accumulated", 0, float("nan"), self.scaler.scale, float("nan"), 0.0, loss)

    def _close(self, pending: list[Micro] | None) -> StepOutcome:
        """The optimiser's turn. ``pending``: the micro-batches not yet added; None: start over with all of them."""
        window = self._window
        tries = 0

        def backward(scale: float) -> Tensor:
            nonlocal tries
            again = tries > 0 or pending is None
            tries += 1
            if again:
                self._keeper.restore()
            for micro in window if again or pending is None else pending:
                self._add(micro, scale, last=micro is window[-1])
            return mean_loss(window)

        return self._turn(backward, accumulated=pending is not None)

    def _turn(self, backward: Backward, accumulated: bool, repeatable: bool = True) -> StepOutcome:
        weight = sum(micro.weight for micro in self._window)
        total = self.ranks.sum_of(weight)
        if total == 0:
            raise MantissaError("every batch of this optimiser step has weight 0: there is nothing to learn from")
        share = self.accumulate * self.ranks.world / total  # 1 where every weight is 1
        outcome = self.optimizer_step.run(backward, accumulated=accumulated, share=share, repeatable=repeatable)
        if not outcome.applied:
            self._keeper.restore_buffers()
        elif self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        self.retried += outcome.kind == "retried"
        self.latest = outcome
        self._window = []
        if self._watch is not None:
            self._watch.after(outcome, weight, total)
        return outcome

    def _add(self, micro: Micro, scale: float, last: bool) -> None:
        """Add the scaled gradient of one micro-batch to ``.grad``; note its loss."""
        assert micro.loss_fn is not None
        with synchronising(self.model, last):
            with self.autocast.forward():
                loss = micro.loss_fn(self.model, micro.batch)
            check_loss(loss)
            loss = loss.float()  # the loss and its scale are fp32, whatever the model returned
            with self.autocast.backward():
                (loss * (scale * micro.weight / self.accumulate)).backward()
        micro.loss = loss.detach()

    def _probe(self, micro: Micro) -> None:
        due = self.probe_every > 0 and (self.steps + 1) % self.probe_every == 0
        self.flushed_fraction = None
        if due and self.precision.active is not FP32:
            factor = self.scaler.scale * (micro.weight or 1.0) / self.accumulate
            self.flushed_fraction = flush_probe(self.model, micro, self.autocast, factor, self.device)

    def _diagnose(self, backward: Backward) -> str:
        scale = self.scaler.scale
        self.model.zero_grad(set_to_none=True)
        where = first_nonfinite(unwrapped(self.model), lambda: backward(scale))
        return f"{where}; {anomaly(lambda: backward(scale))}" if self.detect_anomaly else where
