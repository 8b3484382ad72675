"""A run of two policies: a conversation and a feedback policy, which learn from the dialogues that they have.

Each is a run of its own in all that is one policy's: its loop, learner, optimiser, loss scaler, engine and reference,
its rows and completions. The conversation policy's are in the run's folder, the feedback policy's in ``feedback/``
inside it, which reads like any run. What they have together is the game that brings both their batches, and the
checkpoint: one folder with both, so that a kill finds them at the same step. An overflow is one scaler's, and a skipped
step one optimiser's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mantissa.rl.assemble import Parts
from mantissa.rl.collect import Batch, SyncSource
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.game import Game
from mantissa.rl.learner import Update
from mantissa.rl.loop import Loop
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.trackers import Trackers
from mantissa.training import Checkpoint, load_checkpoint, save_checkpoint, saved_steps

_THEIRS = "feedback_"  # begins the names of the feedback policy's files in a checkpoint


class Waltz:
    """Both policies' loops, taken a step at a time. ``environment``: the feedback policy's, for its folder."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        run: RunDirectory,
        trackers: Trackers,
        live: Live,
        environment: Mapping[str, Any],
    ) -> None:
        assert parts.feedback is not None
        self.config, self.run, self.live, self.game = config, run, live, Game(config, parts)
        self.inner = run.inner(self.game.other.model_dump(mode="json", exclude={"run_dir"}), environment)
        beside = Trackers([_Beside(trackers)])
        self.conversation = Side(config, parts, run, trackers, live, self.game)
        self.feedback = Side(self.game.other, parts.feedback, self.inner, beside, _Aside(live), self.game)
        self.sides = (self.feedback, self.conversation)

    def go(self) -> bool:
        """Run to the end, from the newest checkpoint or from the beginning."""
        with self.inner:
            saved = saved_steps(self.run.checkpoint_path(0).parent)
            step = self._restore(saved[-1]) if saved else self._begin()
            for side in self.sides:
                side.open(step)
            while step < self.config.steps:
                step += 1
                self.step(step)
            for side in self.sides:
                side.export()
        return True

    def step(self, step: int) -> None:
        """One step: play, then each policy scores, weighs, learns and publishes what it has of the dialogues."""
        talk, hear = self.conversation, self.feedback
        talk.begin_step()
        talk.batch, hear.batch = self.game.step(step)
        with talk.aside(hear.batch):
            hear.step(step)
        talk.step(step)  # the last: where it evaluates, both have learned
        if step % self.config.checkpoint.every == 0 or step == self.config.steps:
            self._save(step)

    def _begin(self) -> int:
        for side in self.sides:
            side.begin()
        self._save(0)
        return 0

    def _save(self, step: int) -> None:
        answers, feedback = self.conversation.checkpoint(step), self.feedback.checkpoint(step)
        assert answers is not None
        assert feedback is not None
        theirs = {"policy": feedback.policy, "optimizer": feedback.optimizer, **feedback.more}
        more = answers.more | {_THEIRS + name: tensors for name, tensors in theirs.items()}
        state = {**answers.state, "feedback": feedback.state}
        both = Checkpoint(step, answers.policy, answers.optimizer, state, more)
        save_checkpoint(self.run.checkpoint_path(0).parent, both, self.config.checkpoint.keep)

    def _restore(self, step: int) -> int:
        both = load_checkpoint(self.run.checkpoint_path(0).parent, step)
        more = {name.removeprefix(_THEIRS): both.part(name) for name in both.more if name.startswith(_THEIRS)}
        policy, optimizer = more.pop("policy", {}), more.pop("optimizer", {})
        self.feedback.restore(Checkpoint(step, policy, optimizer, both.state.get("feedback", {}), more, both.checked))
        return self.conversation.restore(both)


class Side(Loop):
    """The loop of one of the two. Its ``batch`` is brought by the game, and a checkpoint is both's."""

    def __init__(
        self, config: RunConfig, parts: Parts, run: RunDirectory, trackers: Trackers, live: Live, game: Game
    ) -> None:
        super().__init__(config, parts, run, trackers, live)
        self.game = game
        self.batch: Batch | None = None
        self._talks = config.waltz is not None
        if self.exactness is not None:
            self.exactness.replan = None  # to sample a step again, the other policy must not have learned from it

    def begin_step(self) -> None:
        """The step's clock starts before its batch is there."""
        self._started = time.perf_counter()

    @contextmanager
    def aside(self, theirs: Batch) -> Iterator[None]:
        """Around the other policy's part of the step; ``theirs``: its batch, whose sampling is part of that."""
        self._seconds["feedback"] = theirs.seconds["rollout"]
        with self._timed("feedback"):
            yield

    def _source(self) -> SyncSource:
        return _Played(self)

    def _learn(self, step: int, experience: Experience) -> Update:
        if self.game.waltz.learns(self._talks, step):
            return super()._learn(step, experience)
        with self._timed("update"):
            return Update((), experience.tallies, 0)

    def _evaluate(self, step: int) -> dict[str, float]:
        evaluation = self.config.evaluation
        assert evaluation is not None
        return self.game.rates(step, evaluation.problems, evaluation.samples)

    def _save(self, step: int) -> None:
        """Nothing: ``Waltz`` saves both."""


class _Played(SyncSource):
    """Takes what the game brought."""

    def __init__(self, side: Side) -> None:
        self._side, self._engine = side, side.sampler.engine

    def take(self, step: int) -> Batch:
        assert self._side.batch is not None
        return self._side.batch


class _Aside(Live):
    """The screen, as the feedback policy has it: its notes, and no rows of its own."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def note(self, text: str) -> None:
        self._live.note(f"feedback policy: {text}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Nothing: the other policy's row has the game's figures."""


class _Beside:
    """The run's trackers, as the feedback policy has them: its metrics with a name in front."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._trackers.log(step, {f"feedback/{name}": value for name, value in row.items()})

    def close(self) -> None:
        """Nothing: they are the run's."""
