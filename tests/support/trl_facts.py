"""What TRL's own configuration objects hold and resolve, written as data by ``make facts`` in TRL's environment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[1] / "data" / "trl_answers.json"
ARGUMENTS = ANSWERS.with_name("trl_training_args.bin")
CASES: list[dict[str, Any]] = [{}, {"fp16": True}, {"bf16": True}, {"fp16": True, "bf16": True}, {"bf16": False},
                               {"fp16": True, "bf16": False}, {"fp16": False}]  # fmt: skip


def answers() -> dict[str, Any]:
    """Each field's default and type; and of each case what TRL makes of it, or the name of its error."""
    import trl

    fields = {each.name: [_default(each), str(each.type)] for each in dataclasses.fields(trl.GRPOConfig)}
    model = {each.name: [_default(each), str(each.type)] for each in dataclasses.fields(trl.ModelConfig)}
    return {"trl": trl.__version__, "fields": fields, "model": model,
            "cases": [[case, _resolved(trl.GRPOConfig, case)] for case in CASES]}  # fmt: skip


def _default(field: dataclasses.Field[Any]) -> Any:
    default = None if field.default is dataclasses.MISSING else field.default
    return default if isinstance(default, bool | int | float | str | None) else str(default)


def _resolved(config: Any, case: dict[str, Any]) -> Any:
    try:
        made = config(output_dir="/tmp/unused", use_cpu=True, report_to=[], **case)
    except ValueError as error:
        return type(error).__name__
    return {"bf16": made.bf16, "fp16": made.fp16}


def save_arguments() -> None:
    """``training_args.bin``, as Trainer writes it beside a checkpoint."""
    import torch
    import trl

    torch.save(trl.GRPOConfig(output_dir="out", use_cpu=True, report_to=[], fp16=True, use_vllm=True, temperature=0.9,
                              vllm_importance_sampling_mode="token_mask", disable_dropout=True), ARGUMENTS)  # fmt: skip


if __name__ == "__main__":
    save_arguments()
    ANSWERS.write_text(json.dumps(answers(), indent=1) + "\n", encoding="utf-8")
