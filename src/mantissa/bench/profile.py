"""Where a step's time and memory go: a torch.profiler trace, and tables by part and by operation.

The parts are marked from outside the trainer: forward (and loss) and backward are the two contexts of its autocast, the
optimiser's step has hooks of its own, and the rest is what is left of the step: unscaling, the search for overflow, the
gradient norm. A part that runs twice in a step (a retry) counts twice.

Times are the device's where there is a GPU, and the CPU's otherwise. The profiler itself costs time, so parts are to be
compared with each other and not with unprofiled steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mantissa.bench.runner import Runner
from mantissa.files import atomic_file, write_atomically

PARTS = ("forward", "backward", "optimizer step")
_PREFIX = "mantissa/"
_STEP = f"{_PREFIX}step"
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
    with _marked(runner):
        for _ in range(_WARM_UP):
            runner.step(batch)
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            for _ in range(_STEPS):
                with record_function(_STEP):
                    runner.step(batch)
                    if cuda:
                        torch.cuda.synchronize()
    with atomic_file(folder / f"trace-{precision}.json") as temporary:
        profiler.export_chrome_trace(str(temporary))
    result = _read(profiler, precision, runner.request.device, cuda)
    write_atomically(folder / f"profile-{precision}.txt", result.text())
    return result


class _MarkedAutocast:
    """An autocast whose two contexts show in the trace."""

    def __init__(self, autocast: Any) -> None:
        self._autocast = autocast

    def forward(self) -> AbstractContextManager[None]:
        return _both(f"{_PREFIX}forward", self._autocast.forward)

    def backward(self) -> AbstractContextManager[None]:
        return _both(f"{_PREFIX}backward", self._autocast.backward)


@contextmanager
def _both(name: str, inner: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with record_function(name), inner():
        yield


@contextmanager
def _marked(runner: Runner) -> Iterator[None]:
    """Mark the parts of the runner's steps; leaves it as it was."""
    trainer, optimizer = runner.trainer, runner.trainer.optimizer
    open_marks: list[Any] = []

    def begin(*_: Any) -> None:
        open_marks.append(record_function(f"{_PREFIX}optimizer step"))
        open_marks[-1].__enter__()

    def end(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    hooks = (optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end))
    autocast = trainer.autocast
    trainer.autocast = _MarkedAutocast(autocast)  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer.autocast = autocast
        for hook in hooks:
            hook.remove()


def _read(profiler: profile, precision: str, device: str, cuda: bool) -> Profile:
    kind = "device" if cuda else "cpu"
    averages = [
        event for event in profiler.key_averages() if not (cuda and event.is_user_annotation and event.count == 0)
    ]

    def line(name: str, event: Any, whole: float, own: bool) -> Line:
        microseconds = getattr(event, f"self_{kind}_time_total" if own else f"{kind}_time_total")
        kept = getattr(event, f"self_{kind}_memory_usage" if own else f"{kind}_memory_usage")
        per_step = microseconds / 1e3 / _STEPS
        return Line(name, per_step, per_step / whole, event.count / _STEPS, kept / _STEPS)

    marks = {event.key.removeprefix(_PREFIX): event for event in averages if event.key.startswith(_PREFIX)}
    step = marks["step"]
    whole = float(getattr(step, f"{kind}_time_total")) / 1e3 / _STEPS
    parts = [line(name, marks[name], whole, own=False) for name in PARTS if name in marks]
    rest_time = whole - sum(part.milliseconds for part in parts)
    kept = float(getattr(step, f"{kind}_memory_usage")) / _STEPS - sum(part.kept_bytes for part in parts)
    parts.append(Line("rest: unscale, look for overflow, norm", rest_time, rest_time / whole, 1, kept))
    operations = [line(e.key, e, whole, own=True) for e in averages if not e.key.startswith(_PREFIX)]
    operations.sort(key=lambda each: -each.milliseconds)
    return Profile(precision, device, whole, tuple(parts), tuple(operations[:_TOP]))


def _table(what: str, lines: tuple[Line, ...]) -> list[str]:
    out = [f"{what:<44} {'ms a step':>10} {'share':>7} {'calls':>7} {'memory kept':>12}"]
    for line in lines:
        name = line.name if len(line.name) <= 44 else line.name[:41] + "..."
        kept = f"{line.kept_bytes / 1e6:+.2f} MB"
        out.append(f"{name:<44} {line.milliseconds:>10.3f} {line.share:>7.1%} {line.calls:>7.3g} {kept:>12}")
    return out
