"""The log-partition head of FlowRL: log Z(x), one number for a prompt, from the policy's own view of it.

Two blocks of Linear, GELU, LayerNorm, Dropout, then Linear to 1, on the mean of the last hidden layer (after the final
norm, as Hugging Face returns it) over the prompt's tokens (arXiv 2509.15207, and its code). It trains with the policy
and is saved beside it; it is no part of the model that is exported or sampled from, so it is no part of ``Decoder``.

Always fp32, parameters and arithmetic, whatever the policy's kernels are: log Z is a sum of several nats that squares
in the loss, its cost is nothing beside one layer, and its gradient reaches the policy through one cast.

Dropout without a generator. A backward pass that is repeated at a lower loss scale must repeat its forward's dropout,
a resumed run that of the first one, and no split into micro-batches may change it. So whether a unit is dropped is a
hash (``base/seeds.py``) of the row's ``key``, the layer and the unit. Whoever calls makes keys from the run's seed, the
step and the prompt, and the rest follows. Without keys nothing is dropped.

Legend: B prompts, E hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.base.seeds import GOLDEN, mix, shift_right

_BITS = 24  # of the hash: as many as make an fp32 uniform


class LogPartition(nn.Module):
    """``log Z`` of prompts. ``dropout``: the probability with which a unit is dropped after each block."""

    def __init__(self, hidden_size: int, dropout: float = 0.1) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is a probability below 1, not {dropout}")
        self.dropout = dropout
        self.blocks = nn.ModuleList(_Block(hidden_size) for _ in range(2))
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def initialize(self, generator: torch.Generator | None = None) -> LogPartition:
        """Linear maps uniform in +-1/sqrt(E), their biases too (torch's default); norms 1 and 0. Returns self."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0 if name.endswith("norm_weight") else 0.0)
                else:
                    parameter.uniform_(-bound, bound, generator=generator)
        return self

    def forward(self, state_BE: Tensor, key_B: Tensor | None = None, *, detach: bool = False) -> Tensor:
        """log Z of each prompt, fp32, B.

        ``state_BE``: the mean of the final hidden states over the prompt, fp32. ``key_B``: int64, a number for each row
        that names its dropout, different for different prompts and steps; None drops nothing. ``detach``: send no
        gradient into the state.
        """
        x_BE = state_BE.detach() if detach else state_BE
        for layer, block in enumerate(self.blocks):
            x_BE = block(x_BE)
            if key_B is not None and self.dropout > 0:
                kept_BE = kept_units(key_B, layer, x_BE.shape[1], self.dropout)
                x_BE = torch.where(kept_BE, x_BE / (1 - self.dropout), 0.0)
        return F.linear(x_BE, self.weight, self.bias).squeeze(-1)


class _Block(nn.Module):
    """LayerNorm(GELU(Linear(x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(size, dtype=torch.float32))

    def forward(self, x_BE: Tensor) -> Tensor:
        inner_BE = F.gelu(F.linear(x_BE, self.weight, self.bias))
        return F.layer_norm(inner_BE, inner_BE.shape[-1:], self.norm_weight, self.norm_bias)


def kept_units(key_B: Tensor, layer: int, size: int, probability: float) -> Tensor:
    """Which of ``size`` units of each row dropout keeps (bool, B by ``size``): a function of its arguments alone.

    Unit e of layer l is dropped where the top 24 bits of ``mix(mix(key) + (l * size + e + 1) * golden)`` are below
    ``probability * 2^24``.
    """
    unit_E = torch.arange(layer * size + 1, (layer + 1) * size + 1, device=key_B.device)
    hashed_BE = mix(mix(key_B).unsqueeze(-1) + unit_E * GOLDEN)
    return shift_right(hashed_BE, 64 - _BITS) >= round(probability * (1 << _BITS))
