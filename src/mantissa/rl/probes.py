"""What observes a step between scoring and learning, and is no part of it: the interface, and probes of a few lines.

They see the lag of completions, gradients flushed to zero, the doctor's answer, which reference the step is held to,
and what top-k and top-p left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from mantissa.base.errors import MantissaError
from mantissa.doctor.diagnosis import MEASURED
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine as diagnose
from mantissa.doctor.routers import routes
from mantissa.precision import token_logprob
from mantissa.rl.config.run import RunConfig
from mantissa.rl.experience import Experience, Weighed
from mantissa.rl.learner import Learner
from mantissa.rl.score import OnTokenLogits, ReferencePolicy
from mantissa.rollout.support import Support
from mantissa.runs.directory import RunDirectory

Metrics = Mapping[str, float]
_FLUSH_EVERY = 10  # steps between measurements of flushed gradients: each costs a forward and backward of 8 completions


class Probe:
    """Observes steps; what it returns are metrics of the step's row. ``phase``: what its time is counted as."""

    phase: str | None = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is observed."""
        return True

    def look(self, experience: Experience) -> OnTokenLogits | None:
        """What is shown the logits as a batch is scored, where this observes the scoring; None where it does not."""
        return None

    def observe(self, step: int, experience: Weighed) -> Metrics:
        """Of a weighed batch, before anything is learned from it."""
        return {}

    def learned(self, step: int) -> Metrics:
        """After the step's update, due or not."""
        return {}


class SampleAgain(Exception):  # noqa: N818 - no error
    """The step is to be sampled again: the kernels compute in another way from now on."""


class Lag(Probe):
    """How old the completions are; older than ``bound`` is an error."""

    def __init__(self, learner: Learner, bound: int) -> None:
        self.learner, self.bound = learner, bound

    def observe(self, step: int, experience: Weighed) -> Metrics:
        version = self.learner.version
        lags = [version - sampled for sampled in experience.version_B.tolist()]
        wrong = next((lag for lag in lags if not 0 <= lag <= self.bound), None)
        if wrong is not None:
            raise MantissaError(
                f"a completion of policy version {version - wrong} reached the learner at version {version}: a lag of "
                f"{wrong}, expected 0 to rollout.max_policy_lag={self.bound}; the engine samples with other weights "
                "than it was told to"
            )
        return {"rollout/lag_mean": sum(lags) / len(lags), "rollout/lag_max": max(lags)}


class Flushed(Probe):
    """Now and then, the share of gradients that the learner's format flushes to zero."""

    phase = "update"

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def due(self, step: int) -> bool:
        return step % _FLUSH_EVERY == 1

    def observe(self, step: int, experience: Weighed) -> Metrics:
        fraction = self.learner.flushed(experience, step)
        return {} if fraction is None else {"precision/flushed_fraction": fraction}


class Diagnose(Probe):
    """Now and then, the doctor's answer on the step's log-probs, a row of the run's ``doctor.jsonl``."""

    def __init__(self, config: RunConfig, learner: Learner, run: RunDirectory, note: Callable[[str], None]) -> None:
        assert config.doctor is not None
        self.every, self.steps = config.doctor.every, config.steps
        self.learner, self.run, self.note = learner, run, note
        precision = config.precision
        rollout = config.rollout
        self.settings = Settings(
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            renormalised=True,
            rollout_format=precision.rollout,
            learner_format=precision.train,
            experts=routes(learner.model.config),
        )

    def due(self, step: int) -> bool:
        """The first step, every ``every``-th after it, and the last."""
        return (step - 1) % self.every == 0 or step == self.steps

    def observe(self, step: int, experience: Weighed) -> Metrics:
        if self.learner.ranks.rank0:
            formats = {name: getattr(self.settings, name) for name in ("rollout_format", "learner_format")}
            # The first healthy look in these formats is the run's own measure: from the file, so a resumed run has it.
            alike = [row for row in self.run.read_doctor() if formats.items() <= row.items()]
            own = next((row["u_rms"] for row in alike if row["basis"] in MEASURED), None)
            settings = replace(self.settings, healthy_size=own)
            found = diagnose(Dump("mantissa", self.run.path, self._sequences(experience), settings))
            fault = "" if found.fault is None else found.fault.name
            row = {"step": step, "verdict": found.verdict.value, "basis": found.basis.value, "fault": fault,
                   "headline": found.headline}  # fmt: skip
            self.run.append_doctor(row | formats | found.figures)
            if fault:
                self.note(f"warning: step {step}: the doctor says: {found.headline}")
        return {}

    def _sequences(self, experience: Weighed) -> list[Scored]:
        fields = (experience.tokens_BT, experience.prompt_length_B, experience.length_B, experience.rollout_logp_BR,
                  experience.old_logp_BR, experience.version_B, experience.group_B)  # fmt: skip
        rows = zip(*(each.detach().cpu().numpy() for each in fields), strict=True)
        return [
            Scored(tokens[:length], int(prompt), rollout[: length - prompt].astype(np.float64),
                   learner[: length - prompt].astype(np.float64), np.ones(length - prompt, dtype=bool), int(version),
                   self.learner.version, int(group))
            for tokens, prompt, length, rollout, learner, version, group in rows
        ]  # fmt: skip


class Refresh(Probe):
    """Which reference the step is held to; it follows the policy after the update."""

    def __init__(self, reference: ReferencePolicy, learner: Learner) -> None:
        self.reference, self.learner = reference, learner

    def observe(self, step: int, experience: Weighed) -> Metrics:
        return {"reference/version": self.reference.version}

    def learned(self, step: int) -> Metrics:
        self.reference.follow(self.learner.weights, self.learner.version)
        return {"reference/refreshes": self.reference.refreshes}


class KeptMass(Probe):
    """What top-k and top-p left out of what the learner would have said: the mass of the tokens that they kept.

        log p(v) - log p_S(v) = log p(S)

    for any token v of a support S, p the learner's distribution before its update. So the mean of it is what ignoring
    the supports would do to the gap: logp_learner - logp_rollout would be lower by just that, at equal weights.
    Measured in every step that is scored; how many tokens were kept, in every step.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def look(self, experience: Experience) -> OnTokenLogits:
        self._whole_BR = torch.zeros_like(experience.rollout_logp_BR)

        def look(row_N: torch.Tensor, column_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
            token_N = experience.tokens_BT[row_N, experience.prompt_length_B[row_N] + column_N]
            self._whole_BR[row_N, column_N] = token_logprob(logits_NV, token_N, self.learner.temperature)

        return look

    def observe(self, step: int, experience: Weighed) -> Metrics:
        if not experience.support or not bool(experience.mask_BR.any()):  # a top-k of at least the vocabulary
            return {}
        sizes = Support.join(experience.support).sizes(self.learner.model.config.vocab_size)
        metrics = {"support/tokens": float(sizes.double().mean())}
        if experience.by_learner:
            self.learner.ranks.join_rows(self._whole_BR)
            mass = (self._whole_BR.double() - experience.old_logp_BR.double())[experience.mask_BR]
            metrics |= {"support/log_mass": float(mass.mean()), "support/log_mass_min": float(mass.min())}
        return metrics
