"""What ``mantissa bench`` does: checks its options, measures, and writes one folder."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from mantissa.base.errors import MantissaError
from mantissa.base.files import atomic_file, disk_errors, write_atomically
from mantissa.bench.options import BenchConfig
from mantissa.bench.rows import SIMULATION, Row, common, crossover_sentences, write_csv
from mantissa.bench.runner import SCENARIOS, Runner, Setting, engaged, run_scenario, run_size
from mantissa.bench.workload import Source, called, factory_named, parse_size, short
from mantissa.runs import rows as rows_of
from mantissa.runs.plots import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = {"cpu": "10k,30k,100k,300k,1M,3M,10M", "cuda": "10k,100k,1M,3M,10M,30M,100M"}
SIZE_BATCH = {"cpu": 256, "cuda": 4096}  # on a GPU: enough that products and not AdamW's memory traffic bound a step
SCENARIO_PARAMETERS, SCENARIO_BATCH = 1_000_000, 32


def _sources(config: BenchConfig) -> list[Source]:
    """What the sweep over sizes measures, small to large."""
    if config.model is not None:
        return [Source(config.model)]
    names = SIZES[torch.device(config.device).type].split(",") if config.sizes is None else config.sizes
    return [Source(parameters=size) for size in sorted({parse_size(name) for name in names})]


def _scenario_source(config: BenchConfig) -> Source:
    """The model of the scenarios: one that the sweep shows to be no GPU's work, which the table says."""
    return Source(config.model) if config.model is not None else Source(parameters=SCENARIO_PARAMETERS)


@dataclass
class Result:
    """What was found. ``folder`` holds bench.csv, bench.jsonl, bench.png, summary.txt and what --profile adds."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """The crossovers; and on a CPU what simulation is for."""
        said = crossover_sentences(self.rows)
        if any(row["backend"] == "simulated" for row in self.rows):
            said.append(SIMULATION)
        return said


def run_bench(config: BenchConfig, say: Callable[[str], None]) -> Result:
    """Measure everything ``config`` asks for. Rows are on disk as soon as they are made.

    Rows whose precision did not engage are in ``Result.refused`` and nowhere else.
    """
    sources = _sources(config)
    if config.model is not None:
        called(config.model, factory_named(config.model))  # what is wrong with it is said before anything is made
    result = Result(new_folder(config.out, "bench", "bench.csv"))
    setting = Setting(config.precision, config.device, config.backend, config.repeats, common(config.device),
                      result.refused.append, say)  # fmt: skip
    for name in config.scenarios:
        batch = config.batch or SCENARIO_BATCH
        result.rows += run_scenario(SCENARIOS[name], _scenario_source(config), batch, setting)
        _write(result)
    kind = torch.device(config.device).type
    sweep_batch = config.batch or (SIZE_BATCH[kind] if config.model is None else SCENARIO_BATCH)
    for source in sources:
        result.rows += run_size(source, sweep_batch, setting)
        _write(result)
    for request in setting.requests(_scenario_source(config)) if config.profile else ():
        say(f"profile: {request}")
        for runner in engaged([request], 0, setting.refuse).values():
            result.profiles.append(profile_runner(runner, config.batch or SCENARIO_BATCH, result.folder))
    if result.rows:
        draw(result.folder / "bench.png", result.rows)
        write_atomically(result.folder / "summary.txt", "\n".join(result.sentences()) + "\n")
    return result


def new_folder(out: Path | None, kind: str, marker: str) -> Path:
    """The folder, made; ``runs/KIND-TIME`` where none is named. One that holds a ``marker`` already is refused."""
    folder = out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / marker).exists():
        raise MantissaError(f"--out {folder}: it holds a {kind} already; choose another folder")
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise MantissaError(f"--out {folder}: it is a file; choose another folder") from None
    return folder


def _write(result: Result) -> None:
    if result.rows:
        write_csv(result.folder / "bench.csv", result.rows)
        rows_of.write(result.folder / "bench.jsonl", result.rows)


# The picture: a step's time and its ratio to fp32 by parameters, and the scenarios' losses.


COLOURS = {"fp32": "#555555", "bf16": "#0072b2", "fp16": "#d55e00"}  # told apart in every colour vision
MARKERS = {"fp32": "o", "bf16": "s", "fp16": "^"}


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Draw what the rows hold into ``path`` (PNG); False, and no file, where there are none."""
    sizes = [row for row in rows if row["scenario"] == "size"]
    scenarios = [row for row in rows if row["scenario"] != "size"]
    panels: list[Any] = []
    if len({row["parameters"] for row in sizes}) > 1:
        panels.append(lambda axes: _step_time(axes, sizes))
        if any(row["speed_up"] is not None and row["precision"] != "fp32" for row in sizes):
            panels.append(lambda axes: _speed_up(axes, sizes))
    if scenarios:
        panels += [lambda axes: _durations(axes, scenarios)] if len(panels) == 0 else []
        panels.append(lambda axes: _losses(axes, scenarios))
    if not panels:
        return False
    with figure(4.3 * len(panels) + 0.4, 4.3, printed=True) as drawing:
        for panel, axes in zip(panels, drawing.subplots(1, len(panels), squeeze=False)[0], strict=True):
            panel(axes)
        drawing.suptitle(_title(rows, 52 * len(panels)), x=0.01, ha="left", fontsize=10)
        with atomic_file(path) as temporary:
            drawing.savefig(temporary, format="png", dpi=150, facecolor="white")
    return True


def _title(rows: Sequence[Row], width: int) -> str:
    row = rows[0]
    threads = "" if row["memory_measure"] == "torch's allocator" else f", {row['threads']} threads"
    models = ", ".join(dict.fromkeys(_family(row) for row in rows))
    where = f"{models} on {row['device']}{threads}, torch {row['torch']}; medians and quartiles of {row['repeats']}"
    where += " repeats"
    return "\n".join(textwrap.wrap(where, width))


def _family(row: Row) -> str:
    return str(row["model"]).partition(" of ")[0]


def _precisions(rows: Sequence[Row]) -> dict[str, str]:
    """Precision -> its label, with the kernels that computed it."""
    return {row["precision"]: f"{row['precision']}, {row['backend']}" for row in rows}


def _step_time(axes: Axes, rows: Sequence[Row]) -> None:
    for precision, label in _precisions(rows).items():
        mine = sorted((r for r in rows if r["precision"] == precision), key=lambda r: r["parameters"])
        _points(axes, precision, label, [r["parameters"] for r in mine], mine, "duration", "_s", 1e3, linestyle="-")
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"One training step of {rows[0]['batch_size']} samples")
    _parameter_axis(axes)


def _speed_up(axes: Axes, rows: Sequence[Row]) -> None:
    values = [1.0]
    for precision, label in _precisions(rows).items():
        mine = sorted((r for r in rows if r["precision"] == precision and r["speed_up"]), key=lambda r: r["parameters"])
        if precision != "fp32" and mine:
            _points(axes, precision, label, [r["parameters"] for r in mine], mine, "speed_up", linestyle="-")
            values += [r[f"speed_up_{q}"] for r in mine for q in ("low", "high")]
    axes.axhline(1, color=COLOURS["fp32"], linewidth=1.2)
    axes.annotate("fp32", (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=COLOURS["fp32"])
    axes.set_yscale("log")
    axes.set_ylim(min(0.5, min(values) / 1.1), max(2.0, max(values) * 1.1))
    axes.set_ylabel("times fp32's speed (above the line: faster)")
    axes.set_title("Speed-up over fp32")
    _parameter_axis(axes)


def _points(axes: Axes, precision: str, label: str, x: Sequence[float], rows: Sequence[Row], column: str,
            unit: str = "", scale: float = 1.0, **style: Any) -> None:  # fmt: skip
    """A column's medians at ``x``, its quartiles as bars."""
    middle, low, high = ([scale * row[f"{column}{q}{unit}"] for row in rows] for q in ("", "_low", "_high"))
    errors = [np.subtract(middle, low), np.subtract(high, middle)]
    style = {"linestyle": ""} | style  # scenarios are no series: only sizes are joined
    axes.errorbar(x, middle, errors, label=label, color=COLOURS[precision], marker=MARKERS[precision], markersize=4.5,
                  elinewidth=1, capsize=2, **style)  # fmt: skip


def _parameter_axis(axes: Axes) -> None:
    """Parameters across, and plain numbers up, both on log axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.legend(loc="best")
    low, high = axes.yaxis.get_view_interval()
    if high / low < 300:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis, say in ((axes.xaxis, short), (axes.yaxis, "{:g}".format)):
        axis.set_major_formatter(FuncFormatter(lambda value, _, say=say: say(value)))
        axis.set_minor_formatter(NullFormatter())


def _durations(axes: Axes, rows: Sequence[Row]) -> None:
    _by_scenario(axes, rows, "duration", "_s")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.set_title("Duration of the training")


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    _by_scenario(axes, rows, "final_loss", "")
    best = rows[0]["best_loss"]
    if best is not None:
        axes.axhline(best, color="#222222", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(f"best possible, {best:g}", (1, best), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", xytext=(0, 2), textcoords="offset points", color="#222222")  # fmt: skip
        axes.set_ylim(bottom=0)
    axes.set_ylabel("mean loss on held-out samples")
    axes.set_title(f"Loss after each scenario, {short(rows[0]['parameters'])} parameters")


def _by_scenario(axes: Axes, rows: Sequence[Row], column: str, unit: str) -> None:
    """A point with quartiles for each scenario and precision, side by side."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    labels = _precisions(rows)
    for i, (precision, label) in enumerate(labels.items()):
        mine = [row for row in rows if row["precision"] == precision]
        x = [names.index(row["scenario"]) + 0.18 * (i - (len(labels) - 1) / 2) for row in mine]
        _points(axes, precision, label, x, mine, column, unit)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="best")


# Where a step's time and memory go: a torch.profiler trace, and tables by part and by operation.
#
# The parts are marked from outside the trainer: forward (and loss) and backward are the two contexts of its autocast,
# the optimiser's step has hooks of its own, and the rest is what is left of the step: unscaling, the search for
# overflow, the gradient norm. A part that runs twice in a step (a retry) counts twice.
#
# A GPU still works when the code that gave it its work has gone on, and autograd gives it from a thread of its own; so
# there every part ends by waiting for the GPU, and its memory is read from torch's allocator at both ends. Operations
# have their kernels' time there. Waiting and profiling cost time: compare parts with each other, not with other steps.


PARTS = ("forward", "backward", "optimizer step")
_PREFIX = "mantissa/"
_WARM_UP, _STEPS, _TOP = 2, 5, 12


@dataclass(frozen=True)
class Line:
    """One line of a table: milliseconds and calls a step, share of the step, bytes kept when it ended (net)."""

    name: str
    milliseconds: float
    share: float
    calls: float
    kept_bytes: float


@dataclass(frozen=True)
class Profile:
    """``parts``: forward, backward, optimiser step, rest; they add up to the step. ``operations``: by own time."""

    precision: str
    device: str
    step_milliseconds: float
    parts: tuple[Line, ...]
    operations: tuple[Line, ...]

    def text(self) -> str:
        """Both tables, for a screen and for a file."""
        head = f"{self.precision} on {self.device}: {self.step_milliseconds:.3g} ms a step under the profiler"
        return "\n".join([head, "", *_table("part", self.parts), "", *_table("operation", self.operations), ""])


def profile_runner(runner: Runner, batch_size: int, folder: Path) -> Profile:
    """Profile five steps; writes ``trace-PRECISION.json`` (for chrome://tracing or Perfetto) and ``profile-*.txt``."""
    precision, cuda = runner.request.precision, torch.device(runner.request.device).type == "cuda"
    batch = runner.batches(1, batch_size, seed=0)[0]
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    marks = _Marks(cuda)
    with _marked(runner, marks):
        for _ in range(_WARM_UP):
            runner.step(batch)
        marks.gpu_bytes.clear()
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            for _ in range(_STEPS):
                with marks.span("step"):
                    runner.step(batch)
    with atomic_file(folder / f"trace-{precision}.json") as temporary:
        profiler.export_chrome_trace(str(temporary))
    result = _read(profiler, precision, runner.request.device, marks)
    write_atomically(folder / f"profile-{precision}.txt", result.text())
    return result


class _Marks:
    """Spans in the trace, by name; on a GPU each waits at its end and counts the bytes it kept (``gpu_bytes``)."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.gpu_bytes: dict[str, int] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        before = torch.cuda.memory_allocated() if self.cuda else 0
        with record_function(_PREFIX + name):
            yield
            if self.cuda:
                torch.cuda.synchronize()
        if self.cuda:
            self.gpu_bytes[name] = self.gpu_bytes.get(name, 0) + torch.cuda.memory_allocated() - before

    def around(self, name: str, context: Callable[[], Any]) -> Callable[[], AbstractContextManager[None]]:
        """``context``, in a span."""

        @contextmanager
        def both() -> Iterator[None]:
            with self.span(name), context():
                yield

        return both


@contextmanager
def _marked(runner: Runner, marks: _Marks) -> Iterator[None]:
    """Mark the parts of the runner's steps; leaves it as it was."""
    trainer, optimizer = runner.trainer, runner.trainer.optimizer
    opened = contextlib.ExitStack()

    def begin(*_: Any) -> None:
        opened.enter_context(marks.span("optimizer step"))

    hooks = (optimizer.register_step_pre_hook(begin),
             optimizer.register_step_post_hook(lambda *_: opened.close()))  # fmt: skip
    autocast = trainer.autocast
    both = {name: marks.around(name, getattr(autocast, name)) for name in ("forward", "backward")}
    trainer.autocast = SimpleNamespace(**both)  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer.autocast = autocast
        for hook in hooks:
            hook.remove()


def _read(profiler: profile, precision: str, device: str, marks: _Marks) -> Profile:
    host = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]  # kernels: in their ops
    spans = {event.key.removeprefix(_PREFIX): event for event in host if event.key.startswith(_PREFIX)}

    def milliseconds(microseconds: float) -> float:
        return float(microseconds) / 1e3 / _STEPS

    def kept(name: str) -> float:
        return (marks.gpu_bytes[name] if marks.cuda else spans[name].cpu_memory_usage) / _STEPS

    whole = milliseconds(spans["step"].cpu_time_total)
    parts = []
    for name in PARTS:
        if name in spans:  # a step that was skipped has no optimiser's part
            time = milliseconds(spans[name].cpu_time_total)
            parts.append(Line(name, time, time / whole, spans[name].count / _STEPS, kept(name)))
    rest = whole - sum(part.milliseconds for part in parts)
    rest_kept = kept("step") - sum(part.kept_bytes for part in parts)
    parts.append(Line("rest: unscale, look for overflow, norm", rest, rest / whole, 1, rest_kept))
    kind = "device" if marks.cuda else "cpu"
    operations = []
    for event in host:
        if not event.key.startswith(_PREFIX):
            time = milliseconds(getattr(event, f"self_{kind}_time_total"))
            memory = getattr(event, f"self_{kind}_memory_usage") / _STEPS
            operations.append(Line(event.key, time, time / whole, event.count / _STEPS, memory))
    operations.sort(key=lambda line: -line.milliseconds)
    return Profile(precision, device, whole, tuple(parts), tuple(operations[:_TOP]))


def _table(what: str, lines: tuple[Line, ...]) -> list[str]:
    out = [f"{what:<44} {'ms a step':>10} {'share':>7} {'calls':>7} {'memory kept':>12}"]
    for line in lines:
        name = line.name if len(line.name) <= 44 else line.name[:41] + "..."
        kept = f"{line.kept_bytes / 1e6:+.2f} MB"
        out.append(f"{name:<44} {line.milliseconds:>10.3f} {line.share:>7.1%} {line.calls:>7.3g} {kept:>12}")
    return out
