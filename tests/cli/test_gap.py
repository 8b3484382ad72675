"""``mantissa gap``: what it prints is what the tokens on disk say; whose log-probs these are; what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mantissa.bench.gap as command
from fake_vllm import install
from html_page import Page
from mantissa.base.errors import MantissaError
from mantissa.base.files import temporary_beside
from mantissa.kernels import NativeKernels
from mantissa.mismatch.estimates import gap_estimates
from mantissa.mismatch.tables import GAP_FIGURES
from mantissa.model import load_model, load_tokenizer
from mantissa.precision import FP32
from mantissa.runs.gap_page import MEANINGS, TITLES, figure_text

ROOT = Path(__file__).parents[2]
Mantissa = Callable[..., Any]
PROMPTS = "12=\n\n345=\n9876543=\n1=\n22=\n31=\n49=\n58=\n60=\n"
NAMES = [figure.name for figure in GAP_FIGURES]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_the_figures_of_the_tokens_on_disk(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    pairs = ("fp32", "bf16/fp16", "fp16+exact")
    argv = ("gap", finished, "--prompts", prompts, "--samples", 2, "--max-tokens", 6, "--temperature", 0.8)
    result = mantissa(*argv, "--pairs", ",".join(pairs), "--out", out, "--json")
    assert result.code == 0, result
    rows, completions = lines(out / "gap.jsonl"), lines(out / "completions.jsonl")
    assert [json.loads(line) for line in result.out.splitlines()] == rows
    assert [row["pair"] for row in rows] == list(pairs)
    assert [row["active"] for row in rows] == ["fp32/fp32", "bf16/fp16", "fp16/fp16"]
    for row in rows:
        mine = [one for one in completions if one["pair"] == row["pair"]]
        assert (row["prompts"], row["completions"], row["interval_over"]) == (9, 18, "prompts")
        both = [torch.zeros(18, 6), torch.zeros(18, 6)]
        for index, one in enumerate(mine):
            for side, name in zip(both, ("rollout_logp", "learner_logp"), strict=True):
                side[index, : len(one[name])] = torch.tensor(one[name])
        lengths = torch.tensor([len(one["tokens"]) - one["prompt_length"] for one in mine])
        mask = torch.arange(6) < lengths[:, None]
        again = gap_estimates(*both, mask, torch.tensor([one["prompt"] for one in mine]))
        for name, one in again.figures.items():
            assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == (one.value, one.low, one.high)
        assert (row["tokens"], row["differing"], row["nonfinite"]) == (int(mask.sum()), again.differing, 0)
    assert rows[0]["abs_logp_diff_mean"] < 1e-6 < 1e-4 < rows[1]["abs_logp_diff_mean"]
    assert rows[2]["differing"] == 0
    # The learner's side is the model's own log-prob of the sampled token, at the temperature asked for.
    model = load_model(finished / "policy")
    for one in (one for one in completions if one["pair"] == "fp32"):
        tokens, start = torch.tensor([one["tokens"]]), one["prompt_length"]
        with torch.no_grad():
            hidden = model(tokens, NativeKernels(FP32))
            logp = (model.logits(hidden[0], NativeKernels(FP32)).double() / 0.8).log_softmax(-1)
        expected = logp[start - 1 : -1].gather(1, tokens[0, start:, None]).squeeze(1)
        assert one["learner_logp"] == pytest.approx(expected.tolist(), abs=1e-5)
    page = Page((out / "gap.html").read_text())
    assert [line[0].split()[0] for line in page.tables[0][1:]] == list(pairs)


def test_screen_and_report_of_a_run_begin_with_it(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = Page((run / "report.html").read_text()).text
    argv = ("gap", run, "--prompts", prompts, "--max-tokens", 4, "--out", run)
    result = mantissa(*argv, "--pairs", "fp32,bf16/fp16")
    assert result.code == 0, result
    assert f"page: {run / 'gap' / 'gap.html'}" in result.out
    said = " ".join(result.out.split())
    assert all(word in said for word in ("k3 KL", "at 0.2", "over prompts", "bf16/fp16"))
    after = (run / "report.html").read_text()
    text = Page(after).text
    assert "The gap of" not in before
    order = [text.index(part) for part in ("The gap of", "Reward and accuracy", "The run", "Training accuracy")]
    assert order == sorted(order)
    assert text.count("Reward and accuracy") == 1
    assert "it holds a gap already" in mantissa(*argv).error()
    rows = (run / "gap" / "completions.jsonl").read_bytes()
    (run / "gap" / "gap.html").unlink()  # as a kill leaves it: rows, and no page yet
    temporary_beside(run / "gap" / "gap.html").touch()
    assert mantissa(*argv, "--pairs", "fp32,bf16/fp16").code == 0
    assert (run / "gap" / "completions.jsonl").read_bytes() == rows
    temporary_beside(run / "report.html").touch()
    (run / "gap" / "completions.jsonl").write_text("{")
    assert mantissa("report", run).code == 0
    assert not list(run.rglob(".*.tmp"))
    assert "rows cannot be read" in Page((run / "report.html").read_text()).text


def test_a_chat_template_is_used_where_there_is_one(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    chat, prompts = tmp_path / "chat", tmp_path / "prompts.txt"
    shutil.copytree(finished / "policy", chat)
    (chat / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    prompts.write_text("12")
    tokens = {}
    for folder in (finished / "policy", chat):
        out = tmp_path / f"{folder.name}-out"
        argv = ("--pairs", "fp32", "--prompts", prompts, "--max-tokens", 2, "--samples", 3, "--out", out)
        assert mantissa("gap", folder, *argv).code == 0
        tokens[folder.name] = [one["tokens"][: one["prompt_length"]] for one in lines(out / "completions.jsonl")]
        assert lines(out / "gap.jsonl")[0]["interval_over"] == "neither"
    tokenizer = load_tokenizer(chat)
    assert tokens == {"policy": [tokenizer.encode("12")] * 3, "chat": [tokenizer.encode("12=")] * 3}


def test_the_same_seed_gives_every_pair_the_same_draws(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path
) -> None:
    found = []
    for seed in (1, 2):
        out = tmp_path / str(seed)
        argv = ("--pairs", "fp32,fp32/fp32", "--prompts", prompts, "--max-tokens", 4, "--seed", seed, "--out", out)
        assert mantissa("gap", finished, *argv).code == 0
        found.append([one["tokens"] for one in lines(out / "completions.jsonl")])
        assert found[-1][:9] == found[-1][9:]
    assert found[0] != found[1]


def test_vllm_samples_and_the_learner_scores(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = install(monkeypatch).made
    out = tmp_path / "out"
    argv = ("gap", finished, "--engine", "vllm", "--prompts", prompts, "--max-tokens", 4, "--out", out)
    result = mantissa(*argv, "--pairs", "fp32,bf16")
    assert result.code == 0, result
    assert [llm.closed for llm in made] == [True, True]
    assert [row["engine"] for row in lines(out / "gap.jsonl")] == ["vLLM 0.32.0"] * 2
    logp = (-torch.arange(4.0)).log_softmax(-1)
    for one in lines(out / "completions.jsonl"):
        sampled = one["tokens"][one["prompt_length"] :]
        assert one["rollout_logp"] == logp[torch.tensor(sampled)].tolist(), "the stand-in's own distribution"
    assert "nothing is equal" in mantissa(*argv, "--pairs", "exact", "--out", tmp_path / "2").error()


def test_a_pair_that_fails_leaves_the_others_and_is_the_error(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = command.Scorer
    monkeypatch.setattr(command, "Scorer", lambda *a: lambda experience: scorer(*a)(experience) + 1e-6)
    argv = ("gap", finished, "--prompts", prompts, "--max-tokens", 4, "--out", tmp_path / "out")
    result = mantissa(*argv, "--pairs", "exact,fp16,fp32/bf16")
    assert result.code == 2
    row = lines(tmp_path / "out" / "gap.jsonl")[0]
    assert f"error: exact: {row['differing']} of {row['tokens']} log-probs differ, and none may\n" in result.err
    monkeypatch.setattr(command, "Scorer", scorer)

    def no_plan(precision: Any, *rest: Any) -> None:
        if precision.learner.exact:
            raise command.MantissaError("no plan here")

    monkeypatch.setattr(command, "exact_plan", no_plan)
    result = mantissa(*argv[:-1], tmp_path / "2", "--pairs", "exact,fp16")
    assert result.err.endswith("error: exact: no plan here\n")
    assert [row["pair"] for row in lines(tmp_path / "2" / "gap.jsonl")] == ["fp16"]


def test_default_pairs_lead_with_a_serving_engine(
    mantissa: Mantissa, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[command.GapConfig] = []

    def noted(config: command.GapConfig, *tell: Any) -> command.GapResult:
        asked.append(config)
        return command.GapResult(Path())

    monkeypatch.setattr(command, "run_gap", noted)
    install(monkeypatch)
    for options in ((), ("--pairs", "bf16"), ("--engine", "vllm")):
        assert mantissa("gap", finished, *options).code == 0
    serving = tuple(f"{name}+serving" for name in ("fp32", "fp16", "bf16", "fp8", "bf16/fp8"))
    assert asked[0].pairs == (*serving, "exact")
    assert [config.own for config in asked] == [32, 32, 32]
    assert asked[2].pairs == ("fp32", "fp16", "bf16", "fp8", "bf16/fp8")
    for config in asked:
        assert list(command.policies_of(config)) == list(config.pairs)


def test_fewer_of_the_packages_own_prompts(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def encode(texts: list[str], *rest: object) -> None:
        counts.append(len(texts))
        raise command.MantissaError("enough")

    monkeypatch.setattr(command, "encode", encode)
    for config in (command.GapConfig(model=str(finished), device="cpu", own=own) for own in (24, 32)):
        with pytest.raises(command.MantissaError, match="enough"):
            command.run_gap(config, print)
    assert counts == [24, 32]


def test_a_gap_of_zero_by_the_same_kernels_is_said_on_screen_and_page(
    mantissa: Mantissa, finished: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zero is made, whatever this processor does: the learner repeats what the rollout said of its tokens."""
    argv = ("gap", finished, "--prompts", prompts, "--max-tokens", 4, "--pairs", "bf16+norm,fp32,fp16")
    for name, off, there in (("equal", 0.0, True), ("apart", 1e-3, False)):

        def scorer(*_: Any, off: float = off) -> Callable[[Any], torch.Tensor]:
            return lambda experience: experience.rollout_logp_BR + off

        monkeypatch.setattr(command, "Scorer", scorer)
        result = mantissa(*argv, "--out", tmp_path / name)
        assert result.code == 0, result
        for text in (result.out, Page((tmp_path / name / "gap.html").read_text()).text):
            said = " ".join(text.split())
            assert ("fp32, fp16: this processor's products do not depend on the batch: our engine and learner agree to "
                    "the bit even without exact kernels" in said) == there  # fmt: skip


def test_the_packages_own_prompts() -> None:
    prompts = command.read_prompts(None)
    assert len(set(prompts)) == 32
    assert all(prompt.isascii() and prompt == prompt.strip() and prompt for prompt in prompts)


def test_explain_says_every_column_without_a_model(mantissa: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = mantissa("gap", "--explain")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    flat = "".join(said.out.split())
    for figure in GAP_FIGURES:
        assert "".join(figure.formula.split()) in flat
        assert "".join(MEANINGS[figure.name].split()) in flat


def test_the_table_of_long_intervals_cuts_no_number_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mantissa.cli.gap import _show

    monkeypatch.setenv("COLUMNS", "80")
    made = [json.loads(line) for line in (ROOT / "results" / "gap.jsonl").read_text().splitlines()][-9:]
    _show(command.GapResult(tmp_path, made))
    out, _, _ = capsys.readouterr().out.partition("page: ")  # a folder's name may be as long as it likes
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for row in made:
        for name in TITLES:
            value, interval = figure_text(row, name)
            words = set(out.split())
            assert value in words
            assert set(interval.replace("..", ".. ").split()) <= words


@pytest.mark.parametrize("name", ["bf16/nvfp4-experts-rollout", "nvfp4-experts", "bf16/nvfp4-experts+exact"])
def test_a_pair_keeps_the_layers_that_its_preset_chooses(name: str) -> None:
    exact = name.endswith("+exact")
    if exact:
        with pytest.raises(MantissaError, match="round to different numbers"):
            command.parse_pair(name)
        return
    policy, _ = command.parse_pair(name)
    assert policy.quantized is not None
    assert policy.quantized.only == ("experts",)
    with pytest.raises(MantissaError, match="one side has it in all layers and the other in some"):
        command.parse_pair("nvfp4/nvfp4-experts")
    assert command.parse_pair("fp8-experts-rollout/bf16")[0].fp8 is None
