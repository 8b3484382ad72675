"""An adopted model under FSDP2 and DDP: the logits of one process, to the bit."""

from pathlib import Path

from launched import torchrun


def test_sharded_and_replicated_models_give_one_processs_logits(tmp_path: Path) -> None:
    done = torchrun(2, str(Path(__file__).with_name("ranks_worker.py")), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(": equal") == 2
