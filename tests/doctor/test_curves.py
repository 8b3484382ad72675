"""What curves show: faults put into healthy curves are named with their step, healthy ones are healthy, and nothing is
named that scalars cannot show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import curve_logs
from curve_logs import Row, changed, gap_times, healthy
from mantissa.doctor.curves import CurveDiagnosis, examine_log
from mantissa.doctor.diagnosis import Basis, Verdict
from mantissa.doctor.logs import Curve, Log, Role, read_log, table
from mantissa.doctor.page import LINES, WIDTH, lines, write_log_page

PROGRAMS = ["trl", "verl", "nemo-rl", "prime-rl", "slime", "skyrl", "openrlhf", "mantissa"]
WITH_SIZE = [name for name in PROGRAMS if name != "openrlhf"]


def log_of(rows: Sequence[Row], program: str, **more: Any) -> Log:
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    names = table().programs[program].names
    curves = {role: Curve(name, steps, np.array([row[name] for row in rows])) for role, name in names.items()}
    return Log(program, Path("x.jsonl"), curves, **more)


def diagnosed(rows: Sequence[Row], program: str, **more: Any) -> CurveDiagnosis:
    log = log_of(rows, program, **more)
    found = examine_log(log)
    said = lines(log, found)
    assert len(said) <= LINES
    assert max(map(len, said)) <= WIDTH
    assert said[-1].startswith("record next: ") or said[-2].startswith("record next: ")
    return found


def named(found: CurveDiagnosis) -> str | None:
    return None if found.fault is None else found.fault.name


@pytest.mark.parametrize("program", PROGRAMS)
def test_healthy_curves_are_healthy(program: str) -> None:
    """Of all programs, lengths and noises: no fault in any."""
    for seed in range(12):
        for steps, noise in ((12, 0.1), (40, 0.3), (300, 0.15), (60, 0.6)):
            found = diagnosed(healthy(program, steps, seed, noise), program)
            assert found.verdict is Verdict.HEALTHY, (seed, steps, noise, found.headline)
            assert not [each for each in found.findings if each.found]
    assert found.basis is Basis.ROUNDING


def test_a_walk_is_hardly_ever_a_jump() -> None:
    """A gap that wanders by itself, as curves of training do, has no step at which it jumps: one of thirty looks so."""
    jumps = 0
    for seed in range(30):
        walk = np.exp(np.cumsum(np.random.default_rng(seed).normal(0, 0.06, 200)))
        found = diagnosed(gap_times(healthy("verl", 200, seed), "verl", lambda step, walk=walk: walk[step - 1]), "verl")
        jumps += named(found) == "gap_jump"
    assert jumps <= 1


@pytest.mark.parametrize("program", WITH_SIZE)
@pytest.mark.parametrize(("at", "times"), [(8, 4.0), (31, 2.8), (52, 5.0)])
def test_a_jump_is_named_with_its_step(program: str, at: int, times: float) -> None:
    for seed in range(3):
        rows = gap_times(healthy(program, seed=seed), program, lambda step: times if step >= at else 1.0)
        found = diagnosed(rows, program)
        assert named(found) == "gap_jump", (seed, found.headline)
        assert found.fault is not None
        assert found.fault.effect == at
        assert f"at step {at}" in lines(log_of(rows, program), found)[0]


def test_what_is_excluded_would_have_been_seen() -> None:
    """A jump, and growth, of the size that a healthy log's line names is found nine times of ten."""
    for noise in (0.1, 0.3, 0.5):
        found = {"gap_jump": 0, "gap_growth": 0}
        for seed in range(20):
            rows = healthy("trl", 100, seed, noise)
            seen = {
                each.name: float(each.rest["seen"]) for each in diagnosed(rows, "trl").findings if each.name in found
            }
            at = 20 + 3 * seed
            jump = gap_times(rows, "trl", lambda s, at=at, seen=seen: seen["gap_jump"] if s >= at else 1.0)
            grows = gap_times(rows, "trl", lambda s, seen=seen: seen["gap_growth"] ** ((s - 1) / 99))
            found["gap_jump"] += named(diagnosed(jump, "trl")) in ("gap_jump", "gap_growth")
            found["gap_growth"] += named(diagnosed(grows, "trl")) in ("gap_jump", "gap_growth")
        assert min(found.values()) >= 17, (noise, found)


def test_a_jump_says_what_the_log_has_there() -> None:
    rows = gap_times(healthy(), "verl", lambda step: 4.0 if step >= 31 else 1.0)
    assert "a resume" in diagnosed(rows, "verl", resumes=(31.0,)).headline
    assert "an evaluation" in diagnosed(rows, "verl", evaluations=(15.0, 30.0, 45.0)).headline
    assert "where the log has" not in diagnosed(rows, "verl", resumes=(12.0,), evaluations=(15.0,)).headline
    synced = changed(rows, "verl", Role.VERSION, lambda step, value: (step - 1) // 10)
    assert "new weights" in diagnosed(synced, "verl").headline
    every = changed(rows, "verl", Role.VERSION, lambda step, value: step)  # weights are new at every step
    assert "new weights" not in diagnosed(every, "verl").headline


def test_a_jump_with_other_data_is_no_fault_of_the_engine() -> None:
    """Answers become three times as long where the gap doubles: it is said and not named a fault."""
    rows = gap_times(healthy(), "verl", lambda step: 2.5 if step >= 31 else 1.0)
    found = diagnosed(changed(rows, "verl", Role.LENGTH, lambda step, value: value * (3 if step >= 31 else 1)), "verl")
    assert found.verdict is Verdict.HEALTHY
    assert any("length" in each for each in found.remarks)


def test_a_gap_that_falls_is_no_fault() -> None:
    found = diagnosed(gap_times(healthy(), "verl", lambda step: 0.2 if step >= 31 else 1.0), "verl")
    assert found.verdict is Verdict.HEALTHY
    assert found.remarks


@pytest.mark.parametrize("program", WITH_SIZE)
def test_growth_is_named_and_not_as_a_jump(program: str) -> None:
    for seed in range(3):
        rows = gap_times(healthy(program, 120, seed), program, lambda step: float(np.exp(step / 60)))
        assert named(diagnosed(rows, program)) == "gap_growth", seed


def test_growth_with_the_entropy_is_said_as_that() -> None:
    rows = gap_times(healthy("verl", 120), "verl", lambda step: float(np.exp(step / 90)))
    found = diagnosed(changed(rows, "verl", Role.ENTROPY, lambda step, value: value * np.exp(step / 90)), "verl")
    assert named(found) is None
    assert any("entropy grows as much" in each for each in found.remarks)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gap_beyond_the_marks_is_too_large(program: str) -> None:
    """Twenty times the usual everywhere: the size is all that is known of it."""
    times = 20.0
    found = diagnosed(gap_times(healthy(program), program, lambda step: times), program)
    assert found.verdict is Verdict.LARGE
    assert found.basis is Basis.SIZE
    assert "the gap is larger than rounding makes in bf16 (no format is named): " in found.headline
    assert "is usual" in found.headline


def test_a_jump_beyond_the_marks_is_both() -> None:
    found = diagnosed(gap_times(healthy(), "verl", lambda step: 20.0 if step >= 31 else 1.0), "verl")
    assert named(found) == "gap_jump"
    assert found.second is not None
    assert found.second.name == "gap_size"


@pytest.mark.parametrize("program", ["verl", "slime", "skyrl", "mantissa"])
def test_a_shift_to_one_side_is_a_law_and_no_noise(program: str) -> None:
    """d = -0.02 at every token: k1 = 0.02, k3 = 2e-4; of noise of that size k1 is k3."""
    shift, rows = -0.02, healthy(program)
    names = table().programs[program].names
    shifted = [
        row | {names[role]: value for role, value in (
            (Role.K1, -shift * (1 + 0.05 * np.sin(row["step"]))), (Role.K3, np.exp(shift) - 1 - shift),
            (Role.RATIO, np.exp(shift)),
            (Role.ABS, abs(shift) * (1.1 + 0.05 * np.sin(row["step"])))) if role in names}
        for row in rows
    ]  # fmt: skip
    assert named(diagnosed(shifted, program)) == "one_sided"
    assert named(diagnosed(rows, program)) is None


def test_the_law_of_noise_holds_for_log_probs_that_were_drawn() -> None:
    """Tokens drawn from one softmax and scored by another, as rounding makes it: k1 is k3 and not sqrt(2 k3)."""
    draw = np.random.default_rng(0)
    for size in (0.02, 0.1):
        ratios = []
        for _ in range(9):
            z = draw.normal(0, 2, (4000, 16))
            p, q = (
                each - np.logaddexp.reduce(each, axis=1, keepdims=True)
                for each in (z, z + draw.normal(0, size, z.shape))
            )
            token = (p + draw.gumbel(size=p.shape)).argmax(1)
            d = (q - p)[np.arange(len(p)), token]
            ratios.append(abs(d.mean()) / np.sqrt(2 * np.mean(np.exp(d) - 1 - d)))
        assert np.median(ratios) < 0.15


def test_a_gap_of_exactly_nothing_is_not_called_healthy() -> None:
    found = diagnosed(gap_times(healthy("trl"), "trl", lambda step: 0.0), "trl")
    assert found.verdict is Verdict.UNKNOWN
    assert "exactly 0" in found.why


def test_a_gap_that_never_moves_is_no_measurement() -> None:
    rows = changed(healthy("trl"), "trl", Role.ABS, lambda step, value: 0.0123)
    assert named(diagnosed(rows, "trl")) == "gap_stuck"


def test_a_log_without_a_gap_says_so_and_how_to_have_one() -> None:
    log = log_of(healthy("trl"), "trl")
    curves = {role: curve for role, curve in log.curves.items() if not role.startswith("gap")}
    found = examine_log(Log("trl", log.path, curves))
    assert found.verdict is Verdict.UNKNOWN
    assert "vllm_importance_sampling_correction=True" in found.record


def test_few_steps_have_a_size_and_no_shape() -> None:
    assert diagnosed(healthy("verl", 5), "verl").verdict is Verdict.UNKNOWN
    assert diagnosed(gap_times(healthy("verl", 5), "verl", lambda step: 20.0), "verl").verdict is Verdict.LARGE


OTHERS: dict[str, tuple[str, Role, Callable[[int, float], float], str]] = {
    "rewards alike": ("trl", Role.SAME_REWARD, lambda step, value: 1.0, "same_reward"),
    "reward_std 0": ("openrlhf", Role.REWARD_STD, lambda step, value: 0.0, "same_reward"),
    "entropy": ("verl", Role.ENTROPY, lambda step, value: value * np.exp(-step / 12), "entropy_collapse"),
    "scale": ("mantissa", Role.LOSS_SCALE, lambda step, value: 2.0 ** max(0, 16 - step // 3), "loss_scale"),
    "clipped": ("verl", Role.CLIPPED, lambda step, value: 0.4, "clipping"),
    "loss": ("skyrl", Role.LOSS, lambda step, value: np.nan if step > 20 else value, "nonfinite"),
    "grad-norm": ("slime", Role.GRAD_NORM, lambda step, value: np.inf if step == 7 else value, "nonfinite"),
}


@pytest.mark.parametrize(("begin", "floor"), [(12, " to its floor"), (40, "")], ids=["to 1", "still falling"])
def test_a_loss_scale_that_falls_is_told_from_which_step(begin: int, floor: str) -> None:
    """Where a scale rises, is halved once and rises again, as a healthy one does, nothing falls."""
    found = diagnosed(changed(healthy("mantissa"), "mantissa", Role.LOSS_SCALE, lambda step, value: 2.0 ** (
        17 if step < begin else max(0, 17 - (step - begin) // 2))), "mantissa")  # fmt: skip
    assert named(found) == "loss_scale"
    assert f"falls{floor} from step {begin + 2} on" in found.headline, found.headline
    well = changed(healthy("mantissa"), "mantissa", Role.LOSS_SCALE, lambda step, value: 2.0 ** (16 - (step % 20 > 17)))
    assert diagnosed(well, "mantissa").verdict is Verdict.HEALTHY


@pytest.mark.parametrize("kind", OTHERS)
def test_what_other_curves_show(kind: str) -> None:
    program, role, change, name = OTHERS[kind]
    assert named(diagnosed(changed(healthy(program), program, role, change), program)) == name


def test_samples_of_one_text() -> None:
    rows = changed(healthy("trl"), "trl", Role.SAME_REWARD, lambda step, value: 1.0)
    rows = changed(
        changed(rows, "trl", Role.LENGTH_MIN, lambda step, value: 77), "trl", Role.LENGTH_MAX, lambda s, v: 77
    )
    assert named(diagnosed(rows, "trl")) == "same_samples"
    cut = changed(rows, "trl", Role.TRUNCATED, lambda step, value: 1.0)  # all end at the limit: no sign of one text
    assert named(diagnosed(cut, "trl")) == "same_reward"


def test_grad_norm_spikes_with_the_gap_and_without() -> None:
    at = {20, 33, 47}
    rows = changed(healthy(), "verl", Role.GRAD_NORM, lambda step, value: value * (40 if step in at else 1))
    alone = diagnosed(rows, "verl")
    assert alone.verdict is Verdict.HEALTHY
    assert any("20, 33, 47" in each for each in alone.remarks)
    both = diagnosed(gap_times(rows, "verl", lambda step: 12.0 if step in at else 1.0), "verl")
    assert named(both) == "spikes_with_gap"


def test_spikes_at_evaluations() -> None:
    rows = gap_times(healthy("trl"), "trl", lambda step: 12.0 if step % 15 == 0 else 1.0)
    found = diagnosed(rows, "trl", evaluations=(15.0, 30.0, 45.0, 60.0))
    assert named(found) == "gap_spikes"
    assert "an evaluation" in found.headline


def test_a_gap_that_goes_with_the_length() -> None:
    rows, lengths = healthy(), {}
    draw = np.random.default_rng(1)
    for row in rows:
        lengths[row["step"]] = float(np.exp(draw.normal(0, 0.5)))
    rows = changed(rows, "verl", Role.LENGTH, lambda step, value: 400 * lengths[step])
    found = diagnosed(gap_times(rows, "verl", lambda step: lengths[step]), "verl")
    assert any("length of answers" in each for each in found.remarks)
    assert found.verdict is Verdict.HEALTHY


def test_a_page_and_json(tmp_path: Path) -> None:
    rows = gap_times(healthy(), "verl", lambda step: 4.0 if step >= 31 else 1.0)
    log = read_log(curve_logs.verl_file(tmp_path / "x.jsonl", rows))
    path = write_log_page(log, examine_log(log), tmp_path / "page")
    row = json.loads((tmp_path / "page" / "doctor.json").read_text())
    assert (row["fault"], row["verdict"], row["framework"]) == ("gap_jump", "a fault", "verl")
    assert row["record"].startswith("VERL_USE_EXTERNAL_MODULES")
    text = path.read_text()
    assert "the gap jumps at step 31" in text
    assert "rollout_corr/k3_kl" in text


def test_a_million_steps_take_seconds() -> None:
    steps = np.arange(1_000_000, dtype=np.float64)
    values = np.exp(np.random.default_rng(0).normal(-4, 0.2, len(steps)))
    values[700_000:] *= 4
    found = examine_log(Log("verl", Path("x"), {Role.PROB: Curve("p", steps, values)}))
    assert found.fault is not None
    assert found.fault.effect == pytest.approx(700_000, abs=300)
