"""verl's own trainer and FSDP2 engine on a CPU, under a real Ray."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from verl_job import REF, run_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.mark.variants
def test_verl_s_own_engine_trains_on_two_ranks_with_a_reference(tmp_path: Path) -> None:
    """``VERL_PLATFORM=cpu`` and the external library are all that is said; the frozen reference runs as well."""
    job = run_job(tmp_path, "actor_rollout_ref.actor.use_kl_loss=True", ranks=2)
    assert sorted(job.metrics) == [1, 2]
    for step in (1, 2):
        assert 0 < job.metrics[step]["actor/grad_norm"] < math.inf
        assert job.checkpoint(step).is_dir()
    assert job.metrics[1]["actor/kl_loss"] == 0, f"{REF}: the first policy is the reference"
    assert job.metrics[2]["actor/kl_loss"] > 0
