"""What a policy loss is: its configuration and its formula in one class, and what all of them share.

With ratio = exp(logp_theta - logp_old), advantage A and the detached correction weight w of each token, every loss here
has the same gradient at theta = old where all tokens of a sequence have one weight and one scale. The weight repairs
rollout -> old, the ratio old -> theta: two gaps, two factors, neither assumed to be 1.

Numerics. Everything is in the dtype of ``logp`` (fp32). Masked positions are replaced *before* the subtraction, so that
neither their value nor their gradient passes through ``exp``: ``0 * inf`` is NaN in a backward pass too. The log-ratio
is clamped to +-20, beyond which a token's ratio has no gradient. A valid log-prob that is not finite is not repaired
here: it shows in ``policy/nonfinite``, and in the loss, which is then not finite either, for whoever guards the step to
act on: no clamp makes a ratio of it.

Legend: B sequences, T response positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.correction import CorrectionConfig
from mantissa.algorithms.reference import KLConfig, ReferenceConfig
from mantissa.base.config import Config, Refusals
from mantissa.base.errors import MantissaError
from mantissa.precision import LOG_RATIO_BOUND, Accumulator, kl_estimate, masked_sum


class Around(Protocol):
    """What a loss may ask of the recipe's section ``algorithm`` that it stands in."""

    @property
    def advantage(self) -> str: ...
    @property
    def aggregation(self) -> str: ...
    @property
    def correction(self) -> CorrectionConfig: ...
    @property
    def reference(self) -> ReferenceConfig | None: ...
    @property
    def kl(self) -> KLConfig | None: ...


class Masked(NamedTuple):
    """A micro-batch as a loss takes it: floats of one dtype, 0 where masked; of these only ``logp_BT`` carries a
    gradient. ``advantage_BT`` may be anything where masked. ``of_terms``: what else is known of it, as it was given."""

    logp_BT: Tensor
    old_logp_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    weight_BT: Tensor
    scale_BT: Tensor
    of_terms: Mapping[str, Tensor]

    def of_term(self, name: str, otherwise: str) -> Tensor:
        """What a loss cannot do without; ``MantissaError`` with ``otherwise`` where it was not given."""
        found = self.of_terms.get(name)
        if found is None:
            raise MantissaError(otherwise)
        return found


class Loss(Config):
    """Base of every policy loss: a section of the recipe that knows its formula.

    One that is a sum over tokens is a ``TokenLoss``; another writes ``of_batch`` and ``clipped``. What it needs beside
    the batch is made by a term of the objective, which knows it by its class: ``Selecting``, ``OfTeacher``.
    """

    kind: str
    source: ClassVar[str]  # paper and section
    implies: ClassVar[Mapping[str, str]] = {}  # the aggregation, the advantage: where a recipe gives none
    of_sequences: ClassVar[bool] = False  # about whole responses: a token that is unknown makes its sequence unknown
    by_token: ClassVar[bool] = False  # whether each token may have an advantage of its own
    every_completion: ClassVar[bool] = False  # whether one whose advantage is 0 has a gradient all the same
    weighs_itself: ClassVar[bool] = False  # by the current policy over the rollout's: there is no ratio, and no clip
    verl_mode: ClassVar[str | None] = None  # verl's policy_loss.loss_mode; None: it has no such loss
    verl_keys: ClassVar[Mapping[str, str]] = {}  # of verl, by the field here that each says

    @property
    def clip_by_token(self) -> bool:
        """Whether the clip looks at each token's ratio by itself, and not at its sequence's."""
        return not self.of_sequences

    def prepare(self) -> None:
        """What is done once, before the first step: a ``MantissaError`` from here is the user's to mend."""

    def refusals(self, algorithm: Around) -> Refusals:
        """What this loss does not go with: whether it is so, and what to say then."""
        yield from ()

    def loss(
        self,
        logp_BT: Tensor,
        old_logp_BT: Tensor,
        advantage: Tensor,
        mask_BT: Tensor,
        weight_BT: Tensor,
        scale_BT: Tensor,
        **of_terms: Tensor,
    ) -> tuple[Tensor, dict[str, Accumulator]]:
        """Loss of a micro-batch, ``sum over the mask of scale * loss_of_token``, and metrics.

        ``logp_BT``: the current policy's, with gradient. ``old_logp_BT``: the policy's at the start of the update (pass
        ``logp_BT.detach()`` for a single on-policy step). ``advantage``: of tokens (BT), or one for all of a sequence's
        (B). ``weight_BT`` and ``mask_BT``: from ``correction`` (its
        ``valid_BT``). ``scale_BT``: this micro-batch's rows of ``aggregation_scale``; with it, losses and gradients add
        up to those of the whole batch, for whole sequences. ``of_terms``: what some losses need besides, and say
        (``ref_logp_BT``, ``log_z_B``, ``chosen_BT``, ``divergence_BT``); others take no notice of it.
        All floats one dtype (fp32, or float64). Only ``logp_BT``, and of terms what says so, receives a gradient.

        Metrics: the ``policy/...`` of ``mantissa.mismatch``, but for those of ``ratio_parts``; a loss without a clip
        has no ``policy/clip_fraction``.
        """
        logp, old, weight, scale = (
            torch.where(mask_BT, x, 0.0) for x in (logp_BT, old_logp_BT.detach(), weight_BT.detach(), scale_BT)
        )
        given = Masked(logp, old, of_each_token(advantage.detach(), mask_BT), mask_BT, weight, scale, of_terms)
        loss, metrics = self.of_batch(given)
        return loss, metrics | drift(logp.detach(), old, mask_BT) | {"policy/loss": Accumulator.of("sum", loss)}

    @abstractmethod
    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        """The formula: the loss of a micro-batch, and the metrics that are this loss's own."""

    @abstractmethod
    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor | None:
        """Where the loss's own bound acts on the ratio of ``logp_BT`` to ``old_logp_BT``; bool BT, False where masked.

        None: it has no clip. Floats detached, one dtype, 0 where ``mask_BT`` is False.
        """

    def ratio_parts(
        self,
        logp_BT: Tensor,
        old_logp_BT: Tensor,
        rollout_logp_BT: Tensor,
        advantage: Tensor,
        mask_BT: Tensor,
        valid_BT: Tensor,
    ) -> dict[str, Accumulator]:
        """The log-ratio of the current policy to the one that sampled, in its two parts, and the clipping by one part.

            logp_theta - logp_rollout = alpha + beta
            alpha = logp_theta - logp_old      the learner against itself: how far it has moved since it was scored
            beta  = logp_old - logp_rollout    two sets of kernels and formats, at equal weights

        ``old`` is the learner under the weights before the update, which are those that sampled; with
        ``max_policy_lag`` they are newer, and what moved meanwhile is in beta. With one update a batch alpha is 0, but
        for the order of sums in another split into micro-batches. Both are taken raw: over every response token that
        the update computed, before a clamp, a weight's truncation or rejection.

        A clip cannot tell the two apart where its ratio is to the rollout (``bypass``). A token is clipped by the
        phantom where C(alpha + beta) and not C(alpha), C being ``clipped``. With bypass these tokens are among those
        that ``policy/clip_fraction`` counts; without it none of them was cut, and the fraction says what would be.

        ``policy/alpha_...`` and ``policy/beta_...`` are in nats; ``policy/phantom_clip_fraction`` is there where there
        is a clip. Log-probs BT, one dtype (fp32, or float64), detached here. ``mask_BT``: response tokens, over which
        the parts are. ``valid_BT``: those in the loss, over which the fraction is. A token with a log-prob that is not
        finite leaves numerator and denominator, and its whole sequence those of the fraction where the clip is by
        sequence. Source of alpha, beta and the name: "Defeating the trainer-generator precision mismatch in TRL"
        (A. Dirhoussi, 2026), where alpha is taken in the rollout's format; here it is in the learner's.
        """
        logps = [x.detach() for x in (logp_BT, old_logp_BT, rollout_logp_BT)]
        finite_BT = mask_BT & torch.stack([x.isfinite() for x in logps]).all(0)
        logp, old, rollout = (torch.where(finite_BT, x, 0.0) for x in logps)
        metrics = {}
        for name, part in (("alpha", logp.double() - old.double()), ("beta", old.double() - rollout.double())):  # exact
            metrics[f"policy/{name}_mean"] = Accumulator.of("mean", part, finite_BT)
            metrics[f"policy/{name}_abs_mean"] = Accumulator.of("mean", part.abs(), finite_BT)
        known_BT = valid_BT & finite_BT
        if not self.clip_by_token:
            known_BT = known_BT & (known_BT == valid_BT).all(-1, keepdim=True)
        logp, old, rollout = (torch.where(known_BT, x, 0.0) for x in (logp, old, rollout))
        advantage_BT = of_each_token(advantage.detach(), known_BT)
        with_beta, alone = (self.clipped(logp, below, advantage_BT, known_BT) for below in (rollout, old))
        if with_beta is not None and alone is not None:
            metrics["policy/phantom_clip_fraction"] = Accumulator.of("mean", with_beta & ~alone, known_BT)
        return metrics


class TokenLoss(Loss):
    """A loss that is ``sum over the mask of scale * loss_of_token``."""

    by_token = True

    @abstractmethod
    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of each token, and where a bound took its gradient or held its weight (bool; None: no clip); BT.

        All floats BT in one dtype, 0 where ``mask_BT`` is False. A ratio exactly at a bound is not clipped.
        """

    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        advantage_BT = torch.where(given.mask_BT, given.advantage_BT, 0.0)
        losses, held = self.of_tokens(given.logp_BT, given.old_logp_BT, advantage_BT, given.weight_BT, given.mask_BT)
        metrics = {} if held is None else {"policy/clip_fraction": Accumulator.of("mean", held, given.mask_BT)}
        return masked_sum(losses * given.scale_BT, given.mask_BT), metrics

    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor | None:
        advantage_BT = torch.where(mask_BT, advantage_BT, 0.0)
        held = self.of_tokens(logp_BT, old_logp_BT, advantage_BT, mask_BT.to(logp_BT.dtype), mask_BT)[1]
        return None if held is None else held & mask_BT


class Selecting(Loss):
    """A loss that treats some tokens of each optimiser step otherwise, chosen before it: ``chosen_BT``, bool."""

    @abstractmethod
    def select(self, old_logp_BT: Tensor, advantage: Tensor, mask_BT: Tensor, draw: torch.Generator) -> Tensor:
        """Which tokens of a whole optimiser step; bool BT.

        ``old_logp_BT``: the policy's before the update. ``draw``: on the CPU, the same on every rank.
        """


class OfTeacher(Loss):
    """A loss of the reference's whole distributions; given as ``divergence_BT``, with its gradient."""

    @abstractmethod
    def from_teacher(self, logits_nV: Tensor, teacher_nV: Tensor, temperature: float) -> Tensor:
        """The divergence after each of n prefixes, from the policy's logits (with gradient) and the teacher's; n."""


AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregation_scale(
    mask_BT: Tensor, kind: AggregationKind, constant: float | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weight of each token in the loss, so that the loss is ``sum(where(mask, loss_BT * scale_BT, 0))``.

    The usual way averages each micro-batch and then the averages, which weighs a token by the company it keeps: the
    gradient changes with the micro-batch size and with the ranks. Here the aggregation is a *weight* for each token,
    computed once over the whole optimiser batch; a micro-batch's loss is the sum over its own tokens, and the sum over
    micro-batches (gradients accumulate by adding) is the loss of the batch whatever the split.

    =======================  ==========================  =====================================================
    kind                     scale of token t of seq i   meaning
    =======================  ==========================  =====================================================
    token_mean               1 / N                       every token counts the same (DAPO)
    seq_mean_token_mean      1 / (S * length_i)          every sequence counts the same (GRPO as published)
    seq_mean_token_sum_norm  1 / (S * constant)          no preference for short or long answers (Dr. GRPO)
    =======================  ==========================  =====================================================

    N: valid tokens in the batch. S: sequences with at least one valid token; others are padding rows or were dropped,
    and leave numerator and denominator alike.

    ``mask_BT``: bool, the valid tokens of the whole optimiser batch, on whatever rank (slice the result for
    micro-batches). ``constant``: tokens, the length by which ``seq_mean_token_sum_norm`` divides, usually the longest
    response allowed; no other kind takes one. Returns ``scale_BT`` in ``dtype``, 0 where the mask is False.
    Raises ``MantissaError`` where the constant is missing, superfluous or not positive.
    """
    sequences = mask_BT.any(-1).sum().clamp(min=1).double()
    if kind == "seq_mean_token_sum_norm":
        if constant is None or not 0 < constant < float("inf"):
            raise MantissaError(
                f"aggregation {kind} divides by a length in tokens: expected a positive constant, got {constant}"
            )
        divisor = sequences * constant
    elif constant is not None:
        raise MantissaError(f"aggregation {kind} takes no constant, got {constant}: leave it out")
    elif kind == "token_mean":
        divisor = mask_BT.sum().clamp(min=1).double()
    else:
        divisor = sequences * mask_BT.sum(-1, keepdim=True).clamp(min=1).double()
    return torch.where(mask_BT, 1 / divisor, 0.0).to(dtype)  # divided in float64, rounded once


def of_each_token(advantage: Tensor, mask_BT: Tensor) -> Tensor:
    """Advantages of responses (B) or of tokens (BT) as those of tokens."""
    return advantage if advantage.dim() == 2 else advantage.unsqueeze(-1).expand(mask_BT.shape)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to +-20; NaN where it is not finite: what is unknown is no ratio of exp(20)."""
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isfinite(), clamped, torch.nan).exp()


def clipped_surrogate(
    log_ratio_BT: Tensor, advantage_BT: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """``min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)``, and where the clip took the gradient (bool); BT."""
    ratio = bounded_ratio(log_ratio_BT)
    plain, clipped = (r * advantage_BT for r in (ratio, ratio.clamp(1 - clip_low, 1 + clip_high)))
    return torch.minimum(plain, clipped), (clipped < plain).detach()


def drift(logp: Tensor, old: Tensor, mask: Tensor) -> dict[str, Accumulator]:
    """How far theta is from old, in float64: within an update the log-ratio starts at rounding error.

    ``logp`` and ``old``: detached, BT, 0 where ``mask`` is False.
    """
    finite = mask & logp.isfinite() & old.isfinite()
    # Widened exactly, then replaced where not finite: those tokens are counted instead, and no metric here is NaN.
    log_ratio = torch.where(finite, logp.double() - old.double(), 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    return {
        "policy/ratio_mean": Accumulator.of("mean", ratio, finite),
        "policy/ratio_max": Accumulator.of("max", ratio, finite),
        "policy/kl_old": Accumulator.of("mean", kl_estimate(log_ratio, "k3"), finite),
        "policy/nonfinite": Accumulator.of("sum", mask & ~finite, mask),
    }


class PPOClipConfig(TokenLoss):
    """``-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` (arXiv 1707.06347, equation 7).

    Clipped where A > 0 and ratio > 1 + high, or A < 0 and ratio < 1 - low: such a token has no gradient.
    """

    kind: Literal["ppo_clip"] = Field("ppo_clip", description="Clipped ratio of the current to the old policy.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.2, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")

    source = "arXiv 1707.06347, equation 7"
    verl_mode = "vanilla"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        surrogate, held = clipped_surrogate(logp_BT - old_logp_BT, advantage_BT, self.clip_low, self.clip_high)
        return -weight_BT * surrogate, held
