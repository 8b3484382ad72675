"""A model of transformers under FSDP2 and DDP, adopted or as it is: the logits of one process, to the bit."""

from pathlib import Path

import pytest

from launched import torchrun


@pytest.mark.parametrize("worker", ["ranks_worker.py", "ranks_fast.py"])
def test_sharded_and_replicated_models_give_one_processs_logits(tmp_path: Path, worker: str) -> None:
    done = torchrun(2, str(Path(__file__).with_name(worker)), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(": equal") == 2
