"""What a run on Ray's machines is planned as, and which clusters are refused: without Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import small_run
from mantissa.base.errors import MantissaError
from mantissa.launch import on_ray
from mantissa.launch.on_ray import Plan, cluster, listens, planned
from mantissa.rl import load_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small_run.recipe()))
    return path


def plan(**changed: Any) -> Plan:
    about: dict[str, Any] = {"arguments": ("train",), "files": {}, "shared": (Path("/shared/.mark"), "mark")}
    about |= {"run_dir": Path("/shared/run"), "nodes": 2, "processes": 4, "device": "auto"}
    return Plan(**(about | changed))


def test_the_recipe_travels_as_it_was_resolved(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    overrides = (f"run_dir={run}", "steps=7", "precision=bf16")
    with planned(recipe, overrides, None, 2, keep=True) as made:
        (tmp_path / "sent.yaml").write_text(made.files["recipe.yaml"])
        assert load_recipe(tmp_path / "sent.yaml") == load_recipe(recipe, overrides, nproc=2)
        assert (made.world, made.processes) == (2, 1)
        seen, text = made.shared
        assert seen.parent == run.parent
        assert seen.read_text() == text
        assert not run.exists()
    assert not list(run.parent.iterdir()), "the mark goes with the run"
    with planned(recipe, ("nproc=4", f"run_dir={run}"), None, 2, keep=False) as made:
        assert made.lines(["a", "b"]) == ["process 0-1 on node a", "process 2-3 on node b"]
        assert not made.shared[0].exists()
    uneven = planned(recipe, ("nproc=1",), None, 2, keep=False)
    with pytest.raises(MantissaError, match="nproc=1: --nodes 2 cannot share them evenly"), uneven:
        pass


def test_a_bundle_is_what_a_nodes_processes_need() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    small, large = node(CPU=8), node(CPU=8, GPU=4)
    assert on_ray._bundle(plan(), [small, small]) == {"CPU": 4}
    assert on_ray._bundle(plan(), [small, large, large]) == {"CPU": 4, "GPU": 4}
    assert on_ray._bundle(plan(device="cpu"), [large, large]) == {"CPU": 4}
    for nodes in ([small, large], [large], [large, node(False, CPU=8, GPU=4)]):
        with pytest.raises(MantissaError, match=r"--nodes 2, each with 4 CPUs and 4 GPUs, but 1 of this cluster's"):
            on_ray._bundle(plan(device="cuda"), nodes)


def test_nodes_that_differ_are_refused() -> None:
    good = {"versions": {"torch": "2.13.0"}, "found": "mark", "cwd": True}
    on_ray._check_alike({"a": good, "b": good}, plan())
    for other, words in (
        ({"versions": {"torch": "2.12.0"}}, r"node b has \{'torch': '2.12.0'\}, node a has \{'torch': '2.13.0'\}"),
        ({"found": None}, "node b does not see /shared: the run's folder must be one that all nodes share"),
        ({"found": "another's"}, "node b does not see /shared"),
        ({"cwd": False}, f"node b has no folder {os.getcwd()}"),
    ):
        with pytest.raises(MantissaError, match=words):
            on_ray._check_alike({"a": good, "b": good | other}, plan())


def test_what_listens_is_said() -> None:
    assert listens(1, False) == []
    assert [line.split(" listens")[0] for line in listens(1, True)] == ["a Ray of this launch's own"]
    assert listens(2, False)[0].startswith("process 0 listens on every interface of its node")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = r"needs Ray, which is not installed: pip install 'mantissa-rl\[ray\]'"
    with pytest.raises(MantissaError, match=missing), cluster("auto", False):
        pass
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(MantissaError, match="--on ray without a cluster: expected the head's HOST:6379"):
        on_ray._address(None)


def test_a_dry_run_shows_the_command_and_every_file_in_full() -> None:
    files = {"recipe.yaml": "steps: 3\nseed: 1\n", "more.yaml": "x: [1]"}
    text = plan(arguments=("train", "{folder}/recipe.yaml", "a b"), files=files, processes=1).dry_run()
    assert text.startswith("on 2 machines of a Ray cluster, 1 process on each")
    assert "mantissa train '{folder}/recipe.yaml' 'a b'" in text
    assert text.endswith("\n\n{folder}/recipe.yaml:\n  steps: 3\n  seed: 1\n\n{folder}/more.yaml:\n  x: [1]")
