"""Modules that are not ours, in each precision: they learn, near fp32, from rounded gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.dropin import PrecisionTrainer
from toys import Batch, quiet

PRECISIONS = ("fp32", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Recurrent(nn.Module):
    """Embedding, a recurrent layer, a head on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.layer = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens))[0][:, -1])


class Encoder(nn.Module):
    """Embedding, a layer of attention with dropout, a head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)).mean(1))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def pictures(rows: int, generator: torch.Generator) -> Batch:
    """Stripes across, stripes down, or a checkerboard, in noise."""
    y = torch.randint(0, 3, (rows,), generator=generator)
    i, j = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    patterns = torch.stack([i % 2, j % 2, (i + j) % 2]).float()
    return patterns[y].unsqueeze(1) + 0.3 * torch.randn(rows, 1, 8, 8, generator=generator), y


def tokens(rows: int, generator: torch.Generator) -> Batch:
    """Which of three symbols is there more often than the other two; ties go to the first."""
    x = torch.randint(0, 6, (rows, 7), generator=generator)
    return x, torch.stack([(x == k).sum(1) for k in range(3)], 1).argmax(1)


Maker = Callable[[], nn.Module]
Source = Callable[[int, torch.Generator], Batch]
CASES: dict[str, tuple[Maker, Source, int]] = {  # and optimiser steps until it has learnt
    "conv + batch norm": (conv_net, pictures, 30),
    "lstm": (Recurrent, tokens, 50),
    "transformer": (Encoder, tokens, 40),
}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(case: str, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [CASES[case][1](32, generator) for _ in range(count)]


def trainer_for(case: str, precision: str, seed: int = 0, **options) -> PrecisionTrainer:
    torch.manual_seed(seed)
    model = CASES[case][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return PrecisionTrainer(model, optimizer, precision, say=quiet, **options)


@pytest.mark.parametrize("case", CASES)
def test_it_learns_near_fp32_but_not_as_fp32(case: str) -> None:
    """The same weights, dropout and data: only rounding differs. At first by little; Adam then lets it grow."""
    curves = {}
    for precision in PRECISIONS:
        trainer = trainer_for(case, precision, max_grad_norm=1.0)
        curve = curves[precision] = [
            trainer.step(batch, loss_fn).loss.item() for batch in batches(case, CASES[case][2])
        ]
        assert trainer.skipped == 0
        assert sum(curve[-5:]) < 0.6 * sum(curve[:5])
        trainer.model.eval()
        x, y = CASES[case][1](500, torch.Generator().manual_seed(9))
        with torch.no_grad(), trainer.forward():
            accuracy = (trainer.model(x).argmax(1) == y).float().mean()
        assert accuracy > 0.75  # guessing gives 0.33 to 0.45
    exact = curves["fp32"]
    for precision, tolerance in (("bf16", 0.1), ("fp16", 0.03)):
        ours = curves[precision]
        assert ours != exact
        assert ours[0] == pytest.approx(exact[0], rel=5 * torch.finfo(DTYPES[precision]).eps)
        assert sum(abs(a - b) for a, b in zip(ours, exact, strict=True)) / len(exact) < tolerance


def product_weights(model: nn.Module) -> list[str]:
    """Weights that enter one product a step: their gradient is one rounded result. (A recurrent layer's is a sum over
    time, a bias's a sum over rows.)"""
    modules = dict(model.named_modules())
    kinds = (nn.Linear, nn.Conv2d)
    named = [f"{name}.weight" for name, module in modules.items() if isinstance(module, kinds)]
    return named + [name for name, _ in model.named_parameters() if name.endswith("in_proj_weight")]


def gradients_at_the_step(trainer: PrecisionTrainer) -> dict[str, Tensor]:
    """Filled with what the optimiser sees, whenever it steps."""
    seen: dict[str, Tensor] = {}

    def look(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.optimizer.register_step_pre_hook(look)
    return seen


def on_grid(value: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value, value.to(dtype).to(value.dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_optimiser_gets_rounded_gradients_unscaled(case: str, precision: str) -> None:
    """Looked at where they are used, in the optimiser's step: times the scale they are on the format's grid."""
    trainer = trainer_for(case, precision)
    weights = product_weights(trainer.model)
    seen = gradients_at_the_step(trainer)
    outcome = trainer.step(batches(case, 1)[0], loss_fn)
    assert outcome.scale == (65536.0 if precision == "fp16" else 1.0)
    assert len(weights) >= 1
    assert seen.keys() == dict(trainer.model.named_parameters()).keys()
    for name in weights:
        scaled = seen[name] * outcome.scale
        assert scaled.dtype == torch.float32
        assert scaled.abs().max() > 0
        assert on_grid(scaled, DTYPES[precision]), name
        if precision == "fp32":
            assert not on_grid(scaled, torch.bfloat16), name
    largest = max(float(g.abs().max()) for g in seen.values())
    assert largest < 10  # unscaled: 65536 times smaller than what backward made
