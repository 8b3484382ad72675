"""Where a step's time and memory go: a torch.profiler trace, and tables by part and by operation.

The parts are marked from outside the trainer: forward (and loss) and backward are the two contexts of its autocast, the
optimiser's step has hooks of its own, and the rest is what is left of the step: unscaling, the search for overflow, the
gradient norm. A part that runs twice in a step (a retry) counts twice.

A GPU still works when the code that gave it its work has gone on, and autograd gives it from a thread of its own; so
there every part ends by waiting for the GPU, and its memory is read from torch's allocator at both ends. Operations
have their kernels' time there. Waiting and profiling cost time: compare parts with each other, not with other steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from mantissa.base.files import atomic_file, write_atomically
from mantissa.bench.runner import Runner

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
