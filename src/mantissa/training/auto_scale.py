"""A loss scale chosen from the gradients' observed range, instead of found by overflowing.

The dynamic rule learns the range from its accidents: it grows until a step overflows, so a run that is long enough pays
one skipped step per growth, and one that is short, or whose gradients shrink, trains far below the scale it could have
(2^16 to 2^22 takes 2400 steps at an interval of 400, 12000 at 2000), with small gradients flushed to zero meanwhile.
But every clean step *shows* the range: the largest |scale x gradient| is measured anyway. In log2, with x_t the
unscaled peak of step t in units of the format's largest value,

    x_t = log2(max_scaled_grad_t) - log2(scale_t)        and step t overflows at scale 2^L  iff  x_t + L > 0,

so the best L is a quantile: the largest with P(x > -L) <= ``rate``. Heavy-tailed gradients have exponential tails in
log2 (a power tail of index nu falls by 2^-nu a bit), and that is how the quantile is estimated from a window of peaks:

1. drift: the window is moved to now by the slope between the medians of its older and newer half;
2. the k largest (``tail`` of the window) exceed the next one, u, by amounts taken as exponential; their mean, with a
   gamma prior worth ``prior_count`` observations of ``prior_excess`` bits, has a predictive distribution in closed form

       P(x > u + q) = (k / n) (1 + q / b)^-a,   a = prior_count + k,   b = prior_count * prior_excess + sum of excesses,

   so few observations widen the margin by themselves (6 bits after one step);
3. target = -(u + q at P = rate) - headroom, and L is an integer (a power of two: exact) near it: lowered at once when
   the target is half a bit below, raised when the target has been a bit above for ``patience`` steps.

The peak of the *parameters'* gradients is all that is seen. Gradients of activations may be larger, and a spike that
overflowed has no size (entering a guess in the window spirals: each guess lowers the scale, and so raises the next).
So overflows are held to the same budget by a bucket: +1 for each (retries of one batch count once), -``rate`` per clean
step, never below -1; what it holds above 0 is ``headroom``, in bits. An isolated overflow costs ``patience`` steps at a
lower scale; overflows more frequent than the rate lower the scale until they are not. At most ``most_headroom`` bits: a
batch beyond that is an outlier, and is skipped rather than paid for by every other batch.
Overflows in a row lower the scale by 1, 2, 4, 8 bits, so four retries reach any scale from 2^16 down to 2.

What it cannot do: in a stationary run, once warmed up, scale and overflow rate are a trade, and no rule beats it. The
dynamic rule's place on that curve is ln 2 / growth_interval overflows a step (1/577 at 400, 1/2885 at 2000);
this one's is ``rate``, and its scale is accordingly lower or higher. Where gradients shrink, or start far below the
range, the dynamic rule has not found the overflows yet: it skips less and flushes many times more. Unannounced
spikes are skipped above the rate (10 in 10^4 steps that had 33 of 3 to 8 bits, a rate of 1/1000). Measured case by
case in benchmarks/auto_scale.py: lower on both counts is the exception, one of the two the rule.

Sources: the tail model is Hill's (Annals of Statistics 3, 1975) with Weissman's quantile (JASA 73, 1978).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mantissa.bounds import count, number
from mantissa.errors import MantissaError
from mantissa.training.scaler import LossScaler, ScalerConfig

_HIGHEST = 126.0  # 2^-126, by which gradients are unscaled, is the smallest normal fp32
_DRIFT_FROM = 64  # peaks, below which a slope is noise


@dataclass(frozen=True)
class AutoRule:
    """``rate``: overflows per step to allow. ``window``: peaks kept. ``tail``: the fraction that the tail is fitted to.

    ``prior_count``, ``prior_excess`` (bits): what the tail is taken for before it has been seen. ``patience``: steps
    before the scale is raised. ``most_headroom`` (bits): the most that overflows may take off the target.
    """

    rate: float = 1 / 2000
    window: int = 400
    tail: float = 0.05
    prior_count: float = 6.0
    prior_excess: float = 0.5
    patience: int = 10
    most_headroom: float = 8.0

    def __post_init__(self) -> None:
        checks = (
            (0 < self.rate < 1, f"rate={self.rate}: expected between 0 and 1"),
            (self.window >= 1, f"window={self.window}: expected at least 1"),
            (0 < self.tail <= 1, f"tail={self.tail}: expected above 0, at most 1"),
            (self.prior_count > 0, f"prior_count={self.prior_count}: expected a positive number"),
            (self.prior_excess > 0, f"prior_excess={self.prior_excess}: expected a positive number of bits"),
            (self.patience >= 1, f"patience={self.patience}: expected at least 1"),
            (self.most_headroom >= 0, f"most_headroom={self.most_headroom}: expected 0 or more bits"),
        )
        for good, message in checks:
            if not good:
                raise MantissaError(f"automatic loss scaling: {message}")


class AutoScaler(LossScaler):
    """``scale="auto"``. Of the ``ScalerConfig``, ``initial``, ``floor`` and ``retries`` count; the rest is the rule's.

    ``peaks``: log2 of the unscaled peaks of clean steps, in units of the format's largest value, oldest first.
    ``bucket``: overflows beyond the budget (see the module). State is JSON numbers, and a resumed run takes the same
    decisions bit for bit.
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
        self._set(math.ceil(exponent) - 2.0**self.overflows_in_a_row)
        self.overflows_in_a_row = min(self.overflows_in_a_row + 1, 8)  # 2^8 bits are more than fp32 has

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
    """The log2 peak that the next step exceeds with probability ``rule.rate``, from at least one peak (see module).

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
