"""The key/value cache: one block of memory, a row a slot, of which the first ``n`` rows are in use.

Legend: L layers, N slots, K key/value heads, S positions, D head size, P prompts.

Rows in use are kept together at the front (the scheduler moves rows into holes), so that a decode step attends to views
``[:n, :, :window]`` of the cache, never to a gathered copy. The memory starts as zeros and only finite values enter: a
position beyond a row's length has attention weight exactly 0, and 0 times a leftover infinity would be NaN.

Values are rounded to ``format`` before they enter and are held in the kernels' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.model import ModelConfig

BUCKET = 16  # windows are multiples of this: few distinct shapes, and little attention to positions nobody has


def bucketed(length: int, bucket: int = BUCKET) -> int:
    """``length`` rounded up to a multiple of ``bucket``."""
    return -(-length // bucket) * bucket


class KVCache:
    """Keys and values of ``slots`` rows, grown in length as needed up to ``max_length``."""

    def __init__(
        self, config: ModelConfig, slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (2, config.num_hidden_layers, slots, config.num_key_value_heads)
        self._size = config.head_dim
        self.max_length = bucketed(max_length)
        self._kv_2LNKSD = torch.zeros(*self._shape, 0, self._size, dtype=dtype, device=device)
        rows_heads = torch.arange(slots * config.num_key_value_heads, device=device)
        self._row_head_NK = rows_heads.view(slots, config.num_key_value_heads)

    @property
    def length(self) -> int:
        """Positions allocated."""
        return self._kv_2LNKSD.shape[4]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in every slot; what is there stays. Grows by half at least."""
        if length <= self.length:
            return
        if length > self.max_length:
            raise AssertionError(f"{length} positions asked of a cache of at most {self.max_length}")
        grown = min(bucketed(max(length, self.length * 3 // 2), 64), self.max_length)
        old = self._kv_2LNKSD
        self._kv_2LNKSD = torch.zeros(*self._shape, grown, self._size, dtype=old.dtype, device=old.device)
        self._kv_2LNKSD[..., : old.shape[4], :] = old

    def clear(self) -> None:
        """Forget everything, memory included: after non-finite values, which would outlive their row."""
        old = self._kv_2LNKSD
        self._kv_2LNKSD = torch.zeros(*self._shape, 0, self._size, dtype=old.dtype, device=old.device)

    def places(self, positions_B: Tensor) -> Tensor:
        """Where position ``positions_B[b]`` of row b lies, for each head, in the flat cache of a layer. int64, B*K."""
        rows = positions_B.shape[0]
        return (self._row_head_NK[:rows] * self.length + positions_B.unsqueeze(1)).flatten()

    def append(self, layer: int, k_BKD: Tensor, v_BKD: Tensor, places: Tensor) -> None:
        """Write one position of each of the first B rows."""
        self._kv_2LNKSD[0, layer].view(-1, self._size).index_copy_(0, places, k_BKD.reshape(-1, self._size))
        self._kv_2LNKSD[1, layer].view(-1, self._size).index_copy_(0, places, v_BKD.reshape(-1, self._size))

    def window(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first ``rows`` rows and ``length`` positions of a layer: keys and values, B,K,S,D."""
        return self._kv_2LNKSD[0, layer, :rows, :, :length], self._kv_2LNKSD[1, layer, :rows, :, :length]

    def admit(self, slots_B: Tensor, kv_2LPKSD: Tensor, prompts_B: Tensor) -> None:
        """Copy the prefilled prompt ``prompts_B[b]`` into slot ``slots_B[b]``."""
        target = self._kv_2LNKSD[..., : kv_2LPKSD.shape[4], :]
        target.index_copy_(2, slots_B, kv_2LPKSD.index_select(2, prompts_B))

    def move(self, source_B: Tensor, target_B: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of rows ``source_B`` over rows ``target_B``."""
        used = self._kv_2LNKSD[..., :length, :]
        used.index_copy_(2, target_B, used.index_select(2, source_B))
