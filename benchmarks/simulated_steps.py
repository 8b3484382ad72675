"""What simulation costs on a CPU: a training step of the decoder in simulated formats against native fp32.

    python benchmarks/run.py simulated_step [--threads 2] [--rounds 15]
    python benchmarks/run.py fp8_step [--threads 2] [--rounds 15] [--hidden 256]

The ratio is taken within each round (all run in turn), so that a busy machine slows both sides alike. Targets: at most
1.2 times fp32 in fp16 and bf16, twice in fp8 at hidden size 256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner import Row, Rows, case
from steps import decoder_config, interleaved, step_rows, training_step

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import resolve
from mantissa.precision import PRESETS, Fp8Policy, PrecisionPolicy

LAYERS, ROWS = 4, 64


def measure(policies: Mapping[str, PrecisionPolicy], hidden: int, length: int, rounds: int) -> list[Row]:
    """The rows of one size; ``length - 1`` positions of each of 64 rows are trained on."""
    config = decoder_config(hidden, LAYERS)
    steps = {name: training_step(policy, config, ROWS, length, "cpu") for name, policy in policies.items()}
    rows: list[Row] = []
    named = all(name == policy.train for name, policy in policies.items())
    times = interleaved(steps, warm_up=3, rounds=rounds)
    for name, policy in policies.items():
        role = resolve(policy, "cpu").learner
        about: Row = {
            **({} if named else {"contender": name}), "requested": policy.train,
            "active": "fp8" if role.fp8 is not None else role.active.name, "kernels": role.backend, "hidden": hidden,
            "layers": LAYERS, "tokens": ROWS * (length - 1), "rounds": rounds,
        }  # fmt: skip
        if role.fp8 is not None:
            about["products"] = f"{role.fp8}, scale {role.fp8.scale}"
        rows += step_rows(about, name, times)
    return rows


@case(rounds=1, hidden=(128,))
def simulated_step(threads: int = 2, rounds: int = 15, hidden: Sequence[int] = (128, 256)) -> Rows:
    """What simulation costs: a training step in simulated fp16 and bf16 against native fp32, on a CPU."""
    simulated = {"fp16": {"preset": "fp16", "backend": "simulated"}, "bf16": {"preset": "bf16", "backend": "simulated"}}
    policies = {"fp32": PRESETS["fp32"]} | {name: PrecisionPolicy.parse(how) for name, how in simulated.items()}
    for size in hidden:
        yield measure(policies, size, 97, rounds)


@case(rounds=1, hidden=128)
def fp8_step(threads: int = 2, rounds: int = 15, hidden: int = 256) -> Rows:
    """What fp8 costs on a CPU: a training step with simulated fp8 products against native fp32."""
    keep_freed_memory()  # as `mantissa train` does
    variants = {
        "fp8": Fp8Policy(), "fp8 e4m3": Fp8Policy(backward="e4m3"), "fp8 high": Fp8Policy(backward="high"),
        "fp8 power of two": Fp8Policy(scale="power_of_two"),
    }  # fmt: skip
    fp8 = {name: PrecisionPolicy(train="fp8", rollout="fp8", fp8=variant) for name, variant in variants.items()}
    yield measure({"fp32": PRESETS["fp32"], "bf16": PRESETS["bf16"], **fp8}, hidden, 65, rounds)
