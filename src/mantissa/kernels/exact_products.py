"""A matrix product of which each row depends on that row and the weights alone: the three ways of ``exact_plan``.

Legend: M rows, E features in, F features out, R rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.kernels.exact_plan import Choice


def product(x_NE: Tensor, weight_FE: Tensor, choice: Choice) -> Tensor:
    """x @ weight^T in fp32, any leading shape, by the way chosen. To be called without gradients."""
    x_ME, weight_EF = x_NE.reshape(-1, x_NE.shape[-1]), weight_FE.t()
    whole = len(x_ME) - len(x_ME) % choice.rows
    if whole == len(x_ME) and choice.way == "padded rows":
        out_MF = torch.mm(x_ME, weight_EF)
    else:
        out_MF = x_ME.new_empty(len(x_ME), weight_FE.shape[0])
        if choice.way == "row tiles":
            for start in range(0, len(x_ME), choice.rows):
                _fill(out_MF[start : start + choice.rows], x_ME[start : start + choice.rows], weight_EF, choice.rows)
        elif choice.way == "padded rows":
            _fill(out_MF[:whole], x_ME[:whole], weight_EF, choice.rows)  # without a copy
            _fill(out_MF[whole:], x_ME[whole:], weight_EF, choice.rows)
        else:
            wide_MF = torch.empty(out_MF.shape, dtype=torch.float64, device=out_MF.device)
            _fill(wide_MF, x_ME.double(), weight_EF.double(), choice.rows)
            out_MF.copy_(wide_MF)  # rounded once
    # No view where none is needed: FSDP2 warns of a module that returns one.
    return out_MF if x_NE.dim() == 2 else out_MF.view(*x_NE.shape[:-1], -1)


def _fill(out_MF: Tensor, x_ME: Tensor, weight_EF: Tensor, rows: int) -> None:
    """out = x @ weight in one call, with zeros added up to a multiple of ``rows`` where M is none."""
    count, missing = len(x_ME), -len(x_ME) % rows
    if not count:
        return
    if not missing:
        torch.mm(x_ME, weight_EF, out=out_MF)
        return
    padded_ME = x_ME.new_zeros(count + missing, x_ME.shape[1])
    padded_ME[:count] = x_ME
    out_MF.copy_(torch.mm(padded_ME, weight_EF)[:count])
