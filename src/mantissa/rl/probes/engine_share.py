"""The engine's share of the gap, where vLLM samples.

vLLM delivers V with every token, the learner has its own L. Between them lies M: the very weights that vLLM was sent,
in the rollout's format, logits and temperature, under kernels that give a token the same bits in whatever batch and at
whatever step of its decoding. So M is what the native engine with exact kernels would have delivered, bit for bit, for
these tokens. What separates M from V is vLLM's (its kernels, the order of their sums, where they round), what separates
L from M is not: the learner's format, and its fast kernels. ``mantissa.mismatch.metrics`` makes numbers of it. Exact
kernels are not to be had for everything. Then nothing is measured, and that is said; the fast ones, whose own order of
sums would be in the answer, never stand in for them.
"""

from __future__ import annotations

from mantissa.base.ranks import ALONE, Ranks
from mantissa.mismatch.metrics import engine_share
from mantissa.rl.exact import ExactTwin
from mantissa.rl.experience import Experience
from mantissa.rl.probes.interface import Metrics, Probe
from mantissa.rl.score import Scorer
from mantissa.rollout.types import CopyingEngine


class EngineShare(Probe):
    """Measures the share of one engine, whose ``copies`` must be kept by the twin's exact kernels."""

    phase = "engine_share"

    def __init__(
        self, engine: CopyingEngine, twin: ExactTwin, temperature: float, micro_batch_tokens: int, ranks: Ranks = ALONE
    ) -> None:
        assert twin.kernels is None or engine.copies.kernels is twin.kernels
        self.engine, self.twin = engine, twin
        self._how = (temperature, micro_batch_tokens, ranks)

    def due(self, step: int) -> bool:
        """Whether ``step`` is measured: the first one, and every ``every``-th after it."""
        return self.twin.kernels is not None and (step - 1) % self.twin.every == 0

    def observe(self, step: int, experience: Experience) -> Metrics:
        """``ENGINE_METRICS`` of a batch that the engine's present weights sampled and the learner has scored."""
        kernels, version = self.twin.kernels, int(experience.version_B[0])
        if kernels is None or self.engine.copied_version != version:
            held = self.engine.copied_version
            raise RuntimeError(f"no exact kernels, or version {held} was sent last and {version} sampled")
        exact_BR = Scorer(self.engine.copies.decoder, kernels, *self._how)(experience)
        rollout_BR, learner_BR = experience.rollout_logp_BR, experience.old_logp
        measured = engine_share(rollout_BR, exact_BR, learner_BR, experience.mask_BR)
        return {name: float(value) for name, value in measured.items()}
