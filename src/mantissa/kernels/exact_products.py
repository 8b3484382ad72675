"""A matrix product of which each row depends on that row and the weights alone: in tiles, as ``exact_plan`` says.

Legend: M rows, E features in, F features out, R rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.kernels import products
from mantissa.kernels.exact_plan import Choice, pieces


def product(x_NE: Tensor, weight_FE: Tensor, choice: Choice) -> Tensor:
    """x @ weight^T in fp32, any leading shape, in the tiles chosen. To be called without gradients.

    ``weight_FE`` may be packed (``products.packed``), which is what oneDNN reads fastest.
    """
    x_ME, wide = x_NE.reshape(-1, x_NE.shape[-1]), choice.way == "fp64"
    if weight_FE.is_mkldnn and not choice.onednn:
        weight_FE = weight_FE.to_dense()
    if wide:
        weight_FE = weight_FE.double()
    if len(x_ME) in choice.sizes and not wide:
        out_MF = _tile(x_ME, weight_FE, choice)
    else:
        out_MF = x_ME.new_empty(len(x_ME), weight_FE.shape[0])
        for start, stop, size in pieces(len(x_ME), choice.sizes):
            tile_RE = x_ME[start:stop].double() if wide else x_ME[start:stop]
            if stop - start == size and not wide and not choice.onednn:
                torch.mm(tile_RE, weight_FE.t(), out=out_MF[start:stop])
                continue
            if stop - start < size:
                tile_RE = torch.cat((tile_RE, tile_RE.new_zeros(size - (stop - start), x_ME.shape[1])))
            # From float64: rounded once.
            out_MF[start:stop].copy_(_tile(tile_RE, weight_FE, choice)[: stop - start])
    # No view where none is needed: FSDP2 warns of a module that returns one.
    return out_MF if x_NE.dim() == 2 else out_MF.view(*x_NE.shape[:-1], -1)


def _tile(tile_RE: Tensor, weight_FE: Tensor, choice: Choice) -> Tensor:
    return products.onednn(tile_RE, weight_FE) if choice.onednn else torch.mm(tile_RE, weight_FE.t())
