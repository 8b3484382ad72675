"""A ``.env`` file in the working directory: read for the documented variables, below the process's own."""

import os
import sys
from pathlib import Path

import pytest

from mantissa.compat import ENVIRONMENT, FP16TrainingConfig, WorldModel
from mantissa.errors import MantissaError
from mantissa.training.environment import current_environment, switched_off
from mantissa.worldmodel import WorldModel as Same


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_world_model_is_offered_with_the_trainers() -> None:
    assert WorldModel is Same


def test_a_file_is_read_and_the_process_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dotenv", reason="needs the python-dotenv package")
    lines = ["# ours", "ENABLE_FP16_TRAINING=false", 'export FP16_LOSS_SCALE="1024" # small', "OTHER=$HOME", ""]
    (folder / ".env").write_text("\n".join(lines))
    assert current_environment() == {"ENABLE_FP16_TRAINING": "false", "FP16_LOSS_SCALE": "1024"}
    config = FP16TrainingConfig.from_environment()
    assert (config.enabled, config.loss_scale, switched_off()) == (False, 1024.0, True)
    monkeypatch.setenv("ENABLE_FP16_TRAINING", "true")
    config = FP16TrainingConfig.from_environment()
    assert (config.enabled, config.loss_scale, switched_off()) == (True, 1024.0, False)
    (folder / ".env").write_text("FP16_LOSS_SCALE=large")
    with pytest.raises(MantissaError, match="FP16_LOSS_SCALE='large': expected a number"):
        FP16TrainingConfig.from_environment()


def test_without_the_package_a_file_of_ours_is_an_error_and_another_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dotenv", None)
    (folder / ".env").write_text("DATABASE_URL=x")
    assert current_environment() == {}
    (folder / ".env").write_text("FP16_LOSS_SCALE=8")
    with pytest.raises(MantissaError, match=r"mantissa\[dotenv\]"):
        current_environment()
    monkeypatch.setenv("FP16_LOSS_SCALE", "4")  # then the file has nothing to add
    assert current_environment() == {"FP16_LOSS_SCALE": "4"}


def test_what_is_no_such_file(folder: Path) -> None:
    (folder / ".env").write_bytes(b"FP16_LOSS_SCALE=\xff")
    with pytest.raises(MantissaError, match=r"\.env: UnicodeDecodeError"):
        current_environment()
    (folder / ".env").unlink()
    os.mkfifo(folder / ".env")
    with pytest.raises(MantissaError, match="found a pipe"):
        current_environment()
    (folder / ".env").unlink()
    (folder / ".env").mkdir()
    assert current_environment() == {}
