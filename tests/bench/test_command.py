"""What ``mantissa bench`` measures with: each part's batch, asked for or by default; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mantissa.bench import command
from mantissa.bench.command import SCENARIO_BATCH, SIZE_BATCH, run_bench
from mantissa.bench.options import BenchConfig


@pytest.mark.parametrize("asked", [None, 7])
def test_batches_are_the_one_asked_for_or_each_parts_own(
    asked: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: dict[str, list[Any]] = {"scenario": [], "size": [], "profile": []}

    def seen(part: str, place: int) -> Callable[..., list[Any]]:
        return lambda *given: batches[part].append(given[place]) or []

    monkeypatch.setattr(command, "run_scenario", seen("scenario", 2))
    monkeypatch.setattr(command, "run_size", seen("size", 1))
    monkeypatch.setattr(command, "engaged", lambda *_: {"fp32": None})
    monkeypatch.setattr(command, "profile_runner", seen("profile", 1))
    config = BenchConfig(
        device="cpu", batch=asked, sizes=("10k", "1M"), precision=("fp32",), scenarios=("warmup", "stress"),
        out=tmp_path / "out", profile=True,
    )  # fmt: skip
    run_bench(config, lambda line: None)
    expected = {"scenario": SCENARIO_BATCH, "size": SIZE_BATCH["cpu"], "profile": SCENARIO_BATCH}
    assert len({*expected.values(), 7}) == 3
    for part, count in (("scenario", 2), ("size", 2), ("profile", 1)):
        assert batches[part] == [asked or expected[part]] * count, part
