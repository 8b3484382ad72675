"""Lightning in Mantissa's precision: one plugin, and the rest of the Trainer as it is.

python examples/lightning_fit.py        # needs: pip install 'mantissa-rl[lightning]'
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mantissa.dropin import MantissaPrecision


def rings(count: int) -> TensorDataset:
    """Three rings around the origin: points (count, 2) and which ring they are of (count,)."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.arange(count) % 3
    radius = 1.0 + ring + 0.2 * torch.randn(count, generator=generator)
    angle = 6.2832 * torch.rand(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring)


class Rings(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    module, precision = Rings(), MantissaPrecision("fp16", scale="auto")
    trainer = pl.Trainer(
        plugins=[precision],
        max_epochs=4,
        gradient_clip_val=1.0,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rings(6144), batch_size=64, shuffle=True))
    points, ring = rings(1500).tensors
    with torch.no_grad():
        accuracy = (module.net(points).argmax(dim=1) == ring).float().mean()
    print(f"accuracy {float(accuracy):.3f} (chance 0.333)")
    print(f"steps {precision.steps}, skipped {precision.skipped}, loss scale {precision.scaler.scale:g}")


if __name__ == "__main__":
    main()
