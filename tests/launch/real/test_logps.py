"""The recorder in the real verl: what its own comparison of both sides is given is written, and read back."""

from __future__ import annotations

import os
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
logps = -torch.rand(4, 6, generator=draw)
mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [1]])).long()
data = DataProto.from_dict({"prompts": torch.arange(12).view(4, 3), "responses": torch.arange(24).view(4, 6),
    "attention_mask": torch.cat([torch.tensor([[0, 1, 1]] * 4), mask], 1), "response_mask": mask,
    "rollout_log_probs": logps, "old_log_probs": logps + 0.01})
found = trainer_base.calculate_debug_metrics(data)
assert abs(found["training/rollout_probs_diff_max"] - 0.01) < 0.01, found
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
    dump = read_dump(tmp_path)
    assert dump.framework == "verl"
    assert [int(each.mask.sum()) for each in dump.sequences] == [6, 4, 5, 1]
    for number, each in enumerate(dump.sequences):
        assert each.tokens[:2].tolist() == [3 * number + 1, 3 * number + 2]
        assert each.prompt_length == 2
        np.testing.assert_allclose(each.learner_logp - each.rollout_logp, 0.01, atol=1e-6)
