"""A recurrent net in fp16: remember the symbol after the marker through a row of distracting ones.

python examples/gru.py [fp16 | bf16 | fp32]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.dropin import PrecisionTrainer

SYMBOLS, LENGTH = 8, 24
MARKER = SYMBOLS  # one more than the symbols


def sequences(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, SYMBOLS, (rows, LENGTH), generator=generator)
    place = torch.randint(0, LENGTH - 1, (rows, 1), generator=generator)
    tokens.scatter_(1, place, MARKER)
    return tokens, tokens.gather(1, place + 1)[:, 0]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, 24)
        self.gru = nn.GRU(24, 64, batch_first=True)
        self.head = nn.Linear(64, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.embed(tokens))
        return self.head(states[:, -1])


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, answer = batch
    return F.cross_entropy(model(tokens), answer)


def main(precision: str = "fp16", steps: int = 150) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Reader().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = PrecisionTrainer(model, optimizer, precision, max_grad_norm=1.0)

    for step in range(1, steps + 1):
        tokens, answer = sequences(64, generator)
        outcome = trainer.step((tokens.to(device), answer.to(device)), loss_fn)
        if step % 25 == 0:
            print(f"step {step}: {outcome}, loss {outcome.loss.item():.3f}, gradient norm {outcome.grad_norm:.3f}")

    tokens, answer = sequences(1000, generator)
    with torch.no_grad(), trainer.forward():
        correct = model(tokens.to(device)).argmax(1).cpu() == answer
    print(f"accuracy {correct.float().mean():.3f} on new sequences; guessing gives 0.125")
    print(trainer.stats())


if __name__ == "__main__":
    main(*sys.argv[1:2])
