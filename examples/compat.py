"""Code of the old FP16 utility, with its import changed: modes, accumulation, overflows, statistics, a checkpoint.

python examples/compat.py
ENABLE_FP16_TRAINING=false FP16_LOSS_SCALE=1024 python examples/compat.py

Without a GPU these trainers compute in fp32 and warn; backend="simulated" rounds to the format on a CPU.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.dropin.compat import ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig

BACKEND = "auto" if torch.cuda.is_available() else "simulated"


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Is the product of two coordinates positive? (No straight line through the plane tells.)"""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.rand(64, 2, generator=generator) * 2 - 1 for _ in range(count)]
    return [(x, (x[:, 0] * x[:, 1] > 0).long()) for x in xs]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def compute_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, label = (t.to(next(model.parameters()).device) for t in batch)
    return F.cross_entropy(model(x), label)


def main() -> None:
    model, optimizer = make()
    config = FP16TrainingConfig.from_environment(backend=BACKEND)  # the rest is the environment's, then the defaults
    trainer = FP16Trainer(model, optimizer, config)
    for epoch in range(3):
        total = 0.0
        for i, batch in enumerate(batches(100, seed=epoch)):
            loss = trainer.training_step(batch, compute_loss)
            if (epoch, i) == (1, 50):
                loss = loss * float("inf")  # an accident: it costs this batch, and the scale is halved
            if trainer.backward_and_step(loss):
                total += loss.item()
        print(f"epoch {epoch}: mean loss {total / 100:.3f}, {trainer.get_stats()}")

    modes = ExtendedFP16Config("mixed_bf16", gradient_accumulation_steps=2, max_grad_norm=0.5, backend=BACKEND)
    extended = ExtendedFP16Trainer(*make(), modes)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "model.pt")
        extended.load_checkpoint(Path(folder) / "model.pt")  # go on in another precision
    for batch in batches(100, seed=3):
        extended.backward_and_step(extended.training_step(batch, compute_loss))
    with torch.no_grad():
        loss = extended.training_step(batches(1, seed=4)[0], compute_loss)
    print(f"evaluated: loss {loss.item():.3f}; guessing gives 0.693")
    print(extended.get_stats())


if __name__ == "__main__":
    main()
