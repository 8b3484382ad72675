"""The frozen reference in a run: its log-probs of each batch, the distance from it as a penalty, and its distributions
as what is learned from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mantissa.algorithms import KLConfig, OfTeacher, kl_loss
from mantissa.rl.experience import Scored, Weighed
from mantissa.rl.score import OfLogits, ReferencePolicy
from mantissa.rl.terms.base import Micro, Tallies, Term
from mantissa.training import Checkpoint


class Reference(Term):
    """Scores every batch; by itself it is measured only. A loss may ask for its log-probs."""

    phase = "reference_logp"

    def __init__(self, policy: ReferencePolicy) -> None:
        self.policy = policy

    def score(self, scored: Scored) -> Mapping[str, Tensor]:
        return {"ref_logp_BR": self.policy.score(scored)}

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        columns = micro.batch.columns  # a loss that cannot do without says so itself
        return {"ref_logp_BT": columns["ref_logp_BR"]} if "ref_logp_BR" in columns else {}

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self.policy.teacher is None:
            self.policy.take(weights, version)

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"reference": kept} if (kept := self.policy.kept) else {}

    @property
    def state(self) -> Mapping[str, Mapping[str, object]]:
        return {"reference": self.policy.state_dict()}

    def load(self, checkpoint: Checkpoint) -> None:
        kept = {} if self.policy.teacher is not None else checkpoint.part("reference")
        self.policy.load(checkpoint.state["reference"], kept)


class Penalty(Term):
    """``algorithm.kl`` in the loss: ``kl_loss``."""

    def __init__(self, config: KLConfig) -> None:
        self.config = config

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies]:
        batch = micro.batch
        known = (batch.column("ref_logp_BR"), batch.valid_BR, micro.weight_BR, micro.scale_BR, self.config)
        return kl_loss(micro.logp_BR, *known, micro.below_BR)


class Teacher(Term):
    """The policy's divergence from the reference after each prefix, of a loss that is of whole distributions."""

    numbers = 1

    def __init__(self, policy: ReferencePolicy, loss: OfTeacher, temperature: float) -> None:
        self.policy, self.loss, self.temperature = policy, loss, temperature

    def of_logits(self, batch: Weighed) -> OfLogits:
        logits_of = self.policy.logits(batch)

        def divergence(start: int, logits_nV: Tensor) -> Tensor:
            taught_nV = logits_of(start, start + len(logits_nV))
            return self.loss.from_teacher(logits_nV, taught_nV, self.temperature).unsqueeze(-1)

        return divergence

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        return {"divergence_BT": numbers_BRM[..., 0]}
