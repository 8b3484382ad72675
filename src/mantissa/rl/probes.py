"""What observes a step between scoring and learning, and is no part of it: the interface, and the probes.

They see the lag of completions, gradients flushed to zero, the doctor's answer, which reference the step is held to,
what top-k and top-p left out, the engine's share of the gap, and whether exact kernels keep their promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.doctor import dump
from mantissa.doctor.diagnosis import MEASURED
from mantissa.doctor.dump import routes
from mantissa.doctor.examine import examine as diagnose
from mantissa.kernels import WAYS, ExactPlan, Planned, Way
from mantissa.mismatch.metrics import engine_share
from mantissa.model import Decoder
from mantissa.precision import token_logprob
from mantissa.rl.assemble import ExactTwin
from mantissa.rl.batch import Sampler
from mantissa.rl.config.run import RunConfig
from mantissa.rl.experience import Experience, Scored, Weighed
from mantissa.rl.learner import Learner
from mantissa.rl.replay import Case, examine, unequal, write_case
from mantissa.rl.score import OnTokenLogits, ReferencePolicy, Scorer
from mantissa.rollout import Call, NativeEngine, Request
from mantissa.rollout.engine import CopyingEngine, drawn_otherwise
from mantissa.rollout.sampling import uniforms
from mantissa.rollout.support import Support
from mantissa.rollout.transformers import PolicyEngine
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

    def __init__(
        self, config: RunConfig, every: int, learner: Learner, run: RunDirectory, note: Callable[[str], None]
    ) -> None:
        self.every, self.steps = every, config.steps
        self.learner, self.run, self.note = learner, run, note
        precision = config.precision
        rollout = config.rollout
        self.settings = dump.Settings(
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
            alike = [row for row in self.run.doctor.read() if formats.items() <= row.items()]
            own = next((row["u_rms"] for row in alike if row["basis"] in MEASURED), None)
            settings = replace(self.settings, healthy_size=own)
            found = diagnose(dump.Dump("mantissa", self.run.path, self._sequences(experience), settings))
            fault = "" if found.fault is None else found.fault.name
            row = {"step": step, "verdict": found.verdict.value, "basis": found.basis.value, "fault": fault,
                   "headline": found.headline}  # fmt: skip
            self.run.doctor.append(row | formats | found.figures)
            if fault:
                self.note(f"warning: step {step}: the doctor says: {found.headline}")
        return {}

    def _sequences(self, experience: Weighed) -> list[dump.Scored]:
        fields = (experience.tokens_BT, experience.prompt_length_B, experience.length_B, experience.rollout_logp_BR,
                  experience.old_logp_BR, experience.version_B, experience.group_B)  # fmt: skip
        rows = zip(*(each.detach().cpu().numpy() for each in fields), strict=True)
        return [
            dump.Scored(tokens[:length], int(prompt), rollout[: length - prompt].astype(np.float64),
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


class EngineShare(Probe):
    """The engine's share of the gap, where vLLM samples; its ``copies`` must be kept by the twin's exact kernels.

    vLLM delivers V with every token, the learner has its own L. Between them lies M: the very weights that vLLM was
    sent, in the rollout's format, logits and temperature, under kernels that give a token the same bits in whatever
    batch and at whatever step of its decoding. So M is what the native engine with exact kernels would have
    delivered, bit for bit, for these tokens. What separates M from V is vLLM's (its kernels, the order of their
    sums, where they round), what separates L from M is not: the learner's format, and its fast kernels.
    ``mantissa.mismatch.metrics`` makes numbers of it. Exact kernels are not to be had for everything. Then nothing
    is measured, and that is said; the fast ones, whose own order of sums would be in the answer, never stand in for
    them.
    """

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


@dataclass(frozen=True)
class Mismatch:
    """Tokens whose two log-probs differ: how many of how many, and the first, token ``token`` of response ``row``."""

    tokens: int
    checked: int
    row: int
    token: int


def bitwise_mismatch(experience: Scored) -> Mismatch | None:
    """The rollout's and the learner's log-probs of every response token, by their bits; None where all are equal."""
    mask_BR, rollout_BR, learner_BR = experience.mask_BR, experience.rollout_logp_BR, experience.old_logp_BR
    different_BR = unequal(rollout_BR, learner_BR) & mask_BR
    if not bool(different_BR.any()):
        return None
    row, token = different_BR.nonzero()[0].tolist()
    return Mismatch(int(different_BR.sum()), int(mask_BR.sum()), row, token)


class Exactness(Probe):
    """The promise of ``precision.kernels=exact``: every sampled token's log-prob is the learner's, bit for bit.

    The check compares the rollout's log-probs with those of the learner's own forward, all sampled tokens of the
    step, by their bits, and each token with the one that its uniform selects from the learner's distribution. It
    fails closed: at the first step where one differs, both sides are replayed to find the operation in which they
    part (``rl/replay.py``), a file that holds both is written, and the run stops (``precision.on_mismatch: warn``
    goes on, and says so at every such step).

    Before it stops, it may plan anew: once in a run, and only where nothing was learned from unchecked numbers, the
    kernels move to the next safer way (``kernels/exact/plan.py``), and the step is sampled again with it, from the
    same seeds. That is printed, counted (``exact/replans``) and kept in the checkpoints. A second difference stops
    the run.

    Exactness also pays. The log-probs of the old policy, for which a step otherwise needs a forward of its own, are
    those that the rollout delivered. With ``precision.check_every: n`` that forward is done in one step of n and in
    the last, as the check, and in the others left out: what they learn from is the same, bit for bit, as long as
    the promise holds. Every step, checked or not, compares what costs nothing: the first update's own forward is
    one under the weights that sampled, so each log-prob it gives (of the completions that carry a gradient) is the
    old policy's.

    ``replan``: makes another plan, where there is one; collective. ``folder``: takes the files of what differs,
    ``note`` a line for the screen.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        sampler: Sampler,
        reference: ReferencePolicy | None,
        replan: Callable[[Way], ExactPlan | None] | None,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        assert isinstance(sampler.engine, NativeEngine | PolicyEngine)
        self.precision = config.precision.of_layers(learner.model.config.num_hidden_layers)
        self.steps, self.folder, self.note = config.steps, folder, note
        self.params = sampler.params_of(config.rollout)
        self.learner, self.engine, self.replan = learner, sampler.engine, replan
        others = [] if reference is None else [reference.kernels]
        self.kernels: list[Planned] = []
        if isinstance(self.engine, NativeEngine):
            every = (self.learner.kernels, self.engine.kernels, *others)
            self.kernels = [kernels for kernels in every if isinstance(kernels, Planned)]
            self.engine.keeps_calls = True
        self.replans = 0
        self.unlike: int | None = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is checked: the first one, every ``check_every``-th after it, and the last."""
        return (step - 1) % (self.precision.check_every or 1) == 0 or step == self.steps

    def observe(self, step: int, experience: Scored) -> Metrics:
        """Compare a scored batch. At a difference, ``precision.on_mismatch`` decides; it may raise ``SampleAgain``."""
        found = bitwise_mismatch(experience)
        if found is not None:
            message = self._mismatch(step, experience, found)
            if self._may_plan_anew(step):
                self.use(WAYS[WAYS.index(self.kernels[0].plan.way) + 1])
                way = self.kernels[0].plan.way
                self.note(f"warning: {message}; all kernels compute by {way} from here on, step {step} again")
                raise SampleAgain
            self._decide(message + (", also with the safer plan" if self.replans else ""))
        misdrawn, message = self._misdrawn(step, experience)
        if misdrawn:
            self._decide(message)
        return {
            "exact/checked_tokens": int(experience.mask_BR.sum()),
            "exact/mismatched_tokens": found.tokens if found else 0,
            "exact/misdrawn_tokens": misdrawn,
            "exact/replans": self.replans,
        }

    def _may_plan_anew(self, step: int) -> bool:
        """Where nothing was learned from numbers that nobody compared, once, and if there is a safer way."""
        every = self.precision.check_every or 1
        allowed = self.precision.on_mismatch in (None, "replan") and not self.replans and (every == 1 or step == 1)
        return allowed and self.replan is not None and self.kernels[0].plan.way != WAYS[-1]

    def use(self, fastest: Way) -> None:
        """Compute by ``fastest`` or safer ways from here on, in every role. Collective."""
        assert self.replan is not None
        plan = self.replan(fastest)
        assert plan is not None
        for kernels in self.kernels:
            kernels.plan = plan
        self.replans += 1

    def look(self, experience: Experience) -> OnTokenLogits:
        """What watches the scoring of a batch for tokens that the learner's law does not draw with their uniforms."""
        key_B = experience.column("key_B")  # a native engine draws
        params = replace(self.params, max_tokens=1)
        self._misdrawn_BR = torch.zeros_like(experience.mask_BR, dtype=torch.int32)

        def look(row_N: Tensor, column_N: Tensor, logits_NV: Tensor) -> None:
            token_N = experience.tokens_BT[row_N, experience.prompt_length_B[row_N] + column_N]
            otherwise_N = drawn_otherwise(logits_NV, token_N, params, uniforms(key_B[row_N], column_N))
            self._misdrawn_BR[row_N, column_N] = otherwise_N.to(torch.int32)

        return look

    def _misdrawn(self, step: int, experience: Scored) -> tuple[int, str]:
        """How many tokens were drawn from another law than the learner's, and what to say of the first."""
        self.learner.ranks.join_rows(self._misdrawn_BR)
        count = int(self._misdrawn_BR.sum())
        if not count:
            return 0, ""
        row, token = self._misdrawn_BR.nonzero()[0].tolist()
        what = (
            f"step {step}: {count} of {int(experience.mask_BR.sum())} tokens are not those that their "
            f"uniforms select from the learner's distribution; the first is response token {token} of sequence {row}"
        )
        return count, self._explain(step, experience, what, row)

    def verify(self, step: int, experience: Scored, seen_BR: Tensor) -> None:
        """Compare the log-probs of the first update's own forward with the old policy's: the weights are still its own.

        In a step that was not checked those are the rollout's.
        """
        ranks = self.learner.ranks
        different_BR = unequal(seen_BR, experience.old_logp_BR) & experience.mask_BR
        self.unlike = int(ranks.sum_of(int(different_BR.sum())))
        if not self.unlike:
            return
        found = [place.tolist() for place in different_BR.nonzero()[:1]]
        row, token = next(places[0] for places in ranks.gather(found) if places)
        scored = experience.with_learner(self.learner.score(experience)[0])
        again = bitwise_mismatch(scored)
        what = (
            f"step {step}: the update's own forward, before any weight changed, gives {self.unlike} log-probs that are "
            f"not the old policy's; the first is that of sequence {row}, response token {token}"
        )
        if again is None:  # scoring is as the rollout: so the update computes otherwise
            what += ". Scoring gives the rollout's: the update's forward has other kernels"
        else:
            what += f". Scoring differs from the rollout in {again.tokens} of {again.checked} too"
        self._decide(self._explain(step, scored, what, row if again is None else again.row))

    def learned(self, step: int) -> Metrics:
        """What the update's own forward showed; nothing where it made none."""
        unlike, self.unlike = self.unlike, None
        return {} if unlike is None else {"exact/update_mismatched_tokens": unlike}

    def _decide(self, message: str) -> None:
        """``precision.on_mismatch``."""
        if self.precision.on_mismatch != "warn":
            raise MantissaError(message + "; precision.on_mismatch=warn goes on in spite of it")
        self.note(f"warning: {message}")

    def _mismatch(self, step: int, experience: Scored, found: Mismatch) -> str:
        """What differs, where it begins, and the file that holds it."""
        at = (found.row, found.token)
        position = int(experience.prompt_length_B[found.row]) + found.token
        what = (
            f"step {step}: exact kernels, and yet {found.tokens} of {found.checked} log-probs differ between rollout "
            f"and learner; the first is that of sequence {found.row}, response token {found.token} (position "
            f"{position}): {float(experience.rollout_logp_BR[at]):.9g} against {float(experience.old_logp_BR[at]):.9g}"
        )
        return self._explain(step, experience, what, found.row)

    def _explain(self, step: int, experience: Scored, what: str, row: int) -> str:
        """``what``, with what a replay of sequence ``row`` shows, and the file that holds both sides of it.

        The rank that sampled it replays it; where no rank holds whole weights, the first one writes the file alone.
        """
        ranks, learner = self.learner.ranks, self.learner
        if not isinstance(self.engine, NativeEngine):  # whose calls are kept, and whose steps can be traced
            return what
        assert isinstance(learner.model, Decoder)
        case = self._case(experience, row)
        owners = ranks.gather(case.key is not None)
        actor = owners.index(True) if any(owners) and not ranks.sharded else 0
        weights: Any = learner.weights
        if ranks.sharded:
            weights, cases = ranks.whole(learner.weights), ranks.gather(case)
            case = cases[owners.index(True) if any(owners) else 0]
        said = None
        if ranks.rank == actor:
            if ranks.sharded:
                what += "; no rank holds whole weights to replay it with here"
            else:
                found = examine(self.engine, learner.model, learner.kernels, case)
                seen = () if found.reproduced else ("not reproduced", *found.lines(case))
                what = "; ".join((what, *seen, str(found)))
            path = self.folder / f"mismatch-step-{step}.safetensors"
            write_case(path, case, learner.model.config, self.precision, self.engine, weights, what)
            said = f"{what}; replay it with: mantissa replay {path}"
        return ranks.first_of(said) or what

    def _case(self, experience: Scored, row: int) -> Case:
        """Both sides of one sequence: the call that sampled it, and the micro-batch that scored it.

        Where no call of this rank sampled it, its key is None, and in place of the call stand its tokens alone.
        """
        prompt_length, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        tokens = experience.tokens_BT[row, :length].tolist()
        prompt, response = tuple(tokens[:prompt_length]), tuple(tokens[prompt_length:])
        rows = experience.part_with(row, self.learner.config.micro_batch_tokens, self.learner.ranks)
        key = int(experience.column("key_B")[row])
        params = replace(self.params, max_tokens=len(response))
        call, job, found = Call((Request(prompt, 0),), params, (response,)), 0, None
        assert isinstance(self.engine, NativeEngine)
        for known in self.engine.calls:
            for number, (other, answer) in enumerate(zip(known.keys, known.tokens, strict=True)):
                if (other, answer) == (key, response):
                    call, job, found = known, number, key
        count = len(response)
        place = int((rows == row).nonzero()[0, 0])
        logp = experience.rollout_logp_BR[row, :count].cpu(), experience.old_logp_BR[row, :count].detach().cpu()
        return Case(call, job, experience.select(rows), place, self.learner.temperature, *logp, found)
