"""Sequences without their repetitions: each distinct prompt once, no padding, no last token.

The samples of a group share their prompt, and under a causal model the prompt's hidden states are the same in each. So
the learner computes what is done position by position (products, norms, feed-forward: nearly all of the work) on a
packed row of distinct positions, and spreads queries, keys and values out to whole sequences for attention alone. With
8 samples of 24 tokens on prompts of 16 that is 0.63 of the positions of a padded batch. Attention's kernel, and what a
position sees, are the same as ever.

The gradient of a shared position is the sum over the sequences that share it, taken in fp32 by the embedding lookup's
backward; in a simulated format it is rounded by the operation that reads it, like every sum of gradients.

Legend: B sequences, T positions of the longest, N packed positions, E features, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import Kernels
from mantissa.model import Decoder
from mantissa.rl.experience import Sequences


@dataclass(frozen=True)
class Packed:
    """Distinct positions of ``sequences``, and the way there and back.

    ``tokens_N``, ``positions_N``: each packed position's token and its place in its sequence. ``source_N``: a flat B*T
    position it stands for. ``packed_BT``: the packed position of each one; 0 where there is none (padding and last
    tokens), which no position that counts sees. ``owner_B``: the first sequence with the same prompt.
    """

    tokens_N: Tensor
    positions_N: Tensor
    source_N: Tensor
    packed_BT: Tensor
    owner_B: Tensor

    @staticmethod
    def of(sequences: Sequences) -> Packed:
        """Pack by content: equal prompts are one, wherever they come from."""
        tokens_BT = sequences.tokens_BT
        (rows, width), device = tokens_BT.shape, tokens_BT.device
        column_1T = torch.arange(width, device=device).unsqueeze(0)
        prompt_BT = column_1T < sequences.prompt_length_B.unsqueeze(1)
        real_BT = column_1T < sequences.length_B.unsqueeze(1) - 1  # the last token of a sequence predicts nothing
        owner_B = _first_alike(tokens_BT.masked_fill(~prompt_BT, -1))
        own_B1 = (owner_B == torch.arange(rows, device=device)).unsqueeze(1)
        kept_BT = real_BT & (own_B1 | ~prompt_BT)
        source_N = kept_BT.flatten().nonzero().squeeze(1)
        number_BT = (kept_BT.flatten().cumsum(0) - 1).view(rows, width)
        packed_BT = torch.where(prompt_BT, number_BT[owner_B], number_BT).masked_fill_(~real_BT, 0)
        return Packed(tokens_BT.flatten()[source_N], source_N % width, source_N, packed_BT, owner_B)

    def hidden(self, model: Decoder, kernels: Kernels) -> Tensor:
        """Final hidden states of the packed positions, N,E."""
        rows, width = self.packed_BT.shape
        packed = self.packed_BT.flatten()

        def spread(x_1HND: Tensor) -> Tensor:
            _, heads, count, size = x_1HND.shape
            x_NE = x_1HND.transpose(1, 2).reshape(count, heads * size)
            return F.embedding(packed, x_NE).view(rows, width, heads, size).transpose(1, 2)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out_BHTD = kernels.causal_attention(spread(q), spread(k), spread(v))
            _, heads, _, size = out_BHTD.shape
            out_NE = F.embedding(self.source_N, out_BHTD.transpose(1, 2).reshape(rows * width, heads * size))
            return out_NE.view(1, -1, heads, size).transpose(1, 2)

        tokens_1N, positions_1N = self.tokens_N.unsqueeze(0), self.positions_N.unsqueeze(0)
        return model.hidden(tokens_1N, kernels, positions_1N, attend).squeeze(0)


def _first_alike(rows_BT: Tensor) -> Tensor:
    """For each row, the index of the first row that equals it. int64, B."""
    _, kind_B = torch.unique(rows_BT, dim=0, return_inverse=True)
    index_B = torch.arange(len(rows_BT), device=rows_BT.device)
    first_B = torch.full_like(index_B, len(rows_BT)).scatter_reduce_(0, kind_B, index_B, "amin")
    return first_B[kind_B]
