"""What top-k and top-p left out of what the learner would have said: the mass of the tokens that they kept.

    log p(v) - log p_S(v) = log p(S)

for any token v of a support S, p the learner's distribution before its update. So the mean of it is what ignoring the
supports would do to the gap: logp_learner - logp_rollout would be lower by just that, at equal weights.
"""

from __future__ import annotations

import torch

from mantissa.precision.numerics import token_logprob
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.rl.probes.interface import Metrics, Probe
from mantissa.rl.score import OnTokenLogits
from mantissa.rollout.support import Support


class KeptMass(Probe):
    """Measures it in every step that is scored, and how many tokens were kept in every step."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def look(self, experience: Experience) -> OnTokenLogits:
        self._whole_BR = torch.zeros_like(experience.rollout_logp_BR)

        def look(row_N: torch.Tensor, column_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
            token_N = experience.tokens_BT[row_N, experience.prompt_length_B[row_N] + column_N]
            self._whole_BR[row_N, column_N] = token_logprob(logits_NV, token_N, self.learner.temperature)

        return look

    def observe(self, step: int, experience: Experience) -> Metrics:
        if experience.support is None or not bool(experience.mask_BR.any()):  # a top-k of at least the vocabulary
            return {}
        sizes = Support.join(experience.support).sizes(self.learner.model.config.vocab_size)
        metrics = {"support/tokens": float(sizes.double().mean())}
        if experience.entropy_BR is not None:  # scored
            self.learner.ranks.join_rows(self._whole_BR)
            mass = (self._whole_BR.double() - experience.old_logp.double())[experience.mask_BR]
            metrics |= {"support/log_mass": float(mass.mean()), "support/log_mass_min": float(mass.min())}
        return metrics
