"""Curves of training, healthy or with a fault, as programs write them to their logs."""

from __future__ import annotations

import csv
import json
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.readers.events import _masked
from mantissa.doctor.logs import Role, table

Row = dict[str, Any]
_USUAL = {
    Role.ABS: 0.012, Role.PROB: 0.003, Role.K3: 5e-4, Role.MULT: 1.012, Role.K1: 5e-4, Role.MAX: 0.4, Role.RATIO: 1.0,
    Role.ENTROPY: 0.6, Role.GRAD_NORM: 0.8, Role.LOSS: 0.02, Role.CLIPPED: 0.002, Role.REWARD: 0.4,
    Role.REWARD_STD: 0.3, Role.SAME_REWARD: 0.3,
    Role.LENGTH: 400.0, Role.LENGTH_MIN: 60.0, Role.LENGTH_MAX: 1000.0, Role.TRUNCATED: 0.05,
    Role.STALENESS: 1.0, Role.VERSION: 1.0, Role.LOSS_SCALE: 65536.0,
}  # fmt: skip
_GAP = (Role.ABS, Role.PROB, Role.K3, Role.MULT, Role.MAX)


def healthy(program: str = "verl", steps: int = 60, seed: int = 0, noise: float = 0.15) -> list[Row]:
    """Rows with every figure of a program, each with noise of its own and of a common one of the gap's."""
    draw = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        common, row = draw.normal(0, noise), Row(step=step)
        for role, name in table().programs[program].names.items():
            value, own = _USUAL[role], draw.normal(0, noise / 2)
            if role is Role.MULT:
                value = 1 + (value - 1) * np.exp(common + own)
            elif role in (Role.K3, Role.K1):
                value *= np.exp(2 * common + own)
            elif role is Role.RATIO:
                value += 0.001 * draw.normal()
            elif role is Role.LOSS:
                value *= draw.normal()
            elif role not in (Role.VERSION, Role.LOSS_SCALE):
                value *= np.exp((common if role in _GAP else 0) + own)
            row[name] = float(value)
        rows.append(row)
    return rows


def changed(rows: Sequence[Row], program: str, role: Role, change: Callable[[int, float], float]) -> list[Row]:
    """``rows`` with one figure changed by ``change(step, value)``."""
    name = table().programs[program].names[role]
    return [row | {name: float(change(row["step"], row[name]))} for row in rows]


def gap_times(rows: Sequence[Row], program: str, factor: Callable[[int], float]) -> list[Row]:
    """``rows`` with the gap ``factor(step)`` times as large: k1 and k3 by its square."""
    for role in (Role.ABS, Role.PROB, Role.MAX, Role.MULT, Role.K3, Role.K1):
        if role in table().programs[program].names:

            def change(step: int, value: float, role: Role = role) -> float:
                if role is Role.MULT:
                    return 1 + (value - 1) * factor(step)
                return value * factor(step) ** (2 if role in (Role.K3, Role.K1) else 1)

            rows = changed(rows, program, role, change)
    return list(rows)


# writers


def verl_file(path: Path, rows: Sequence[Row], evaluations: Sequence[int] = (), resume: int | None = None) -> Path:
    """verl's FileLogger; ``resume``: five steps before it are logged once more."""
    lines = []
    for row in rows:
        data = {name: value for name, value in row.items() if name != "step"}
        data |= {"val-core/gsm8k/acc/mean@1": 0.4} if row["step"] in evaluations else {}
        lines.append(json.dumps({"step": row["step"], "data": data}))
        if row["step"] == resume:
            lines += lines[-5:]
    path.write_text("\n".join(lines) + "\n")
    return path


def verl_console(path: Path, rows: Sequence[Row]) -> Path:
    """verl's LocalLogger through Ray, among other lines."""
    with path.open("w") as file:
        for row in rows:
            data = " - ".join(f"{name}:{np.float64(value)!r}" for name, value in row.items() if name != "step")
            file.write(f"Training Progress:  10%\n\x1b[36m(TaskRunner pid=99)\x1b[0m step:{row['step']} - {data}\n")
    return path


def log_history(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text(json.dumps([row | {"epoch": row["step"] / 100} for row in rows]))
    return path


def trainer_state(path: Path, rows: Sequence[Row]) -> Path:
    """As transformers.TrainerState.save_to_json lays it out."""
    state = {"best_metric": None, "epoch": 1.0, "global_step": rows[-1]["step"], "is_local_process_zero": True,
             "log_history": [*rows, {"step": rows[-1]["step"], "train_runtime": 1.0, "total_flos": 0.0}],
             "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}}}  # fmt: skip
    path.write_text(json.dumps(state, indent=2))
    return path


def printed(path: Path, rows: Sequence[Row]) -> Path:
    """The dictionaries that Trainer's ProgressCallback prints; the step is their place."""
    path.write_text("".join(f"{ {n: str(v) for n, v in row.items() if n != 'step'} }\n 12%|#  | \n" for row in rows))
    return path


def _of(row: Row, rollout: bool) -> Row:
    return {name: each for name, each in row.items() if name != "step" and name.startswith("rollout/") is rollout}


def slime_console(path: Path, rows: Sequence[Row]) -> Path:
    text = "".join(
        f"[2026-11-01 10:00:00] model.py:898 - {kind} {row['step']}: {part}\n"
        for row in rows
        for kind, part in (("rollout", _of(row, True)), ("step", _of(row, False)))
    )
    path.write_text(text)
    return path


def wandb_csv(path: Path, rows: Sequence[Row], run: str = "run-1") -> Path:
    """W&B's export of panels: columns RUN - NAME with __MIN and __MAX."""
    names = [name for name in rows[0] if name != "step"]
    with path.open("w", newline="") as file:
        out = csv.writer(file, quoting=csv.QUOTE_ALL)
        out.writerow(["Step", *(f"{run} - {name}{more}" for name in names for more in ("", "__MIN", "__MAX"))])
        for row in rows:
            out.writerow([row["step"], *(row[name] for name in names for _ in range(3))])
    return path


def wandb_history(path: Path, rows: Sequence[Row]) -> Path:
    """W&B's scan_history as json: some rows hold some of the figures."""
    parts = []
    for row in rows:
        items = [(name, value) for name, value in row.items() if name != "step"]
        parts += [{"_step": row["step"], "_timestamp": 1.7e9, **dict(items[:3])},
                  {"_step": row["step"], "_timestamp": 1.7e9, "note": "text", **dict(items[3:])}]  # fmt: skip
    path.write_text(json.dumps(parts))
    return path


def mlflow(path: Path, rows: Sequence[Row]) -> Path:
    """MLflow's points, as its REST interface and its table of metrics have them; csv or json by the name."""
    points = [{"key": name, "value": value, "timestamp": 1, "step": row["step"]}
              for row in rows for name, value in row.items() if name != "step"]  # fmt: skip
    if path.suffix == ".json":
        path.write_text(json.dumps({"metrics": points}))
        return path
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, points[0])
        out.writeheader()
        out.writerows(points)
    return path


def nemo_json(path: Path, rows: Sequence[Row]) -> Path:
    """NeMo-RL's json_dump_tb_logs.py."""
    names = [name for name in rows[0] if name != "step"]
    path.write_text(json.dumps({f"train/{name}": {str(row["step"]): row[name] for row in rows} for name in names}))
    return path


def flat_rows(path: Path, rows: Sequence[Row]) -> Path:
    """prime-rl's file monitor: several rows a step."""
    with path.open("w") as file:
        for row in rows:
            items = [(name, value) for name, value in row.items() if name != "step"]
            for part in (items[:2], items[2:]):
                file.write(json.dumps({**dict(part), "step": row["step"], "time": 1.0, "_timestamp": 2.0}) + "\n")
    return path


def tensorboard(folder: Path, rows: Sequence[Row], prefix: str = "train/") -> Path:
    """TensorBoard's own writer; every second number as a tensor, as TensorFlow 2 writes it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_FLOAT
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = folder / "events.out.tfevents.1700000000.host.1.0"
    with path.open("wb") as file:
        out = RecordWriter(file)
        out.write(Event(file_version="brain.Event:2", wall_time=time.time()).SerializeToString())
        for row in rows:
            for place, (name, value) in enumerate(item for item in row.items() if item[0] != "step"):
                tensor = TensorProto(dtype=DT_FLOAT, float_val=[value])
                how: Row = {"tensor": tensor} if place % 2 else {"simple_value": value}
                summary = Summary(value=[Summary.Value(tag=prefix + name, **how)])
                out.write(Event(step=row["step"], wall_time=time.time(), summary=summary).SerializeToString())
    return path


def record(data: bytes) -> bytes:
    """One record of an event file; the data's checksum is left 0, which is not looked at."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + bytes(4)
