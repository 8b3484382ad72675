"""Other bounds of a ratio than ``ppo_clip``'s: of a token (``dapo``, ``cispo``, ``dppo``, and ``sapo``, smooth), of a
sequence (``gspo``, ``gmpo``)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.algorithms.losses.base import Around, TokenLoss, bounded_ratio, clipped_surrogate
from mantissa.base.config import Refusals
from mantissa.precision import masked_mean


def _of_whole_sequences(algorithm: Around, what: str) -> tuple[bool, str]:
    """The refusal of rejection by token where ``what`` is of all tokens of a sequence."""
    said = "for a whole sequence, and correction.reject_unit=token would take tokens out of it"
    return algorithm.correction.reject_unit == "token", (
        f"{what} {said}; reject by sequence_sum, sequence_mean or sequence_max"
    )


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


class GSPOConfig(TokenLoss):
    """``-w * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`` with s = exp(mean over tokens of log ratio).

    arXiv 2507.18071, section 4.1. Its derivative is s * mean_t d logp, so a token's loss is the sequence's term with
    the gradient through that token's own logp (GSPO-token, section 4.3, which allows each token an advantage, and so a
    weight); summed over a sequence of one scale and weight that is section 4.1. Tokens that rejection took out of the
    mask would leave the mean, and the ratio would be that of another sequence: rejection by token is refused. The clip
    is 7e-4 wide, so the mean is taken in float64.
    """

    kind: Literal["gspo"] = Field("gspo", description="Clipped ratio of whole sequences, by the token.")
    clip_low: float = Field(3e-4, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling.")
    clip_high: float = Field(4e-4, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising.")

    by_token = False
    source = "arXiv 2507.18071, sections 4.1 and 4.3"
    implies = {"aggregation": "seq_mean_token_mean"}  # noqa: RUF012 - read by the class alone, never changed
    of_sequences = True
    verl_mode = "gspo"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def refusals(self, algorithm: Around) -> Refusals:
        yield _of_whole_sequences(algorithm, "loss=gspo has one ratio")

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        difference = logp_BT.detach().double() - old_logp_BT.double()  # exact
        mean_B1 = masked_mean(difference, mask_BT, -1).unsqueeze(-1)
        # The value is the mean alone (logp less itself is 0); the gradient is this token's, and none beyond the clamp.
        log_ratio_BT = mean_B1.to(logp_BT.dtype) + (logp_BT - logp_BT.detach())
        surrogate, held = clipped_surrogate(log_ratio_BT, advantage_BT, self.clip_low, self.clip_high)
        return -weight_BT * surrogate, held


class GMPOConfig(TokenLoss):
    """``-w * A * exp(mean_t c_t)``: log-ratios c are clipped token by token, then averaged over the sequence.

    arXiv 2507.20673, equation 4. ``c_t = min(x, clip(x, -clip_low, clip_high))`` of x = log ratio where A > 0, and
    ``max`` of the two where A < 0: as in ``ppo_clip`` a bound holds only what has gone far in the advantage's own
    direction, and such a token has no gradient. The bounds are on the *logarithm*: published 0.4 to both sides.

    As in ``gspo`` a token's loss is the sequence's term with the gradient through that token's own logp, so that with
    ``seq_mean_token_mean`` and one weight a sequence the sum is the published form. The mean is taken in float64;
    rejection by token would make it another sequence's, and is refused.
    """

    kind: Literal["gmpo"] = Field("gmpo", description="Geometric mean of ratios that are clipped token by token.")
    clip_low: float = Field(0.4, gt=0, description="A log-ratio below -clip_low gains nothing by falling further.")
    clip_high: float = Field(0.4, gt=0, description="A log-ratio above clip_high gains nothing by rising further.")

    by_token = False
    source = "arXiv 2507.20673, equation 4"
    implies = {"aggregation": "seq_mean_token_mean"}  # noqa: RUF012 - read by the class alone, never changed
    of_sequences = True
    verl_mode = "geo_mean"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    @property
    def clip_by_token(self) -> bool:
        return True

    def refusals(self, algorithm: Around) -> Refusals:
        yield _of_whole_sequences(algorithm, "loss=gmpo has one mean")

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        sign = advantage_BT.sign().double()
        x = logp_BT.detach().double() - old_logp_BT.double()  # exact
        held = sign * x > sign * x.clamp(-self.clip_low, self.clip_high)
        clipped = torch.where(held, x.clamp(-self.clip_low, self.clip_high), x)
        known = torch.where(x.isfinite(), clipped, torch.nan)  # no clip makes a number of what is unknown
        mean_B1 = masked_mean(known, mask_BT, -1).unsqueeze(-1)
        # The value is the mean alone (logp less itself is 0); the gradient is this token's, none where it is held.
        through = torch.where(held, torch.zeros_like(logp_BT), logp_BT - logp_BT.detach())
        return -weight_BT * bounded_ratio(mean_B1.to(logp_BT.dtype) + through) * advantage_BT, held


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


class CISPOConfig(TokenLoss):
    """``-w * stopgrad(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logp``: every token keeps its gradient.

    arXiv 2506.13585, section 3.1, which uses no lower bound: ``clip_low`` 1 is that, for a ratio is above 0. verl
    bounds to both sides, at 0.2 where nothing is said. Clipped where the ratio is outside of the bounds, whatever A:
    that bounds the weight of a token and never takes its gradient.
    """

    kind: Literal["cispo"] = Field("cispo", description="Policy gradient, weighted by the ratio bounded from above.")
    clip_low: float = Field(1.0, gt=0, le=1, description="1 - clip_low is the smallest weight; 1 bounds nothing.")
    clip_high: float = Field(0.28, gt=0, description="1 + clip_high is the largest weight.")

    source = "arXiv 2506.13585, section 3.1"
    verl_mode = "cispo"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = bounded_ratio(logp_BT.detach() - old_logp_BT)
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_BT * bounded * advantage_BT * logp_BT, (ratio < bounded) | (ratio > bounded)
