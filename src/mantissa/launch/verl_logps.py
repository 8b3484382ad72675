"""Log-probs of both sides out of verl's trainer: written for ``mantissa doctor``, or looked at while the job runs.

    export VERL_USE_EXTERNAL_MODULES=mantissa.launch.verl_logps
    MANTISSA_LOGPS=/shared/logps python -m verl.trainer.main_ppo ...     # then: mantissa doctor /shared/logps
    MANTISSA_GATE=stop python -m verl.trainer.main_ppo ...               # or warn, or stop:10: every 10 steps, not 25

verl imports the module in each of its processes; in the one that trains, it looks at what verl hands to its own
comparison of both sides (``calculate_debug_metrics``, called where ``actor_rollout_ref.rollout.calculate_log_probs`` is
on, and not in bypass mode). Nothing else is changed. What verl's newer trainer (``ppo.v1``) compares comes without
prompts and temperature, so neither is known; the plugin's gate (``+trainer.gate=stop``) knows both. The gate here adds
``mantissa/gate_fault`` (0 or 1) to verl's metrics at the steps that it diagnoses; verl syncs the weights after each
step, so the first batches are looked at in any case.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError, say
from mantissa.doctor.gate import Gate
from mantissa.doctor.record import ScoredBatch, write_batch
from mantissa.verl.gate import parse

FOLDER, GATE = "MANTISSA_LOGPS", "MANTISSA_GATE"


def record(folder: Path | str) -> None:
    """From here on in this process, write each batch that verl compares into ``folder``, in the plain schema."""
    folder, batches = Path(folder), [0]

    def write(found: ScoredBatch) -> dict[str, float]:
        batches[0] += 1
        write_batch(folder / f"batch-{batches[0]}-{os.getpid()}.jsonl", found)
        return {}

    _watch(write)


def gate(asked: str) -> Gate:
    """From here on in this process, diagnose batches as they are compared. ``asked``: ``stop`` or ``warn``, with
    ``:N`` for every how many steps. With ``stop`` a fault ends the job: ``MantissaError`` names it and what helps."""
    on_fault, every = parse(asked, f"{GATE}={asked!r}")
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        say(line, err=True)

    made = Gate(every, "stop" if on_fault == "stop" else "warn", framework="verl", say=told)
    step = [0]

    def look(found: ScoredBatch) -> dict[str, float]:
        step[0] += 1
        tables = found.responses, found.mask, found.rollout, found.learner
        diagnosis = made.check(step[0], found.prompts, *tables, temperature=found.settings["temperature"])
        if made.stop:
            raise MantissaError(f"{lines[-1]}; {GATE}=warn goes on in spite of it")
        return {} if diagnosis is None else {"mantissa/gate_fault": float(made.wrong(diagnosis))}

    _watch(look)
    return made


def _watch(look: Callable[[ScoredBatch], dict[str, float]]) -> None:
    """Have ``look`` see each batch that verl compares; its metrics join verl's.

    Where a trainer's module has taken verl's function by name already, it is replaced there too.
    """
    from verl.utils.debug import metrics

    original = metrics.calculate_debug_metrics

    @functools.wraps(original)
    def watched(data: Any) -> Any:
        return original(data) | look(_compared(data))

    metrics.calculate_debug_metrics = watched
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and getattr(module, "calculate_debug_metrics", None) is original:
            module.calculate_debug_metrics = watched  # type: ignore[attr-defined]


def _compared(data: Any) -> ScoredBatch:
    batch = data.batch
    missing = [name for name in ("responses", "rollout_log_probs", "old_log_probs") if name not in batch]
    if missing:
        raise MantissaError(f"verl's batch has no {missing[0]}; expected a verl from 0.8 to 0.9")
    responses = batch["responses"]
    mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, -responses.size(1) :]
    prompts: list[list[int]] = [[] for _ in responses]
    if "prompts" in batch and "attention_mask" in batch:
        width = batch["prompts"].size(1)
        real = batch["attention_mask"][:, :width].bool()
        prompts = [row[kept].tolist() for row, kept in zip(batch["prompts"], real, strict=True)]
    sides = batch["rollout_log_probs"], batch["old_log_probs"]
    settings = {"framework": "verl", "temperature": data.meta_info.get("temperature")}
    return ScoredBatch(prompts, responses, mask, *sides, settings)


if os.environ.get(FOLDER):
    record(os.environ[FOLDER])
if os.environ.get(GATE):
    gate(os.environ[GATE])
