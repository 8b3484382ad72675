"""The doctor beside a training that is running, in any framework: batches in, a verdict out, and whether to stop.

    gate = Gate(every=25, on_fault="stop")
    found = gate.check(step, prompts, responses, mask, rollout_logps, learner_logps, temperature=1.0)
    if gate.stop:
        ...

Due are the first batches (of a run, and of a resumed one), those after ``after_sync``, and those of every ``every``-th
step. One batch is often too few to tell, so a due gate gathers them until it has ``sequences`` (and, for 64 of those,
twelve prompts). Where all of them were sampled by weights older than those of the last healthy verdict, that one's
sequences stand beside them: a gap that age makes is seen by comparison. It never raises: what it cannot read is said,
and the training goes on.

The first healthy look is the job's own measure: from then on up to three times its size of u is usual, in place of what
the formats' table allows, which is the noise of all models and engines in them. A layer that arrives corrupted may
multiply a gap by twenty and stay below that. A look beyond the table, which chance or single tokens may have made, is
never that measure. ``state_dict`` is it, for a resumed job to be held to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.doctor.diagnosis import MEASURED, Basis, Diagnosis, Verdict
from mantissa.doctor.dump import Dump, Scored, Settings

Table = Any  # B rows of R numbers: a tensor, an array or lists
Versions = int | Sequence[int | None] | None
_PROMPTS = 3 / 16  # of ``sequences``: 12 of 64; with 8, no p is small enough, for whole prompts are what is independent
_UNREADABLE = (MantissaError, ValueError, TypeError, IndexError, RuntimeError, AttributeError)


def _warned(line: str) -> None:
    warnings.warn(line, stacklevel=3)


class Gate:
    """``every``: steps between two diagnoses. ``on_fault``: ``warn`` says it, ``stop`` also sets ``stop``.

    ``sequences``: how many are gathered for one diagnosis. ``say``: gets each line (a warning unless given).
    ``last``: the newest diagnosis. A gap that is too large and has no name ("not known") counts as a fault;
    a habit of rounding (logits in a half) within the usual size of the formats is said, and stops nothing.
    """

    def __init__(
        self, every: int = 25, on_fault: Literal["warn", "stop"] = "warn", *, sequences: int = 64,
        framework: str = "plain", say: Callable[[str], None] = _warned,
    ) -> None:  # fmt: skip
        if every < 1 or sequences < 8 or on_fault not in ("warn", "stop"):
            raise MantissaError(
                f"Gate(every={every}, on_fault={on_fault!r}, sequences={sequences}): expected every of 1 or more, "
                'on_fault "warn" or "stop", sequences of 8 or more'
            )
        self.every, self.on_fault, self.sequences, self.framework, self.say = every, on_fault, sequences, framework, say
        self.stop, self.last = False, None  # type: bool, Diagnosis | None
        self._due, self._at, self._said = True, -1, False
        self._own: dict[Settings, float] = {}  # size of u at the first healthy look, in each pair of formats
        self._kept: list[Scored] = []
        self._healthy: list[Scored] = []  # of the last healthy verdict
        self._dump: Dump | None = None  # what ``last`` is about

    def after_sync(self) -> None:
        """Weights were sent, or a run was resumed: look at the next batches."""
        self._due = True

    def state_dict(self) -> dict[str, Any]:
        """The job's own measure, as JSON has it, to be kept with its checkpoint."""
        return {"healthy": [asdict(settings) | {"size_of_u": size} for settings, size in self._own.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a measure that ``state_dict`` gave, of the job that this one resumes.

        ``MantissaError`` where ``state`` is none; the gate is then as it was.
        """
        rows = state.get("healthy") if isinstance(state, Mapping) else None
        try:
            found = [_measure(row) for row in rows]  # type: ignore[union-attr]
        except _UNREADABLE as error:
            raise MantissaError(f"a gate's measure: expected what state_dict() gives, got {str(state)[:80]}") from error
        self._own |= dict(found)

    def due(self, step: int) -> bool:
        """Whether ``check`` would look at a batch of this step."""
        return self._due or (step % self.every == 0 and step != self._at)

    def check(
        self, step: int, prompts: Sequence[Sequence[int]], responses: Table, mask: Table, rollout: Table,
        learner: Table, *, temperature: float | None = None, rollout_format: str | None = None,
        learner_format: str | None = None, rollout_version: Versions = None, learner_version: int | None = None,
        experts: bool | None = None, soft_cap: bool | None = None,
    ) -> Diagnosis | None:  # fmt: skip
        """Look at one batch: B prompts' token ids, and B,R tables of response ids, mask (1 where the policy sampled),
        both sides' log-probs in nats. None where the gate is not due, or has gathered too few.

        Rows of one prompt are a group; without prompts (empty lists) there is none. ``rollout_version``: of the weights
        that sampled, one number or one a row; ``learner_version``: of those that scored; where they are known.
        ``experts``: whether the policy is a mixture of experts; ``soft_cap``: whether it caps its logits.
        """
        if not self.due(step):
            return None
        try:
            versions = rollout_version, learner_version
            self._kept += _rows(prompts, responses, mask, rollout, learner, versions, step)
        except _UNREADABLE as error:
            self._due, self._at = False, step
            if not self._said:
                self._said = True
                self.say(f"mantissa doctor: this batch cannot be read ({error}); the training goes on")
            return None
        self._due = True  # until there are enough
        groups = {each.group for each in self._kept}
        if len(self._kept) < self.sequences or (None not in groups and len(groups) < _PROMPTS * self.sequences):
            return None
        settings = Settings(temperature, rollout_format=rollout_format, learner_format=learner_format, experts=experts)
        settings = replace(settings, soft_cap=soft_cap)
        kept, self._kept, self._due, self._at = self._kept, [], False, step
        return self._answer(step, kept, settings)

    def _answer(self, step: int, kept: list[Scored], settings: Settings) -> Diagnosis | None:
        from mantissa.doctor.examine import examine, remedies_for
        from mantissa.doctor.facts import usual_of

        own = replace(settings, healthy_size=self._own.get(settings))
        dump = Dump(self.framework, Path(f"step {step}"), [*self._fresher(kept), *kept], own)
        try:
            found = _of_dense(examine(dump), own)
        except _UNREADABLE as error:
            self.say(f"mantissa doctor: step {step}: no verdict ({error}); the training goes on")
            return None
        self.last, self._dump = found, dump
        if found.verdict is not Verdict.UNKNOWN and not self.wrong(found):
            self._healthy = kept
            if found.basis in MEASURED and found.figures["u_rms"] <= usual_of(settings).bound:
                self._own.setdefault(settings, float(found.figures["u_rms"]))
        if found.verdict in (Verdict.FAULT, Verdict.LARGE):
            known = [(do, f" ({', '.join(keys)})" if keys else "") for do, keys in remedies_for(found)[:2]]
            advice = "; ".join(do + keys for do, keys in known)
            self.stop = self.stop or (self.on_fault == "stop" and self.wrong(found))
            self.say(f"mantissa doctor: step {step}: {found.headline}. What helps: {advice}")
        return found

    def wrong(self, found: Diagnosis) -> bool:
        """Whether a diagnosis of this gate's is one to stop for: a fault, or a gap that is too large; not a habit of
        rounding whose gap is within the usual size of its formats."""
        from mantissa.doctor.facts import part, usual_of

        if found.verdict is not Verdict.FAULT:
            return found.verdict is Verdict.LARGE
        habits = all(part(each.name).rounding for each in (found.fault, found.second) if each is not None)
        bound = usual_of(self._dump.settings if self._dump is not None else Settings()).bound
        return not (habits and found.figures["u_rms"] <= bound)

    def _fresher(self, kept: Sequence[Scored]) -> list[Scored]:
        """The last healthy sequences, where every one of ``kept`` is of weights older than theirs."""
        ages, others = ({_age(each) for each in rows} for rows in (kept, self._healthy))
        known = [{age for age in found if age is not None} for found in (ages, others)]
        if None in ages | others or not all(known) or min(known[0]) <= max(known[1]):
            return []
        return self._healthy[: len(kept)]

    def write_page(self, folder: Path) -> Path:
        """The page of the newest diagnosis (``last``), and its row: ``doctor.html``, ``doctor.json`` in ``folder``."""
        from mantissa.doctor.page import write_page

        if self.last is None or self._dump is None:
            raise MantissaError("the gate has no diagnosis yet: check() gives None until it has gathered enough")
        return write_page(self._dump, self.last, folder)


def _of_dense(found: Diagnosis, settings: Settings) -> Diagnosis:
    """Where single tokens make a gap beyond the bound of a policy that has no routers to send them elsewhere, no cause
    is known that is none of a fault."""
    from mantissa.doctor import words
    from mantissa.doctor.facts import usual_of

    size, bound = found.figures["u_rms"], usual_of(settings).bound
    if settings.experts is not False or found.verdict is not Verdict.HEALTHY or size <= bound:
        return found
    why = words.alone(size, bound)
    return replace(
        found, verdict=Verdict.UNKNOWN, basis=Basis.FLIGHTS, headline=why.headline, why=why.short,
        remedies=("look_at_tokens",),
    )  # fmt: skip


def _measure(row: Mapping[str, Any]) -> tuple[Settings, float]:
    """One row of ``Gate.state_dict``; some error of ``_UNREADABLE`` for what is none."""
    settings, size = {name: value for name, value in row.items() if name != "size_of_u"}, row.get("size_of_u")
    if not isinstance(size, float) or not 0 <= size < np.inf:
        raise ValueError(f"size_of_u={size}")
    made = Settings(**settings)
    hash(made)  # a list is no setting
    return made, size


def _age(each: Scored) -> int | None:
    """Updates between the weights that sampled and those that scored."""
    known = each.rollout_version is not None and each.learner_version is not None
    return each.learner_version - each.rollout_version if known else None  # type: ignore[operator]


def _rows(
    prompts: Sequence[Sequence[int]], responses: Table, mask: Table, rollout: Table, learner: Table,
    versions: tuple[Versions, int | None], step: int,
) -> list[Scored]:  # fmt: skip
    ids, real, x, y = (_array(each) for each in (responses, mask, rollout, learner))
    if not ids.shape == real.shape == x.shape == y.shape or ids.ndim != 2 or len(prompts) != len(ids):
        raise MantissaError(
            f"expected tables of one shape B,R and B prompts; got responses {ids.shape}, mask {real.shape}, rollout "
            f"{x.shape}, learner {y.shape} and {len(prompts)} prompts"
        )
    numbers = {key: place for place, key in enumerate(dict.fromkeys(tuple(map(int, p)) for p in prompts))}
    found = []
    sampled = versions[0] if isinstance(versions[0], Sequence) else [versions[0]] * len(ids)
    for prompt, tokens, row, a, b, version in zip(prompts, ids, real.astype(bool), x, y, sampled, strict=True):
        length = int(np.flatnonzero(row).max(initial=-1)) + 1
        if length:
            whole = np.array([*prompt, *tokens[:length]], dtype=np.int64)
            sides = [np.where(np.isfinite(side[:length]), side[:length], np.nan) for side in (a, b)]
            place = numbers[tuple(map(int, prompt))]
            group = step * 1_000_000 + place if len(prompt) else None  # another step has other weights
            found.append(
                Scored(whole, len(prompt), sides[0], sides[1], row[:length], version, versions[1], group=group)
            )
    return found


def _array(table: Table) -> np.ndarray:
    if hasattr(table, "detach"):
        table = table.detach().cpu().double().numpy()
    return np.asarray(table, dtype=np.float64)
