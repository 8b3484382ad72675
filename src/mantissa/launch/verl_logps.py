"""Log-probs of both sides out of verl's trainer, for ``mantissa doctor``: verl's own rollout dump holds none.

    VERL_USE_EXTERNAL_MODULES=mantissa.launch.verl_logps MANTISSA_LOGPS=/shared/logps python -m verl.trainer.main_ppo

verl imports the module in each of its processes; in the one that trains, what verl hands to its own comparison of both
sides (``calculate_debug_metrics``, called where ``actor_rollout_ref.rollout.calculate_log_probs`` is on, and not in
bypass mode) is also written to the folder, in the plain schema. Nothing else is changed; ``mantissa doctor FOLDER``
reads it. What verl's newer trainer (``ppo.v1``) compares comes without prompts and temperature, so neither is written.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.doctor.record import write_batch

FOLDER = "MANTISSA_LOGPS"


def record(folder: Path | str) -> None:
    """From here on in this process, write each batch that verl compares into ``folder``.

    Where a trainer's module has taken verl's function by name already, it is replaced there too.
    """
    import sys

    from verl.utils.debug import metrics

    original = metrics.calculate_debug_metrics
    folder, batches = Path(folder), [0]

    @functools.wraps(original)
    def recorded(data: Any) -> Any:
        batch = data.batch
        missing = [name for name in ("responses", "rollout_log_probs", "old_log_probs") if name not in batch]
        if missing:
            raise MantissaError(f"record: verl's batch has no {missing[0]}; expected a verl from 0.8 to 0.9")
        responses = batch["responses"]
        mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, -responses.size(1) :]
        prompts: list[list[int]] = [[] for _ in responses]
        if "prompts" in batch and "attention_mask" in batch:
            width = batch["prompts"].size(1)
            real = batch["attention_mask"][:, :width].bool()
            prompts = [row[kept].tolist() for row, kept in zip(batch["prompts"], real, strict=True)]
        batches[0] += 1
        path = folder / f"batch-{batches[0]}-{os.getpid()}.jsonl"
        sides = batch["rollout_log_probs"], batch["old_log_probs"]
        settings = {"framework": "verl", "temperature": data.meta_info.get("temperature")}
        write_batch(path, prompts, responses, mask, *sides, settings)
        return original(data)

    metrics.calculate_debug_metrics = recorded
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and getattr(module, "calculate_debug_metrics", None) is original:
            module.calculate_debug_metrics = recorded  # type: ignore[attr-defined]


if os.environ.get(FOLDER):
    record(os.environ[FOLDER])
