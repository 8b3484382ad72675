"""The files that put a recipe on a cluster: Slurm's by a strict reading of ours, SkyPilot's by its own parser too.

``sbatch --test-only`` needs a Slurm; so each ``#SBATCH`` line must be a long option of sbatch, before the first
command. Where SkyPilot is installed, its own ``Task`` reads the task.
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
OPTION = r"#SBATCH --(job-name|nodes|ntasks-per-node|cpus-per-task|gpus-per-node|exclusive|mem|output|time)(?:=(\S+))?"


def test_slurm_s_file() -> None:
    text = SBATCH.read_text()
    commented = re.match(r"#!/\S+( \S+)?\n(#.*\n|\n)*", text)
    assert commented, "sbatch refuses a script without an interpreter"
    lines = [line for line in text.splitlines() if "SBATCH" in line]
    assert all(line in commented[0].splitlines() for line in lines), "after the first command sbatch sees none"
    matches = [re.fullmatch(OPTION, line) for line in lines]
    assert all(matches), lines
    options = {match[1]: match[2] for match in matches if match}
    assert len(options) == len(lines), "an option is given twice"
    launch = load_options(launch_file(CLUSTER.parents[1] / RECIPE), {})
    assert (int(options["nodes"]), int(options["gpus-per-node"])) == (launch.nodes, launch.gpus)
    assert options["ntasks-per-node"] == "1"  # a Ray node each
    assert re.fullmatch(r"(\d+-)?\d\d?:\d\d:\d\d", options["time"])
    assert RECIPE in text


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
