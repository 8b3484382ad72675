"""The promise of ``precision.kernels=exact``: every sampled token's log-prob is the learner's, bit for bit.

The check compares the rollout's log-probs with those of the learner's own forward, all sampled tokens of the step, by
their bits, and each token with the one that its uniform selects from the learner's distribution. It fails closed: at
the first step where one differs, both sides are replayed to find the operation in which they part (``replay.py``), a
file that holds both is written, and the run stops (``precision.on_mismatch: warn`` goes on, and says so at every such
step).

Before it stops, it may plan anew: once in a run, and only where nothing was learned from unchecked numbers, the kernels
move to the next safer way (``kernels/exact/plan.py``), and the step is sampled again with it, from the same seeds. That
is printed, counted (``exact/replans``) and kept in the checkpoints. A second difference stops the run.

Exactness also pays. The log-probs of the old policy, for which a step otherwise needs a forward of its own, are those
that the rollout delivered. With ``precision.check_every: n`` that forward is done in one step of n and in the last, as
the check, and in the others left out: what they learn from is the same, bit for bit, as long as the promise holds.
Every step, checked or not, compares what costs nothing: the first update's own forward is one under the weights that
sampled, so each log-prob it gives (of the completions that carry a gradient) is the old policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import WAYS, ExactPlan, Planned, Way
from mantissa.model import Decoder
from mantissa.rl.collect.batch import Sampler
from mantissa.rl.config.run import RunConfig
from mantissa.rl.exact.replay import Case, examine, unequal, write_case
from mantissa.rl.experience import Experience, Scored
from mantissa.rl.learner import Learner
from mantissa.rl.probes import Metrics, Probe, SampleAgain
from mantissa.rl.score import OnTokenLogits, ReferencePolicy
from mantissa.rollout import Call, NativeEngine, Request
from mantissa.rollout.engine import drawn_otherwise
from mantissa.rollout.sampling import uniforms
from mantissa.rollout.transformers import PolicyEngine


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
    """Checks the steps of a run. ``replan``: makes another plan, where there is one; collective. ``folder``: takes the
    files of what differs, ``note`` a line for the screen."""

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
