"""The optimiser step: scale, backward, unscale, look for overflow, clip, then step, retry or skip.

The order matters. Clipping scaled gradients at an unscaled bound always clips, and Adam's eps then swallows the
update; clipping before the search for infinities turns one inf into NaN everywhere. And a batch of RL is expensive (it
was sampled) while its backward is cheap: so an overflow lowers the scale and repeats the backward on the *same* batch,
up to ``retries`` times, before the batch is given up. (Not where the loss itself was not finite: that is no matter of
scale. Its gradients may be finite all the same, as those of ``loss + nan`` are; they are not learned from.) A step
that is given up leaves nothing behind: gradients are zeroed, and neither the optimiser, nor the learning rate's
schedule, nor the count of updates (the policy's version) moves.

Overflows and changes of the scale are told to Python's logging (``mantissa.training.step``), as information.

On several processes every rank takes the same branch: what was found is reduced (MAX) before anyone decides, for an
inf in one rank's shard, or a NaN in one rank's loss, is one for all.

Tensors of weights and gradients are fp32, and so are Adam's moments unless the optimiser is one that keeps them in 8
bits; what an update leaves in the weights, all of fp32 or bf16's values, is ``optimizer.py``'s.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.base.bounds import count
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks, grad_norm, local
from mantissa.precision import NumberFormat
from mantissa.training.optimizer import COMPENSATION, MasterWeights, flattened, held, named, refuses_sparse, restored
from mantissa.training.scaler import LossScaler, as_fp32

Backward = Callable[[float], Tensor | None]
_LOG = logging.getLogger(__name__)
_FP32_MAX = torch.finfo(torch.float32).max
_SQUARED = (1e-10, 1e10)  # where the largest gradient lies between, fp32 holds the sum of the squares


@dataclass(frozen=True)
class StepOutcome:
    """What became of one optimiser step.

    ``kind``: ``stepped`` (first try), ``retried`` (stepped after ``overflows`` lower scales), ``skipped`` (given up),
    ``accumulated`` (gradients added, the optimiser's turn is still to come).
    ``grad_norm``: Euclidean norm before any clipping, unscaled; NaN where there was no step. ``scale``: of the last
    try. ``max_scaled_grad``: the largest finite |scale x gradient| of the last try as a fraction of the format's
    largest value (inf where it overflowed). ``lr``: the learning rate applied; 0 where there was no step.
    ``loss``: what ``backward`` returned on the last try, unscaled, detached, or None. ``clipped``: fraction of units
    that adaptive clipping changed; None where it is off.
    """

    kind: Literal["stepped", "retried", "skipped", "accumulated"]
    overflows: int
    grad_norm: float
    scale: float
    max_scaled_grad: float
    lr: float
    loss: Tensor | None = None
    clipped: float | None = None

    @property
    def applied(self) -> bool:
        """True where the optimiser stepped."""
        return self.kind in ("stepped", "retried")

    @property
    def retries(self) -> int:
        """Backward passes redone at a lower scale: one after each overflow, but none after that of a step given up."""
        return self.overflows - (self.kind == "skipped")

    def row(self) -> dict[str, Any]:
        """The step as metrics, under the names that ``mantissa metrics`` explains."""
        return {
            "precision/loss_scale": self.scale,
            "precision/overflows": self.overflows,
            "precision/retries": self.retries,
            "precision/skipped": int(not self.applied),
            "precision/max_scaled_grad": self.max_scaled_grad,
            "optim/grad_norm": self.grad_norm,
        }

    def __str__(self) -> str:
        return f"retried({self.overflows})" if self.kind == "retried" else self.kind


@dataclass(eq=False, repr=False)
class OptimizerStep:
    """One optimiser, its scaler and its schedule; ``run`` is one step.

    ``parameters``: named fp32 masters, those of them that are in the optimiser's groups; at each step they are what the
    groups hold then, whatever was added, removed or exchanged. ``names``: called for the model's parameters by name,
    where new ones are to be named as those.
    ``lr_at``: learning rate of update number n (0 for the first), which a parameter group multiplies by its own
    ``lr_scale``, if it has one; None leaves the optimiser's rates to its owner.
    ``max_grad_norm``: clip bound on the unscaled Euclidean norm (inf: measure, never clip). ``clip``: adaptive
    clipping, applied to the unscaled gradients before the bound; returns the fraction of units it changed.
    ``diagnose``: given the backward, returns the name of what first became non-finite; called only before stopping.
    ``on_nonfinite``: what to do about a non-finite gradient that no lower scale can cure: ``stop`` raises, ``skip``
    gives the batch up. ``ranks``: the processes that must decide alike. ``masters``: what is kept of an update.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    format: NumberFormat
    lr_at: Callable[[int], float] | None
    max_grad_norm: float = float("inf")
    diagnose: Callable[[Backward], str] | None = None
    _: KW_ONLY
    clip: Callable[[], Tensor] | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    ranks: Ranks = ALONE
    masters: MasterWeights = field(default_factory=MasterWeights)
    names: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple
    given_up_level: int = logging.INFO  # of the line about a batch that is lost; whoever shows no counts raises it
    updates: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        mine = self.masters.parameters
        # what was given to the step and not to its masters is not theirs to round
        self._others = {name for name, p in self.parameters.items() if p.requires_grad and name not in mine}
        self.given, self._held = self.parameters, list[nn.Parameter]()
        self.follow()

    @property
    def changed(self) -> bool:
        """Whether the optimiser's groups hold other parameters than when they were last followed."""
        now = held(self.optimizer)
        return len(now) != len(self._held) or any(map(operator.is_not, now, self._held))

    def follow(self) -> None:
        """Take the optimiser's parameters as its groups have them now. ``MantissaError`` where one is not fp32."""
        now = self.parameters
        if self.changed:
            now = named(self.optimizer, now.values(), self.names(), self.given.items())
        check_fp32(now)
        if now is not self.parameters:
            self.parameters, self._held = now, held(self.optimizer)
        if self.masters.kind != "fp32":
            self.masters.follow({name: p for name, p in now.items() if name not in self._others})

    def run(
        self, backward: Backward, *, accumulated: bool = False, share: float = 1.0, repeatable: bool = True
    ) -> StepOutcome:
        """Do one optimiser step on the gradients that ``backward(scale)`` leaves in the parameters' ``.grad``.

        ``backward`` multiplies its loss by the scale it is given, and must do the same work when called again: it is
        called once, and again after each overflow. It returns its unscaled loss, without which the step cannot see that
        the loss is not finite where the gradients are.
        ``accumulated``: the first call adds to gradients that are already there; after an overflow they are cleared,
        and the next call must make the whole. ``share``: a factor on the gradients, applied with the unscaling.
        ``repeatable`` False: ``backward`` cannot be called twice, so an overflow skips.
        Raises ``MantissaError`` on a non-finite loss or gradient at the floor, unless ``on_nonfinite`` is ``skip``;
        where no parameter has a gradient; and for a sparse one that torch's optimiser does not take. Nothing has moved
        then, and the gradients are cleared.
        """
        overflows = 0
        while True:
            scale = self.scaler.scale
            self.follow()
            if not accumulated or overflows:
                self.optimizer.zero_grad(set_to_none=True)
            loss = backward(scale)
            self.follow()  # what the forward or the backward itself has added
            gradients, factor = self._gradients(), share / scale
            largest = self._largest(gradients, loss)
            unscaled = largest if factor == 1.0 else as_fp32(largest * as_fp32(factor))
            if unscaled <= _FP32_MAX:  # false for inf and for NaN
                break
            overflows += 1
            if self.scaler.at_floor and self.on_nonfinite == "stop":
                self._stop(backward, scale, "loss" if self._loss_is_lost(loss) else "gradient")
            beyond = largest <= _FP32_MAX  # what no scale changes: the unscaled gradient leaves fp32
            incurable = beyond or not repeatable or self.scaler.at_floor or self._loss_is_lost(loss)
            self.scaler.overflowed()
            given_up = overflows > self.scaler.config.retries or incurable
            self._log(self.given_up_level if given_up else logging.INFO, self._what_overflowed(scale, given_up, loss))
            if given_up:
                self.optimizer.zero_grad(set_to_none=True)
                self.skipped += 1
                return StepOutcome("skipped", overflows, float("nan"), scale, float("inf"), 0.0, loss)
        fraction = largest / self.format.largest
        wide = not _SQUARED[0] < unscaled < _SQUARED[1]
        norm, lr, clipped = self._apply(gradients, factor, fraction, wide)
        if self.scaler.scale != scale:
            self._log(logging.INFO, f"loss scale {scale:g}, now {self.scaler.scale:g}")
        kind: Literal["stepped", "retried"] = "retried" if overflows else "stepped"
        return StepOutcome(kind, overflows, norm, scale, fraction, lr, loss, clipped)

    def _what_overflowed(self, scale: float, given_up: bool, loss: Tensor | None) -> str:
        """A batch without finite gradients, in words: an overflow at a scale, or what no scale is to blame for."""
        fate = f"the batch is {'given up' if given_up else 'repeated'}"
        if loss is not None and not bool(loss.isfinite().all()):
            said = f"the loss is not finite ({'NaN' if bool(loss.isnan().any()) else 'infinite'}): {fate}"
        elif scale == 1 and self.scaler.scale == 1:
            said = f"a gradient is not finite: {fate}"
        else:
            said = f"overflow at loss scale {scale:g}: {fate}"
        return said if self.scaler.scale == scale else f"{said}, the scale now {self.scaler.scale:g}"

    def _gradients(self) -> list[Tensor]:
        """The gradients that are there; of a sparse one, entries for one place are added up: their sum may overflow."""
        gradients = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                refused = refuses_sparse(self.optimizer, parameter)
                if refused is not None:
                    self.optimizer.zero_grad(set_to_none=True)
                    raise MantissaError(f"{name} has a sparse gradient, which {refused}")
                parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad)
        return gradients

    def _largest(self, gradients: list[Tensor], loss: Tensor | None) -> float:
        """Largest |gradient| on any rank; inf where one, or a loss, is inf or NaN (a MAX over ranks may drop a NaN).

        ``MantissaError`` where no rank has a gradient.
        """
        largest = _largest_of([part for part in map(local, gradients) if part.numel()])
        unknown = largest.isnan()
        if loss is not None:
            unknown = unknown | ~loss.detach().isfinite().all().to(unknown.device)
        found = float(self.ranks.max(torch.where(unknown, float("inf"), largest if gradients else -1.0)))
        if found < 0:
            self.optimizer.zero_grad(set_to_none=True)
            raise MantissaError(
                "no parameter of the optimiser has a gradient: expected a loss that depends on at least one of the "
                f"{len(self.parameters)}, and there would be nothing to step on; make the optimiser from the "
                "parameters that the loss uses, or leave this batch out"
            )
        return found

    def _loss_is_lost(self, loss: Tensor | None) -> bool:
        """Whether the forward itself was not finite, on any rank: a repeated backward would find the same."""
        lost = loss is not None and not bool(loss.isfinite().all())
        return self.ranks.max_of(float(lost)) > 0

    def _apply(
        self, gradients: list[Tensor], factor: float, fraction: float, wide: bool
    ) -> tuple[float, float, float | None]:
        if factor != 1.0:  # exact where the share is 1: scales are powers of two
            torch._foreach_mul_([local(grad) for grad in gradients], factor)
        norm = grad_norm(gradients, wide)
        clipped = None
        if self.clip is not None:
            clipped = self.clip()
            gradients = self._gradients()  # a hook may have put others in their place, or none
        if self.max_grad_norm < float("inf") and gradients:
            bounded = norm if self.clip is None else grad_norm(gradients, wide)
            multiplier = (self.max_grad_norm / (bounded + 1e-6)).clamp(max=1.0)
            steps = [multiplier.sqrt().float()] * 2 if wide else [multiplier]  # fp32 may not hold it at once
            for each in steps:
                torch._foreach_mul_([local(grad) for grad in gradients], each)
        if self.lr_at is not None:
            for group in self.optimizer.param_groups:
                rate = self.lr_at(self.updates) * group.get("lr_scale", 1.0)
                if isinstance(group["lr"], Tensor):  # a compiled update reads the rate from this very tensor
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.masters.step(self.optimizer, self.updates)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.stepped(fraction)
        self.updates += 1
        return float(norm), lr, None if clipped is None else float(clipped)

    def _log(self, level: int, text: str) -> None:
        """One line to Python's logging, by the first rank: all take the same branch."""
        if self.ranks.rank0:
            _LOG.log(level, "after %d updates: %s", self.updates, text)

    def _stop(self, backward: Backward, scale: float, what: str) -> None:
        where = self.diagnose(backward) if self.diagnose else "not diagnosed"
        self.optimizer.zero_grad(set_to_none=True)
        raise MantissaError(
            f"non-finite {what} at loss scale {scale:g}, which is the floor, so lowering the scale cannot help; "
            f"first non-finite value: {where}; look at that module's input, or train in a format with more range "
            "(bf16, fp32)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters and the scaler: plain numbers. The optimiser's tensors are ``optimizer_tensors``."""
        counts = {"updates": self.updates, "skipped": self.skipped, "scaler": self.scaler.state_dict()}
        return counts | ({} if self.masters.kind == "fp32" else {"masters": self.masters.kind})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masters.check_kind(state.get("masters", "fp32"))
        updates, skipped = (count(state[name], f"checkpoint's {name}") for name in ("updates", "skipped"))
        self.scaler.load_state_dict(state["scaler"])
        self.updates, self.skipped = updates, skipped

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimiser's state as ``<parameter>/<field>`` tensors, for safetensors; ``flattened`` names the fields.

        With it goes what bf16 masters keep beside the weights.
        """
        self.follow()
        kept = {f"{name}/{COMPENSATION}": value for name, value in self.masters.compensation.items()}
        return kept | {
            f"{name}/{part}": value
            for name, parameter in self.parameters.items()
            for part, value in flattened(self.optimizer.state.get(parameter, {})).items()
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``optimizer_tensors``, from whole tensors; one of a parameter that is not here is an error.

        So are moments of another precision than this optimiser's. After an error the state is what it was. Collective
        where parameters are sharded.
        """
        self.follow()
        fields: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, part = key.rpartition("/")
            if name not in self.parameters:
                raise MantissaError(f"checkpoint's optimiser state names {name!r}, which this model does not have")
            fields.setdefault(name, {})[part] = value
        kept = {name: plain.pop(COMPENSATION) for name, plain in fields.items() if COMPENSATION in plain}
        kept = self.masters.checked(kept)
        states: dict[Tensor, dict[str, Tensor]] = {
            self.parameters[name]: restored(self.optimizer, name, self.parameters[name], plain)
            for name, plain in fields.items()
            if plain  # before the first update there is compensation alone
        }
        self.masters.compensation = kept
        self.optimizer.state.clear()
        self.optimizer.state.update(states)


def check_fp32(parameters: Mapping[str, Tensor]) -> None:
    """``MantissaError`` where one of these masters is of another type."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise MantissaError(
                f"parameter {name} is {parameter.dtype}: master weights are fp32; low precision is for kernels "
                "(after model.half() or .to(dtype): model.float())"
            )


def _largest_of(gradients: list[Tensor]) -> Tensor:
    """max |g|, 0-dim, on the gradients' device; NaN where there is one; 0 of no gradient."""
    if not gradients or gradients[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))  # a few kernels for all of them
    # on a CPU the norm takes 13 ms for ten million values, and the extremes 1 ms
    extremes = torch.stack([end for grad in gradients for end in torch.aminmax(grad)])
    return extremes.abs().amax()
