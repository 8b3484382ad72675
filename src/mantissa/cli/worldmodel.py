"""``mantissa worldmodel``: train a world model on trajectories, ask it, measure it."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError, say
from mantissa.base.readers.json import parse_json
from mantissa.cli import Device, progress, split

if TYPE_CHECKING:
    from mantissa.genesis.worldmodel import HistoryRow, WorldModel

app = typer.Typer(help="Predict how actions end, from trajectories.", rich_markup_mode="rich", no_args_is_help=True)
_Buffer = Annotated[
    str, typer.Argument(metavar="BUFFER", help="An SQLite file of trajectories, or redis://HOST:PORT/0.")
]
_Epochs = Annotated[int, typer.Option(min=1, help="Passes over the trajectories.")]
_Batch = Annotated[int, typer.Option(min=1, help="Trajectories to an optimiser step.")]
_Hidden = Annotated[int, typer.Option(help="Width of the hidden layers.")]
_Members = Annotated[int, typer.Option(help="Networks of the ensemble.")]
_Rate = Annotated[float, typer.Option(help="Adam's learning rate.")]
_Seed = Annotated[int, typer.Option(min=0)]


@app.callback()
def worldmodel() -> None:
    """Predict how actions end, from trajectories."""


@app.command()
def train(
    buffer: Annotated[
        str, typer.Argument(metavar="BUFFER", help="An SQLite file of trajectories, or redis://...")
    ] = "",
    model: Annotated[
        Path | None, typer.Option("--model", help="File to write, and to go on from if it is there.")
    ] = None,
    scenario: Annotated[str, typer.Option(help="Instead of BUFFER: warmup, standard or stress, synthetic.")] = "",
    epochs: _Epochs = 3,
    batch_size: _Batch = 32,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16.", show_default="by ENABLE_FP16_TRAINING: fp16")
    ] = "",
    hidden_dim: _Hidden = 256,
    members: _Members = 3,
    lr: _Rate = 1e-3,
    seed: _Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a world model on the trajectories of BUFFER, and write it to --model.

    A scenario measures speed and stability alone: its outcomes depend on nothing, so no model can predict them.

    [bold]Examples[/]

    mantissa worldmodel train runs/evolve/archive.db --model world.pt --precision bf16

    mantissa worldmodel train --scenario standard --precision fp16
    """
    from mantissa.base.ranks import choose_device
    from mantissa.genesis.worldmodel import SCENARIOS, WorldModel, synthetic

    if bool(buffer) == bool(scenario) or scenario not in ("", *SCENARIOS):
        raise MantissaError(f"give a BUFFER, or --scenario with one of {', '.join(SCENARIOS)}")
    source: Any = buffer
    if scenario:
        epochs, count = SCENARIOS[scenario]
        source, batch_size = synthetic(count, seed), 16
    else:
        _check_there(buffer)
    made = WorldModel(
        hidden_dim=hidden_dim, members=members, lr=lr, precision=precision or None, seed=seed, model_path=model,
        device=choose_device(device), say=say,
    )  # fmt: skip
    rows = made.train(epochs, batch_size, source, progress=_told)
    progress("")
    for row in rows:
        say(f"epoch {row.epoch}: loss {row.loss:.4f}, overflow in {row.overflows} of {row.batches} batches")
    rate = sum(row.overflows for row in rows) / sum(row.batches for row in rows)
    say(f"overflow rate {rate:.1%} ({_judged(rate)}), loss scale {made.trainer.scaler.scale:g}")
    if scenario:
        seconds = rows[-1].timestamp - rows[0].timestamp
        if seconds > 0:
            say(f"{len(source) * (len(rows) - 1) / seconds:.0f} trajectories/s after the first epoch")
    else:
        say(f"temperature {made.temperature:.3g}, from {made.calibration:.0%} of the tasks, kept apart")
    if model is not None:
        say(f"written: {made.save()}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A file that train wrote.")],
    state: Annotated[str, typer.Argument(metavar="STATE", help="JSON, or a file of it.")],
    actions: Annotated[list[str], typer.Argument(metavar="ACTIONS", help="So far; the last is the one asked about.")],
) -> None:
    """Print, as JSON, how probably an action succeeds in a state and what it gains.

    [bold]Example[/]

    mantissa worldmodel predict world.pt '{"metrics": {"overall_score": 0.5}}' "replace < by <="
    """
    with boundary("STATE", "expected an object in JSON, or a file of it"):
        text = state if state.lstrip().startswith("{") else Path(state).read_text("utf-8")
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    say(json.dumps(dataclasses.asdict(_stored(model).predict(value, actions))))


@app.command(name="eval")
def evaluate(
    buffer: _Buffer,
    model: Annotated[
        Path | None, typer.Option("--model", help="Measure this one, on tasks that it has not seen.")
    ] = None,
    precisions: Annotated[str, typer.Option(help="Else: train afresh in each of these.")] = "fp32",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings from different weights, and folds.")] = 1,
    folds: Annotated[int, typer.Option(min=2, help="Parts that the tasks are divided into.")] = 5,
    epochs: _Epochs = 3,
    batch_size: _Batch = 32,
    hidden_dim: _Hidden = 256,
    members: _Members = 3,
    lr: _Rate = 1e-3,
) -> None:
    """Measure how well the ends of trajectories are predicted, on tasks that were not trained on.

    Without --model: models are trained on all folds of tasks but one and predict that one. AUROC beside that of
    counting how each action ended; Brier score, calibration error (ECE), squared error of the improvement.

    [bold]Example[/]

    mantissa worldmodel eval runs/evolve/archive.db --precisions fp32,bf16,fp16 --seeds 3
    """
    from mantissa.genesis.worldmodel import WorldModel, cross_validate, open_buffer

    _check_there(buffer)
    with open_buffer(buffer) as opened:
        trajectories = opened.newest()[::-1]
    if model is not None:
        stored = _stored(model)
        unseen = [each for each in trajectories if each.task not in stored.seen_tasks]
        scores = stored.evaluate(unseen)
        if scores is None:
            raise MantissaError(f"{model} has seen every task of {buffer} that has a known outcome: leave out --model")
        say(json.dumps(dataclasses.asdict(scores)))
        return
    known = [each for each in trajectories if each.final_outcome != "unknown"]
    say(f"{len(known):,} trajectories of {len({each.task for each in known})} tasks")
    say(f"{'precision':9}  seed  AUROC  counting  {'gain (95%)':22}  Brier    ECE  overflow")
    for seed in range(seeds):
        for precision in split(precisions):
            made = partial(WorldModel, hidden_dim=hidden_dim, members=members, lr=lr, precision=precision, seed=seed)
            progress(f"seed {seed}, {precision}")
            found = cross_validate(trajectories, made, folds=folds, epochs=epochs, batch_size=batch_size, seed=seed)
            progress("")
            gain = f"{found.gain.value:+.3f} ({found.gain.interval.replace(' to ', '..')})"
            ours, theirs = _figure(found.model.auroc), _figure(found.baseline.auroc)
            say(
                f"{precision:9}  {seed:4}  {ours:>5}  {theirs:>8}  {gain:22}  {found.model.brier:.3f}  "
                f"{found.model.ece:.3f}  {found.overflow_rate:8.1%}"
            )


def _stored(path: Path) -> WorldModel:
    from mantissa.genesis.worldmodel import WorldModel
    from mantissa.genesis.worldmodel.model import stored_sizes

    made: WorldModel = WorldModel(model_path=path, precision="fp32", **stored_sizes(path))  # type: ignore[arg-type]
    return made


def _check_there(buffer: str) -> None:
    if "://" not in buffer and not Path(buffer).is_file():
        raise MantissaError(f"{buffer}: there is no such file; mantissa evolve writes one")


def _told(row: HistoryRow) -> None:
    progress(f"epoch {row.epoch}: loss {row.loss:.4f}")


def _judged(rate: float) -> str:
    """By the known benchmark's thresholds."""
    return "ideal" if rate < 0.01 else "acceptable" if rate < 0.05 else "watch it" if rate <= 0.1 else "high"


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
