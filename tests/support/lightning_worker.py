"""What each process of the Lightning plugin's DDP test does: ``torchrun lightning_worker.py FOLDER``.

Fits four batches a rank on a CPU; on rank 1 alone the third one overflows above a scale, then the last one at any.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from mantissa.training import ScalerConfig
from toys import Batch, cross_entropy, data, fragile, quiet, state

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning's own, at import
    import lightning.pytorch as pl

from mantissa.dropin import MantissaPrecision


class Module(pl.LightningModule):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net, self.trap = fragile(dropout=0.0)
        self.rank = rank
        self.told: list[tuple[str, int, float]] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        limits = {2: 100.0, 3: -1.0} if self.rank == 1 else {}
        self.trap.limit = limits.get(index, math.inf)
        return cross_entropy(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        outcome = self.trainer.precision_plugin.outcome
        self.told.append((outcome.kind, outcome.overflows, outcome.scale))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    module = Module(rank)
    plugin = MantissaPrecision("fp16", scale=ScalerConfig(initial=2.0**12, retries=6), say=quiet)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        plugins=[plugin],
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(data(4, seed=10 + rank), batch_size=None))
    weights = {name: value for name, value in state(module.net).items() if "running" not in name}
    torch.save({"weights": weights, "told": module.told, "state": plugin.state_dict()}, folder / f"{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the test looks at what is left, and stderr only where this fails
    main(Path(sys.argv[1]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here
