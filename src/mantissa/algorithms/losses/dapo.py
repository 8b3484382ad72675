"""``dapo``: clip-higher, dual clip, a mean over all tokens."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import Around, TokenLoss, clipped_surrogate
from mantissa.base.config import Refusals


class DAPOConfig(TokenLoss):
    """``ppo_clip`` with clip-higher; for A < 0 at most ``w * c * |A|`` (dual clip, arXiv 1912.09729).

    arXiv 2503.14476, section 3. It is its aggregation too, ``token_mean``; published with ``grpo`` advantages. Clipped
    as ``ppo_clip``, and where A < 0 and ratio > ``dual_clip``.
    """

    kind: Literal["dapo"] = Field("dapo", description="Clip-higher, dual clip, a mean over all tokens.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.28, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")
    dual_clip: float = Field(
        10.0, gt=1, allow_inf_nan=True,
        description="Where A < 0, a ratio above this has no gradient; .inf leaves only that of exp(20).",
    )  # fmt: skip

    source = "arXiv 2503.14476, section 3; dual clip: 1912.09729"
    verl_mode = "vanilla"
    verl_keys = {  # noqa: RUF012 - never changed
        "clip_low": "actor.clip_ratio_low",
        "clip_high": "actor.clip_ratio_high",
        "dual_clip": "actor.clip_ratio_c",
    }

    def refusals(self, algorithm: Around) -> Refusals:
        yield (
            algorithm.aggregation != "token_mean",
            f"loss=dapo is a mean over all tokens, got aggregation={algorithm.aggregation}; use token_mean, or "
            "loss=ppo_clip with clip_high=0.28 for its clip alone",
        )

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        surrogate, held = clipped_surrogate(logp_BT - old_logp_BT, advantage_BT, self.clip_low, self.clip_high)
        most = min(self.dual_clip, torch.finfo(logp_BT.dtype).max)
        floor = torch.where(advantage_BT < 0, advantage_BT, 0.0) * most  # for A < 0 at most c * |A|
        capped = (advantage_BT < 0) & (surrogate < floor).detach()
        return -weight_BT * torch.where(capped, floor, surrogate), held | capped
