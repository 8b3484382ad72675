"""The command ``mantissa``, called in this process, and one small finished run for all tests of this room."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa import cli
from mantissa.base.environ import Heartbeat
from processes import told

RECIPE: dict[str, Any] = {
    "name": "cli",
    "steps": 2,
    "device": "cpu",
    "precision": "fp16",
    "model": {
        "fresh": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 32},
        "tokenizer": "characters",
    },
    "task": {
        "kind": "running_sum",
        "min_digits": 2,
        "max_digits": 3,
        "train_size": 32,
        "heldout_size": 8,
        "warm_start_size": 64,
    },
    "warm_start": {"steps": 4, "batch": 8, "evaluate_every": 2, "problems": 4},
    "rollout": {"prompts": 4, "samples": 2, "max_tokens": 6, "slots": 8},
    "optimizer": {"lr": 1e-3},
    "evaluation": None,
    "checkpoint": {"every": 1},
    "trackers": [],
}


@dataclass(frozen=True)
class Result:
    """What one call of the command came to."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The message of a call that ended as a user's mistake must: one line on stderr, exit code 2."""
        assert self.code == 2, self
        said = told(self.err)  # of ranks, which are processes of their own; here nothing is said of what is at work
        assert said.startswith("mantissa: error: "), self
        assert said.count("\n") == 1, self
        assert said.endswith("\n"), self
        assert "Traceback" not in said, self
        return said.removeprefix("mantissa: error: ").rstrip("\n")


@pytest.fixture
def mantissa(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Calls the command in this process, as the entry point does."""

    def call(*argv: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["mantissa", *map(str, argv)])
        monkeypatch.setattr(cli, "_heart", Heartbeat(lambda line: None))  # a slow machine says more than another
        monkeypatch.setattr("mantissa.base.environ._LOAD", 0.0)  # whatever runs beside the tests
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, text.out, text.err)

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes the small recipe with sections replaced; returns its path."""

    def write(**sections: Any) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(copy.deepcopy(RECIPE) | sections))
        return path

    return write


@pytest.fixture(scope="session")
def small_recipe() -> dict[str, Any]:
    """The small recipe itself."""
    return copy.deepcopy(RECIPE)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that has ended. Tests read it, and change only copies."""
    from mantissa.rl import make_config, start

    folder = tmp_path_factory.mktemp("finished") / "run"
    start(make_config(copy.deepcopy(RECIPE) | {"run_dir": str(folder)}, "test"))
    return folder
