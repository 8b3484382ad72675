"""Completions by columns: how they travel between ranks, and how a checkpoint holds them.

One tensor of all their tokens, one of all their log-probs, their lengths, and what an engine tells besides, flat as
well: few objects, whatever the number of completions. What is not told is not there.

Legend: B completions, N tokens of all of them, P positions of all of them but each one's last, L mixtures of experts,
K experts or most probable tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from mantissa.base.bounds import number
from mantissa.rl.experience import routes_of
from mantissa.rollout import Completion
from mantissa.rollout.engine import most_probable, supports
from mantissa.rollout.sampling import FinishReason
from mantissa.rollout.support import MostProbable, Support

_ROUTES = {"experts": torch.int16, "expert_weights": torch.float32}


@dataclass(frozen=True)
class Completions:
    """``tokens_N`` (int64), ``logp_N`` (fp32), ``length_B`` (int64), and one reason and one key for each completion.

    ``version``: the weights that sampled them. ``told``: what the engine tells besides, by name: ``experts`` and
    ``expert_weights`` (P,L,K), ``support_words`` and ``support_counts`` (``Support``'s), ``top_ids`` and ``top_logp``
    (N,K).
    """

    tokens_N: Tensor
    length_B: Tensor
    logp_N: Tensor
    finish_reasons: Sequence[str]
    version: int
    keys: Sequence[int | None]
    told: Mapping[str, Tensor]

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Completions:
        """Of completions of one version, each with its prompt's tokens."""
        routes = zip(_ROUTES, routes_of(prompts, completions), strict=True)
        told = {name: torch.cat(found) for name, found in routes if found is not None}
        if (drawn := supports(completions)) is not None:
            support = Support.join(drawn)
            told |= {"support_words": support.words, "support_counts": support.counts}
        if (tops := most_probable(completions)) is not None:
            top = MostProbable.join(tops)
            told |= {"top_ids": top.ids_TK, "top_logp": top.logp_TK}
        return Completions(
            torch.tensor([token for completion in completions for token in completion.tokens], dtype=torch.int64),
            torch.tensor([len(completion.tokens) for completion in completions]),
            torch.cat([completion.logp_T for completion in completions]),
            [completion.finish_reason for completion in completions],
            completions[0].policy_version,
            [completion.key for completion in completions],
            told,
        )

    def split(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """The inverse of ``of``: each by itself, of its prompt."""
        lengths = self.length_B.tolist()
        positions = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
        nothing: list[None] = [None] * len(lengths)
        routes = [self.told[name].split(positions) if name in self.told else nothing for name in _ROUTES]
        drawn = support.split(lengths) if (support := self._support()) is not None else nothing
        tops = top.split(lengths) if (top := self._top()) is not None else nothing
        tokens, logps = self.tokens_N.split(lengths), self.logp_N.split(lengths)
        every: Any = zip(tokens, logps, self.finish_reasons, self.keys, *routes, drawn, tops, strict=True)
        return [
            Completion(tuple(part.tolist()), logp_T.clone(), reason, self.version, key, *beside)
            for part, logp_T, reason, key, *beside in every
        ]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The columns that are tensors, by the names that a file has for them."""
        return {"tokens": self.tokens_N, "lengths": self.length_B, "logp": self.logp_N, **self.told}

    def wrong(self, prompts: Sequence[Sequence[int]], embeddings: int) -> str | None:
        """Which of what a file held cannot be, of a model of so many ``embeddings``; None where all can."""
        tokens, lengths, logp = self.tokens_N, self.length_B, self.logp_N
        if not (tokens.dtype == torch.int64 and bool(((tokens >= 0) & (tokens < embeddings)).all())):
            return "tokens"
        whole = lengths.dtype == torch.int64 and bool((lengths >= 0).all()) and int(lengths.sum()) == len(tokens)
        if not whole or len(lengths) != len(prompts):
            return "lengths"
        support, top = self._support(), self._top()
        fits = {
            "logp": logp.dtype == torch.float32 and logp.shape == tokens.shape,
            "support": support is None or support.fits(tokens.tolist(), embeddings),
            "most probable tokens": top is None or top.fits(len(tokens), embeddings),
            "finish_reasons": len(self.finish_reasons) == len(lengths)
            and set(self.finish_reasons) <= set(get_args(FinishReason)),
            "keys": len(self.keys) == len(lengths)
            and all(key is None or number(key, -(1 << 63), (1 << 63) - 1, whole=True) for key in self.keys),
        }
        positions = sum(map(len, prompts)) + int(lengths.sum()) - len(prompts)
        for name, dtype in _ROUTES.items():
            if (route := self.told.get(name)) is not None:
                fits[name] = route.dtype == dtype and route.dim() == 3 and len(route) == positions
        return next((name for name, good in fits.items() if not good), None)

    def _support(self) -> Support | None:
        told = self.told
        return Support(told["support_words"], told["support_counts"]) if "support_counts" in told else None

    def _top(self) -> MostProbable | None:
        return MostProbable(self.told["top_ids"], self.told["top_logp"]) if "top_ids" in self.told else None
