"""Reading runs, grouping them by seed, naming them, and finding what differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mantissa.errors import MantissaError
from mantissa.runs.compare import Differences, Group, Run, differences, group_runs, read_runs


def rows(value: float = 0.0) -> list[dict]:
    return [{"step": 1, "reward/accuracy": 0.5, "optim/grad_norm": value}]


def grouped(*paths: Path) -> list[Group]:
    return group_runs(read_runs(paths))


def recipe(run: Run) -> dict | None:
    return run.config


def of_environments(groups: list[Group]) -> Differences:
    return differences(groups, lambda run: run.facts)


def test_a_run_that_cannot_be_read_is_said(write_run) -> None:
    """What is no run at all: tests/cli/errors.txt."""
    good, broken, binary, empty = (write_run(n, rows(i)) for i, n in enumerate(("good", "broken", "binary", "empty")))
    (broken / "environment.json").write_text("[1]")
    (binary / "config.yaml").write_bytes(b"\xff\xfe\x00")
    (empty / "metrics.jsonl").unlink()
    for run, said in (
        (broken, "expected keys and values, got list"),
        (binary, "config.yaml is not YAML"),
        (empty, "no step has been finished"),
    ):
        with pytest.raises(MantissaError, match=said):
            read_runs([good, run])


def test_the_same_run_twice_is_refused_however_it_is_spelled(write_run, tmp_path: Path) -> None:
    run = write_run("a", [{"step": 1, "time/step": 0.123}])
    (tmp_path / "link").symlink_to(run)
    for other in (run, run / ".." / "a", tmp_path / "link"):
        with pytest.raises(MantissaError, match="twice"):
            read_runs([run, other])
    shutil.copytree(run, tmp_path / "copied")
    with pytest.raises(MantissaError, match=r"copied is a copy of .*: same metrics, same times"):
        read_runs([run, tmp_path / "copied"])


def test_runs_that_differ_only_in_seed_and_name_are_one_group(write_run) -> None:
    paths = [write_run(f"fp16-{seed}", rows(seed), {"seed": seed, "name": f"n{seed}"}) for seed in (0, 1, 5)]
    other = write_run("low", rows(9), {"seed": 0, "optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}})
    groups = grouped(paths[0], other, *paths[1:])
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1, 5], [0]]
    assert [group.title for group in groups] == ["lr=0.0005 (3 seeds)", "lr=0.0001"]
    assert [group.index for group in groups] == [0, 1]
    assert differences(groups, recipe) == {
        "name": ("n0, n1, n5", "sums"),
        "seed": ("0, 1, 5", "0"),
        "optimizer.lr": ("0.0005", "0.0001"),
    }


@pytest.mark.parametrize(
    "environment",
    [
        {"threads": 4},
        {"device": "NVIDIA H100"},
        {"versions": {"mantissa": "0.1.0", "torch": "2.12.0"}},
        {"git": {"commit": "f" * 40, "changed": False}},
        {"precision": [{"role": "learner", "requested": "fp16", "active": "fp32", "kernels": "native"}]},
    ],
    ids=lambda value: next(iter(value)),
)
def test_runs_of_another_environment_are_no_seeds(environment: dict, write_run) -> None:
    a = write_run("a", rows(1), {"seed": 0})
    b = write_run("b", rows(2), {"seed": 1}, environment)
    assert len(grouped(a, b)) == 2


def test_another_machine_with_the_same_device_is_no_difference_to_a_group(write_run) -> None:
    a = write_run("a", rows(1), {"seed": 0}, {"platform": "Linux-6.1", "created": "2026-01-01", "cores": 4})
    b = write_run("b", rows(2), {"seed": 1}, {"platform": "Linux-6.2", "created": "2026-01-02", "cores": 8})
    (group,) = groups = grouped(a, b)
    assert len(group.runs) == 2
    assert of_environments(groups) == {"platform": ("Linux-6.1, Linux-6.2",), "cores": ("4, 8",)}


def test_a_repetition_of_a_seed_is_no_seed(write_run) -> None:
    """Two runs of one seed would make an interval over seeds of width zero."""
    a, b, c = (write_run(f"r{i}", rows(i), {"seed": seed}) for i, seed in enumerate((0, 0, 1)))
    groups = grouped(a, b, c)
    assert [[run.name for run in group.runs] for group in groups] == [["r0", "r2"], ["r1"]]


def test_folders_of_the_drop_in_trainer_stand_alone(write_run) -> None:
    a = write_run("t1", [{"step": 1, "train/loss": 1.0}], None, None)
    b = write_run("t2", [{"step": 1, "train/loss": 2.0}], None, None)
    c = write_run("rl", rows())
    groups = grouped(a, b, c)
    assert [group.title for group in groups] == ["t1", "t2", "rl"]
    assert differences(groups, recipe) == {}
    assert of_environments(groups) == {}, "what was not recorded is not a difference"
    d = write_run("rl2", rows(1), {"steps": 80})
    assert differences(grouped(a, c, d), recipe) == {"steps": (None, "40", "80")}


def test_sections_lists_and_missing_keys_are_compared(write_run) -> None:
    section = {"initial": 65536.0, "growth_interval": 400}
    a = write_run("a", rows(1), {"loss_scaling": section, "extra": True})
    b = write_run("b", rows(2), {"optimizer": {"lr": 5e-4, "betas": [0.9, 0.95]}})
    assert differences(grouped(a, b), recipe) == {
        "optimizer.betas": ("[0.9, 0.99]", "[0.9, 0.95]"),
        "loss_scaling": ("{initial: 65536.0, growth_interval: 400}", "null"),
        "extra": ("true", "(none)"),
    }


def test_precision_tables_and_versions_where_they_differ(write_run) -> None:
    table = [
        {"role": "learner", "requested": "bf16", "active": "bf16", "kernels": "simulated"},
        {"role": "rollout", "requested": "fp16", "active": "fp32", "kernels": "native"},
        {"role": "kv_cache", "requested": "as rollout", "active": "fp32", "kernels": "native"},
    ]
    environment = {"precision": table, "git": {"commit": "0123456789abcdef", "changed": True}}
    a = write_run("a", rows(1))
    b = write_run("b", rows(2), {"precision": {"preset": "bf16-train-fp16-rollout"}}, environment)
    groups = grouped(a, b)
    assert [group.label for group in groups] == ["fp16", "bf16/fp32"]
    found = differences(groups, lambda run: run.precision)
    assert found["learner"] == ("fp16, simulated", "bf16, simulated")
    assert found["rollout"] == ("fp16, simulated", "fp32, native, asked for fp16")
    assert "kv_cache" not in found, "as asked, in other words"
    assert found["master"] == ("fp32, native", "(none)")
    assert of_environments(groups) == {"commit": ("(none)", "0123456789, edited")}


def test_labels_fall_back_to_folders_and_are_never_equal(write_run) -> None:
    long = {"task": {"kind": "running_sum", "max_digits": 9, "train_size": 1, "heldout_size": 2}, "steps": 3}
    a, b = write_run("one/run", rows(1)), write_run("two/run", rows(2), long)
    assert [group.label for group in grouped(a, b)] == ["A: run", "B: run"]
    c = write_run("three", rows(3), {"steps": 12})
    assert [group.label for group in grouped(a, c)] == ["steps=40", "steps=12"]
    d = write_run("four", rows(4), {}, {"threads": 16})
    assert [group.label for group in grouped(a, d)] == ["run", "four"]
    seeds = [write_run(f"wide-{s}", rows(9 + s), long | {"seed": s}) for s in (0, 1)]
    assert [group.title for group in grouped(c, *seeds)] == ["three", "wide (2 seeds)"]


def test_more_lines_than_an_eye_can_follow_are_refused(write_run) -> None:
    paths = [write_run(f"r{i}", rows(i), {"steps": 100 + i}) for i in range(9)]
    assert len(grouped(*paths[:8])) == 8
    with pytest.raises(MantissaError, match="at most 8 runs that differ in more than the seed, got 9"):
        grouped(*paths)
