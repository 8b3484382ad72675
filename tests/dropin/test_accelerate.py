"""PrecisionTrainer on what Accelerate prepares: the same bits as without it, and the example in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import accelerate_worker
from launched import torchrun
from mantissa.dropin import PrecisionTrainer
from toys import cross_entropy, data, mlp, quiet, same, state, trainer_of

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'mantissa-rl[accelerate]'")


def test_prepared_objects_train_as_bare_ones_to_the_last_bit() -> None:
    ours, oracle, batches = mlp(dropout=0.3), mlp(dropout=0.3), data(6)
    accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rows = DataLoader(batches, batch_size=1, collate_fn=lambda chosen: chosen[0])
    model, optimizer, loader, scheduler = accelerator.prepare(ours, optimizer, rows, scheduler)
    trainer = PrecisionTrainer(model, optimizer, "fp16", max_grad_norm=0.5, scheduler=scheduler, say=quiet)
    expected = trainer_of(oracle, "fp16", max_grad_norm=0.5)
    expected.scheduler = torch.optim.lr_scheduler.ExponentialLR(expected.optimizer, 0.5)
    taken = list(loader)  # preparing draws random numbers, so seed after it
    torch.manual_seed(5)
    for batch in taken:
        trainer.step(batch, cross_entropy)
    torch.manual_seed(5)
    for batch in batches:
        expected.step(batch, cross_entropy)
    assert same(state(ours), state(oracle))
    assert trainer.updates == 6
    assert optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"] == 0.05 * 0.5**6


def test_the_example_learns_the_spirals_in_two_processes(tmp_path: Path) -> None:
    """16 batches an epoch, half of them for each rank: 8 updates in each of 20; the spirals can be told apart."""
    done = torchrun(2, accelerate_worker.__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("precision: fp16 asked, fp16 active, simulated")] == lines[:1]
    words = lines[-1].split()
    assert float(words[1]) > 0.98
    assert words[2:] == ["after", "160", "updates,", "0", "skipped"]
