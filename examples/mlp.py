"""A small classifier in fp16: three interleaved spirals, two numbers in, three classes out.

python examples/mlp.py [fp16 | bf16 | fp32]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.dropin import PrecisionTrainer


def spirals(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.randint(0, 3, (rows,), generator=generator)
    radius = torch.rand(rows, generator=generator).sqrt()
    angle = 5.0 * radius + label * (2 * torch.pi / 3) + 0.15 * torch.randn(rows, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), label


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, label = batch
    return F.cross_entropy(model(x), label)


def main(precision: str = "fp16", steps: int = 400) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = PrecisionTrainer(model, optimizer, precision)

    for step in range(1, steps + 1):
        x, label = spirals(128, generator)
        outcome = trainer.step((x.to(device), label.to(device)), loss_fn)
        if step % 100 == 0:
            print(f"step {step}: {outcome}, loss {outcome.loss.item():.3f}, gradient norm {outcome.grad_norm:.3f}")

    x, label = spirals(2000, generator)
    with torch.no_grad(), trainer.forward():  # the precision that it was trained in
        correct = model(x.to(device)).argmax(1).cpu() == label
    print(f"accuracy {correct.float().mean():.3f} on new points; guessing gives 0.333")
    print(trainer.stats())


if __name__ == "__main__":
    main(*sys.argv[1:2])
