"""``reverse_kl``: on-policy distillation by the whole next-token distribution, and not by the sampled token alone."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import Around, Masked, OfTeacher
from mantissa.base.config import Refusals
from mantissa.precision import Accumulator, masked_sum


def reverse_kl(logits_nV: Tensor, teacher_nV: Tensor, temperature: float, support: int | None = None) -> Tensor:
    """``KL(policy || teacher)`` of the next token after each of n prefixes, in nats; n, never below 0.

    ``logits_nV``, ``teacher_nV``: fp32 or float64, of which the first alone receives a gradient; both are divided by
    ``temperature``. Where the policy's are -inf (a support of truncated sampling) neither side has a probability. inf
    where the teacher gives none to what the policy may say.
    ``support``: tell only the teacher's so many most probable tokens apart, and take the rest as one event:

        sum_{v in S} p_v log(p_v / t_v) + P log(P / T),     P, T: the mass outside of S

    which is the divergence of what can then be told, at most the whole one (S all of the vocabulary). Without the last
    term mass outside of S would cost nothing, and the policy would flee there.
    """
    with torch.no_grad():
        log_t = torch.log_softmax(teacher_nV.masked_fill(logits_nV == -torch.inf, -torch.inf) / temperature, -1)
    log_p = torch.log_softmax(logits_nV / temperature, -1)
    if support is not None and support < log_t.shape[-1]:
        top_nS = log_t.topk(support, -1).indices
        log_t, log_p = (_coarse(log_x, top_nS) for log_x in (log_t, log_p))
    possible = log_p > -torch.inf
    return (log_p.exp() * torch.where(possible, log_p - log_t, 0.0)).sum(-1)


def _coarse(log_nV: Tensor, top_nS: Tensor) -> Tensor:
    """The log-probs of the tokens of S and, last, of all others together (-inf where there are none)."""
    others_nV = log_nV.scatter(-1, top_nS, -torch.inf)
    none_n1 = (others_nV == -torch.inf).all(-1, keepdim=True)  # its logarithm has no gradient
    rest_n1 = torch.where(none_n1, 0.0, others_nV).logsumexp(-1, keepdim=True)
    return torch.cat([log_nV.gather(-1, top_nS), torch.where(none_n1, -torch.inf, rest_n1)], -1)


class ReverseKLConfig(OfTeacher):
    """``KL(policy || teacher)`` of the next token at each sampled prefix, by itself the loss: no advantage, no ratio.

    The prefixes are the policy's own and held fixed, so its gradient is what that of ``advantage: distillation`` is on
    average over the sampled token, without that token's noise. The teacher (``algorithm.reference``) is asked for its
    logits with each micro-batch, a part of the vocabulary's logits at a time; nothing of them is stored. Rewards are
    only logged.
    """

    kind: Literal["reverse_kl"] = Field("reverse_kl", description="KL(policy || algorithm.reference) of each token.")
    support: int | None = Field(
        None, ge=1, description="Most probable tokens of the teacher that are told apart, the rest being one; null: "
        "the whole vocabulary."
    )  # fmt: skip

    source = "arXiv 2306.08543 (reverse KL); arXiv 2306.13649 (on the policy's own samples)"
    implies = {"advantage": "distillation"}  # noqa: RUF012 - never changed
    by_token = True
    every_completion = True

    def from_teacher(self, logits_nV: Tensor, teacher_nV: Tensor, temperature: float) -> Tensor:
        return reverse_kl(logits_nV, teacher_nV, temperature, self.support)

    def refusals(self, algorithm: Around) -> Refusals:
        yield (
            algorithm.reference is None,
            "loss=reverse_kl learns from a teacher; set algorithm.reference={path: FOLDER}",
        )
        yield (
            algorithm.advantage != "distillation",
            f"loss=reverse_kl learns from the teacher alone, and advantage={algorithm.advantage} would do nothing; "
            "leave it out",
        )
        yield (
            algorithm.correction.mode != "none" or algorithm.correction.bypass,
            "loss=reverse_kl with algorithm.correction: its weights are of the sampled tokens, and this loss is of all "
            "that might follow; set correction=none, or one that only rejects",
        )
        yield (
            algorithm.kl is not None,
            "loss=reverse_kl with algorithm.kl: the same divergence twice; leave kl out",
        )

    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        missing = "reverse_kl needs the divergence from the teacher after each prefix, and got none"
        divergence_BT = torch.where(given.mask_BT, given.of_term("divergence_BT", missing), 0.0)
        seen = Accumulator.of("mean", divergence_BT, given.mask_BT & divergence_BT.isfinite())
        return masked_sum(given.scale_BT * divergence_BT, given.mask_BT), {"reference/reverse_kl": seen}

    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> None:
        return None
