"""Where metrics go besides ``metrics.jsonl``: TensorBoard, and Weights & Biases as an extra.

``metrics.jsonl`` is the record; trackers are copies for the eye, so they may be missing but never disagree: after a
resume the rows that were rewound are purged from TensorBoard. Weights & Biases keeps no such promise (see its class).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mantissa.base.errors import MantissaError, pip_install
from mantissa.base.files import disk_errors
from mantissa.runs.directory import RunDirectory


class Tracker(Protocol):
    """A place that metrics are copied to: the numbers of a step's row; nothing after ``close``."""

    def log(self, step: int, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads. ``resume_after``: hide what was logged after that step.

    Written here and now, not by the thread of tensorboard's own writer: a full disk is then an error of the step that
    met it, and not a traceback from elsewhere.
    """

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a buffer would try to write what is left of a failed row once more when the file is closed.
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - held until close()
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if resume_after is not None:
            self._write(Event(step=resume_after + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()])
        self._write(Event(step=step, summary=summary))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A run on wandb.ai, or a local one under ``wandb/`` with ``WANDB_MODE=offline``, which needs no network.

    A resumed run goes on under the same id. Rows that were sent and then rewound stay: the service takes no step twice.
    """

    def __init__(self, run: RunDirectory, resume_after: int | None = None) -> None:
        try:
            import wandb
        except ImportError:
            raise MantissaError(
                f"trackers: wandb is not installed; {pip_install('wandb')}, or leave wandb out of trackers"
            ) from None
        try:
            resume = "allow" if resume_after is not None else None
            self._run = wandb.init(project="mantissa", name=run.path.name, id=run.path.resolve().name,
                                   dir=str(run.path), config=run.config, resume=resume)  # fmt: skip
        except wandb.errors.Error as error:
            raise MantissaError(
                f"trackers: wandb did not start ({' '.join(str(error).split())}); log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave wandb out of trackers"
            ) from None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several trackers as one; none is a tracker too."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


_KNOWN: dict[str, Callable[[RunDirectory, int | None], Tracker]] = {
    "tensorboard": lambda run, resume_after: TensorBoard(run.tensorboard_path, resume_after),
    "wandb": WeightsAndBiases,
}


def from_names(names: Sequence[str], run: RunDirectory, resume_after: int | None = None) -> Trackers:
    """The trackers a recipe names; ``resume_after`` is the step of the checkpoint a resumed run starts from.

    Raises ``MantissaError`` for one whose package is not installed.
    """
    return Trackers([_KNOWN[name](run, resume_after) for name in names])


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of a row, without ``step``."""
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
