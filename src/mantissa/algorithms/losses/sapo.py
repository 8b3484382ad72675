"""``sapo``: a smooth gate in the clip's place."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, bounded_ratio


class SAPOConfig(TokenLoss):
    """``-w * f(ratio) * A`` with ``f(x) = 4 / tau * sigmoid(tau * (x - 1))``, tau by the sign of A.

    arXiv 2511.20347, equations 4 to 6. Its derivative is that of the ratio times ``4 p (1 - p)``, ``p = sigmoid(tau
    (ratio - 1))``: 1 at ratio 1, falling off to both sides, never cut. ``tau_positive`` where A > 0, else
    ``tau_negative``; published with tau_negative a little larger, since pushing a token down raises every other one.
    """

    kind: Literal["sapo"] = Field("sapo", description="A smooth gate on the ratio in the clip's place.")
    tau_positive: float = Field(1.0, gt=0, description="Sharpness of the gate where the advantage is positive.")
    tau_negative: float = Field(1.05, gt=0, description="The same where it is negative.")

    source = "arXiv 2511.20347, equations 4 to 6"
    implies = {"aggregation": "seq_mean_token_mean"}  # noqa: RUF012 - read by the class alone, never changed
    verl_mode = "sapo"
    verl_keys = {"tau_positive": "actor.tau_pos", "tau_negative": "actor.tau_neg"}  # noqa: RUF012 - never changed

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, None]:
        up, down = (torch.full_like(advantage_BT, tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(advantage_BT > 0, up, down)
        gate = torch.sigmoid(tau * (bounded_ratio(logp_BT - old_logp_BT) - 1)) * (4 / tau)
        return -weight_BT * gate * advantage_BT, None
