"""Telemetry of Hugging Face's ``Trainer``: the precision it really computes in, and what its loss scaler does.

Trainer leaves precision to Accelerate: fp16 on a GPU is torch's autocast with a ``GradScaler``, whose skipped steps
nobody sees. ``ScalerTelemetry`` reports them, and the format that the model's products really come out in, read from a
layer's output. Where there is no scaler (bf16, fp32, any CPU) it says so once, and reports no scale and no overflows,
rather than zeros.

Hugging Face's ``Trainer`` in Mantissa's precision.

Through methods that Trainer documents for overriding, forward and backward run in ``Autocast``, and each window of
micro-batches goes through ``RetryWindow``: scale, unscale, look for overflow, repeat the window or give it up. The
gradients are then handed back unscaled, and Trainer clips (``max_grad_norm``) and steps as it does in fp32. Where a
window was given up there are no gradients, so torch's optimisers change nothing, and the schedule is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.files import JsonLines
from mantissa.dropin.window import (
    HeldScheduler,
    Micro,
    MixedPrecision,
    RetryWindow,
    device_of,
    mean_loss,
    require,
    sum_loss,
    take_over,
)
from mantissa.training import ScalerConfig, StepOutcome

require("accelerate", "accelerate")

from transformers import TrainerCallback  # noqa: E402 (after the message for those who lack it)
from transformers.trainer_callback import ExportableState  # noqa: E402

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class ScalerTelemetry(TrainerCallback):
    """Report precision and loss scaling of ``transformers.Trainer``.

    ``path``: a ``metrics.jsonl`` to which every optimiser step is written as a row; None writes none. ``say``: called
    once, with the line that tells the precision.

    Entries of Trainer's log (``state.log_history``, the console), only where there is a scaler:
    ``precision/loss_scale``; ``precision/overflows`` and ``precision/skipped``, counts since the last entry (Trainer
    does not retry, so they are equal); ``precision/overflow_rate``, skipped / attempted since training began. Trainer
    calls its reporters (TensorBoard, W&B) before the callbacks it is given, so they see these entries only after
    ``attach``.

    With ``MantissaTrainerMixin``, which puts its own entries in the log, this writes the file from its figures.
    A row of the file: ``step``, ``precision/requested``, ``precision/format`` (active), ``optim/lr``, with a scaler
    the above for that step and ``optim/updates``; and in a step that Trainer logs, ``train/loss`` (its mean since the
    last entry) and ``optim/grad_norm``.
    """

    def __init__(self, path: Path | str | None = None, say: Callable[[str], None] = print) -> None:
        self.rows = None if path is None else JsonLines(Path(path))
        self.say = say
        self.source: Callable[[], dict[str, Any]] | None = None  # of a trainer that does the scaling itself
        self.requested = ""
        self.active: str | None = None
        self.attempted = self.skipped = 0
        self._reported = 0
        self._row: dict[str, Any] | None = None
        self._watch: Any = None

    def attach(self, trainer: Any) -> ScalerTelemetry:
        """Join ``trainer`` before its reporters, so that they receive these entries too; instead of ``callbacks=``."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.requested = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
        self.active = None
        self.attempted = self.skipped = self._reported = 0
        if self.rows is not None and state.is_world_process_zero:
            self.rows.truncate(state.global_step)
        layer = next((m for m in kwargs["model"].modules() if _multiplies(m)), None)
        if layer is not None:
            self._watch = layer.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        """The format that a product came out in, on the first training step; then look no more."""
        self.active = _NAMES.get(output.dtype, str(output.dtype))
        self._watch.remove()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        if self.source is not None:
            self._row = {**self.source(), "optim/lr": float(optimizer.param_groups[0]["lr"])}
            return
        scaler = getattr(optimizer, "scaler", None)
        if not self.attempted:
            self._tell(scaler, state)
        self.attempted += 1
        self._row = {
            "precision/requested": self.requested,
            "precision/format": self.active or "not known: no linear layer or convolution",
            "optim/lr": float(optimizer.param_groups[0]["lr"]),
        }
        if scaler is not None:
            skipped = int(optimizer.step_was_skipped)
            self.skipped += skipped
            self._row |= self._figures(scaler, skipped) | {"optim/updates": self.attempted - self.skipped}

    def _figures(self, scaler: Any, skipped: int) -> dict[str, float]:
        return {
            "precision/loss_scale": float(scaler.get_scale()),
            "precision/overflows": skipped,
            "precision/skipped": skipped,
            "precision/overflow_rate": self.skipped / self.attempted,
        }

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs or self._row is None:
            return
        self._row["train/loss"] = float(logs["loss"])
        if "grad_norm" in logs and self.source is None:
            self._row["optim/grad_norm"] = float(logs["grad_norm"])
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        if scaler is None or self.source is not None:
            return
        figures = self._figures(scaler, self.skipped - self._reported)
        self._reported = self.skipped
        logs.update(figures)  # for the callbacks after this one
        state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(state)
        if self._watch is not None:
            self._watch.remove()

    def _write(self, state: Any) -> None:
        """Write the row of the step before, which a log entry after it may have completed."""
        if self._row is not None and self.rows is not None and state.is_world_process_zero:
            self.rows.append({"step": int(state.global_step), **self._row})
        self._row = None

    def _tell(self, scaler: Any, state: Any) -> None:
        if not state.is_world_process_zero:
            return
        scaling = (
            "no loss scaler, so no scale and no overflows to report"
            if scaler is None
            else f"loss scale {float(scaler.get_scale()):g}"
        )
        self.say(f"precision: {self.requested} asked, {self.active or 'not known'} active; {scaling}")


def _multiplies(module: nn.Module) -> bool:
    """Whether autocast decides the type of what ``module`` computes: layers that multiply by a weight matrix."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding)


class MantissaScalerState(TrainerCallback, ExportableState):
    """Carries scaler and counters into Trainer's checkpoints (``trainer_state.json``) and back."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"numbers": dict(self.numbers)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.setdefault(
            type(self).__name__, self.state()
        )  # absent from others' checkpoints
        self.numbers = dict(saved["attributes"]["numbers"])


_COUNTED = ("precision/overflows", "precision/retries", "precision/skipped")


class MantissaTrainerMixin:
    """``transformers.Trainer`` in Mantissa's precision: ``class MyTrainer(MantissaTrainerMixin, Trainer)``.

    ``MyTrainer(model=..., args=..., precision="fp16", ...)`` takes the options of ``PrecisionTrainer``: ``precision``,
    ``backend``, ``fallback``, ``scale``, ``retries``, ``on_nonfinite``, ``say``; everything else goes to Trainer, which
    must be left in fp32 (``fp16=False, bf16=False``). Evaluation and prediction compute in the precision as well.

    Each training entry of the log has ``precision/loss_scale``, ``precision/overflows``, ``precision/retries`` and
    ``precision/skipped`` (sums since the last entry), ``precision/max_scaled_grad`` and ``optim/updates``.
    Attributes: ``precision`` (requested, active, backend, reason), ``evidence``, ``scaler``, ``outcome`` (of the last
    optimiser step). One process or DDP; FSDP, DeepSpeed and DataParallel are refused.
    """

    def __init__(
        self,
        *args: Any,
        precision: str = "fp16",
        backend: Literal["auto", "native", "simulated"] = "auto",
        fallback: Literal["error", "warn"] = "error",
        scale: Literal["dynamic", "auto"] | float | ScalerConfig = "dynamic",
        retries: int | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        say: Callable[[str], None] = print,
        **kwargs: Any,
    ) -> None:
        self._scale: float | None = None  # of the micro-batch that trains at this moment
        super().__init__(*args, **kwargs)
        trainer = cast(Any, self)
        _check_trainer(trainer)
        self._say = say if trainer.is_world_process_zero() else lambda line: None
        options: dict[str, Any] = {"backend": backend, "fallback": fallback, "scale": scale, "retries": retries}
        self._settled = MixedPrecision.of(precision, device_of(trainer.model), self._say, **options)
        self.precision, self.evidence, self.scaler = self._settled.role, self._settled.evidence, self._settled.scaler
        self._on_nonfinite = on_nonfinite
        self._window: RetryWindow | None = None  # of the training in progress
        self._counts: Counter[str] = Counter()  # since the last entry of the log
        trainer.add_callback(MantissaScalerState())

    @property
    def outcome(self) -> StepOutcome | None:
        return None if self._window is None else self._window.outcome

    def compute_loss_context_manager(self) -> ExitStack:
        stack: ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        stack.enter_context(self._settled.autocast.forward())
        return stack

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        if self._scale is None:
            return result
        loss, *outputs = result if return_outputs else (result,)
        loss = loss.float() * self._scale  # the loss and its scale are fp32, whatever the model returned
        return (loss, *outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; after the last of a window, the decision about its gradients."""
        window = self._window_for(model)
        if not window.micros:
            window.begin()
        else:
            window.go_on()
        micro = Micro(partial(self._micro, model, inputs, num_items_in_batch))
        window.micros.append(micro)
        with on_failure(lambda: window.micros.clear()):  # a list of its own after each step
            if not cast(Any, self).accelerator.sync_gradients:
                micro.run(window.scale(), last=True)  # Trainer has arranged what is exchanged at a first pass
            else:
                bound = cast(Any, self).args.max_grad_norm
                window.step.max_grad_norm = bound if bound and bound > 0 else float("inf")
                outcome = window.close()
                self._counts.update({name: outcome.row()[name] for name in _COUNTED})
                self._saved.numbers = window.step.state_dict() | {"format": self.precision.active.name}
        return mean_loss([micro])

    def _micro(self, model: nn.Module, inputs: Any, items: Any, scale: float, last: bool) -> Tensor:
        """Trainer's own forward and backward of one micro-batch, in the precision; its unscaled loss."""
        unsynchronised = nullcontext() if last else cast(Any, self).accelerator.no_sync(model)
        self._scale = scale
        try:
            with unsynchronised, self._settled.autocast.backward():
                loss: Tensor = super().training_step(model, inputs, items)  # type: ignore[misc]
        finally:
            self._scale = None
        return loss / scale

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Trainer's clipping, which is done: with the unscaled gradients, by a norm that takes sparse ones too."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._last_step()[1].grad_norm

    def _last_step(self) -> tuple[RetryWindow, StepOutcome]:
        if self._window is None or self._window.outcome is None:
            raise MantissaError("MantissaTrainerMixin: no optimiser step has been taken yet; call train() first")
        return self._window, self._window.outcome

    def _window_for(self, model: nn.Module) -> RetryWindow:
        """The window of the training in progress; made, or made again, at its first micro-batch."""
        optimizer = cast(Any, self).optimizer
        window = self._window
        if window is not None and window.model is model and cast(Any, window.step.optimizer).optimizer is optimizer:
            return window
        handover = _Handover(optimizer)
        self._window = RetryWindow(model, handover, self._settled, sum_loss, on_nonfinite=self._on_nonfinite)
        for callback in cast(Any, self).callback_handler.callbacks:
            if isinstance(callback, ScalerTelemetry):
                callback.source = self.row
        saved = self._saved.numbers  # of the checkpoint that this training goes on from
        if saved:
            was = saved.get("format", self.precision.active.name)
            take_over(self.scaler, saved["scaler"], was, self.precision, self._say)
            self._window.step.load_state_dict(saved | {"scaler": self.scaler.state_dict()})
        return self._window

    def row(self) -> dict[str, Any]:
        """The last optimiser step as a row of metrics (names and units as in ``mantissa.runs.catalogue``)."""
        window, outcome = self._last_step()
        return {
            "precision/requested": self.precision.requested,
            "precision/format": self.precision.active.name,
            **outcome.row(),
            "optim/updates": window.step.updates,
        }

    @property
    def _saved(self) -> MantissaScalerState:
        callbacks = cast(Any, self).callback_handler.callbacks
        return next(each for each in callbacks if isinstance(each, MantissaScalerState))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's schedule, held where a step is given up (those that follow a metric are left alone)."""
        made = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        follows_metric = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if isinstance(made, torch.optim.lr_scheduler.LRScheduler) and not follows_metric:
            made = HeldScheduler(made, lambda: self._window is None or self._window.applied)
            cast(Any, self).lr_scheduler = made
        return made

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the precision's figures to each training entry."""
        if "loss" in logs and self.outcome is not None:
            row = self.row() | {name: self._counts[name] for name in _COUNTED}
            names = ("precision/loss_scale", *_COUNTED, "precision/max_scaled_grad", "optim/updates")
            logs = {**logs, **{name: row[name] for name in names}}
            if "grad_norm" in logs:
                logs["grad_norm"] = self.outcome.grad_norm  # whatever Trainer has measured after the clipping
            self._counts = Counter()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _check_trainer(trainer: Any) -> None:
    args = trainer.args
    if args.fp16 or args.bf16:
        raise MantissaError(
            "MantissaTrainerMixin: TrainingArguments ask for mixed precision too; leave fp16 and bf16 False there"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1:
        raise MantissaError(
            "MantissaTrainerMixin runs in one process or under DDP (torchrun), not FSDP, DeepSpeed or DataParallel"
        )


class _Handover:
    """Stands for the optimiser in ``OptimizerStep`` where the loop around steps by itself: the step is left to it, and
    with it the unscaled gradients. Only the gradients of a try that failed are cleared."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._keep = False

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self._keep = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._keep:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self._keep = False
