"""Lightning: a precision plugin that trains in Mantissa's precision, with its loss scaling.

    from lightning.pytorch import Trainer
    from mantissa.dropin import MantissaPrecision
    Trainer(plugins=[MantissaPrecision("fp16")], gradient_clip_val=1.0).fit(module)

Lightning hands the plugin an optimiser and a closure that does forward and backward. The closure runs the module's
``training_step`` in ``Autocast.forward()``, its backward in ``Autocast.backward()`` on the loss times the scale; and
``RetryWindow`` does the rest. Lightning's hooks are called where the gradients are unscaled and known to be finite:
``on_before_optimizer_step``, then ``configure_gradient_clipping``. A bound by norm is handed to ``OptimizerStep``.

The closure can be called again, so an overflow repeats the batch at a lower scale, with the same dropout, and nothing
is lost. What Lightning does not let a plugin repeat:

- micro-batches before the last (``accumulate_grad_batches``): their closures are gone, so an overflow skips the window;
- a manual ``optimizer.step()``: the backward was the module's own, so an overflow skips the step.

When a batch is repeated, ``training_step`` runs again, hence so do its hooks and ``self.log``: a value that it logs
with ``on_epoch=True`` counts that batch once for each try.

A step that is skipped counts in ``trainer.global_step``, as with Lightning's own scaler. Schedules with
``"interval": "step"`` are held back then (Lightning's own scaler lets them go on); those by epoch, and those that a
module steps by hand, go on: ask ``trainer.precision_plugin.outcome.applied``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import local, unwrapped
from mantissa.dropin.window import (
    HeldScheduler,
    Micro,
    MixedPrecision,
    RetryWindow,
    device_of,
    require,
    sum_loss,
    take_over,
)
from mantissa.kernels import ResolvedRole
from mantissa.training import LossScaler, ScalerConfig, StepOutcome

require("lightning.pytorch", "lightning")

from lightning.pytorch import LightningModule  # noqa: E402 (after the message for those who lack it)
from lightning.pytorch.plugins.precision import Precision  # noqa: E402


class MantissaPrecision(Precision):
    """Train a ``LightningModule`` in ``precision`` (``fp32`` | ``bf16`` | ``fp16``): ``Trainer(plugins=[...])``.

    The options are those of ``PrecisionTrainer``: ``backend``, ``fallback``, ``scale`` (``dynamic`` | ``auto`` | a
    number | ``ScalerConfig``), ``retries``, ``on_nonfinite``, ``say``. Clipping and accumulation are the Trainer's.
    ``log``: log ``precision/loss_scale``, ``precision/overflows``, ``precision/retries``, ``precision/skipped``,
    ``precision/max_scaled_grad``, ``optim/grad_norm`` and ``optim/updates`` at every optimiser step.

    Attributes: ``role`` (requested, active, backend, reason), ``evidence`` (the probe's findings), ``scaler``,
    ``outcome`` (of the last optimiser step), ``steps`` (attempted), ``updates`` (applied), ``skipped``, ``retried``.
    Scaler and counters are in Lightning's checkpoints. One optimiser; one device or DDP (Lightning's FSDP takes only
    plugins of its own; DeepSpeed and model-parallel strategies are refused here).
    """

    def __init__(
        self,
        precision: str = "fp16",
        *,
        backend: Literal["auto", "native", "simulated"] = "auto",
        fallback: Literal["error", "warn"] = "error",
        scale: Literal["dynamic", "auto"] | float | ScalerConfig = "dynamic",
        retries: int | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        log: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        self.precision = precision
        self.scaler = LossScaler.disabled()  # of no format yet: ``connect`` knows the device
        self.role: ResolvedRole | None = None
        self.evidence = ""
        self.outcome: StepOutcome | None = None
        self.steps = self.updates = self.skipped = self.retried = 0
        self._options: dict[str, Any] = {"backend": backend, "fallback": fallback, "scale": scale, "retries": retries}
        self._on_nonfinite = on_nonfinite
        self._log = log
        self._say = say
        self._device: torch.device | None = None
        self._settled: MixedPrecision | None = None
        self._window: RetryWindow | None = None
        self._micro_batches = 0  # of the open window
        self._losses: list[Tensor] = []  # of the backwards since the last step, unscaled
        self._clip_value: float | None = None

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Lightning's call when the model is on its device and the optimisers are made."""
        module: Any = unwrapped(model)
        if not isinstance(module, LightningModule):
            raise MantissaError(f"MantissaPrecision: one device or DDP, not a model that is a {type(module).__name__}")
        settled = self._resolve(device_of(model), module.trainer.is_global_zero)
        self._micro_batches = 0
        self._window = None
        if module.trainer.state.fn == "fit":
            if len(optimizers) != 1:
                raise MantissaError(
                    f"MantissaPrecision: {len(optimizers)} optimisers, and one loss scale serves one; "
                    "for several, use one PrecisionTrainer for each in a loop of your own"
                )
            clip = partial(self._hooks, module, optimizers[0])
            self._window = RetryWindow(
                model, optimizers[0], settled, sum_loss, clip=clip, on_nonfinite=self._on_nonfinite
            )
            for config in lr_schedulers if module.automatic_optimization else ():
                if config.interval == "step" and not config.reduce_on_plateau:
                    config.scheduler = HeldScheduler(config.scheduler, self._applied)
        return model, optimizers, lr_schedulers

    def _resolve(self, device: torch.device, tell: bool) -> MixedPrecision:
        """Settle precision and scaler for ``device``; a scaler is kept from one fit to the next."""
        if device == self._device and self._settled is not None:
            return self._settled
        settled = MixedPrecision.of(self.precision, device, self._say if tell else lambda line: None, **self._options)
        if self.role is not None and self.role.active is settled.role.active:
            settled = replace(settled, scaler=self.scaler)
        self.role, self.evidence, self.scaler = settled.role, settled.evidence, settled.scaler
        self._settled, self._device = settled, device
        return settled

    def _connected(self) -> MixedPrecision:
        if self._settled is None:
            raise MantissaError("MantissaPrecision: no model is connected yet; run it through the Trainer")
        return self._settled

    def _fitting(self) -> RetryWindow:
        if self._window is None:
            raise MantissaError("MantissaPrecision: no fit is in progress; run it through the Trainer's fit")
        return self._window

    def _applied(self) -> bool:
        return self.outcome is None or self.outcome.applied

    def forward_context(self) -> AbstractContextManager[None]:
        """How the model computes: in training, and in validation, test and prediction alike."""
        return self._connected().autocast.forward()

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """The context of one ``training_step``; the first of a window notes what a repetition must put back."""
        window = self._fitting()
        if not self._micro_batches:
            window.begin()
        else:
            window.go_on()
        self._micro_batches += 1
        with self.forward_context():
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call Lightning's hooks with the loss, then scale it; loss and scale are fp32."""
        loss: Tensor = super().pre_backward(tensor, module)
        self._losses.append(loss.detach().float())
        return loss.float() * self._fitting().scale()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with self._connected().autocast.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(  # type: ignore[override, unused-ignore]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """One optimiser step, with the closure repeated after an overflow where that can be done."""
        window = self._fitting()
        if kwargs:
            raise MantissaError(f"MantissaPrecision: optimizer.step() with {sorted(kwargs)}: expected no options")
        if optimizer.param_groups is not window.step.optimizer.param_groups:
            raise MantissaError(
                "MantissaPrecision: the optimiser was replaced while fitting; change its parameter groups instead, or "
                "call fit again"
            )
        loss = closure()
        automatic = model.automatic_optimization
        if loss is None and automatic:  # ``training_step`` returned None: there is no gradient
            self._micro_batches, self._losses = 0, []
            return None

        def again(scale: float, last: bool) -> Tensor | None:
            nonlocal loss
            self._losses = []
            loss = closure()
            return torch.stack(self._losses).sum() if self._losses else None

        known = torch.stack(self._losses).sum() if self._losses else None  # of a whole window, where one accumulates
        window.micros = [Micro(again, repeatable=automatic and self._micro_batches == 1, loss=known, done=True)]
        outcome = window.close()
        window.step.max_grad_norm = float("inf")  # a bound holds for the step it was asked for
        self._micro_batches, self._losses = 0, []
        if not automatic:
            torch.clear_autocast_cache()  # ``training_step`` goes on in its context, and the weights have changed
        self._count(replace(outcome, clipped=None), model)
        return loss

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Bound the unscaled gradients of the step in progress; of the next one where a manual loop asks before it."""
        if clip_val is None or clip_val <= 0:
            return
        if gradient_clip_algorithm == "value":
            self._clip_value = clip_val
        else:
            self._fitting().step.max_grad_norm = clip_val

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Lightning's, which takes no sparse gradient."""
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-clip_val, clip_val)

    def _hooks(self, module: Any, optimizer: Any) -> Tensor:
        """Lightning's hooks before a step, on unscaled gradients; they ask for clipping, which is done after them."""
        self._after_closure(module, optimizer)
        if self._clip_value is not None:
            self.clip_grad_by_value(optimizer, self._clip_value)
        self._clip_value = None
        return torch.zeros(())

    def _count(self, outcome: StepOutcome, module: Any) -> None:
        self.outcome = outcome
        self.steps += 1
        self.updates += outcome.applied
        self.skipped += not outcome.applied
        self.retried += outcome.kind == "retried"
        if self._log:
            module.log_dict(self.metrics(), on_step=True, on_epoch=False)

    def metrics(self) -> dict[str, float]:
        """The last optimiser step as a row of metrics (names and units as in ``mantissa.runs.catalogue``)."""
        if self.outcome is None:
            return {}
        return {name: float(value) for name, value in self.outcome.row().items()} | {
            "optim/updates": float(self.updates)
        }

    def state_dict(self) -> dict[str, Any]:
        """What Lightning writes into its checkpoint: the format, its scaler, the counters."""
        if self.role is None:
            return {}
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {"format": self.role.active.name, "scaler": self.scaler.state_dict(), **counters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; one written in another format leaves the scaler fresh, and that is said."""
        for name in _COUNTERS:
            setattr(self, name, int(state_dict[name]))
        take_over(self.scaler, state_dict["scaler"], state_dict["format"], self._connected().role, self._say)


_COUNTERS = ("steps", "updates", "skipped", "retried")
