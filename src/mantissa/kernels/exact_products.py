"""A matrix product of which each row depends on that row and the weights alone: in tiles, as ``exact_plan`` says.

Legend: M rows, E features in, F features out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.kernels.exact_plan import Choice, pieces


def product(x_NE: Tensor, weight_FE: Tensor, choice: Choice) -> Tensor:
    """x @ weight^T in fp32, any leading shape, in the tiles chosen. To be called without gradients."""
    x_ME, weight_EF = x_NE.reshape(-1, x_NE.shape[-1]), weight_FE.t()
    wide = choice.way == "fp64"
    if len(x_ME) in choice.sizes and not wide:
        out_MF = torch.mm(x_ME, weight_EF)
    else:
        out_MF = x_ME.new_empty(len(x_ME), weight_FE.shape[0])
        weight_EF = weight_EF.double() if wide else weight_EF
        for start, stop, size in pieces(len(x_ME), choice.sizes):
            tile_RE = x_ME[start:stop].double() if wide else x_ME[start:stop]
            if stop - start == size and not wide:
                torch.mm(tile_RE, weight_EF, out=out_MF[start:stop])
                continue
            if stop - start < size:
                tile_RE = torch.cat((tile_RE, tile_RE.new_zeros(size - (stop - start), x_ME.shape[1])))
            out_MF[start:stop].copy_(torch.mm(tile_RE, weight_EF)[: stop - start])  # from float64: rounded once
    # No view where none is needed: FSDP2 warns of a module that returns one.
    return out_MF if x_NE.dim() == 2 else out_MF.view(*x_NE.shape[:-1], -1)
