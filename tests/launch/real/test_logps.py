"""The recorder in the real verl: what its own comparison of both sides is given is written, and read back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mantissa.doctor.readers import read_dump

pytestmark = pytest.mark.verl
WORKER = """
import torch, verl
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base
draw = torch.Generator().manual_seed(0)
logps = -torch.rand(40, 6, generator=draw).double()
mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [1]] * 10)).long()
both = {"responses": torch.arange(240).view(40, 6), "response_mask": mask, "rollout_log_probs": logps,
    "old_log_probs": logps + 0.01 * torch.randn(40, 6, generator=draw)}
asked = {"prompts": torch.arange(60).view(20, 3).repeat_interleave(2, 0),
    "attention_mask": torch.cat([torch.tensor([[0, 1, 1]] * 40), mask], 1)}
for data in (DataProto.from_dict(both | asked, meta_info={"temperature": 0.7}), DataProto.from_dict(both)):
    found = trainer_base.calculate_debug_metrics(data)
    assert 0.001 < found["training/rollout_probs_diff_max"] < 0.05, found
"""


def test_what_verl_compares_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "mantissa.launch.verl_logps",
        "MANTISSA_LOGPS": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    classic, newer = (read_dump(next(tmp_path.glob(f"batch-{number}-*.jsonl"))) for number in (1, 2))
    for dump, prompts in ((classic, 2), (newer, 0)):  # the newer trainer compares without prompts and temperature
        assert dump.framework == "verl"
        assert [int(each.mask.sum()) for each in dump.sequences] == [6, 4, 5, 1] * 10
        assert {each.prompt_length for each in dump.sequences} == {prompts}
        for number, each in enumerate(dump.sequences):
            assert each.tokens[prompts:].tolist() == [*range(6 * number, 6 * number + int(each.mask.sum()))]
            d = np.abs(each.learner_logp - each.rollout_logp)
            assert 0 < d.max() < 0.05
    assert (classic.settings.temperature, newer.settings.temperature) == (0.7, None)
    assert classic.sequences[3].tokens[:2].tolist() == [4, 5]
    assert len({each.group for each in classic.sequences}) == 20
    assert {each.group for each in newer.sequences} == {None}


GATED = """
import torch, verl
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base
draw = torch.Generator().manual_seed(0)
for step in range(3):
    rollout = -3 * torch.rand(64, 12, generator=draw).double() - 0.01
    noise = 1e-3 * torch.randn(64, 12, generator=draw)
    learner = (rollout if step < 2 else rollout.roll(1, 1)) + noise
    both = {"responses": torch.arange(768).view(64, 12), "response_mask": torch.ones(64, 12).long(),
        "rollout_log_probs": rollout, "old_log_probs": learner}
    print("step", step, trainer_base.calculate_debug_metrics(DataProto.from_dict(both)).get("mantissa/gate_fault"))
"""


@pytest.mark.parametrize(("asked", "faults", "ends"), [("stop:1", ["0.0", "0.0"], True),
                                                       ("warn:1", ["0.0", "0.0", "1.0"], False)])  # fmt: skip
def test_a_gate_stops_or_warns_at_shifted_log_probs(asked: str, faults: list[str], ends: bool) -> None:
    pytest.importorskip("verl")
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "mantissa.launch.verl_logps", "MANTISSA_GATE": asked}
    done = subprocess.run([sys.executable, "-c", GATED], env=environment, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert re.findall(r"^step \d (\S+)$", done.stdout, re.M) == faults, done.stderr[-2000:]
    assert (done.returncode != 0) == ends
    assert "the two sides are shifted against each other" in done.stderr
    assert ("MantissaError" in done.stderr) == ends
