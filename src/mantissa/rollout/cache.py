"""The key/value cache: for each layer one block of keys and one of values, a row a slot, as long as the longest row.

Legend: L layers, N slots, K key/value heads, S positions, D head size, P prompts, B rows in use.

Rows in use are kept together at the front (the scheduler moves rows into holes), and the blocks are kept *packed*: a
head's keys are as many positions as the longest row in use has (in steps of ``BUCKET``), with nothing behind them. So a
decode step attends to a view ``[:B]``, never to a gathered copy, and reads memory that lies in one piece. On a CPU that
matters more than the copy made at every sixteenth step, when the rows outgrow the block: reading the first 64 of 128
positions of each head takes 1.8 to 2.5 times as long as reading 64 of 64.

The memory starts as zeros and only finite values enter: a position beyond a row's length has attention weight exactly
0, and 0 times a leftover infinity would be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.model import ModelConfig

BUCKET = 16


class KVCache:
    """Keys and values of ``slots`` rows. Values are held in ``dtype``; who writes them has rounded them."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self._heads, self._size, self._dtype = config.num_key_value_heads, config.head_dim, dtype
        self._blocks = 2 * config.num_hidden_layers  # keys and values of a layer lie at 2 * layer and 2 * layer + 1
        self._row_heads_NK = torch.arange(slots * self._heads, device=device).view(slots, self._heads)
        self._stream: torch.cuda.Stream | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything, memory included: after non-finite values, which would outlive their row."""
        self.length = 0  # positions of a row in the present packing
        self._flat = [torch.zeros(0, dtype=self._dtype, device=self.device) for _ in range(self._blocks)]
        self._spare = self._flat[0].clone()
        self._views_NKSD = [self._view(flat) for flat in self._flat]

    def restart(self) -> None:
        """Before a new set of rows: pack anew, so that nothing depends on what was held before. Memory is kept.

        Memory that was taken on another CUDA stream is given back instead: freed later, while this stream still reads
        it, it would be that stream's to overwrite.
        """
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if stream != self._stream:
            self._stream = stream
            self.clear()
        self.length = 0

    def fit(self, length: int, rows: int) -> None:
        """Pack the blocks for ``length`` positions a row, keeping the first ``rows`` rows as far as they fit.

        Longer than now: at once. Shorter: only by a good part, since packing is a copy. One block more than the cache's
        own is kept, into which each is packed in turn.
        """
        length = -(-length // BUCKET) * BUCKET
        if self.length * 3 // 4 <= length <= self.length:
            return
        kept = min(length, self.length)
        elements = self.slots * self._heads * length * self._size
        old_views, self.length = self._views_NKSD, length
        for index, old_NKSD in enumerate(old_views):
            if self._spare.numel() < elements:
                roomy = elements if self._spare.numel() == 0 else max(elements, self._spare.numel() * 3 // 2)
                self._spare = torch.zeros(roomy, dtype=self._dtype, device=self.device)
            self._view(self._spare)[:rows, :, :kept] = old_NKSD[:rows, :, :kept]
            self._flat[index], self._spare = self._spare, self._flat[index]
        self._views_NKSD = [self._view(flat) for flat in self._flat]

    def _view(self, flat: Tensor) -> Tensor:
        shape = (self.slots, self._heads, self.length, self._size)
        return flat[: self.slots * self._heads * self.length * self._size].view(shape)

    def places(self, positions_B: Tensor) -> Tensor:
        """Where position ``positions_B[b]`` of row b lies, for each head, counted in heads' vectors. int64, B*K."""
        return (self._row_heads_NK[: positions_B.shape[0]] * self.length + positions_B.unsqueeze(1)).flatten()

    def append(self, layer: int, k_BK1D: Tensor, v_BK1D: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position of each of the first B rows; return all keys and values of those rows, B,K,S,D."""
        keys, values = self._views_NKSD[2 * layer], self._views_NKSD[2 * layer + 1]
        keys.view(-1, self._size).index_copy_(0, places, k_BK1D.reshape(-1, self._size))
        values.view(-1, self._size).index_copy_(0, places, v_BK1D.reshape(-1, self._size))
        rows = k_BK1D.shape[0]
        return keys[:rows], values[:rows]

    def admit(self, slots_B: Tensor, kv_2LPKSD: Tensor, prompts_B: Tensor) -> None:
        """Copy the prefilled prompt ``prompts_B[b]`` into slot ``slots_B[b]``."""
        length = kv_2LPKSD.shape[4]
        for index, block_NKSD in enumerate(self._views_NKSD):
            prompts_PKSD = kv_2LPKSD[index % 2, index // 2]
            block_NKSD[:, :, :length].index_copy_(0, slots_B, prompts_PKSD.index_select(0, prompts_B))

    def move(self, source_B: Tensor, target_B: Tensor) -> None:
        """Copy rows ``source_B`` over rows ``target_B``."""
        for block_NKSD in self._views_NKSD:
            block_NKSD.index_copy_(0, target_B, block_NKSD.index_select(0, source_B))
