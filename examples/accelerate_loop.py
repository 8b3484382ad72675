"""Accelerate's loop with PrecisionTrainer: Accelerate places and distributes, Mantissa decides the precision.

    python examples/accelerate_loop.py                         # one process: a GPU in fp16, a CPU in simulated fp16
    torchrun --nproc_per_node 2 examples/accelerate_loop.py    # two processes, on GPUs or on a CPU

Three lines differ from a loop with Accelerate alone: ``mixed_precision="no"`` (one of the two scales the loss, not
both), ``PrecisionTrainer`` around what ``prepare`` returned, and ``trainer.step`` in place of ``accelerator.backward``,
``clip_grad_norm_``, ``optimizer.step`` and ``zero_grad``.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mantissa.dropin import PrecisionTrainer

Batch = tuple[Tensor, Tensor]


def spirals(count: int) -> TensorDataset:
    """Two spirals, one class each, in the plane: (count, 2) points and (count,) labels."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 2
    radius = torch.rand(count, generator=generator) + 0.05
    angle = 5 * radius + torch.pi * label
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1)
    return TensorDataset(points, label)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    points, label = batch
    return F.cross_entropy(model(points), label)


def train(accelerator: Accelerator, precision: str, epochs: int) -> None:
    """Train on the spirals, and print the accuracy and what became of the steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(spirals(1024), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    trainer = PrecisionTrainer(model, optimizer, precision, max_grad_norm=1.0)
    for _ in range(epochs):
        for batch in trainer.batches(loader):
            trainer.step(batch, loss_fn)

    right = total = 0
    with torch.no_grad(), trainer.forward():
        for points, label in loader:
            guess, truth = accelerator.gather_for_metrics((model(points).argmax(dim=1), label))
            right, total = right + int((guess == truth).sum()), total + len(truth)
    accelerator.print(f"accuracy {right / total:.3f} after {trainer.updates} updates, {trainer.skipped} skipped")


def main(precision: str = "fp16", epochs: int = 20) -> None:
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    train(accelerator, precision, epochs)
    accelerator.wait_for_everyone()
    gc.collect()  # on gloo, without it, a process aborted while exiting in 2 of 50 runs, and with it in none
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    main(arguments.precision, arguments.epochs)
