"""The loop: the steps of a run, begun, or gone on with where it was stopped."""

from __future__ import annotations

import dataclasses
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.model import save_model
from mantissa.rl.collect.batch import Collector
from mantissa.rl.collect.sampler import success_rates
from mantissa.rl.collect.source import AsyncSource, SyncSource
from mantissa.rl.probes import SampleAgain
from mantissa.rl.run import Run, hold_room, restore, save
from mantissa.rl.step import settle, take_step
from mantissa.rl.warm_start import warm_start
from mantissa.training import load_checkpoint, saved_steps


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
        save_model(run.parts.model, run.parts.tokenizer, run.folder.policy_path, weights=weights)


def open_source(run: Run) -> SyncSource:
    """Where batches come from, at the position after the last that was sampled."""
    config, engine = run.config, run.sampler.engine
    params = dataclasses.replace(run.params, most_probable=config.algorithm.loss.most_probable)
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
    run.folder.truncate_warm_start(-1)
    config = run.config
    if config.warm_start is not None:

        def report(row: dict[str, Any]) -> None:
            run.folder.append_warm_start(row)
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
    if run.reference is not None and run.reference.teacher is None:
        run.reference.take(run.learner.weights, run.learner.version)
    if run.learner.critic is not None:
        run.learner.critic.take(run.learner.weights)
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
