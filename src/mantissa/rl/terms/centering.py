"""Score centering in a run: the drift of each token (``algorithms/centering.py``), taken off the policy's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.algorithms import Accumulator, CorrectionConfig, centre
from mantissa.precision import masked_sum
from mantissa.rl.experience import Weighed
from mantissa.rl.score import OfLogits
from mantissa.rl.terms.base import Micro, Tallies, Term


class Centering(Term):
    """``sum scale * A * drift`` over the valid tokens. ``count``: most probable tokens of the sampler."""

    numbers = 2  # a token's drift, and the size of its coefficients

    def __init__(self, count: int, correction: CorrectionConfig, temperature: float) -> None:
        self.most_probable, self.correction, self.temperature = count, correction, temperature

    def of_logits(self, batch: Weighed) -> OfLogits:
        ids_NK, rollout_NK = (batch.column(name)[batch.mask_BR] for name in ("top_ids_BRK", "top_logp_BRK"))

        def drift(start: int, logits_nV: Tensor) -> Tensor:
            here = slice(start, start + len(logits_nV))
            logp_nV = torch.log_softmax(logits_nV if self.temperature == 1.0 else logits_nV / self.temperature, -1)
            logp_nK = logp_nV.gather(-1, ids_NK[here].long())
            return torch.stack(centre(logp_nK, rollout_NK[here], self.correction), -1)

        return drift

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies]:
        batch, valid_BR = micro.batch, micro.batch.valid_BR
        drift_BR, sizes_BR = numbers_BRM[..., 0], numbers_BRM[..., 1].detach()
        pulled_BR = torch.where(valid_BR, micro.scale_BR * batch.advantage_BR, 0.0).detach() * drift_BR
        return masked_sum(pulled_BR, valid_BR), {"policy/centering": Accumulator.of("mean", sizes_BR, valid_BR)}
