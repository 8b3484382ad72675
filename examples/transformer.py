"""A transformer encoder in fp16, with warm-up and gradient accumulation: write a sequence backwards.

python examples/transformer.py [fp16 | bf16 | fp32]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.dropin import PrecisionTrainer

SYMBOLS, LENGTH, WIDTH = 10, 8, 48


def sequences(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, SYMBOLS, (rows, LENGTH), generator=generator)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens) + self.place))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())


def main(precision: str = "fp16", steps: int = 80) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    # two micro-batches make an optimiser step; the schedule moves with steps that were applied, and only then
    trainer = PrecisionTrainer(model, optimizer, precision, accumulate=2, max_grad_norm=1.0, scheduler=schedule)

    while trainer.steps < steps:
        outcome = trainer.step(sequences(32, generator).to(device), loss_fn)
        if outcome.kind != "accumulated" and trainer.steps % 10 == 0:
            print(f"step {trainer.steps}: {outcome}, loss {outcome.loss.item():.3f}, learning rate {outcome.lr:.1e}")

    model.eval()
    tokens = sequences(500, generator).to(device)
    with torch.no_grad(), trainer.forward():
        correct = model(tokens).argmax(2) == tokens.flip(1)
    print(f"accuracy {correct.float().mean():.3f} of symbols in new sequences; guessing gives 0.100")
    print(trainer.stats())


if __name__ == "__main__":
    main(*sys.argv[1:2])
