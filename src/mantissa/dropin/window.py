"""The retry window: one optimiser step's micro-batches, computed again as a whole after an overflow.

``PrecisionTrainer`` and the libraries' trainers differ in how a micro-batch is computed (``Micro.compute``) and in who
calls the optimiser; that it is repeated exactly, or given up without a trace, is here: torch's generators (dropout) and
the model's buffers (a batch norm's statistics) are put back.

Before it: the format that a module computes in, settled once; and what the libraries' trainers share.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, pip_install
from mantissa.base.ranks import Ranks, is_ddp, is_fsdp, local, named_parameters, synchronising, unwrapped
from mantissa.dropin.checks import check_optimizer
from mantissa.kernels import Autocast, ResolvedRole, autocast_for, probe_autocast, resolve
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.training.nonfinite import anomaly, first_nonfinite, where_nonfinite
from mantissa.training.optimizer import Masters, listed, master_weights, strays
from mantissa.training.scaler import LossScaler, ScalerConfig, flushed_fraction, gradients_of, scaler_for
from mantissa.training.step import Backward, OptimizerStep, StepOutcome, check_fp32


def device_of(model: nn.Module) -> torch.device:
    """The one device that all of a model's parameters are on."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        listed = ", ".join(sorted(map(str, devices))) or "none: the model has no parameters"
        raise MantissaError(f"PrecisionTrainer expects a model on one device; its parameters are on {listed}")
    return devices.pop()


def resolved_role(precision: str, backend: Any, fallback: Any, device: torch.device) -> ResolvedRole:
    """The learner's line of the precision table for one format.

    On a CPU bf16 and fp16 are simulated; who would rather have plain fp32 there writes ``fallback="warn"``.
    """
    if backend == "simulated" and precision in ("fp32", "float32"):
        backend = "auto"  # fp32 is never simulated: the same arithmetic
    if precision == "fp8":
        raise MantissaError("precision=fp8: modules run in fp32, fp16 or bf16; fp8 is for the policies of a recipe")
    policy = PrecisionPolicy(train=precision, rollout=precision, backend=backend, fallback=fallback)
    if backend == "auto" and device.type == "cpu" and policy.train == "bf16":
        # Torch's autocast on a CPU leaves norms and softmax in bf16, where CUDA's does not.
        policy = policy.model_copy(update={"backend": "simulated"})
    role = resolve(policy, device).learner
    if fallback == "warn" and backend == "auto" and device.type == "cpu" and role.backend == "simulated":
        reason = f"no GPU here, and a CPU would only simulate {role.active}"
        warnings.warn(f"precision: {role.requested} was asked, but {reason}: it runs in fp32", stacklevel=4)
        why = f"fallback: warn, because {reason}"
        return ResolvedRole(role.role, role.requested, FP32, "native", why, fell_back=True)
    if role.backend == "simulated":
        where = "no GPU" if device.type == "cpu" else "asked for"
        reason = f"{where}: {role.active} tensors, fp32 accumulation, each result and gradient rounded once"
        return replace(role, reason=reason)
    return role


@dataclass(frozen=True)
class MixedPrecision:
    """The format that a model computes in on its device, settled: resolved, probed and told.

    ``role``: requested, active, backend, reason. ``evidence``: the probe's findings. ``scaler``: a fresh one.
    """

    role: ResolvedRole
    autocast: Autocast
    evidence: str
    scaler: LossScaler

    @classmethod
    def of(
        cls,
        precision: str,
        device: torch.device,
        say: Callable[[str], None],
        *,
        backend: str = "auto",
        fallback: str = "error",
        scale: str | float | ScalerConfig = "dynamic",
        retries: int | None = None,
    ) -> MixedPrecision:
        """Options as ``PrecisionTrainer``'s; ``MantissaError`` for what the device cannot do."""
        role = resolved_role(precision, backend, fallback, device)
        autocast = autocast_for(role, device)
        evidence = probe_autocast(autocast, device)
        scaler = scaler_for(scale, role.active, retries)
        say(f"precision: {role.requested} asked, {role.active} active, {role.backend} ({role.reason})")
        return cls(role, autocast, evidence, scaler)


def take_over(
    scaler: LossScaler, saved: Mapping[str, Any] | None, was: str, role: ResolvedRole, say: Callable[[str], None]
) -> None:
    """Go on with a checkpoint's loss scaling, of the format ``was``; say so where it means nothing here.

    That is where another format computes now, or another rule makes the scale: then ``scaler`` starts afresh.
    """
    if was != role.active.name:
        say(f"checkpoint: written in {was}, goes on in {role.active}, with a fresh loss scaler")
    elif saved is not None and set(saved) == set(scaler.state_dict()):
        scaler.load_state_dict(saved)
    elif saved is not None or role.active.needs_loss_scaling:
        say("checkpoint: its loss scaling has another rule than asked for here: the scaler starts afresh")


@dataclass
class Micro:
    """One micro-batch. ``compute(scale, last)`` adds its scaled gradient to ``.grad`` and returns its unscaled loss.

    ``last``: whether gradients are exchanged between ranks now. ``weight``: what it counts for; with 0 it takes part in
    every exchange and changes nothing. ``repeatable``: whether ``compute`` can be called twice. ``done``: it was.
    """

    compute: Callable[[float, bool], Tensor | None]
    weight: float = 1.0
    repeatable: bool = True
    loss: Tensor | None = None
    done: bool = False

    def run(self, scale: float, last: bool) -> None:
        """Compute it, and note its loss."""
        loss = self.compute(scale, last)
        self.loss, self.done = None if loss is None else loss.detach(), True


def mean_loss(window: Sequence[Micro]) -> Tensor:
    """Weighted mean loss of this rank's micro-batches, sum_i w_i L_i / sum_i w_i; 0 where all only take part."""
    total = sum(micro.weight for micro in window)
    losses = [(m.loss, m.weight / total) for m in window if m.loss is not None and m.weight > 0]
    return sum((loss * share for loss, share in losses), torch.zeros(()))


def sum_loss(window: Sequence[Micro]) -> Tensor | None:
    """Their sum, where whoever computes them has divided them already; None where none is known."""
    losses = [micro.loss for micro in window if micro.loss is not None]
    return torch.stack(losses).sum() if losses else None


class RetryWindow:
    """One optimiser's micro-batches between two of its steps, and the ``OptimizerStep`` that ends them.

    ``micros``: those of the open window. ``outcome``: of the last step. ``total_loss``: a window's loss from its
    micro-batches'. ``detect_anomaly``: the diagnosis of a non-finite gradient names the forward's line too.
    ``masters``: their kind. ``options`` are ``OptimizerStep``'s.

    What the model's owner may change between two windows (groups of the optimiser, modules, buffers, what is frozen) is
    asked at each; parameters that train in no optimiser are one warning. What cannot be followed is refused before
    anything moves: weights of another type or on another device, and in an open window other groups or another scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        precision: MixedPrecision,
        total_loss: Callable[[Sequence[Micro]], Tensor | None] = mean_loss,
        detect_anomaly: bool = False,
        masters: Masters = "fp32",
        **options: Any,
    ) -> None:
        check_optimizer(optimizer)
        self.model = model
        self._total_loss = total_loss
        self._detect_anomaly = detect_anomaly
        self._repeatable = False  # whether the step in progress can be
        self._device = device_of(model)
        self._keeper = Keeper(model, self._device)
        self._scale: float | None = None  # of the gradients that wait
        self._told: set[str] = set()
        self._inside: set[int] = set()  # of the optimiser's parameters, those that the model had
        self.micros: list[Micro] = []
        self.outcome: StepOutcome | None = None
        self.step = OptimizerStep(
            {}, optimizer, precision.scaler, precision.role.active, None, diagnose=self._diagnose,
            ranks=Ranks.of(model), masters=master_weights(masters, {}, precision.role.active),
            names=lambda: named_parameters(model).items(), **options,
        )  # fmt: skip
        exchanges = is_ddp(model) and not self.step.ranks.alone
        self._exchanged = [p for p in model.parameters() if p.requires_grad] if exchanges else None
        self._look()

    @property
    def applied(self) -> bool:
        """Whether the last step changed the weights; true before the first."""
        return self.outcome is None or self.outcome.applied

    def begin(self) -> None:
        """Before the first micro-batch's forward: look at what its owner may have changed, and keep what a forward
        changes."""
        self.step.follow()
        self._check_place()
        self._look()
        self._scale = None
        self._keeper.remember()

    def go_on(self) -> None:
        """Before another micro-batch of the open window, whose gradients are added to those that wait."""
        try:
            self._check_place()
            check_fp32(self.step.parameters)
        except MantissaError:
            self.abandon()  # what waits was moved or cast with the weights
            raise
        if self.step.changed:
            raise MantissaError(
                "the optimiser's parameter groups have changed while gradients accumulate, and what waits has none for "
                "the new ones; change groups after the optimiser's turn, or call flush() or abandon() first"
            )
        self.scale()

    def scale(self) -> float:
        """The scale of the next backward, which must be that of the gradients that wait."""
        now = self.step.scaler.scale
        if self._scale not in (None, now):
            raise MantissaError(
                f"the loss scale was {self._scale:g} when this window's first gradients were made and is {now:g} now: "
                "they cannot be added; change the scaler, or load its state, after the optimiser's turn, or call "
                "flush() or abandon() first"
            )
        self._scale = now
        return now

    def abandon(self) -> None:
        """Forget the open window, and what its forwards did to the buffers."""
        if self.micros:
            self._keeper.restore_buffers()
        self.micros, self._scale = [], None

    def close(self, share: float = 1.0, afresh: bool = False) -> StepOutcome:
        """The optimiser's turn. ``share``: a factor on the gradients. ``afresh``: compute all micro-batches again."""
        window, tries = self.micros, 0
        self._repeatable = all(micro.repeatable for micro in window)
        if not afresh:
            self.scale()

        def backward(scale: float) -> Tensor | None:
            nonlocal tries
            again = afresh or tries > 0
            tries += 1
            if again:
                self._keeper.restore()
            self._scale = scale
            for micro in window:
                if again or not micro.done:
                    micro.run(scale, micro is window[-1])
            return self._total_loss(window)

        outcome = self.step.run(backward, accumulated=not afresh, share=share, repeatable=self._repeatable)
        if not outcome.applied:
            self._keeper.restore_buffers()
        self.micros, self.outcome, self._scale = [], outcome, None
        return outcome

    def _check_place(self) -> None:
        """Refuse a model that has moved, for autocast is of one device type and would silently do nothing on another;
        and processes that were joined since."""
        first = next(unwrapped(self.model).named_parameters())  # some moves make new parameters
        for name, parameter in (first, *self.step.parameters.items()):
            if parameter.device != self._device:
                raise MantissaError(
                    f"the model was on {self._device} and is now on {parameter.device}: move it first, then make the "
                    f"trainer (seen at {name})"
                )
        if Ranks.here().world != self.step.ranks.world:
            raise MantissaError(
                f"{Ranks.here().world} processes, and there were {self.step.ranks.world} when the trainer was made: "
                "join them and wrap the model first"
            )

    def _look(self) -> None:
        """Refuse an optimiser of another model, and say what trains in none."""
        inside = named_parameters(self.model).values()
        mine, owned = set(map(id, inside)), set(map(id, self.step.parameters.values()))
        if not mine & owned:
            raise MantissaError(
                "the optimiser holds none of the model's parameters: make it from model.parameters(), after wrapping "
                "the model for several processes"
            )
        if self._exchanged is not None and (late := owned - set(map(id, self._exchanged))):
            names = [name for name, p in self.step.parameters.items() if id(p) in late and p.requires_grad]
            if names:
                raise MantissaError(
                    f"{listed(names)}: added or unfrozen after the model was wrapped in DDP, which does not exchange "
                    "their gradients; unfreeze first, then wrap the model and make optimiser and trainer"
                )
        lost = (self._inside & owned) - mine  # one that the model never had is a loss's own
        self._inside = (mine & owned) | lost
        if lost or any(p.requires_grad and id(p) not in owned for p in inside):
            self._tell()

    def _tell(self) -> None:
        """One warning for each parameter."""
        idle, foreign = strays(self.model, self.step.optimizer)
        new = [name for name in (*idle, *foreign) if name not in self._told]
        self._told.update(new)
        if not new or not self.step.ranks.rank0:
            return
        said = [f"in the model, trainable and in no optimiser: {listed(idle)}"] if idle else []
        said += [f"in the optimiser and not the model's: {listed(foreign)}"] if foreign else []
        warnings.warn(
            f"parameters that this training does not change: {'; '.join(said)} (make the optimiser after modules are "
            "replaced; optimizer.add_param_group adds some, requires_grad_(False) says that they are meant to stay)",
            stacklevel=4,
        )

    def _diagnose(self, backward: Backward) -> str:
        if not self._repeatable:
            return "not known, for this batch's forward cannot be repeated"
        scale = self.step.scaler.scale
        self.model.zero_grad(set_to_none=True)
        model = unwrapped(self.model)
        with first_nonfinite(model) as operation:
            where = str(where_nonfinite(model, lambda: backward(scale)))
        if operation.found is not None:
            where = f"{where}: {operation}"
        return f"{where}; {anomaly(lambda: backward(scale))}" if self._detect_anomaly else where


class Keeper:
    """What a forward changes besides gradients: torch's generators (dropout), and the model's persistent buffers (a
    batch norm's running statistics, which a repeated batch would count twice)."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._model = model
        self.remember()

    def remember(self) -> None:
        """Keep the present state, in place of what was kept before."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._buffers = [
            (module, name, None if buffer is None else buffer.clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]

    def restore(self) -> None:
        """Put generators and buffers back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the buffers back, and let the generators go on."""
        for module, name, value in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is None or value is None or buffer.shape != value.shape:
                module._buffers[name] = value if value is None else value.clone()  # a forward made it, or exchanged it
            else:
                buffer.copy_(value)


def flush_probe(
    model: nn.Module, loss_of: Callable[[], Tensor], autocast: Autocast, factor: float, device: torch.device
) -> float:
    """Fraction of this rank's parameter gradients that are zero in ``autocast``'s format but not in fp32.

    Both passes multiply the loss by ``factor`` (loss scale x weight). Gradients that are already there, buffers and
    generators are put back. Under FSDP2 every rank must call this, with no micro-batch waiting: making gradients is
    exchanging them.
    """
    keeper = Keeper(model, device)
    pending = {parameter: parameter.grad for parameter in model.parameters()}

    def gradients(context: Autocast) -> dict[str, Tensor]:
        def work() -> None:
            with synchronising(model, is_fsdp(model)):
                with context.forward():
                    loss = loss_of()
                with context.backward():
                    (loss.float() * factor).backward()

        found = gradients_of(model, work)
        keeper.restore()
        return {name: local(grad) for name, grad in found.items()}

    low = gradients(autocast)
    exact = gradients(Autocast(FP32, "native", autocast.device_type))
    for parameter, grad in pending.items():
        parameter.grad = grad
    return flushed_fraction(low, exact)


def require(library: str, extra: str) -> None:
    """Import ``library``; where it is not installed, ``MantissaError`` names the extra that brings it."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        if not f"{library}.".startswith(f"{error.name}."):
            raise  # the library is there, and something that it needs is not
        raise MantissaError(
            f"{library.partition('.')[0]} is not installed; this integration needs it: {pip_install(extra)}"
        ) from None


class HeldScheduler:
    """``scheduler``, except that ``step`` does nothing while ``applied()`` is False: where the optimiser step before it
    was given up, the weights have not moved, so neither does the rate. Everything else is the scheduler's own."""

    def __init__(self, scheduler: Any, applied: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self._applied = applied

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._applied():
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # asked for before __init__, as copying does
            raise AttributeError(name)
        return getattr(self.scheduler, name)
