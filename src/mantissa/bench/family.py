"""The built-in models and their task, whose best loss is known.

Models. A residual MLP of width w: h = W_in x + b, then 4 times h = h + gelu(W h + b), then y = W_out h + b; inputs 32,
outputs 8. One number, the width, takes it from 10 thousand parameters, where a step is the cost of launching its
operations, to a billion, where it is matrix products.

Task. Regression on a teacher with noise: x ~ N(0, I), y = t(x) + s e with e ~ N(0, I) and s = 0.5, and the loss is the
mean square over samples and outputs. For any prediction f that does not see the noise,

    E |f(x) - y|^2 / outputs = s^2 + E |f(x) - t(x)|^2 / outputs >= s^2

so the best loss is s^2 = 0.25 and what a model is above it (its excess loss) is its own distance from the teacher. The
bound is attained: the teacher is a residual MLP of width 16 with one block, and there is no normalisation over the
width, so every member of the family that is at least as wide *contains* it (the rest of its weights 0, and gelu(0) is
0). The teacher's outputs have mean square 1, so a model that predicts 0 has a loss of 1.25. Losses are measured on
samples not trained on: a model of ten million parameters learns the noise of 512 samples by heart, and its training
loss would fall below the best.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mantissa.bench.workload import Workload, adamw

INPUTS, OUTPUTS, BLOCKS = 32, 8, 4
NOISE_STD = 0.5
BEST_LOSS = NOISE_STD**2
_TEACHER_WIDTH = 16
_BASE_LR, _BASE_WIDTH = 3e-3, 64


class ResidualMLP(nn.Module):
    """See the module's text. Input (batch, 32), output (batch, 8)."""

    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + F.gelu(block(h))
        return self.last(h)


def width_for(parameters: int) -> int:
    """The width, a multiple of 8 for the GPU's half kernels, whose parameters come closest to ``parameters``.

    n(w) = 4 w^2 + (4 + 32 + 1 + 8) w + 8, solved for w.
    """
    linear = BLOCKS + INPUTS + 1 + OUTPUTS
    exact = (-linear + math.sqrt(linear**2 + 4 * BLOCKS * max(0, parameters - OUTPUTS))) / (2 * BLOCKS)
    low = max(_TEACHER_WIDTH, 8 * int(exact / 8))
    return min((low, low + 8), key=lambda width: abs(BLOCKS * width**2 + linear * width + OUTPUTS - parameters))


@functools.cache
def teacher() -> ResidualMLP:
    """The one teacher, in fp32 on the CPU; its outputs have mean square 1 over 65,536 inputs."""
    generator = torch.Generator().manual_seed(20_260)
    model = ResidualMLP(_TEACHER_WIDTH, blocks=1).requires_grad_(False)
    for layer in (model.first, *model.blocks, model.last):
        assert isinstance(layer, nn.Linear)
        torch.randn(layer.weight.shape, generator=generator, out=layer.weight)
        layer.weight.mul_(layer.in_features**-0.5)
        layer.bias.zero_()
    inputs = torch.randn(65_536, INPUTS, generator=generator)
    model.last.weight.div_(model(inputs).square().mean().sqrt())
    return model


def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch_size`` inputs (batch, 32) and noisy targets (batch, 8), fp32."""
    inputs = torch.randn(batch_size, INPUTS, generator=generator)
    noise = torch.randn(batch_size, OUTPUTS, generator=generator)
    return inputs, teacher()(inputs) + NOISE_STD * noise


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean square error over samples and outputs, in fp32 whatever the model computed in."""
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def family_workload(parameters: int, device: torch.device | str = "cpu") -> Workload:
    """The member of the family with about ``parameters``, on ``device``, with weights from torch's global generator.

    The learning rate of AdamW is 3e-3 at width 64 and falls with 1/width, as its update of a layer's output grows with
    the width (Yang et al. 2022, Tensor Programs V, table 3).
    """
    teacher()  # made before the weights, and from a generator of its own
    width = width_for(parameters)
    with torch.device(device):
        model = ResidualMLP(width)
    lr = _BASE_LR * min(1.0, _BASE_WIDTH / width)
    return Workload(model, make_batch, loss_fn, BEST_LOSS, functools.partial(adamw, lr=lr))
