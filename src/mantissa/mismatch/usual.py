"""How large a gap of rounding alone is: the one table, and the one sentence, of everything that judges a gap's size.

**Size.** A format's rounding perturbs logits, and u = d / (1 - p) is of the size of that error at every p (d = log r,
p the smaller of the two sides' probabilities; ``doctor/sample.py``). Its root mean square, the *size*, is a pair of
formats' own; the coarser of them counts. The table has the size that a healthy gap has, and the bound beyond which it
is too large, three times that: both measured.

**k3**, what a run logs, is mean_t(r - 1 - log r) = mean_t(d^2 / 2 + d^3 / 6 + ...), and |d| <= |u|. So a gap of size s
has k3 <= s^2 / 2, to second order; where d is normal and samples are the rollout's own (mean_t r = 1), E k3 is half of
d's variance, and the bound holds at any size. Its bound is therefore bound^2 / 2, and follows from the table: what k3
calls too large, the size calls so too. Not the other way: a policy that is sure of its tokens has a small d whatever
its logits' error is, so log-probs say more than their mean (``mantissa doctor``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_ORDER = ("fp32", "fp16", "bf16", "fp8")  # from fine to coarse
_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_COARSE = re.compile(r"(mx|nv)?(fp[48]|int[48]|e4m3|e5m2)")  # what 8 bits and 4 begin with: none is finer than fp8
_DIALLED = re.compile(r"e\d+m(\d+)$")  # numbers of so many bits of mantissa, and those of bf16 and fp16
_BF16_BITS, _FP16_BITS = 7, 10


@dataclass(frozen=True)
class Usual:
    """The size of a healthy gap, and the bound that is called too large; both of u, root mean square, in nats.

    ``source``: where it was measured. ``whose``: what it is usual in, in words.
    """

    size: float
    bound: float
    source: str
    whose: str

    @property
    def k3(self) -> float:
        """The largest usual k3, nats a token: bound^2 / 2."""
        return self.bound**2 / 2

    def of_job(self, size: float) -> Usual:
        """What is usual in a job whose own healthy ``size`` is known: up to three times that, as in the table, but not
        below fp32's bound, where nothing is learned otherwise, nor above the formats'."""
        bound = min(max(3 * size, USUAL["fp32"].bound), self.bound)
        return replace(self, size=size, bound=bound, whose=f"this job, {self.whose}")


USUAL: dict[str, Usual] = {
    "fp32": Usual(3.0e-5, 1.0e-4, "results/gap.jsonl, SmolLM2, fp32: root mean square of d 5e-6", "fp32"),
    "fp16": Usual(0.013, 0.04, "SmolLM2, fp16 in learner and rollout, five runs of recipes/smollm2.yaml: 0.011 to "
                  "0.022", "fp16"),
    "bf16": Usual(0.053, 0.16, "SmolLM2, bf16 in learner and rollout: 0.044 to 0.062; Fast-LLM pull request 525, "
                  "Qwen2.5-0.5B against vLLM: d of 0.031 with an fp32 head, 0.040 with a bf16 one", "bf16"),
    "fp8": Usual(0.2, 0.6, "results/gap.jsonl, SmolLM2: d of 0.135 with fp8 on both sides, 0.29 with a bf16 learner "
                 "and an fp8 rollout", "fp8"),
}  # fmt: skip
COARSEST = USUAL["fp8"].bound  # up to here a gap may be one of precision
_UNNAMED = "bf16 (no format is named)"


def coarser(formats: Iterable[str | None]) -> str | None:
    """The row of the table for gaps between sides in ``formats``: their coarsest; None where it knows none of them."""
    rows = [row for name in formats if name and (row := _row(name)) is not None]
    return max(rows, key=_ORDER.index, default=None)


def _row(name: str) -> str | None:
    """A format's row; of one that the table does not have, the next coarser one's, and fp8's of all below it."""
    name = _NAMES.get(name, name)
    if name in USUAL:
        return name
    if _COARSE.match(name):
        return "fp8"
    bits = _DIALLED.match(name)
    if bits is None:
        return None
    return "fp16" if int(bits[1]) >= _FP16_BITS else "bf16" if int(bits[1]) >= _BF16_BITS else "fp8"


def usual(formats: Iterable[str | None], temperature: float | None = None, *, lag: bool = False) -> Usual:
    """What is usual between sides in ``formats``; bf16's where none is named, for most train and serve in it.

    ``temperature``: of the sampling. The table is measured at 1; logits over one below it have their errors over it
    too. ``lag``: samples may be older than the weights that score them, so the gap is of learning as well, which
    follows no format: a bound below bf16's is then bf16's.
    """
    row = coarser(formats)
    found = replace(USUAL["bf16"], whose=_UNNAMED) if row is None else USUAL[row]
    if lag and found.bound < USUAL["bf16"].bound:
        found = replace(USUAL["bf16"], whose=f"{found.whose} with a policy lag")
    if temperature is not None and 0 < temperature < 1:
        found = replace(found, size=found.size / temperature, bound=found.bound / temperature)
    return found


def size_sentence(k3: float, expected: Usual, *, large: bool | None = None) -> str:
    """What is said of a gap's size, wherever it is said. ``large``: who has more than k3 to go by knows it better.

    ``the gap is of the usual size in bf16: k3 0.0015 nats a token, up to 0.013 is usual``
    """
    if large is None:
        large = not k3 <= expected.k3
    what = "is larger than rounding makes" if large else "is 0" if k3 == 0 else "is of the usual size"
    return f"the gap {what} in {expected.whose}: k3 {k3:.2g} nats a token, up to {expected.k3:.2g} is usual"
