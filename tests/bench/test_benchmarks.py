"""Every case under benchmarks/ runs: in its short form, with rows that go to a folder of the test's.

What measures against TRL or on a GPU runs as far as it can without them, and says what it lacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runner
import torch

from mantissa.model import Decoder, ModelConfig, byte_tokenizer, save_model

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

THREAD = ("--threads", "1")
# What a script is called with, and constants of it that a short round has smaller.
SCRIPTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "allocator": ((*THREAD, "--rounds", "1", "--work", "tiny", "--dry"), {}),
    "amp_loss": ((*THREAD, "--seeds", "2"), {"UPDATES": 50}),
    "amp_overhead": ((*THREAD, "--rounds", "1"), {}),
    "auto_scale": (("--steps", "60", "--seeds", "1"), {}),
    "demo_memory": ((*THREAD, "--dry"), {"IMPORTS": ("mantissa",)}),
    "exact_cost": ((*THREAD, "--rounds", "1", "--precisions", "fp16"), {"SAMPLES": 2, "NEW_TOKENS": 4}),
    "fp8_step": ((*THREAD, "--rounds", "1", "--hidden", "128"), {}),
    "genesis": (("ranking",), {"EXECUTIONS": 16, "ROUNDS": 2, "TASKS": "clamp"}),
    "gpu_demo": (("--device", "cpu", "--steps", "3", "--warm-start", "4", "--dry"), {}),
    "gpu_exact": (("--dry", "--seconds", "4"), {}),
    "lora_step": ((*THREAD, "--rounds", "1"), {}),
    "moments_step": ((*THREAD, "--rounds", "1"), {}),
    "peak": (("--threads", "1", "--dry"), {"SHAPES": {"square": (64, 64, 64)}}),
    "rollout_vs_generate": ((*THREAD, "--repeats", "1", "--cases", "1", "--dry"), {}),
    "native_splits": ((*THREAD, "--rounds", "1"), {"ROWS": (1, 16)}),
    "native_bf16": ((*THREAD, "--rounds", "1", "--rows", "1"), {}),
    "simulated_step": ((*THREAD, "--rounds", "1"), {}),
    "waiting": (("--threads", "1", "--busy", "0", "--rounds", "1", "--work", "tiny", "--dry"), {}),
}
NEEDS = {"gpu_exact": "triton", "moments_step": "torchao", "rollout_vs_generate": "transformers"}
ELSEWHERE = {  # tests of their own; of a real model's size; or what scripts share
    "first_use", "doctor_jobs_trl",
    "demo_runs", "final_policy", "gpu", "gpu_sizes", "rl_step", "rl_step_vs_trl", "tables", "trl_step",
    "rl_problem", "rows", "steps", "workers", "decode_pretrained", "exact_logprobs", "gap", "emulated",
    "doctor_faults", "substitution", "tune", "waltz", "soak", "soak_job", "soak_load",
    "soak_report", "doctor_strangers", "doctor_mistakes", "start_pages", "run", "runner",
    "families", "verl_jobs", "verl_rehearsals", "native_beside", "native_limit",
}  # fmt: skip


# Cases that want a policy, and get one of the smallest kind; and those of what no test has here: another's environment,
# a network, a real model's size. Some have tests of their own below.
OF_A_MODEL = {"doctor_confusion", "proof"}
NOT_HERE = {"doctor_healthy", "doctor_hands", "doctor_jobs"}


def run_case(folder: Path, *words: str, code: int = 0) -> str:
    """What a case prints; rows go to ``folder``."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), *words]
    environment = {**os.environ, "OUT": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, script: str, *arguments: str, constants: dict[str, Any] | None = None, code: int = 0) -> str:
    """What a script prints, with some of its constants replaced; rows go to ``folder``."""
    program = (
        f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(ROOT / 'tests/support')]!r}\n"
        f"{'import triton_interpreter' * (script == 'gpu_exact')}\n"  # which mends it
        f"sys.argv = {[script, *arguments]!r}; import {script}\n"
        f"for name, value in {constants or {}!r}.items():\n"
        f"    assert hasattr({script}, name), name\n"
        f"    setattr({script}, name, value)\n"
        f"{script}.main()"
    )
    environment = {**os.environ, "OUT": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A pretrained model of the smallest kind, as the scripts expect one."""
    config = ModelConfig("llama", 300, 64, 64, 1, 4, 2, 16, max_position_embeddings=128, tie_word_embeddings=True)
    save_model(Decoder(config).initialize(), byte_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_no_script_is_left_out() -> None:  # in every suite, unlike the others
    of_cases = {module for module, _, _ in runner.found().values()}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SCRIPTS.keys() | ELSEWHERE | of_cases
    assert runner.found().keys() >= OF_A_MODEL | NOT_HERE
    assert all(said for _, _, said in runner.found().values())


@pytest.mark.variants
@pytest.mark.parametrize("name", sorted(runner.found().keys() - NOT_HERE))
def test_a_case_runs_in_its_short_form(name: str, pretrained: Path, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}, which is not installed")
    run_case(tmp_path, name, *([str(pretrained)] if name in OF_A_MODEL else []), "--dry")
    assert rows_in(tmp_path / f"{runner.found()[name][1]}.jsonl")


@pytest.mark.variants
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: str, tmp_path: Path) -> None:
    arguments, constants = SCRIPTS[script]
    if script in NEEDS and importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"needs {NEEDS[script]}, which is not installed")
    if script == "gpu_exact" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels without a GPU: make test-triton runs it interpreted")
    printed = run(tmp_path, script, *arguments, constants=constants)
    assert re.search(r"\d", printed)
    written = list(tmp_path.glob("*.jsonl"))
    assert len(written) == ("--dry" not in arguments)
    assert all(path.read_text().count("\n") > 0 for path in written)


@pytest.mark.variants
@pytest.mark.parametrize("script", ["gpu", "gpu_sizes"])
def test_what_needs_a_gpu_says_so(script: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: benchmarks/gpu.sh measures on it")
    said = run(tmp_path, script, code=1)
    assert said == f"benchmarks/{script}.py: expected a CUDA device that torch can use, found none\n"


@pytest.mark.variants
def test_trl_s_worker_takes_its_arguments(tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is in an environment of its own: make bench-trl")
    assert "--threads" in run(tmp_path, "trl_step", "--help")


@pytest.mark.variants
def test_the_tables_are_those_in_the_repository(tmp_path: Path) -> None:
    """From a copy: what ``tables.py`` writes is what is committed, so nothing in it was typed."""
    for name in ("README.md", "results"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(BENCHMARKS)!r}); import tables\n"
        f"tables.ROOT = pathlib.Path({str(tmp_path)!r}); tables.RESULTS = tables.ROOT / 'results'; tables.main()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    for name in ("README.md", "results/README.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.variants
def test_the_summary_of_runs(tmp_path: Path) -> None:
    options = ["steps=2", "warm_start=null", "rollout.prompts=2", "evaluation.problems=4", "evaluation.every=2"]
    command = [sys.executable, "-m", "mantissa", "train", "recipes/demo.yaml", f"run_dir={tmp_path}/run", *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    script = [sys.executable, str(BENCHMARKS / "demo_runs.py"), str(tmp_path / "run")]
    subprocess.run(script, env={**os.environ, "OUT": str(tmp_path)}, check=True)
    (row,) = (tmp_path / "demo_runs.jsonl").read_text().splitlines()
    assert '"steps": 2' in row
    script = [sys.executable, str(BENCHMARKS / "final_policy.py"), str(tmp_path / "run"), "--problems", "2"]
    subprocess.run(script, env={**os.environ, "OUT": str(tmp_path)}, check=True)
    row = json.loads((tmp_path / "final_policy.jsonl").read_text())
    assert row["steps"] == 2
    assert 0 <= row["accuracy_fp32"] <= row["solved_fp32"] <= 1
    assert row["solved_fp32"] <= row["distinct_fp32"] <= 32


@pytest.mark.variants
def test_the_rows_of_a_gap(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    for name, row in (("gap", {"pair": "fp16", "requested": "fp16/fp16", "active": "fp16/fp16"}), ("completions", {})):
        (tmp_path / "measured" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    script = [sys.executable, str(BENCHMARKS / "gap.py"), str(tmp_path / "measured")]
    subprocess.run(script, env={**os.environ, "OUT": str(tmp_path)}, check=True)
    row = json.loads((tmp_path / "gap.jsonl").read_text())
    assert (row["benchmark"], row["pair"], row["threads"]) == ("gap", "fp16", 1)


@pytest.mark.variants
def test_what_all_runs_is_there(tmp_path: Path) -> None:
    """Scripts that exist, with options that they take, and cases."""
    for name, given in runner.ALL.items():
        if name.endswith(".py"):
            taken = run(tmp_path, name.removesuffix(".py"), "--help") if name != "tables.py" else ""
            assert all(option in taken for option in given if option.startswith("--")), name
        else:
            assert name in runner.found()


def made_by(name: str, *words: str) -> list[dict[str, Any]]:
    """Rows as the scripts write them: bf16 gains on the peer, and a hidden size of 256 is a miss."""
    if name == "native_beside.py":
        ratios = {"ours, fp32": 1.0, "vLLM, fp32": 0.8, "ours, bf16, logits too": 0.6, "vLLM, bf16": 1.2}
        return [
            {"contender": who, "case": "16 rows, prompts of 48", "value": value,
             "metric": "decode step seconds over ours, fp32"} for who, value in ratios.items()
        ]  # fmt: skip
    if name == "simulated_step.py":
        return [{"metric": "step_time_over_fp32", "requested": "fp16", "hidden": hidden, "value": hidden / 200}
                for hidden in (128, 256)]  # fmt: skip
    return [{"contender": fmt, "metric": f"time_over_trl_{fmt}", "value": 0.4} for fmt in ("fp32", "bf16")]


def test_each_goal_has_a_line_held_or_missed_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import here

    monkeypatch.setattr(here, "script", made_by)
    monkeypatch.setattr(here.Path, "is_file", lambda path: True)  # the environments of vLLM and TRL
    found = {finding.goal: finding for part in ("decode", "simulated", "step") for finding in here.PARTS[part](1, 1)}
    assert [found[f"decode step over vLLM's, {fmt}, 16 rows, 1 threads"].value for fmt in ("fp32", "bf16")] == [
        1.25,
        0.5,
    ]
    assert {goal for goal, each in found.items() if each.held is None} == {
        "decode step over llama.cpp's fp16, 1 row",
        *(f"decode step over vLLM's, {fmt}, {rows} rows, 1 threads" for fmt in ("fp32", "bf16") for rows in (1, 64)),
    }
    assert {goal for goal, each in found.items() if each.held is False} == {
        "decode step over vLLM's, fp32, 16 rows, 1 threads",
        "simulated fp16 step over fp32's, hidden 256",
        *(f"step over TRL's, {fmt}, SmolLM2" for fmt in ("fp32", "bf16")),
    }
    one = here.Finding("two processes over one", 1.9, 1.8, at_least=True)
    assert (one.held, one.line()) == (True, "held         two processes over one: 1.9, at least 1.8")


def test_exponents_are_those_of_the_numbers() -> None:
    import cost

    assert cost.slope([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert cost.peak_above(lambda: bytearray(64 << 20)) > 60 << 20


@pytest.mark.variants
def test_rl_step_runs_in_each_precision(tmp_path: Path) -> None:
    options = ("--work", "tiny", *THREAD, "--rounds", "2", "--warm-up", "0", "--dry", "--trl-python", "none")
    table = [line.split() for line in run(tmp_path, "rl_step_vs_trl", *options).splitlines()]
    seconds = {words[0]: float(words[2]) for words in table if words[1:2] == ["step_seconds"]}
    assert seconds.keys() == {"fp32", "fp16", "bf16"}
    assert all(0 < value < 60 for value in seconds.values())


@pytest.mark.variants
def test_each_switch_of_an_emulated_rollout_has_a_row(pretrained: Path, tmp_path: Path) -> None:
    run(tmp_path, "emulated", str(pretrained), "--formats", "bf16", "--prompts", "2", "--tokens", "6")
    rows = {row["switches"]: row for row in map(json.loads, (tmp_path / "emulated.jsonl").read_text().splitlines())}
    switches = {"norm", "rope", "products", "attention", "activation", "logits", "tensor_parallel=2", "serving"}
    assert rows.keys() == switches | {"emulated"}
    gap, scored = rows["emulated"], rows["serving"]
    assert gap["abs_logp_diff_mean"] == pytest.approx(scored["abs_logp_diff_mean"], rel=0.5)
    assert all(row["abs_logp_diff_mean"] > 0 for name, row in rows.items() if name != "products")


@pytest.mark.variants
def test_sampling_from_a_pretrained_model_is_timed_by_phase(pretrained: Path, tmp_path: Path) -> None:
    options = (*THREAD, "--rounds", "1", "--rows", "4", "--samples", "2", "--precisions", "fp32", "--dry")
    lines = run(tmp_path, "decode_pretrained", str(pretrained), *options).splitlines()
    wanted = [[name, phase] for name in ("transformers", "fp32") for phase in ("prefill", "all", "decode")]
    table = [line.split()[2:4] for line in lines if "processor" not in line]
    assert [pair for pair in table if pair in wanted] == wanted


@pytest.mark.variants
def test_sampling_is_measured_beside_others_in_processes_of_their_own(pretrained: Path, tmp_path: Path) -> None:
    names = ("ours, fp32", "ours, int8 on bf16", "transformers, bf16")
    options = (*THREAD, "--rounds", "1", "--rows", "2", "--new", "3", "--only", *names)
    said = run(tmp_path, "native_beside", "--model", str(pretrained), *options)
    rows = list(map(json.loads, (tmp_path / "native_beside.jsonl").read_text().splitlines()))
    assert [name for name in names if f"  2 rows {name} " in said] == list(names)
    found = {(row["contender"], row["metric"]): row["value"] for row in rows}
    assert all(found[name, "prefill seconds"] > 0 for name in names)
    assert found["ours, fp32", "decode step seconds over ours, fp32"] == 1


@pytest.mark.variants
def test_a_decode_steps_limit_and_parts_are_measured(pretrained: Path, tmp_path: Path) -> None:
    run(tmp_path, "native_limit", "--model", str(pretrained), *THREAD, "--rounds", "1", "--rows", "2")
    rows = list(map(json.loads, (tmp_path / "native_limit.jsonl").read_text().splitlines()))
    assert {row["case"] for row in rows} == {"decode step, 2 rows", "prefill, 2 rows"}
    for row in rows:
        assert 0 < row["limit"] < row["value"]
        assert 0 < row["parts"]["products with weights"] < 2 * row["value"]  # under the profiler, beside other tests


@pytest.mark.variants
def test_the_peak_is_measured_by_both_libraries(tmp_path: Path) -> None:
    lines = run(tmp_path, "peak", *THREAD, "--dry").splitlines()
    values = {line.split(":")[1].split("  ")[0].strip() for line in lines}
    assert values == {"square", "step", "square onednn", "step onednn", "memory"}


@pytest.mark.variants
def test_the_doctor_is_tried_on_a_family_of_transformers(tmp_path: Path) -> None:
    said = run_case(tmp_path, "doctor_held_out", "--dry")
    rows = rows_in(tmp_path / "doctor_held_out.jsonl")
    assert {row["side"] for row in rows} == {"learner", "rollout"}
    assert len({row["kind"] for row in rows}) > 40
    assert all(row["outcome"] == "right" for row in rows if row["kind"] == "base-2 logarithm")
    assert "healthy called healthy: " in said


@pytest.mark.variants
def test_the_doctor_is_tried_on_a_policy(pretrained: Path, tmp_path: Path) -> None:
    run_case(tmp_path, "doctor_confusion", str(pretrained), "--dry")
    healthy, *faults = rows_in(tmp_path / "doctor_confusion.jsonl")
    assert (healthy["kind"], healthy["trials"]) == ("healthy", 2)
    assert faults
    assert all("rows" in row["kind"] and row["trials"] == 2 for row in faults)
    assert "expected model" in run_case(tmp_path, "doctor_confusion", code=2)


@pytest.mark.variants
def test_the_doctor_is_asked_of_another_program_s_samples(tmp_path: Path) -> None:
    run_case(tmp_path, "doctor_healthy", "prepare", str(tmp_path / "tiny"), "--model", "tiny")
    run_case(tmp_path, "doctor_healthy", "sample", str(tmp_path / "tiny"), "--program", "transformers")
    run_case(tmp_path, "doctor_healthy", "score", str(tmp_path / "tiny"), "--trials", "1", "--learners", "fp32")
    (row,) = rows_in(tmp_path / "doctor_healthy.jsonl")
    assert (row["program"], row["learner"], row["verdict"]) == ("transformers", "fp32", "healthy noise")


@pytest.mark.variants
def test_the_causes_of_a_gap_and_a_tuned_policy_have_rows(pretrained: Path, tmp_path: Path) -> None:
    measured, tuned = tmp_path / "measured", tmp_path / "tuned"
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {number}\n" for number in range(12)))
    prompts = ("--prompts", str(tmp_path / "prompts.txt"))
    gap = ("gap", str(pretrained), "--pairs", "bf16", "--max-tokens", "6", *prompts, "--out", str(measured))
    subprocess.run([sys.executable, "-m", "mantissa", *gap], check=True, capture_output=True)
    run(tmp_path, "substitution", str(measured), str(pretrained), "bf16")
    rows = [json.loads(line) for line in (tmp_path / "substitution.jsonl").read_text().splitlines()]
    assert {row["metric"] for row in rows} == {"cause", "alone"}
    tuned.mkdir()
    (tuned / "tune.jsonl").write_text(json.dumps({"budget": 0.01}) + "\n")
    run(tmp_path, "tune", str(tuned))
    assert json.loads((tmp_path / "tune.jsonl").read_text())["budget"] == 0.01


@pytest.mark.variants
def test_two_policies_have_a_row_for_each_form(tmp_path: Path) -> None:
    few = ["trackers=[]", "evaluation={every: 1, problems: 32, samples: 1}", "rollout.prompts=4", "warm_start.steps=2"]
    few += ["waltz.feedback.warm_start.steps=2", "steps=2", "waltz.conversation_frozen=1"]
    options = ("0", "--forms", "bf16-decay", "frozen", "--keep", str(tmp_path / "keep"))
    run(tmp_path, "waltz", *options, constants={"COMMON": few})
    rows = [json.loads(line) for line in (tmp_path / "waltz.jsonl").read_text().splitlines()]
    assert [(row["form"], row["steps"]) for row in rows] == [("start", 1), ("bf16-decay", 2), ("frozen", 2)]
