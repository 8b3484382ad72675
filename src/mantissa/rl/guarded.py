"""The guard over a run of RL: it judges every row, and takes a run that leaves its thresholds to a wider format, live.

The rules and the judgement are ``mantissa.training``'s, as for the drop-in trainer: decisions are a function of the
rows of ``metrics.jsonl``, and ``mantissa guard RUN`` makes them again. What differs is what a fall back is made of. A
checkpoint written while the guard finds the run good is its last good one, and is kept however many come after it. To
fall back after step k is to write ``step-k`` with what was learned there (weights, moments, schedule, reference, the
count of updates), at the place in the data where the run is now, with the format that it goes on in; and then to go on
from ``step-k`` as a resume would. So there is one way into the wider format, a kill finds the run on one side of a
rename or on the other, and everything after it has the bits that any resume from that checkpoint has. Steps go on
counting: those that were undone stay in the file, and what they sampled is not sampled again.

The roles that learn and sample become as wide as ``to``. The reference stays what it is, format and all: what the
policy is held to does not move.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mantissa.base.jsonl import Row
from mantissa.base.ranks import Ranks
from mantissa.dropin import Judge
from mantissa.precision import SCHEMES, PrecisionPolicy
from mantissa.rl.config.recipe import make_config
from mantissa.rl.config.run import RunConfig
from mantissa.runs.directory import RunDirectory
from mantissa.training import Checkpoint, load_checkpoint, save_checkpoint, saved_state, saved_steps


class RunGuard:
    """One run's guard, on every rank; rank 0 judges. ``note`` takes a line for the screen.

    ``format``: what the rows call the run's format. ``good``: the step of the last good checkpoint. ``fell_back``: the
    last fall back (``step``, ``from_step``, ``was``, ``to``, ``reasons``), None before the first.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, ranks: Ranks, note: Callable[[str], None]) -> None:
        assert config.guard is not None
        self._settings = config.guard
        self._note = note
        self._judge = Judge(run.path, self._settings, note, ranks)
        self.format = _label(config.precision)
        self.good = 0
        self.fell_back: dict[str, Any] | None = None

    def restore(self, step: int, state: dict[str, Any], rows: list[Row]) -> None:
        """Go on after ``step``: ``state`` as ``saving`` gave it (empty at a run's beginning), ``rows`` up to there."""
        self.good, self.fell_back = int(state.get("good", 0)), state.get("fell_back")
        self._judge.rewind(step, rows)

    def judge(self, row: Row) -> bool:
        """Whether to fall back after this row, the same on every rank. ``MantissaError``: the guard stops the run."""
        return self._judge.judge(row)

    def saving(self, step: int) -> dict[str, Any]:
        """What the checkpoint of ``step`` keeps of the guard; from then on it may be the last good one. Collective."""
        if self._judge.good:
            self.good = step
        return {"good": self.good, "fell_back": self.fell_back}

    def fall_back(self, folder: Path, step: int, position: int, keep: int) -> None:
        """Write ``step-<step>``, from which the run goes on in the wider format, and say so; rank 0's work."""
        to = self._settings.to
        last = load_checkpoint(folder, self.good)
        why = "; ".join(self._judge.reasons[:-1])  # the last says where to
        fell = {"step": step, "from_step": self.good, "was": self.format, "to": to, "reasons": why}
        state = last.state | {"position": position, "ahead": [], "guard": {"good": step, "fell_back": fell}}
        more = {name: tensors for name, tensors in last.more.items() if name != "ahead"}  # sampled in the old format
        save_checkpoint(folder, Checkpoint(step, last.policy, last.optimizer, state, more), keep)
        updates = state["step"]["updates"]
        self._note(f"guard: step {step}: back to checkpoint step-{self.good} (update {updates}), and on in {to}")


def fall_back_of(run: RunDirectory) -> dict[str, Any] | None:
    """The fall back that the run's newest checkpoint goes on from; None where there was none yet."""
    folder = run.checkpoint_path(0).parent
    steps = saved_steps(folder)
    found: dict[str, Any] | None = saved_state(folder, steps[-1]).get("guard", {}).get("fell_back") if steps else None
    return found


def in_force(config: RunConfig, run: RunDirectory, ranks: Ranks) -> RunConfig:
    """The run's configuration as it goes on: the recipe's, in the format that the guard has taken it to."""
    if config.guard is None:
        return config
    fell = ranks.broadcast(fall_back_of(run) if ranks.rank0 else None)
    return config if fell is None else widened(config, fell["to"])


def widened(config: RunConfig, to: str) -> RunConfig:
    """``config`` with learner and rollout at least as wide as ``to``, checked as any recipe is."""
    policy = config.precision

    def wide(role: str) -> str:
        return "fp32" if "fp32" in (role, to) else to

    values: dict[str, Any] = {"train": wide(policy.train), "rollout": wide(policy.rollout)}
    kept = ("kernels", "on_mismatch", "check_every", "backend", "fallback")
    values |= {name: value for name, value in policy if name in kept}
    if config.algorithm.reference is not None:
        values["reference"] = policy.reference or policy.train
    if values.get("reference") == "fp8" and policy.fp8 is not None:
        values["fp8"] = policy.fp8
    if values.get("reference") in SCHEMES and policy.quantized is not None:
        values["quantized"] = policy.quantized
    if {values["train"], values["rollout"], values.get("reference", "fp32")} == {"fp32"}:
        values["backend"] = "auto"  # fp32 is never simulated
    plain = config.model_dump(mode="json") | {"precision": values, "loss_scaling": None}
    return make_config(plain, "the run after a fall back of its guard")


def _label(policy: PrecisionPolicy) -> str:
    return policy.train if policy.train == policy.rollout else f"{policy.train}/{policy.rollout}"
