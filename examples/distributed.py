"""Several processes, DDP or FSDP2, on GPUs or on CPUs: uneven data, and a checkpoint that any number can go on from.

torchrun --nproc-per-node=2 examples/distributed.py ddp run.pt 3
torchrun --nproc-per-node=3 examples/distributed.py fsdp2 run.pt 6       # goes on from epoch 3
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mantissa.dropin import PrecisionTrainer
from mantissa.training import distribute

USUAL = 16  # rows of a full batch


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x)[:, 0], y)


def main(kind: str, path: str, epochs: str) -> None:
    torch.manual_seed(0)  # the same weights everywhere
    model = distribute(Net(), kind)  # joins the processes that torchrun started; before the optimiser
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = PrecisionTrainer(model, optimizer, "fp16", accumulate=2, max_grad_norm=1.0)
    rank, world = trainer.ranks.rank, trainer.ranks.world

    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2]
    cut = len(x) * 3 // 4 if world == 2 else len(x) // world  # of two ranks one has three times as much to do
    mine = slice(rank * cut, (rank + 1) * cut if rank + 1 < world else None)
    loader = list(zip(x[mine].to(trainer.device).split(USUAL), y[mine].to(trainer.device).split(USUAL), strict=True))

    start = trainer.load_checkpoint(path)["epoch"] if Path(path).exists() else 0
    for epoch in range(start, int(epochs)):
        last = None
        for batch in trainer.batches(loader):  # None once this rank has none left and another has
            weight = 0.0 if batch is None else len(batch[0]) / USUAL  # a shorter batch counts for less
            outcome = trainer.step(batch, loss_fn, weight)
            last = outcome.loss if outcome.applied else last
        trainer.flush()  # a last, shorter window
        trainer.save_checkpoint(path, {"epoch": epoch + 1})
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {last.item():.4f}, {trainer.updates} updates")
    with torch.no_grad(), trainer.forward():
        error = loss_fn(model, (x.to(trainer.device), y.to(trainer.device)))
    if rank == 0:
        print(f"{kind} on {world}: error {error:.4f} of a variance of {y.var():.4f}")
        print(trainer.stats())
    if dist.is_initialized():
        dist.barrier()  # who leaves first can abort who still listens
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an interpreter that ends in order, now and then ("terminate called without ...")
