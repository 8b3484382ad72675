"""Telemetry of Hugging Face's ``Trainer``: the precision it really computes in, and what its loss scaler does.

Trainer leaves precision to Accelerate: fp16 on a GPU is torch's autocast with a ``GradScaler``, whose skipped steps
nobody sees. ``ScalerTelemetry`` reports them, and the format that the model's products really come out in, read from a
layer's output. Where there is no scaler (bf16, fp32, any CPU) it says so once, and reports no scale and no overflows,
rather than zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.integrations import require
from mantissa.jsonl import JsonLines

require("accelerate", "accelerate")

from transformers import TrainerCallback  # noqa: E402 (after the message for those who lack it)

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
