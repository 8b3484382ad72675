"""Where two policies that should be equal to the last bit part: both sides of one sequence, run again under watch.

The rollout's side is the whole call that sampled the sequence, batch mates, slots and cache included: every draw is a
function of its seed, so the same tokens come out. The learner's side is the micro-batch that scored it. Each notes a
digest of what every operation gave at every position of the sequence; the first position, and there the first
operation, whose digests differ is where the two programs part. What differs later may only follow from it. A second
pass keeps the two vectors themselves.

A case can be written to one file and replayed elsewhere (``mantissa replay FILE``): it holds the fp32 weights, the
requests, the learner's micro-batch and the precision, and nothing of the task.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.files import write_atomically
from mantissa.kernels import (
    Kernels,
    Pick,
    Traced,
    first_difference,
    learner_kernels,
    operation,
    rollout_kernels,
)
from mantissa.model import Decoder, ModelConfig, RopeScaling
from mantissa.precision import Fp8Policy, PrecisionPolicy, resolve
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.forward import forward
from mantissa.rl.packing import Packed
from mantissa.rollout import Call, NativeEngine, Request, SamplingParams

_VERSION = 1


@dataclass(frozen=True)
class Case:
    """One sequence on both sides.

    ``call``, ``job``: what sampled it, and its number among that call's samples. ``part``, ``row``: the learner's
    micro-batch, and its row there. ``temperature``: of the learner's log-probs.
    """

    call: Call
    job: int
    part: Sequences
    row: int
    temperature: float


@dataclass(frozen=True)
class Culprit:
    """The first operation that gave the two sides different numbers.

    ``position``: in the sequence, prompt included, from 0. ``operation``: its name. ``rollout``, ``learner``: what it
    gave each of them there, fp32.
    """

    position: int
    operation: str
    rollout: Tensor
    learner: Tensor

    def __str__(self) -> str:
        elements = (self.rollout != self.learner) & ~(self.rollout.isnan() & self.learner.isnan())
        first = int(elements.nonzero()[0])
        return (
            f"{self.operation} at position {self.position}: {int(elements.sum())} of {elements.numel()} numbers "
            f"differ, the first by {self.rollout[first]:.9g} (rollout) against {self.learner[first]:.9g} (learner)"
        )


def locate(engine: NativeEngine, model: Decoder, kernels: Kernels, case: Case) -> Culprit | None:
    """Run both sides again and find where they part; None where this time they agree in every operation.

    ``model``, ``kernels``: the learner's. The engine must hold the weights that sampled the case.
    """
    traces = _both(engine, model, kernels, case, None)
    at = first_difference(*traces)
    if at is None:
        return None
    rollout, learner = _both(engine, model, kernels, case, at)
    assert rollout.kept is not None
    assert learner.kept is not None
    return Culprit(at[0], operation(learner.names, at[1]), rollout.kept, learner.kept)


def _both(
    engine: NativeEngine, model: Decoder, kernels: Kernels, case: Case, keep: tuple[int, int] | None
) -> tuple[Traced, Traced]:
    rollout, learner = Traced(engine.kernels, keep), Traced(kernels, keep)
    engine.replay(case.call, rollout, case.job)
    learner.begin(_row_of(case.part, case.row))
    with torch.no_grad():
        forward(model, learner, case.part, case.temperature)
    return rollout, learner


def _row_of(part: Sequences, row: int) -> Pick:
    """Every position of one row of a packed forward, but for its last token, which predicts nothing."""
    length, prompt = int(part.length_B[row]), int(part.prompt_length_B[row])
    packed_T = Packed.of(part).packed_BT[row, : length - 1]
    before = int(part.mask_BR[:row].sum())
    positions_T = torch.arange(length - 1, device=packed_T.device)

    def pick(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "logits":
            return rows[before : before + length - prompt], positions_T[prompt - 1 :]
        if kind == "attention":  # over whole sequences again
            return rows[row, : length - 1], positions_T
        return rows[0].index_select(0, packed_T), positions_T

    return pick


# One file


def write_case(
    path: Path, case: Case, model: ModelConfig, policy: PrecisionPolicy, engine: NativeEngine, weights: Any, note: str
) -> None:
    """Write a case, the fp32 ``weights`` (by name) included; ``note`` is what was seen, for who opens the file."""
    from safetensors.torch import save

    shape = dataclasses.asdict(dataclasses.replace(model, origin={}))
    facts = {
        "version": _VERSION,
        "note": note,
        "model": shape,
        "precision": dataclasses.asdict(policy),
        "requests": [dataclasses.asdict(request) for request in case.call.requests],
        "params": dataclasses.asdict(case.call.params),
        "engine": {"slots": engine.slots, "max_length": engine.max_length},
        "job": case.job,
        "row": case.row,
        "temperature": case.temperature,
    }
    tensors = {f"weights.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    for field in dataclasses.fields(case.part):
        tensors[f"part.{field.name}"] = getattr(case.part, field.name).cpu().contiguous()
    write_atomically(path, save(tensors, {"mantissa_case": json.dumps(facts)}))


@dataclass(frozen=True)
class StoredCase:
    """What a file holds: a case, and what its two sides are made of."""

    case: Case
    note: str
    model: ModelConfig
    policy: PrecisionPolicy
    weights: dict[str, Tensor]
    slots: int
    max_length: int


def read_case(path: Path | str) -> StoredCase:
    """The inverse of ``write_case``; a file that is none is a ``MantissaError``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["mantissa_case"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a mapping
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise MantissaError(
            f"{path}: expected the file that a run with precision.kernels=exact wrote at a mismatch ({error})"
        ) from None
    if facts["version"] != _VERSION:
        raise MantissaError(f"{path}: written in version {facts['version']} of this format, expected {_VERSION}")
    requests = tuple(Request(tuple(r["prompt_tokens"]), int(r["seed"]), int(r["samples"])) for r in facts["requests"])
    params: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in facts["params"].items()}
    part = Sequences(**{field.name: tensors[f"part.{field.name}"] for field in dataclasses.fields(Sequences)})
    model, precision = facts["model"], facts["precision"]
    if model["rope_scaling"] is not None:
        model["rope_scaling"] = RopeScaling(**model["rope_scaling"])
    if precision["fp8"] is not None:
        precision["fp8"] = Fp8Policy(**precision["fp8"])
    return StoredCase(
        Case(Call(requests, SamplingParams(**params)), facts["job"], part, facts["row"], facts["temperature"]),
        facts["note"],
        ModelConfig(**model),
        PrecisionPolicy(**precision),
        {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")},
        **facts["engine"],
    )


@dataclass(frozen=True)
class Replayed:
    """What a replay found: where the sides part (None: nowhere), and how the exact kernels computed here."""

    culprit: Culprit | None
    plan: list[str]


def replay(stored: StoredCase, device: torch.device) -> Replayed:
    """Build both sides of a stored case on this machine, and locate where they part."""
    precision = resolve(stored.policy, device)
    model = Decoder(stored.model)
    model.load_state_dict(stored.weights)
    model = model.to(device)
    plan = exact_plan(precision, model, device)
    engine = NativeEngine(
        stored.model,
        rollout_kernels(precision, plan),
        kv_format=precision.kv_cache.active,
        slots=stored.slots,
        max_length=stored.max_length,
        device=device,
    )
    engine.sync(dict(model.named_parameters()), 0)
    case = stored.case
    part = Sequences(**{f.name: getattr(case.part, f.name).to(device) for f in dataclasses.fields(Sequences)})
    culprit = locate(engine, model, learner_kernels(precision, plan), dataclasses.replace(case, part=part))
    return Replayed(culprit, plan.lines() if plan else [])
