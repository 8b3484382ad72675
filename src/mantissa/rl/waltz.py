"""Two policies that learn from a feedback game: the dialogues, what each policy learns from them, and the run of both.

One dialogue: a request, the conversation policy's answer, and while the feedback policy finds fault with the last
answer and there are rounds left, its feedback and another answer. Every answer is judged. Who earns what is
``mantissa.rl.config.waltz``'s; a dialogue on one of whose answers the judge failed says nothing and is left out.
Every draw follows from the run's seed, the step, the round and the prompt's number, as everywhere.

Each policy is a ``Run`` of its own in all that is one policy's: its learner, optimiser, loss scaler, engine and
reference, its rows and completions. The conversation policy's are in the run's folder, the feedback policy's in
``feedback/`` inside it, which reads like any run. What they have together is the game that brings both their batches,
and the checkpoint: one folder with both, so that a kill finds them at the same step. An overflow is one scaler's, and a
skipped step one optimiser's.

Source: "The alignment waltz: jointly training agents to collaborate for safety" (2025), arXiv:2510.08240.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.seeds import stream_slice
from mantissa.kernels.cpu import CpuProducts
from mantissa.model import Decoder, base_parameters
from mantissa.rl.assemble import Parts, assemble, most_tokens
from mantissa.rl.batch import Batch, Sample, SyncSource, sample_metrics
from mantissa.rl.config.run import RunConfig
from mantissa.rl.config.sections import EvaluationConfig, RolloutConfig
from mantissa.rl.config.waltz import WaltzConfig, feedback_config
from mantissa.rl.run import Run, checkpoint_of, restore
from mantissa.rl.session import KINDS, Kind, begin, environment_of, export
from mantissa.rl.step import Row, take_step
from mantissa.rollout import NativeEngine, RolloutEngine
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live, Trackers
from mantissa.tasks import Problem, Reviews, Reward, Script, build_task
from mantissa.tasks.requests import Feedback, label_of
from mantissa.training import Checkpoint, load_checkpoint, save_checkpoint, saved_steps

_OTHER = "feedback"  # the policy beside the recipe's own


def _settings(config: RunConfig) -> tuple[WaltzConfig, RunConfig]:
    """The game's, and those of its feedback policy."""
    assert config.waltz is not None  # which makes a run one of this kind
    return config.waltz, feedback_config(config)


def assemble_two(config: RunConfig, ranks: Ranks = ALONE, products: CpuProducts | None = None) -> Parts:
    """The parts of a conversation policy, and in them those of its feedback policy; ``products``: ``assemble``'s."""
    waltz, other = _settings(config)
    if config.model.tokenizer != other.model.tokenizer:
        raise MantissaError(
            f"waltz.feedback.model.tokenizer={other.model.tokenizer}, and model.tokenizer={config.model.tokenizer}: "
            "each policy reads what the other wrote; give both the same"
        )
    task = build_task(config.task, config.seed)
    if waltz.judge is not None:
        task.verifier = waltz.judge.verifier()
    script = Script.of(task, waltz.review, waltz.revise)
    parts = assemble(config, ranks, task, products)
    with on_failure(lambda: parts.close()):
        parts = replace(parts, beside={_OTHER: assemble(other, ranks, Reviews(task, script), products)})
        _check_dialogues(config, parts, script)
    if config.model.path is not None and config.model.path == other.model.path:
        mine, theirs = parts.model, parts.beside[_OTHER].model
        assert isinstance(mine, Decoder)
        assert isinstance(theirs, Decoder)
        _share_base(mine, theirs)
    return parts


def _check_dialogues(config: RunConfig, parts: Parts, script: Script) -> None:
    """Refuse labels that are none, and a game whose longest dialogue one of its policies has no positions for."""
    other, (waltz, theirs) = parts.beside[_OTHER], _settings(config)
    rounds, answer, said = waltz.rounds, config.rollout.max_tokens, theirs.rollout.max_tokens
    again = len(parts.tokenizer.encode(script.revise)) + answer + said
    sides = (("rollout", parts, answer + rounds * again), ("waltz.feedback.rollout", other, answer + said))
    for problem in itertools.chain(parts.task.split("train"), parts.task.split("heldout")):
        label_of(problem)
        for where, side, written in sides:
            read = problem if side is parts else script.reviewed(problem, "")
            room = side.model.config.max_position_embeddings - written
            if most_tokens(read) > room and (tokens := len(side.sampler.encode(read))) > room:
                raise MantissaError(
                    f"problem {problem.id}: its {tokens} tokens and the {written} that a dialogue may add exceed the "
                    f"{room + written} positions of the model that reads them; lower {where}.max_tokens, or leave the "
                    "problem out"
                )


def _share_base(one: Decoder, other: Decoder) -> None:
    """Let adapters on equal frozen weights have one base in memory: the other's tensors become the first one's."""
    if one.lora is None or other.lora is None:
        return
    ours = base_parameters(one)
    for name, theirs in base_parameters(other).items():
        if torch.equal(ours[name], theirs):
            theirs.data = ours[name].data


@dataclass
class Dialogue:
    """One dialogue. ``number``: its place in the step; ``asked``: the problem with all that was said so far.

    ``answers`` and ``verdicts`` go together; ``said``: the feedback on each answer that had one, None where it is no
    JSON object as asked for. ``error``: the judge's, on one of the answers.
    """

    problem: Problem
    number: int
    asked: Problem
    answers: list[Sample] = field(default_factory=list)
    verdicts: list[Reward] = field(default_factory=list)
    said: list[tuple[Sample, Feedback | None]] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        return next((verdict.error for verdict in self.verdicts if verdict.error is not None), None)

    @property
    def fault(self) -> Feedback | None:
        """The last feedback, where it found fault."""
        last = self.said[-1][1] if self.said else None
        return last if last is not None and last.flags else None

    def feedback(self) -> Iterator[tuple[Sample, Feedback | None, float, bool]]:
        """Each feedback with its R_dir, and whether both of its labels are right."""
        for turn, (sample, said) in enumerate(self.said):
            verdict, *later = self.verdicts[turn : turn + 2]
            faults = (bool(verdict.parts["unsafe"]), bool(verdict.parts["overrefuse"]))
            right = said is not None and (said.unsafe, said.overrefuse) == faults
            yield sample, said, later[0].value - verdict.value if later else 0.0, right


class Game:
    """Plays dialogues with the engines' present weights, and makes of them what the two policies learn from."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        task = parts.beside[_OTHER].task
        assert isinstance(task, Reviews)
        self.config, self.script = config, task.script
        self.waltz, self.other = _settings(config)
        self.problems, self.heldout = parts.task.split("train"), parts.task.split("heldout")
        self.talker, self.critic = parts.sampler, parts.beside[_OTHER].sampler
        self.tops = [each.learner.most_probable for each in (parts, parts.beside[_OTHER])]
        self._seconds: dict[str, float] = {}

    def step(self, step: int) -> tuple[Batch, Batch]:
        """The batches of ``step``: the conversation policy's and the feedback policy's."""
        prompts, seed = self.config.rollout.prompts, self.config.seed
        for sampler in (self.talker, self.critic):
            if isinstance(sampler.engine, NativeEngine):
                sampler.engine.calls.clear()  # of a policy that does not learn nobody else does
        indices = stream_slice(len(self.problems), (step - 1) * prompts, prompts, seed, "prompts")
        problems = [self.problems[index] for index in indices]
        self._seconds = dict.fromkeys(("rollout", "reward", "feedback"), 0.0)
        played = self.play(problems, self.config.rollout.samples, None, seed, "game", step)
        kept = [dialogue for dialogue in played if dialogue.error is None]
        if not kept:
            raise MantissaError(f"step {step}: the judge failed on every dialogue, first with: {played[0].error}")
        answers = [pair for dialogue in kept for pair in self._answers(dialogue)]
        said = [self._reviewed(dialogue, each, step) for dialogue in kept for each in dialogue.feedback()]
        metrics = {f"waltz/{name}": value for name, value in rates(kept).items()}
        metrics["reward/verifier_errors"] = len(played) - len(kept)
        heard = self._seconds.pop("feedback")
        return (
            self._batch(step, indices, answers, self.config.rollout, metrics, self._seconds),
            self._batch(step, indices, said, self.other.rollout, {}, {"rollout": heard}),
        )

    def rates(self, step: int, problems: int, samples: int) -> dict[str, float]:
        """Of held-out requests after ``step``: right final answers by greedy policies, and with ``samples`` the same
        of so many sampled dialogues each; every rate is of the latter, where there are some."""
        heldout, seed = self.heldout[:problems], self.config.seed
        row: dict[str, float] = {}
        for name, temperature, count in (("greedy_accuracy", 0.0, 1), ("avg_at_k", None, samples)):
            if count:
                played = self.play(heldout, count, temperature, seed, name, step)
                kept = [dialogue for dialogue in played if dialogue.error is None]
                row |= {f"waltz/eval_{rate}": value for rate, value in rates(kept).items()}
                row |= {f"eval/{name}": _mean(dialogue.verdicts[-1].value for dialogue in kept)} if kept else {}
        return row

    def play(
        self, problems: Sequence[Problem], samples: int, temperature: float | None, *seed: int | str
    ) -> list[Dialogue]:
        """``samples`` dialogues on each problem; ``temperature``: None is each policy's own."""
        config, other, engine = self.config.rollout, self.other.rollout, self.talker.engine
        heat = [each.temperature if temperature is None else temperature for each in (config, other)]
        talks = replace(self.talker.params_of(config), temperature=heat[0], most_probable=self.tops[0])
        hears = replace(self.critic.params_of(other), temperature=heat[1], most_probable=self.tops[1])
        with self._timed("rollout"):
            first = self.talker.sample(problems, samples, talks, engine.version, *seed, "answer", 0)
        played = [Dialogue(sample.problem, number, sample.problem) for number, sample in enumerate(first)]
        self._judge(played, first)
        going = played
        for turn in range(1, self.waltz.rounds + 1):
            going = [dialogue for dialogue in going if dialogue.error is None]
            if not going:
                break
            with self._timed("feedback"):
                read = [self.script.reviewed(each.problem, each.answers[-1].text) for each in going]
                said = self.critic.sample(read, 1, hears, self.critic.engine.version, *seed, "feedback", turn)
            for dialogue, sample in zip(going, said, strict=True):
                dialogue.said.append((sample, self.script.read(sample.text)))
            found = [(dialogue, fault) for dialogue in going if (fault := dialogue.fault) is not None]
            if not found:
                break
            for dialogue, fault in found:
                dialogue.asked = self.script.revised(dialogue.asked, dialogue.answers[-1].text, fault.feedback)
            going = [dialogue for dialogue, _ in found]
            with self._timed("rollout"):
                asked = [dialogue.asked for dialogue in going]
                again = self.talker.sample(asked, 1, talks, engine.version, *seed, "answer", turn)
            self._judge(going, again)
        return played

    def _judge(self, dialogues: Sequence[Dialogue], answers: Sequence[Sample]) -> None:
        with self._timed("reward"):
            pairs = [(each.problem, answer.text) for each, answer in zip(dialogues, answers, strict=True)]
            verdicts = self.talker.grader.grade(pairs)
        for dialogue, answer, verdict in zip(dialogues, answers, verdicts, strict=True):
            dialogue.answers.append(answer)
            dialogue.verdicts.append(verdict)

    @staticmethod
    def _answers(dialogue: Dialogue) -> list[tuple[Sample, Reward]]:
        """The first answer (type A), and the last where it followed feedback (type B); a group each."""
        pairs = list(zip(dialogue.answers, dialogue.verdicts, strict=True))
        ends = pairs[:1] + pairs[1:][-1:]
        return [(replace(answer, group=2 * dialogue.number + end), won) for end, (answer, won) in enumerate(ends)]

    def _reviewed(
        self, dialogue: Dialogue, feedback: tuple[Sample, Feedback | None, float, bool], step: int
    ) -> tuple[Sample, Reward]:
        sample, said, improvement, right = feedback
        value = self.waltz.feedback_reward(improvement, right, said is not None, step)
        parts = {"dir": improvement, "label": float(right), "format": float(said is not None)}
        return replace(sample, group=dialogue.number), Reward(value, right, parts=parts)

    @staticmethod
    def _batch(
        step: int,
        indices: Sequence[int],
        pairs: Sequence[tuple[Sample, Reward]],
        config: RolloutConfig,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> Batch:
        samples, rewards = [sample for sample, _ in pairs], [reward for _, reward in pairs]
        version, position = samples[0].completion.policy_version, step * len(indices)
        both = {**sample_metrics(samples, rewards, config), **metrics}
        return Batch(step, version, position, indices, samples, rewards, both, seconds)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start


def rates(dialogues: Sequence[Dialogue]) -> Mapping[str, float]:
    """What a set of dialogues came to; a rate over nothing is left out."""
    found: dict[str, list[float]] = {}
    for each in dialogues:
        fault, name = ("unsafe", "attack_success") if label_of(each.problem) == "unsafe" else _OVER
        found.setdefault(name, []).append(each.verdicts[-1].parts[fault])
        found.setdefault(f"first_{name}", []).append(each.verdicts[0].parts[fault])
        found.setdefault("triggered", []).append(float(len(each.answers) > 1))
        for _, said, improvement, right in each.feedback():
            found.setdefault("label_accuracy", []).append(float(right))
            found.setdefault("dir_mean", []).append(improvement)
            found.setdefault("format", []).append(float(said is not None))
    return {name: _mean(values) for name, values in found.items()}


_OVER = ("overrefuse", "over_refusal")


def _mean(values: Iterable[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted)


# The run of both

_THEIRS = "feedback_"  # begins the names of the feedback policy's files in a checkpoint


class Waltz:
    """Both policies' runs, taken a step at a time."""

    def __init__(self, config: RunConfig, parts: Parts, folder: RunDirectory, trackers: Trackers, live: Live) -> None:
        self.config, self.folder, self.game = config, folder, Game(config, parts)
        other, theirs = self.game.other, parts.beside[_OTHER]
        self.inner = folder.inner(other.model_dump(mode="json", exclude={"run_dir"}), environment_of(other, theirs))
        beside = Trackers([_Beside(trackers)])
        self.conversation = Run(config, parts, folder, trackers, live)
        self.feedback = Run(other, theirs, self.inner, beside, _Aside(live))
        self.runs = (self.feedback, self.conversation)
        for each in self.runs:
            if each.exactness is not None:
                each.exactness.replan = None  # to sample a step again, the other policy must not have learned from it

    def go(self) -> bool:
        """Run to the end, from the newest checkpoint or from the beginning."""
        with self.inner:
            saved = saved_steps(self.folder.checkpoints)
            step = self._restore(saved[-1]) if saved else self._begin()
            for run in self.runs:
                run.source = _Played(run.sampler.engine)
                run.source.start(step, run.learner.weights, run.learner.version, run.ahead)
            while step < self.config.steps:
                step += 1
                self.step(step)
            for run in self.runs:
                export(run)
        return True

    def step(self, step: int) -> None:
        """One step: play, then each policy scores, weighs, learns and publishes what it has of the dialogues."""
        talk, hear = self.conversation, self.feedback
        talk.started = time.perf_counter()  # the step's clock starts before its batch is there
        answers, said = self.game.step(step)
        talk.source, hear.source = _Played(talk.sampler.engine, answers), _Played(hear.sampler.engine, said)
        talk.seconds["feedback"] = said.seconds["rollout"]  # its sampling is part of the other's
        with talk.timed("feedback"):
            self._take(hear, step)
        self._take(talk, step)  # the last: where it evaluates, both have learned
        if step % self.config.checkpoint.every == 0 or step == self.config.steps:
            self._save(step)

    def _take(self, run: Run, step: int) -> None:
        learns = self.game.waltz.learns(run is self.conversation, step)
        take_step(run, step, learns=learns, evaluate=self._evaluate)

    def _evaluate(self, run: Run, evaluation: EvaluationConfig, step: int) -> Row:
        return self.game.rates(step, evaluation.problems, evaluation.samples)

    def _begin(self) -> int:
        for run in self.runs:
            begin(run)
        self._save(0)
        return 0

    def _save(self, step: int) -> None:
        answers, feedback = checkpoint_of(self.conversation, step), checkpoint_of(self.feedback, step)
        if answers is None or feedback is None:  # on another rank, which writes nothing
            return
        theirs = {"policy": feedback.policy, "optimizer": feedback.optimizer, **feedback.more}
        more = answers.more | {_THEIRS + name: tensors for name, tensors in theirs.items()}
        state = {**answers.state, "feedback": feedback.state}
        both = Checkpoint(step, answers.policy, answers.optimizer, state, more)
        save_checkpoint(self.folder.checkpoints, both, self.config.checkpoint.keep)

    def _restore(self, step: int) -> int:
        both = load_checkpoint(self.folder.checkpoints, step)
        more = {name.removeprefix(_THEIRS): both.part(name) for name in both.more if name.startswith(_THEIRS)}
        policy, optimizer = more.pop("policy", {}), more.pop("optimizer", {})
        theirs = Checkpoint(step, policy, optimizer, both.state.get("feedback", {}), more, both.checked)
        restore(self.feedback, theirs)
        return restore(self.conversation, both)


class _Played(SyncSource):
    """Takes what the game brought."""

    def __init__(self, engine: RolloutEngine, batch: Batch | None = None) -> None:
        self._engine, self._batch = engine, batch

    def take(self, step: int) -> Batch:
        assert self._batch is not None
        return self._batch


class _Aside(Live):
    """The screen, as the feedback policy has it: its notes, and no rows of its own."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def note(self, text: str) -> None:
        self._live.note(f"feedback policy: {text}")

    def doing(self, what: str, step: int = 0) -> None:
        self._live.doing(f"feedback policy {what}", step)

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


KINDS["waltz"] = Kind(assemble_two, lambda *made: Waltz(*made).go())
