"""Loss scaling: keep fp16 gradients inside the format by multiplying the loss by a power of two.

fp16 holds magnitudes from 2^-24 to 65504. Gradients of a mean loss lie mostly below; multiplied by a scale S they fit,
and dividing by S afterwards is exact. Too small an S flushes small gradients to zero (``flushed_fraction``), too large
an S overflows to inf. (Overflow means that scale x gradient left the format: the cure is always to *lower* the scale.)
Three rules:

- ``dynamic``: S grows by ``growth_factor`` after ``growth_interval`` clean steps, shrinks by ``backoff_factor`` on
  overflow. The sequence of scales, steps and skips is that of ``torch.amp.GradScaler`` on the same gradients (with
  ``retries=0``). Differences: a floor, at which overflow is no longer a matter of scaling; and a default
  ``growth_interval`` of 400, because RL runs have 10^2 to 10^3 steps.
- ``auto``: S follows the observed range of the gradients (``AutoScaler``).
- a number: S never changes (``FixedScaler``). A format that needs no scaling has ``LossScaler.disabled()``, which
  scales by 1: no branch anywhere else.

S is a Python float that always holds an fp32 value, as GradScaler's does: it multiplies an fp32 loss, so a wider S
would not be the S applied, and one above 3.4e38 would be inf. Factors that are not powers of two are allowed, rounded
to fp32 at each change, and inexact: the loss times S, and the gradient times 1/S, are then each off by a rounding
(2^-24 in fp32, half a unit in the last place of fp16 where the value passes through it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from mantissa.base.bounds import LARGEST_FLOAT, SMALLEST_FLOAT, count, number
from mantissa.base.config import Section
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.ranks import ALONE, Ranks, local
from mantissa.precision import NumberFormat


class ScalerConfig(Section):
    """Loss scaling of fp16. ``MantissaError`` for numbers out of range, and a first scale below the floor."""

    called: ClassVar = "loss scaling"

    initial: float = Field(65536.0, gt=0, description="First scale.")
    growth_factor: float = Field(2.0, ge=1, description="Factor after growth_interval clean steps.")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="Factor on overflow.")
    growth_interval: int = Field(400, ge=1, description="Clean steps before the scale grows.")
    floor: float = Field(1.0, gt=0, description="Smallest scale; a non-finite gradient there stops the run.")
    retries: int = Field(4, ge=0, description="Backward passes repeated on one batch before it is given up.")

    @model_validator(mode="after")
    def _first_is_no_lower(self) -> Self:
        if self.initial < self.floor:
            raise ValueError(f"initial={self.initial}: expected at least the floor, {self.floor}")
        return self


class LossScaler:
    """The scale and the dynamic rule. ``scale`` holds an fp32 value; ``clean_steps`` counts since it last changed."""

    def __init__(self, config: ScalerConfig | None = None) -> None:
        self.config = config or ScalerConfig()
        self.floor = as_fp32(self.config.floor)
        self.scale = as_fp32(self.config.initial)
        self.clean_steps = 0

    @classmethod
    def disabled(cls) -> LossScaler:
        """A scaler that scales by 1 and never changes: for formats with the exponent range of fp32."""
        return FixedScaler(1.0)

    @property
    def at_floor(self) -> bool:
        """True where the scale cannot be lowered: an overflow here is not a scaling problem."""
        return self.scale <= self.floor

    def overflowed(self) -> None:
        """Back off: scale x ``backoff_factor``, not below the floor."""
        self.scale = max(as_fp32(self.scale * self.config.backoff_factor), self.floor)
        self.clean_steps = 0

    def stepped(self, max_scaled_grad: float) -> None:
        """Count a clean step, and grow after ``growth_interval`` of them (never to inf).

        ``max_scaled_grad``: the largest finite |scale x gradient| of the step as a fraction of the format's largest
        value, 0..1 (dimensionless). The dynamic rule ignores it.
        """
        self.clean_steps += 1
        if self.clean_steps >= self.config.growth_interval:
            grown = as_fp32(self.scale * self.config.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next scale, as JSON numbers (and, for ``auto``, a list of them)."""
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state saved by another rule gives its scale, and what both rules know."""
        self.scale, self.clean_steps = check_scale(state["scale"]), count(state["clean_steps"], "clean_steps")


class FixedScaler(LossScaler):
    """A scale that never changes. An overflow costs the step, and is reported as any other.

    Repeating the backward at the same scale would overflow again, so there are no retries: the step is skipped and
    training goes on. It does not go on for ever: after as many overflows in a row as a dynamic scaler would have
    needed to halve this scale down to 1 (ceil(log2 scale); none for scales up to 1), ``at_floor`` says that the
    problem is not one of scaling. Loading a state keeps the scale given here: the caller fixed it.
    """

    def __init__(self, scale: float) -> None:
        if not number(scale, SMALLEST_FLOAT):
            raise MantissaError(
                f"a fixed loss scale of {scale}: expected a positive number that fp32 holds "
                f"({SMALLEST_FLOAT:.3g} to {LARGEST_FLOAT:.3g}); 1024 is a common choice, 'dynamic' finds one"
            )
        scale = as_fp32(scale)
        super().__init__(ScalerConfig(initial=scale, growth_factor=1.0, floor=scale, retries=0))
        self.overflows_in_a_row = 0

    @property
    def at_floor(self) -> bool:
        return self.overflows_in_a_row >= math.log2(self.scale)

    def overflowed(self) -> None:
        self.overflows_in_a_row += 1
        self.clean_steps = 0

    def stepped(self, max_scaled_grad: float) -> None:
        self.overflows_in_a_row = 0
        self.clean_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"overflows_in_a_row": self.overflows_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clean_steps = count(state["clean_steps"], "clean_steps")
        self.overflows_in_a_row = count(state.get("overflows_in_a_row", 0), "overflows_in_a_row")


def check_scale(scale: Any) -> float:
    """A saved scale: a positive number that fp32 holds."""
    if not number(scale, SMALLEST_FLOAT):
        raise MantissaError(f"loss scale {scale!r}: expected a positive number that fp32 holds; the state is damaged")
    return float(scale)


def as_fp32(scale: float) -> float:
    """The fp32 value nearest to ``scale``, as a Python float; inf beyond fp32's largest."""
    return float(torch.tensor(scale, dtype=torch.float32))


def scaler_for(scale: str | float | ScalerConfig, fmt: NumberFormat, retries: int | None = None) -> LossScaler:
    """The scaler that a user asked for, in the format that computes.

    ``scale``: "dynamic" (``ScalerConfig()``), "auto" (``AutoScaler``), a ``ScalerConfig`` (dynamic), or a number
    (fixed). The first three are disabled where ``fmt`` needs no scaling (bf16, fp32); a number is applied in any
    format, because it was asked for. A number that is not a power of two is allowed and inexact (see the module).
    ``retries``: replaces the configuration's; a fixed scale never retries. Raises ``MantissaError``.
    """
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return FixedScaler(scale)
    if not isinstance(scale, ScalerConfig) and scale not in ("dynamic", "auto"):
        hint = nearest(scale, ("dynamic", "auto")) if isinstance(scale, str) else ""
        raise MantissaError(
            f"loss scale {scale!r}: expected 'dynamic', 'auto', a positive number or a ScalerConfig{hint}"
        )
    config = scale if isinstance(scale, ScalerConfig) else ScalerConfig()
    if retries is not None:
        config = ScalerConfig(**(config.model_dump(include=set(ScalerConfig.model_fields)) | {"retries": retries}))
    if not fmt.needs_loss_scaling:
        return LossScaler.disabled()
    return AutoScaler(config) if scale == "auto" else LossScaler(config)


_HIGHEST = 126.0  # 2^-126, by which gradients are unscaled, is the smallest normal fp32
_DRIFT_FROM = 64  # peaks, below which a slope is noise


class AutoRule(Section):
    """The numbers of ``AutoScaler``'s rule."""

    called: ClassVar = "automatic loss scaling"

    rate: float = Field(1 / 2000, gt=0, lt=1, description="Overflows per step to allow.")
    window: int = Field(400, ge=1, description="Peaks kept.")
    tail: float = Field(0.05, gt=0, le=1, description="Fraction of the peaks that the tail is fitted to.")
    prior_count: float = Field(6.0, gt=0, description="What the tail is taken for before it has been seen: peaks.")
    prior_excess: float = Field(0.5, gt=0, description="And their mean excess, in bits.")
    patience: int = Field(10, ge=1, description="Steps before the scale is raised.")
    most_headroom: float = Field(8.0, ge=0, description="The most bits that overflows may take off the target.")


class AutoScaler(LossScaler):
    """``scale="auto"``. Of the ``ScalerConfig``, ``initial``, ``floor`` and ``retries`` count; the rest is the rule's.

    ``peaks``: log2 of the unscaled peaks of clean steps, in units of the format's largest value, oldest first.
    ``bucket``: overflows beyond the budget (below). State is JSON numbers, and a resumed run takes the same
    decisions bit for bit.

    The scale follows from the gradients' observed range, instead of being found by overflowing.

    The dynamic rule learns the range from its accidents: it grows until a step overflows, so a run that is long enough
    pays one skipped step per growth, and one that is short, or whose gradients shrink, trains far below the scale it
    could have (2^16 to 2^22 takes 2400 steps at an interval of 400, 12000 at 2000), with small gradients flushed to
    zero meanwhile. But every clean step *shows* the range: the largest |scale x gradient| is measured anyway. In log2,
    with x_t the unscaled peak of step t in units of the format's largest value,

        x_t = log2(max_scaled_grad_t) - log2(scale_t)        and step t overflows at scale 2^L  iff  x_t + L > 0,

    so the best L is a quantile: the largest with P(x > -L) <= ``rate``. Heavy-tailed gradients have exponential tails
    in log2 (a power tail of index nu falls by 2^-nu a bit), and that is how the quantile is estimated from a window of
    peaks:

    1. drift: the window is moved to now by the slope between the medians of its older and newer half;
    2. the k largest (``tail`` of the window) exceed the next one, u, by amounts taken as exponential; their mean, with
       a gamma prior worth ``prior_count`` observations of ``prior_excess`` bits, has a predictive distribution in
       closed form

           P(x > u + q) = (k / n) (1 + q / b)^-a,
           a = prior_count + k,   b = prior_count * prior_excess + sum of excesses,

       so few observations widen the margin by themselves (6 bits after one step);
    3. target = -(u + q at P = rate) - headroom, and L is an integer (a power of two: exact) near it: lowered at once
       when the target is half a bit below, raised when the target has been a bit above for ``patience`` steps.

    The peak of the *parameters'* gradients is all that is seen. Gradients of activations may be larger, and a spike
    that overflowed has no size (entering a guess in the window spirals: each guess lowers the scale, and so raises the
    next). So overflows are held to the same budget by a bucket: +1 for each (retries of one batch count once),
    -``rate`` per clean step, never below -1; what it holds above 0 is ``headroom``, in bits. An isolated overflow
    costs ``patience`` steps at a lower scale; overflows more frequent than the rate lower the scale until they are
    not. At most ``most_headroom`` bits: a batch beyond that is an outlier, and is skipped rather than paid for by
    every other batch. Overflows in a row lower the scale by 1, 2, 4, 8 bits, so four retries reach any scale from 2^16
    down to 2.

    What it cannot do: in a stationary run, once warmed up, scale and overflow rate are a trade, and no rule beats it.
    The dynamic rule's place on that curve is ln 2 / growth_interval overflows a step (1/577 at 400, 1/2885 at 2000);
    this one's is ``rate``, and its scale is accordingly lower or higher. Where gradients shrink, or start far below
    the range, the dynamic rule has not found the overflows yet: it skips less and flushes many times more. Unannounced
    spikes are skipped above the rate (10 in 10^4 steps that had 33 of 3 to 8 bits, a rate of 1/1000). Measured case by
    case in benchmarks/run.py auto_scale: lower on both counts is the exception, one of the two the rule.

    Sources: the tail model is Hill's (Annals of Statistics 3, 1975) with Weissman's quantile (JASA 73, 1978).
    """

    def __init__(self, config: ScalerConfig | None = None, rule: AutoRule | None = None) -> None:
        super().__init__(config)
        self.rule = rule or AutoRule()
        self.peaks: list[float] = []
        self.bucket = -1.0
        self.steps_above = 0
        self.overflows_in_a_row = 0

    @property
    def headroom(self) -> float:
        """Bits by which overflows above the budget lower the target."""
        return max(0.0, self.bucket)

    def overflowed(self) -> None:
        """Lower the scale by 1, 2, 4, ... bits, and enter one overflow in the bucket."""
        exponent = math.log2(self.scale)
        if self.overflows_in_a_row == 0:
            self.bucket = min(self.bucket + 1.0, self.rule.most_headroom)
        bits = min(self.overflows_in_a_row, 8)  # 2^8 are more than fp32 has, and a saved count may be any
        self._set(math.ceil(exponent) - 2.0**bits)
        self.overflows_in_a_row = min(bits + 1, 8)

    def stepped(self, max_scaled_grad: float) -> None:
        """Remember the step's peak, and move the scale where the target says. Zero gradients say nothing."""
        self.clean_steps += 1
        self.overflows_in_a_row = 0
        self.bucket = max(self.bucket - self.rule.rate, -1.0)
        if not max_scaled_grad > 0:
            return
        exponent = math.log2(self.scale)
        self._remember(math.log2(max_scaled_grad) - exponent)
        target = -predicted_peak(self.peaks, self.rule) - self.headroom
        self.steps_above = self.steps_above + 1 if target >= exponent + 1 else 0
        if target < exponent - 0.5:
            self._set(math.floor(target + 0.5))
        elif self.steps_above >= min(self.rule.patience, len(self.peaks)):  # the first step may raise it
            self._set(math.floor(target))

    def _remember(self, peak: float) -> None:
        self.peaks.append(peak)
        del self.peaks[: -self.rule.window]

    def _set(self, exponent: float) -> None:
        self.scale = max(2.0 ** max(-_HIGHEST, min(exponent, _HIGHEST)), self.floor)
        self.clean_steps = self.steps_above = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "peaks": list(self.peaks),
            "bucket": self.bucket,
            "steps_above": self.steps_above,
            "overflows_in_a_row": self.overflows_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        peaks, bucket = list(state.get("peaks", ())), state.get("bucket", -1.0)
        if not all(number(value, -1e4, 1e4) for value in (*peaks, bucket)):
            raise MantissaError("automatic loss scaling: its saved peaks are not all numbers; the state is damaged")
        above, in_a_row = (count(state.get(name, 0), name) for name in ("steps_above", "overflows_in_a_row"))
        super().load_state_dict(state)
        self.peaks, self.bucket = [float(peak) for peak in peaks], float(bucket)
        self.steps_above, self.overflows_in_a_row = above, in_a_row


def predicted_peak(peaks: Sequence[float], rule: AutoRule) -> float:
    """The log2 peak that the next step exceeds with probability ``rule.rate``, from at least one peak (``AutoScaler``).

    ``peaks``: log2, oldest first. Pure, and O(n log n): 60 us for 400 peaks.
    """
    count = len(peaks)
    drift = _drift(peaks)
    now = sorted((peak + drift * (count - i) for i, peak in enumerate(peaks)), reverse=True)
    k = math.ceil(count * rule.tail)
    threshold = now[min(k, count - 1)]
    share = k / count
    if share <= rule.rate:
        return threshold
    a = rule.prior_count + k
    b = rule.prior_count * rule.prior_excess + math.fsum(peak - threshold for peak in now[:k])
    return threshold + b * math.expm1(math.log(share / rule.rate) / a)


def _drift(peaks: Sequence[float]) -> float:
    """Bits per step: the difference of the medians of the newer and older half, over the distance of their centres."""
    half = len(peaks) // 2
    if len(peaks) < _DRIFT_FROM:
        return 0.0
    older, newer = sorted(peaks[:half]), sorted(peaks[-half:])
    return (newer[half // 2] - older[half // 2]) / (len(peaks) - half)


def flushed_fraction(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], ranks: Ranks = ALONE) -> float:
    """Fraction of gradients that are zero in ``gradients`` among those that are not in ``exact`` (fp32, same scale).

    count(g == 0 and e != 0) / count(e != 0); 0 where ``exact`` is zero everywhere. Host float. Of sharded gradients
    each of the ``ranks`` counts its shards, and the counts are added.
    """
    flushed, nonzero = 0, 0
    for name, reference in exact.items():
        alive = local(reference) != 0
        flushed += int((alive & (local(gradients[name]) == 0)).sum())
        nonzero += int(alive.sum())
    counted = ranks.sum_of(nonzero)
    return ranks.sum_of(flushed) / counted if counted else 0.0


def gradients_of(model: nn.Module, work: Callable[[], None]) -> dict[str, Tensor]:
    """Gradients that ``work`` (a backward pass) leaves in the parameters, which are then cleared. Not to be called
    between a backward and its optimiser step."""
    model.zero_grad(set_to_none=True)
    work()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
