"""Every case under benchmarks/ runs: in its short form, with rows that go to a folder of the test's.

What measures against TRL or on a GPU runs as far as it can without them, and says what it lacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runner
import torch

from mantissa.model import Decoder, ModelConfig, byte_tokenizer, save_model

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

THREAD = ("--threads", "1")
NEEDS = {"rollout_vs_generate": "transformers"}
SCRIPTS = {  # what is no case: workers, what cases share, and programs with tests of their own
    "apart", "doctor_jobs_trl", "doctor_mistakes", "doctor_ours", "doctor_strangers", "families", "our_step",
    "rl_problem", "rows", "run", "runner", "soak", "soak_job", "soak_load", "soak_report", "tables",
    "trl_step", "workers",
}  # fmt: skip


# Cases that want a policy, and get one of the smallest kind; and those of what no test has here: another's environment,
# a network, a real model's size. Some have tests of their own below.
OF_A_MODEL = {"decode_pretrained", "doctor_confusion", "emulated", "exact_logprobs", "proof"}
BY_OPTION = {"native_beside", "native_limit"}
ON_A_GPU = {"gpu_demo", "gpu_exact", "gpu_promises", "gpu_sizes", "gpu_step"}
NOT_HERE = {
    "demo_runs", "doctor_healthy", "doctor_hands", "doctor_jobs", "final_policy", "first_use", "gap", "start_pages",
    "substitution", "tune", "verl_gate", "verl_jobs", "verl_picture", "verl_rehearsals", "waltz", "waltz_picture",
}  # fmt: skip


def run_case(folder: Path, *words: str, code: int = 0) -> str:
    """What a case prints; rows go to ``folder``."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), *words]
    environment = {**os.environ, "OUT": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A pretrained model of the smallest kind, as the scripts expect one."""
    config = ModelConfig("llama", 300, 64, 64, 1, 4, 2, 16, max_position_embeddings=512, tie_word_embeddings=True)
    save_model(Decoder(config).initialize(), byte_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_no_script_is_left_out() -> None:  # in every suite, unlike the others
    of_cases = {module for module, _, _ in runner.found().values()}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SCRIPTS | of_cases
    assert runner.found().keys() >= OF_A_MODEL | BY_OPTION | ON_A_GPU | NOT_HERE
    assert all(said for _, _, said in runner.found().values())
    assert runner.ALL.keys() <= runner.found().keys()


@pytest.mark.variants
@pytest.mark.parametrize("name", sorted(runner.found().keys() - NOT_HERE - ON_A_GPU))
def test_a_case_runs_in_its_short_form(name: str, pretrained: Path, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}, which is not installed")
    model = [str(pretrained)] if name in OF_A_MODEL else ["--model", str(pretrained)] if name in BY_OPTION else []
    run_case(tmp_path, name, *model, "--dry")
    assert rows_in(tmp_path / f"{runner.found()[name][1]}.jsonl")


def test_parts_may_be_left_out_and_no_other_may_be_asked_for() -> None:
    import genesis  # noqa: F401 which registers its case

    asked = partial(runner.options, "genesis", runner._imported["genesis"])
    assert asked(["--dry"])[0]["parts"] == ("ranking",)
    assert asked(["profiles"])[0]["parts"] == ["profiles"]
    for words in ([], ["nonsense"]):
        with pytest.raises(SystemExit):
            asked(words)


def test_what_stands_before_a_slash_is_given_by_its_place_and_may_be_left_out(tmp_path: Path) -> None:
    import verl_rehearsals

    asked = partial(runner.options, "verl_rehearsals", runner._imported["verl_rehearsals"])
    assert asked([])[0]["kinds"] == tuple(verl_rehearsals.KINDS)
    assert asked(["grpo", "exact"])[0]["kinds"] == ["grpo", "exact"]
    assert "expected some of grpo, " in run_case(tmp_path, "verl_rehearsals", "nonsense", code=1)


def test_what_is_for_a_gpu_measures_no_other_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: benchmarks/gpu.sh measures on it")
    import gpu

    for name in ON_A_GPU:
        with pytest.raises(SystemExit, match="expected a CUDA device"):
            next(getattr(gpu, name)(device="cuda"))


@pytest.mark.variants
def test_gpu_exact_runs_in_triton_s_interpreter() -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels without a GPU: make test-triton runs it interpreted")
    import gpu

    import triton_interpreter  # noqa: F401 which mends it

    rows = [row for made in gpu.gpu_exact(device="cpu", seconds_each=2.0, tiny=True) for row in made]
    assert {row["benchmark"] for row in rows} == {f"gpu_exact_{part}" for part in ("exactness", "products", "cost")}
    assert all(row["value"] == 1 for row in rows if (row["kernels"], row["metric"]) == (gpu.EXACT, "equal_log_probs"))


def test_a_size_without_room_on_a_gpu_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu

    def without_room() -> list[dict[str, Any]]:
        raise torch.OutOfMemoryError

    assert gpu.in_memory("1B", without_room) == []
    assert capsys.readouterr().out == "left out: 1B does not fit this GPU's memory\n"


def test_each_promise_of_16_bits_is_held_or_missed() -> None:
    import gpu

    fp32 = {"scenario": "size", "parameters": 10**8, "precision": "fp32", "active": "fp32", "backend": "native",
            "speed_up": 1.0, "peak_memory_bytes": 100, "final_loss": 1.0, "overflow_rate": 0.0}  # fmt: skip
    fp16 = fp32 | {"precision": "fp16", "active": "fp16", "speed_up": 8.0, "peak_memory_bytes": 97}
    found = {row["metric"]: row for row in gpu.promised(fp16, fp32)}
    assert [row["held"] for row in found.values()] == [True, False]
    assert found["memory saved of fp32's"]["value"] == pytest.approx(0.03)
    trained = [row | {"scenario": "stress"} for row in (fp16 | {"final_loss": 1.01, "overflow_rate": 0.06}, fp32)]
    found |= {row["metric"]: row for row in gpu.promised(*trained)}
    assert found.keys() == gpu.PROMISES.keys()
    expected = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"| {promise} |" in expected for promise in gpu.PROMISES)
    assert [row["held"] for row in list(found.values())[2:]] == [True, False]


@pytest.mark.slow
def test_the_whole_of_what_runs_on_a_gpu_runs_on_a_cpu_without_git(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for name in ("recipes", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", str(tmp_path / "benchmarks" / "gpu.sh"), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.stem for path in (tmp_path / "out").glob("*.jsonl")}
    assert files == {"adopt", "gpu_demo", "gpu_exact", "gpu_promises", "gpu_sizes", "gpu_step", "rollout_vs_generate"}


def test_a_gpu_is_not_measured_on_a_cpu_by_mistake() -> None:
    script = str(BENCHMARKS / "gpu.sh")
    done = subprocess.run(["bash", script, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "goes with --tiny" in done.stderr


@pytest.mark.variants
def test_trl_s_worker_takes_its_arguments() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is in an environment of its own: make bench-trl")
    words = [sys.executable, str(BENCHMARKS / "trl_step.py"), "--help"]
    assert "--threads" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.variants  # it asks the whole history which commits are of it, and a clone may be shallow
def test_the_tables_are_those_in_the_repository(tmp_path: Path) -> None:
    """From a copy: what ``tables.py`` writes is what is committed, so nothing in it was typed."""
    for name in ("README.md", "results"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    (tmp_path / "docs").mkdir()
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(BENCHMARKS)!r}); import tables\n"
        f"tables.ROOT = pathlib.Path({str(tmp_path)!r}); tables.RESULTS = tables.ROOT / 'results'; tables.main()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    for name in ("README.md", "results/README.md", "docs/results.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.variants
def test_the_summary_of_runs(tmp_path: Path) -> None:
    options = ["steps=2", "warm_start=null", "rollout.prompts=2", "evaluation.problems=4", "evaluation.every=2"]
    command = [sys.executable, "-m", "mantissa", "train", "recipes/demo.yaml", f"run_dir={tmp_path}/run", *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    run_case(tmp_path, "demo_runs", str(tmp_path / "run"))
    assert rows_in(tmp_path / "demo_runs.jsonl")[0]["steps"] == 2
    run_case(tmp_path, "doctor_confusion", str(tmp_path / "run"), "--runs", "--only", "logarithm")
    kinds = [row["kind"] for row in rows_in(tmp_path / "doctor_confusion.jsonl") if row["side"] == "learner"]
    assert kinds == ["healthy", "base-2 logarithm", "base-10 logarithm"]
    run_case(tmp_path, "final_policy", str(tmp_path / "run"), "--problems", "2")
    row = json.loads((tmp_path / "final_policy.jsonl").read_text())
    assert row["steps"] == 2
    assert 0 <= row["accuracy_fp32"] <= row["solved_fp32"] <= 1
    assert row["solved_fp32"] <= row["distinct_fp32"] <= 32


@pytest.mark.variants
def test_the_rows_of_a_gap(pretrained: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    command = [sys.executable, "-m", "mantissa", "gap", str(pretrained), "--pairs", "fp16", "--max-tokens", "4"]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "measured")]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    run_case(tmp_path, "gap", str(tmp_path / "measured"))
    row = json.loads((tmp_path / "gap.jsonl").read_text())
    assert (row["benchmark"], row["pair"], row["threads"]) == ("gap", "fp16", 1)


def made_by(name: str, *words: str) -> list[dict[str, Any]]:
    """Rows as the scripts write them: bf16 gains on the peer, and a hidden size of 256 is a miss."""
    if name == "native_beside":
        ratios = {"ours, fp32": 1.0, "vLLM, fp32": 0.8, "ours, bf16, logits too": 0.6, "vLLM, bf16": 1.2}
        return [
            {"contender": who, "case": "16 rows, prompts of 48", "value": value,
             "metric": "decode step seconds over ours, fp32"} for who, value in ratios.items()
        ]  # fmt: skip
    if name == "simulated_step":
        return [{"metric": "step_time_over_fp32", "requested": "fp16", "hidden": hidden, "value": hidden / 200}
                for hidden in (128, 256)]  # fmt: skip
    return [{"contender": fmt, "metric": f"time_over_trl_{fmt}", "value": 0.4} for fmt in ("fp32", "bf16")]


def test_each_goal_has_a_line_held_or_missed_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import here

    monkeypatch.setattr(here, "made_by", made_by)
    monkeypatch.setattr(here.Path, "is_file", lambda path: True)  # the peers' environments
    found = {finding.goal: finding for part in ("decode", "simulated", "step") for finding in here.PARTS[part](1, 1)}
    assert [found[f"decode step over vLLM's, {fmt}, 16 rows, 1 threads"].value for fmt in ("fp32", "bf16")] == [
        1.25,
        0.5,
    ]
    assert {goal for goal, each in found.items() if each.held is None} == {
        "decode step over llama.cpp's, fp16, 1 rows, 1 threads",
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


@pytest.mark.variants
def test_each_precision_of_an_rl_step_has_its_seconds(tmp_path: Path) -> None:
    run_case(tmp_path, "rl_step", "--dry", *THREAD)
    seconds = {row["contender"]: row["value"] for row in rows_in(tmp_path / "rl_step.jsonl")
               if row["metric"] == "step_seconds"}  # fmt: skip
    assert seconds.keys() == {"fp32", "fp16", "bf16"}
    assert all(0 < value < 60 for value in seconds.values())


@pytest.mark.variants
def test_each_switch_of_an_emulated_rollout_has_a_row(pretrained: Path, tmp_path: Path) -> None:
    run_case(tmp_path, "emulated", str(pretrained), "--dry")
    rows = {row["switches"]: row for row in rows_in(tmp_path / "emulated.jsonl")}
    switches = {"norm", "rope", "products", "attention", "activation", "logits", "tensor_parallel=2", "serving"}
    assert rows.keys() == switches | {"emulated"}
    gap, scored = rows["emulated"], rows["serving"]
    assert gap["abs_logp_diff_mean"] == pytest.approx(scored["abs_logp_diff_mean"], rel=0.5)
    assert all(row["abs_logp_diff_mean"] > 0 for name, row in rows.items() if name != "products")


@pytest.mark.variants
def test_sampling_from_a_pretrained_model_is_timed_by_phase(pretrained: Path, tmp_path: Path) -> None:
    run_case(tmp_path, "decode_pretrained", str(pretrained), *THREAD, "--dry")
    found = {(row["contender"], row["metric"]) for row in rows_in(tmp_path / "decode_pretrained.jsonl")}
    assert found >= {(name, f"{phase} seconds") for name in ("transformers", "fp32")
                     for phase in ("prefill", "all", "decode")}  # fmt: skip


@pytest.mark.variants
def test_sampling_is_measured_beside_others_in_processes_of_their_own(pretrained: Path, tmp_path: Path) -> None:
    names = ("ours, fp32", "ours, int8 on bf16", "transformers, bf16")
    run_case(tmp_path, "native_beside", "--model", str(pretrained), *THREAD, "--dry", "--only", *names)
    found = {(row["contender"], row["metric"]): row["value"] for row in rows_in(tmp_path / "native_beside.jsonl")}
    assert all(found[name, "prefill seconds"] > 0 for name in names)
    assert found["ours, fp32", "decode step seconds over ours, fp32"] == 1


@pytest.mark.variants
def test_a_decode_steps_limit_and_parts_are_measured(pretrained: Path, tmp_path: Path) -> None:
    run_case(tmp_path, "native_limit", "--model", str(pretrained), *THREAD, "--dry")
    rows = rows_in(tmp_path / "native_limit.jsonl")
    assert {row["case"] for row in rows} == {"decode step, 2 rows", "prefill, 2 rows"}
    for row in rows:
        assert 0 < row["limit"] < row["value"]
        assert 0 < row["parts"]["products with weights"] < 2 * row["value"]  # under the profiler, beside other tests


@pytest.mark.variants
def test_the_peak_is_measured_by_both_libraries(tmp_path: Path) -> None:
    run_case(tmp_path, "peak", "--dry", "--shapes", "tiny")
    assert {row["contender"] for row in rows_in(tmp_path / "peak.jsonl")} == {"tiny", "tiny onednn", "memory"}


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
    rows = rows_in(tmp_path / "doctor_confusion.jsonl")
    healthy, faults = ([row for row in rows if (row["kind"] == "healthy") == which] for which in (True, False))
    assert [(row["side"], row["outcome"] == "wrong") for row in healthy] == [("learner", False), ("rollout", False)]
    assert len({row["kind"] for row in faults}) == 5
    assert all("rows" in row["kind"] for row in faults)
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
    run_case(tmp_path, "substitution", str(measured), str(pretrained), "bf16")
    rows = [json.loads(line) for line in (tmp_path / "substitution.jsonl").read_text().splitlines()]
    assert {row["metric"] for row in rows} == {"cause", "alone"}
    tuned.mkdir()
    (tuned / "tune.jsonl").write_text(json.dumps({"budget": 0.01}) + "\n")
    run_case(tmp_path, "tune", str(tuned))
    assert json.loads((tmp_path / "tune.jsonl").read_text())["budget"] == 0.01


@pytest.mark.variants
def test_two_policies_have_a_row_for_each_form(tmp_path: Path) -> None:
    few = "evaluation.every=1 evaluation.problems=32 evaluation.samples=1 rollout.prompts=4 warm_start.steps=2"
    few += " waltz.feedback.warm_start.steps=2 steps=2 waltz.conversation_frozen=1"
    forms = ("--forms", "bf16-decay", "frozen", "--keep", str(tmp_path / "keep"), "--common", few)
    run_case(tmp_path, "waltz", "0", *forms)
    rows = [json.loads(line) for line in (tmp_path / "waltz.jsonl").read_text().splitlines()]
    assert [(row["form"], row["steps"]) for row in rows] == [("start", 1), ("bf16-decay", 2), ("frozen", 2)]
