"""Tasks as recipes describe them, for tests of small ones."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from mantissa.tasks import Problem, TaskConfig, build_task
from mantissa.tasks.datasets import DatasetSummary, read_problems

SECTION: TypeAdapter[Any] = TypeAdapter(TaskConfig)
SPLITS = ("train", "heldout", "warm_start")


def section(kind: str, **fields: Any) -> Any:
    """The section of a recipe; generated tasks with 60, 20 and 40 problems, unless ``sizes`` says otherwise."""
    sizes = () if kind == "dataset" else fields.pop("sizes", (60, 20, 40))
    given = {f"{split}_size": size for split, size in zip(SPLITS, sizes, strict=kind != "dataset")}
    return SECTION.validate_python({"kind": kind, **given, **fields})


def made(kind: str, seed: int = 0, **fields: Any) -> Any:
    """The task of that section."""
    return build_task(section(kind, **fields), seed)


def everything(task: Any) -> list[Problem]:
    return [problem for split in SPLITS for problem in task.split(split)]


def problems_in(files: Any, **options: Any) -> tuple[list[Problem], DatasetSummary]:
    """The problems that are read of files, in order, and the account of them."""
    problems, summary = read_problems(files, **options)
    return list(problems.values()), summary
