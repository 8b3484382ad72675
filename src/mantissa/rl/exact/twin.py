"""The engine's share of the gap, where vLLM samples: an exact twin of it, and what that measures.

vLLM delivers V with every token, the learner has its own L. Between them lies M: the very weights that vLLM was sent,
in the rollout's format, logits and temperature, under kernels that give a token the same bits in whatever batch and at
whatever step of its decoding. So M is what the native engine with exact kernels would have delivered, bit for bit, for
these tokens. What separates M from V is vLLM's (its kernels, the order of their sums, where they round), what separates
L from M is not: the learner's format, and its fast kernels. ``mantissa.mismatch.metrics`` makes numbers of it. Exact
kernels are not to be had for everything. Then nothing is measured, and that is said; the fast ones, whose own order of
sums would be in the answer, never stand in for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.kernels import Kernels, probe, resolve, rollout_kernels
from mantissa.mismatch.metrics import engine_share
from mantissa.model import Decoder
from mantissa.precision import PrecisionPolicy
from mantissa.rl.config.run import RunConfig
from mantissa.rl.exact.plan import exact_plan
from mantissa.rl.experience import Weighed
from mantissa.rl.probes import Metrics, Probe
from mantissa.rl.score import Scorer
from mantissa.rollout import RolloutEngine
from mantissa.rollout.engine import CopyingEngine


def exact_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The rollout's precision under exact kernels, as a policy of its own: what the native engine would be given."""
    fp8 = policy.fp8 if policy.rollout == "fp8" else None
    alone = {"preset": None, "train": policy.rollout, "reference": None, "fp8": fp8, "quantized": None}
    return PrecisionPolicy(**dict(policy) | alone | {"kernels": "exact", "backend": "auto", "fallback": "error"})


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

    def facts(self, engine: RolloutEngine) -> dict[str, Any]:
        """What the run's folder keeps for the report: engine, format of both, what measures or why nothing does."""
        return {
            "engine": engine.release,
            "format": engine.format_name,
            "every": self.every,
            "measured": self.kernels is not None,
            "kernels" if self.kernels is not None else "reason": self.said,
        } | ({"evidence": self.evidence} if self.evidence else {})


def exact_twin(
    config: RunConfig, model: Decoder, device: torch.device, length: int, rows: int, ranks: Ranks
) -> ExactTwin:
    """Exact kernels for the rollout's format, proven here; or why there are none, and then nobody measures.

    ``length``, ``rows``: as in ``exact_plan``.
    """
    policy, every = config.precision, config.rollout.vllm.share_every
    if every == 0:
        return ExactTwin(None, "rollout.vllm.share_every=0", every)
    if policy.rollout == "fp8" and device.type == "cpu":
        return ExactTwin(None, "a rollout in fp8 is sent as codes, and exact kernels on a CPU hold values", every)
    if config.rollout.max_policy_lag > 0:
        return ExactTwin(None, "rollout.max_policy_lag above 0: newer weights than sampled a batch are held", every)
    plan, evidence, failed = None, "", None
    try:
        exact = resolve(exact_policy(policy), device)
        plan = exact_plan(exact, model, device, length, rows)
        evidence = probe(rollout_kernels(exact, plan), device)
    except MantissaError as error:
        failed = str(error).rpartition("; ")[0] or str(error)  # its advice is for a recipe that asks for them
    failed = ranks.first_of(failed)  # none measures where one cannot
    if failed is not None:
        return ExactTwin(None, failed, every)
    kernels = rollout_kernels(exact, ranks.broadcast(plan))
    return ExactTwin(kernels, f"{exact.rollout.kernels} kernels in {exact.rollout.name}", every, evidence)


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

    def observe(self, step: int, experience: Weighed) -> Metrics:
        """``ENGINE_METRICS`` of a batch that the engine's present weights sampled and the learner has scored."""
        kernels, version = self.twin.kernels, int(experience.version_B[0])
        if kernels is None or self.engine.copied_version != version:
            held = self.engine.copied_version
            raise RuntimeError(f"no exact kernels, or version {held} was sent last and {version} sampled")
        exact_BR = Scorer(self.engine.copies.decoder, kernels, *self._how)(experience)
        rollout_BR, learner_BR = experience.rollout_logp_BR, experience.old_logp_BR
        measured = engine_share(rollout_BR, exact_BR, learner_BR, experience.mask_BR)
        return {name: float(value) for name, value in measured.items()}
