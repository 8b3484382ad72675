"""What is kept beside each token of a response: its support, and the sampler's most probable tokens.

The support is which tokens top-k and top-p left to choose from: what the learner renormalises over. The most probable
tokens, with their log-probs, are for score centering.

A sampler that truncates draws from p_S(v) = p(v) / p(S), S the tokens that it kept. Its log-probs are of p_S, and a
learner that takes them over the whole vocabulary is off by

    log p(v) - log p_S(v) = log p(S) <= 0        nats, at every token, at equal weights

which grows over a response, favours short ones, and is taken for the gap between two engines. So S is kept with each
token, and the learner's logits outside it are -inf before the same log-prob function. Its gradient is that of p_S with
S held fixed. DeepSeek-V3.2 calls this keeping the sampling mask (arXiv 2512.02556, section 3.1).

Memory. A support is its token ids (int32, ascending), or where those would take more, a bitmap of the vocabulary in
words of 32 bits: at most V / 8 bytes a token, and 80 bytes for twenty ids. Which of the two follows from its length.

Legend: T response tokens, n tokens, V vocabulary, B rows, K of the most probable tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 32  # of a word
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.int64)  # in each byte
_AT_ONCE = 1 << 24  # values of a mask


def encode(kept_BV: Tensor) -> list[NDArray[np.int32]]:
    """The words of each row's support. ``kept_BV``: bool, True at the tokens that may be drawn; one at least a row."""
    words = -(-kept_BV.shape[1] // _BITS)
    row, token = kept_BV.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(kept_BV)).cpu()
    ids = token.to(torch.int32).cpu().numpy()
    parts = np.split(ids, counts.cumsum(0).numpy())[:-1]  # the last part is after the last row
    wide = (counts >= words).nonzero().flatten().tolist()
    if wide:
        rows = np.zeros((len(wide), words * _BITS), dtype=bool)
        rows[:, : kept_BV.shape[1]] = kept_BV[wide].cpu().numpy()
        for place, packed in zip(wide, np.packbits(rows, axis=1, bitorder="little").view("<i4"), strict=True):
            parts[place] = packed.astype(np.int32)
    return parts


def encode_ids(ids: Sequence[int], vocabulary: int) -> NDArray[np.int32]:
    """The words of one support, given by its tokens."""
    if len(ids) < -(-vocabulary // _BITS):
        return np.sort(np.array(ids, dtype=np.int32))
    kept_1V = torch.zeros(1, vocabulary, dtype=torch.bool)
    kept_1V[0, list(ids)] = True
    return encode(kept_1V)[0]


@dataclass(frozen=True)
class Support:
    """The supports of T tokens, one after the other. On the CPU.

    ``words``: int32, ids in ascending order, or a bitmap where there are as many as the vocabulary has words of 32
    bits. ``counts``: int32, T, the words of each token.
    """

    words: Tensor
    counts: Tensor

    @staticmethod
    def of(parts: Sequence[NDArray[np.int32]]) -> Support:
        """From what ``encode`` gave, token after token."""
        words = np.concatenate([np.empty(0, dtype=np.int32), *parts])
        return Support(torch.from_numpy(words), torch.tensor([len(part) for part in parts], dtype=torch.int32))

    @staticmethod
    def join(supports: Sequence[Support]) -> Support:
        """Those of several responses as one."""
        return Support(torch.cat([s.words for s in supports]), torch.cat([s.counts for s in supports]))

    def __len__(self) -> int:
        return len(self.counts)

    def split(self, lengths: Sequence[int]) -> list[Support]:
        """The inverse of ``join``; ``lengths``: tokens of each response."""
        counts = self.counts.split(list(lengths))
        words = self.words.split([int(part.sum()) for part in counts])
        return [Support(word.clone(), count.clone()) for word, count in zip(words, counts, strict=True)]

    def mask(self, first: int, last: int, vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
        """True at the tokens of the supports of tokens ``first`` up to before ``last``; bool n,V on ``device``."""
        bitmap = -(-vocabulary // _BITS)
        start = int(self.counts[:first].sum())
        counts = self.counts[first:last].long()
        words = self.words[start : start + int(counts.sum())]
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        wide_n = counts == bitmap
        narrow = ~wide_n[row]
        kept_nV = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=device)
        kept_nV[row[narrow].to(device), words[narrow].long().to(device)] = True
        if bool(wide_n.any()):
            packed = words[~narrow].view(-1, bitmap).numpy().view(np.uint8)
            bits = np.unpackbits(packed, axis=1, count=vocabulary, bitorder="little").astype(bool)
            kept_nV[wide_n.to(device)] = torch.from_numpy(bits).to(device)
        return kept_nV

    def sizes(self, vocabulary: int) -> Tensor:
        """How many tokens each support holds; int64, T."""
        bitmap = -(-vocabulary // _BITS)
        sizes, wide_T = self.counts.long(), self.counts == bitmap
        packed = self.words[torch.repeat_interleave(wide_T, sizes)].view(-1, bitmap)
        sizes[wide_T] = torch.from_numpy(_ONES[packed.numpy().view(np.uint8)].sum(1))
        return sizes

    def fits(self, tokens: Sequence[int], vocabulary: int) -> bool:
        """Whether these are supports of just these tokens, each of which is in its own; for what a file holds."""
        bitmap = -(-vocabulary // _BITS)
        if self.words.dtype != torch.int32 or self.counts.dtype != torch.int32 or len(self.counts) != len(tokens):
            return False
        if len(self.counts) and not (int(self.counts.min()) >= 1 and int(self.counts.max()) <= bitmap):
            return False
        if int(self.counts.long().sum()) != len(self.words):
            return False
        ids = self.words[torch.repeat_interleave(self.counts < bitmap, self.counts.long())]
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            return False
        token_T, rows = torch.tensor(tokens, dtype=torch.int64), max(1, _AT_ONCE // vocabulary)
        parts = ((start, token_T[start : start + rows]) for start in range(0, len(tokens), rows))
        return all(
            bool(self.mask(start, start + len(part), vocabulary).gather(1, part.unsqueeze(1)).all())
            for start, part in parts
        )


def ignored(top_k: int, top_p: float) -> str:
    """In words, after "a" or a name, what a learner over the whole vocabulary would be off by."""
    size = f", up to {-math.log(top_p):.3f} nats a token" if not top_k else ""
    return f"learner over the whole vocabulary would be off by the log of the kept mass at every token{size}"


def truncated(logits_nV: Tensor, kept_nV: Tensor) -> Tensor:
    """``logits_nV`` with -inf where ``kept_nV`` is False: their log-softmax is renormalised over what was kept."""
    return logits_nV.masked_fill(~kept_nV, float("-inf"))


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
