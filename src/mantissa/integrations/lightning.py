"""Lightning: a precision plugin that trains in Mantissa's precision, with its loss scaling.

    from lightning.pytorch import Trainer
    from mantissa.integrations import MantissaPrecision
    Trainer(plugins=[MantissaPrecision("fp16")], gradient_clip_val=1.0).fit(module)

Lightning hands the plugin an optimiser and a closure that does forward and backward. The closure runs the module's
``training_step`` in ``Autocast.forward()``, its backward in ``Autocast.backward()`` on the loss times the scale; and
``OptimizerStep`` does the rest. Lightning's hooks are called where the gradients are unscaled and known to be finite:
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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.integrations import require
from mantissa.integrations.huggingface import HeldScheduler, counts_of
from mantissa.kernels import Autocast, autocast_for, probe_autocast
from mantissa.precision import ResolvedRole
from mantissa.ranks import Ranks
from mantissa.training import (
    Backward,
    LossScaler,
    OptimizerStep,
    ScalerConfig,
    StepOutcome,
    first_nonfinite,
    scaler_for,
)
from mantissa.training.checks import device_of, named_parameters, precision_line, resolved_role
from mantissa.training.distributed import unwrapped
from mantissa.training.window import Keeper

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
        self._asked = (backend, fallback)
        self._scale, self._retries = scale, retries
        self._on_nonfinite = on_nonfinite
        self._log = log
        self._say = say
        self._device: torch.device | None = None
        self._autocast: Autocast | None = None
        self._keeper: Keeper | None = None
        self._step: OptimizerStep | None = None
        self._micro_batches = 0  # of the open window
        self._losses: list[Tensor] = []  # of the backwards since the last step, unscaled
        self._repeatable = False  # whether the step in progress can be
        self._clip_value: float | None = None

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Lightning's call when the model is on its device and the optimisers are made."""
        module: Any = unwrapped(model)
        if not isinstance(module, LightningModule):
            raise MantissaError(f"MantissaPrecision: one device or DDP, not a model that is a {type(module).__name__}")
        self._resolve(device_of(model), module.trainer.is_global_zero)
        self._micro_batches = 0
        self._step = None
        if module.trainer.state.fn == "fit":
            if len(optimizers) != 1:
                raise MantissaError(
                    f"MantissaPrecision: {len(optimizers)} optimisers, and one loss scale serves one; "
                    "for several, use one PrecisionTrainer for each in a loop of your own"
                )
            self._step = self._step_for(model, optimizers[0])
            self._keeper = Keeper(model, device_of(model))
            for config in lr_schedulers if module.automatic_optimization else ():
                if config.interval == "step" and not config.reduce_on_plateau:
                    config.scheduler = HeldScheduler(config.scheduler, self._applied)
        return model, optimizers, lr_schedulers

    def _resolve(self, device: torch.device, tell: bool) -> None:
        """Settle precision and scaler for ``device``; a scaler is kept from one fit to the next."""
        if device == self._device:
            return
        backend, fallback = self._asked
        role = resolved_role(self.precision, backend, fallback, device)
        self._autocast = autocast_for(role, device)
        self.evidence = probe_autocast(self._autocast, device)
        if self.role is None or self.role.active is not role.active:
            self.scaler = scaler_for(self._scale, role.active, self._retries)
        self.role, self._device = role, device
        if tell:
            self._say(precision_line(role))

    def _step_for(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        assert self.role is not None
        return OptimizerStep(
            named_parameters(model, optimizer),
            optimizer,
            self.scaler,
            self.role.active,
            None,
            diagnose=lambda backward: self._diagnose(unwrapped(model), backward),
            clip=lambda: self._hooks(unwrapped(model), optimizer),
            on_nonfinite=self._on_nonfinite,
            ranks=Ranks.of(model),
        )

    def _applied(self) -> bool:
        return self.outcome is None or self.outcome.applied

    def forward_context(self) -> AbstractContextManager[None]:
        """How the model computes: in training, and in validation, test and prediction alike."""
        if self._autocast is None:
            raise MantissaError("MantissaPrecision: no model is connected yet; run it through the Trainer")
        return self._autocast.forward()

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """The context of one ``training_step``; the first of a window notes what a repetition must put back."""
        if not self._micro_batches:
            assert self._keeper is not None
            self._keeper.remember()
        self._micro_batches += 1
        with self.forward_context():
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call Lightning's hooks with the loss, then scale it; loss and scale are fp32."""
        loss: Tensor = super().pre_backward(tensor, module)
        self._losses.append(loss.detach().float())
        return loss.float() * self.scaler.scale

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self._autocast is not None
        with self._autocast.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(  # type: ignore[override, unused-ignore]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """One optimiser step, with the closure repeated after an overflow where that can be done."""
        step, keeper = self._step, self._keeper
        assert step is not None
        assert keeper is not None
        if kwargs:
            raise MantissaError(f"MantissaPrecision: optimizer.step() with {sorted(kwargs)}: expected no options")
        loss = closure()
        automatic = model.automatic_optimization
        self._repeatable = automatic and self._micro_batches == 1
        if loss is None and automatic:  # ``training_step`` returned None: there is no gradient
            self._micro_batches, self._losses = 0, []
            return None
        tries = 0

        def backward(scale: float) -> Tensor | None:
            nonlocal loss, tries
            tries += 1
            if tries > 1:
                keeper.restore()
                self._losses = []
                loss = closure()
            return torch.stack(self._losses).sum() if self._losses else None  # of a whole window, where one accumulates

        outcome = step.run(backward, accumulated=True, repeatable=self._repeatable)
        step.max_grad_norm = float("inf")  # a bound holds for the step it was asked for
        self._micro_batches, self._losses = 0, []
        if not outcome.applied:
            keeper.restore_buffers()
        if not automatic:
            torch.clear_autocast_cache()  # ``training_step`` goes on in its context, and the weights have changed
        self._count(replace(outcome, clipped=None), model)
        return loss

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Bound the unscaled gradients of the step in progress; of the next one where a manual loop asks before it."""
        if clip_val is None or clip_val <= 0:
            return
        assert self._step is not None
        if gradient_clip_algorithm == "value":
            self._clip_value = clip_val
        else:
            self._step.max_grad_norm = clip_val

    def _hooks(self, module: Any, optimizer: Any) -> Tensor:
        """Lightning's hooks before a step, on unscaled gradients; they ask for clipping, which is done after them."""
        self._after_closure(module, optimizer)
        if self._clip_value is not None:
            self.clip_grad_by_value(optimizer, self._clip_value)
        self._clip_value = None
        return torch.zeros(())

    def _diagnose(self, module: nn.Module, backward: Backward) -> str:
        if not self._repeatable:
            return "not known, for this batch's forward cannot be repeated"
        module.zero_grad(set_to_none=True)
        return first_nonfinite(module, lambda: backward(self.scaler.scale))

    def _count(self, outcome: StepOutcome, module: Any) -> None:
        self.outcome = outcome
        self.steps += 1
        self.updates += outcome.applied
        self.skipped += not outcome.applied
        self.retried += outcome.kind == "retried"
        if self._log:
            module.log_dict(self.metrics(), on_step=True, on_epoch=False)

    def metrics(self) -> dict[str, float]:
        """The last optimiser step as a row of metrics (names and units as in ``mantissa.runs.metrics``)."""
        outcome = self.outcome
        if outcome is None:
            return {}
        return {
            "precision/loss_scale": outcome.scale,
            **{name: float(count) for name, count in counts_of(outcome).items()},
            "precision/max_scaled_grad": outcome.max_scaled_grad,
            "optim/grad_norm": outcome.grad_norm,
            "optim/updates": float(self.updates),
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
        assert self.role is not None
        now = self.role.active.name
        if state_dict["format"] == now:
            self.scaler.load_state_dict(state_dict["scaler"])
        else:
            self._say(f"checkpoint: written in {state_dict['format']}, goes on in {now}, with a fresh loss scaler")


_COUNTERS = ("steps", "updates", "skipped", "retried")
