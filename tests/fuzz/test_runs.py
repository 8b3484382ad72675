"""Run folders spoilt by structure: every command that reads one answers, or says one clear error, and soon."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

from hostile import sizes
from hostile_runs import spoil
from mantissa.base.errors import MantissaError
from mantissa.cli import app
from mantissa.rl import session
from small_run import QUICK, configure

MOST_S, MOST_BYTES = 20, 4 << 30
COMMANDS = ("report", "compare", "guard", "doctor", "train", "replay", "gap", "metrics")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run may hold: checkpoints, completions, a guard's log, a measured gap."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    overrides = (*QUICK, "steps=3", "checkpoint.every=1", "guard={}", f"run_dir={folder}")
    session.start(configure(*overrides))
    shutil.rmtree(folder / "checkpoints" / "step-3")  # so that a resume has a step to do
    prompts = folder.with_name("prompts.txt")
    prompts.write_text("12=\n34=\n5=\n7=\n")
    arguments = ["gap", str(folder), "--prompts", str(prompts), "--pairs", "fp16", "--samples", "2",
                 "--max-tokens", "4", "--device", "cpu", "--out", str(folder / "gap")]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder


def answer(command: str, folder: Path, whole: Path, out: Path) -> BaseException | None:
    """Run a command on the folder; what it raised, if that was no clear error."""
    arguments = {
        "report": ["report", folder], "compare": ["compare", folder, whole, "-o", out / "compare.html"],
        "guard": ["guard", folder], "doctor": ["doctor", folder, "--out", out / "doctor"],
        "train": ["train", "--resume", folder], "metrics": ["guard", whole, "--reference", folder],
        "replay": ["replay", next(iter(sorted(folder.glob("checkpoints/*/*"))), folder)],
        "gap": ["gap", folder, "--prompts", whole.with_name("prompts.txt"), "--pairs", "fp16", "--max-tokens", "2",
                "--device", "cpu", "--out", out / "gap"],
    }[command]  # fmt: skip

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"{command}: more than {MOST_S} s")

    before = signal.signal(signal.SIGPROF, late)  # of processor time
    signal.signal(signal.SIGALRM, late)  # and what waits for ever takes none
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    signal.alarm(6 * MOST_S)
    try:
        raised: Any = CliRunner().invoke(app, [str(word) for word in arguments]).exception
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGPROF, before)
    if isinstance(raised, MantissaError):
        assert 0 < len(str(raised)) < 2500
        return None
    return None if isinstance(raised, SystemExit) else raised


@pytest.mark.filterwarnings("ignore")
@sizes(16, 300)
def test_any_spoilt_run(count: int, whole: Path, tmp_path: Path) -> None:
    first, failures = int(os.environ.get("MANTISSA_FUZZ_SEED", "0")), []
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "thesis.txt").write_text("three years")
    (outside / "folder" / "step-9.parquet").write_text("someone's")
    (outside / "folder" / ".x.tmp").write_text("someone's")
    for seed, command in zip(range(first, first + count), itertools.cycle(COMMANDS), strict=False):
        folder, out = tmp_path / "run", tmp_path / "out"
        shutil.copytree(whole, folder)
        out.mkdir()
        said = spoil(folder, outside, seed)
        if (raised := answer(command, folder, whole, out)) is not None:
            failures.append(f"seed {seed}, {command}, {said}: {type(raised).__name__}: {str(raised)[:200]}")
        shutil.rmtree(folder)
        shutil.rmtree(out)
        left = {path.name: path.read_text() for path in outside.rglob("*") if path.is_file()}
        assert left == {"thesis.txt": "three years", "step-9.parquet": "someone's", ".x.tmp": "someone's"}, (seed, said)
    assert not failures, "\n".join(failures)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MOST_BYTES
