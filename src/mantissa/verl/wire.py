"""What a rollout has to know of the learner besides its weights, and how both travel.

Formats, the exact kernels' plan and the number of threads are found where the learner is, and hold for both or for
neither. They travel as JSON: to a server of a hybrid job beside the weights, to a standalone one as one more tensor of
bytes among them, for a checkpoint engine of verl carries tensors and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.adopted import Plans
from mantissa.base.bounds import boundary
from mantissa.base.readers.json import parse_json
from mantissa.kernels import ExactPlan
from mantissa.kernels.exact.plan import AttentionChoice, Choice

TENSOR = "mantissa.setup"  # the name of the tensor of bytes; no weight has a name like it


@dataclass(frozen=True)
class Setup:
    """``policy``: the precision, as it was asked for. ``plan``: of exact kernels on a CPU, else None. ``threads``:
    torch's, of the learner. ``length``: tokens of the longest sequence that they were proven for. ``plans``: in the
    place of ``plan`` where the model is by transformers' own code, adopted; None where it is not."""

    policy: Mapping[str, Any]
    plan: ExactPlan | None
    threads: int
    length: int
    plans: Plans | None = None

    @staticmethod
    def of_keys(dtype: str, quantization: str | None, length: int) -> Setup:
        """Beside a learner of verl's own: the formats of ``rollout.dtype`` and ``rollout.quantization``, logits rounded
        as verl's engines round theirs."""
        policy: dict[str, Any] = {"train": dtype, "rollout": dtype, "logits": dtype}
        if quantization is not None:
            policy |= {"rollout": quantization, "fp8": {"base": "fp16" if dtype in ("float16", "half") else "bf16"}}
        return Setup(policy, None, torch.get_num_threads(), length)

    def to_json(self) -> str:
        plan = None if self.plan is None else _plain(self.plan)
        plans = None if self.plans is None else [[list(heads), _plain(each)] for heads, each in self.plans.items()]
        return json.dumps(dict(vars(self)) | {"policy": dict(self.policy), "plan": plan, "plans": plans})

    @staticmethod
    def from_json(text: str | bytes) -> Setup:
        """The inverse of ``to_json``. ``MantissaError`` for anything else."""
        with boundary("the learner's setup", "learner and rollout are of two versions of mantissa; install one"):
            values = parse_json(text.encode() if isinstance(text, str) else text)
            plan = None if values["plan"] is None else _plan(values["plan"])
            plans: Plans | None = None
            if values["plans"] is not None:
                plans = {(int(q), int(k), int(size)): _plan(each) for (q, k, size), each in values["plans"]}
            return Setup(values["policy"], plan, values["threads"], values["length"], plans)

    def to_tensor(self) -> Tensor:
        """As bytes: uint8, one dimension."""
        return torch.frombuffer(bytearray(self.to_json().encode()), dtype=torch.uint8)

    @staticmethod
    def take_from(weights: dict[str, Tensor]) -> Setup:
        """Take the tensor of bytes out of ``weights`` and read it."""
        return Setup.from_json(bytes(weights.pop(TENSOR).cpu().tolist()))


def _plain(plan: ExactPlan) -> dict[str, Any]:
    """A plan as JSON has it."""
    values = dataclasses.asdict(plan)
    return values | {name: [[list(size), each] for size, each in values[name].items()] for name in ("products", "bf16")}


def _plan(values: Mapping[str, Any]) -> ExactPlan:
    products, bf16 = (
        {tuple(size): _choice(Choice, each) for size, each in values[name]} for name in ("products", "bf16")
    )
    attention, threads = _choice(AttentionChoice, values["attention"]), tuple(values["threads"])
    return ExactPlan(products, attention, bf16, values["checked"], threads, values["length"])


def _choice(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
