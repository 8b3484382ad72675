"""The promise of ``precision.kernels=exact``, checked: every sampled token's log-prob is the learner's, bit for bit.

The check compares the rollout's log-probs with those of the learner's own forward, all sampled tokens of the step, by
their bits. It fails closed: at the first step where one differs, both sides are replayed to find the operation in which
they part (``replay.py``), a file that reproduces it is written, and the run stops (``precision.on_mismatch: warn`` goes
on, and says so at every such step).

Before it stops, it may plan anew: once in a run, and only where nothing was learned from unchecked numbers, the kernels
move to the next safer way (``kernels/exact_plan.py``), and the step is sampled again with it, from the same seeds. That
is printed, counted (``exact/replans``) and kept in the checkpoints. A second difference stops the run.

Exactness also pays. The log-probs of the old policy, for which a step otherwise needs a forward of its own, are those
that the rollout delivered. With ``precision.check_every: n`` that forward is done in one step of n, as the check, and
in the others left out: what they learn from is the same, bit for bit, as long as the promise holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mantissa.errors import MantissaError
from mantissa.kernels import WAYS, ExactKernels, ExactPlan, Kernels, Way
from mantissa.precision import PrecisionPolicy
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner
from mantissa.rl.replay import Case, locate, write_case
from mantissa.rollout import NativeEngine
from mantissa.runs.directory import RunDirectory


@dataclass(frozen=True)
class Mismatch:
    """Tokens whose two log-probs differ: how many of how many, and the first, token ``token`` of response ``row``."""

    tokens: int
    checked: int
    row: int
    token: int


def compare(experience: Experience) -> Mismatch | None:
    """The rollout's and the learner's log-probs of every response token, by their bits; None where all are equal."""
    mask_BR = experience.sequences.mask_BR
    assert experience.old_logp_BR is not None, "score the experience first"
    rollout_BR, learner_BR = experience.rollout_logp_BR, experience.old_logp_BR
    different_BR = (rollout_BR.view(torch.int32) != learner_BR.view(torch.int32)) & mask_BR
    if not bool(different_BR.any()):
        return None
    row, token = different_BR.nonzero()[0].tolist()
    return Mismatch(int(different_BR.sum()), int(mask_BR.sum()), row, token)


class Exactness:
    """Checks the steps of a run. ``note`` takes a line for the screen."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        learner: Learner,
        engine: NativeEngine,
        run: RunDirectory,
        note: Callable[[str], None],
        replan: Callable[[Way], ExactPlan] | None = None,
        others: Sequence[Kernels] = (),
    ) -> None:
        self.policy, self.learner, self.engine, self.run, self.note = policy, learner, engine, run, note
        self.kernels = [k for k in (learner.kernels, engine.kernels, *others) if isinstance(k, ExactKernels)]
        self.replan = replan
        self.replans = 0

    def due(self, step: int) -> bool:
        """Whether ``step`` is checked: the first one, and every ``check_every``-th after it."""
        return (step - 1) % (self.policy.check_every or 1) == 0

    def check(self, step: int, experience: Experience) -> dict[str, float] | None:
        """Compare a scored batch; returns the step's metrics. At a difference, ``precision.on_mismatch`` decides.

        None: the kernels compute in another way from now on, and the step is to be sampled again.
        """
        found = compare(experience)
        checked = int(experience.sequences.mask_BR.sum())
        if found is not None:
            message = self._explain(step, experience, found)
            if self._may_plan_anew(step):
                way = WAYS[WAYS.index(self.kernels[0].plan.way) + 1]
                self.use(way)
                self.note(f"warning: {message}; from here on all kernels compute by {way}, and step {step} is sampled again")
                return None
            if self.policy.on_mismatch != "warn":
                again = ", also with the safer plan" if self.replans else ""
                raise MantissaError(f"{message}{again}; precision.on_mismatch=warn goes on in spite of it")
            self.note(f"warning: {message}")
        return {
            "exact/checked_tokens": checked,
            "exact/mismatched_tokens": found.tokens if found else 0,
            "exact/replans": self.replans,
        }

    def _may_plan_anew(self, step: int) -> bool:
        """Where nothing was learned from numbers that nobody compared, once, and if there is a safer way."""
        every = self.policy.check_every or 1
        allowed = self.policy.on_mismatch in (None, "replan") and not self.replans and (every == 1 or step == 1)
        return allowed and self.replan is not None and self.kernels[0].plan.way != WAYS[-1]

    def use(self, way: Way) -> None:
        """Compute by ``way`` from here on, in every role. Collective."""
        assert self.replan is not None
        plan = self.replan(way)
        for kernels in self.kernels:
            kernels.plan = plan
        self.replans += 1

    def _explain(self, step: int, experience: Experience, found: Mismatch) -> str:
        """What differs, where it begins, and the file that reproduces it."""
        assert experience.old_logp_BR is not None
        at = (found.row, found.token)
        position = int(experience.sequences.prompt_length_B[found.row]) + found.token
        what = (
            f"step {step}: exact kernels, and yet {found.tokens} of {found.checked} log-probs differ between rollout "
            f"and learner; the first is that of sequence {found.row}, response token {found.token} (position "
            f"{position}): {float(experience.rollout_logp_BR[at]):.9g} against {float(experience.old_logp_BR[at]):.9g}"
        )
        team = self.learner.team
        if team.sharded:
            return f"{what}; no rank holds whole weights to replay it with: parallel=ddp names the operation"
        case = self._case(experience, found.row)
        replayed = team.said(None if case is None else self._replayed(step, what, case))  # by the rank that sampled it
        return replayed or f"{what}; the call that sampled it is gone, so it cannot be replayed"

    def _replayed(self, step: int, what: str, case: Case) -> str:
        """``what``, with the operation in which the two sides part, and the file that reproduces it."""
        culprit = locate(self.engine, self.learner.model, self.learner.kernels, case)
        if culprit is not None:
            where = f"they part in {culprit}"
        else:
            where = (
                "replayed, every operation agrees: either the log-prob itself is taken differently, or the difference "
                "does not come back (another number of threads, faulty memory)"
            )
        path = self.run.path / f"mismatch-step-{step}.safetensors"
        write_case(
            path, case, self.learner.model.config, self.policy, self.engine, self.learner.weights, f"{what}; {where}"
        )
        return f"{what}; {where}; replay it with: mantissa replay {path}"

    def _case(self, experience: Experience, row: int) -> Case | None:
        """Both sides of one sequence: the call that sampled it, and the micro-batch that scored it."""
        sequences = experience.sequences
        prompt_length, length = int(sequences.prompt_length_B[row]), int(sequences.length_B[row])
        tokens = sequences.tokens_BT[row, :length].tolist()
        prompt, response = tuple(tokens[:prompt_length]), tuple(tokens[prompt_length:])
        rows = self.learner.scored_with(sequences, row)
        place = int((rows == row).nonzero()[0, 0])
        for call in self.engine.calls:
            owners = [request for request in call.requests for _ in range(request.samples)]
            if not any(request.prompt_tokens == prompt for request in owners):
                continue
            flat = [completion for group in self.engine.again(call) for completion in group]
            for job, (request, completion) in enumerate(zip(owners, flat, strict=True)):
                same = request.prompt_tokens == prompt and completion.tokens == response
                if same and torch.equal(completion.logp_T, experience.rollout_logp_BR[row, : len(response)].cpu()):
                    return Case(call, job, sequences.select(rows), place, self.learner.temperature)
        return None
