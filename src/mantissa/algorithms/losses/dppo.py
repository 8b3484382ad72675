"""``dppo``: the clip is on how much probability moved, not on the ratio."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, bounded_ratio


class DPPOConfig(TokenLoss):
    """``-w * stopgrad(min(ratio, truncate_at)) * A * logp * M``; M drops a token that moved too far.

    arXiv 2602.04879, sections 4.2 and 5.4, the binary forms: of the distribution "this token or another", with p =
    exp(logp) and q = exp(old logp),

        tv: D = |p - q|        kl: D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    M is 0 where A > 0, p > q and D > ``clip_high``, and where A <= 0, p < q and D > ``clip_low``; else 1. A ratio of 3
    on a token of probability 1e-4 moves next to nothing and stays; one of 0.7 on a token of 0.99 moves 0.3. Published
    with the policy that sampled below the ratio: ``correction.bypass``. Thresholds are in probability (tv) or nats
    (kl). The kl is taken in float64, with 1e-8 added to 1 - q and 1 - p, where one of them may be 0.
    """

    kind: Literal["dppo"] = Field("dppo", description="Clips by how much probability moved (TV or KL), not the ratio.")
    divergence: Literal["tv", "kl"] = Field("tv", description="What is bounded: |p - q|, or the binary KL in nats.")
    clip_low: float = Field(
        0.15,
        gt=0,
        description="Largest divergence of a token with A < 0 that became rarer; 0.05 where kl is given none.",
    )
    clip_high: float = Field(
        0.15,
        gt=0,
        description="Largest divergence of a token with A > 0 that became likelier; 0.05 where kl is given none.",
    )
    truncate_at: float = Field(20.0, gt=1, allow_inf_nan=True, description="Largest ratio; .inf bounds it by exp(20).")

    source = "arXiv 2602.04879, sections 4.2 and 5.4"
    verl_keys = {  # noqa: RUF012 - never changed
        "clip_low": "actor.clip_ratio_low",
        "clip_high": "actor.clip_ratio_high",
        "truncate_at": "actor.clip_ratio_c",
    }

    @model_validator(mode="before")
    @classmethod
    def _published_thresholds(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("divergence") == "kl":
            return {"clip_low": 0.05, "clip_high": 0.05} | values
        return values

    @property
    def verl_mode(self) -> str:  # type: ignore[override]
        return f"dppo_{self.divergence}"

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = bounded_ratio(logp_BT.detach() - old_logp_BT)
        bounded = ratio.clamp(max=self.truncate_at)
        up, divergence = self._moved(logp_BT.detach().double(), old_logp_BT.double())
        good = advantage_BT > 0
        dropped = torch.where(good, up & (divergence > self.clip_high), ~up & (divergence > self.clip_low))
        kept = (~dropped).to(logp_BT.dtype)  # a factor, not a choice: NaN stays
        return -weight_BT * bounded * advantage_BT * logp_BT * kept, dropped | (ratio > bounded)

    def _moved(self, logp: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each token became likelier, and how far its binary distribution moved."""
        p, q = logp.exp(), old.exp()
        if self.divergence == "tv":
            return p > q, (p - q).abs()
        other_p, other_q = (1 - p).clamp(min=0), (1 - q).clamp(min=0)  # a log-prob may round to just above 0
        return p > q, q * (old - logp) + other_q * ((other_q + 1e-8) / (other_p + 1e-8)).log()
