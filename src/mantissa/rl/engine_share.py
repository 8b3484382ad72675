"""How much of the gap is the other engine's: the sampled tokens are scored again, by this package's exact kernels.

vLLM delivers V with every token, the learner has its own L. Between them lies M: the very weights that vLLM was sent,
in the rollout's format, logits and temperature, under kernels that give a token the same bits in whatever batch and at
whatever step of its decoding. So M is what the native engine with exact kernels would have delivered, bit for bit, for
these tokens. What separates M from V is vLLM's (its kernels, the order of their sums, where they round), what separates
L from M is not: the learner's format, and its fast kernels. ``mantissa.mismatch.metrics`` makes numbers of it.

Exact kernels are not to be had for everything. Then nothing is measured, and that is said; the fast ones, whose own
order of sums would be in the answer, never stand in for them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mantissa.kernels import Kernels
from mantissa.mismatch import engine_share
from mantissa.precision import PrecisionPolicy
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.experience import Experience
from mantissa.rl.forward import score
from mantissa.rollout import VllmEngine


def exact_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The rollout's precision under exact kernels, as a policy of its own: what the native engine would be given."""
    return dataclasses.replace(
        policy,
        train=policy.rollout,
        reference=None,
        fp8=policy.fp8 if policy.rollout == "fp8" else None,
        kernels="exact",
        backend="auto",
        fallback="error",
    )


@dataclass(frozen=True)
class ExactTwin:
    """The rollout's exact kernels; None where there are none. ``said``: what they are, or why there are none.

    ``every``: steps between measurements. ``evidence``: what the probe saw of the kernels.
    """

    kernels: Kernels | None
    said: str
    every: int
    evidence: str = ""

    @property
    def line(self) -> str:
        """One line for the screen."""
        if self.kernels is None:
            return f"engine's share of the gap: not measured, {self.said}"
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"engine's share of the gap: measured {steps} by {self.said}"

    def facts(self, engine: VllmEngine) -> dict[str, Any]:
        """What the run's folder keeps for the report: engine, format of both, what measures or why nothing does."""
        return {
            "engine": engine.release,
            "format": engine.start.format.name if engine.start.fp8 is None else f"fp8 on {engine.start.format}",
            "every": self.every,
            "measured": self.kernels is not None,
            "kernels" if self.kernels is not None else "reason": self.said,
        } | ({"evidence": self.evidence} if self.evidence else {})


class EngineShare:
    """Measures the share of one engine, whose ``copies`` must be kept by the twin's exact kernels."""

    def __init__(
        self, engine: VllmEngine, twin: ExactTwin, *, temperature: float, micro_batch_tokens: int, ranks: Ranks = ALONE
    ) -> None:
        assert twin.kernels is None or engine.copies.kernels is twin.kernels
        self.engine, self.twin, self.ranks = engine, twin, ranks
        self.temperature, self.micro_batch_tokens = temperature, micro_batch_tokens

    def due(self, step: int) -> bool:
        """Whether ``step`` is measured: the first one, and every ``every``-th after it."""
        return self.twin.kernels is not None and (step - 1) % self.twin.every == 0

    def measure(self, experience: Experience, version: int) -> dict[str, float]:
        """``ENGINE_METRICS`` of a batch that the engine's present weights sampled and the learner has scored."""
        kernels = self.twin.kernels
        if kernels is None or self.engine.copied_version != version:
            held = self.engine.copied_version
            raise RuntimeError(f"no exact kernels, or version {held} was sent last and {version} sampled")
        assert experience.old_logp_BR is not None, "score the experience first"
        exact_logp_BR = score(
            self.engine.copies.decoder,
            kernels,
            experience.sequences,
            self.temperature,
            micro_batch_tokens=self.micro_batch_tokens,
            ranks=self.ranks,
        )
        measured = engine_share(
            experience.rollout_logp_BR, exact_logp_BR, experience.old_logp_BR, experience.sequences.mask_BR
        )
        return {name: float(value) for name, value in measured.items()}
