"""The files that put a recipe on a cluster: Slurm's by a strict reading of ours, SkyPilot's by its own parser too.

``sbatch --test-only`` needs a Slurm; so each ``#SBATCH`` line must be a long option of sbatch with a value of its
form, before the first command. Where SkyPilot is installed, its own ``Task`` reads the task.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa.launch import launch_file, load_options

CLUSTER = Path(__file__).parents[2] / "recipes" / "cluster"
SBATCH = CLUSTER / "verl.sbatch"
SKY = CLUSTER / "verl.sky.yml"
RECIPE = "recipes/cluster/qwen3-30b-a3b-dapo-fp8.yaml"
COUNT, SIZE = r"[1-9]\d*", r"0|[1-9]\d*[KMGT]?"
OPTIONS = {  # of sbatch, and the form of their values; None: takes none
    "job-name": r"[\w.-]+", "nodes": rf"{COUNT}(-{COUNT})?", "ntasks-per-node": COUNT, "cpus-per-task": COUNT,
    "gpus-per-node": rf"([a-z][\w-]*:)?{COUNT}", "exclusive": None, "mem": SIZE, "output": r"[\w/.%-]+",
    "time": rf"({COUNT}-)?\d\d?:\d\d:\d\d", "partition": r"[\w,-]+", "account": r"[\w-]+", "error": r"[\w/.%-]+",
}  # fmt: skip


def sbatch_options(text: str) -> dict[str, str | None]:
    """The options of a batch script, or an ``AssertionError`` that names the line sbatch would refuse or not see."""
    lines = text.splitlines()
    assert re.fullmatch(r"#!\s*/\S+( \S+)?", lines[0]), "sbatch refuses a script without an interpreter"
    found: dict[str, str | None] = {}
    ended = False
    for line in lines[1:]:
        if not line.startswith("#SBATCH"):
            assert not re.match(r"\s*#+\s*SBATCH", line, re.I), f"{line}: sbatch does not see it"
            ended = ended or bool(line.strip() and not line.startswith("#"))
            continue
        assert not ended, f"{line}: after the first command sbatch does not see it"
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        assert match, f"{line}: expected #SBATCH --option=value"
        name, value = match.groups()
        assert name in OPTIONS, f"{line}: not an option that is known here"
        form = OPTIONS[name]
        assert (value is None) if form is None else re.fullmatch(form, value or ""), f"{line}: expected {form}"
        assert name not in found, f"{line}: given twice"
        found[name] = value
    return found


def test_slurm_s_file() -> None:
    options = sbatch_options(SBATCH.read_text())
    launch = load_options(launch_file(CLUSTER.parents[1] / RECIPE), {})
    assert (int(options["nodes"] or 0), int(options["gpus-per-node"] or 0)) == (launch.nodes, launch.gpus)
    assert options["ntasks-per-node"] == "1"  # a Ray node each
    assert RECIPE in SBATCH.read_text()


def task() -> dict[str, Any]:
    return yaml.safe_load(SKY.read_text())


def test_skypilot_s_file() -> None:
    launch = load_options(launch_file(CLUSTER.parents[1] / RECIPE), {})
    made = task()
    assert (made["num_nodes"], made["resources"]["accelerators"]) == (launch.nodes, f"H100:{launch.gpus}")
    assert made["envs"]["RECIPE"] == RECIPE
    assert made["resources"]["image_id"].removeprefix("docker:") in SBATCH.read_text()  # one container


def test_skypilot_s_own_parser_takes_it_and_refuses_a_key_that_it_has_not() -> None:
    sky = pytest.importorskip("sky", reason="needs SkyPilot: pip install skypilot")
    made = sky.Task.from_yaml_config(task())
    assert (made.num_nodes, made.name) == (2, "mantissa-verl")
    (resources,) = made.resources
    assert resources.accelerators == {"H100": 8}
    with pytest.raises(ValueError, match="num_node"):
        sky.Task.from_yaml_config(task() | {"num_node": 2})


@pytest.mark.parametrize("script", [SBATCH.read_text(), (CLUSTER / "node.sh").read_text(), task()["run"]])
def test_bash_reads_each_script(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True, capture_output=True)


def test_each_way_gives_a_node_its_four_arguments() -> None:
    for text in (SBATCH.read_text(), task()["run"]):
        (call,) = re.findall(r'node\.sh ("[^"]+" "[^"]+" "[^"]+" "[^"]+")', text)
        assert len(call.split()) == 4
