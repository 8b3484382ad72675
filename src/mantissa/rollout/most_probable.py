"""The sampler's most probable tokens at each token of a response, with their log-probs: for score centering.

Legend: T response tokens, K of the most probable tokens, B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MostProbable:
    """Of each of T tokens, on the CPU. ``ids_TK``: int32. ``logp_TK``: fp32, under the distribution drawn from (the
    softmax of the whole vocabulary, or of what top-k and top-p kept), -inf where there are fewer than K."""

    ids_TK: Tensor
    logp_TK: Tensor

    @staticmethod
    def join(parts: Sequence[MostProbable]) -> MostProbable:
        """Those of several responses as one."""
        return MostProbable(torch.cat([each.ids_TK for each in parts]), torch.cat([each.logp_TK for each in parts]))

    def split(self, lengths: Sequence[int]) -> list[MostProbable]:
        """The inverse of ``join``; ``lengths``: tokens of each response."""
        parts = zip(self.ids_TK.split(list(lengths)), self.logp_TK.split(list(lengths)), strict=True)
        return [MostProbable(ids.clone(), logp.clone()) for ids, logp in parts]

    def nothing_like(self) -> MostProbable:
        """As many, of no token."""
        return MostProbable(self.ids_TK[:0], self.logp_TK[:0])

    @staticmethod
    def of(steps: Sequence[Mapping[int, float]], count: int) -> MostProbable:
        """From log-probs by token id, of each of T tokens; of each the ``count`` largest."""
        ids_TK = torch.zeros(len(steps), count, dtype=torch.int32)
        logp_TK = torch.full((len(steps), count), -torch.inf)
        for row, step in enumerate(steps):
            best = sorted(step.items(), key=lambda one: (-one[1], one[0]))[:count]
            ids_TK[row, : len(best)] = torch.tensor([token for token, _ in best], dtype=torch.int32)
            logp_TK[row, : len(best)] = torch.tensor([logp for _, logp in best])
        return MostProbable(ids_TK, logp_TK)

    def fits(self, tokens: int, vocabulary: int) -> bool:
        """Whether these can be of so many tokens; for what a file holds."""
        ids, logp = self.ids_TK, self.logp_TK
        shaped = ids.dim() == 2 and ids.shape == logp.shape and len(ids) == tokens and ids.shape[1] > 0
        if not shaped or ids.dtype != torch.int32 or logp.dtype != torch.float32 or bool((logp > 0).any()):
            return False
        return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary and not bool(logp.isnan().any()))


def most_probable(kept_BV: Tensor, temperature: float, count: int) -> MostProbable:
    """Of each row of logits, as ``filter_logits`` gives them."""
    scaled = kept_BV if temperature == 1.0 else kept_BV / temperature
    logp_BK, ids_BK = torch.log_softmax(scaled, dim=-1).topk(min(count, kept_BV.shape[-1]), dim=-1)
    return MostProbable(ids_BK.to(torch.int32).cpu(), logp_BK.cpu())
