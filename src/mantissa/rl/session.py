"""A run from its beginning, or the checkpoint that it is gone on from, to its end: ``start``, ``resume``, and ``go``,
the loop of its steps. The command line is a thin layer over the first two.

On several processes each calls them with the same arguments. Rank 0 makes and writes the folder, and talks; the others
look on.

Before the first step may be a warm start: supervised steps on the task's own solutions, for a policy that sometimes
succeeds. It runs in the learner's precision through the same optimiser step as RL, with an optimiser and a scaler of
its own that end with it. Everything in it is a function of the seed, so a run killed during its warm start begins it
again and arrives at the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mantissa.algorithms import aggregation_scale
from mantissa.algorithms.correction import CorrectionConfig
from mantissa.base.environ import settled
from mantissa.base.errors import MantissaError, StoppedError, on_failure
from mantissa.base.functions import IMPORT_PATH, source_digest
from mantissa.base.ranks import ALONE, Ranks, choose_device, join, world_size
from mantissa.base.screen import Screen
from mantissa.base.seeds import stream_slice
from mantissa.guard import ReferenceRun
from mantissa.guard.watch import fall_back_of
from mantissa.kernels import resolve
from mantissa.kernels.cpu import CpuProducts
from mantissa.mismatch.usual import Usual
from mantissa.precision import masked_sum
from mantissa.rl.ahead import AsyncSource
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.batch import Collector, Sampler, SyncSource, success_rates
from mantissa.rl.config.run import RunConfig, apply_overrides, make_config, widened
from mantissa.rl.config.sections import WarmStartConfig
from mantissa.rl.experience import Sequences
from mantissa.rl.learner import Learner
from mantissa.rl.probes import SampleAgain
from mantissa.rl.run import Run, hold_room, restore, save
from mantissa.rl.step import settle, take_step
from mantissa.rollout import SamplingParams
from mantissa.runs.directory import Onlooker, RunDirectory, default_path, environment
from mantissa.runs.health import VERDICTS, expected_gap, gap_sentence, share_sentence
from mantissa.runs.live import Live, Trackers, from_names
from mantissa.runs.report import build_report
from mantissa.tasks import Problem
from mantissa.training import OptimizerStep, learning_rate, load_checkpoint, saved_steps
from mantissa.training.audit import audit
from mantissa.training.optimizer import described
from mantissa.training.scaler import FixedScaler

_PATIENCE = timedelta(minutes=30)  # that a rank waits for another: one may have sampled much longer responses
MAY_CHANGE = ("nproc", "parallel", "rollout.vllm.server")  # when a run goes on


@dataclass(frozen=True)
class Kind:
    """A kind of run: how its parts are made, and how it goes from its beginning or a checkpoint to its end."""

    assemble: Callable[..., Parts]
    go: Callable[[RunConfig, Parts, RunDirectory, Trackers, Live], bool]


_PLAIN = Kind(assemble, lambda *made: go(Run(*made)))  # one policy, and nothing that plays with it
KINDS: dict[str, Kind] = {}  # the others, by the section of a recipe that asks for one; each registers itself


def _kind(config: RunConfig) -> Kind:
    return next((kind for section, kind in KINDS.items() if getattr(config, section) is not None), _PLAIN)


Say = Callable[[str], None]  # takes what is at work while no screen is there yet, or no more; "": nothing is
_ASSEMBLING, _DRAWING = "loading the model and proving its kernels", "drawing the report"


def start(config: RunConfig, say: Say = lambda line: None) -> Path:
    """Run ``config`` from its beginning in a new folder; returns the path of its report."""
    if config.guard is not None:  # what would stop the run later is refused now
        resolve(widened(config, config.guard.to).precision, choose_device(config.device))
        if config.guard.reference is not None:
            ReferenceRun.read(config.guard.reference)
    with joined(config, choose_device(config.device)) as ranks:
        say(_ASSEMBLING)
        parts = _assemble(config, ranks)
        with on_failure(parts.close):
            path = ranks.broadcast(config.run_dir or str(default_path(config.name)))
            plain = config.model_dump(mode="json", exclude={"run_dir"})
            run = RunDirectory.create(path, plain, environment_of(config, parts)) if ranks.rank0 else Onlooker(path)
        with run, _resumable(run):
            return _to_the_end(config, parts, run, "start", say)


def resume(
    path: str | Path, overrides: Sequence[str] = (), nproc: int | None = None, say: Say = lambda line: None
) -> Path:
    """Continue the run in ``path`` from its newest checkpoint; returns the path of its report.

    The promise of equal bits holds where the machine, versions, thread and process count are those of the start: what
    differs is printed and recorded. ``overrides``, ``nproc``: see ``resumed_config``.
    """
    config = resumed_config(path, overrides, nproc)
    with joined(config, choose_device(config.device)) as ranks:
        run = RunDirectory.open(path, write=True) if ranks.rank0 else Onlooker.open(path)
        with run, _resumable(run):
            config = _in_force(config, run, ranks)
            say(_ASSEMBLING)
            return _to_the_end(config, _assemble(config, ranks, _products(run, ranks)), run, "resume", say)


def resumed_config(path: str | Path, overrides: Sequence[str] = (), nproc: int | None = None) -> RunConfig:
    """The recipe of the run in ``path``. ``overrides`` may set what is no part of what a run computes: ``MAY_CHANGE``.

    ``nproc``: where ``overrides`` do not say it.
    """
    changed = [item.partition("=")[0] for item in overrides]
    for key in changed:
        if key not in MAY_CHANGE:
            raise MantissaError(
                f"--resume continues {path} with its own recipe, which cannot be changed (but for "
                f"{', '.join(MAY_CHANGE)}): leave {key} out, or start a new run without --resume"
            )
    outer = Path(path).resolve().parent
    if Path(path).resolve().name == "feedback" and RunDirectory(outer).inner_run is not None:
        raise MantissaError(f"{path} is the second policy of the run {outer}: resume that")
    values = apply_overrides(RunDirectory.open(path).config, overrides)
    if nproc is not None and "nproc" not in changed:
        values["nproc"] = nproc
    if values.get("nproc", 1) == 1 and "parallel" not in changed:
        values["parallel"] = None  # the recipe's: of the processes that there were
    return make_config(values, f"{path}/config.yaml")


@contextmanager
def joined(config: RunConfig, device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run, for as long as the run takes; ``device`` is this rank's own.

    Joins the process group (gloo, and on GPUs nccl beside it) unless the caller has.
    """
    world = world_size() or 1
    if world != config.nproc:
        raise MantissaError(
            f"nproc={config.nproc}, but this is one of {world} processes: start them with mantissa train RECIPE "
            f"nproc={config.nproc}, or with torchrun --nproc-per-node {config.nproc} -m mantissa train RECIPE"
        )
    if world == 1:
        yield ALONE
        return
    if not dist.is_initialized():
        join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "cpu", config.parallel or "ddp")
    yield ranks
    ranks.gather(None)  # the others wait for the report: a rank that ends early looks like one that died


_Way = Literal["start", "resume", "fall back"]  # how a run comes to take its next step


def _to_the_end(config: RunConfig, parts: Parts, run: RunDirectory, way: _Way, say: Say) -> Path:
    """The run in one format after the other, as its guard takes it; closes ``parts``, and returns the report's path."""
    while True:
        ranks = parts.ranks
        say("")
        try:
            finished = _take_steps(config, parts, run, way)
        finally:
            parts.close()
        if finished:
            say(_DRAWING)
            report = build_report(run) if ranks.rank0 else run.report_path
            say("")
            return report
        del parts  # their memory goes before others take as much
        say(_ASSEMBLING)
        config, way = _in_force(config, run, ranks), "fall back"
        parts = _assemble(config, ranks, _products(run, ranks))


def _in_force(config: RunConfig, run: RunDirectory, ranks: Ranks) -> RunConfig:
    """The run's configuration as it goes on: the recipe's, in the format that the guard has taken it to."""
    if config.guard is None:
        return config
    fell = ranks.broadcast(fall_back_of(run.checkpoints) if ranks.rank0 else None)
    return config if fell is None else widened(config, fell["to"])


def _assemble(config: RunConfig, ranks: Ranks, products: CpuProducts | None = None) -> Parts:
    return _kind(config).assemble(config, ranks, products=products)


def _products(run: RunDirectory, ranks: Ranks) -> CpuProducts | None:
    """How the processor multiplied when the run began, held from then on; None where the run does not say."""
    recorded = run.environment.get("products") if ranks.rank0 else None
    return ranks.broadcast(None if recorded is None else CpuProducts.of(recorded))


def _take_steps(config: RunConfig, parts: Parts, run: RunDirectory, way: _Way) -> bool:
    """Take the run's steps in its present format; False where the guard fell back on the way."""
    rank0 = parts.ranks.rank0
    steps = run.checkpoint_steps() if way != "start" else []
    done = steps[-1] if steps else 0
    trackers = from_names(config.trackers if rank0 else (), run, None if way == "start" else done)
    try:
        table = _precision(parts)
        recipe = config.model_dump(include={"rollout"})
        expected = partial(expected_gap, {"precision": table}, recipe)
        with _screen(config.steps, done, rank0, _still(config, parts), expected) as live:
            live.precision(table)
            ranks, device = parts.ranks, str(parts.device)
            if not ranks.alone:
                device = f"{parts.device.type}, {ranks.world} processes ({ranks.kind})"
            others = "".join(f"   {name} policy {_parameters(other)}" for name, other in parts.beside.items())
            live.note(f"run {run.path}   device {device}   parameters {_parameters(parts)}{others}")
            if parts.model.config.weights_note:
                live.note(f"weights {parts.model.config.weights_note}")
            for line in parts.exact:
                live.note(f"exact: {line}")
            if parts.twin is not None:
                live.note(parts.twin.line)
            if said := _uncorrected(config, parts.precision.rows()):
                live.note(said)
            for note in (*parts.task.notes, *parts.sampler.grader.notes):
                live.note(note)
            if rank0 and config.guard is not None and (fell := fall_back_of(run.checkpoints)):
                run.record_fall_back(fell, environment_of(config, parts))
            if way == "resume" and rank0:
                if not steps:
                    live.note(f"warning: {run.checkpoints} holds no checkpoint: the run begins again from its start")
                for key, (then, now) in run.record_resume(done, environment_of(config, parts)).items():
                    live.note(f"warning: {_otherwise(key, then, now)} from the first run's")
            finished = _kind(config).go(config, parts, run, trackers, live)
            if rank0 and finished:
                rows, environment = run.metrics.read(), run.environment
                whole = expected_gap(environment, run.config)
                for said in filter(None, (gap_sentence(rows, whole), share_sentence(rows, environment))):
                    live.note(said)
    finally:
        trackers.close()
    return finished


def _otherwise(key: str, then: Any, now: Any) -> str:
    """What a part of the environment that has changed since the run began means for its numbers."""
    if key == "recipe":  # recorded as a digest, as code is, which tells nobody anything
        return "config.yaml is no longer the recipe that the run began with: numbers differ"
    if key == "code":
        then, now = then or {}, now or {}
        changed = ", ".join(name for name in sorted({*then, *now}) if then.get(name) != now.get(name))
        return f"{changed} is no longer the code that the run began with: numbers differ"
    return f"{key} was {then}, now {now}: numbers may differ in their last bits"


def _uncorrected(config: RunConfig, rows: Sequence[dict[str, Any]]) -> str:
    """What to add where the two sides' formats differ and nothing corrects for it; "" where there is nothing to say.

    ``rows``: the precision table's, by what is active."""
    active = {row["role"]: row["active"] for row in rows}
    learner, rollout = active["learner"], active["rollout"]
    if learner == rollout or config.algorithm.correction != CorrectionConfig():
        return ""
    return (
        f"warning: the learner is in {learner}, the rollout in {rollout}, and algorithm.correction is none, so their "
        "difference is learnt from as if it were the policy's: add algorithm.correction=token_tis, or give both one "
        "format"
    )


def _still(config: RunConfig, parts: Parts) -> set[str]:
    """The metrics of the screen that no step of this run can move."""
    scaler, still = parts.learner.step.scaler, set() if parts.task.verifier.decides else {*VERDICTS}
    if config.evaluation is None:
        still.add("eval/greedy_accuracy")
    if isinstance(scaler, FixedScaler):
        still |= {"precision/loss_scale"} | ({"precision/retries"} if scaler.scale == 1 else set())
    return still


@contextmanager
def _screen(
    steps: int, done: int, rank0: bool, still: Collection[str], expected: Callable[[], Usual]
) -> Iterator[Live]:
    """What a person sees; of other ranks than 0, nothing."""
    if rank0:
        with Live(steps, done=done, still=still, expected=expected) as live:
            yield live
        return
    with open(os.devnull, "w") as nowhere, Live(steps, done=done, console=Screen(file=nowhere)) as live:
        yield live


@contextmanager
def _resumable(run: RunDirectory) -> Iterator[None]:
    """Ctrl-C at any time from here on ends with the command that continues the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(
            f"interrupted; continue with: mantissa train --resume {shlex.quote(str(run.path))}"
        ) from None


def environment_of(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Where the run runs, and the precision table with what the probes saw."""
    rows = _precision(parts)
    for row in rows:
        row["evidence"] = parts.evidence.get(row["role"], "")
    guards = list(parts.sampler.grader.notes)
    exact = {"exact": lines} if (lines := parts.exact) else {}
    products = {} if parts.precision.products is None else {"products": parts.precision.products.record()}
    weights = {"weights": note} if (note := parts.model.config.weights_note) else {}
    device, ranks = str(parts.device), parts.ranks
    several = {} if ranks.alone else {"processes": ranks.world, "parallel": ranks.kind}
    share: dict[str, Any] = {}
    if parts.twin is not None:
        share = {"engine_share": parts.twin.facts(parts.sampler.engine)}
    made: dict[str, Any] = {"recipe": _recipe(config)}
    made |= {"code": digests} if (digests := _code(config.model_dump(mode="json"))) else {}
    about = {"precision": rows, "training_device": device, "grading": guards, "verdicts": parts.task.verifier.decides}
    return environment() | about | made | products | weights | exact | several | share


def _recipe(config: RunConfig) -> str:
    """SHA-256 of a recipe without what may change when a run goes on, and where it lies."""
    given = config.model_dump(mode="json", exclude={"run_dir", "nproc", "parallel"}, exclude_defaults=True)
    given.get("rollout", {}).get("vllm", {}).pop("server", None)
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def _code(part: Any) -> dict[str, str | None]:
    """SHA-256 of the files of the recipe's own functions (losses, rewards, a judge), by their import paths."""
    if isinstance(part, dict):
        named = part.get("function")
        here = {named: source_digest(named)} if isinstance(named, str) and re.fullmatch(IMPORT_PATH, named) else {}
        return here | _code([*part.values()])
    return {name: digest for each in part for name, digest in _code(each).items()} if isinstance(part, list) else {}


def _precision(parts: Parts) -> list[dict[str, Any]]:
    """The precision table; where Adam's moments are not as the masters, with a line of their own."""
    rows = _rows(parts)
    for name, other in parts.beside.items():
        rows += [{**row, "role": f"{name} {row['role']}"} for row in _rows(other)]
    return rows


def _rows(parts: Parts) -> list[dict[str, Any]]:
    rows = parts.precision.rows()
    moments = described(parts.learner.step.optimizer)
    if moments is not None:
        at = next(index for index, row in enumerate(rows) if row["role"] == "master")
        rows[at]["reason"] = "weights and what updates them; Adam moments are the next line"
        line = {"role": "moments", "requested": "8bit", "active": "8bit", "kernels": "torchao", "reason": moments}
        rows.insert(at + 1, rows[at] | line)
    if (masters := parts.learner.step.masters).kind != "fp32":
        here = next(row for row in rows if row["role"] == "master")
        here |= {"requested": masters.kind, "active": "bf16", "kernels": "simulated", "reason": masters.reason}
    measured = audit(parts.model, parts.learner.step)
    if measured.smallest is not None:
        master = next(row for row in rows if row["role"] == "master")
        master["reason"] = "; ".join(filter(None, (master["reason"], f"probed: {measured.update}")))
    return rows


def _parameters(parts: Parts) -> str:
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    training = sum(parameter.numel() for parameter in parts.learner.trained.values())
    return f"{total:,}" if training == total else f"{total:,}, of which {training:,} train"


def go(run: Run) -> bool:
    """Run to the end: from the newest checkpoint, or from the beginning. False: the guard fell back on the way, and the
    newest checkpoint is to be gone on from in another format."""
    saved = run.ranks.broadcast(saved_steps(run.folder.checkpoints))  # rank 0 may be about to write one
    step = 0
    if saved:
        step = restore(run, load_checkpoint(run.folder.checkpoints, saved[-1]))
    else:
        begin(run)
        save(run, 0)
    run.source = open_source(run)
    run.source.start(step, run.learner.weights, run.learner.version, run.ahead)
    hold_room(run, step)
    try:
        with settled():
            while step < run.config.steps and not run.fell_back:
                try:
                    row = take_step(run, step + 1)
                except SampleAgain:
                    run.source.again(run.position)
                else:
                    step += 1
                    settle(run, step, row)
    finally:
        run.source.close()
        run.room.release()
    if run.fell_back:
        return False
    export(run)
    return True


def export(run: Run) -> None:
    """Write the policy as it now is into the run's folder."""
    weights = run.ranks.whole(run.learner.weights) if run.ranks.sharded else None
    if run.ranks.rank0:
        run.base.export()
        run.parts.save(run.folder.policy_path, weights)


def open_source(run: Run) -> SyncSource:
    """Where batches come from, at the position after the last that was sampled."""
    config, engine = run.config, run.sampler.engine
    params = dataclasses.replace(run.params, most_probable=run.learner.most_probable)
    collector = Collector(run.sampler, run.train, run.kept, config.rollout, params, config.seed)
    collector.position = run.ahead[-1].position if run.ahead else run.position
    if config.steps_behind == 0:
        return SyncSource(collector, engine)
    return AsyncSource(collector, engine, config.steps_behind, config.steps, run.parts.device)


def begin(run: Run) -> None:
    """The run's beginning, the warm start included."""
    run.folder.rewind(0)
    if run.guard is not None:
        run.guard.restore(0, {}, [])
    run.folder.warm_start.truncate(-1)
    config = run.config
    if config.warm_start is not None:

        def report(row: dict[str, Any]) -> None:
            run.folder.warm_start.append(row)
            run.live.note(
                f"warm start {row['step']:>4}   loss {row['warm_start/loss']:.3f}   "
                f"accuracy {row['warm_start/accuracy']:.3f}"
            )

        warm = config.warm_start
        run.live.note(
            f"warm start: at most {warm.steps:,} supervised steps, until accuracy {warm.target_accuracy:g}; "
            "warm_start.steps=N for fewer"
        )
        with run.base.warming():
            warm_start(run.parts, warm, run.params, report, run.live.doing)
    if run.ranks.rank0:
        run.base.keep()
    run.sampler.engine.sync(run.learner.weights, run.learner.version)
    for term in run.learner.terms:
        term.begin(run.learner.weights, run.learner.version)
    run.kept = perfectible(run)


def perfectible(run: Run) -> list[int]:
    """Indices of the training problems to use: all, or those the policy solves sometimes."""
    every = list(range(len(run.train)))
    filter_ = run.config.perfectible
    if filter_ is None:
        return every
    sampled = run.sampler.sample(
        run.train, filter_.samples, run.params, run.learner.version, run.config.seed, "perfectible"
    )
    rates = success_rates(sampled, run.sampler.grade(sampled))
    kept = [index for index in every if filter_.low <= rates[index] <= filter_.high]
    run.live.note(
        f"perfectible: kept {len(kept)} of {len(every)} prompts with success rate in "
        f"[{filter_.low}, {filter_.high}] over {filter_.samples} samples (mean rate {sum(rates) / len(rates):.3f})"
    )
    if not kept:
        raise MantissaError(
            f"perfectible: no training prompt has a success rate in [{filter_.low}, {filter_.high}] "
            f"(mean {sum(rates) / len(rates):.3f}); warm-start to another accuracy, or set perfectible=null"
        )
    return kept


_LR_WARMUP = 20


# The warm start
def warm_start(
    parts: Parts,
    config: WarmStartConfig,
    params: SamplingParams,
    report: Callable[[dict[str, Any]], None],
    doing: Callable[[str], None] = lambda what: None,
) -> None:
    """Train on the task's solutions until ``config.steps``, or until sampled accuracy reaches the target.

    ``report`` receives ``{"step", "warm_start/loss", "warm_start/accuracy"}`` after each evaluation; ``doing`` is told
    each step's number, in words. Every problem of the split has a solution: ``assemble`` has seen to that.
    """
    learner, sampler = parts.learner, parts.sampler
    solved, heldout = parts.task.split("warm_start"), parts.task.split("heldout")[: config.problems]
    optimizer_step = learner.optimizer_step(
        learning_rate(config.lr, _LR_WARMUP), parts.new_scaler(), purpose="warm start"
    )
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        doing(f"warm start {step:,} of at most {config.steps:,}")
        indices = stream_slice(len(solved), (step - 1) * config.batch, config.batch, learner.seed, "warm_start")
        sequences = _sequences([solved[index] for index in indices], sampler, parts.device)
        losses.append(_supervised_step(learner, optimizer_step, sequences))
        if step % config.evaluate_every == 0 or step == config.steps:
            sampler.engine.sync(learner.weights, learner.version)
            accuracy = sampler.accuracy(
                heldout, 1, params, learner.version, learner.seed, "warm_start evaluation", step
            )
            sampler.engine.pause()
            report({"step": step, "warm_start/loss": sum(losses) / len(losses), "warm_start/accuracy": accuracy})
            losses.clear()
            if accuracy >= config.target_accuracy:
                return


def _sequences(problems: Sequence[Problem], sampler: Sampler, device: torch.device) -> Sequences:
    """Each prompt with its solution and an end token."""
    end = sampler.tokenizer.eos_ids[0]
    responses = []
    for problem in problems:
        assert problem.solution is not None, f"problem {problem.id} has no solution"
        responses.append([*sampler.tokenizer.encode(problem.solution), end])
    return Sequences.build([sampler.encode(problem) for problem in problems], responses, device)


def _supervised_step(learner: Learner, step: OptimizerStep, sequences: Sequences) -> float:
    """One step on -mean_t logp; returns that loss."""
    scale_BR, ranks = aggregation_scale(sequences.mask_BR, "token_mean"), learner.ranks
    rows = sequences.rows
    parts = sequences.micro_batches(rows, learner.config.micro_batch_tokens, ranks)
    losses: list[torch.Tensor] = []

    def backward(scale: float) -> torch.Tensor:
        losses.clear()
        for part_rows in parts:
            part = sequences.select(part_rows if len(part_rows) else rows[:1])
            logp_N = learner.logp(part, learner.kernels)
            if len(part_rows):
                weight_N = scale_BR[part_rows, : part.mask_BR.shape[1]][part.mask_BR]
            else:
                weight_N = torch.zeros_like(logp_N)  # only there for the exchange with other ranks
            loss = -masked_sum(logp_N * weight_N, torch.ones_like(logp_N, dtype=torch.bool))
            losses.append(loss.detach())
            (loss * scale).backward()
        ranks.sum_gradients(step.parameters.values())
        return torch.stack(losses).sum()

    step.run(backward)
    return ranks.sum_of(float(torch.stack(losses).sum()))
