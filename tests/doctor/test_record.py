"""What a foreign trainer writes for the doctor: the page's own call, run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mantissa.doctor.readers import read_dump

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_the_pages_call_writes_a_dump_that_the_doctor_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = (
        block for block in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL) if "write_batch(" in block
    )
    logps = -torch.rand(2, 3)
    given = {"prompts": [[1, 2], [3]], "responses": torch.tensor([[4, 5, 6], [7, 8, 0]])}
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    exec(code, given | {"mask": mask, "rollout_logps": logps, "learner_logps": logps - 0.01})
    read = read_dump(tmp_path / "logps" / "step-1.jsonl")
    assert [each.mask.sum() for each in read.sequences] == [3, 2]
    assert read.settings.rollout_format == "bf16"
