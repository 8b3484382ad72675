"""What each process of the DDP test of Trainer does: ``torchrun huggingface_worker.py FOLDER``.

Two windows of two micro-batches on a CPU. In the run named troubled, on rank 1 alone, gradients of the first window
overflow at the first scale; the run named calm starts low enough.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from mantissa.dropin import MantissaTrainerMixin
from mantissa.training import ScalerConfig
from toys import OverflowsAbove, data, quiet, state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trap = OverflowsAbove()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), self.trap)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


class Ours(MantissaTrainerMixin, Trainer):
    limit = math.inf

    def get_train_dataloader(self) -> DataLoader:
        rows = [{"x": x, "labels": y} for x, y in data(4, seed=10 + int(os.environ["RANK"]))]
        return DataLoader(rows, batch_size=1, collate_fn=lambda chosen: chosen[0])

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], items: object = None) -> Tensor:
        self.model.trap.limit = self.limit if self.state.global_step == 0 else math.inf
        return super().training_step(model, inputs, items)


def run(name: str, folder: Path, limit: float, scale: float) -> None:
    rank = int(os.environ["RANK"])
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(
        str(folder), num_train_epochs=1, gradient_accumulation_steps=2, lr_scheduler_type="constant", **options
    )
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = ScalerConfig(initial=scale, retries=6)
    trainer = Ours(model=model, args=arguments, optimizers=(optimizer, None), scale=config, say=quiet)
    trainer.limit = limit if rank == 1 else math.inf
    trainer.train()
    retries = [row["precision/retries"] for row in trainer.state.log_history if "loss" in row]
    torch.save(
        {"weights": state(model), "retries": retries, "scale": trainer.scaler.scale}, folder / f"{name}-{rank}.pt"
    )


if __name__ == "__main__":
    run("troubled", Path(sys.argv[1]), limit=20.0, scale=2.0**10)
    run("calm", Path(sys.argv[1]), limit=math.inf, scale=2.0**6)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here
