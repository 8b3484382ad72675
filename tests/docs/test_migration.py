"""The table of names from elsewhere, walked: every name that it calls ours is there; none of compat's is left out."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from mantissa.base.errors import MantissaError
from mantissa.cli import app
from mantissa.dropin import compat
from mantissa.dropin.compat import ENVIRONMENT
from mantissa.launch import LaunchOptions
from mantissa.launch.facts import PRECISION_KEYS
from mantissa.rl import make_config
from mantissa.rl.config.run import apply_overrides
from mantissa.runs.catalogue import METRICS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text()
HEADER = "| there | here | mind |"
RECIPE: dict[str, Any] = {
    "steps": 1,
    "precision": "fp16",
    "model": {"path": "policy"},
    "task": {"kind": "dataset", "files": "train.jsonl", "heldout_files": "heldout.jsonl"},
    "rollout": {"prompts": 64, "samples": 8, "max_tokens": 8192},
    "algorithm": {"advantage": "grpo", "loss": "ppo_clip"},
    "optimizer": {"lr": 1e-6},
}
BESIDE = {  # what an override needs beside it
    "algorithm.loss={kind: flowrl": "algorithm.reference={}",
    "algorithm.loss=flowrl": "algorithm.reference={}",
    "precision.reference": "algorithm.reference={}",
    "precision=bf16": "loss_scaling=null",
    "parallel": "nproc=2",
    "waltz": "task={kind: requests}",
    "waltz.": "algorithm={advantage: reinforce_pp}",
}


def rows() -> list[list[str]]:
    lines = [line for table in PAGE.split(HEADER)[1:] for line in table.partition("\n\n")[0].splitlines()[2:]]
    return [[cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def imported(name: str) -> None:
    """A module, or something in one, or a field of a class in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            fields = [*getattr(found, "__dataclass_fields__", ()), *getattr(found, "model_fields", ())]
            assert hasattr(found, part) or part in fields, name
            found = getattr(found, part, None)
        return
    raise AssertionError(name)


def recipe(override: str) -> None:
    beside = [more for start, more in BESIDE.items() if override.startswith(start)]
    make_config(apply_overrides(copy.deepcopy(RECIPE), [*beside, override]), "migration")


def command(line: str) -> None:
    program, name, *options = line.split()
    assert program == "mantissa"
    found = get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    assert set(options) <= {option for each in found.get_params(found.context_class(found)) for option in each.opts}, (
        line
    )


def statistic(name: str) -> None:
    model = torch.nn.Linear(2, 1)
    config = compat.ExtendedFP16Config("fp32")
    stats = compat.ExtendedFP16Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config).get_stats()
    assert name in stats


def among(known: Any) -> Any:
    def check(name: str) -> None:
        assert name in known, name

    return check


KINDS = {
    "import": imported,
    "recipe": recipe,
    "command": command,
    "statistic": statistic,
    "metric": among({metric.name for metric in METRICS}),
    "variable": among(ENVIRONMENT),
    "launch": among(LaunchOptions.model_fields),
    "file": lambda name: among([name] if (ROOT / name).is_file() else [])(name),
}


def kind_of(name: str) -> str:
    """What a name of the second column is, by its form."""
    if name.startswith("mantissa "):
        return "command"
    if name.startswith("mantissa."):
        return "import"
    if "=" in name:
        return "recipe"
    if "/" in name:
        return "metric" if "." not in name else "file"
    return "variable" if name.isupper() else "statistic" if name in STATISTICS else "launch"


STATISTICS = ("overflow_rate", "current_scale", "precision_active", "fp16_enabled")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:70])
def test_each_name_of_the_table_is_there(row: list[str]) -> None:
    assert len(row) == 3, row
    there, here, mind = row
    assert there
    if here == "—":
        assert mind, "a name without a counterpart needs the reason"
        return
    assert names(here), row
    for name in names(here):
        KINDS[kind_of(name)](name)


def test_a_name_that_is_not_there_is_found() -> None:
    for kind, name in (("import", "mantissa.rl.FP8Trainer"), ("metric", "gap/nothing"), ("file", "docs/none.md"),
                       ("command", "mantissa bench --nothing"), ("variable", "FP16_NOTHING"), ("launch", "nothing"),
                       ("statistic", "nothing")):  # fmt: skip
        with pytest.raises(AssertionError):
            KINDS[kind](name)
    with pytest.raises(MantissaError):
        recipe("optimizer.nothing=1")


def test_the_table_leaves_nothing_of_the_compatible_interface_out() -> None:
    kept = names(PAGE.partition("Names that stay")[2].partition(HEADER)[0])
    classes = (compat.FP16Trainer, compat.ExtendedFP16Trainer, compat.FP16TrainingConfig, compat.ExtendedFP16Config)
    fields = {each.name for config in classes[2:] for each in dataclasses.fields(config)}
    own = {"scaler"}  # set when a trainer is made
    for name in kept:
        known = (hasattr(place, name) for place in (compat, compat.PrecisionMode, *classes))
        assert any(known) or name in fields | own, name
    there = {name for row in rows() for name in names(row[0])} | set(kept)
    here = {name for row in rows() for name in names(row[1])}
    methods = {name for name in vars(compat.FP16Trainer) if not name.startswith("_")} - {"effective_config"}
    assert (fields - {"backend", "fallback"}) | methods <= there
    assert set(compat.PrecisionMode.__members__) <= there
    assert set(ENVIRONMENT) <= here
    assert set(compat.__all__) <= there | {name.rpartition(".")[2] for name in here} | {"ENVIRONMENT"}
    assert there >= PRECISION_KEYS
