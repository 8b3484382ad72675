"""A matrix product of which each row depends on that row and the weights alone: the three ways of ``exact_plan``."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.kernels.exact_plan import Choice


def product(x_NE: Tensor, weight_FE: Tensor, choice: Choice) -> Tensor:
    """x @ weight^T in fp32, any leading shape, by the way chosen. To be called without gradients."""
    rows_ME, weight_EF = x_NE.reshape(-1, x_NE.shape[-1]), weight_FE.t()
    if choice.way == "fp64":
        out_MF = _in_multiples(rows_ME.double(), weight_EF.double(), choice.rows).float()
    elif choice.way == "row tiles":
        out_MF = _in_tiles(rows_ME, weight_EF, choice.rows)
    else:
        out_MF = _in_multiples(rows_ME, weight_EF, choice.rows)
    return out_MF.view(*x_NE.shape[:-1], -1)


def _in_multiples(x_ME: Tensor, weight_EF: Tensor, rows: int) -> Tensor:
    """As many rows as there are whole multiples of ``rows`` at once, and the rest with zeros added, without a copy."""
    whole = len(x_ME) - len(x_ME) % rows
    if whole == len(x_ME):
        return torch.mm(x_ME, weight_EF)
    out_MF = x_ME.new_empty(len(x_ME), weight_EF.shape[1])
    if whole:
        torch.mm(x_ME[:whole], weight_EF, out=out_MF[:whole])
    out_MF[whole:] = torch.mm(_padded(x_ME[whole:], rows), weight_EF)[: len(x_ME) - whole]
    return out_MF


def _in_tiles(x_ME: Tensor, weight_EF: Tensor, rows: int) -> Tensor:
    out_MF = x_ME.new_empty(len(x_ME), weight_EF.shape[1])
    for start in range(0, len(x_ME), rows):
        tile_RE = x_ME[start : start + rows]
        if len(tile_RE) == rows:
            torch.mm(tile_RE, weight_EF, out=out_MF[start : start + rows])
        else:
            out_MF[start:] = torch.mm(_padded(tile_RE, rows), weight_EF)[: len(tile_RE)]
    return out_MF


def _padded(x_ME: Tensor, rows: int) -> Tensor:
    padded = x_ME.new_zeros(rows, x_ME.shape[1])
    padded[: len(x_ME)] = x_ME
    return padded
