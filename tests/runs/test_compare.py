"""Runs read, grouped, named and told apart; their numbers against sums by hand; and the page, its words a snapshot."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from html_page import Page, assert_snapshot
from mantissa.base.errors import MantissaError
from mantissa.mismatch.intervals import Estimate
from mantissa.runs.compare import (
    apart,
    curve_of,
    distinguish,
    ends_of,
    final_accuracy,
    over_runs,
    problems_of,
    seconds_by_phase,
    total,
    training_accuracy,
)
from mantissa.runs.compare_page import build_comparison, compare_runs, show, timing_note
from mantissa.runs.compare_page import document as document_of
from mantissa.runs.groups import Differences, Group, Run, differences, group_runs, of_seeds, read_runs, wilson


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
        (binary, "config.yaml: .*expected YAML in UTF-8"),
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


def run(rows: list[dict], config: dict | None = None) -> Run:
    return Run(Path("run"), rows, config, {})


def group(*runs: Run) -> Group:
    return Group("g", runs, 0)


def rows_of(name: str, values: list, first: int = 1) -> list[dict]:
    return [{"step": i} | ({} if v is None else {name: v}) for i, v in enumerate(values, start=first)]


EVALUATED = {"evaluation": {"problems": 8, "samples": 4}, "task": {"heldout_size": 256}}


def test_a_curve_is_the_mean_over_seeds_where_all_have_it() -> None:
    a, b = run(rows_of("m", [1.0, 2.0, None, 4.0, 9.0])), run(rows_of("m", [3.0, 1.0, 7.0, 8.0]))
    curve = curve_of(group(a, b), "m")
    assert curve is not None
    assert (curve.steps.tolist(), curve.mean.tolist()) == ([1, 2, 4], [2.0, 1.5, 6.0])
    assert (curve.low.tolist(), curve.high.tolist()) == ([1.0, 1.0, 4.0], [3.0, 2.0, 8.0])
    assert (curve.runs, curve.per_point) == (2, 1)
    other = run(rows_of("other", [5.0, 5.0]))
    curve, ends = curve_of(group(a, other), "m"), ends_of(group(a, other), "m")
    assert (curve.mean.tolist(), curve.runs, ends.runs) == ([1.0, 2.0, 4.0, 9.0], 1, 1), "no run at zero"
    assert (ends.first, ends.last) == (4.0, 4.0)
    assert (curve_of(group(other), "m"), ends_of(group(other), "m")) == (None, None)
    assert curve_of(group(run(rows_of("m", [1.0])), run(rows_of("m", [1.0], first=5))), "m") is None


def test_long_curves_are_averaged_run_by_run() -> None:
    values = [float(i % 7) for i in range(250)]
    a, b = run(rows_of("m", values)), run(rows_of("m", [v + 1 for v in values]))
    curve = curve_of(group(a, b), "m", points=100)
    assert curve is not None
    assert (curve.per_point, len(curve.steps), curve.steps[0]) == (3, 84, 2.0), "the middle of steps 1 to 3"
    assert curve.low[1] == pytest.approx(sum(values[3:6]) / 3)
    assert curve.high[1] == pytest.approx(sum(values[3:6]) / 3 + 1)
    assert curve.low[-1] == values[249], "the last point holds what is left"


def test_ends_are_ten_steps_and_hide_nothing() -> None:
    ends = ends_of(group(run(rows_of("m", [float(i) for i in range(25)]))), "m")
    assert (ends.first, ends.last) == (4.5, 19.5)
    broken = ends_of(group(run(rows_of("m", [math.nan, *[1.0] * 20])), run(rows_of("m", [1.0] * 21))), "m")
    assert math.isnan(broken.first)
    assert broken.last == 1.0
    both = ends_of(group(run(rows_of("m", [math.inf])), run(rows_of("m", [-math.inf]))), "m")
    assert math.isnan(both.last)


@pytest.mark.parametrize(
    ("config", "shares", "problems"),
    [
        (EVALUATED, [0.125, 0.5], 8),
        (EVALUATED | {"task": {"heldout_size": 4}}, [0.25], 4),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [0.25], 8),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [1 / 3], None),
        (EVALUATED | {"evaluation": None}, [0.25], None),
        (None, [0.25], None),
    ],
)
def test_the_number_of_problems_is_known_or_not(config: dict | None, shares: list, problems: int | None) -> None:
    assert problems_of(run(rows_of("eval/greedy_accuracy", shares), config)) == problems


def test_final_accuracy_is_the_last_evaluation() -> None:
    name = "eval/greedy_accuracy"
    one = run(rows_of(name, [0.25, None, 0.5, None]), EVALUATED)
    estimate, steps = final_accuracy(group(one), name)
    assert (estimate.low, estimate.high) == wilson(0.5, 8)
    assert (estimate.value, steps) == (0.5, [3])
    shorter, none = run(rows_of(name, [0.25, 0.75]), EVALUATED), run(rows_of("other", [1.0]), EVALUATED)
    estimate, steps = final_accuracy(group(one, shorter, none), name)
    assert (estimate.value, estimate.how, steps) == (0.625, "t, 2 seeds", [2, 3])
    assert final_accuracy(group(none), name) is None
    assert final_accuracy(group(run(rows_of(name, [math.nan, 1.5]), EVALUATED)), name) is None


def test_training_accuracy_of_one_run_has_no_interval() -> None:
    first = run(rows_of("reward/accuracy", [0.0] * 5 + [0.5] * 10))
    single = training_accuracy(group(first))
    assert (single.value, single.low) == (0.5, None)
    both = training_accuracy(group(first, run(rows_of("reward/accuracy", [0.6] * 10))))
    assert both.value == pytest.approx(0.55)
    assert both.low == pytest.approx(0.0, abs=1e-12), "0.55 - 12.7 x 0.05 is below 0"
    assert training_accuracy(group(run([{"step": 1}]))) is None


def test_times_count_each_phase_where_it_was_logged() -> None:
    rows = [
        {"step": 1, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5},
        {"step": 2, "time/step": 4.0, "time/rollout": 1.0, "time/update": 1.5, "time/eval": 1.0},
    ]
    seconds = seconds_by_phase(group(run(rows)))
    assert seconds == {"rollout": 1.0, "update": 1.0, "eval": 0.5, "other": 0.5, "step": 3.0}
    assert over_runs(group(run(rows), run(rows[:1])), "time/step", np.sum) == 4.0
    assert seconds_by_phase(group(run([{"step": 1, "time/step": 3.0}]))) == {"step": 3.0}
    nothing = group(run([{"step": 1}]))
    assert (seconds_by_phase(nothing), over_runs(nothing, "rate/x", np.median)) == (None, None)
    a, b = run(rows_of("n", [1, 100, 3])), run(rows_of("n", [5, 5]))
    assert (over_runs(group(a, b), "n", np.median), total(a, "n"), total(a, "m")) == (4.0, 104, None), "medians, sums"


@pytest.mark.parametrize("n", [1, 2, 128])
def test_wilson_ends_are_where_the_score_test_turns(n: int) -> None:
    """By definition an end p0 is a root of |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    for k in range(0, n + 1, max(1, n // 16)):
        for end in wilson(k / n, n):
            spread = 1.959963984540054 * math.sqrt(end * (1 - end) / n)
            assert abs(k / n - end) == pytest.approx(spread, abs=1e-12)
    assert (wilson(0.0, n)[0], wilson(1.0, n)[1]) == (0, 1)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I, method 3


def test_over_seeds_it_is_students_interval_and_wilsons_where_they_agree_exactly() -> None:
    got = of_seeds([0.5, 0.6, 0.7], 128)
    half = 4.302652730 * 0.1 / math.sqrt(3)  # the standard deviation of the three is 0.1
    assert (got.value, got.low, got.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert got.how == "t, 3 seeds"
    assert of_seeds([0.1, 0.9], 128).interval == "0.000 to 1.000", "two seeds far apart tell nothing"
    got = of_seeds([0.75, 0.75], 16)
    assert (got.low, got.high) == wilson(0.75, 16)
    assert got.how == "2 seeds, all equal; Wilson, 16 problems"
    assert of_seeds([0.75], 16).how == "Wilson, 16 problems"


def made(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, "")


def test_overlap_is_never_a_difference() -> None:
    assert not apart(made(0.1, 0.3), made(0.3, 0.5)), "touching is overlapping"
    assert apart(made(0.1, 0.3), made(0.31, 0.5))
    assert apart(made(0.31, 0.5), made(0.1, 0.3))
    unknown, sure = of_seeds([0.9], None), of_seeds([0.1], 1000)
    assert (unknown.low, unknown.interval, apart(unknown, sure)) == (None, "no interval", False)
    a, b, c, d = (("abcd"[i], made(*both)) for i, both in enumerate(((0.1, 0.3), (0.2, 0.5), (0.4, 0.6), (0.55, 0.7))))
    said = "c is above a: their intervals do not overlap."
    for named, words in (
        ([a, b], "Not distinguishable: the intervals overlap."),
        ([("a", unknown), ("b", sure)], "Not distinguishable: no two intervals are apart, and some have none."),
        ([a, c], said),
        ([a, b, c], f"{said} The other 2 pairs are not distinguishable."),
        ([a, b, d], "d is above a and b: their intervals do not overlap. The other pair is not distinguishable."),
        ([a], "Only one of them logged it: there is nothing to compare it with."),
    ):
        assert distinguish(named) == (words, " above " in words)


HARDER = {"kind": "running_sum", "max_digits": 9, "train_size": 512, "heldout_size": 256}


def compared(tmp_path: Path, *paths: Path) -> tuple[Page, str]:
    out = tmp_path / "compare.html"
    build_comparison(paths, out)
    document = out.read_text()
    return Page(document), document


@pytest.fixture
def three(write_run, rows_of_a_run) -> list[Path]:
    """Two seeds of one recipe, and one run of another that was stopped early."""
    seeds = [write_run(f"fp16-{s}", rows_of_a_run(seed=s), {"seed": s}) for s in (0, 1)]
    other = {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}}
    return [*seeds, write_run("slow", rows_of_a_run(steps=30, seed=2, gap=0.2), other)]


def test_the_page_is_whole_and_every_run_gives_the_same_bytes(three, write_run, tmp_path: Path) -> None:
    trainer = [{"step": s, "train/loss": 1 / s, "precision/loss_scale": 1.0, "time/step": 0.1} for s in range(1, 9)]
    four = (*three, write_run("trainer", trainer, None, None))
    page, document = compared(tmp_path, *four)
    page.assert_self_contained(document)
    assert_snapshot(Path(__file__).parent / "snapshots" / "compare.txt", page.outline)
    assert document_of(compare_runs(read_runs(four))) == document


@pytest.mark.parametrize(
    ("shares", "other", "said"),
    [
        ((0.5, 0.625), {"steps": 41}, "Not distinguishable: the intervals overlap."),
        ((0.25, 0.75), {"steps": 41}, "steps=41 is above steps=40: their intervals do not overlap. Where a single run"),
        ((0.25, 0.75), {"task": HARDER}, "Not compared: the questions are not the same (different task.max_digits)."),
    ],
)
def test_only_results_whose_intervals_are_apart_are_ranked(write_run, rows_of_a_run, shares, other, said: str) -> None:
    paths = []
    for name, greedy, config in zip("ab", shares, ({}, other), strict=True):
        rows = rows_of_a_run()
        rows[-1] |= {"eval/greedy_accuracy": greedy, "reward/mean": greedy}
        paths.append(write_run(name, rows, config))
    assert compare_runs(read_runs(paths)).finals[0].said.startswith(said)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"threads": 8, "device": "NVIDIA H100"}, "Times are not comparable: different device and threads."),
        ({"resumed": [{"step": 3, "changed": {"threads": [2, 4]}}]},
         "Times may not be comparable: b went on in a changed environment."),
        ({}, "Device, threads and torch are the same."),
        (None, "Times may not be comparable: not every run recorded its device and threads."),
    ],
)  # fmt: skip
def test_times_of_other_machines_are_not_comparable(environment, said: str, write_run, rows_of_a_run) -> None:
    paths = [write_run("a", rows_of_a_run()), write_run("b", rows_of_a_run(seed=1), {"steps": 50}, environment)]
    assert timing_note(compare_runs(read_runs(paths))).startswith(said)


def test_names_and_recipes_cannot_inject(write_run, rows_of_a_run, tmp_path: Path) -> None:
    a = write_run("<img onerror=x>", rows_of_a_run(), {"note": "</td><script>1</script>"}, {"device": "<u>"})
    b = write_run("b", rows_of_a_run(seed=1), {"note": r"$\frac$ <b>"}, {"device": "<s>"})  # no formula to be set
    page, document = compared(tmp_path, a, b)
    assert "<script" not in document
    assert not page.tags & {"img", "script", "u", "s"}
    assert page.table("recipe")["note"] == ["</td><script>1</script>", r"$\frac$ <b>"]


@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize("environment", [False, True])
def test_the_summary_says_what_differs_and_nothing_of_what_does_not(
    recipe: bool, environment: bool, write_run, rows_of_a_run
) -> None:
    a = write_run("a", rows_of_a_run(), {"note": "one"}, {"device": "cpu"})
    changed = {"note": "two" if recipe else "one"}
    b = write_run("b", rows_of_a_run(seed=1), changed, {"device": "cuda" if environment else "cpu"})
    show(compare_runs(read_runs([a, b])), Console(file=(drawn := io.StringIO()), width=120))
    lines = drawn.getvalue().splitlines()
    for title, there, said in (
        ("recipe", recipe, "note: one | two"),
        ("environment", environment, "device: cpu | cuda"),
    ):
        assert (f"What differs in the {title}, in the order above" in lines) is there
        assert (said in lines) is there
