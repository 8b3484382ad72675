"""Probes of a few lines: the lag of completions, gradients flushed to zero, the doctor, a reference that follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine as diagnose
from mantissa.doctor.routers import routes
from mantissa.rl.config.run import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.rl.probes.interface import Metrics, Probe
from mantissa.rl.score import ReferencePolicy
from mantissa.runs.directory import RunDirectory

_FLUSH_EVERY = 10  # steps between measurements of flushed gradients: each costs a forward and backward of 8 completions


class Lag(Probe):
    """How old the completions are; older than ``bound`` is an error."""

    def __init__(self, learner: Learner, bound: int) -> None:
        self.learner, self.bound = learner, bound

    def observe(self, step: int, experience: Experience) -> Metrics:
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

    def observe(self, step: int, experience: Experience) -> Metrics:
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

    def observe(self, step: int, experience: Experience) -> Metrics:
        if self.learner.ranks.rank0:
            found = diagnose(Dump("mantissa", self.run.path, self._sequences(experience), self.settings))
            fault = "" if found.fault is None else found.fault.name
            row = {"step": step, "verdict": found.verdict.value, "fault": fault, "headline": found.headline}
            self.run.append_doctor(row | found.figures)
            if fault:
                self.note(f"warning: step {step}: the doctor says: {found.headline}")
        return {}

    def _sequences(self, experience: Experience) -> list[Scored]:
        fields = (experience.tokens_BT, experience.prompt_length_B, experience.length_B, experience.rollout_logp_BR,
                  experience.old_logp, experience.version_B, experience.group_B)  # fmt: skip
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

    def observe(self, step: int, experience: Experience) -> Metrics:
        return {"reference/version": self.reference.version}

    def learned(self, step: int) -> Metrics:
        self.reference.follow(self.learner.weights, self.learner.version)
        return {"reference/refreshes": self.reference.refreshes}
