from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console
from rich.text import Text

from mantissa.runs.catalogue import BY_NAME
from mantissa.runs.health import small
from mantissa.runs.live import COLUMNS, Live, count, duration, power_of_two

ROW = {
    "step": 7, "reward/accuracy": 0.5, "reward/mean": 0.25, "gap/k3_kl": 1.04e-6, "gap/abs_logp_diff_mean": 0.0,
    "precision/loss_scale": 65536.0, "precision/overflows": 2, "precision/retries": 1, "precision/skipped": 0,
    "length/mean": 14.94, "rate/rollout_tokens_per_s": 15300.0, "time/step": 1.5,
}  # fmt: skip
TABLE = [
    {"role": "learner", "requested": "fp16", "active": "fp16", "kernels": "simulated", "reason": "a CPU [no halves]",
     "fell_back": False},
    {"role": "rollout", "requested": "bf16", "active": "fp32", "kernels": "native", "reason": "fallback: warn",
     "fell_back": True},
]  # fmt: skip


def pipe() -> Console:
    return Console(file=io.StringIO(), highlight=False)


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system="standard")


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def seen(console: Console) -> list[str]:
    """The lines without colours and cursor movements."""
    return Text.from_ansi(re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]", "", written(console))).plain.splitlines()


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    console = pipe()
    with Live(60, console=console) as live:
        live.precision(TABLE)
        live.note("warm start: accuracy 0.28")
        live.step(ROW)
        live.step(ROW | {"step": 8, "eval/greedy_accuracy": 0.75, "time/step": 2.5})
    assert written(console).splitlines() == [
        "precision learner: asked for fp16, active fp16 (simulated kernels); a CPU [no halves]",
        "precision rollout: asked for bf16, active fp32 (native kernels); fallback: warn",
        "warm start: accuracy 0.28",
        "step 7/60  reward 0.250  accuracy 0.500  gap k3 1.0e-06  |dlogp| 0  scale 2^16  overflow 2  retry 1  "
        "skipped 0  length 14.9  tok/s 15.3k  s/step 1.50  left 1 min 20 s",
        "step 8/60  reward 0.250  accuracy 0.500  eval 0.750  gap k3 1.0e-06  |dlogp| 0  scale 2^16  overflow 2  "
        "retry 1  skipped 0  length 14.9  tok/s 15.3k  s/step 2.50  left 1 min 44 s",
    ]
    with Live(60, still={"reward/accuracy", "eval/greedy_accuracy"}, console=(console := pipe())) as live:
        live.step(ROW | {"eval/greedy_accuracy": 0.75})
    assert written(console).startswith("step 7/60  reward 0.250  gap k3 1.0e-06")
    live = Live(2, console=pipe())
    live.step({"step": 1})
    live.step({"step": 2})
    assert written(live.console).splitlines() == ["step 1/2    time left unknown", "step 2/2    done"]


def test_what_is_at_work_is_said_in_the_bar_and_on_a_pipe_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Heartbeat`` is tested with the command's progress; here what it is told."""
    told: list[str] = []
    monkeypatch.setattr("mantissa.runs.live.Heartbeat.at", lambda heart, line: told.append(line))
    monkeypatch.setattr("mantissa.runs.live.Heartbeat.heard", lambda heart: told.append("heard"))
    with Live(3, console=(console := pipe())) as live:
        live.doing("warm start 7 of at most 9")
        live.doing("sampling", 1)
        live.step(ROW | {"step": 1})
    assert told == ["warm start 7 of at most 9", "step 1/3  sampling", "heard", ""]
    assert written(console).startswith("step 1/3  reward")
    told.clear()
    screen = terminal()
    with Live(3, console=screen) as live:
        assert live._progress is not None
        live.doing("sampling", 1)
        live._progress.refresh()
        assert "0/3" in (bar := written(screen)), "before the first step is done"
        assert "sampling" in bar
        live.step(ROW | {"step": 1})
        live.doing("learning", 2)
        live._progress.refresh()
        assert "learning, left 3 s" in written(screen)


def test_a_terminal_gets_aligned_columns_and_red_where_out_of_range() -> None:
    console = terminal()
    with Live(60, console=console) as live:
        live.step(ROW)
        live.step(ROW | {"step": 8, "reward/accuracy": 1.0, "gap/k3_kl": 1e-12})
    lines = seen(console)
    header = next(line for line in lines if "accuracy" in line)
    rows = [line.rstrip() for line in lines if re.match(r"\s+[78]  ", line)]
    assert len(rows) == 2
    for row, accuracy, k3 in ((rows[0], "0.500", "1.0e-06"), (rows[1], "1.000", "1.0e-12")):
        assert len(row) == len(header.rstrip())
        assert row[: header.index("accuracy") + len("accuracy")].endswith(accuracy)
        assert row[: header.index("gap k3") + len("gap k3")].endswith(k3)
    assert any("8/60" in line and "left 1 min 18 s" in line for line in lines), "progress with time left"
    assert re.search(r"\x1b\[1;31m +2\x1b", written(console)), "two overflows are out of range"
    assert not re.search(r"\x1b\[1;31m +1\x1b", written(console)), "one retry is not"


def test_the_precision_table_on_a_terminal_is_literal_and_marks_fallbacks() -> None:
    console = terminal()
    with Live(3, console=console) as live:
        live.precision(TABLE)
    text = "\n".join(seen(console))
    for row in TABLE:
        cells = (re.escape(row[k]) for k in ("role", "requested", "active", "kernels", "reason"))
        assert re.search(r"\s+".join(cells), text)
    assert "\x1b[33mfp32" in written(console)
    assert "\x1b[33mfp16" not in written(console)


@pytest.mark.parametrize("width", [1, 60, 200])
def test_narrow_terminals_lose_the_least_important_columns(width: int) -> None:
    console = terminal(width)
    with Live(60, console=console) as live:
        live.step(ROW)
    text = " ".join(seen(console))
    kept = [column.title for column in COLUMNS if re.search(rf"(^| ){re.escape(column.title)}( |$)", text)]
    if width == 200:
        assert len(kept) == len(COLUMNS)
    elif width == 60:
        assert {"accuracy", "gap k3", "s/step"} <= set(kept)
        assert "length" not in kept
        assert kept == sorted(kept, key=text.index), "in the same order"
        assert max(len(line) for line in seen(console)) <= width


def test_time_left_uses_the_last_twenty_steps_and_a_resumed_bar_begins_where_the_run_was() -> None:
    live = Live(100, console=pipe())
    for step in range(1, 41):
        live.step({"step": step, "time/step": 100.0 if step <= 20 else 1.0})
    assert live.time_left(40) == "left 1 min 00 s"
    console = terminal()
    with Live(60, done=40, console=console) as live:
        live.step({"step": 41, "time/step": 2.0})
    assert any("41/60" in line and "left 38 s" in line for line in seen(console))


def test_columns_are_declared_metrics() -> None:
    assert [column.metric for column in COLUMNS if column.metric not in BY_NAME] == []


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (small, 0.0, "0"), (small, 6.44e-10, "6.4e-10"),
        (power_of_two, 65536.0, "2^16"), (power_of_two, 1.0, "1"), (power_of_two, 0.125, "2^-3"),
        (power_of_two, 3.0, "3"), (power_of_two, math.inf, "inf"),
        (duration, 59.4, "59 s"), (duration, 59.6, "1 min 00 s"), (duration, 7620.0, "2 h 07 min"),
        (count, 999.0, "999"), (count, 15300.0, "15.3k"), (count, 2.1e6, "2.1M"),
    ],
)  # fmt: skip
def test_figures(show, value: float, text: str) -> None:
    assert show(value) == text
