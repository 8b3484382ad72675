"""Starting and resuming a run: what surrounds the loop. The command line is a thin layer over these two functions.

On several processes each calls them with the same arguments. Rank 0 makes and writes the folder, and talks; the others
look on.
"""

from __future__ import annotations

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
from rich.console import Console

from mantissa.algorithms.correction import CorrectionConfig
from mantissa.base.errors import MantissaError, StoppedError
from mantissa.base.functions import IMPORT_PATH, source_digest
from mantissa.base.ranks import ALONE, Ranks, choose_device, join, world_size
from mantissa.guard import ReferenceRun
from mantissa.guard.watch import fall_back_of
from mantissa.kernels import resolve
from mantissa.kernels.cpu import CpuProducts
from mantissa.mismatch.usual import Usual
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.config.run import RunConfig, apply_overrides, make_config, widened
from mantissa.rl.run import Run
from mantissa.rl.step import go
from mantissa.runs.directory import Onlooker, RunDirectory, default_path, environment
from mantissa.runs.health import VERDICTS, expected_gap, gap_sentence, share_sentence
from mantissa.runs.live import Live, Trackers, from_names
from mantissa.runs.report import build_report
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
        try:
            path = ranks.broadcast(config.run_dir or str(default_path(config.name)))
            plain = config.model_dump(mode="json", exclude={"run_dir"})
            run = RunDirectory.create(path, plain, environment_of(config, parts)) if ranks.rank0 else Onlooker(path)
        except BaseException:
            parts.close()
            raise
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
                live.note(f"resumed after step {done} of {config.steps}")
                if not steps:
                    live.note(f"warning: {run.checkpoints} holds no checkpoint: the run begins again from its start")
                for key, (then, now) in run.record_resume(done, environment_of(config, parts)).items():
                    much = "numbers differ" if key == "code" else "numbers may differ in their last bits"
                    live.note(f"warning: {key} was {then}, now {now}: {much} from the first run's")
            finished = _kind(config).go(config, parts, run, trackers, live)
            if rank0 and finished:
                rows, environment = run.read_metrics(), run.environment
                whole = expected_gap(environment, run.config)
                for said in filter(None, (gap_sentence(rows, whole), share_sentence(rows, environment))):
                    live.note(said)
    finally:
        trackers.close()
    return finished


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
    with open(os.devnull, "w") as nowhere, Live(steps, done=done, console=Console(file=nowhere)) as live:
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
    code = {"code": digests} if (digests := _code(config.model_dump(mode="json"))) else {}
    about = {"precision": rows, "training_device": device, "grading": guards, "verdicts": parts.task.verifier.decides}
    return environment() | about | code | products | weights | exact | several | share


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
