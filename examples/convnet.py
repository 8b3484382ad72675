"""A small convolution net with batch norm in fp16: which stroke is in a noisy picture, wherever it is.

python examples/convnet.py [fp16 | bf16 | fp32]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.dropin import PrecisionTrainer

LINE = torch.ones(7)
STROKES = torch.zeros(4, 7, 7)  # a horizontal line, a vertical one, and the two diagonals
STROKES[0, 3], STROKES[1, :, 3], STROKES[2], STROKES[3] = LINE, LINE, LINE.diag(), LINE.diag().flip(0)


def pictures(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.randint(0, 4, (rows,), generator=generator)
    x = 0.5 * torch.randn(rows, 1, 16, 16, generator=generator)
    for i, (top, left) in enumerate(torch.randint(0, 10, (rows, 2), generator=generator).tolist()):
        x[i, 0, top : top + 7, left : left + 7] += STROKES[label[i]]
    return x, label


def block(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 5, padding=2, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)
    )


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, label = batch
    return F.cross_entropy(model(x), label)


def main(precision: str = "fp16", steps: int = 140) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(block(1, 8), block(8, 16), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = PrecisionTrainer(model, optimizer, precision, max_grad_norm=1.0)

    for step in range(1, steps + 1):
        x, label = pictures(64, generator)
        outcome = trainer.step((x.to(device), label.to(device)), loss_fn)
        if step % 20 == 0:
            print(f"step {step}: {outcome}, loss {outcome.loss.item():.3f}, gradient norm {outcome.grad_norm:.3f}")

    model.eval()
    x, label = pictures(1000, generator)
    with torch.no_grad(), trainer.forward():
        correct = model(x.to(device)).argmax(1).cpu() == label
    print(f"accuracy {correct.float().mean():.3f} on new pictures; guessing gives 0.250")
    print(trainer.stats())


if __name__ == "__main__":
    main(*sys.argv[1:2])
